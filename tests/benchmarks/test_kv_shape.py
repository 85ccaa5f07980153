"""The size of a KV cache, from a model's configuration, and what servers are started with."""

import json
from pathlib import Path

import pytest

from benchmarks.kv_shape import KVShape, read_shape
from benchmarks.serving.backends import serve_args


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({"num_key_value_heads": 3, "head_dim": 64}, KVShape(30, 3, 64)),
        ({"num_key_value_heads": 3}, KVShape(30, 3, 64)),
        ({"head_dim": 128}, KVShape(30, 9, 128)),  # every query head has its own KV head
    ],
)
def test_a_model_s_shape_is_read(changes: dict[str, int], shape: KVShape, tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_shape(tmp_path) == shape
    assert shape.token_bytes(2) == 2 * 2 * 30 * shape.kv_heads * shape.head_dim


def test_servers_have_room_for_the_model_that_they_serve(tmp_path: Path) -> None:
    def room(args: list[str]) -> int:
        (size,) = [int(arg.partition("=")[2]) for arg in args if arg.startswith("--kv-cache-memory-bytes=")]
        return size

    shapes = {"small": (30, 9, 3, 64), "large": (32, 32, 8, 128)}
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    for name, shape in shapes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(dict(zip(names, shape, strict=True))), encoding="utf-8")
    small, large = (room(serve_args(tmp_path / name, 1024, 2048, filled=False, dtype="float32")) for name in shapes)
    assert small >= 2048 * 2 * 30 * 3 * 64 * 4
    assert large / small == pytest.approx(32 * 8 * 128 / (30 * 3 * 64), rel=1e-6)

"""The layer whose call is timed attends to its tokens, at every depth."""

from pathlib import Path

import pytest
import torch

from benchmarks.kernels.layer_call import decoding_layer, time_calls


@pytest.mark.parametrize("policy", ["dense", "progressive"])
def test_every_depth_gives_full_attention(policy: str, tmp_path: Path) -> None:
    with torch.inference_mode(), decoding_layer({"policy": policy, "num_threads": 1}, tmp_path) as layer:
        layer.check()
        layer.attention.kv_cache.zero_()  # so a depth that reads another cache is found
        with pytest.raises(AssertionError):
            layer.check()


def test_kinds_take_turns_and_the_first_turn_does_not_count() -> None:
    called: list[str] = []
    times = time_calls({name: lambda name=name: called.append(name) for name in ("impl", "native")}, 0.0)
    assert called[0] == "impl"
    assert [called.count(name) for name in ("impl", "native")] == [times["impl"]["values"] + 50] * 2

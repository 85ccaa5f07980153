"""The predictor, its file, and what it refuses."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor import model as model_module
from vllm_hybrid_sparse.predictor.features import FEATURES
from vllm_hybrid_sparse.predictor.model import (
    PARAMETERS,
    SMOLLM2_PREDICTORS,
    ModelShape,
    Predictor,
    PredictorOrigin,
    load_predictor,
)
from vllm_hybrid_sparse.values import PageRanking, RetainedSet

SHAPE = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64)
CODES, BOUNDS = PageRanking(), PageRanking(summary="minmax", code_bits=None)
ORIGIN = PredictorOrigin(
    shape=SHAPE,
    model="a model",
    tau=0.1,
    retained=RetainedSet(),
    ranking=CODES,
    command="calibrate it",
    validation={"reached": 0.75},
)


def made(seed: int = 0) -> Predictor:
    torch.manual_seed(seed)
    predictor = Predictor().eval()
    for buffer in predictor.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 0.5)
    return predictor


def test_it_has_about_110_thousand_parameters() -> None:
    assert sum(weight.numel() for weight in Predictor().parameters()) == PARAMETERS == 109_827


def test_outputs_are_standardised_back_and_features_held_within_ten_deviations() -> None:
    predictor, features = made(), torch.randn(5, len(FEATURES))
    standard = (features - predictor.feature_mean) / predictor.feature_std
    hidden = standard
    for layer in (0, 2, 4):
        hidden = torch.relu(hidden @ predictor.backbone[layer].weight.T + predictor.backbone[layer].bias)
    outputs = hidden @ predictor.outputs.weight.T + predictor.outputs.bias
    properties = predictor.predict(features)
    torch.testing.assert_close(
        properties.base_budget, outputs[:, 0] * predictor.target_std[0] + predictor.target_mean[0]
    )
    torch.testing.assert_close(properties.growth, outputs[:, 1] * predictor.target_std[1] + predictor.target_mean[1])
    torch.testing.assert_close(properties.streaming, outputs[:, 2].sigmoid())
    far = predictor.feature_mean + predictor.feature_std * torch.tensor([[11.0], [1000.0]])
    # One row at a time: a product of matrices need not sum up all its rows in the same order.
    assert torch.equal(predictor(far[:1]), predictor(far[1:]))


def test_a_saved_predictor_comes_back(tmp_path: Path) -> None:
    predictor, path = made(), tmp_path / "predictor.safetensors"
    predictor.save(path, ORIGIN)
    again, origin = load_predictor(path, SHAPE, RetainedSet(), CODES)
    assert origin == ORIGIN
    assert [*tmp_path.iterdir()] == [path]
    features = torch.randn(7, len(FEATURES))
    for before, after in zip(predictor.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(predictor(features), again(features))


FORKED = """
import os, signal, sys, torch
from pathlib import Path
from vllm_hybrid_sparse.predictor.model import ModelShape, load_predictor
from vllm_hybrid_sparse.values import PageRanking, RetainedSet

torch.set_num_threads(2)
shape = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64)
load_predictor(Path(sys.argv[1]), shape, RetainedSet(), PageRanking())
if not os.fork():
    signal.alarm(20)
    torch.ones(2048, 2048).sum()
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) != 0)
"""


def test_a_process_that_has_read_a_predictor_may_be_forked() -> None:
    """vLLM's first process reads it and forks the engine's. There torch would wait for threads that were not forked."""
    script = [sys.executable, "-c", FORKED, str(SMOLLM2_PREDICTORS[CODES])]
    assert subprocess.run(script, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 32}, "made for layers=30, not 32"),
        ({"query_heads": 12}, "made for query_heads=9, not 12"),
        ({"kv_heads": 9}, "made for kv_heads=3, not 9"),
        ({"head_dim": 128}, "made for head_dim=64, not 128"),
    ],
)
def test_another_model_shape_is_refused(changes: dict[str, int], said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    made().save(path, ORIGIN)
    with pytest.raises(
        ConfigError, match=f"^hybrid_sparse.predictor={path}: {said}; make one with `hybrid-sparse calibrate`"
    ):
        load_predictor(path, replace(SHAPE, **changes), RetainedSet(), CODES)


def test_another_retained_set_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    made().save(path, ORIGIN)
    with pytest.raises(ConfigError, match="made for window_tokens=256, not 128"):
        load_predictor(path, SHAPE, RetainedSet(window_tokens=128), CODES)


@pytest.mark.parametrize(
    ("ranking", "said"),
    [
        (BOUNDS, "made for summary=key_codes, not minmax"),
        (replace(CODES, code_bits=1), "made for code_bits=2, not 1"),
    ],
)
def test_what_ranks_the_pages_in_another_way_is_refused(ranking: PageRanking, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.safetensors"
    made().save(path, ORIGIN)
    with pytest.raises(ConfigError, match=said):
        load_predictor(path, SHAPE, RetainedSet(), ranking)


def test_a_file_that_does_not_say_what_ranks_was_made_when_bounds_alone_did(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    content = json.loads(ORIGIN.to_metadata()["hybrid_sparse_predictor"])
    del content["ranking"]
    save_file(made().state_dict(), path, {"hybrid_sparse_predictor": json.dumps(content)})
    assert load_predictor(path, SHAPE, RetainedSet(), BOUNDS)[1] == replace(ORIGIN, ranking=BOUNDS)
    with pytest.raises(ConfigError, match="made for summary=minmax, not key_codes"):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


def test_other_features_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.safetensors"
    made().save(path, ORIGIN)
    monkeypatch.setattr(model_module, "FEATURE_VERSION", 2)
    with pytest.raises(ConfigError, match="feature_version=1: must be 2"):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantiles": [0.9]}, "unexpected keyword argument 'quantiles'"),
        ({"shape": None}, "must be a mapping"),
        ({"feature_version": None}, "feature_version=None: must be"),
    ],
)
def test_metadata_of_another_release_are_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    content = json.loads(ORIGIN.to_metadata()["hybrid_sparse_predictor"]) | changes
    save_file(made().state_dict(), path, {"hybrid_sparse_predictor": json.dumps(content)})
    with pytest.raises(ConfigError, match=rf"^hybrid_sparse.predictor={path}: .*{said}.*; make one with"):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


@pytest.mark.parametrize("text", ["{", '{"tau": ' + "1" * 5000 + "}", "[" * 100_000], ids=["cut", "digits", "nesting"])
def test_metadata_that_are_no_json_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    save_file(made().state_dict(), path, {"hybrid_sparse_predictor": text})
    with pytest.raises(ConfigError, match=rf"^hybrid_sparse.predictor={path}: .*; make one with"):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


def test_tensors_of_another_release_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "later.safetensors"
    tensors = made().state_dict()
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(3)}, path, ORIGIN.to_metadata())
    with pytest.raises(
        ConfigError, match=rf"(?s)^hybrid_sparse.predictor={path}: made by another release .*; make one"
    ):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


def test_what_is_no_predictor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; make one with `hybrid-sparse calibrate`"):
        load_predictor(tmp_path / "missing.safetensors", SHAPE, RetainedSet(), CODES)
    with pytest.raises(
        ConfigError, match=f"^hybrid_sparse.predictor={tmp_path}: must be a file, not a folder; make one"
    ):
        load_predictor(tmp_path, SHAPE, RetainedSet(), CODES)
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors at all")
    with pytest.raises(ConfigError, match="must be a safetensors file"):
        load_predictor(text, SHAPE, RetainedSet(), CODES)
    other = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(1)}, other)
    with pytest.raises(ConfigError, match="must be a file that `hybrid-sparse calibrate` wrote"):
        load_predictor(other, SHAPE, RetainedSet(), CODES)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = 300 * "n"
    with pytest.raises(ConfigError, match=rf"^hybrid_sparse.predictor={tmp_path}/{name}: .*File name too long"):
        load_predictor(tmp_path / name, SHAPE, RetainedSet(), CODES)
    path = tmp_path / "mine.safetensors"
    made().save(path, ORIGIN)

    def refuse(*_args: object, **_named: object) -> None:  # as for another user's file, which root could read
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=rf"^hybrid_sparse.predictor={path}: .*Permission denied"):
        load_predictor(path, SHAPE, RetainedSet(), CODES)


def test_a_shape_that_no_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="layers=0: must be 1 or more"):
        replace(SHAPE, layers=0)
    with pytest.raises(ConfigError, match="query_heads=9: must be a multiple of kv_heads=2"):
        replace(SHAPE, kv_heads=2)


@pytest.mark.parametrize("ranking", [CODES, BOUNDS])
def test_the_shipped_predictors_serve_smollm2_and_say_how_they_were_made(ranking: PageRanking) -> None:
    predictor, origin = load_predictor(SMOLLM2_PREDICTORS[ranking], SHAPE, RetainedSet(), ranking)
    assert origin.command.startswith("hybrid-sparse calibrate SmolLM2-135M-Instruct --texts ")
    assert "/" not in origin.command
    assert 0 < origin.validation["read"] < 1
    properties = predictor.predict(predictor.feature_mean.expand(3, -1))
    assert 0 <= float(properties.streaming[0]) <= 1
    assert torch.isfinite(properties.growth).all()

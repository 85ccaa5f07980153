"""Which predictor serves: the one that is named, else the shipped one if it fits, else none."""

from pathlib import Path

import pytest

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.choice import choose_predictor
from vllm_hybrid_sparse.predictor.model import ModelShape, Predictor, PredictorOrigin
from vllm_hybrid_sparse.values import PageRanking, PredictionSpec, RetainedSet

SMOLLM2 = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=64)
OTHER = ModelShape(layers=30, query_heads=9, kv_heads=3, head_dim=32)
CODES, BOUNDS = PageRanking(), PageRanking(summary="minmax", code_bits=None)


def save(path: Path, shape: ModelShape) -> PredictionSpec:
    origin = PredictorOrigin(
        shape=shape, model="", tau=0.2, retained=RetainedSet(), ranking=CODES, command="", validation={}
    )
    Predictor().save(path, origin)
    return PredictionSpec(predictor=str(path))


def test_without_a_name_the_shipped_one_serves_the_model_it_was_made_for() -> None:
    for ranking in (CODES, BOUNDS):
        _, origin = choose_predictor(PredictionSpec(ranking=ranking), SMOLLM2, RetainedSet())
        assert (origin.model, origin.tau, origin.ranking) == ("SmolLM2-135M-Instruct", 0.1, ranking)


@pytest.mark.parametrize(
    ("shape", "retained", "ranking", "why", "options"),
    [
        (OTHER, RetainedSet(), CODES, "made for head_dim=64, not 32", "--summary key_codes --code-bits 2"),
        (OTHER, RetainedSet(), BOUNDS, "made for head_dim=64, not 32", "--summary minmax"),
        (
            SMOLLM2,
            RetainedSet(window_tokens=128),
            CODES,
            "made for window_tokens=256, not 128",
            "--code-bits 2 --window-tokens 128",
        ),
        (
            SMOLLM2,
            RetainedSet(sink_tokens=128),
            CODES,
            "made for sink_tokens=64, not 128",
            "--code-bits 2 --sink-tokens 128",
        ),
        (SMOLLM2, RetainedSet(), PageRanking(code_bits=1), "made for code_bits=2, not 1", "--code-bits 1"),
    ],
)
def test_where_the_shipped_one_does_not_fit_the_command_that_makes_one_is_named(
    shape: ModelShape, retained: RetainedSet, ranking: PageRanking, why: str, options: str
) -> None:
    with pytest.raises(ConfigError, match=r"hybrid_sparse\.predictor: must be given") as caught:
        choose_predictor(PredictionSpec(ranking=ranking), shape, retained)
    assert why in str(caught.value)
    command = "hybrid-sparse calibrate MODEL --texts FILE... --out predictor.safetensors --summary "
    assert command in str(caught.value)
    assert str(caught.value).endswith(f"{options}`")


def test_the_named_one_serves_and_is_checked(tmp_path: Path) -> None:
    named = save(tmp_path / "named.safetensors", OTHER)
    assert choose_predictor(named, OTHER, RetainedSet())[1].tau == 0.2
    with pytest.raises(
        ConfigError, match=rf"^hybrid_sparse\.predictor={named.predictor}: made for head_dim=32, not 64"
    ):
        choose_predictor(named, SMOLLM2, RetainedSet())
    with pytest.raises(ConfigError, match="no such file"):
        choose_predictor(PredictionSpec(predictor=str(tmp_path / "none")), OTHER, RetainedSet())


def test_a_path_below_nobody_s_home_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hybrid_sparse\.predictor=~no-such-user/p: must be a file's path \("):
        choose_predictor(PredictionSpec(predictor="~no-such-user/p"), SMOLLM2, RetainedSet())

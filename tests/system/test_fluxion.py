"""Fluxion when serving: exact if its predictor asks for everything, the same in a crowd, refused without a predictor.

The engines run one after another in a child process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.completions import difference
from tests.system.engine_jobs import CROWD, alone, answers_of, run_jobs
from tests.system.prompts import shared_byte_prompts
from tests.system.tiny_models import make_tiny_model
from vllm_hybrid_sparse.predictor.model import ModelShape, Predictor, PredictorOrigin
from vllm_hybrid_sparse.values import PageRanking, RetainedSet

ANSWER_TOKENS = 48  # pages leave the window meanwhile
WINDOW = {"sink_tokens": 16, "window_tokens": 64}
CAPACITY_TOKENS = 1600  # little more than one longest request, so that concurrent requests preempt each other
SHAPE = ModelShape(layers=3, query_heads=8, kv_heads=2, head_dim=128)  # of the tiny model


def write_predictor(path: Path, base_budget: float, shape: ModelShape = SHAPE) -> str:
    """Save a predictor that gives every head about this share of the host segment, depending on the head's features."""
    torch.manual_seed(0)
    predictor = Predictor()
    predictor.feature_std.copy_(torch.full_like(predictor.feature_std, 10.0))
    predictor.target_mean.copy_(torch.tensor([base_budget, 0.0]))
    predictor.target_std.copy_(torch.tensor([base_budget / 4 if base_budget < 1 else 0.0, 0.0]))
    with torch.no_grad():
        predictor.outputs.bias[2] = -100.0  # none streams
    origin = PredictorOrigin(
        shape=shape,
        model="tiny",
        tau=0.1,
        retained=RetainedSet(**WINDOW),
        ranking=PageRanking(),
        command="none",
        validation={},
    )
    predictor.save(path, origin)
    return str(path)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each run gave for the same prompts, by name of the run."""
    folder = tmp_path_factory.mktemp("fluxion")
    everything = write_predictor(folder / "everything.safetensors", 1.0)
    little = write_predictor(folder / "little.safetensors", 0.05)
    other = write_predictor(
        folder / "other.safetensors", 0.05, ModelShape(layers=4, query_heads=8, kv_heads=2, head_dim=128)
    )
    kv_bytes = CAPACITY_TOKENS * 3 * 2 * 2 * 128 * 4
    shared: dict[str, Any] = {
        "model": str(make_tiny_model("llama-gqa", folder)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1536,
        "attention_backend": "hybrid_sparse",
        "block_size": 16,
        "kv_cache_memory_bytes": 128 << 20,
    }
    tight = CROWD | {"kv_cache_memory_bytes": kv_bytes + kv_bytes // 16}
    fluxion = WINDOW | {"policy": "fluxion", "dense_tokens": 0}
    jobs = [
        {
            "name": name,
            "engine_args": shared | changes | {"additional_config": {"hybrid_sparse": settings}},
            "prompts": shared_byte_prompts(),
            "max_tokens": ANSWER_TOKENS,
            "margins": True,
        }
        for name, changes, settings in (
            ("dense", alone(1536), {"policy": "dense"}),
            ("everything", tight, fluxion | {"predictor": everything}),
            ("alone", alone(1536), fluxion | {"predictor": little}),
            ("crowd", CROWD, fluxion | {"predictor": little}),
            # Sink, window and candidates through a pool of fewer slots than a layer's windows have pages.
            (
                "device",
                CROWD | {"max_num_seqs": 4},  # prompts take places in the batch before rows that decode
                fluxion
                | {
                    "predictor": little,
                    "device": "emulated",
                    "device_pool_pages": 64,
                    "host_share": "queue",
                    "admission": "none",
                },
            ),
            ("short", alone(1536), fluxion | {"predictor": little, "dense_tokens": 1536}),
            ("shipped", alone(1536), {"policy": "fluxion"}),
            ("other-shape", alone(1536), fluxion | {"predictor": other}),
            ("other-window", alone(1536), {"policy": "fluxion", "predictor": little}),
            ("no-file", alone(1536), fluxion | {"predictor": str(folder / "none.safetensors")}),
        )
    ]
    return run_jobs(jobs, folder / "engines.log")


def wrong_answers(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        f"prompt of {len(prompt)} tokens: {how}"
        for prompt, left, right in zip(shared_byte_prompts(), answers_of(expected), answers_of(found), strict=True)
        if (how := difference(left, right))
    ]


def test_a_predictor_that_selects_everything_answers_as_dense_attention(results: dict[str, dict[str, Any]]) -> None:
    wrong = wrong_answers(results["dense"], results["everything"])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["crowd", "device"])
def test_alone_or_in_a_crowd_in_chunks_and_from_the_prefix_cache(name: str, results: dict[str, dict[str, Any]]) -> None:
    wrong = wrong_answers(results["alone"], results[name])
    assert not wrong, "\n".join(wrong)


def test_it_is_not_dense_attention_by_another_name(results: dict[str, dict[str, Any]]) -> None:
    assert wrong_answers(results["dense"], results["alone"])


def test_requests_up_to_dense_tokens_are_answered_as_by_dense_attention(results: dict[str, dict[str, Any]]) -> None:
    wrong = wrong_answers(results["dense"], results["short"])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (
            "shipped",
            ("hybrid_sparse.predictor: must be given", "layers=30, not 3", "hybrid-sparse calibrate MODEL"),
        ),
        ("other-shape", ("/other.safetensors: made for layers=4, not 3", "hybrid-sparse calibrate")),
        ("other-window", ("/little.safetensors: made for sink_tokens=16, not 64",)),
        ("no-file", ("none.safetensors: no such file", "hybrid-sparse calibrate")),
    ],
)
def test_a_predictor_that_does_not_fit_is_refused(
    results: dict[str, dict[str, Any]], name: str, texts: tuple[str, ...]
) -> None:
    error = results[name].get("error")
    assert error is not None, "the engine started"
    assert not [text for text in texts if text not in error], error

"""Sliding windows that no request is too long for: stock vLLM's answers, and whatever is refused beside other windows.

Requests are as long as the window at most. The engines run one after another in a child process.
"""

import random
from typing import Any

import pytest

from tests.system.completions import differences
from tests.system.engine_jobs import answers_of, jobs_beside_stock, run_jobs
from tests.system.tiny_models import make_tiny_model

FAMILIES = {"mistral-sliding": 200, "gemma3": 150}  # with the window's tokens; Gemma 3 has it in two of three layers
ANSWER_TOKENS = 20
SMALL = {"sink_tokens": 0, "window_tokens": 16}
EVERYTHING: dict[str, dict[str, Any]] = {
    "progressive": {"policy": "progressive", "threshold": 1.0},
    "hgca": {"policy": "hgca", "hgca_beta": 1e-30, **SMALL},
    "device": {"policy": "progressive", "threshold": 1.0, "device": "emulated", "device_pool_pages": 128},
}
FEW = {"policy": "topk", "topk_pages": 1, **SMALL}


def _prompts(window: int) -> list[list[int]]:
    """Random bytes: requests that end as long as the window, a token shorter, and much shorter, each twice."""
    rng = random.Random(0)
    lengths = (33, 100, window - ANSWER_TOKENS - 1, window - ANSWER_TOKENS)
    return 2 * [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock vLLM, one request at a time, and ours in a crowd, from the prefix cache."""
    folder = tmp_path_factory.mktemp("roomy")
    jobs: list[dict[str, Any]] = []
    for family, window in FAMILIES.items():
        task = {"prompts": _prompts(window), "max_tokens": ANSWER_TOKENS, "margins": True}
        shared: dict[str, Any] = {
            "model": str(make_tiny_model(family, folder)),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": window,
            "kv_cache_memory_bytes": 64 << 20,
        }
        jobs += jobs_beside_stock(family, shared, EVERYTHING | {"few": FEW}, task)
    return run_jobs(jobs, folder / "engines.log")


def _differences(results: dict[str, dict[str, Any]], family: str, name: str) -> list[str]:
    return differences(answers_of(results[f"{family} stock"]), answers_of(results[f"{family} {name}"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EVERYTHING)
def test_answers_are_stock_s(results: dict[str, dict[str, Any]], family: str, name: str) -> None:
    assert not _differences(results, family, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_read_in_part(results: dict[str, dict[str, Any]], family: str) -> None:
    assert _differences(results, family, "few")

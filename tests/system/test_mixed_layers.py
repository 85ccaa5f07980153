"""Models whose layers differ: stock vLLM's answers, whatever else happens to the blocks.

vLLM keeps the blocks of layers with a sliding window in separate groups, and takes back blocks that no later token will
see. In layers with smaller heads, its blocks hold more tokens. If some layers keep a state, attention blocks are as
large as that state. The engines run one after another in a child process.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.system.completions import margins_where_parted
from tests.system.engine_jobs import answers_of, jobs_beside_stock, run_jobs
from tests.system.prompts import shared_byte_prompts
from tests.system.tiny_models import make_tiny_model

ANSWER_TOKENS = 40  # pages and blocks leave the windows meanwhile
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "progressive": {"policy": "progressive", "threshold": 1.0},
}
FEW = {"policy": "topk", "topk_pages": 1, "sink_tokens": 0, "window_tokens": 16}


@dataclass(frozen=True, slots=True)
class Served:
    """How a family is served."""

    kv_cache_bytes: int  # so few that some requests are preempted
    dtype: str = "float32"
    close_margin: float = 0.0  # of log-probabilities: answers may differ where stock's best two are closer


FAMILIES = {
    "gemma3": Served(7 << 20),
    "gemma4": Served(3 << 20),
    # Its own answers differ from each other at margins up to 0.031 if requests are computed side by side (ad hoc).
    "qwen3-next": Served(2150 << 10, "bfloat16", close_margin=0.05),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock vLLM, one request at a time, and ours in a crowd, in chunks, from the prefix cache, short of memory."""
    folder = tmp_path_factory.mktemp("mixed")
    task = {"prompts": shared_byte_prompts(), "max_tokens": ANSWER_TOKENS, "margins": True}
    jobs: list[dict[str, Any]] = []
    for family, served in FAMILIES.items():
        shared: dict[str, Any] = {
            "model": str(make_tiny_model(family, folder)),
            "dtype": served.dtype,
            "enforce_eager": True,
            "max_model_len": 1536,
            "kv_cache_memory_bytes": 64 << 20,
        }
        settings = SETTINGS | {"few": FEW}
        jobs += jobs_beside_stock(family, shared, settings, task, kv_cache_memory_bytes=served.kv_cache_bytes)
    return run_jobs(jobs, folder / "engines.log")


def parted(results: dict[str, dict[str, Any]], family: str, name: str) -> list[float]:
    """Stock vLLM's margins where our answers leave stock's."""
    return margins_where_parted(answers_of(results[f"{family} stock"]), answers_of(results[f"{family} {name}"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_stock_s(results: dict[str, dict[str, Any]], family: str, name: str) -> None:
    assert all(margin < FAMILIES[family].close_margin for margin in parted(results, family, name))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_see_everything_are_read_in_part(results: dict[str, dict[str, Any]], family: str) -> None:
    assert max(parted(results, family, "few")) > FAMILIES[family].close_margin

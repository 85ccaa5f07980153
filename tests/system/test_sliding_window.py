"""Models some of whose layers have a sliding window: stock vLLM's answers, whatever else happens to the blocks.

vLLM keeps such layers' blocks in groups of their own, and takes those back that no later token will see. The engines
run one after another in a child process.
"""

from typing import Any

import pytest

from tests.system.completions import differences
from tests.system.engine_jobs import CROWD, alone, answers_of, run_jobs
from tests.system.prompts import shared_byte_prompts
from tests.system.tiny_models import make_tiny_model

ANSWER_TOKENS = 40  # pages and blocks leave the windows meanwhile
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "progressive": {"policy": "progressive", "threshold": 1.0},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock vLLM, one request at a time, and ours in a crowd, in chunks, from the prefix cache, short of memory."""
    folder = tmp_path_factory.mktemp("windows")
    shared: dict[str, Any] = {
        "model": str(make_tiny_model("gemma3", folder)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1536,
        "kv_cache_memory_bytes": 64 << 20,
    }
    ours = {"attention_backend": "hybrid_sparse", "block_size": 16, "kv_cache_memory_bytes": 12 << 20}
    task = {"prompts": shared_byte_prompts(), "max_tokens": ANSWER_TOKENS, "margins": True}
    jobs = [{"name": "stock", "engine_args": shared | alone(1536), **task}]
    for name, settings in SETTINGS.items():
        engine_args = shared | CROWD | ours | {"additional_config": {"hybrid_sparse": settings}}
        jobs.append({"name": name, "engine_args": engine_args, **task})
    few = {"hybrid_sparse": {"policy": "topk", "topk_pages": 1, "sink_tokens": 0, "window_tokens": 16}}
    jobs.append({"name": "few", "engine_args": shared | CROWD | ours | {"additional_config": few}, **task})
    return run_jobs(jobs, folder / "engines.log")


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_stock_s(results: dict[str, dict[str, Any]], name: str) -> None:
    assert not differences(answers_of(results["stock"]), answers_of(results[name]))


def test_layers_without_a_window_are_read_in_part(results: dict[str, dict[str, Any]]) -> None:
    assert differences(answers_of(results["stock"]), answers_of(results["few"]))

"""Drafts from the text (n-grams): each token of a step attends as it would alone, so the answers stay what they were.

Stock vLLM 0.32 cannot make another engine in a process in which one has speculated, so engines with drafts come last.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.system.completions import differences
from tests.system.engine_jobs import CROWD, alone, answers_of, run_jobs
from tests.system.prompts import load_tokenizer, repeating_prompts
from tests.system.variants import kv_cache_bytes

ANSWER_TOKENS = 24
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
PROGRESSIVE = {"policy": "progressive", "threshold": 1.0}
FEW = {"policy": "topk", "topk_pages": 2, "sink_tokens": 0, "window_tokens": 16}
MODEL_TOKENS = 640
AMPLE_TOKENS = 8192
SCARCE_TOKENS = 664  # hardly more than the longest request, or than the three others' prompts
COUNTERS = (
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:num_preemptions",
)


@pytest.fixture(scope="module")
def results(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One request at a time without drafts, and in a crowd with them, in chunks and from the prefix cache.

    Tokens computed anew after a preemption attend exactly, so only an exact policy is short of memory.
    """
    folder = tmp_path_factory.mktemp("speculation")
    prompts = repeating_prompts(load_tokenizer(smollm2))

    def job(name: str, settings: dict[str, Any] | None, drafts: bool, cached_tokens: int) -> dict[str, Any]:
        engine_args: dict[str, Any] = {
            "model": str(smollm2),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MODEL_TOKENS,
            "kv_cache_memory_bytes": kv_cache_bytes("dense" if settings is None else "progressive", cached_tokens),
        }
        engine_args |= CROWD if drafts else alone(MODEL_TOKENS)
        if drafts:
            engine_args |= {"speculative_config": NGRAM, "disable_log_stats": False}
        if settings is not None:
            engine_args |= {"attention_backend": "hybrid_sparse", "block_size": 16}
            engine_args["additional_config"] = {"hybrid_sparse": settings}
        return {
            "name": name,
            "engine_args": engine_args,
            "prompts": prompts,
            "max_tokens": ANSWER_TOKENS,
            "margins": True,
            "counters": COUNTERS if drafts else (),
        }

    first = [
        job("stock", None, drafts=False, cached_tokens=AMPLE_TOKENS),
        job("few", FEW, drafts=False, cached_tokens=AMPLE_TOKENS),
        job("progressive, drafts", PROGRESSIVE, drafts=True, cached_tokens=SCARCE_TOKENS),
    ]
    last = job("few, drafts", FEW, drafts=True, cached_tokens=AMPLE_TOKENS)
    return run_jobs(first, folder / "first.log") | run_jobs([last], folder / "last.log")


@pytest.mark.parametrize(
    ("undrafted", "drafting", "preempts"), [("stock", "progressive, drafts", True), ("few", "few, drafts", False)]
)
def test_drafts_change_no_answer(
    results: dict[str, dict[str, Any]], undrafted: str, drafting: str, preempts: bool
) -> None:
    found = answers_of(results[drafting])
    drafted, accepted, preempted = results[drafting]["counters"]
    assert 30 < accepted < drafted - 10, "next to nothing was accepted, or taken back: the case is not tested"
    assert (preempted > 0) == preempts
    assert not differences(answers_of(results[undrafted]), found)


def test_few_pages_answer_otherwise(results: dict[str, dict[str, Any]]) -> None:
    """Otherwise nothing would depend on what a row chooses."""
    assert differences(answers_of(results["stock"]), answers_of(results["few"]))

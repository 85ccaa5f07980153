"""What HGCA answers depends on the prompt alone: not on chunks, the prefix cache, or who is served beside it.

The engines run one after another in a child process.
"""

import random
from typing import Any

import pytest

from tests.system.completions import Answer, difference
from tests.system.engine_jobs import answers_of, run_jobs
from tests.system.tiny_models import make_tiny_model

ANSWER_TOKENS = 48  # pages leave the window meanwhile
SHARED_TOKENS = 512
SETTINGS = {"policy": "hgca", "hgca_beta": 1.0, "sink_tokens": 16, "window_tokens": 64}


def shared_prompts() -> list[list[int]]:
    """Random byte tokens: prompts with a beginning in common, of whole and of broken pages, each twice."""
    rng = random.Random(0)
    beginning = [rng.randrange(256) for _ in range(SHARED_TOKENS)]
    prompts = [beginning + [rng.randrange(256) for _ in range(length)] for length in (1, 16, 17, 100, 256, 257, 700)]
    return prompts + [list(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """The answers to the same prompts by name of the run."""
    folder = tmp_path_factory.mktemp("hgca")
    shared: dict[str, Any] = {
        "model": str(make_tiny_model("llama-gqa", folder)),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 128 << 20,
        "attention_backend": "hybrid_sparse",
        "block_size": 16,
    }
    alone = {"max_num_batched_tokens": 2048, "max_num_seqs": 1, "enable_prefix_caching": False}
    crowd = {"max_num_batched_tokens": 200, "max_num_seqs": 16, "enable_prefix_caching": True}
    jobs = [
        {
            "name": name,
            "engine_args": shared | changes | {"additional_config": {"hybrid_sparse": settings}},
            "prompts": shared_prompts(),
            "max_tokens": ANSWER_TOKENS,
            "margins": True,
        }
        for name, changes, settings in (
            ("dense", alone, {"policy": "dense"}),
            ("alone", alone, SETTINGS),
            ("crowd", crowd, SETTINGS),
            # The window through a pool of fewer slots than a layer's windows have pages.
            ("device", crowd, {**SETTINGS, "device": "emulated", "device_pool_pages": 64}),
        )
    ]
    results = run_jobs(jobs, folder / "engines.log")
    return {name: answers_of(result) for name, result in results.items()}


@pytest.mark.parametrize("name", ["crowd", "device"])
def test_alone_or_in_a_crowd_in_chunks_and_from_the_prefix_cache(name: str, answers: dict[str, list[Answer]]) -> None:
    wrong = [
        f"prompt of {len(prompt)} tokens: {how}"
        for prompt, alone, crowd in zip(shared_prompts(), answers["alone"], answers[name], strict=True)
        if (how := difference(alone, crowd))
    ]
    assert not wrong, "\n".join(wrong)


def test_it_is_not_dense_attention_by_another_name(answers: dict[str, list[Answer]]) -> None:
    pairs = list(zip(answers["dense"], answers["alone"], strict=True))
    assert any(dense.token_ids != sparse.token_ids for dense, sparse in pairs)

"""HGCA's answers depend on the prompt alone: not on chunks, the prefix cache or other requests.

The engines run one after another in a child process.
"""

from typing import Any

import pytest

from tests.system.completions import Answer, difference
from tests.system.engine_jobs import CROWD, alone, answers_of, run_jobs
from tests.system.prompts import shared_byte_prompts
from tests.system.tiny_models import make_tiny_model

ANSWER_TOKENS = 48  # pages leave the window meanwhile
SETTINGS = {"policy": "hgca", "hgca_beta": 1.0, "sink_tokens": 16, "window_tokens": 64}


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
    jobs = [
        {
            "name": name,
            "engine_args": shared | changes | {"additional_config": {"hybrid_sparse": settings}},
            "prompts": shared_byte_prompts(),
            "max_tokens": ANSWER_TOKENS,
            "margins": True,
        }
        for name, changes, settings in (
            ("dense", alone(2048), {"policy": "dense"}),
            ("alone", alone(2048), SETTINGS),
            ("crowd", CROWD, SETTINGS),
            # The window through a pool of fewer slots than a layer's windows have pages. Four run at once, so that
            # prompts take places in the batch before rows that decode.
            (
                "device",
                CROWD | {"max_num_seqs": 4},
                {**SETTINGS, "device": "emulated", "device_pool_pages": 64, "admission": "none"},
            ),
        )
    ]
    results = run_jobs(jobs, folder / "engines.log")
    return {name: answers_of(result) for name, result in results.items()}


@pytest.mark.parametrize("name", ["crowd", "device"])
def test_alone_or_in_a_crowd_in_chunks_and_from_the_prefix_cache(name: str, answers: dict[str, list[Answer]]) -> None:
    wrong = [
        f"prompt of {len(prompt)} tokens: {how}"
        for prompt, left, right in zip(shared_byte_prompts(), answers["alone"], answers[name], strict=True)
        if (how := difference(left, right))
    ]
    assert not wrong, "\n".join(wrong)


def test_it_is_not_dense_attention_by_another_name(answers: dict[str, list[Answer]]) -> None:
    pairs = list(zip(answers["dense"], answers["alone"], strict=True))
    assert any(dense.token_ids != sparse.token_ids for dense, sparse in pairs)

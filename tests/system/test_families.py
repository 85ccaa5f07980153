"""Tiny random-weight models of the families that users run: the same greedy tokens as stock vLLM, in fp32.

The engines run one after another in a child process; `test_families_over_http.py` does the same through servers.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.adapters import RANK, make_adapter
from tests.system.completions import difference, margins_where_parted
from tests.system.engine_jobs import answers_of, run_jobs
from tests.system.tiny_models import SERVED, SERVED_TOO, make_tiny_model

ANSWER_TOKENS = 32
LENGTHS = (1, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 255, 257, 319, 320, 321, 336, 400, 700, 1000, 1500)
EXACT_SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense"},
    "progressive": {"policy": "progressive", "threshold": 1.0},
    "topk-everything": {"policy": "topk", "topk_ratio": 1.0},
    "hgca-everything": {"policy": "hgca", "hgca_beta": 1e-30},
    "psa": {"policy": "progressive", "threshold": 1.0, "summary": "minmax"},
}


WITH_EVERY_SETTING = ("llama-mha", "llama-gqa")
EVERY_FAMILY = ("dense", "progressive")  # they differ in what they read
NARROW = "llama-gqa"  # the family that is served with narrower KV caches, too
NARROWER = {"bfloat16": 0.05, "fp8": 0.15}
"""Dtypes, and below what margin of log-probabilities each may change a token: the median is 0.2, the largest that were
seen 0.015 and 0.074."""
ADAPTED = "llama-gqa"  # the family that is served with a LoRA adapter, too


def byte_prompts(seed: int) -> list[list[int]]:
    """Return random byte tokens, one prompt a length."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


def _engine_args(model: Path, **changes: object) -> dict[str, Any]:
    shared = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 128 << 20,
    }
    return shared | changes


def _ours(settings: dict[str, Any]) -> dict[str, Any]:
    return {"attention_backend": "hybrid_sparse", "additional_config": {"hybrid_sparse": settings}}


def settings_of(family: str) -> list[str]:
    """The settings that a family is served with."""
    return list(EXACT_SETTINGS) if family in WITH_EVERY_SETTING or family in SERVED_TOO else list(EVERY_FAMILY)


def jobs_of(family: str, model: Path) -> list[dict[str, Any]]:
    """Return the engine runs of one family: stock vLLM first, then each exact setting of ours."""
    prompts = byte_prompts(seed=len(family))
    task = {"prompts": prompts, "max_tokens": ANSWER_TOKENS}
    jobs = [{"name": f"{family} stock", "engine_args": _engine_args(model), "margins": True, **task}]
    for name in settings_of(family):
        engine_args = _engine_args(model, block_size=16, **_ours(EXACT_SETTINGS[name]))
        jobs.append({"name": f"{family} {name}", "engine_args": engine_args, **task})
    if family == NARROW:
        for stored in NARROWER:
            narrow = _engine_args(model, kv_cache_dtype=stored, **_ours({"policy": "dense"}))
            jobs.append({"name": f"{family} {stored}", "engine_args": narrow, **task})
    return jobs


def jobs_with_adapter(model: Path, adapter: Path) -> list[dict[str, Any]]:
    """Return the runs of a model whose every second request has a LoRA adapter, as `jobs_of`, and "adapter bare":
    stock vLLM without it on the same prompts.
    """
    bare = {"prompts": byte_prompts(seed=1), "max_tokens": ANSWER_TOKENS}
    task = bare | {"adapter": str(adapter)}
    # On CPUs vLLM 0.32 gives rows without an adapter the one in the last place, so that has to stay empty.
    adapted = _engine_args(model, enable_lora=True, max_lora_rank=RANK, max_loras=2)
    return [
        {"name": "adapter bare", "engine_args": _engine_args(model), **bare},
        {"name": "adapter stock", "engine_args": adapted, "margins": True, **task},
        *(
            {"name": f"adapter {name}", "engine_args": adapted | _ours(EXACT_SETTINGS[name]), **task}
            for name in EVERY_FAMILY
        ),
    ]


def _jobs_of_all(families: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    return [job for family in families for job in jobs_of(family, make_tiny_model(family, folder))]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All runs of the common families, and those with an adapter."""
    folder = tmp_path_factory.mktemp("families")
    jobs = _jobs_of_all(list(SERVED), folder)
    model = make_tiny_model(ADAPTED, folder)
    return run_jobs(jobs + jobs_with_adapter(model, make_adapter(model, folder)), folder / "engines.log")


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All runs of the less common head sizes and groups."""
    folder = tmp_path_factory.mktemp("families")
    return run_jobs(_jobs_of_all(list(SERVED_TOO), folder), folder / "engines.log")


def _check(results: dict[str, dict[str, Any]], family: str, setting: str) -> None:
    stock, ours = answers_of(results[f"{family} stock"]), answers_of(results[f"{family} {setting}"])
    assert len(stock) == len(LENGTHS) == len({answer.token_ids for answer in stock})
    distinct_tokens = sum(len(set(answer.token_ids)) for answer in stock)
    assert distinct_tokens > len(stock) * ANSWER_TOKENS / 3, "the model repeats itself: such answers prove nothing"
    wrong = [
        f"prompt of {length} tokens: {how}"
        for length, expected, found in zip(LENGTHS, stock, ours, strict=True)
        if (how := difference(expected, found))
    ]
    assert not wrong, f"{len(wrong)} of {len(LENGTHS)} answers differ from CPU_ATTN's:\n" + "\n".join(wrong)


def _cases() -> list[tuple[str, str]]:
    return [(family, setting) for family in SERVED for setting in settings_of(family)]


@pytest.mark.parametrize(("family", "setting"), _cases())
def test_family_answers_as_stock(results: dict[str, dict[str, Any]], family: str, setting: str) -> None:
    """Llama with MHA and GQA, Qwen2.5, Qwen3, Mistral, OPT and GPT-NeoX."""
    _check(results, family, setting)


@pytest.mark.parametrize("setting", EVERY_FAMILY)
def test_requests_with_and_without_an_adapter_answer_as_stock(results: dict[str, dict[str, Any]], setting: str) -> None:
    """LoRA on queries, keys and values; every second request has it, so batches hold both kinds."""
    _check(results, "adapter", setting)
    bare, adapted = answers_of(results["adapter bare"]), answers_of(results["adapter stock"])
    changed = [without.token_ids != with_it.token_ids for without, with_it in zip(bare, adapted, strict=True)]
    assert changed == [place % 2 == 1 for place in range(len(changed))], "the adapter is not where it should be"


@pytest.mark.parametrize("stored", NARROWER)
def test_a_narrower_kv_cache_changes_only_close_decisions(results: dict[str, dict[str, Any]], stored: str) -> None:
    """The case is a float32 model whose keys and values are stored in fewer bits."""
    parted = margins_where_parted(answers_of(results[f"{NARROW} stock"]), answers_of(results[f"{NARROW} {stored}"]))
    assert parted, "no decision differs: the cache is not narrower"
    assert max(parted) < NARROWER[stored]


@pytest.mark.slow
@pytest.mark.parametrize("setting", EXACT_SETTINGS)
@pytest.mark.parametrize("family", SERVED_TOO)
def test_uncommon_shape_answers_as_stock(more_results: dict[str, dict[str, Any]], family: str, setting: str) -> None:
    """Groups of 3 and 8 at head_dim 64, head_dim 80 and 96."""
    _check(more_results, family, setting)

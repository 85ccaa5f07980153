"""Requests served side by side through the emulated device answer as stock vLLM does, whatever fits its pool."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.completions import complete, differences
from tests.system.engine_jobs import answers_of, run_jobs
from tests.system.prompts import load_tokenizer, shared_prefix_prompts
from tests.system.test_families import byte_prompts
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server

ANSWER_TOKENS = 12
REAL_ANSWER_TOKENS = 6
SMALLEST: dict[str, dict[str, Any]] = {
    "dense": {"policy": "dense", "device_pool_pages": 16},
    "progressive": {
        "policy": "progressive",
        "threshold": 1.0,
        "microbatch_pages": 8,
        "device_pool_pages": 48,
        "device_pool": "per_layer",
        "device_eviction": "fifo",
    },
    "psa": {
        "policy": "progressive",
        "threshold": 1.0,
        "microbatch_pages": 8,
        "remainder": "lightest_page",
        "device_pool_pages": 16,
        "host_share": "queue",
    },
}

# Some of the requests get frames of 32 tokens, and the device alone reads these. The others have two-tier rows.
RESIDENT: dict[str, Any] = {
    "policy": "progressive",
    "threshold": 1.0,
    "device_pool_pages": 420,
    "device_resident_share": 0.9,
}

# The device chooses the pages of ranked rows by itself; others may have frames. In the end it reads all pages.
RANKED: dict[str, dict[str, Any]] = {
    "ranked": {"policy": "progressive", "threshold": 1.0, "device_pool_pages": 64, "device_ranking": "device"},
    "ranked or resident": RESIDENT | {"device_resident_share": 0.6, "device_ranking": "device"},
}


def prompts() -> list[list[int]]:
    """Random byte tokens of every length around pages, and two longer ones that begin alike."""
    made = [prompt for prompt in byte_prompts(seed=3) if len(prompt) < 500]
    return [*made, made[-1] + made[-2], made[-1] + made[-3]]


def real_prompts(model: Path) -> list[list[int]]:
    """Prose for SmolLM2, two of the three with a beginning in common."""
    made = shared_prefix_prompts(load_tokenizer(model))
    return [made[0][:500], made[1][:330], made[2][:45]]


def _job(name: str, model: Path, **changes: Any) -> dict[str, Any]:
    engine_args = {
        "model": str(model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 200,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return {
        "name": name,
        "engine_args": engine_args | changes,
        "prompts": prompts(),
        "max_tokens": ANSWER_TOKENS,
        "margins": True,
    }


@pytest.fixture(scope="module")
def results(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock vLLM and each setting, one after another; ours with so little KV memory that blocks are used again.

    Also what stock vLLM answers with SmolLM2, one prompt at a time.
    """
    folder = tmp_path_factory.mktemp("device")
    model = make_tiny_model("llama-gqa", folder)
    jobs = [_job("stock", model)]
    for name, settings in {**SMALLEST, "resident": RESIDENT, **RANKED}.items():
        ours = {"attention_backend": "hybrid_sparse", "block_size": 32, "kv_cache_memory_bytes": 12 << 20}
        device = {"hybrid_sparse": {"device": "emulated", "admission": "none", **settings}}
        jobs.append(_job(name, model, **ours, additional_config=device) | {"entered": "resident" in name})
    per_layer = SMALLEST["progressive"] | {"device_pool_pages": 47}
    refused = {"hybrid_sparse": {"device": "emulated", **per_layer}}
    jobs.append(_job("too small", model, attention_backend="hybrid_sparse", additional_config=refused))
    real = _job("stock smollm2", smollm2, max_num_seqs=1, enable_prefix_caching=False, kv_cache_memory_bytes=160 << 20)
    jobs.append(real | {"prompts": real_prompts(smollm2), "max_tokens": REAL_ANSWER_TOKENS})
    return run_jobs(jobs, folder / "engines.log")


@pytest.mark.parametrize("setting", SMALLEST)
def test_a_pool_of_one_group_answers_as_stock(results: dict[str, dict[str, Any]], setting: str) -> None:
    assert not differences(answers_of(results["stock"]), answers_of(results[setting]))


def test_rows_that_the_device_reads_alone_answer_as_stock(results: dict[str, dict[str, Any]]) -> None:
    assert not differences(answers_of(results["stock"]), answers_of(results["resident"]))
    frames = int(0.9 * 420) // (3 * 2 * 2)  # layers, KV heads, pages of a block
    assert results["resident"]["entered"] > frames  # so that frames had several blocks


@pytest.mark.parametrize("setting", RANKED)
def test_rows_that_the_device_ranks_answer_as_stock(results: dict[str, dict[str, Any]], setting: str) -> None:
    assert not differences(answers_of(results["stock"]), answers_of(results[setting]))
    assert results[setting].get("entered", 1) > 0


def test_a_pool_that_holds_no_group_of_every_layer_is_refused(results: dict[str, dict[str, Any]]) -> None:
    error = results["too small"].get("error")
    assert error is not None, "the engine started"
    assert re.search(
        r"device_pool_pages=47: must be at least 48, two microbatches of one KV head, for each of 3", error
    )


def _evicted(server: Server) -> int:
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    return sum(int(count) for count in re.findall(r"device pool hit .*? (\d+) evicted", log))


@pytest.mark.parametrize("setting", ["dense", pytest.param("psa", marks=pytest.mark.slow)])
def test_smollm2_over_http_answers_as_stock(
    setting: str, results: dict[str, dict[str, Any]], smollm2: Path, tmp_path: Path
) -> None:
    """A real model of 30 layers on a server of ours. The layers take turns at the same few slots."""
    args = [
        *stock_args("float32", 1024, kv_cache_bytes=160 << 20),
        *our_args(device="emulated", admission="none", log_interval_s=1, **SMALLEST[setting]),
        "--enforce-eager",
        "--max-num-batched-tokens=256",
    ]
    asked = real_prompts(smollm2)
    with Server(smollm2, args, server_env(), tmp_path / "server.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        answers = complete(server, asked, REAL_ANSWER_TOKENS, concurrency=len(asked))
        assert _evicted(server) > 0, "no line of the log says that a page was evicted"
    assert not differences(answers_of(results["stock smollm2"]), answers)

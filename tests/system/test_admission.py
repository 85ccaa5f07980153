"""Servers with too little device pool or host memory, or with failing loads: all answers are those of stock vLLM."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.system.completions import Answer, complete, differences, metric, post
from tests.system.engine_jobs import answers_of, run_jobs
from tests.system.failing_worker import REASON
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.glue.metric_families import PREFIX

LAYERS, KV_HEADS = 3, 2  # of the tiny model
MOST_TOKENS, ANSWER_TOKENS = 1024, 40
LENGTHS = (340, 411, 480, 512, 577, 700, 850, 960)
MICROBATCH_PAGES = 8
WORKING_SET_PAGES = LAYERS * KV_HEADS * (4 + 16 + 1 + 2 * MICROBATCH_PAGES)  # of a long request
EXACT = {"policy": "progressive", "threshold": 1.0, "microbatch_pages": MICROBATCH_PAGES, "log_interval_s": 1}
SHARED = ["--enforce-eager", "--max-num-batched-tokens=256", "--no-enable-prefix-caching"]
ROOT = Path(__file__).resolve().parents[2]


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that all servers here serve."""
    return make_tiny_model("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Stock vLLM, one prompt at a time, and an engine of ours whose host store is too small for the longest request."""
    shared = {"model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": MOST_TOKENS}
    stock = {"max_num_seqs": 1, "enable_prefix_caching": False, "kv_cache_memory_bytes": 64 << 20}
    too_small = {
        "kv_cache_memory_bytes": 4 << 20,
        "attention_backend": "hybrid_sparse",
        "additional_config": {"hybrid_sparse": {"device": "emulated", **EXACT}},
    }
    jobs = [
        {
            "name": "stock",
            "engine_args": shared | stock,
            "prompts": prompts(),
            "max_tokens": ANSWER_TOKENS,
            "margins": True,
        },
        {"name": "too small", "engine_args": shared | too_small},
    ]
    return run_jobs(jobs, tmp_path_factory.mktemp("engines") / "engines.log", timeout_s=600)


@pytest.fixture(scope="module")
def expected(results: dict[str, dict[str, Any]]) -> list[Answer]:
    """Stock vLLM's answers, each computed alone."""
    return answers_of(results["stock"])


@contextmanager
def watched(server: Server, name: str) -> Iterator[list[float]]:
    """The values of a metric while the body runs."""
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(metric(server, name))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()


@pytest.mark.parametrize("admission", ["working_set", "none"])
def test_a_pool_of_one_working_set_serves_a_crowd(
    model: Path, expected: list[Answer], admission: str, tmp_path: Path
) -> None:
    """Eight requests at once: by working set, one runs and the others wait; otherwise all run. Answers are stock's."""
    ours = our_args(device="emulated", device_pool_pages=WORKING_SET_PAGES, admission=admission, **EXACT)
    args = [*stock_args("float32", MOST_TOKENS, 64 << 20), *SHARED, *ours]
    with Server(model, args, server_env(), tmp_path / "server.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        with watched(server, "vllm:num_requests_running") as running:
            answers = complete(server, prompts(), ANSWER_TOKENS, concurrency=len(LENGTHS))
        assert not differences(expected, answers)
        assert max(running) == 1 if admission == "working_set" else max(running) > 2
        assert metric(server, f"{PREFIX}device_evicted_pages_total") > 0
        assert (
            0 < metric(server, f"{PREFIX}device_hit_pages_total") < metric(server, f"{PREFIX}device_wanted_pages_total")
        )
        log = server.log_path.read_text(encoding="utf-8", errors="replace")
        of_a_layer = WORKING_SET_PAGES // LAYERS
        said = f"{of_a_layer} pages of a layer for one of 1024 tokens, and the device pool has {of_a_layer}"
        assert log.count(said) == (admission == "working_set")


def test_failed_loads_and_a_full_store_change_no_answer(model: Path, expected: list[Answer], tmp_path: Path) -> None:
    """One page can never be loaded, and host memory holds less than two long requests: preempted ones come back."""
    ours = our_args(device="emulated", device_pool_pages=4 * WORKING_SET_PAGES, **EXACT)
    args = [
        *stock_args("float32", MOST_TOKENS, 12 << 20),
        *SHARED,
        *ours,
        "--block-size=32",
        "--worker-cls=tests.system.failing_worker.FailingLoads",
    ]
    env = server_env() | {"PYTHONPATH": str(ROOT)}
    with Server(model, args, env, tmp_path / "server.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        assert metric(server, f"{PREFIX}device_failed_loads_total") == 0
        for _ in range(5):  # which requests run side by side, and so outgrow the store, depends on how they come in
            answers = complete(server, prompts(), ANSWER_TOKENS, concurrency=len(LENGTHS))
            assert not differences(expected, answers)
            if metric(server, "vllm:num_preemptions_total"):
                break
        assert metric(server, f"{PREFIX}device_failed_loads_total") > 1
        assert metric(server, "vllm:num_preemptions_total") > 0
        log = server.log_path.read_text(encoding="utf-8", errors="replace")
        assert log.count(REASON) == 1, "the first failure is logged, the others are counted"
        status, body = post(server, {"model": server.model, "prompt": [7] * (MOST_TOKENS + 1), "max_tokens": 1})
        assert status == 400, body
        assert str(MOST_TOKENS) in body
        assert not differences(expected[:3], complete(server, prompts()[:3], ANSWER_TOKENS, concurrency=3))


def test_a_store_that_holds_no_longest_request_is_refused_at_start(results: dict[str, dict[str, Any]]) -> None:
    """A prompt within the limits of the model can then always be served, if only alone."""
    error = results["too small"].get("error")
    assert error is not None, "the engine started"
    assert "1024" in error
    assert "KV cache" in error

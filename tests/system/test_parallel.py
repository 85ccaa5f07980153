"""Several workers: each has its part of the heads, of the layers or of the requests, and the same tokens come out.

What one worker of a group computes is right only if its host store, its summaries and its block tables are those of its
own part. So stock vLLM, split up in the same way, is compared with `progressive` at a threshold of 1.
"""

import os
from pathlib import Path

import pytest

from tests.system.completions import complete, differences, metric
from tests.system.test_families import ANSWER_TOKENS, byte_prompts
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.glue.metric_families import PREFIX

ARGS = [*stock_args("float32", 2048, kv_cache_bytes=128 << 20), "--max-num-batched-tokens=256"]
SELECTIONS_A_ROW = {  # those of the worker that vLLM reads: the model has 3 layers of 2 KV heads
    "tensor": 3 * 1,
    "pipeline": 1 * 2,  # the last stage has one layer
    "data": 3 * 2,
}


def env_of_two_workers() -> dict[str, str]:
    """Environment of a server with two workers, each of which has a part of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    parts = (cores[0::2], cores[1::2] or cores)
    return {**server_env(), "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


@pytest.mark.parametrize(
    "split", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow), pytest.param("data", marks=pytest.mark.slow)]
)
def test_two_workers_answer_as_stock(split: str, tmp_path: Path) -> None:
    """All prompts at once, and again when the prefix cache has them. The counters are of one worker of a group."""
    model = make_tiny_model("qwen3", tmp_path)
    prompts = byte_prompts(seed=5)
    args = [*ARGS, f"--{split}-parallel-size=2"]
    if split != "pipeline":  # eager, vLLM 0.32 skips the warm-up, and a CPU's second stage fails without it
        args.append("--enforce-eager")
    ours = [*our_args(policy="progressive", threshold=1.0), "--block-size=16"]
    with Server(model, args, env_of_two_workers(), tmp_path / "stock.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        expected = complete(server, prompts, ANSWER_TOKENS, concurrency=8, margins=True)
    with Server(model, args + ours, env_of_two_workers(), tmp_path / "ours.log") as server:
        server.wait_ready(START_TIMEOUT_S)
        for _ in range(2):
            assert not differences(expected, complete(server, prompts, ANSWER_TOKENS, concurrency=8))
        rows = metric(server, f"{PREFIX}decode_rows_total")
        selections = metric(server, f"{PREFIX}selections_total")
    assert rows >= 2 * len(prompts) * (ANSWER_TOKENS - 1)
    assert selections == rows * SELECTIONS_A_ROW[split]

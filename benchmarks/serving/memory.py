"""Resident memory of the worker after 20 and after 200 requests of random lengths, ours beside stock vLLM.

    python -m benchmarks.serving.memory [--model PATH] [--requests 20,200]

The KV cache is small, so that the first requests have touched all of it and what grows later is kept by mistake.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import START_TIMEOUT_S, make_pair, serve_args, stop_servers_when_terminated
from benchmarks.serving.cases import POLICIES
from benchmarks.serving.streams import stream_all
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir

MODEL_TOKENS = 2048
CACHED_TOKENS = 3 * MODEL_TOKENS
AT_ONCE = 8
ALLOWED_GROWTH = 0.02  # of the resident memory after the first requests
_ANSWER_TOKENS = (1, 48)
_TOKEN_IDS = (3, 200)  # in every vocabulary


def worker_of(server: Server) -> psutil.Process:
    """Return the process that computes for a running server; RuntimeError where there is not exactly one."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        ancestors = [" ".join(parent.cmdline()) for parent in process.parents()]
        if "Worker" in title and any(f"--port {server.port} " in f"{line} " for line in ancestors):
            workers.append(process)
    if len(workers) != 1:
        raise RuntimeError(f"{len(workers)} workers of the server on port {server.port}: must be one")
    return workers[0]


def send_random_requests(server: Server, number: int, rng: random.Random) -> None:
    """Complete `number` random prompts of random lengths, several at once."""
    for start in range(0, number, AT_ONCE):
        prompts = [
            [rng.randint(*_TOKEN_IDS) for _ in range(rng.randint(1, MODEL_TOKENS - 64))]
            for _ in range(min(AT_ONCE, number - start))
        ]
        stream_all(server, prompts, rng.randint(*_ANSWER_TOKENS))


def resident_bytes(server: Server, after: Sequence[int]) -> list[int]:
    """Return the worker's resident memory after each of the ascending numbers of requests."""
    rng = random.Random(0)
    worker, sent, measured = worker_of(server), 0, []
    for number in after:
        send_random_requests(server, number - sent, rng)
        sent = number
        measured.append(worker.memory_info().rss)
    return measured


def main() -> int:
    """Measure both sides, print the table, keep the result; return 1 where ours grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--policy", default="default", choices=POLICIES)
    parser.add_argument("--requests", default="20,200", help="after how many to look, ascending")
    options = parser.parse_args()
    stop_servers_when_terminated()
    after = [int(number) for number in options.requests.split(",")]
    args = [*serve_args(MODEL_TOKENS, CACHED_TOKENS, filled=False), "--enforce-eager"]
    measured: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        pair = make_pair(options.model or model_dir(), args, POLICIES[options.policy], "all", Path(folder))
        for side, server in pair.items():
            with server:
                server.wait_ready(START_TIMEOUT_S)
                measured[side] = resident_bytes(server, after)
            print(f"{side}: {[f'{size / 2**20:.0f} MiB' for size in measured[side]]}", file=sys.stderr, flush=True)
    growth = {side: sizes[-1] / sizes[0] - 1 for side, sizes in measured.items()}
    rows = [
        [side, *(f"{size / 2**20:.1f}" for size in sizes), f"{growth[side]:+.2%}"] for side, sizes in measured.items()
    ]
    print(markdown_table(["worker", *(f"MiB after {number}" for number in after), "growth"], rows))
    path = save("memory", {"requests": after, "resident_bytes": measured, "growth": growth, "allowed": ALLOWED_GROWTH})
    print(f"kept in {path}", file=sys.stderr)
    return 0 if growth["ours"] <= ALLOWED_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())

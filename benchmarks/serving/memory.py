"""Resident memory of the worker after 20 and after 200 requests, ours and stock vLLM's.

    python -m benchmarks.serving.memory [--model PATH] [--requests 20,200] [--new-lengths]

The KV cache is small, so the first requests touch all of it. The prompts are random, but their lengths repeat every 20
requests: torch's oneDNN keeps code for every number of tokens that it has met, so with ever new lengths (--new-lengths,
eight requests at once) stock vLLM grows as well. Any growth beyond that is memory kept by mistake.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.report import markdown_table, save
from benchmarks.serving.backends import START_TIMEOUT_S, make_pair, our_args, serve_args, stop_servers_when_terminated
from benchmarks.serving.cases import POLICIES
from benchmarks.serving.streams import stream_all
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.cli.smollm2 import model_dir

MODEL_TOKENS = 2048
CACHED_TOKENS = 3 * MODEL_TOKENS
LENGTHS = 20  # how many different ones
AT_ONCE_NEW_LENGTHS = 8
ALLOWED_GROWTH = 0.02  # of the resident memory after the first requests
_ANSWER_TOKENS = 16
_TOKEN_IDS = (3, 200)  # in every vocabulary


def worker_of(server: Server) -> psutil.Process:
    """Return the process that computes for a running server; RuntimeError if there is not exactly one."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        ancestors = [" ".join(parent.cmdline()) for parent in process.parents()]
        if "Worker" in title and any(f"--port {server.port} " in f"{line} " for line in ancestors):
            workers.append(process)
    if len(workers) != 1:
        raise RuntimeError(f"{len(workers)} workers of the server on port {server.port}: must be one")
    return workers[0]


def random_prompts(new_lengths: bool) -> Iterator[list[int]]:
    """Yield random prompts for ever, of random lengths or of the same `LENGTHS` lengths again and again."""
    rng = random.Random(0)
    lengths = [rng.randint(1, MODEL_TOKENS - 64) for _ in range(LENGTHS)]
    for number in itertools.count():
        length = rng.randint(1, MODEL_TOKENS - 64) if new_lengths else lengths[number % LENGTHS]
        yield [rng.randint(*_TOKEN_IDS) for _ in range(length)]


def resident_bytes(server: Server, after: Sequence[int], new_lengths: bool) -> list[int]:
    """Return the worker's resident memory after each of the ascending numbers of requests."""
    prompts = random_prompts(new_lengths)
    at_once = AT_ONCE_NEW_LENGTHS if new_lengths else 1
    worker, sent, measured = worker_of(server), 0, []
    for number in after:
        while sent < number:
            batch = list(itertools.islice(prompts, min(at_once, number - sent)))
            stream_all(server, batch, _ANSWER_TOKENS)
            sent += len(batch)
        measured.append(worker.memory_info().rss)
    return measured


def main() -> int:
    """Measure both sides, print the table, keep the result; return 1 if ours grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--policy", default="default", choices=POLICIES)
    parser.add_argument("--requests", default="20,200", help="after how many to look, ascending")
    parser.add_argument("--new-lengths", action="store_true", help="prompts of ever new lengths, eight at once")
    options = parser.parse_args()
    stop_servers_when_terminated()
    after = [int(number) for number in options.requests.split(",")]
    model = options.model or model_dir()
    args = [*serve_args(model, MODEL_TOKENS, CACHED_TOKENS, filled=False), "--enforce-eager"]
    measured: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        pair = make_pair(model, args, our_args(POLICIES[options.policy]), "all", Path(folder))
        for side, server in pair.items():
            with server:
                server.wait_ready(START_TIMEOUT_S)
                measured[side] = resident_bytes(server, after, options.new_lengths)
            print(f"{side}: {[f'{size / 2**20:.0f} MiB' for size in measured[side]]}", file=sys.stderr, flush=True)
    growth = {side: sizes[-1] / sizes[0] - 1 for side, sizes in measured.items()}
    rows = [
        [side, *(f"{size / 2**20:.1f}" for size in sizes), f"{growth[side]:+.2%}"] for side, sizes in measured.items()
    ]
    print(markdown_table(["worker", *(f"MiB after {number}" for number in after), "growth"], rows))
    lengths = "new" if options.new_lengths else LENGTHS
    path = save(
        "memory",
        {
            "lengths": lengths,
            "requests": after,
            "resident_bytes": measured,
            "growth": growth,
            "allowed": ALLOWED_GROWTH,
        },
    )
    print(f"kept in {path}", file=sys.stderr)
    return 0 if growth["ours"] <= ALLOWED_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())

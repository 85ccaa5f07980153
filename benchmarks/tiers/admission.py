"""What a device pool gains if requests are admitted by their working sets, for the pages that SmolLM2 reads of a text.

    python -m benchmarks.tiers.admission --text PATH [--lengths 1024,2048,3072] [--requests 8] [--steps 24]

The shipped kernels decode windows of the text, with the lengths in turn, as in `pool_hit_rate`. Then all requests wait
from the start and are served through the shipped pool; those at the head of the queue join as far as the rule lets
them. A request's first step finds nothing under any rule and is not counted. Pool sizes are shares of all KV pages of
the requests.
"""

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import markdown_table, save
from benchmarks.tiers.pool_hit_rate import POLICIES
from benchmarks.tiers.traces import Trace, model_and_tokens, pages_apart, read_pages, record_windows
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.policy.admission import Admission, RequestLength
from vllm_hybrid_sparse.settings import ADMISSIONS
from vllm_hybrid_sparse.values import PAGE_TOKENS

EVICTIONS = ("cyclic", "lru")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What it took to serve some requests."""

    steps: int
    requests_at_once: float  # mean over steps
    tokens: int  # decoded, without each request's first
    wanted_pages: int  # for these tokens
    hit_pages: int

    @property
    def hit_rate(self) -> float:
        """Share of the wanted pages that were in the pool."""
        return self.hit_pages / self.wanted_pages if self.wanted_pages else float("nan")

    @property
    def fetched_pages_per_token(self) -> float:
        """Pages that were copied for one token."""
        return (self.wanted_pages - self.hit_pages) / self.tokens if self.tokens else float("nan")


def serve(
    traces: Sequence[Trace], lengths: Sequence[int], shape: PoolShape, microbatch_pages: int, rule: Admission | None
) -> Served:
    """Serve the requests of some traces, `lengths` tokens long at the end; without a rule all run at once."""
    most = [RequestLength(tokens, tokens) for tokens in lengths]
    pool, apart = DevicePool(shape), pages_apart(traces)
    waiting, running = deque(range(len(traces))), dict[int, int]()  # running: each request and its next step
    steps = rows = tokens = wanted = hits = 0
    while waiting or running:
        while waiting and (rule is None or rule.admits([most[request] for request in running], most[waiting[0]])):
            running[waiting.popleft()] = 0
        for layer in range(shape.layers):
            for request, step in running.items():
                read = read_pages(pool, layer, request * apart, traces[request][step][layer], microbatch_pages)
                wanted, hits = (wanted + read[0], hits + read[1]) if step else (wanted, hits)
        steps += 1
        rows += len(running)
        tokens += sum(step > 0 for step in running.values())
        running = {request: step + 1 for request, step in running.items() if step + 1 < len(traces[request])}
    pool.check_integrity()
    return Served(steps=steps, requests_at_once=rows / steps, tokens=tokens, wanted_pages=wanted, hit_pages=hits)


def rows_of(traces: list[Trace], lengths: list[int], policy: str, shares: list[float]) -> list[dict[str, Any]]:
    """The figures of one policy for every pool, eviction and rule."""
    settings = HybridSparseConfig(**POLICIES[policy])
    layers, kv_heads = len(traces[0][0]), len(traces[0][0][0])
    pages = layers * kv_heads * sum(-(-length // PAGE_TOKENS) for length in lengths)
    rows = []
    for share in tqdm(shares, desc=f"serving {policy}", unit="share"):
        for eviction in EVICTIONS:
            shape = PoolShape(
                capacity_pages=int(share * pages),
                layers=layers,
                head_dim=16,  # nothing is copied
                dtype=torch.bfloat16,
                eviction=eviction,
            )
            rule = Admission(
                retained=settings.retained,
                selection=settings.selection,
                kv_heads=kv_heads,
                layer_pages=shape.capacity_pages // layers,
            )
            for admission in ADMISSIONS:
                served = serve(
                    traces,
                    lengths,
                    shape,
                    settings.selection.microbatch_pages,
                    rule if admission == "working_set" else None,
                )
                rows.append(
                    {
                        "policy": policy,
                        "pool_share": share,
                        "pool_pages": shape.capacity_pages,
                        "working_set_pages": layers * rule.working_set_pages(max(lengths)),
                        "eviction": eviction,
                        "admission": admission,
                        "requests_at_once": served.requests_at_once,
                        "steps": served.steps,
                        "hit_rate": served.hit_rate,
                        "wanted_pages_per_token": served.wanted_pages / served.tokens,
                        "fetched_pages_per_token": served.fetched_pages_per_token,
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        (
            row["policy"],
            f"{row['pool_share']:.0%}",
            row["eviction"],
            row["admission"],
            f"{row['requests_at_once']:.1f}",
            f"{row['hit_rate']:.1%}",
            f"{row['fetched_pages_per_token']:.0f} of {row['wanted_pages_per_token']:.0f}",
        )
        for row in rows
    ]
    header = (
        "policy",
        "pool, of all pages",
        "eviction",
        "admission",
        "requests at once",
        "hit",
        "pages copied a token",
    )
    return markdown_table(header, lines)


def main() -> None:
    """Record, serve, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a plain text, UTF-8")
    parser.add_argument("--requests", default=8, type=int, help="windows of the text")
    parser.add_argument("--lengths", default="1024,2048,3072", help="of the windows, in turns")
    parser.add_argument("--steps", default=24, type=int, help="last tokens of a window that are decoded; 2 or more")
    parser.add_argument("--shares", default="0.05,0.1,0.2,0.4", help="pool sizes, as shares of all KV pages")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps={options.steps}: must be 2 or more")
    lengths = list(islice(cycle(map(int, options.lengths.split(","))), options.requests))
    model, token_ids = model_and_tokens(options.text)
    if len(token_ids) < sum(lengths):
        parser.error(f"--requests={options.requests}: the text has {len(token_ids)} tokens")
    windows = token_ids[: sum(lengths)].split(lengths)
    rows = []
    for policy, traces in record_windows(model, windows, options.steps, POLICIES).items():
        rows += rows_of(traces, lengths, policy, [float(share) for share in options.shares.split(",")])
    path = save("pool_admission", {"text": options.text.name, "lengths": lengths, "steps": options.steps, "rows": rows})
    print(table(rows))
    print(path.name)


if __name__ == "__main__":
    main()

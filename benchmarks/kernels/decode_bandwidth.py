"""How much of the machine's read bandwidth the decode kernel reaches, counting only bytes that must be read.

    python -m benchmarks.kernels.decode_bandwidth [--contexts 32768,131072] [--budgets 0.05,0.2,1] [--dtype f32]

One request decodes over layers that together are far larger than the caches. Every shape is checked against the
reference before it is timed. Exits with 1 if a sparse budget stays below the bar.
"""

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.kernels.decode_layers import Shape, check_step, make_arena, time_steps
from benchmarks.report import markdown_table, save, spread
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import make_thread_pool
from vllm_hybrid_sparse.memory.layout import STORED_DTYPES
from vllm_hybrid_sparse.settings import SUMMARIES
from vllm_hybrid_sparse.values import PAGE_TOKENS

BAR = 0.70  # of the measured bandwidth, at sparse budgets
KV_HEADS = 4
_BANDWIDTH_BYTES = 2**30
_CALL_ARENA_BYTES = 2**24


Value = TypeVar("Value")


def separated(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Return a parser of comma-separated values."""
    return lambda text: [kind(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default=[32768, 65536, 131072], type=separated(int), help="tokens")
    parser.add_argument("--budgets", default=[0.05, 0.2, 1.0], type=separated(float), help="share of the candidates")
    parser.add_argument("--head-dims", default=[64, 128], type=separated(int))
    parser.add_argument("--groups", default=[1, 3, 4, 8], type=separated(int), help="query heads of a KV head")
    parser.add_argument("--summaries", default=list(SUMMARIES), type=separated(str), help="kinds of page summary")
    parser.add_argument("--dtype", default="bf16", choices=STORED_DTYPES, help="of KV (%(default)s)")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", default=len(os.sched_getaffinity(0)), type=int)
    parser.add_argument("--helpers", default="own", choices=("own", "openmp"))
    parser.add_argument("--arena-gib", default=2.0, type=float, help="memory that the layers take together")
    parser.add_argument("--seconds", default=1.0, type=float, help="least time of measuring a row")
    return parser.parse_args()


class Ceilings:
    """Bytes a second that all threads read from an arena, measured with each row: the machine's own speed drifts."""

    def __init__(self, arena: torch.Tensor, pool: _native.ThreadPool, page_bytes: int) -> None:
        self._arena = arena
        self._pool = pool
        self._page_bytes = page_bytes
        self._in_order: list[float] = []
        self._shuffled: list[float] = []

    def measure(self, rounds: int) -> None:
        """Read in order, and page by page in random order."""
        address, size = self._arena.data_ptr(), min(self._arena.numel(), _BANDWIDTH_BYTES)
        for _ in range(rounds):
            for shuffled, kept in ((False, self._in_order), (True, self._shuffled)):
                kept.append(
                    _native.read_bandwidth(self._pool, address, size, piece=self._page_bytes, shuffled=shuffled)
                )

    @property
    def medians(self) -> tuple[float, float]:
        """In order, shuffled."""
        return statistics.median(self._in_order), statistics.median(self._shuffled)


def main() -> int:
    """Check, measure, print the table, keep the result; return 1 if the bar is missed."""
    options = parse_arguments()
    pool = make_thread_pool(options.threads, helpers=options.helpers)
    arena = make_arena(int(options.arena_gib * 2**30))
    rows = []
    for head_dim, group, summary, budget in itertools.product(
        options.head_dims, options.groups, options.summaries, options.budgets
    ):
        if budget == 1 and summary != options.summaries[0]:
            continue  # reads no summaries
        shape = Shape(
            head_dim=head_dim,
            group=group,
            kv_heads=KV_HEADS,
            budget_ratio=budget,
            summary=summary,
            dtype=options.dtype,
        )
        check_step(shape, pool, options.isa)
        for tokens in options.contexts:
            ceilings = Ceilings(arena, pool, shape.layout.page_bytes)
            ceilings.measure(2)
            seconds, layers = time_steps(shape, tokens, arena, pool, options.isa, options.seconds)
            ceilings.measure(2)
            time_us = spread([second * 1e6 for second in seconds])
            in_order, shuffled = ceilings.medians
            must_read = shape.bytes_to_read(tokens)
            rate = must_read / (time_us["p50"] * 1e-6)
            print(f"{tokens} tokens, {shape}: {time_us['p50']:.0f} us", file=sys.stderr, flush=True)
            rows.append(
                {
                    "context_tokens": tokens,
                    "head_dim": head_dim,
                    "group": group,
                    "kv_heads": KV_HEADS,
                    "budget_ratio": budget,
                    "summary": summary if budget < 1 else None,
                    "layers": layers,
                    "read_bytes": must_read,
                    "time_us": time_us,
                    "bytes_per_s": rate,
                    "machine_bytes_per_s": in_order,
                    "machine_shuffled_bytes_per_s": shuffled,
                    "passed": rate >= BAR * in_order if budget < 1 else None,
                }
            )
    one_page = Shape(head_dim=64, group=3, kv_heads=3, budget_ratio=1.0, summary=SUMMARIES[0], dtype=options.dtype)
    calls_s, _ = time_steps(one_page, PAGE_TOKENS, arena[:_CALL_ARENA_BYTES], pool, options.isa, options.seconds)
    call_us = spread([second * 1e6 for second in calls_s])
    isa = (
        Shape(head_dim=64, group=1, kv_heads=1, budget_ratio=1.0, summary="minmax", dtype=options.dtype)
        .attention(pool, options.isa)
        .isa
    )
    path = save(
        "decode_bandwidth",
        {
            "isa": isa,
            "dtype": options.dtype,
            "threads": options.threads,
            "helpers": options.helpers,
            "bar": BAR,
            "call_us": call_us,
            "rows": rows,
        },
    )
    print(f"{isa}, {options.threads} threads ({options.helpers})")
    print(f"a call from Python on one page: {call_us['p50']:.1f} µs ({call_us['p20']:.1f}–{call_us['p80']:.1f})\n")
    print(
        markdown_table(
            (
                "context",
                "head_dim",
                "group",
                "budget",
                "summary",
                "MB to read",
                "µs p50 (p20–p80)",
                "GB/s",
                "machine, in order",
                "share",
                "machine, shuffled pages",
                "",
            ),
            [
                (
                    f"{row['context_tokens'] // 1024}K",
                    str(row["head_dim"]),
                    str(row["group"]),
                    f"{row['budget_ratio']:.0%}",
                    row["summary"] or "",
                    f"{row['read_bytes'] / 1e6:.2f}",
                    f"{row['time_us']['p50']:.0f} ({row['time_us']['p20']:.0f}–{row['time_us']['p80']:.0f})",
                    f"{row['bytes_per_s'] / 1e9:.1f}",
                    f"{row['machine_bytes_per_s'] / 1e9:.1f}",
                    f"{row['bytes_per_s'] / row['machine_bytes_per_s']:.0%}",
                    f"{row['machine_shuffled_bytes_per_s'] / 1e9:.1f}",
                    {None: "", True: "pass", False: "MISSED"}[row["passed"]],
                )
                for row in rows
            ],
        )
    )
    print(f"kept in {path}", file=sys.stderr)
    return 0 if all(row["passed"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

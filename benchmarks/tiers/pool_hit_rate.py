"""One pool for all layers against an equal split, and orders of eviction, for the pages that SmolLM2 reads of a text.

    python -m benchmarks.tiers.pool_hit_rate --text PATH [--requests 4] [--tokens 4096] [--steps 48]

The shipped kernels decode windows of the text one after another inside Transformers, in float32; the true token is fed
whatever the model says. The pages that each step reads are noted and then replayed, with all requests side by side,
through the shipped device pool, and through the directory of a device that ranks by itself (`directory`: the slots read
longest ago go first, and none that was read in the last step). For comparison they are replayed with orders that the
pool does not have (`frequency.py`): two that know how often pages were used, and one that knows the future, which no
order can beat. Shares are of all KV pages of the requests. The first step fills the pool and is not counted. The second
half of the steps is also counted by itself, because the directory gives out few slots a step.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.report import markdown_table, save
from benchmarks.tiers.frequency import ORDERS, replay_order
from benchmarks.tiers.traces import (
    PoolUse,
    Trace,
    layer_pages,
    model_and_tokens,
    record_windows,
    replay,
    replay_directory,
)
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.memory.device_pool import PoolShape
from vllm_hybrid_sparse.settings import DEVICE_EVICTIONS
from vllm_hybrid_sparse.values import PAGE_TOKENS

POLICIES: dict[str, dict[str, Any]] = {
    "progressive 0.95": {"policy": "progressive"},
    "topk 5 %": {"policy": "topk"},
}
POOLS = [(unified, eviction) for unified in (True, False) for eviction in DEVICE_EVICTIONS]


def rows_of(traces: list[Trace], policy: str, pages: int, shares: list[float], page_bytes: int) -> list[dict[str, Any]]:
    """Every pool's figures for the traces of one policy; `pages` is the number of all KV pages."""
    layers, steps = len(traces[0][0]), len(traces[0])
    microbatch_pages = HybridSparseConfig(**POLICIES[policy]).selection.microbatch_pages
    rows = []

    def row(pool: str, eviction: str, use: PoolUse) -> dict[str, Any]:
        return {
            "policy": policy,
            "pool_share": share,
            "pool_pages": int(share * pages),
            "pool": pool,
            "eviction": eviction,
            "hit_rate": use.hit_rate,
            "late_hit_rate": use.late_hit_rate,
            "wanted_pages": use.wanted_pages,
            "fetched_pages": use.wanted_pages - use.hit_pages,
            "evicted_pages": use.evicted_pages,
            "fetched_bytes_per_step": (use.wanted_pages - use.hit_pages) * page_bytes / (steps - 1),
        }

    for share in tqdm(shares, desc=f"replaying {policy}", unit="share"):
        for unified, eviction in POOLS:
            shape = PoolShape(
                capacity_pages=int(share * pages),
                layers=layers,
                head_dim=16,  # the replay copies nothing
                dtype=torch.bfloat16,
                eviction=eviction,
                unified=unified,
            )
            use = replay(traces, shape, microbatch_pages)
            rows.append(row("unified" if unified else "per_layer", eviction, use))
        for unified in (True, False):
            for order in ORDERS:
                use = replay_order(traces, order, int(share * pages), microbatch_pages, unified=unified)
                rows.append(row("unified" if unified else "per_layer", order, use))
        rows.append(row("unified", "directory", replay_directory(traces, int(share * pages))))
    return rows


def main() -> None:
    """Record, replay, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="a plain text, UTF-8")
    parser.add_argument("--requests", default=4, type=int, help="windows of the text, served side by side")
    parser.add_argument("--tokens", default=4096, type=int, help="of a window")
    parser.add_argument("--steps", default=48, type=int, help="last tokens of a window that are decoded; 2 or more")
    parser.add_argument("--shares", default="0.05,0.1,0.2,0.4", help="pool sizes, as shares of all KV pages")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps={options.steps}: must be 2 or more")
    model, token_ids = model_and_tokens(options.text)
    if len(token_ids) < options.requests * options.tokens:
        parser.error(f"--requests={options.requests}: the text has {len(token_ids)} tokens")
    windows = token_ids.split(options.tokens)[: options.requests]
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    pages = options.requests * layers * heads * -(-options.tokens // PAGE_TOKENS)
    page_bytes = 2 * PAGE_TOKENS * config.head_dim * 2  # served in bf16
    rows, read = [], {}
    for policy, traces in record_windows(model, windows, options.steps, POLICIES).items():
        read[policy] = layer_pages(traces)
        rows += rows_of(traces, policy, pages, [float(share) for share in options.shares.split(",")], page_bytes)
    case = {"text": options.text.name, "requests": options.requests, "tokens": options.tokens, "steps": options.steps}
    path = save("pool_hit_rate", {**case, "kv_pages": pages, "pages_read_by_layer": read, "rows": rows})
    print(table(rows))
    print(path.name)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        (
            row["policy"],
            f"{row['pool_share']:.0%}",
            row["pool"],
            row["eviction"],
            f"{row['hit_rate']:.1%}",
            f"{row['late_hit_rate']:.1%}",
            f"{row['fetched_bytes_per_step'] / 2**20:.2f}",
        )
        for row in rows
    ]
    return markdown_table(
        ("policy", "pool, of all pages", "pool", "eviction", "hit", "in the second half", "MiB fetched a step"), lines
    )


if __name__ == "__main__":
    main()

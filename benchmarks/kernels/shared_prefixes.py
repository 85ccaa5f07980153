"""How much less time a decode step takes if requests share the blocks of a prefix, as vLLM's prefix cache has them do.

    python -m benchmarks.kernels.shared_prefixes [--documents 4] [--sharers 8] [--tokens 7168] [--budgets 1,0.2,0.05]

Each request has a document and some tokens of its own. In one step each has a copy of the document's blocks. In the
others the requests of a document share them: each reads what it selects, or all attend to the document together, which
reads it once (`prefix_sharers`). The steps take turns over the same layers, which are far larger than the caches. Keys
are random, so the sharers choose different pages; real questions about one document have more pages in common.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.decode_bandwidth import separated
from benchmarks.kernels.decode_layers import BLOCK_TOKENS, RETAINED, Shape, fill_blocks, make_arena
from benchmarks.report import markdown_table, save, spread
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import make_thread_pool, native_selection
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch

OWN_TOKENS = 100  # of a request, in one block
KINDS = ("copies", "shared", "together")


def block_tables(documents: int, sharers: int, tokens: int) -> dict[str, Tensor]:
    """The block ids of each kind's requests, [requests, blocks] int32; neighbours have different documents."""
    requests, blocks = documents * sharers, tokens // BLOCK_TOKENS
    copies = torch.randperm(requests * (blocks + 1), generator=torch.Generator().manual_seed(0)).view(requests, -1)
    shared = copies.clone()
    shared[:, :blocks] = copies[:documents, :blocks].repeat(sharers, 1)
    return {kind: (copies if kind == "copies" else shared).to(torch.int32) for kind in KINDS}


def decode_batch(table: Tensor, tokens: int) -> NativeBatch:
    """One decode row of each request."""
    requests = len(table)
    return NativeBatch.from_tensors(
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32),
        seq_lens=torch.full((requests,), tokens + OWN_TOKENS, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((requests,), -1),
        decode_mask=torch.ones(requests, dtype=torch.bool),
    )


def time_kinds(
    shape: Shape, tables: dict[str, Tensor], tokens: int, layers: int, pool: _native.ThreadPool, rounds: int
) -> dict[str, list[float]]:
    """Seconds of a layer's call for each kind, which take turns; the first round warms up."""
    num_blocks = tables["copies"].numel()
    arena = make_arena(layers * num_blocks * shape.block_bytes).view(layers, num_blocks, shape.block_bytes)
    attention = shape.attention(pool, "auto")
    fill_blocks(shape, arena.flatten(0, 1), attention)
    requests = len(tables["copies"])
    queries = torch.randn(
        layers, requests, shape.kv_heads * shape.group, shape.head_dim, generator=torch.Generator().manual_seed(1)
    ).to(shape.row_dtype)
    output = torch.empty_like(queries[0])
    sharers = {kind: 2 if kind == "together" else 0 for kind in KINDS}
    selections = {
        kind: native_selection(replace(shape.selection, prefix_sharers=sharers[kind]), RETAINED) for kind in KINDS
    }
    batches = {kind: decode_batch(tables[kind], tokens) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, batch in batches.items():
            start_s = time.perf_counter()
            for query, cache in zip(queries, arena, strict=True):
                attention.forward(query, None, None, cache, batch, selections[kind], None, output)
            seconds[kind].append((time.perf_counter() - start_s) / layers)
    return {kind: of_kind[1:] for kind, of_kind in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default=4, type=int, help="(%(default)s)")
    parser.add_argument("--sharers", default=8, type=int, help="requests of a document (%(default)s)")
    parser.add_argument("--tokens", default=7168, type=int, help="of a document, whole blocks of 128 (%(default)s)")
    parser.add_argument("--budgets", default=[1.0, 0.2, 0.05], type=separated(float), help="share of the candidates")
    parser.add_argument("--head-dim", default=64, type=int, help="(%(default)s)")
    parser.add_argument("--groups", default=[1, 3, 4], type=separated(int), help="query heads of a KV head")
    parser.add_argument("--kv-heads", default=3, type=int, help="(%(default)s)")
    parser.add_argument("--layers", default=8, type=int, help="(%(default)s)")
    parser.add_argument("--threads", default=len(os.sched_getaffinity(0)), type=int)
    parser.add_argument("--rounds", default=9, type=int, help="(%(default)s)")
    options = parser.parse_args(arguments)
    pool = make_thread_pool(options.threads)
    tables = block_tables(options.documents, options.sharers, options.tokens)
    rows = []
    for group in options.groups:
        for budget in options.budgets:
            shape = Shape(
                head_dim=options.head_dim,
                group=group,
                kv_heads=options.kv_heads,
                budget_ratio=budget,
                summary="key_codes",
            )
            seconds = time_kinds(shape, tables, options.tokens, options.layers, pool, options.rounds)
            time_us = {kind: spread([second * 1e6 for second in of_kind]) for kind, of_kind in seconds.items()}
            ratios = {
                kind: statistics.median(
                    copies / other for copies, other in zip(seconds["copies"], seconds[kind], strict=True)
                )
                for kind in KINDS[1:]
            }
            rows.append({"group": group, "budget_ratio": budget, "time_us": time_us, "copies_by": ratios})
            print(f"group {group}, {budget:.0%}: {ratios}", file=sys.stderr, flush=True)
    cells = [
        [
            str(row["group"]),
            f"{row['budget_ratio']:.0%}",
            *(f"{row['time_us'][kind]['p50']:.0f}" for kind in KINDS),
            *(f"{ratio:.2f}" for ratio in row["copies_by"].values()),
        ]
        for row in rows
    ]
    heads = [*(f"{kind}, µs a layer" for kind in KINDS), *(f"copies ÷ {kind}" for kind in KINDS[1:])]
    print(markdown_table(["group", "budget", *heads], cells))
    content = {"isa": shape.attention(pool, "auto").isa, "options": vars(options), "rows": rows}
    print(f"kept in {save('shared_prefixes', content)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

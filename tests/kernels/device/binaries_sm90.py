"""Count the binaries that each kernel has after steps whose numbers differ, on a machine that needs no GPU.

    python -m tests.kernels.device.binaries_sm90

Triton compiles anew for an integer that is 1, for one that 16 divides and for any other, and for a tensor that begins
at a multiple of 16 bytes or elsewhere. Prints a JSON object: kernel, how many binaries. TRITON_INTERPRET must not be
set.
"""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from tests.kernels.device.compile_sm90 import compiling
from vllm_hybrid_sparse.kernels.code_scores.gpu import score_codes
from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, load_pages, store_pages, store_tokens
from vllm_hybrid_sparse.kernels.frame_attention.gpu import attend_frames
from vllm_hybrid_sparse.kernels.key_codes.gpu import encode_pages, rotate_queries
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.merge.gpu import merge_states, merge_with_unread
from vllm_hybrid_sparse.kernels.page_directory.gpu import forget, give_back, look_up, set_aside, turn_over
from vllm_hybrid_sparse.kernels.page_directory.state import PageDirectory
from vllm_hybrid_sparse.kernels.reading.gpu import plan_reading, read_on
from vllm_hybrid_sparse.kernels.reading.plan import PageTables, RankedPages
from vllm_hybrid_sparse.kernels.score.gpu import group_scores, score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.summarize.gpu import summarize_slots
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.values import summary_bytes

CPU = torch.device("cpu")
DTYPE, HEAD_DIM, KV_HEADS, Q_HEADS, SCALE = torch.bfloat16, 16, 2, 6, 0.1
LAYERS, STORE_PAGES, PAGES_PER_BLOCK = 5, 66, 2
STEPS = (
    (1, 1, 1, 0, 0),
    (2, 16, 16, 4, 1),
    (3, 17, 17, 1, 2),
    (16, 32, 32, 16, 4),
    (5, 48, 3, 5, 3),
    (16, 144, 160, 4, 0),
)
"""Rows, pages, blocks of a row's table, the first page, the layer."""


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Numbers on the CPU."""
    return torch.ones(*shape, dtype=dtype)


class Server:
    """What is made once, and steps that differ as those of a server do."""

    def __init__(self) -> None:
        self.pools = torch.zeros(2, 64, 16, HEAD_DIM, dtype=DTYPE)
        self.elements = torch.zeros(2**12, dtype=DTYPE)
        self.host = HostStore(self.elements, 2**11, 2**10, 32 * HEAD_DIM, PAGES_PER_BLOCK)
        self.codes = torch.zeros(KV_HEADS, STORE_PAGES, summary_bytes("key_codes", HEAD_DIM, 2, 2), dtype=torch.uint8)
        self.directory = PageDirectory.empty(LAYERS * KV_HEADS * STORE_PAGES, 64, 16, CPU)
        self.frames = torch.zeros(4, 3, 2, KV_HEADS, 128, HEAD_DIM, dtype=DTYPE)[:, 1].unbind(1)
        self.tally = Tally(CPU)

    def step(self, rows: int, pages: int, blocks: int, first_page: int, layer: int) -> None:
        """Launch everything."""
        fused = torch.zeros(rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
        query, key = fused[:, :Q_HEADS], fused[:, Q_HEADS : Q_HEADS + KV_HEADS]
        if rows % 2:  # rows that do not follow one another are gathered
            query = query.contiguous()
        table = ints(rows, blocks)
        self.ranked(query, table, pages, first_page, layer)
        self.resident(query, key, table, pages)
        self.two_tier(query, pages)
        self.beside(rows, pages, first_page)

    def ranked(self, query: Tensor, table: Tensor, pages: int, first_page: int, layer: int) -> None:
        """Ranked rows."""
        rows = len(query)
        pool, lengths, counts = tuple(self.pools), ints(rows), ints(rows, KV_HEADS)
        candidates, budgets = ints(3, rows)[1:]
        first_entry = layer * KV_HEADS * STORE_PAGES
        rule: dict[str, Any] = {"threshold": 0.95, "microbatch_pages": 8}
        where: dict[str, int] = {"first_page": first_page, "most": pages, "pages_per_block": PAGES_PER_BLOCK}
        entries = {"store_pages": STORE_PAGES, "first_entry": first_entry, "kv_heads": KV_HEADS}
        listed = look_up(self.directory, table, lengths, ints(rows), counts, None, **where, **entries)
        retained = attend_listed(query, *pool, self.host, listed, counts, self.tally, scale=SCALE)
        scores, deviations = score_codes(
            rotate_queries(query), self.codes, table, lengths, **where, scale=SCALE, code_bits=2
        )
        order = group_scores(scores, KV_HEADS, retained[1], deviations).sort(dim=-1, descending=True).indices
        ranked = RankedPages(order, scores, candidates, budgets)
        plan = plan_reading(ranked, retained[1], **rule)
        listed = look_up(self.directory, table, lengths, ints(rows), plan.counts, order, **where, **entries)
        read = attend_listed(query, *pool, self.host, listed, plan.counts, self.tally, scale=SCALE)
        tables = PageTables(table, self.directory.slots, first_page, first_entry, STORE_PAGES)
        read_on(query, *pool, self.host, ranked, tables, retained[1], read, plan, self.tally, scale=SCALE, **rule)
        merge_with_unread(retained, read, plan.log_unread, 0.5, torch.zeros_like(query))

    def resident(self, query: Tensor, key: Tensor, table: Tensor, pages: int) -> None:
        """Resident rows, and new tokens of all."""
        lengths, longest = ints(len(query)), min(table.shape[1] * 128, 37 * pages)
        attend_frames(query, *self.frames, table, lengths, torch.zeros_like(query), scale=SCALE, longest=longest)
        offsets = ints(len(query), KV_HEADS, dtype=torch.int64)
        for frames in (None, TokenFrames(*self.frames, lengths, lengths)):
            store_tokens(self.elements, offsets, lengths, key, key, frames)

    def two_tier(self, query: Tensor, pages: int) -> None:
        """Two-tier rows, and chunks of prompts."""
        rows = len(query)
        counts = ints(rows, KV_HEADS)
        slots, tokens = ints(3, rows, KV_HEADS, pages)[1:]
        out, lse, page_lse = (torch.zeros(rows, Q_HEADS, *rest) for rest in ((HEAD_DIM,), (), (pages,)))
        progress = Progress.begin(counts, counts, Q_HEADS)
        kept = torch.zeros(rows, Q_HEADS, 16 * pages + 32)[..., 16:-16]
        for scores in (None, kept):
            attend_slots(
                query, *self.pools, slots, tokens, progress.done, out, lse, page_lse, scale=SCALE, token_scores=scores
            )
        for log_left in (None, torch.zeros(7, rows, Q_HEADS)[pages % 7]):
            verify(lse, page_lse, progress, threshold=0.9, log_left=log_left)
        merge_states(out, lse, out, lse)
        summaries = torch.zeros(64, 1, HEAD_DIM, dtype=DTYPE)
        places = ints(rows, KV_HEADS, pages)
        score_pages(query, summaries, places, scale=SCALE, summary="cuboid_mean")
        summarize_slots(self.pools[0], places.flatten(), places.flatten(), summaries, summary="cuboid_mean")

    def beside(self, rows: int, pages: int, first_page: int) -> None:
        """What a step begins with, and pages between host and device."""
        offsets, slots = ints(pages, dtype=torch.int64), ints(pages)
        turn_over(self.directory, step=pages, hand=first_page, window=32)
        forget(self.directory, offsets, store_pages=STORE_PAGES, heads=LAYERS * KV_HEADS)
        for change in (set_aside, give_back):
            change(self.directory, ints(rows), 4)
        for move in (load_pages, store_pages):
            move(self.elements, offsets, slots, *self.pools)
        encode_pages(self.elements, offsets, offsets, self.codes[0], head_dim=HEAD_DIM, code_bits=2)


def main() -> int:
    """Count and print."""
    binaries: dict[str, set[str]] = {}
    server = Server()
    with compiling(lambda name, kernel: binaries.setdefault(name, set()).add(kernel.hash)):
        for step in STEPS:
            server.step(*step)
    print(json.dumps({name: len(hashes) for name, hashes in binaries.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

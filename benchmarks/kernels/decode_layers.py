"""Layers of KV memory larger than the caches, decoded one step at a time, and a check that the step is right."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.kernels.paged_attention.reference import paged_attention
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.memory.prefault import prefault
from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

BLOCK_TOKENS = 128
RETAINED = RetainedSet()
_CHECK_TOKENS = 2001  # the last page partly filled
_MADE_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer's heads and what a step reads of it."""

    head_dim: int
    group: int  # query heads that share a KV head
    kv_heads: int
    budget_ratio: float  # of the candidate pages; 1 reads all of them without scoring
    summary: str
    dtype: str = "bf16"  # of KV, and except for e4m3 of queries: bf16 | f16 | f32 | e4m3

    @property
    def row_dtype(self) -> torch.dtype:
        """The queries' dtype as torch names it."""
        return self.layout.row_dtype

    @property
    def selection(self) -> SelectionSpec:
        """`topk`, or `dense` if everything is read."""
        return SelectionSpec(ranked=self.budget_ratio < 1, budget_ratio=self.budget_ratio)

    @property
    def layout(self) -> BlockLayout:
        """Where the bytes of a block lie."""
        return BlockLayout(dtype=self.dtype, head_dim=self.head_dim, block_tokens=BLOCK_TOKENS, summary=self.summary)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.kv_heads * self.layout.head_block_bytes

    def bytes_to_read(self, tokens: int) -> int:
        """Bytes that one step over one layer must read: retained and selected pages, candidates' summaries."""
        first, end = RETAINED.candidate_range(tokens)
        selection = self.selection
        pages = len(RETAINED.retained_pages(tokens)) + selection.budget_pages(end - first)
        summaries = end - first if selection.ranked else 0
        return self.kv_heads * (pages * self.layout.page_bytes + summaries * self.layout.summary_bytes)

    def attention(self, pool: _native.ThreadPool, isa: str) -> NativeAttention:
        """The kernel of this shape."""
        return NativeAttention(
            dtype=self.layout.torch_dtype,
            num_q_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=BLOCK_TOKENS,
            scale=self.head_dim**-0.5,
            summary=self.summary,
            isa=isa,
            pool=pool,
        )


def make_arena(arena_bytes: int) -> Tensor:
    """Return that much memory, backed as the server's KV is; [arena_bytes] uint8."""
    arena = torch.empty(arena_bytes, dtype=torch.uint8)
    prefault(arena)
    return arena


def fill_blocks(shape: Shape, blocks: Tensor, attention: NativeAttention) -> None:
    """Store random keys and values in some blocks, with their summaries, and copies of them in the others.

    blocks   [num_blocks, block_bytes] uint8
    """
    made = min(_MADE_BLOCKS, len(blocks))
    tokens = made * BLOCK_TOKENS
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, generator=generator).to(shape.row_dtype)
    batch = NativeBatch.from_tensors(
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_table=torch.arange(made, dtype=torch.int32)[None],
        slot_mapping=torch.arange(tokens),
        decode_mask=torch.tensor([False]),
    )
    query = torch.zeros(tokens, shape.kv_heads * shape.group, shape.head_dim, dtype=shape.row_dtype)
    attention.forward(query, key, value, blocks[:made], batch, shape.selection, RETAINED, torch.empty_like(query))
    for start in range(made, len(blocks), made):
        part = blocks[start : start + made]
        part.copy_(blocks[: len(part)])


def one_row_batch(tokens: int, block_ids: Tensor) -> NativeBatch:
    """Return a batch of one decoding request of `tokens` tokens that stores nothing."""
    return NativeBatch.from_tensors(
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_table=block_ids.to(torch.int32)[None],
        slot_mapping=torch.tensor([-1]),
        decode_mask=torch.tensor([True]),
    )


def check_step(shape: Shape, pool: _native.ThreadPool, isa: str) -> None:
    """Append a request's tokens, decode its last one and compare with the reference; AssertionError if it differs."""
    generator = torch.Generator().manual_seed(1)
    q_heads, tokens = shape.kv_heads * shape.group, _CHECK_TOKENS
    query = torch.randn(tokens, q_heads, shape.head_dim, generator=generator).to(shape.row_dtype)
    key, value = torch.randn(2, tokens, shape.kv_heads, shape.head_dim, generator=generator).to(shape.row_dtype)
    num_blocks = -(-tokens // BLOCK_TOKENS)
    cache = torch.full((num_blocks, shape.block_bytes), 0xFF, dtype=torch.uint8)
    block_ids = torch.randperm(num_blocks, generator=generator)
    slots = (block_ids[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
    attention = shape.attention(pool, isa)
    output = torch.empty_like(query)
    for start, end, decode in ((0, tokens - 1, False), (tokens - 1, tokens, True)):
        batch = NativeBatch.from_tensors(
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=block_ids.to(torch.int32)[None],
            slot_mapping=slots[start:end],
            decode_mask=torch.tensor([decode]),
        )
        rows = slice(start, end)
        attention.forward(query[rows], key[rows], value[rows], cache, batch, shape.selection, RETAINED, output[rows])
    expected = paged_attention(
        query[-1:],
        [shape.layout.stored(key)],
        [shape.layout.stored(value)],
        query_lens=[1],
        decode_mask=[True],
        selector=SpecSelector(shape.selection),
        retained=RETAINED,
        scale=shape.head_dim**-0.5,
        summary=shape.summary,
    )
    assert_close(output[-1:], expected.out)


def time_steps(
    shape: Shape, tokens: int, arena: Tensor, pool: _native.ThreadPool, isa: str, least_s: float
) -> tuple[list[float], int]:
    """Decode over as many distinct layers as the arena holds, again and again; return each call's seconds and their
    number. AssertionError if the kernel did not read what it had to."""
    num_blocks = -(-tokens // BLOCK_TOKENS)
    layers = arena.numel() // (num_blocks * shape.block_bytes)
    if layers == 0:
        raise ValueError(f"arena of {arena.numel()} bytes: a layer of {tokens} tokens does not fit")
    caches = [
        arena[layer * num_blocks * shape.block_bytes :][: num_blocks * shape.block_bytes].view(num_blocks, -1)
        for layer in range(layers)
    ]
    attention = shape.attention(pool, isa)
    fill_blocks(shape, arena[: layers * num_blocks * shape.block_bytes].view(layers * num_blocks, -1), attention)
    attention.reset_stats()
    generator = torch.Generator().manual_seed(2)
    batch = one_row_batch(tokens, torch.randperm(num_blocks, generator=generator))
    queries = torch.randn(layers, 1, shape.kv_heads * shape.group, shape.head_dim, generator=generator).to(
        shape.row_dtype
    )
    output = torch.empty_like(queries[0])
    selection = native_selection(shape.selection, RETAINED)

    seconds: list[float] = []
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < least_s or len(seconds) < 2 * layers:
        for query, cache in zip(queries, caches, strict=True):
            start_s = time.perf_counter()
            attention.forward(query, None, None, cache, batch, selection, None, output)
            seconds.append(time.perf_counter() - start_s)

    stats = attention.stats()
    read = stats.pages_read * shape.layout.page_bytes + stats.summary_bytes
    expected = shape.bytes_to_read(tokens) * len(seconds)
    assert read == expected, f"{read} bytes read in {len(seconds)} steps instead of {expected}"
    return seconds[layers:], layers  # the first round warms up

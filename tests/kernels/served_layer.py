"""One attention layer as a server drives it: requests in shuffled blocks of memory that was never zeroed.

Besides the packed cache, the logical K and V of every request are kept, so the references can be asked at any time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.native import STORED_NAMES, NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec, SelectionSpec

NAN_BYTE = 0xFF  # every float dtype reads NaN from bytes of all ones


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a layer is made for."""

    dtype: torch.dtype = torch.float32  # of the cache
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 32
    summary: str = "minmax"
    code_bits: int = 2
    common_keys: bool = False
    sliding_window: int = 0
    isa: str = "auto"
    num_threads: int = 1
    scale: float = 0.125

    @property
    def row_dtype(self) -> torch.dtype:
        return self.layout.row_dtype

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(
            dtype=STORED_NAMES[self.dtype],
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            summary=self.summary,
            code_bits=self.code_bits,
        )


@dataclass
class Request:
    """The logical K and V of a request as stored, [seq_len, kv_heads, head_dim] of the rows' dtype, and its blocks."""

    key: Tensor
    value: Tensor
    blocks: list[int] = field(default_factory=list)
    slot: int = -1


@dataclass(frozen=True)
class Step:
    """One forward pass: what went in, by request, and what came out."""

    requests: list[Request]  # as they are after the step
    query_lens: list[int]
    decode_mask: list[bool]
    query: Tensor  # [tokens, q_heads, head_dim]
    output: Tensor  # likewise
    selection: SelectionSpec
    retained: RetainedSet


class ServedLayer:
    """A `NativeAttention` with a KV cache full of NaN and the requests that use it."""

    def __init__(
        self,
        shape: Shape,
        *,
        num_blocks: int,
        seed: int = 0,
        row_padding_bytes: int = 0,
        salience: SalienceSpec | None = None,
        retained: RetainedSet | None = None,
        fluxion: _native.FluxionLayer | None = None,
    ) -> None:
        """Keep HGCA's state if `salience` and `retained` are given, and Fluxion's if `fluxion` is; each by slot."""
        self.shape = shape
        self.generator = torch.Generator().manual_seed(seed)
        self.attention = NativeAttention(
            dtype=shape.dtype,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            scale=shape.scale,
            summary=shape.summary,
            code_bits=shape.code_bits,
            common_keys=shape.common_keys,
            sliding_window=shape.sliding_window,
            isa=shape.isa,
            num_threads=shape.num_threads,
        )
        self.hgca = self.attention.hgca_layer(salience, retained) if salience and retained else None
        self.fluxion = fluxion
        block_bytes = shape.num_kv_heads * shape.layout.head_block_bytes
        rows = torch.full((num_blocks, block_bytes + row_padding_bytes), NAN_BYTE, dtype=torch.uint8)
        self.kv_cache = rows[:, :block_bytes]
        self.free_blocks: list[int] = torch.randperm(num_blocks, generator=self.generator).tolist()

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.shape.row_dtype)

    def start(self) -> Request:
        empty = torch.empty(0, self.shape.num_kv_heads, self.shape.head_dim, dtype=self.shape.row_dtype)
        return Request(empty, empty)

    def fork(self, of: Request, tokens: int, own_tokens: int) -> Request:
        """A request that shares the first `tokens`, whole blocks, with another and goes on with its own."""
        assert tokens % self.shape.block_tokens == 0
        request = Request(of.key[:tokens], of.value[:tokens], of.blocks[: tokens // self.shape.block_tokens])
        if own_tokens:
            self.step([(request, own_tokens)], attend=False)
        return request

    def finish(self, request: Request) -> None:
        """Free the blocks without clearing them. They are the next ones to be used."""
        self.free_blocks[:0] = request.blocks
        request.blocks = []

    def step(
        self,
        rows: Sequence[tuple[Request, int]],
        *,
        selection: SelectionSpec | None = None,
        retained: RetainedSet | None = None,
        decode: bool = True,
        sharpness: float = 1.0,
        key_offset: float = 0.0,
        tokens: Tensor | None = None,
        sinks: Tensor | None = None,
        attend: bool = True,
    ) -> Step:
        """Append tokens, `rows` = (request, how many), and attend; single rows decode if `decode`.

        sharpness    factor of the queries: small for flat attention, large for peaks
        key_offset   added to the keys
        sinks        [q_heads] f32  learned sinks, None: there are none
        tokens       [tokens, q_heads + 2 kv_heads, head_dim]  their queries, keys and values; by default random
        attend       whether rows attend; otherwise the output stays NaN
        """
        selection, retained = selection or SelectionSpec(), retained or RetainedSet()
        shape, query_lens = self.shape, [query_len for _, query_len in rows]
        q_width, kv_width = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv = torch.randn(sum(query_lens), q_width + 2 * kv_width, generator=self.generator)
        if tokens is not None:
            qkv = tokens.flatten(1).clone()
        qkv[:, :q_width] *= sharpness
        qkv[:, q_width : q_width + kv_width] += key_offset
        widths = [q_width, kv_width, kv_width]
        parts = qkv.to(shape.row_dtype).split(widths, dim=1)  # strided, as a model hands them over
        query, key, value = (part.unflatten(1, (-1, shape.head_dim)) for part in parts)

        slots = [slot for request, query_len in rows for slot in self._append_slots(request, query_len)]
        first_row = 0
        for request, query_len in rows:
            last_row = first_row + query_len
            request.key = torch.cat((request.key, shape.layout.stored(key[first_row:last_row])))
            request.value = torch.cat((request.value, shape.layout.stored(value[first_row:last_row])))
            first_row = last_row
        requests = [request for request, _ in rows]
        decode_mask = [decode and query_len == 1 for query_len in query_lens]
        output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        batch = self.batch(requests, query_lens, decode_mask, slots) if attend else storing_batch(slots)
        given = (query, key, value, self.kv_cache, batch, selection, retained, output, self.hgca, self.fluxion)
        self.attention.forward(*given, *(() if sinks is None else (sinks,)))
        return Step(requests, query_lens, decode_mask, query, output, selection, retained)

    def batch(
        self, requests: Sequence[Request], query_lens: Sequence[int], decode_mask: Sequence[bool], slots: Sequence[int]
    ) -> NativeBatch:
        """The batch of each request's latest `query_lens` tokens; unused entries of the block table are invalid."""
        widest = max((len(request.blocks) for request in requests), default=0)
        block_table = torch.full((len(requests), widest + 2), -1, dtype=torch.int32)
        for row, request in zip(block_table, requests, strict=True):
            row[: len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return NativeBatch.from_tensors(
            torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
            torch.tensor(self.lengths(requests, query_lens), dtype=torch.int32),
            block_table,
            torch.tensor(slots, dtype=torch.int64),
            torch.tensor(decode_mask, dtype=torch.bool),
            torch.tensor([request.slot for request in requests], dtype=torch.int32)
            if self.hgca or self.fluxion
            else None,
        )

    def lengths(self, requests: Sequence[Request], query_lens: Sequence[int]) -> list[int]:
        """The requests' lengths as the batch gives them. `query_lens` tokens of each are new."""
        return [len(request.key) for request, _ in zip(requests, query_lens, strict=True)]

    def _append_slots(self, request: Request, num_tokens: int) -> list[int]:
        """Slots of the next tokens of a request, in blocks taken from the free ones as they are needed."""
        block_tokens, start = self.shape.block_tokens, len(request.key)
        while len(request.blocks) < math.ceil((start + num_tokens) / block_tokens):
            request.blocks.append(self.free_blocks.pop(0))
        positions = range(start, start + num_tokens)
        return [request.blocks[p // block_tokens] * block_tokens + p % block_tokens for p in positions]


def storing_batch(slots: Sequence[int]) -> NativeBatch:
    """A batch of tokens that are stored at `slots` and not attended: each is a row of length zero."""
    return NativeBatch.from_tensors(
        torch.arange(len(slots) + 1, dtype=torch.int32),
        torch.zeros(len(slots), dtype=torch.int32),
        torch.full((1, 1), -1, dtype=torch.int32).expand(len(slots), 1),
        torch.tensor(slots, dtype=torch.int64),
        torch.ones(len(slots), dtype=torch.bool),
    )

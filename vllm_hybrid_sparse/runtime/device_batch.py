"""The requests of one step whose queries, keys and values lie on a GPU: prompts in chunks, and decode rows.

vLLM's block tables lie on the GPU too. The worker mirrors them in host memory, so that nothing has to be copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.runtime.residency import Divide, ResidentRows
from vllm_hybrid_sparse.runtime.step_rows import RankedRows
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.values import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens of one request that are computed together and attend exactly, to each other and to all before them."""

    first_token: int  # the chunk's first, in the batch
    tokens: int
    context_tokens: int  # the request's earlier tokens, which are in the host store
    block_table: Tensor  # [blocks] int32, in host memory
    pages_per_block: int
    slot: int = -1  # where a layer keeps the request's state, if it does

    @property
    def seq_len(self) -> int:
        """Tokens of the request, the chunk's included."""
        return self.context_tokens + self.tokens

    def store_pages(self, first: int, end: int) -> Tensor:
        """Where pages `first` to `end` (excluded) of the request lie: pages of the host store, [end - first] int64."""
        pages = torch.arange(first, end)
        return self.block_table[pages // self.pages_per_block].long() * self.pages_per_block + (
            pages % self.pages_per_block
        )

    @property
    def written_pages(self) -> Tensor:
        """Pages of the host store that the chunk's tokens are stored in."""
        return self.store_pages(self.context_tokens // PAGE_TOKENS, -(-self.seq_len // PAGE_TOKENS))


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """One step's batch, divided once for all layers."""

    decode: TieredBatch  # of the two-tier rows alone: token i of it is row i
    decode_tokens: tuple[int, ...]  # the two-tier rows' tokens in the step's batch
    chunks: tuple[PromptChunk, ...]
    resident: ResidentRows | None = None  # decode rows that the device reads by itself
    ranked: tuple[RankedRows, ...] = ()  # decode rows whose pages the device chooses by itself

    @classmethod
    def from_tensors(
        cls,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        decode_mask: Tensor,
        block_tables: Sequence[Sequence[int]],
        block_tokens: int,
        slots: Tensor | None = None,
        divide: Divide | None = None,
    ) -> Self:
        """Check and divide. KernelError if a block table is too short for its request.

        query_start_loc   [requests + 1] int32   on the CPU, as are all
        seq_lens          [requests] int32       tokens of each request, the batch's included
        decode_mask       [requests] bool        whether the prompt is computed; one query token then attends sparsely;
                                                 under HGCA only for requests whose state is for the tokens before it
        block_tables      [requests][blocks]     block ids
        slots             [requests] int32       where a layer keeps each request's state; None: the layers keep none
        divide            says which decode rows are resident or ranked; None: none is
        """
        starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        of_block = block_tokens // PAGE_TOKENS
        tables, chunks = [], []
        decodes: list[int] = []
        for request, seq_len in enumerate(lengths):
            tokens = starts[request + 1] - starts[request]
            table = torch.from_numpy(np.array(block_tables[request], dtype=np.int32))
            if len(table) * block_tokens < seq_len:
                raise KernelError(f"block_tables={len(table)} blocks of a request of {seq_len} tokens: too few")
            if tokens == 1 and bool(decode_mask[request]):
                decodes.append(request)
                tables.append(table)
            elif tokens:
                slot = -1 if slots is None else int(slots[request])
                chunks.append(PromptChunk(starts[request], tokens, seq_len - tokens, table, of_block, slot))
        written = [page for chunk in chunks for page in chunk.written_pages.tolist()]
        tokens = [starts[request] for request in decodes]
        resident = entering = ranked = None
        if divide is not None and (divided := divide(tokens, tables, [lengths[row] for row in decodes], written)):
            resident, entering, ranked = divided.rows, divided.entering, divided.ranked
            stays = [ranked is None and not row for row in divided.resident.tolist()]
            decodes, tables, tokens = (list(compress(of_rows, stays)) for of_rows in (decodes, tables, tokens))
        decode = _decode_batch(
            tables,
            [lengths[request] for request in decodes],
            block_tokens,
            None if slots is None else slots[decodes],
            written,
        )
        return cls(replace(decode, entering=entering), tuple(tokens), tuple(chunks), resident, ranked or ())


def _decode_batch(
    tables: Sequence[Tensor],
    seq_lens: Sequence[int],
    block_tokens: int,
    slots: Tensor | None,
    written: Sequence[int],
) -> TieredBatch:
    """Rows of one token each, the last of their requests."""
    rows = len(tables)
    block_table = torch.zeros(rows, max((len(table) for table in tables), default=0), dtype=torch.int32)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    places = [
        int(table[(seq_len - 1) // block_tokens]) * block_tokens + (seq_len - 1) % block_tokens
        for table, seq_len in zip(tables, seq_lens, strict=True)
    ]
    return TieredBatch.from_tensors(
        torch.arange(rows + 1, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        block_table,
        torch.tensor(places, dtype=torch.int64),
        torch.ones(rows, dtype=torch.bool),
        slots,
        written_pages=written,
    )

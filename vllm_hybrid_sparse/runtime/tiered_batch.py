"""The requests of one step with a device: what the native core computes, and the decode rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.runtime.entrance import Entering
from vllm_hybrid_sparse.runtime.readings import ReadingWave
from vllm_hybrid_sparse.runtime.residency import Divide, ResidentRows
from vllm_hybrid_sparse.runtime.step_rows import RankedRows
from vllm_hybrid_sparse.values import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class TieredBatch:
    """One step's batch, divided once for all layers."""

    native: NativeBatch  # all requests; decode rows have length 0 here, so they are appended but not attended
    rows: tuple[int, ...]  # query tokens of the two-tier rows, in the batch
    seq_lens: tuple[int, ...]  # of the two-tier rows' requests, the new token included
    block_tables: Tensor  # [rows, blocks] int32
    stored: NativeBatch  # of the two-tier rows, once their tokens are stored
    new_slots: tuple[int, ...]  # where each row's token is stored: block * block_tokens + offset; negative: nowhere
    written_pages: tuple[int, ...]  # pages of the host store that anything but decode rows writes
    resident: ResidentRows | None = None  # decode rows that the device reads by itself
    ranked: tuple[RankedRows, ...] = ()  # decode rows whose pages the device chooses by itself
    entering: Entering | None = None  # blocks that enter frames behind this step's attention
    slots: tuple[int, ...] = ()  # where a layer keeps the state of each row's request, if it does
    # By name, the waves of parts that all layers read alike; the first layer puts them here (`decode_rows.py`).
    waves: dict[str, list[ReadingWave]] = field(default_factory=dict)

    @classmethod
    def from_tensors(
        cls,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        decode_mask: Tensor,
        slots: Tensor | None = None,
        *,
        written_pages: Sequence[int] = (),
        divide: Divide | None = None,
    ) -> Self:
        """Check and divide. The arguments and errors are those of `NativeBatch.from_tensors`.

        decode_mask     under HGCA only for requests whose state is for the tokens before the new one
        written_pages   pages of the host store that something other than the batch's tokens writes
        divide          says which decode rows are resident or ranked; None: none is
        """
        NativeBatch.from_tensors(query_start_loc, seq_lens, block_table, slot_mapping, decode_mask, slots)
        decodes = decode_mask.bool() & (query_start_loc.diff() == 1)
        lengths = seq_lens.masked_fill(decodes, 0)
        native = NativeBatch.from_tensors(query_start_loc, lengths, block_table, slot_mapping, decode_mask, slots)
        requests = decodes.nonzero().flatten()
        tokens = query_start_loc[:-1][requests].long()
        others = torch.ones(native.num_tokens, dtype=torch.bool)
        others[tokens] = False
        stored = slot_mapping[: native.num_tokens][others]
        written = (*(stored[stored >= 0] // PAGE_TOKENS).unique().tolist(), *written_pages)
        divided = None
        if divide is not None:
            divided = divide(tokens.tolist(), block_table[requests].unbind(), seq_lens[requests].tolist(), written)
        if divided is not None:
            stays = np.zeros_like(divided.resident) if divided.ranked is not None else ~divided.resident
            requests = requests[torch.from_numpy(stays)]
            tokens = query_start_loc[:-1][requests].long()
        rows, row_tables = len(requests), block_table[requests]
        return cls(
            native=native,
            rows=tuple(tokens.tolist()),
            seq_lens=tuple(seq_lens[requests].tolist()),
            block_tables=row_tables,
            stored=NativeBatch.from_tensors(
                torch.arange(rows + 1, dtype=torch.int32),
                seq_lens[requests],
                row_tables,
                torch.full((rows,), -1, dtype=torch.int64),
                torch.ones(rows, dtype=torch.bool),
                torch.full((rows,), -1, dtype=torch.int32) if slots is None else slots[requests],
            ),
            new_slots=tuple(slot_mapping[tokens].tolist()),
            written_pages=written,
            resident=None if divided is None else divided.rows,
            ranked=() if divided is None else divided.ranked or (),
            entering=None if divided is None else divided.entering,
            slots=() if slots is None else tuple(slots[requests].tolist()),
        )

"""The host's part of one layer's step: the native core attends to candidates of groups where they lie."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState, attend_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.runtime.readings import Reading, kept_share, round_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """What the host did for one group."""

    state: HostState  # of the candidates alone
    pages_read: int  # from the reading's first on
    kept: float  # P_acc at the stop; 1 without a threshold
    looks: int = 0  # checks of the threshold


class HostSide:
    """Carries out readings on the host, with all threads of the native pool. Only for the step's thread."""

    def __init__(self, attention: NativeAttention) -> None:
        self._attention = attention

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        reading: Reading,
        pages: NDArray[np.int64],
        token_scores: Tensor | None = None,
    ) -> HostState:
        """Attend to some pages of a group.

        query          [group, head_dim]           of the KV dtype
        token_scores   [group, pages * 16] f32     out: the scaled score of every token
        """
        listed = torch.from_numpy(pages.astype(np.int32))
        return attend_pages(
            self._attention, query, kv_cache, block_table, reading.group.kv_head, listed, reading.seq_len, token_scores
        )

    def read(
        self, query: Tensor, kv_cache: Tensor, block_table: Tensor, reading: Reading, retained_lse: Tensor
    ) -> HostResult:
        """Read a group's candidates until it is enough, as the device would.

        query          [group, head_dim]  of the KV dtype
        retained_lse   [group] f32        of what the device has attended for the group
        """
        if reading.threshold is None:
            state = self.attend(query, kv_cache, block_table, reading, reading.pages)
            return HostResult(state=state, pages_read=len(reading.pages), kept=1.0)
        state = self.attend(query, kv_cache, block_table, reading, reading.pages[:0])
        kept, looks = 1.0, 0
        read = 0
        for begin, end in pairwise(round_ends([reading])[:, 0].tolist()):
            part = self.attend(query, kv_cache, block_table, reading, reading.pages[begin:end])
            out, lse = merge_states(state.out, state.lse, part.out, part.lse)
            state = HostState(out, lse, torch.minimum(state.lightest_lse, part.lightest_lse))
            read = end
            kept = kept_share(torch.logaddexp(retained_lse, state.lse), reading.log_rest(end, state.lightest_lse))
            looks += 1
            if kept > reading.threshold:
                break
        return HostResult(state=state, pages_read=read, kept=kept, looks=looks)

"""Two-tier rows under HGCA: the device attends the dense window while the host attends the packed entries.

Queries go to host memory, and tasks for the packed entries to the native pool. The states are merged by their
log-sum-exp (HGCA, section 3.3). The window's scores come back with its state, for the moving averages that decide what
is packed when it leaves the window (Algorithm 1).
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.hgca.native import PackedState, attend_packed, begin_row, end_row
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


class SalientRows:
    """Decode rows of layers of one shape. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention, host: HostSide) -> None:
        self._tier, self._attention, self._host = tier, attention, host
        self._retained = tier.settings.retained
        self._microbatch_pages = tier.settings.selection.microbatch_pages

    def decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        batch: TieredBatch,
        layer: _native.HgcaLayer,
        output: Tensor,
        output_rows: Sequence[int],
    ) -> None:
        """Compute the attention of the batch's decode rows, whose keys and values are stored.

        query         [tokens, q_heads, head_dim]   of the step, in host memory
        layer         the state of the requests in this layer, for the tokens before the rows
        output        [any, q_heads, head_dim]      where the device gives its results, with a row for each decode row
        """
        started = time.perf_counter()
        lengths = batch.seq_lens
        window = [len(self._retained.retained_pages(seq_len)) for seq_len in lengths]
        score_tokens = max(window) * PAGE_TOKENS
        step = DecodeRows.begin(
            self._tier, self._host, self._attention.scale, query, kv_cache, batch, score_tokens=score_tokens
        )
        attending = step.start("retained", self._retained.retained_pages, self._microbatch_pages)
        host_started = time.perf_counter()
        try:
            for slot, seq_len, table in zip(batch.slots, lengths, batch.block_tables, strict=True):
                begin_row(self._attention, layer, kv_cache, table, slot, seq_len)
            packed = attend_packed(self._attention, layer, batch.slots, step.queries)
        finally:
            host_busy_s = time.perf_counter() - host_started
            retained = step.finish(attending)  # if this step fails, nothing of it may still run
        states = step.rows.states
        window_lse = states.shown_lse.clone()
        hosted = _by_group(step, packed)
        self._tier.device.merge(states, hosted)
        self._tier.device.give(states, output, output_rows)
        assert states.shown_scores is not None
        for row, (slot, seq_len) in enumerate(zip(batch.slots, lengths, strict=True)):
            end_row(self._attention, layer, slot, seq_len, states.shown_scores[row], window_lse[row])
        on_host = TierStats(
            groups=len(step.groups()),
            groups_on_host=len(hosted),
            pages_on_host=packed.pages,
            host_busy_s=host_busy_s,
            step_s=time.perf_counter() - started,
        )
        self._tier.count(retained.stats + on_host, self._read(lengths, sum(window), packed.pages))

    def _read(self, lengths: Sequence[int], window_pages: int, packed_pages: int) -> DecodeStats:
        """How much of the cache the rows read; `window_pages` counts one KV head, `packed_pages` all."""
        kv_heads, page_bytes = self._tier.kv_heads, self._attention.layout.page_bytes
        pages = kv_heads * sum(-(-seq_len // PAGE_TOKENS) for seq_len in lengths)
        read = kv_heads * window_pages + packed_pages
        return DecodeStats(
            selections=kv_heads * len(lengths),
            pages_total=pages,
            pages_read=read,
            total_bytes=pages * page_bytes,
            read_bytes=read * page_bytes,
        )


def _by_group(step: DecodeRows, packed: PackedState) -> dict[GroupKey, HostState]:
    """The packed entries' states, for groups that have such entries."""
    heads = step.rows.states.heads
    nothing = torch.empty(0)  # no page of them is judged
    return {
        group: HostState(packed.out[group.row, heads(group)], packed.lse[group.row, heads(group)], nothing)
        for group in step.groups()
        if bool(packed.lse[group.row, heads(group)].isfinite().any())
    }

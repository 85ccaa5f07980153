"""Two-tier rows of the page policies: retained set, scores, and the candidates that each group may read.

The host scores all candidates while the device attends the retained sets. Then the host orders each group's candidates,
and both sides read them (`both_sides.py`).
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection
from vllm_hybrid_sparse.kernels.paged_attention.page_tasks import OrderedPages, order_candidates, score_candidates
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.runtime.both_sides import BothSides, ReadResult
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


class PageRows:
    """Decode rows of layers of one shape. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention, host: HostSide) -> None:
        settings = tier.settings
        self._tier, self._attention, self._host = tier, attention, host
        self._sides = BothSides(tier, host)
        self._spec, self._retained = settings.selection, settings.retained
        self._selection = native_selection(self._spec, self._retained)

    def decode(
        self, query: Tensor, kv_cache: Tensor, batch: TieredBatch, output: Tensor, output_rows: Sequence[int]
    ) -> None:
        """Compute the attention of the batch's decode rows, whose keys and values are stored.

        query    [tokens, q_heads, head_dim]   of the step, in host memory
        output   [any, q_heads, head_dim]      where the device gives its results, with a row for each decode row
        """
        started = time.perf_counter()
        tier = self._tier
        step = DecodeRows.begin(tier, self._host, self._attention.scale, query, kv_cache, batch)
        states = step.rows.states
        attending = step.start("retained", self._retained.retained_pages, self._spec.microbatch_pages)
        score_candidates(self._attention, self._selection, kv_cache, step.queries, batch.stored)  # meanwhile
        retained = step.finish(attending)
        ordered = order_candidates(self._attention, self._selection, states.shown_lse)
        readings = {group: self._reading(step, group, of) for group, of in ordered.items()}
        gives = self._spec.attributed and any(reading.log_unread is not None for reading in readings.values())
        alone = tier.device.copied(states) if gives else None
        read = self._sides.read(step, readings)
        if alone is not None:
            tier.device.attribute(states, alone, self._log_unread(step, readings, read.pages), self._spec.attributed)
        tier.device.give(states, output, output_rows)
        tiers = retained.stats + read.stats + TierStats(step_s=time.perf_counter() - started)
        self._count(step, tiers, readings, read, ordered)

    def _log_unread(
        self, step: DecodeRows, readings: Mapping[GroupKey, Reading], pages: Mapping[GroupKey, int]
    ) -> Tensor:
        """[rows, q_heads], log weight that key codes estimate for unread candidates; -inf for groups that read none."""
        states = step.rows.states
        log_unread = torch.full(tuple(states.lse.shape), -torch.inf)
        for group, reading in readings.items():
            if pages[group] and reading.log_unread is not None:
                unread = reading.log_unread[reading.estimate_after(pages[group])]
                log_unread[group.row, states.heads(group)] = torch.from_numpy(unread)
        return log_unread

    def _reading(self, step: DecodeRows, group: GroupKey, ordered: OrderedPages) -> Reading:
        """What a group may read, and what decides when it stops."""
        seq_len = step.batch.seq_lens[group.row]
        first, end = self._retained.candidate_range(seq_len)
        looks = self._spec.threshold < 1 and end > first
        return Reading(
            group=group,
            pages=ordered.pages,
            seq_len=seq_len,
            microbatch_pages=self._spec.microbatch_pages,
            threshold=self._spec.threshold if looks else None,
            expected=ordered.expected,
            candidates=end - first,
            scored=ordered.scored,
            log_unread=ordered.log_unread,
            lightest_rest=not self._spec.estimated_remainder,
        )

    def _count(
        self,
        step: DecodeRows,
        tiers: TierStats,
        readings: Mapping[GroupKey, Reading],
        read: ReadResult,
        ordered: Mapping[GroupKey, OrderedPages],
    ) -> None:
        """Add up what was done."""
        kept, stops = 0.0, 0
        looked = [group for group, reading in readings.items() if reading.threshold is not None]
        for group in looked:
            if group in read.hosted:
                kept += read.hosted[group].kept
            else:
                kept += float(step.rows.states.kept[group]) if len(readings[group].pages) else ordered[group].share
            stops += read.pages[group] < readings[group].candidates
        layout = self._attention.layout
        pages = sum(-(-reading.seq_len // PAGE_TOKENS) for reading in readings.values())
        candidates = sum(reading.candidates for reading in readings.values())
        pages_read = pages - candidates + sum(read.pages.values())
        looks = sum(result.looks for result in read.hosted.values())
        if looked:
            looks += read.rounds  # on the device every round of candidates is followed by a look
        summaries = sum(reading.scored for reading in readings.values()) * layout.summary_bytes
        self._tier.count(
            tiers + TierStats(early_stops=stops, looked_groups=len(looked), kept_mass=kept),
            DecodeStats(
                selections=len(readings),
                pages_total=pages,
                pages_read=pages_read,
                pages_wasted=tiers.pages_wasted,
                total_bytes=pages * layout.page_bytes,
                read_bytes=(pages_read + tiers.pages_wasted) * layout.page_bytes + summaries,
                summary_bytes=summaries,
                early_stops=stops,
                judged=len(looked),
                kept_mass=kept,
                microbatches=looks,
            ),
        )

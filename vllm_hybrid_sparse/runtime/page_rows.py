"""Decode rows of the page policies on two tiers: retained set, scores, and the candidates that each group may read.

The host ranks every group's candidates while the device attends the retained sets; then both read (`both_sides.py`).
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.runtime.both_sides import BothSides, ReadResult
from vllm_hybrid_sparse.runtime.candidates import Ranker, no_scores
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostSide
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


class PageRows:
    """Decode rows of layers of one shape. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention, scale: float, host: HostSide) -> None:
        settings = tier.settings
        self._tier, self._attention, self._scale, self._host = tier, attention, scale, host
        self._sides = BothSides(tier, host)
        self._ranker = Ranker(settings.selection, settings.retained, attention.summary == "key_codes")
        self._attributed = settings.selection.attributed
        self.last_pages: dict[GroupKey, tuple[int, ...]] = {}  # candidates that the last call read, in their order

    def decode(
        self, query: Tensor, kv_cache: Tensor, batch: TieredBatch, output: Tensor, output_rows: Sequence[int]
    ) -> None:
        """Attend with the batch's decode rows, whose keys and values are stored.

        query    [tokens, q_heads, head_dim]   of the step, in host memory
        output   [any, q_heads, head_dim]      where the device gives its results, with a row for each decode row
        """
        started = time.perf_counter()
        tier = self._tier
        step = DecodeRows.begin(tier, self._host, self._scale, query, kv_cache, batch)
        states = step.rows.states
        retained_pages = [tuple(tier.settings.retained.retained_pages(seq_len)) for seq_len in batch.seq_lens]
        attending = step.start(retained_pages, tier.settings.selection.microbatch_pages)
        scores = [self._scores(step, row) for row in range(len(step.queries))]  # while the device attends
        retained = step.finish(attending)
        readings, shares = self._rank(step, scores)
        gives = self._attributed and any(reading.log_unread is not None for reading in readings.values())
        alone = tier.device.copied(states) if gives else None
        read = self._sides.read(step, readings)
        if alone is not None:
            tier.device.attribute(states, alone, self._log_unread(step, readings, read.pages), self._attributed)
        tier.device.give(states, output, output_rows)
        self.last_pages = {group: readings[group].pages[:count] for group, count in read.pages.items()}
        tiers = retained.stats + read.stats + TierStats(step_s=time.perf_counter() - started)
        self._count(step, tiers, readings, read, shares)

    def _log_unread(
        self, step: DecodeRows, readings: Mapping[GroupKey, Reading], pages: Mapping[GroupKey, int]
    ) -> Tensor:
        """What key codes say of the candidates that were not read, [rows, q_heads], for groups that have read some."""
        states = step.rows.states
        log_unread = torch.full(tuple(states.lse.shape), -torch.inf)
        for group, reading in readings.items():
            if pages[group] and reading.log_unread is not None:
                looked = -(-pages[group] // reading.microbatch_pages) - 1
                log_unread[group.row, states.heads(group)] = torch.from_numpy(reading.log_unread[looked]).float()
        return log_unread

    def _scores(self, step: DecodeRows, row: int) -> Tensor:
        """Scores of one decode row's candidates, [q_heads, scored pages]."""
        first, end = self._ranker.scored_pages(step.batch.seq_lens[row])
        if first == end:
            return no_scores(self._attention.num_q_heads)
        table = step.batch.block_tables[row]
        return score_pages(self._attention, step.queries[row], step.kv_cache, table, first, end)

    def _rank(
        self, step: DecodeRows, scores: Sequence[Tensor]
    ) -> tuple[dict[GroupKey, Reading], dict[GroupKey, float]]:
        """What each group may read, and P_acc before it reads any of that."""
        readings, shares = {}, {}
        for group in step.groups():
            of_group = scores[group.row][step.rows.states.heads(group)]
            seq_len = step.batch.seq_lens[group.row]
            readings[group], shares[group] = self._ranker.reading(group, seq_len, of_group, step.lse(group))
        return readings, shares

    def _count(
        self,
        step: DecodeRows,
        tiers: TierStats,
        readings: Mapping[GroupKey, Reading],
        read: ReadResult,
        shares: Mapping[GroupKey, float],
    ) -> None:
        """Add up what was done."""
        kept, stops = 0.0, 0
        looked = [group for group, reading in readings.items() if reading.threshold is not None]
        for group in looked:
            if group in read.hosted:
                kept += read.hosted[group].kept
            else:
                kept += float(step.rows.states.kept[group]) if readings[group].pages else shares[group]
            stops += read.pages[group] < readings[group].candidates
        layout = self._attention.layout
        pages = sum(-(-reading.seq_len // PAGE_TOKENS) for reading in readings.values())
        candidates = sum(reading.candidates for reading in readings.values())
        pages_read = pages - candidates + sum(read.pages.values())
        looks = sum(result.looks for result in read.hosted.values())
        if looked:
            looks += read.microbatches  # on the device each microbatch of candidates is attended before a look
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

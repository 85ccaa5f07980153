"""One step of one layer on two tiers: append, retained set, scores, plan, and the candidates on device and host.

The host store stays the truth. The native core appends to it, computes prefill rows and summaries as it does without a
device; decode rows are left to this executor.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.policy.planner import PLANNERS
from vllm_hybrid_sparse.policy.task_queue import TaskQueue
from vllm_hybrid_sparse.runtime.candidates import Ranker, no_scores
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostResult, HostSide
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.runtime.salient_rows import SalientRows
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey, GroupTask, PageKey


class TieredLayer:
    """Layers of one shape whose decode rows a device and its host share. One call at a time."""

    def __init__(self, tier: DeviceTier, attention: NativeAttention, scale: float) -> None:
        settings = tier.settings
        self._tier = tier
        self._attention = attention
        self._scale = scale
        self._selection = native_selection(settings.selection, settings.retained)
        self._ranker = Ranker(settings.selection, settings.retained, attention.summary == "key_codes")
        self._plan = PLANNERS[settings.host_share or "none"]
        self._attributed = settings.selection.attributed
        self._asks_residency = settings.host_share == "queue"
        self._host = HostSide(attention)
        self._salient = SalientRows(tier, attention, scale, self._host)
        self.last_pages: dict[GroupKey, tuple[int, ...]] = {}  # candidates that the last call read, in their order

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        batch: TieredBatch,
        output: Tensor,
        hgca: _native.HgcaLayer | None = None,
        *,
        device_output: tuple[Tensor, Sequence[int]] | None = None,
    ) -> None:
        """Append the batch's keys and values, summarise the pages they fill, attend, and write `output`.

        The arguments are those of `NativeAttention.forward`.

        device_output   where the decode rows' attention goes instead of to `output`: a tensor where the device gives
                        it, and its row for each decode row
        """
        self._attention.forward(query, key, value, kv_cache, batch.native, self._selection, None, output, hgca)
        if key is not None and value is not None:
            self._write_through(key, value, self._tier.layer_of(kv_cache), batch)
        target = device_output or (output, batch.rows)
        if batch.rows and hgca is not None:
            self._salient.decode(query, kv_cache, batch, hgca, *target)
        elif batch.rows:
            self._decode(query, kv_cache, batch, *target)

    def _write_through(self, key: Tensor, value: Tensor, layer: int, batch: TieredBatch) -> None:
        """Keep the pool true: pages that prefill has written are dropped, a decode row's token is written there too."""
        self.drop_pages(layer, batch.written_pages)
        loader, kv_heads = self._tier.loader, range(self._attention.num_kv_heads)
        stored = [(row, slot) for row, slot in zip(batch.rows, batch.new_slots, strict=True) if slot >= 0]
        if stored:
            tokens = [row for row, _ in stored]
            keys = [PageKey(layer, head, slot // PAGE_TOKENS) for _, slot in stored for head in kv_heads]
            offsets = [slot % PAGE_TOKENS for _, slot in stored for _ in kv_heads]
            loader.append(keys, offsets, key[tokens].flatten(0, 1), value[tokens].flatten(0, 1)).result()

    def drop_pages(self, layer: int, pages: Sequence[int]) -> None:
        """Have the pool forget pages of the host store, of all KV heads of a layer, that are written."""
        if pages:
            heads = range(self._attention.num_kv_heads)
            self._tier.loader.forget([PageKey(layer, head, page) for page in pages for head in heads]).result()

    def _decode(
        self, query: Tensor, kv_cache: Tensor, batch: TieredBatch, output: Tensor, output_rows: Sequence[int]
    ) -> None:
        started = time.perf_counter()
        tier = self._tier
        step = DecodeRows.begin(tier, self._host, self._scale, query, kv_cache, batch)
        rows = step.rows
        attending = step.start_retained(tier.settings.retained, tier.settings.selection.microbatch_pages)
        scores = [self._scores(step, row) for row in range(len(step.queries))]  # while the device attends
        retained = step.finish(attending)
        readings, shares = self._rank(step, scores)
        gives = self._attributed and any(reading.log_unread is not None for reading in readings.values())
        alone = tier.device.copied(rows.states) if gives else None
        queue = TaskQueue(self._plan(self._tasks(step, readings, scores)))
        attending = tier.launcher.submit(tier.side.run, rows, self._waves(queue, readings))
        try:
            hosted, host_busy_s = self._read_on_host(step, queue, readings)
        finally:
            wait([attending])  # nothing of this step may still run when it has failed
        selected = step.finish(attending)
        tier.device.merge(rows.states, {group: result.state for group, result in hosted.items()})
        pages = {group: selected.pages_read.get(group, 0) for group in readings}
        pages |= {group: result.pages_read for group, result in hosted.items()}
        if alone is not None:
            tier.device.attribute(rows.states, alone, self._log_unread(step, readings, pages), self._attributed)
        tier.device.give(rows.states, output, output_rows)
        self.last_pages = {group: readings[group].pages[:count] for group, count in pages.items()}
        step_s = time.perf_counter() - started
        tiers = retained.stats + selected.stats + TierStats(host_busy_s=host_busy_s, step_s=step_s)
        self._count(step, tiers, readings, hosted, shares, selected.stats.microbatches)

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
        for row, seq_len in enumerate(step.batch.seq_lens):
            for head in range(self._attention.num_kv_heads):
                group = GroupKey(row, head)
                of_group = scores[row][step.rows.states.heads(group)]
                readings[group], shares[group] = self._ranker.reading(group, seq_len, of_group, step.lse(group))
        return readings, shares

    def _tasks(
        self, step: DecodeRows, readings: Mapping[GroupKey, Reading], scores: Sequence[Tensor]
    ) -> list[GroupTask]:
        """The groups that have anything to read, and how much of it the device lacks, where the plan asks for that."""
        tasks = []
        for group, reading in readings.items():
            if not reading.pages:
                continue
            missing = 0
            if self._asks_residency:
                missing = self._tier.loader.missing(step.rows.keys(group, reading.pages)).result()
            scored = scores[group.row].shape[1]
            tasks.append(GroupTask(group=group, pages=reading.pages, missing=missing, scored=scored))
        return tasks

    def _waves(self, queue: TaskQueue, readings: Mapping[GroupKey, Reading]) -> Iterator[list[Reading]]:
        """What the device takes from the queue, each time that it has nothing more to load."""
        while tasks := queue.take_for_device(self._tier.groups_at_once):
            yield [readings[task.group] for task in tasks]

    def _read_on_host(
        self, step: DecodeRows, queue: TaskQueue, readings: Mapping[GroupKey, Reading]
    ) -> tuple[dict[GroupKey, HostResult], float]:
        """Work for the host until the queue has nothing for it; what came of it, and the time that it took."""
        results, busy_s = {}, 0.0
        while task := queue.take_for_host():
            started = time.perf_counter()
            group, table = task.group, step.batch.block_tables[task.group.row]
            results[group] = self._host.read(step.query(group), step.kv_cache, table, readings[group], step.lse(group))
            busy_s += time.perf_counter() - started
        return results, busy_s

    def _count(
        self,
        step: DecodeRows,
        tiers: TierStats,
        readings: Mapping[GroupKey, Reading],
        hosted: Mapping[GroupKey, HostResult],
        shares: Mapping[GroupKey, float],
        on_device: int,
    ) -> None:
        """Add up what was done; `on_device`: microbatches of candidates attended on the device, each before a look."""
        kept, stops = 0.0, 0
        looked = [group for group, reading in readings.items() if reading.threshold is not None]
        for group in looked:
            if group in hosted:
                kept += hosted[group].kept
            else:
                kept += float(step.rows.states.kept[group]) if readings[group].pages else shares[group]
            stops += len(self.last_pages[group]) < readings[group].candidates
        layout = self._attention.layout
        pages = sum(-(-reading.seq_len // PAGE_TOKENS) for reading in readings.values())
        candidates = sum(reading.candidates for reading in readings.values())
        read = pages - candidates + sum(map(len, self.last_pages.values()))
        scored = sum(end - first for first, end in map(self._ranker.scored_pages, step.batch.seq_lens))
        summaries = scored * self._attention.num_kv_heads * layout.summary_bytes
        self._tier.count(
            tiers
            + TierStats(
                groups=len(readings),
                groups_on_host=len(hosted),
                pages_on_host=sum(result.pages_read for result in hosted.values()),
                early_stops=stops,
                looked_groups=len(looked),
                kept_mass=kept,
            ),
            DecodeStats(
                selections=len(readings),
                pages_total=pages,
                pages_read=read,
                pages_wasted=tiers.pages_wasted,
                total_bytes=pages * layout.page_bytes,
                read_bytes=(read + tiers.pages_wasted) * layout.page_bytes + summaries,
                summary_bytes=summaries,
                early_stops=stops,
                judged=len(looked),
                kept_mass=kept,
                microbatches=sum(result.looks for result in hosted.values()) + (on_device if looked else 0),
            ),
        )

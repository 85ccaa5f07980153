"""Device and host read the candidates of a step's groups side by side, from one plan (Fluxion, section 6)."""

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass

from vllm_hybrid_sparse.metrics import TierStats
from vllm_hybrid_sparse.policy.planner import PLANNERS
from vllm_hybrid_sparse.policy.task_queue import TaskQueue
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.host_side import HostResult, HostSide
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import GroupKey, GroupTask


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """The result of some readings."""

    pages: dict[GroupKey, int]  # how many of each reading's pages were read, from the first on
    hosted: dict[GroupKey, HostResult]  # the groups that the host read
    rounds: int  # attended on the device, summed over all readings
    stats: TierStats


class BothSides:
    """Carries out readings, each group on one side. The setting `host_share` says which."""

    def __init__(self, tier: DeviceTier, host: HostSide) -> None:
        self._tier, self._host = tier, host
        share = tier.settings.host_share or "none"
        self._plan = PLANNERS[share]
        self._asks_residency = share == "queue"

    def read(self, step: DecodeRows, readings: Mapping[GroupKey, Reading]) -> ReadResult:
        """Attend to the readings' pages until that is enough, and fold the result into the rows' states."""
        queue = TaskQueue(self._plan(self._tasks(step, readings)))
        attending = self._tier.launcher.submit(self._tier.side.run, step.rows, self._waves(queue, readings))
        try:
            hosted, host_busy_s = self._read_on_host(step, queue, readings)
        finally:
            wait([attending])  # if this step fails, nothing of it may still run
        selected = step.finish(attending)
        self._tier.device.merge(step.rows.states, {group: result.state for group, result in hosted.items()})
        pages = {group: selected.pages_read.get(group, 0) for group in readings}
        pages |= {group: result.pages_read for group, result in hosted.items()}
        on_host = TierStats(
            groups=len(readings),
            groups_on_host=len(hosted),
            pages_on_host=sum(result.pages_read for result in hosted.values()),
            host_busy_s=host_busy_s,
        )
        return ReadResult(
            pages=pages, hosted=hosted, rounds=selected.stats.microbatches, stats=selected.stats + on_host
        )

    def _tasks(self, step: DecodeRows, readings: Mapping[GroupKey, Reading]) -> list[GroupTask]:
        """The groups with anything to read, and how many of their pages the device lacks, if the plan asks for that."""
        wanted = [reading for reading in readings.values() if len(reading.pages)]
        missing = [0] * len(wanted)
        if self._asks_residency and wanted:
            missing = self._tier.loader.missing(step.rows.stored_pages(ReadingWave.of(wanted))).result().tolist()
        return [
            GroupTask(group=reading.group, pages=len(reading.pages), missing=lacking)
            for reading, lacking in zip(wanted, missing, strict=True)
        ]

    def _waves(self, queue: TaskQueue, readings: Mapping[GroupKey, Reading]) -> Iterator[ReadingWave]:
        """The waves that the device takes from the queue, one each time it has nothing more to load."""
        while tasks := queue.take_for_device(self._tier.groups_at_once):
            yield self._tier.side.wave([readings[task.group] for task in tasks])

    def _read_on_host(
        self, step: DecodeRows, queue: TaskQueue, readings: Mapping[GroupKey, Reading]
    ) -> tuple[dict[GroupKey, HostResult], float]:
        """Let the host work until the queue has nothing for it. Returns its results and the time it took."""
        results, busy_s = {}, 0.0
        while task := queue.take_for_host():
            started = time.perf_counter()
            group, table = task.group, step.batch.block_tables[task.group.row]
            results[group] = self._host.read(step.query(group), step.kv_cache, table, readings[group], step.lse(group))
            busy_s += time.perf_counter() - started
        return results, busy_s

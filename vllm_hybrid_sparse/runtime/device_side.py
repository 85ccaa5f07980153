"""The device's part of one layer's step: groups in waves that fit the pool, each wave microbatch by microbatch.

Microbatch i + 1 is loaded while microbatch i is attended (PSA, section 3.3), so a group pins two of them at a time.
Runs on the launcher's thread, beside the step's own, which works for the host meanwhile.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import CapacityError, LoadError
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.transfers import Load, Loaded, Loader
from vllm_hybrid_sparse.metrics import TierStats
from vllm_hybrid_sparse.runtime.device import Attended, Device, RowStates, WaveFlags
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.values import MICROBATCHES_IN_FLIGHT, GroupKey, PageKey


@dataclass(slots=True)
class DeviceResult:
    """What the device did for some readings."""

    stats: TierStats = field(default_factory=TierStats)
    pages_read: dict[GroupKey, int] = field(default_factory=dict)  # the first so many of the reading's; failed included
    failed: list[tuple[Reading, tuple[int, ...], CapacityError | LoadError]] = field(default_factory=list)  # pages, why


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """The decode rows of one layer's step, as the device side sees them."""

    layer: int
    source: HostPages
    scale: float
    block_tables: Sequence[NDArray[np.int32]]  # [rows][blocks]
    states: RowStates

    def keys(self, group: GroupKey, pages: Sequence[int]) -> list[PageKey]:
        """Where pages of a row's request lie in the host store."""
        table, of_block = self.block_tables[group.row], self.source.pages_per_block
        listed = np.asarray(pages, dtype=np.int64)
        places = table[listed // of_block].astype(np.int64) * of_block + listed % of_block
        return [PageKey(self.layer, group.kv_head, place) for place in places.tolist()]


class DeviceSide:
    """Carries readings out on a device."""

    def __init__(self, loader: Loader, device: Device) -> None:
        self._loader = loader
        self._device = device

    def run(self, rows: LayerRows, waves: Iterable[Sequence[Reading]]) -> DeviceResult:
        """Read wave after wave; the pages of `MICROBATCHES_IN_FLIGHT` microbatches of each must fit the pool.

        What could not be loaded is named in the result, and the rest of the wave goes on.
        """
        result = DeviceResult()
        for wave in waves:
            self._run_wave(rows, wave, result)
        return result

    def _run_wave(self, rows: LayerRows, wave: Sequence[Reading], result: DeviceResult) -> None:
        on_device = self._device.open_wave(rows.states, rows.scale, wave)
        flags = on_device.flags
        flying: deque[tuple[int, Future[Loaded], Future[Attended]]] = deque()
        for index in count():
            if len(flying) == MICROBATCHES_IN_FLIGHT:
                self._land(wave, result, *flying.popleft())
            if flags.stop[0] or not any(reading.microbatch(index) for reading in wave):
                break
            load = Load(
                source=rows.source,
                parts=[rows.keys(reading.group, reading.microbatch(index)) for reading in wave],
                unwanted=_unwanted(flags, wave, index),
            )
            loaded = self._loader.load(load)
            flying.append((index, loaded, on_device.attend(loaded, index)))
        while flying:
            self._land(wave, result, *flying.popleft())

    def _land(
        self,
        wave: Sequence[Reading],
        result: DeviceResult,
        index: int,
        load: Future[Loaded],
        attend: Future[Attended],
    ) -> None:
        """Wait until a microbatch is attended, give its slots back, and count."""
        attended = attend.result()
        loaded = load.result()
        self._loader.release(loaded)
        for part in (*attended.parts, *loaded.errors):
            group, pages = wave[part].group, wave[part].microbatch(index)
            result.pages_read[group] = result.pages_read.get(group, 0) + len(pages)
        for part, error in loaded.errors.items():
            result.failed.append((wave[part], wave[part].microbatch(index), error))
        result.stats += TierStats(
            pages_wanted=loaded.wanted_pages,
            pages_hit=loaded.hit_pages,
            pages_fetched=loaded.fetched_pages,
            pages_wasted=attended.wasted_pages,
            microbatches=len(attended.parts),
            failed_loads=len(loaded.errors),
            device_busy_s=attended.busy_s,
        )


def _unwanted(flags: WaveFlags, wave: Sequence[Reading], index: int) -> Callable[[int], bool]:
    def unwanted(part: int) -> bool:
        return not wave[part].microbatch(index) or flags.is_done(wave[part].group)

    return unwanted

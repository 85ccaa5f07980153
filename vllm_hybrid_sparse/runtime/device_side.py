"""The device's part of one layer's step: groups in waves that fit the pool, each wave round by round (`readings.py`).

Round i + 1 is loaded while round i is attended (PSA, section 3.3, whose rounds are microbatches), so a group pins two
rounds at a time. This runs on the launcher's thread, while the step's own thread works for the host.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_hybrid_sparse.errors import CapacityError, LoadError
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.page_keys import NO_PAGE, page_numbers
from vllm_hybrid_sparse.memory.transfers import Load, Loaded, Loader
from vllm_hybrid_sparse.metrics import TierStats
from vllm_hybrid_sparse.runtime.device import Attended, Device, RowStates, WaveFlags
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave
from vllm_hybrid_sparse.values import MICROBATCHES_IN_FLIGHT, GroupKey

_POOL_PARTS = 4
"""Rounds larger than a microbatch may take one part in this many of a layer's slots, because what they pin evicts
what the next layers would find. Estimated, not measured."""


@dataclass(slots=True)
class DeviceResult:
    """The device's result for some readings."""

    stats: TierStats = field(default_factory=TierStats)
    pages_read: dict[GroupKey, int] = field(default_factory=dict)  # from the reading's first on; failed ones included
    # Readings, their pages that could not be loaded, and why.
    failed: list[tuple[Reading, NDArray[np.int64], CapacityError | LoadError]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """The decode rows of one layer's step, as the device side sees them."""

    layer: int
    source: HostPages
    scale: float
    block_tables: NDArray[np.int32]  # [rows, blocks]
    states: RowStates

    def stored_pages(self, wave: ReadingWave) -> NDArray[np.int64]:
        """The numbers that the wave's pages have in the host store, padded with NO_PAGE."""
        blocks, of_block = np.divmod(wave.pages, self.source.pages_per_block)  # NO_PAGE: masked below
        places = self.block_tables[wave.rows[:, None], blocks] * np.int64(self.source.pages_per_block) + of_block
        return np.where(wave.pages < 0, NO_PAGE, page_numbers(self.layer, wave.kv_heads[:, None], places))


class DeviceSide:
    """Carries out readings on a device."""

    def __init__(self, loader: Loader, device: Device) -> None:
        self._loader = loader
        self._device = device

    def wave(self, readings: Sequence[Reading]) -> ReadingWave:
        """Put readings side by side, in rounds that fit the pool. It must have room for two microbatches of each."""
        return ReadingWave.of(readings, self._loader.pool.layer_slots // _POOL_PARTS)

    def run(self, rows: LayerRows, waves: Iterable[ReadingWave]) -> DeviceResult:
        """Read wave after wave.

        The result names pages that could not be loaded; the rest of the wave goes on.
        """
        result = DeviceResult()
        for wave in waves:
            self._run_wave(rows, wave, result)
        return result

    def _run_wave(self, rows: LayerRows, wave: ReadingWave, result: DeviceResult) -> None:
        on_device = self._device.open_wave(rows.states, rows.scale, wave)
        flags, pages = on_device.flags, rows.stored_pages(wave)
        flying: deque[tuple[int, Future[Loaded], Future[Attended]]] = deque()
        for index in range(wave.rounds):
            if len(flying) == MICROBATCHES_IN_FLIGHT:
                self._land(wave, result, *flying.popleft())
            if flags.stop[0]:
                break
            of_round = wave.of_round(pages, index, NO_PAGE)
            loaded = self._loader.load(Load(source=rows.source, pages=of_round, unwanted=_unwanted(flags, wave, index)))
            flying.append((index, loaded, on_device.attend(loaded, index)))
        while flying:
            self._land(wave, result, *flying.popleft())

    def _land(
        self,
        wave: ReadingWave,
        result: DeviceResult,
        index: int,
        load: Future[Loaded],
        attend: Future[Attended],
    ) -> None:
        """Wait until a round is attended, give its slots back, and count."""
        attended = attend.result()
        loaded = load.result()
        self._loader.release(loaded)
        for part in (*attended.parts, *loaded.errors):
            result.pages_read[wave.readings[part].group] = int(wave.ends[index + 1, part])
        for part, error in loaded.errors.items():
            result.failed.append((wave.readings[part], wave.round_pages(part, index), error))
        result.stats += TierStats(
            pages_wanted=loaded.wanted_pages,
            pages_hit=loaded.hit_pages,
            pages_fetched=loaded.fetched_pages,
            pages_wasted=attended.wasted_pages,
            microbatches=len(attended.parts),
            failed_loads=len(loaded.errors),
            device_busy_s=attended.busy_s,
        )


def _unwanted(flags: WaveFlags, wave: ReadingWave, index: int) -> Callable[[], NDArray[np.bool_]]:
    return lambda: (wave.round_lengths(index) == 0) | flags.are_done(wave)

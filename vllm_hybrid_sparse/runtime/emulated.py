"""A device made of CPU memory and a thread: it makes every decision that a GPU needs, without a GPU's speed.

Its stream is an ordered queue on its own thread, so that loading, attending and the step overlap as they do on a GPU.
The arithmetic is plain torch in float32.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.kernels.frame_attention.reference import attend_frames
from vllm_hybrid_sparse.kernels.merge.attribution import attribute_unread
from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_slots
from vllm_hybrid_sparse.memory.device_pool import DevicePool
from vllm_hybrid_sparse.memory.transfers import Loaded
from vllm_hybrid_sparse.runtime.device import Attended, PartialAttention, RowStates, WaveFlags
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave, kept_share
from vllm_hybrid_sparse.runtime.residency import ResidentRows
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey

THREAD_NAME = "hybrid-sparse-device"


class EmulatedDevice:
    """The `Device` of tests, and of real requests on a machine without a GPU."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def begin(self, query: Tensor, kv_heads: int, score_tokens: int = 0) -> RowStates:
        """See `Device`."""
        return RowStates.empty(query, kv_heads, score_tokens)

    def open_wave(self, states: RowStates, scale: float, wave: ReadingWave) -> "EmulatedWave":
        """See `Device`."""
        return EmulatedWave(self._pool, self._stream, states, scale, wave)

    def merge(self, states: RowStates, hosted: Mapping[GroupKey, HostState]) -> None:
        """See `Device`."""
        for group, state in hosted.items():
            _fold(states, group, state.out, state.lse)

    def join(self, states: RowStates, others: RowStates) -> None:
        """See `Device`."""
        merged = merge_states(states.out, states.lse, others.out, others.lse)
        for state, folded in zip((states.out, states.lse), merged, strict=True):
            state.copy_(folded)

    def brought(self, *parts: RowStates) -> list[PartialAttention]:
        """See `Device`."""
        return [PartialAttention(states.out, states.lse) for states in parts]

    def copied(self, states: RowStates) -> PartialAttention:
        """See `Device`."""
        return PartialAttention(states.out.clone(), states.lse.clone())

    def attribute(self, states: RowStates, retained: PartialAttention, log_unread: Tensor, share: float) -> None:
        """See `Device`."""
        states.out.copy_(attribute_unread(states.out, states.lse, *retained, log_unread, share))

    def attend_frames(
        self, query: Tensor, frames: tuple[Tensor, Tensor], rows: ResidentRows, output: Tensor, scale: float
    ) -> None:
        """See `Device`."""
        attended = attend_frames(rows.of(query), *frames, rows.frames, rows.lengths, scale=scale, dtype=torch.float32)
        output[rows.index] = attended.to(output.dtype)

    def give(self, states: RowStates, output: Tensor, rows: Sequence[int]) -> None:
        """See `Device`."""
        output[list(rows)] = states.out.to(output.dtype)

    def close(self) -> None:
        """See `Device`."""
        self._stream.shutdown(wait=True)


class EmulatedWave:
    """The `Wave` of an `EmulatedDevice`."""

    def __init__(
        self,
        pool: DevicePool,
        stream: ThreadPoolExecutor,
        states: RowStates,
        scale: float,
        wave: ReadingWave,
    ) -> None:
        self._pool, self._stream = pool, stream
        self._states, self._scale, self._wave = states, scale, wave
        self._lightest_lse = torch.full_like(states.lse, torch.inf)  # of the lightest candidate page
        self._flags = WaveFlags.of(wave, *states.kept.shape)

    @property
    def flags(self) -> WaveFlags:
        """See `Wave`."""
        return self._flags

    def attend(self, loaded: Future[Loaded], index: int) -> Future[Attended]:
        """See `Wave`."""
        return self._stream.submit(self._attend, loaded, index)

    @torch.inference_mode()  # it belongs to a thread; vLLM's step is in it, and so are the states
    def _attend(self, load: Future[Loaded], index: int) -> Attended:
        loaded, flags, wave = load.result(), self._flags, self._wave
        started = time.perf_counter()
        open_parts = ~flags.are_done(wave)
        read = np.flatnonzero(loaded.has_slots & open_parts)
        if len(read):
            self._fold_pages(loaded, read, index)
        if wave.threshold is not None:
            for part in np.flatnonzero(open_parts & (wave.round_lengths(index) > 0)).tolist():
                self._look(wave.readings[part], int(wave.ends[index + 1, part]))
        if bool(flags.done.all()):
            flags.stop[0] = 1
        wasted = int((loaded.slots[~open_parts] >= 0).sum())
        return Attended(parts=tuple(read.tolist()), wasted_pages=wasted, busy_s=time.perf_counter() - started)

    def _fold_pages(self, loaded: Loaded, parts: NDArray[np.int64], index: int) -> None:
        states, wave = self._states, self._wave
        readings = [wave.readings[part] for part in parts.tolist()]
        slots = torch.from_numpy(loaded.slots[parts]).long()
        page_tokens = torch.from_numpy(wave.of_round(wave.page_tokens, index, 0)[parts])
        queries = torch.stack([states.query[reading.group.row, states.heads(reading.group)] for reading in readings])
        out, lse, page_lse, scores = attend_slots(
            queries, self._pool.key, self._pool.value, slots, page_tokens, self._scale
        )
        lightest = page_lse.masked_fill((slots < 0)[:, None], torch.inf).amin(dim=-1)
        for place, (part, reading) in enumerate(zip(parts.tolist(), readings, strict=True)):
            _fold(states, reading.group, out[place], lse[place])
            seen = self._lightest_lse[reading.group.row, states.heads(reading.group)]
            seen.copy_(torch.minimum(seen, lightest[place]))
            if states.token_scores is not None:
                first, end = wave.ends[index : index + 2, part].tolist()
                rows = states.token_scores[reading.group.row, states.heads(reading.group)]
                rows[:, first * PAGE_TOKENS : end * PAGE_TOKENS] = scores[place, :, : end - first].flatten(1)

    def _look(self, reading: Reading, pages_read: int) -> None:
        """PSA's lines 14 to 18 for one group: it is done when it has read enough, or all that it may."""
        assert reading.threshold is not None
        row, kv_head = reading.group
        heads = self._states.heads(reading.group)
        share = kept_share(self._states.lse[row, heads], reading.log_rest(pages_read, self._lightest_lse[row, heads]))
        self._states.kept[row, kv_head] = share
        if share > reading.threshold or pages_read == len(reading.pages):
            self._flags.done[0, row, kv_head] = 1


def _fold(states: RowStates, group: GroupKey, out: Tensor, lse: Tensor) -> None:
    """Merge one group's partial attention, [group, head_dim] and [group], into its rows."""
    heads = states.heads(group)
    merged = merge_states(states.out[group.row, heads], states.lse[group.row, heads], out, lse)
    states.out[group.row, heads], states.lse[group.row, heads] = merged

"""A GPU as a `Device`: Triton kernels on their own queue, and futures that stand for its events.

Two threads serve it. One launches each round, in order, as soon as the round's load is launched. The other waits for
the events and reports what became of the rounds. So the next round is launched while this one runs, and whoever waits
for the device waits for one event. Over tensors in CPU memory the same code runs with interpreted kernels.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.frame_attention.gpu import attend_frames
from vllm_hybrid_sparse.kernels.merge.attribution import attribute_unread
from vllm_hybrid_sparse.kernels.merge.choice import choose_merge
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import HostState
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.memory.cuda_pool import CudaPool
from vllm_hybrid_sparse.memory.queues import (
    DeviceQueue,
    Mark,
    current_queue,
    device_thread,
    host_empty,
    open_queue,
    upload,
)
from vllm_hybrid_sparse.memory.slot_table import NO_SLOT
from vllm_hybrid_sparse.memory.transfers import Loaded
from vllm_hybrid_sparse.runtime.device import Attended, PartialAttention, RowStates, WaveFlags
from vllm_hybrid_sparse.runtime.readings import ReadingWave
from vllm_hybrid_sparse.runtime.residency import ResidentRows
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey

LAUNCH_THREAD = "hybrid-sparse-device"
LAND_THREAD = "hybrid-sparse-events"


class CudaDevice:
    """A `Device` that runs the kernels on the slots of a `CudaPool`."""

    def __init__(self, pool: CudaPool) -> None:
        self._pool = pool
        self._queue = open_queue(pool.queue.device)
        self._launches, self._landings = (
            device_thread(name, pool.queue.device) for name in (LAUNCH_THREAD, LAND_THREAD)
        )

    def begin(self, query: Tensor, kv_heads: int, score_tokens: int = 0) -> RowStates:
        """See `Device`."""
        with self._queue.launching():
            return RowStates.empty(upload(query, self._queue.device), kv_heads, score_tokens)

    def open_wave(self, states: RowStates, scale: float, wave: ReadingWave) -> "CudaWave":
        """See `Device`."""
        return CudaWave(self._pool, self._queue, (self._launches, self._landings), states, scale, wave)

    def merge(self, states: RowStates, hosted: Mapping[GroupKey, HostState]) -> None:
        """See `Device`. The kernel reads the host's states where they lie, so this waits until it has done so."""
        if not hosted:
            return
        device = self._queue.device
        out = host_empty(tuple(states.out.shape), torch.float32, device).zero_()
        lse = host_empty(tuple(states.lse.shape), torch.float32, device).fill_(-torch.inf)
        for group, state in hosted.items():
            heads = states.heads(group)
            out[group.row, heads], lse[group.row, heads] = state.out, state.lse
        self._fold(states, out, lse)
        self._queue.mark().wait()

    def join(self, states: RowStates, others: RowStates) -> None:
        """See `Device`."""
        self._fold(states, others.out, others.lse)

    def _fold(self, states: RowStates, out: Tensor, lse: Tensor) -> None:
        """Launch the merge of another partial attention of all rows into the states."""
        _, merge_states = choose_merge(self._queue.device.type, torch.float32)
        with self._queue.launching():
            merged_out, merged_lse = merge_states(states.out, states.lse, out, lse)
            states.out.copy_(merged_out)
            states.lse.copy_(merged_lse)
            states.shown_lse.copy_(merged_lse, non_blocking=True)

    def brought(self, *parts: RowStates) -> list[PartialAttention]:
        """See `Device`."""
        brought, device = [], self._queue.device
        with self._queue.launching():
            for states in parts:
                held = PartialAttention(
                    host_empty(tuple(states.out.shape), torch.float32, device),
                    host_empty(tuple(states.lse.shape), torch.float32, device),
                )
                held.out.copy_(states.out, non_blocking=True)
                held.lse.copy_(states.lse, non_blocking=True)
                brought.append(held)
            self._queue.mark().wait()
        return brought

    def copied(self, states: RowStates) -> PartialAttention:
        """See `Device`."""
        with self._queue.launching():
            return PartialAttention(states.out.clone(), states.lse.clone())

    def attribute(self, states: RowStates, retained: PartialAttention, log_unread: Tensor, share: float) -> None:
        """See `Device`."""
        with self._queue.launching():
            unread = upload(log_unread, self._queue.device)
            states.out.copy_(attribute_unread(states.out, states.lse, *retained, unread, share))

    def attend_frames(
        self, query: Tensor, frames: tuple[Tensor, Tensor], rows: ResidentRows, output: Tensor, scale: float
    ) -> None:
        """See `Device`; launched on the caller's queue."""
        attended = rows.of(output)
        attend_frames(rows.of(query), *frames, rows.frames, rows.lengths, attended, scale=scale, longest=rows.longest)
        if not rows.together:
            output[rows.index] = attended

    def give(self, states: RowStates, output: Tensor, rows: Sequence[int]) -> None:
        """See `Device`."""
        caller = current_queue(self._queue.device)
        caller.follow(self._queue.mark())
        output[upload(torch.tensor(rows, dtype=torch.int64), output.device)] = states.out.to(output.dtype)
        caller.keep(states.out)

    def close(self) -> None:
        """See `Device`."""
        self._launches.shutdown(wait=True)
        self._landings.shutdown(wait=True)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched round: the marks before and behind it."""

    begun: Mark
    ended: Mark


class CudaWave:
    """The `Wave` of a `CudaDevice`.

    `flags.done` has a row for each look: the kernel's own `done`, copied to the host behind that look. So once a
    round's event has passed, it is certain which groups the round found done.
    """

    def __init__(
        self,
        pool: CudaPool,
        queue: DeviceQueue,
        threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor],
        states: RowStates,
        scale: float,
        wave: ReadingWave,
    ) -> None:
        self._pool, self._queue = pool, queue
        self._launches, self._landings = threads
        self._states, self._scale, self._wave = states, scale, wave
        looks = 1 + (wave.rounds if wave.threshold is not None else 0)
        self._flags = WaveFlags.of(wave, *states.kept.shape, looks=looks, device=queue.device)
        self._mass = host_empty(tuple(states.lse.shape), torch.float32, queue.device)  # P_acc at the last look
        with queue.launching():
            self._done = upload(self._flags.done[0], queue.device)
            self._progress = None if wave.threshold is None else self._begin_progress()
            self._log_left = self._estimates()

    @property
    def flags(self) -> WaveFlags:
        """See `Wave`."""
        return self._flags

    def attend(self, loaded: Future[Loaded], index: int) -> Future[Attended]:
        """See `Wave`."""
        launched = self._launches.submit(self._launch, loaded, index)
        return self._landings.submit(self._land, loaded, launched, index)

    def _begin_progress(self) -> Progress:
        """The state that the verifying kernel keeps of the wave's groups."""
        wave, device = self._wave, self._queue.device
        places = torch.zeros(2, *self._states.kept.shape, dtype=torch.int32)
        candidates, budget = places.numpy()
        candidates[wave.rows, wave.kv_heads] = [reading.candidates for reading in wave.readings]
        budget[wave.rows, wave.kv_heads] = wave.lengths
        uploaded = upload(places, device)
        progress = Progress.begin(
            uploaded[0],
            uploaded[1],
            self._states.lse.shape[1],
            self._flags.stop,
            active=len(wave.readings),
        )
        progress.done.copy_(self._done)
        return progress

    def _estimates(self) -> Tensor | None:
        """[rounds, rows, q_heads] f32, log weight that the key codes estimate for the pages after each round."""
        wave = self._wave
        if wave.threshold is None or wave.readings[0].estimated_rest is None:
            return None
        log_left = torch.full((wave.rounds, *self._states.lse.shape), -torch.inf)
        by_head = log_left.numpy()
        for part, reading in enumerate(wave.readings):
            assert reading.estimated_rest is not None, "the readings of a wave are estimated alike"
            looks = [reading.estimate_after(pages_read) for pages_read in wave.ends[1:, part].tolist()]
            by_head[:, reading.group.row, self._states.heads(reading.group)] = reading.estimated_rest[looks]
        return upload(log_left, self._queue.device)

    @torch.inference_mode()  # it belongs to a thread; vLLM's step is in it, and so are the states
    def _launch(self, load: Future[Loaded], index: int) -> _Launched:
        loaded, states, queue = load.result(), self._states, self._queue
        with queue.launching():
            if loaded.ready is not None:
                queue.follow(loaded.ready)
            begun = queue.mark()
            places = self._places(loaded, index)
            slots, page_tokens = upload(places, queue.device).unbind()
            page_lse = torch.empty(*states.lse.shape, places.shape[-1], device=queue.device)
            if places.shape[-1]:  # else nothing was loaded
                self._attend_slots(slots, page_tokens, page_lse, index)
            self._look(page_lse, index)
            self._show(last=index + 1 == self._wave.rounds)
            return _Launched(begun, queue.mark())

    def _show(self, *, last: bool) -> None:
        """Copy to the host what it needs of the states. The scores come all at once, with the last round."""
        states = self._states
        if states.shown_lse is states.lse:  # the states lie in host memory
            return
        states.shown_lse.copy_(states.lse, non_blocking=True)
        if last and states.token_scores is not None and states.shown_scores is not None:
            states.shown_scores.copy_(states.token_scores, non_blocking=True)

    def _attend_slots(self, slots: Tensor, page_tokens: Tensor, page_lse: Tensor, index: int) -> None:
        states = self._states
        scores = None
        if states.token_scores is not None:
            first = int(self._wave.ends[index].max()) * PAGE_TOKENS  # of groups that still read; all have read as much
            scores = states.token_scores[..., first : first + slots.shape[-1] * PAGE_TOKENS]
        attend_slots(
            states.query,
            self._pool.key,
            self._pool.value,
            slots,
            page_tokens,
            self._done if self._progress is None else self._progress.done,
            states.out,
            states.lse,
            page_lse,
            scale=self._scale,
            token_scores=scores,
        )

    def _places(self, loaded: Loaded, index: int) -> Tensor:
        """[2, rows, kv_heads, pages] int32: the slots of each group's pages, and how many tokens they have."""
        wave, held = self._wave, loaded.slots >= 0
        page_tokens = wave.of_round(wave.page_tokens, index, 0)
        most = int(held.sum(axis=1).max())
        places = torch.zeros(2, *self._states.kept.shape, most, dtype=torch.int32)
        places[0] = NO_SLOT
        slots, tokens = places.numpy()
        slots[wave.rows, wave.kv_heads] = loaded.slots[:, :most]
        tokens[wave.rows, wave.kv_heads] = np.where(held, page_tokens, 0)[:, :most]
        return places

    def _look(self, page_lse: Tensor, index: int) -> None:
        """PSA's lines 13 to 17 for the wave; copies the outcome to the host."""
        if self._progress is None or self._wave.threshold is None:
            return
        log_left = None if self._log_left is None else self._log_left[index]
        verify(self._states.lse, page_lse, self._progress, threshold=self._wave.threshold, log_left=log_left)
        self._flags.done[index + 1].copy_(self._progress.done, non_blocking=True)
        self._mass.copy_(self._progress.mass, non_blocking=True)

    @torch.inference_mode()
    def _land(self, load: Future[Loaded], launch: Future[_Launched], index: int) -> Attended:
        launched, loaded, wave = launch.result(), load.result(), self._wave
        launched.ended.wait()
        looks = self._flags.done.numpy()
        if wave.threshold is not None:
            looks = looks[: index + 1]  # those before the round
            self._keep_shares()
        done = looks[:, wave.rows, wave.kv_heads].any(axis=0)
        return Attended(
            parts=tuple(np.flatnonzero(loaded.has_slots & ~done).tolist()),
            wasted_pages=int((loaded.slots[done] >= 0).sum()),
            busy_s=launched.ended.seconds_since(launched.begun),
        )

    def _keep_shares(self) -> None:
        """Record for each group the least share that one of its heads had at the last look."""
        wave, kept = self._wave, self._states.kept.numpy()
        shares = self._mass.numpy().reshape(*kept.shape, -1).min(axis=-1)
        kept[wave.rows, wave.kv_heads] = shares[wave.rows, wave.kv_heads]

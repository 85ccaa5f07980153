"""Resident rows: decode rows whose whole context lies in device memory, so that the device attends to them by itself.

Such a row costs the host only its launches: it is neither scored nor ranked, no slot is looked up, and nothing waits
for the device. All of it is read, which is exact; at a device's own bandwidth a choice would cost more than it saves.

A row whose blocks do not all have frames stays two-tier or ranked. If there is room, its blocks enter frames behind the
step's attention, layer by layer (`entrance.py`). If they are few, the next step waits for the copies, and the row is
resident in it. If they are many, they are copied in the background, and the row is resident once that is done. No step
waits for these copies themselves. But if the host ranks, they share the loader's one thread and queue with the loads of
two-tier rows, so a step with such rows may wait after all.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.memory.block_frames import BlockFrames, FrameShape
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.page_keys import block_page_numbers
from vllm_hybrid_sparse.memory.queues import Mark, current_queue
from vllm_hybrid_sparse.memory.step_tensors import StepTensors
from vllm_hybrid_sparse.memory.transfers import Loader
from vllm_hybrid_sparse.runtime.entrance import Entering, Entrance
from vllm_hybrid_sparse.runtime.step_rows import RankedRows, StepRows, room_for
from vllm_hybrid_sparse.values import PAGE_TOKENS

logger = logging.getLogger(__name__)

IDLE_STEPS = 64
"""If a row waits for frames, and those of ended requests would not be enough, the blocks of these requests keep
their frames for this many steps. Then their slots serve single pages of the other rows. Estimated, not measured."""

AWAITED_BYTES = 32 << 20
"""The most bytes that enter frames in one step and that the next step waits for: 0.6 ms over PCIe 5. Calculated, not
measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRows(StepRows):
    """The resident rows of one step."""

    NUMBERS: ClassVar = ("longest",)

    longest: int  # upper bound of seq_lens
    frames: Tensor  # [rows, blocks] int32
    new_frames: Tensor  # [rows] int32: where each new token is stored …
    new_places: Tensor  # [rows] int32: … and its place in the block
    ready: Mark | None  # behind the copies to the frames; what reads them must follow it. None: they are filled


@dataclass(frozen=True, slots=True)
class StepResidency:
    """How a step's decode rows are divided."""

    resident: NDArray[np.bool_]  # [rows]
    rows: ResidentRows | None  # None: there are none
    entering: Entering | None  # None: no blocks enter
    ranked: tuple[RankedRows, ...] | None = None  # all other rows, if the device ranks


Divide = Callable[[Sequence[int], Sequence[Tensor], Sequence[int], Sequence[int]], StepResidency | None]
"""`DeviceTier.divide`."""


class SlotRuns(Protocol):
    """The owner of the pool's slots: a `Loader`, or the device's own directory."""

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use for frames. Returns which of them were taken."""

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Put such runs back into use."""


class Residency:
    """Which rows are resident. Only for the step's thread.

    A row keeps its frames as long as it decodes and there is a frame for its next block. Blocks of ended requests keep
    theirs, for a request with the same prefix, until the frames are needed.
    """

    def __init__(
        self,
        loader: Loader,
        shape: FrameShape,
        sources: Sequence[HostPages],
        most_frames: int,
        slots: SlotRuns | None = None,
    ) -> None:
        """No block has a frame.

        sources       every layer's host store; all have the same layout
        most_frames   the most frames that there are at a time, 1 or more
        slots         gives slots for frames; None: the loader
        """
        self.shape = shape
        self._sources, self._most_frames = sources, most_frames
        self._slots: SlotRuns = loader if slots is None else slots
        self._loader = loader
        pool = loader.pool
        self._tensors = StepTensors(pool.key.device)
        self._frames = [(shape.view(pool.key, layer), shape.view(pool.value, layer)) for layer in range(shape.layers)]
        self._all_frames = loader.pool.shape.capacity_pages // shape.slots
        self._blocks = BlockFrames(sources[0].num_pages // shape.pages_per_block, self._all_frames)
        self._unused = list(range(self._all_frames))  # frames whose slots serve single pages; the last is taken first
        self._step = 0
        self._entrance = Entrance(loader, shape, sources)
        page_bytes = 2 * pool.key[0].numel() * pool.key.element_size()
        self._most_awaited = max(1, AWAITED_BYTES // (shape.slots * page_bytes))  # blocks
        self._last_awaited = False  # whether the next step waited for what entered last

    @property
    def failures(self) -> list[Exception]:
        """Failed copies, until they are reported."""
        return self._entrance.failures

    @property
    def entered_blocks(self) -> int:
        """Blocks that entered frames since the start."""
        return self._entrance.entered_blocks

    def frames(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in all frames, [frames, kv_heads, tokens of a block, head_dim]; frames are strided."""
        return self._frames[layer]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.shape.pages_per_block * PAGE_TOKENS

    def forget(self, blocks: Sequence[int]) -> None:
        """Take the frames from blocks of the host store that something other than resident rows writes."""
        self._drop(np.array(blocks, dtype=np.int64))

    def divide(
        self, tokens: Sequence[int], tables: Sequence[NDArray[np.int32]], seq_lens: Sequence[int]
    ) -> StepResidency:
        """Say which decode rows of a step are resident, and which blocks are to enter behind its attention.

        Before this, `forget` is called for blocks that the step's prompts write.

        tokens     [rows]            of the step's batch
        tables     [rows][blocks]    of their requests; may have more blocks behind
        seq_lens   [rows]            tokens of the requests, the new one included
        """
        self._step += 1
        self._settle(wait=False)
        self._blocks.use(self._entrance.blocks, self._step)
        blocks = [
            np.asarray(table[: -(-seq_len // self.block_tokens)], dtype=np.int64)
            for table, seq_len in zip(tables, seq_lens, strict=True)
        ]
        resident = self._resident(blocks, seq_lens)
        tiered = [of_row for of_row, stays in zip(blocks, resident.tolist(), strict=True) if not stays]
        # Their new tokens are stored only in the host store.
        self._drop(np.array([of_row[-1] for of_row in tiered], dtype=np.int64))
        entering = self._enter(tiered)
        rows = self._rows(np.flatnonzero(resident).tolist(), tokens, blocks, seq_lens) if resident.any() else None
        return StepResidency(resident, rows, entering)

    def enter(self, layer: int, entering: Entering, after: Mark | None = None) -> None:
        """Copy a step's entering blocks to their frames in one layer, whose host store holds the step's tokens by now.

        after   behind what stores these tokens and what still reads the frames; None: nothing does
        """
        self._entrance.enter(layer, entering, after)

    def _lacking(self, blocks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks have no frame, or have not arrived in theirs."""
        return (self._blocks.frames_of(blocks) < 0) | self._entrance.under_way(blocks)

    def _drop(self, blocks: NDArray[np.int64]) -> None:
        """Free the frames of blocks. Waits for copies that are still on their way there."""
        if self._entrance.under_way(blocks).any():
            self._settle(wait=True)
        self._blocks.drop(blocks)

    def _settle(self, *, wait: bool) -> None:
        self._blocks.drop(self._entrance.settle(wait=wait))

    def _resident(self, blocks: Sequence[NDArray[np.int64]], seq_lens: Sequence[int]) -> NDArray[np.bool_]:
        """Which rows have frames for all of their blocks. A block that begins with this step's token is given one."""
        begins = [seq_len % self.block_tokens == 1 for seq_len in seq_lens]
        whole = [of_row[: len(of_row) - begin] for of_row, begin in zip(blocks, begins, strict=True)]
        resident = np.array([not self._lacking(of_row).any() for of_row in whole], dtype=np.bool_)
        self._use(whole, resident)
        begun = [np.empty(0, dtype=np.int64)]
        for row in np.flatnonzero(resident & np.array(begins, dtype=np.bool_)).tolist():
            tail = blocks[row][-1:]
            self._drop(tail)  # from the request that had the block before
            if self._give(tail):
                begun.append(tail)
            else:
                resident[row] = False
                self._blocks.use(whole[row], self._step - 1)  # others may have its frames
                self._use(whole, resident)
        self._free_slots(np.concatenate(begun))
        return resident

    def _free_slots(self, blocks: NDArray[np.int64]) -> None:
        """Free single slots with pages of blocks that resident rows begin.

        The requests that had the blocks before may have left pages there. What resident rows write goes to the host
        store and to frames, so a load would find the old pages. No wait: the loader does all loads after this. If the
        device has its own directory, that forgets every page that a decode row begins (`ranking.py`).
        """
        if self._slots is self._loader and len(blocks):
            of_block, layers = self.shape.pages_per_block, range(self.shape.layers)
            pages = [block_page_numbers(layer, self.shape.kv_heads, blocks, of_block) for layer in layers]
            self._loader.forget(np.stack(pages))

    def _use(self, blocks: Sequence[NDArray[np.int64]], resident: NDArray[np.bool_]) -> None:
        for row in np.flatnonzero(resident).tolist():
            self._blocks.use(blocks[row], self._step)

    def _enter(self, blocks: Sequence[NDArray[np.int64]]) -> Entering | None:
        """Give frames to the blocks of rows that are not resident, for as many rows as there is room.

        If a row lacks many blocks, its last one, which changes until it is full, enters after the others.
        """
        busy = len(self._entrance.blocks) > 0
        few = [int(self._lacking(of_row).sum()) <= self._most_awaited for of_row in blocks]
        awaited = any(few) and (all(few) or not self._last_awaited)  # in turns, if there are both
        entering, waits = [np.empty(0, dtype=np.int64)], False
        for of_row, is_few in zip(blocks, few, strict=True):
            if len(of_row) > self._most_frames:
                waits = True
                continue
            self._blocks.use(of_row[self._blocks.frames_of(of_row) >= 0], self._step)
            if busy or is_few is not awaited:
                continue
            wanted = of_row if awaited else of_row[:-1]
            lacking = wanted[self._lacking(wanted)]
            if awaited and sum(map(len, entering)) + len(lacking) > self._most_awaited:
                continue
            if self._give(lacking):
                entering.append(lacking)
            else:
                waits = True
        if waits and not busy:
            self._give_back()
        entered = np.concatenate(entering)
        if not len(entered):
            return None
        self._last_awaited = awaited
        begun = Entering(entered, self._blocks.frames_of(entered), awaited)
        self._entrance.begin(begun)
        return begun

    def _give(self, blocks: NDArray[np.int64]) -> bool:
        """Give frames to blocks that have none, to all or none of them. Takes slots of single pages if need be."""
        room = min(self._most_frames - (self._all_frames - len(self._unused)), len(self._unused))
        if self._blocks.available(self._step) + room < len(blocks):
            return False
        lacking = len(blocks) - self._blocks.free
        if room > 0 and lacking > 0:
            self._set_aside(min(lacking, room))
        return self._blocks.give(blocks, self._step)

    def _set_aside(self, count: int) -> None:
        """Make further frames, except those in which a page is being read."""
        numbers = [self._unused.pop() for _ in range(count)]
        firsts = np.array(numbers, dtype=np.int32) * np.int32(self.shape.slots)
        taken = self._slots.set_aside(firsts, self.shape.slots).tolist()
        self._blocks.add([number for number, had in zip(numbers, taken, strict=True) if had])
        self._unused += [number for number, had in zip(numbers, taken, strict=True) if not had]

    def _give_back(self) -> None:
        """Let single pages have the slots of frames that were not used lately."""
        numbers = self._blocks.give_up(self._step - IDLE_STEPS)
        if numbers:
            firsts = np.array(numbers, dtype=np.int32) * np.int32(self.shape.slots)
            if self._entrance.ready is not None:  # a request may end before the copies to its frames are done
                current_queue(self._tensors.device).follow(self._entrance.ready)
            self._slots.give_back(firsts, self.shape.slots)
            self._unused += numbers

    def _rows(
        self,
        chosen: Sequence[int],
        tokens: Sequence[int],
        blocks: Sequence[NDArray[np.int64]],
        seq_lens: Sequence[int],
    ) -> ResidentRows:
        frames = np.zeros((len(chosen), room_for(max(len(blocks[row]) for row in chosen))), dtype=np.int32)
        for place, row in enumerate(chosen):
            frames[place, : len(blocks[row])] = self._blocks.frames_of(blocks[row])
        lengths = [seq_lens[row] for row in chosen]
        places = np.array([(length - 1) % self.block_tokens for length in lengths], dtype=np.int32)
        last_blocks = np.array([blocks[row][-1] for row in chosen])
        new_frames = self._blocks.frames_of(last_blocks)
        return ResidentRows.place(
            [tokens[row] for row in chosen],
            last_blocks.tolist(),
            lengths,
            self._sources[0],
            self._tensors,
            "resident",
            {"frames": frames, "new_frames": new_frames, "new_places": places},
            longest=frames.shape[1] * self.block_tokens,
            ready=self._entrance.ready,
        )

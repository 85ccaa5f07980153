"""Decode rows whose whole context lies in device memory, which the device then attends to by itself.

Such a row costs the host nothing but its launches: it is neither scored nor ranked, no slot is looked up, and nothing
waits for the device. All of it is read, which is exact; at a device's own bandwidth a choice would cost more than it
spares. A row whose blocks do not all have frames is a row of two tiers as before, and where there is room its blocks
enter frames behind the step's attention, layer by layer, so that it is resident from the next step on.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.errors import LoadError
from vllm_hybrid_sparse.memory.block_frames import BlockFrames, FrameShape
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark, upload
from vllm_hybrid_sparse.memory.transfers import FrameFill, Loader
from vllm_hybrid_sparse.values import PAGE_TOKENS

logger = logging.getLogger(__name__)

IDLE_STEPS = 64
"""Steps for which the blocks of requests that ended keep their frames while a row waits that would not fit with them
gone: then their slots serve the rows of two tiers. Reckoned, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRows:
    """The resident rows of one step, the same for all layers. Tensors lie on the device."""

    tokens: tuple[int, ...]  # of the step's batch, those that the rows are
    seq_lens: tuple[int, ...]  # of their requests, the new token included
    longest: int  # of seq_lens
    filled_pages: tuple[int, ...]  # of the host store, those that the new tokens fill
    index: Tensor  # [rows] int64: `tokens`
    frames: Tensor  # [rows, blocks] int32
    lengths: Tensor  # [rows] int32: `seq_lens`
    new_frames: Tensor  # [rows] int32: where each new token is stored …
    new_places: Tensor  # [rows] int32: … and its place in the block
    host_offsets: Tensor  # [rows, kv_heads] int64: of the pages of the new tokens in a layer's host store …
    host_places: Tensor  # [rows] int32: … and the tokens' places in these pages
    ready: Mark | None  # behind what filled the frames, which the queue that reads them follows; None: they are filled

    @property
    def together(self) -> bool:
        """Whether they follow one another in the batch."""
        return self.tokens[-1] + 1 - self.tokens[0] == len(self.tokens)

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor of the step's tokens; where they are `together`, in place."""
        return tensor[self.tokens[0] : self.tokens[-1] + 1] if self.together else tensor[self.index]


@dataclass(frozen=True, slots=True)
class Entering:
    """Blocks that enter frames behind a step's attention.

    What was read there before is read by then: in every layer the host has waited for the queries of the rows whose
    blocks these are, and they come behind all that was launched in the steps before.
    """

    blocks: NDArray[np.int64]
    frames: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepResidency:
    """How a step's decode rows are divided."""

    resident: NDArray[np.bool_]  # [rows]
    rows: ResidentRows | None  # None: none is
    entering: Entering | None  # None: no blocks do


Divide = Callable[[Sequence[int], Sequence[Tensor], Sequence[int], Sequence[int]], StepResidency | None]
"""`DeviceTier.divide`."""


class Residency:
    """Which rows are resident. For the step's thread alone.

    A row keeps its frames as long as it decodes and there is a frame for its next block; what ended requests leave
    stays, for a request with the same prefix, until the frames are needed.
    """

    def __init__(self, loader: Loader, shape: FrameShape, sources: Sequence[HostPages], most_frames: int) -> None:
        """No block has a frame.

        sources       every layer's host store, all laid out alike
        most_frames   1 or more: no more frames are made at a time
        """
        self.shape = shape
        self.failures: list[Exception] = []  # of loads, until they are reported
        self.entered_blocks = 0  # since the start
        self._loader, self._sources, self._most_frames = loader, sources, most_frames
        self._device = loader.pool.key.device
        pool = loader.pool
        self._frames = [(shape.view(pool.key, layer), shape.view(pool.value, layer)) for layer in range(shape.layers)]
        self._all_frames = loader.pool.shape.capacity_pages // shape.slots
        self._blocks = BlockFrames(sources[0].num_pages // shape.pages_per_block, self._all_frames)
        self._unused = list(range(self._all_frames))  # those whose slots serve single pages; the last is taken first
        self._step = 0
        self._entering: Entering | None = None
        self._fills: dict[int, Future[Mark | None]] = {}  # of the blocks that entered in the last step, by layer
        self._ready: Mark | None = None

    def frames(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in all frames, [frames, kv_heads, tokens of a block, head_dim]; frames are strided."""
        return self._frames[layer]

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.shape.pages_per_block * PAGE_TOKENS

    def forget(self, blocks: Sequence[int]) -> None:
        """Blocks of the host store that are written other than by resident rows: their frames hold something else."""
        if blocks:
            self._settle()
            self._blocks.drop(np.array(blocks, dtype=np.int64))

    def divide(
        self, tokens: Sequence[int], tables: Sequence[NDArray[np.int32]], seq_lens: Sequence[int]
    ) -> StepResidency:
        """Say which decode rows of a step are resident, and which blocks are to enter behind its attention.

        Blocks that the step's prompts write are forgotten before.

        tokens     [rows]            of the step's batch
        tables     [rows][blocks]    of their requests, maybe with more blocks behind
        seq_lens   [rows]            tokens of the requests, the new one included
        """
        self._step += 1
        self._settle()
        blocks = [
            np.asarray(table[: -(-seq_len // self.block_tokens)], dtype=np.int64)
            for table, seq_len in zip(tables, seq_lens, strict=True)
        ]
        resident = self._resident(blocks, seq_lens)
        tiered = [of_row for of_row, stays in zip(blocks, resident.tolist(), strict=True) if not stays]
        # Their new tokens are stored in the host store alone.
        self._blocks.drop(np.array([of_row[-1] for of_row in tiered], dtype=np.int64))
        self._entering = self._enter(tiered)
        rows = self._rows(np.flatnonzero(resident).tolist(), tokens, blocks, seq_lens) if resident.any() else None
        return StepResidency(resident, rows, self._entering)

    def enter(self, layer: int, entering: Entering) -> None:
        """Have a step's blocks enter their frames in one layer, whose host store holds the step's tokens by now."""
        fill = FrameFill(self._sources[layer], self.shape, layer, entering.blocks, entering.frames)
        self._fills[layer] = self._loader.fill_frames(fill)

    def _resident(self, blocks: Sequence[NDArray[np.int64]], seq_lens: Sequence[int]) -> NDArray[np.bool_]:
        """Which rows have frames for all of their blocks, one given to a block that begins with this step's token."""
        begins = [seq_len % self.block_tokens == 1 for seq_len in seq_lens]
        whole = [of_row[: len(of_row) - begin] for of_row, begin in zip(blocks, begins, strict=True)]
        resident = np.array([bool((self._blocks.frames_of(of_row) >= 0).all()) for of_row in whole], dtype=np.bool_)
        self._use(whole, resident)
        for row in np.flatnonzero(resident & np.array(begins, dtype=np.bool_)).tolist():
            tail = blocks[row][-1:]
            self._blocks.drop(tail)  # of a request that had the block before
            if not self._give(tail):
                resident[row] = False
                self._blocks.use(whole[row], self._step - 1)  # others may have its frames
                self._use(whole, resident)
        return resident

    def _use(self, blocks: Sequence[NDArray[np.int64]], resident: NDArray[np.bool_]) -> None:
        for row in np.flatnonzero(resident).tolist():
            self._blocks.use(blocks[row], self._step)

    def _enter(self, blocks: Sequence[NDArray[np.int64]]) -> Entering | None:
        """Give frames to the blocks of rows that are not resident, for as many rows as there is room."""
        entering, waits = [np.empty(0, dtype=np.int64)], False
        for of_row in blocks:
            lacking = self._blocks.frames_of(of_row) < 0
            if len(of_row) > self._most_frames:
                waits = True
                continue
            self._blocks.use(of_row[~lacking], self._step)
            if self._give(of_row[lacking]):
                entering.append(of_row[lacking])
            else:
                waits = True
        if waits:
            self._give_back()
        entered = np.concatenate(entering)
        if not len(entered):
            return None
        return Entering(entered, self._blocks.frames_of(entered))

    def _give(self, blocks: NDArray[np.int64]) -> bool:
        """Give frames to blocks that have none, all or none of them, from slots of single pages where need be."""
        room = min(self._most_frames - (self._all_frames - len(self._unused)), len(self._unused))
        if self._blocks.available(self._step) + room < len(blocks):
            return False
        lacking = len(blocks) - self._blocks.free
        if room > 0 and lacking > 0:
            self._set_aside(min(lacking, room))
        return self._blocks.give(blocks, self._step)

    def _set_aside(self, count: int) -> None:
        """Have further frames, but for those in which a page is read at the moment."""
        numbers = [self._unused.pop() for _ in range(count)]
        firsts = np.array(numbers, dtype=np.int32) * np.int32(self.shape.slots)
        taken = self._loader.set_aside(firsts, self.shape.slots).result().tolist()
        self._blocks.add([number for number, had in zip(numbers, taken, strict=True) if had])
        self._unused += [number for number, had in zip(numbers, taken, strict=True) if not had]

    def _give_back(self) -> None:
        """Let single pages have the slots of frames that nobody has used lately."""
        numbers = self._blocks.give_up(self._step - IDLE_STEPS)
        if numbers:
            firsts = np.array(numbers, dtype=np.int32) * np.int32(self.shape.slots)
            self._loader.give_back(firsts, self.shape.slots).result()
            self._unused += numbers

    def _settle(self) -> None:
        """Wait until what entered in the last step is launched; what could not be loaded has no frames."""
        entering, self._entering = self._entering, None
        if entering is None:
            return
        fills, self._fills = self._fills, {}
        complete = len(fills) == self.shape.layers  # a step that failed was not attended in all layers
        for fill in fills.values():
            try:
                self._ready = fill.result()
            except LoadError as error:
                self.failures.append(error)
                complete = False
        if complete:
            self.entered_blocks += len(entering.blocks)
        else:
            self._blocks.drop(entering.blocks)

    def _rows(
        self,
        chosen: Sequence[int],
        tokens: Sequence[int],
        blocks: Sequence[NDArray[np.int64]],
        seq_lens: Sequence[int],
    ) -> ResidentRows:
        frames = np.zeros((len(chosen), max(len(blocks[row]) for row in chosen)), dtype=np.int32)
        for place, row in enumerate(chosen):
            frames[place, : len(blocks[row])] = self._blocks.frames_of(blocks[row])
        lengths = np.array([seq_lens[row] for row in chosen], dtype=np.int32)
        places = (lengths - 1) % self.block_tokens
        pages = np.array([blocks[row][-1] for row in chosen]) * self.shape.pages_per_block + places // PAGE_TOKENS
        offsets = self._sources[0].offsets(torch.arange(self.shape.kv_heads), torch.from_numpy(pages)[:, None])
        new_frames = self._blocks.frames_of(np.array([blocks[row][-1] for row in chosen]))
        index = np.array([tokens[row] for row in chosen], dtype=np.int64)
        on_device = [
            upload(torch.from_numpy(values), self._device)
            for values in (index, frames, lengths, new_frames, places, places % PAGE_TOKENS)
        ]
        return ResidentRows(
            tokens=tuple(index.tolist()),
            seq_lens=tuple(lengths.tolist()),
            longest=int(lengths.max()),
            filled_pages=tuple(pages[lengths % PAGE_TOKENS == 0].tolist()),
            index=on_device[0],
            frames=on_device[1],
            lengths=on_device[2],
            new_frames=on_device[3],
            new_places=on_device[4],
            host_places=on_device[5],
            host_offsets=upload(offsets, self._device),
            ready=self._ready,
        )

"""The loader: the one thread that decides what the device pool holds, and fills it from the host store.

Every change to the pool goes through one ordered queue, just as a GPU's copies go through one stream. So a page that
was written is dropped before a later load can find it, and no lock is needed. The result of a load is a future. On a
GPU the future is done when the copies are launched, and `Loaded.ready` is the event behind them.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.errors import CapacityError, LoadError
from vllm_hybrid_sparse.memory.block_frames import FrameShape
from vllm_hybrid_sparse.memory.device_pool import DevicePool
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.page_keys import PageKey, block_page_numbers
from vllm_hybrid_sparse.memory.queues import Mark, device_thread
from vllm_hybrid_sparse.memory.slot_table import NO_SLOT

COPY_PAGES = 1024
"""Pages copied between two checks whether they are still wanted: 8 MiB for pages of 128 dims in BF16, which takes
some 0.2 ms over PCIe 5, several times as long as the launch. Calculated, not measured."""

THREAD_NAME = "hybrid-sparse-loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The pages of one round, one part per group. Each part may be unwanted, or fail, separately."""

    source: HostPages  # of the layer of all pages
    pages: NDArray[np.int64]  # [parts, pages] numbers (`page_keys.py`), padded with NO_PAGE
    # [parts], whether a part need not be loaded any more. The loader's thread calls it now and then.
    unwanted: Callable[[], NDArray[np.bool_]]


@dataclass(slots=True)
class Loaded:
    """The result of a load. The pages in `held` are pinned until it is released."""

    slots: NDArray[np.int32]  # [parts, pages], NO_SLOT as padding and in parts that got nothing
    errors: dict[int, CapacityError | LoadError] = field(default_factory=dict)  # by part
    held: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    wanted_pages: int = 0  # of parts that were wanted at their turn, except pages withdrawn before their copy
    hit_pages: int = 0  # of these, the pages that were there already
    fetched_pages: int = 0  # copied from the host store
    ready: Mark | None = None  # behind the copies; None: they are done

    @property
    def has_slots(self) -> NDArray[np.bool_]:
        """[parts], whether a part has anything in the pool."""
        has_slots: NDArray[np.bool_] = np.any(self.slots >= 0, axis=1)
        return has_slots


@dataclass(frozen=True, slots=True)
class FrameFill:
    """Blocks of one layer to copy into frames. The frames' slots are set aside already."""

    source: HostPages  # of the layer
    shape: FrameShape
    layer: int
    blocks: NDArray[np.int64]
    frames: NDArray[np.int32]
    after: Mark | None = None  # which the copies follow; None: nothing they need is under way


class Loader:
    """Fills a pool. Its methods queue work in order. All but `set_aside`, `give_back` and `close` return at once."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._stream = device_thread(THREAD_NAME, pool.key.device)

    def load(self, load: Load) -> Future[Loaded]:
        """Pin the pages of a round, each part as a whole, and copy those that the pool lacks.

        A part that is unwanted at its turn is skipped, and copying stops once no part is wanted any more. A part that
        does not fit next to the pinned pages gets a CapacityError, and one whose copy fails gets a LoadError; the
        others are loaded.
        """
        return self._stream.submit(self._load, load)

    def release(self, loaded: Loaded) -> None:
        """Unpin the pages of a load. Call it once; until then no other page can take their slots."""
        self._stream.submit(self.pool.release, loaded.held)

    def forget(self, pages: NDArray[np.int64]) -> Future[int]:
        """Drop pages that were written in the host store: invalidation. The result is how many the pool held."""
        return self._stream.submit(self.pool.drop, pages)

    def append(self, pages: NDArray[np.int64], offsets: NDArray[np.int64], key: Tensor, value: Tensor) -> Future[int]:
        """Write one new token into each of these pages that the pool holds. The result is how many it held.

        The host store has the token already, so a page that is loaded later has it too.

        offsets      places in the pages
        key, value   [pages, head_dim], unchanged until the future is done
        """
        return self._stream.submit(self._append, pages, offsets, key, value)

    def missing(self, pages: NDArray[np.int64]) -> Future[NDArray[np.int64]]:
        """How many of each part's pages the pool does not hold.

        pages     [parts, pages], padded with NO_PAGE
        returns   [parts]
        """
        return self._stream.submit(lambda: self.pool.missing(pages).sum(axis=1))

    def set_aside(self, firsts: NDArray[np.int32], length: int) -> NDArray[np.bool_]:
        """Take runs of slots out of use for frames, in queue order, and wait for that; see `SlotTable.set_aside`."""
        return self._stream.submit(self.pool.set_aside, firsts, length).result()

    def give_back(self, firsts: NDArray[np.int32], length: int) -> None:
        """Put runs of slots that were set aside back into use, in queue order, and wait for that.

        Nothing may read them any more.
        """
        self._stream.submit(self.pool.give_back, firsts, length).result()

    def fill_frames(self, fill: FrameFill) -> Future[Mark | None]:
        """Copy one layer's part of blocks to their frames. The result is a mark behind the copies; None: done.

        Nothing may read the frames any more. Single slots that hold pages of these blocks are freed, because later
        writes to a block in a frame do not go to them. LoadError if a page could not be copied.
        """
        return self._stream.submit(self._fill_frames, fill)

    def settled(self) -> Future[None]:
        """A future that is done once everything asked for before is done."""
        return self._stream.submit(lambda: None)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._stream.shutdown(wait=True)

    @torch.inference_mode()  # it belongs to a thread, and vLLM makes the pool in it
    def _append(self, pages: NDArray[np.int64], offsets: NDArray[np.int64], key: Tensor, value: Tensor) -> int:
        slots = self.pool.slots_of(pages)
        held = np.flatnonzero(slots >= 0)
        if len(held):
            of_held = torch.from_numpy(held)
            self.pool.put_tokens(slots[held], offsets[held], key[of_held], value[of_held])
        return len(held)

    @torch.inference_mode()
    def _fill_frames(self, fill: FrameFill) -> Mark | None:
        shape = fill.shape
        pages = block_page_numbers(fill.layer, shape.kv_heads, fill.blocks, shape.pages_per_block).ravel()
        self.pool.drop(pages)
        if fill.after is not None:
            self.pool.follow(fill.after)
        slots = shape.slots_of(fill.frames, fill.layer).ravel()
        try:
            for first in range(0, len(pages), COPY_PAGES):
                some = slice(first, first + COPY_PAGES)
                self.pool.fill(slots[some], fill.source, pages[some])
        except Exception as error:
            raise LoadError(
                f"layer={fill.layer}: {len(fill.blocks)} blocks could not be copied to the device: {error}"
            ) from error
        return self.pool.mark()

    @torch.inference_mode()
    def _load(self, load: Load) -> Loaded:
        wanted = ~load.unwanted()
        taken = self.pool.take(load.pages, wanted)
        loaded = Loaded(taken.slots, dict(taken.refused))
        loaded.wanted_pages = int((load.pages[wanted] >= 0).sum())
        loaded.hit_pages = int((taken.slots >= 0).sum() - taken.fresh.sum())
        self._fill(load, loaded, taken.fresh)
        loaded.ready = self.pool.mark()
        loaded.held = load.pages[loaded.slots >= 0]
        return loaded

    def _fill(self, load: Load, loaded: Loaded, fresh: NDArray[np.bool_]) -> None:
        """Copy the fresh pages, and take back the parts that lack a page in the end."""
        pages, slots = load.pages[fresh], loaded.slots[fresh]
        failures: dict[int, Exception] = {}  # by page
        asked = 0  # pages whose copy was tried
        while asked < len(pages) and not (load.unwanted() | ~loaded.has_slots).all():
            some = slice(asked, asked + COPY_PAGES)
            failures |= self._copy(load.source, pages[some], slots[some])
            asked += len(pages[some])
        loaded.fetched_pages = asked - len(failures)
        loaded.wanted_pages -= len(pages) - asked
        absent = np.concatenate([np.array(list(failures), dtype=np.int64), pages[asked:]])
        if len(absent):
            self._take_back(load, loaded, absent, failures)

    def _take_back(self, load: Load, loaded: Loaded, absent: NDArray[np.int64], failures: dict[int, Exception]) -> None:
        """Release all slots of parts that lack a page, and record an error if the page's copy failed."""
        lacking = np.isin(load.pages, absent) & (loaded.slots >= 0)
        for part in np.flatnonzero(lacking.any(axis=1)).tolist():
            pages = load.pages[part]
            self.pool.release(pages[loaded.slots[part] >= 0])
            loaded.slots[part] = NO_SLOT
            failed = next((page for page in pages.tolist() if page in failures), None)
            if failed is not None:
                key = PageKey.of(failed)
                loaded.errors[part] = LoadError(
                    f"layer={key.layer} kv_head={key.kv_head} page={key.page}: could not be copied to the device: "
                    f"{failures[failed]}"
                )
        self.pool.drop(absent)

    def _copy(self, source: HostPages, pages: NDArray[np.int64], slots: NDArray[np.int32]) -> dict[int, Exception]:
        """Copy pages, one by one if they cannot be copied together. Returns which could not be copied, and why."""
        try:
            self.pool.fill(slots, source, pages)
        except Exception as together:  # noqa: BLE001 - whatever it is, it is handed to the step that waits
            if len(pages) == 1:
                return {int(pages[0]): together}
            failures: dict[int, Exception] = {}
            for at in range(len(pages)):
                failures |= self._copy(source, pages[at : at + 1], slots[at : at + 1])
            return failures
        return {}

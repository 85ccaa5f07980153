"""The loader: the one thread that decides what the device pool holds, and fills it from the host store.

All that changes the pool goes through one ordered queue, the way a GPU's copies go through one stream: a page that was
written is dropped before a later load can find it, and no lock is needed. What a load became is handed over as a
future. On a GPU its copies are launched by then, and `Loaded.ready` is the event behind them.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import CapacityError, LoadError
from vllm_hybrid_sparse.memory.device_pool import DevicePool
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import Mark
from vllm_hybrid_sparse.values import PageKey

COPY_PAGES = 256
"""Pages that are copied between two looks at whether they are still wanted; not tuned."""

THREAD_NAME = "hybrid-sparse-loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The pages of one microbatch, in parts that are wanted, and may fail, each by itself: one a group."""

    source: HostPages  # of the layer that all pages are of
    parts: Sequence[Sequence[PageKey]]
    unwanted: Callable[[int], bool]  # whether a part need not be loaded any more; asked from the loader's thread


@dataclass(slots=True)
class Loaded:
    """What became of a load. The pages in `held` are pinned until it is released."""

    slots: list[list[int]]  # by part, in the order of its pages; empty where the part was unwanted or failed
    errors: dict[int, CapacityError | LoadError] = field(default_factory=dict)  # by part
    held: list[PageKey] = field(default_factory=list)
    wanted_pages: int = 0  # of the parts that were wanted when their turn came, but for those withdrawn before a copy
    hit_pages: int = 0  # of them, those that were there
    fetched_pages: int = 0  # copied from the host store
    ready: Mark | None = None  # behind the copies; None: they are done


class Loader:
    """Fills a pool. Its methods return at once; what they ask for happens in their order."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix=THREAD_NAME)

    def load(self, load: Load) -> Future[Loaded]:
        """Pin the pages of a microbatch, each part as a whole, and copy those that the pool lacks.

        A part that has become unwanted is left out, between copies too. A part that does not fit beside what is pinned
        gets a CapacityError, one whose copy fails a LoadError; the others are loaded.
        """
        return self._stream.submit(self._load, load)

    def release(self, loaded: Loaded) -> None:
        """Unpin what a load holds, once; until then no other page can take its slots."""
        self._stream.submit(self.pool.release, loaded.held)

    def forget(self, keys: Sequence[PageKey]) -> Future[int]:
        """Drop pages that were written in the host store: invalidation. The number of those that the pool held."""
        return self._stream.submit(self.pool.drop, keys)

    def append(self, keys: Sequence[PageKey], offsets: Sequence[int], key: Tensor, value: Tensor) -> Future[int]:
        """Write one new token into each of some pages, where the pool holds them; the number of those that it held.

        The host store has the token already, so a page that is loaded later has it too.

        offsets      places in the pages
        key, value   [keys, head_dim], unchanged until the future is done
        """
        return self._stream.submit(self._append, keys, offsets, key, value)

    def missing(self, parts: Sequence[Sequence[PageKey]]) -> Future[list[int]]:
        """How many of each part's pages the pool does not hold."""
        return self._stream.submit(lambda: [self.pool.slots_of(keys).count(-1) for keys in parts])

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._stream.shutdown(wait=True)

    @torch.inference_mode()  # which belongs to a thread: vLLM makes the pool in it
    def _append(self, keys: Sequence[PageKey], offsets: Sequence[int], key: Tensor, value: Tensor) -> int:
        slots = self.pool.slots_of(keys)
        places = [index for index, slot in enumerate(slots) if slot >= 0]
        if places:
            self.pool.put_tokens(
                [slots[index] for index in places], [offsets[index] for index in places], key[places], value[places]
            )
        return len(places)

    @torch.inference_mode()
    def _load(self, load: Load) -> Loaded:
        loaded = Loaded([[] for _ in load.parts])
        missing: dict[PageKey, int] = {}  # to be copied, and into which slot
        for part, keys in enumerate(load.parts):
            if load.unwanted(part):
                continue
            loaded.wanted_pages += len(keys)
            try:
                taken = self.pool.take(keys)
            except CapacityError as error:
                loaded.errors[part] = error
                continue
            loaded.slots[part] = taken.slots
            missing.update({keys[index]: taken.slots[index] for index in taken.missing})
        loaded.hit_pages = sum(map(len, loaded.slots)) - len(missing)
        self._fill(load, loaded, missing)
        loaded.ready = self.pool.mark()
        kept = [part for part in range(len(load.parts)) if loaded.slots[part]]
        loaded.held = [key for part in kept for key in load.parts[part]]
        return loaded

    def _fill(self, load: Load, loaded: Loaded, missing: dict[PageKey, int]) -> None:
        """Copy what is missing, and take back the parts of which a page is not there in the end."""
        absent: dict[PageKey, Exception | None] = {}  # None: unwanted
        waiting = list(missing)
        for first in range(0, len(waiting), COPY_PAGES):
            copied = waiting[first : first + COPY_PAGES]
            if all(load.unwanted(part) or not loaded.slots[part] for part in range(len(load.parts))):
                absent.update(dict.fromkeys(waiting[first:]))
                break
            absent.update(self._copy(load.source, copied, [missing[key] for key in copied]))
            loaded.fetched_pages += len(copied)
        if not absent:
            return
        failures = sum(error is not None for error in absent.values())
        loaded.fetched_pages -= failures
        loaded.wanted_pages -= len(absent) - failures
        for part, keys in enumerate(load.parts):
            if not loaded.slots[part] or absent.keys().isdisjoint(keys):
                continue
            self.pool.release(keys)
            loaded.slots[part] = []
            failed = next((key for key in keys if absent.get(key) is not None), None)
            if failed is not None:
                loaded.errors[part] = LoadError(
                    f"layer={failed.layer} kv_head={failed.kv_head} page={failed.page}: could not be copied to the "
                    f"device: {absent[failed]}"
                )
        self.pool.drop(absent)

    def _copy(
        self, source: HostPages, keys: Sequence[PageKey], slots: Sequence[int]
    ) -> Iterable[tuple[PageKey, Exception]]:
        """Copy pages, one by one where they cannot be copied together; those that could not be, and why."""
        try:
            self.pool.fill(slots, source, keys)
        except Exception as together:  # noqa: BLE001 - whatever it is, it is handed to the step that waits
            if len(keys) == 1:
                return [(keys[0], together)]
            pairs = zip(keys, slots, strict=True)
            return [failure for key, slot in pairs for failure in self._copy(source, [key], [slot])]
        return []

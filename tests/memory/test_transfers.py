"""The loader: what it brings, leaves out, reports and leaves behind."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.memory.host_store import HEAD_DIM, Store
from tests.memory.pages import named, none_of, numbered, side_by_side
from vllm_hybrid_sparse.errors import CapacityError, LoadError
from vllm_hybrid_sparse.memory import transfers
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.memory.transfers import Load, Loaded, Loader


class FailingPages:
    """A source some of whose pages cannot be read."""

    def __init__(self, pages: HostPages, broken: set[int]) -> None:
        self.pages, self.broken = pages, broken

    def read(self, numbers: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.broken & {key.page for key in named(numbers)}:
            raise OSError("uncorrectable memory error")
        return self.pages.read(numbers)


@pytest.fixture
def store() -> Store:
    made = Store(blocks=16)
    made.fill_all()
    return made


def make_loader(store: Store, capacity: int = 8) -> Loader:
    shape = PoolShape(capacity_pages=capacity, layers=store.layers, head_dim=HEAD_DIM, dtype=torch.float32)
    pool = DevicePool(shape)
    pool.key.fill_(torch.nan)
    pool.value.fill_(torch.nan)
    return Loader(pool)


@pytest.fixture
def loader(store: Store) -> Iterator[Loader]:
    made = make_loader(store)
    yield made
    made.close()


def keys(*pages: int, kv_head: int = 0) -> list[PageKey]:
    return [PageKey(0, kv_head, page) for page in pages]


def wanted(source: HostPages, *parts: list[PageKey]) -> Load:
    pages = side_by_side(parts)
    return Load(source=source, pages=pages, unwanted=lambda: none_of(pages))


def load(loader: Loader, source: HostPages, *parts: list[PageKey]) -> Loaded:
    return loader.load(wanted(source, *parts)).result(timeout=10)


def missing(loader: Loader, *parts: list[PageKey]) -> list[int]:
    return loader.missing(side_by_side(parts)).result(timeout=10).tolist()


def held(loaded: Loaded) -> list[int]:
    """How many slots each part has."""
    return (loaded.slots >= 0).sum(axis=1).tolist()


def check(loader: Loader, loaded: Loaded, *parts: list[PageKey]) -> None:
    """Every part that has slots holds its pages; what is pinned is what is held."""
    for slots, part in zip(loaded.slots, parts, strict=True):
        assert (slots >= 0).sum() in (0, len(part))
        for slot, key in zip(slots[slots >= 0], part, strict=False):
            number = float(key.kv_head * 16 + key.page)
            assert loader.pool.key[slot].eq(number).all()
            assert loader.pool.value[slot].eq(number).all()
    loader.pool.check_integrity()


def test_a_load_brings_what_is_missing_and_pins_all(store: Store, loader: Loader) -> None:
    parts = [keys(3, 1, 2), keys(1, 4, kv_head=1)]
    loaded = load(loader, store.sources[0], *parts)
    check(loader, loaded, *parts)
    assert (loaded.wanted_pages, loaded.hit_pages, loaded.fetched_pages) == (5, 0, 5)
    assert loader.pool.pinned_pages == 5
    again = load(loader, store.sources[0], keys(2, 1, 5))
    assert (again.wanted_pages, again.hit_pages, again.fetched_pages) == (3, 2, 1)
    loader.release(loaded)
    loader.release(again)
    assert missing(loader, keys(3, 1), keys(2, 5)) == [0, 0]
    assert loader.pool.pinned_pages == 0


def test_a_page_that_two_parts_want_is_copied_once(store: Store, loader: Loader) -> None:
    parts = [keys(0, 1), keys(1, 2)]
    loaded = load(loader, store.sources[0], *parts)
    check(loader, loaded, *parts)
    assert (loaded.wanted_pages, loaded.hit_pages, loaded.fetched_pages) == (4, 1, 3)


def test_an_unwanted_part_takes_no_slot(store: Store, loader: Loader) -> None:
    pages = side_by_side([keys(0, 1), keys(2)])
    made = Load(source=store.sources[0], pages=pages, unwanted=lambda: np.array([True, False]))
    loaded = loader.load(made).result(timeout=10)
    assert held(loaded) == [0, 1]
    assert (loader.pool.resident_pages, loaded.wanted_pages) == (1, 1)


def test_the_stop_flag_ends_a_load_between_copies(
    store: Store, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "COPY_PAGES", 2)
    stop = threading.Event()

    class StoppingPages:
        def read(self, some: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
            stop.set()  # as if the device had gathered enough while the first two were copied
            return store.sources[0].read(some)

    pages = side_by_side([keys(0, 1), keys(2, 3, 4)])
    made = Load(source=StoppingPages(), pages=pages, unwanted=lambda: np.full(2, stop.is_set()))  # type: ignore[arg-type]
    loaded = loader.load(made).result(timeout=10)
    assert (loaded.wanted_pages, loaded.fetched_pages) == (2, 2)
    assert held(loaded) == [2, 0]
    check(loader, loaded, keys(0, 1), keys(2, 3, 4))
    assert missing(loader, keys(0, 1, 2), [], keys(3, 4)) == [1, 0, 2]
    loader.release(loaded)
    loader.settled().result(timeout=10)
    assert loader.pool.pinned_pages == 0


def test_a_part_that_does_not_fit_is_refused_alone(store: Store) -> None:
    loader = make_loader(store, capacity=4)
    parts = [keys(0, 1, 2), keys(5, 6), keys(0, 2)]
    loaded = load(loader, store.sources[0], *parts)
    assert list(loaded.errors) == [1]
    assert isinstance(loaded.errors[1], CapacityError)
    assert held(loaded) == [3, 0, 2]
    check(loader, loaded, *parts)
    loader.release(loaded)
    check(loader, load(loader, store.sources[0], keys(5, 6)), keys(5, 6))
    loader.close()


def test_a_failed_copy_is_an_error_of_the_parts_that_need_it(store: Store, loader: Loader) -> None:
    broken = FailingPages(store.sources[0], {2})
    parts = [keys(0, 1), keys(1, 2, 3), keys(3)]
    loaded = load(loader, broken, *parts)  # type: ignore[arg-type]
    assert list(loaded.errors) == [1]
    assert isinstance(loaded.errors[1], LoadError)
    assert str(loaded.errors[1]) == (
        "layer=0 kv_head=0 page=2: could not be copied to the device: uncorrectable memory error"
    )
    assert held(loaded) == [2, 0, 1]
    check(loader, loaded, *parts)
    assert missing(loader, keys(2)) == [1]
    assert (loaded.fetched_pages, loader.pool.pinned_pages) == (3, 3)
    loader.release(loaded)
    loader.settled().result(timeout=10)
    assert loader.pool.pinned_pages == 0  # the part that failed had pinned pages that the others have
    check(loader, load(loader, store.sources[0], keys(1, 2, 3)), keys(1, 2, 3))
    assert loader.pool.pinned_pages == 3


def test_a_written_page_is_loaded_anew(store: Store, loader: Loader) -> None:
    loader.release(load(loader, store.sources[0], keys(0, 1)))
    store.fill(PageKey(0, 0, 1), 99.0)
    assert loader.forget(numbered(keys(1, 7))).result(timeout=10) == 1
    loaded = load(loader, store.sources[0], keys(0, 1))
    assert loaded.fetched_pages == 1
    assert loader.pool.key[loaded.slots[0][1]].eq(99.0).all()


def test_an_appended_token_reaches_the_pages_that_are_there(store: Store, loader: Loader) -> None:
    loaded = load(loader, store.sources[0], keys(4))
    token = torch.full((2, HEAD_DIM), 50.0)
    assert loader.append(numbered(keys(4, 9)), np.array([7, 7]), token, token + 1).result(timeout=10) == 1
    slot = loaded.slots[0][0]
    assert loader.pool.key[slot, 7].eq(50.0).all()
    assert loader.pool.value[slot, 7].eq(51.0).all()
    assert loader.pool.key[slot, 6].eq(4.0).all()


def test_what_is_asked_for_happens_in_its_order(store: Store, loader: Loader) -> None:
    """A page dropped and asked for again, over and over without waiting, is never the old one."""
    futures = []
    for _ in range(50):
        loader.forget(numbered(keys(0)))
        futures.append(loader.load(wanted(store.sources[0], keys(0))))
    assert {future.result(timeout=10).fetched_pages for future in futures} == {1}


def test_closing_finishes_what_is_queued_and_leaves_no_thread(store: Store) -> None:
    loader = make_loader(store)
    made = wanted(store.sources[0], keys(0, 1))
    future = loader.load(made)
    loader.close()
    loader.close()
    assert future.done()
    assert future.result().fetched_pages == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(transfers.THREAD_NAME)]
    with pytest.raises(RuntimeError, match="shutdown"):
        loader.load(made)

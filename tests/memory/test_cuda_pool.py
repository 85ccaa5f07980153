"""The pool that interpreted kernels fill, through the loader: it holds what the host store holds."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.kernels.device.interpreter import interprets, mend_interpreter
from tests.memory.host_store import HEAD_DIM, Store
from tests.memory.pages import none_of, numbered, side_by_side
from vllm_hybrid_sparse.memory.cuda_pool import CudaPool
from vllm_hybrid_sparse.memory.device_pool import PoolShape
from vllm_hybrid_sparse.memory.page_keys import PageKey
from vllm_hybrid_sparse.memory.queues import open_queue
from vllm_hybrid_sparse.memory.transfers import Load, Loader

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not interprets():
        pytest.skip("the kernels are compiled in this run")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter reads it again at its first launch
    mend_interpreter()


def make_pool(store: Store, capacity: int) -> CudaPool:
    shape = PoolShape(capacity_pages=capacity, layers=store.layers, head_dim=HEAD_DIM, dtype=torch.float32)
    pool = CudaPool(shape, open_queue(CPU))
    pool.key.fill_(torch.nan)
    pool.value.fill_(torch.nan)
    return pool


@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_pages_of_any_layer_and_head_come_to_their_slots(pages_per_block: int) -> None:
    store = Store(layers=2, blocks=6, pages_per_block=pages_per_block)
    numbers = store.fill_all()
    pool = make_pool(store, 5)
    loader = Loader(pool)
    for layer in (0, 1):
        keys = [PageKey(layer, head, page) for head, page in ((0, 5), (1, 0), (1, 3), (0, 0))]
        pages = side_by_side([keys])
        made = Load(source=store.sources[layer], pages=pages, unwanted=partial(none_of, pages))
        loaded = loader.load(made).result(10)
        assert loaded.ready is not None
        loaded.ready.wait()
        for key, slot in zip(keys, loaded.slots[0], strict=True):
            assert pool.key[slot].eq(numbers[key]).all()
            assert pool.value[slot].eq(numbers[key]).all()
        loader.release(loaded)
    loader.close()
    pool.check_integrity()


def test_a_token_is_written_into_the_slot_of_its_page() -> None:
    store = Store()
    store.fill_all()
    pool = make_pool(store, 4)
    loader = Loader(pool)
    keys = [PageKey(0, 1, 2), PageKey(0, 0, 2)]
    pages = side_by_side([keys])
    loaded = loader.load(Load(source=store.sources[0], pages=pages, unwanted=lambda: none_of(pages))).result(10)
    token = torch.tensor([50.0, 60.0])[:, None].expand(2, HEAD_DIM)
    assert loader.append(numbered(keys), np.array([7, 3]), token, token + 1).result(10) == 2
    first, second = loaded.slots[0]
    assert pool.key[first, 7].eq(50).all()
    assert pool.value[second, 3].eq(61).all()
    assert pool.key[first, [6, 8]].eq(10).all()  # the number of page 2 of head 1; a head has 8 pages
    loader.close()


def test_whole_slots_can_be_put() -> None:
    pool = make_pool(Store(), 3)
    pool.put(np.array([2, 0], dtype=np.int32), torch.ones(2, 16, HEAD_DIM), torch.full((2, 16, HEAD_DIM), 2.0))
    assert pool.key[[0, 2]].eq(1).all()
    assert pool.value[[0, 2]].eq(2).all()
    assert pool.key[1].isnan().all()

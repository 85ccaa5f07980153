"""Interpreted kernels store the chunks of a request, page by page and token by token, and nothing else."""

import pytest
import torch

from tests.kernels.device.interpreter import interprets, mend_interpreter
from tests.memory.host_store import HEAD_DIM, Store
from tests.runtime.clocked_queues import watch
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.memory.queues import open_queue
from vllm_hybrid_sparse.memory.write_through import WriteThrough

PAGES = [9, 2, 7, 0, 5]  # the request's pages in the store


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not interprets():
        pytest.skip("the kernels are compiled in this run")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter reads it again at its first launch
    mend_interpreter()


@pytest.mark.parametrize(
    "chunks", [(1,), (15, 1), (16,), (17,), (5, 6, 7), (32, 1, 15), (3, 40, 37), (80,), (16, 16, 47, 1)]
)
def test_every_token_lies_where_it_belongs(chunks: tuple[int, ...]) -> None:
    store = Store(blocks=5, pages_per_block=2)
    writer = WriteThrough(store.sources[0], open_queue(torch.device("cpu")))
    content = torch.randn(2, sum(chunks), store.kv_heads, HEAD_DIM)
    stored = 0
    for tokens in chunks:
        pages = torch.tensor(PAGES[stored // 16 : -(-(stored + tokens) // 16)])
        writer.store(*content[:, stored : stored + tokens], stored, pages)
        stored += tokens
    whole = -(-stored // 16)
    for head in range(store.kv_heads):
        key, value = store.sources[0].read(page_numbers(0, head, PAGES[:whole]))
        assert torch.equal(key.flatten(0, 1)[:stored], content[0, :, head])
        assert torch.equal(value.flatten(0, 1)[:stored], content[1, :, head])
        assert key.flatten(0, 1)[stored:].isnan().all()
        others = [page for page in range(10) if page not in PAGES[:whole]]
        assert all(part.isnan().all() for part in store.sources[0].read(page_numbers(0, head, others)))


def test_blocks_are_named_once_their_pages_are_full() -> None:
    store = Store(blocks=5, pages_per_block=2)
    writer = WriteThrough(store.sources[0], open_queue(torch.device("cpu")))
    assert writer.take().blocks == []
    content = torch.randn(2, 80, store.kv_heads, HEAD_DIM)
    for first, tokens, blocks in ((0, 10, []), (10, 6, [4]), (16, 1, []), (17, 47, [0, 1, 3])):
        pages = torch.tensor(PAGES[first // 16 : -(-(first + tokens) // 16)])
        writer.store(*content[:, first : first + tokens], first, pages)
        stored = writer.take()
        stored.wait()
        assert stored.blocks == blocks
    assert writer.take().marks == ()


@pytest.mark.parametrize("waits", [True, False])
def test_rows_that_were_stored_are_there_once_the_host_has_waited(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    """The host summarises the pages that they filled. If it does not wait for the rows, it is noticed."""
    machine = watch(monkeypatch)
    store = Store(blocks=5, pages_per_block=2)
    source = store.sources[0]
    writer = WriteThrough(source, machine.open_queue(torch.device("cpu")))
    row = torch.randn(1, store.kv_heads, HEAD_DIM)
    offsets = source.offsets(torch.arange(store.kv_heads)[None], torch.tensor([[PAGES[0]]]))
    writer.store_rows(row, row, offsets, torch.tensor([15], dtype=torch.int32), None, PAGES[:1])
    stored = writer.take()
    assert stored.blocks == [PAGES[0] // 2]
    if waits:
        stored.wait()
    machine.host_reads([("page", source.elements.data_ptr(), offset) for offset in offsets.flatten().tolist()])
    assert bool(machine.races) is not waits

"""Attention over listed pages, in slots and on the host, against its plain-torch reference."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import block_group
from vllm_hybrid_sparse.kernels.listed_attention import reference
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed, listed_tile
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.layout import TORCH_DTYPES, BlockLayout
from vllm_hybrid_sparse.values import PAGE_TOKENS

SCALE = 0.2
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass
class Store:
    """A layer's host store whose blocks are full, the same as rows, and a pool that is NaN where nothing was put."""

    host: HostStore
    key: Tensor  # [store pages, kv_heads, 16, head_dim]
    value: Tensor
    k_pool: Tensor
    v_pool: Tensor

    def to(self, device: torch.device) -> "Store":
        """The same beside a device: the pool there, the host store pinned."""
        host = self.host
        if device.type == "cuda":
            host = host._replace(elements=host.elements.pin_memory())
        return Store(host, self.key, self.value, self.k_pool.to(device), self.v_pool.to(device))


def make_store(
    dtype: torch.dtype, *, blocks: int = 4, kv_heads: int = 2, head_dim: int = 64, of_block: int = 2
) -> Store:
    """Random pages in blocks of `of_block` pages."""
    layout = BlockLayout(
        dtype=NAMES[dtype], head_dim=head_dim, block_tokens=of_block * PAGE_TOKENS, summary="key_codes"
    )
    key, value = torch.randn(2, blocks, of_block * PAGE_TOKENS, kv_heads, head_dim).to(dtype)
    kv_cache = torch.stack([layout.pack_reference(*block) for block in zip(key, value, strict=True)])
    pages = HostPages(kv_cache, layout, kv_heads)
    paged = [part.unflatten(1, (of_block, PAGE_TOKENS)).flatten(0, 1).transpose(1, 2) for part in (key, value)]
    k_pool, v_pool = torch.full((2, 3 * blocks * of_block * kv_heads, PAGE_TOKENS, head_dim), torch.nan, dtype=dtype)
    return Store(pages.geometry, *paged, k_pool, v_pool)


def make_lists(store: Store, counts: Tensor, most: int, last_tokens: int = PAGE_TOKENS) -> Listed:
    """Random pages for each group: a third in slots, which they are put into, a third that get one, a third neither."""
    rows, kv_heads = counts.shape
    listed = Listed(*torch.full((3, rows, kv_heads, most), 2**20, dtype=torch.int32).unbind())
    free = iter(torch.randperm(len(store.k_pool)).tolist())
    for row in range(rows):
        for kv_head in range(kv_heads):
            chosen = torch.randperm(len(store.key))[: int(counts[row, kv_head])].tolist()
            for at, page in enumerate(chosen):
                kind, slot = int(torch.randint(3, ())), -1
                if kind == 0:
                    slot = next(free)
                    store.k_pool[slot], store.v_pool[slot] = store.key[page, kv_head], store.value[page, kv_head]
                elif kind == 1:
                    slot = -2 - next(free)
                tokens = last_tokens if at == len(chosen) - 1 and kind == 2 else PAGE_TOKENS
                for part, of_page in zip(listed, (slot, page, tokens), strict=True):
                    part[row, kv_head, at] = of_page
    return listed


def check(store: Store, query: Tensor, listed: Listed, counts: Tensor, device: torch.device) -> Tally:
    """The kernel gives what the reference does, and puts the same pages into the same slots."""
    on_device, tally = store.to(device), Tally(device)
    before = store.k_pool.clone(), store.v_pool.clone()
    out, lse = attend_listed(
        query.to(device),
        on_device.k_pool,
        on_device.v_pool,
        on_device.host,
        Listed(*(part.to(device) for part in listed)),
        counts.to(device),
        tally,
        scale=SCALE,
    )
    pools = [pool.cpu().clone() for pool in (on_device.k_pool, on_device.v_pool)]
    expected = reference.attend_listed(query, *before, store.host, listed, counts, scale=SCALE)
    assert_close(out.cpu(), expected[0], query.dtype)
    assert_close(lse.cpu(), expected[1], query.dtype)
    for pool, wanted in zip(pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
    return tally


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "of_block"),
    [
        (torch.bfloat16, 64, 3, 2),
        (torch.bfloat16, 128, 4, 8),
        (torch.bfloat16, 80, 1, 1),
        (torch.float16, 96, 8, 1),
        (torch.float16, 16, 4, 2),
        (torch.float32, 64, 1, 2),
        (torch.float32, 256, 3, 1),
    ],
)
def test_attention_equals_the_reference_wherever_pages_lie(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, of_block: int
) -> None:
    torch.manual_seed(head_dim + group)
    store = make_store(dtype, blocks=16 // of_block, head_dim=head_dim, of_block=of_block)
    tile = listed_tile(block_group(group), head_dim, dtype)
    counts = torch.tensor([[0, 1], [tile, tile + 1], [16, 7]], dtype=torch.int32)
    listed = make_lists(store, counts, 16, last_tokens=5)
    check(store, torch.randn(3, 2 * group, head_dim).to(dtype), listed, counts, device)


def test_lists_are_read_by_several_programs_or_by_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(torch.float32, blocks=12)
    counts = torch.tensor([[24, 9]], dtype=torch.int32)
    listed = make_lists(store, counts, 24)
    for programs in (1, 6, 1024):
        monkeypatch.setattr("vllm_hybrid_sparse.kernels.listed_attention.gpu._PROGRAMS", programs)
        check(store, torch.randn(1, 2, 64), listed, counts, device)


def test_the_tally_says_what_was_read(device: torch.device) -> None:
    store = make_store(torch.bfloat16)
    counts = torch.tensor([[8, 5], [3, 0]], dtype=torch.int32)
    listed = make_lists(store, counts, 8)
    tally = check(store, torch.randn(2, 4, 64).bfloat16(), listed, counts, device)
    slots = torch.cat([listed.slots[row, head, : counts[row, head]] for row in range(2) for head in range(2)])
    assert tally.numbers.tolist() == [16, int((slots >= 0).sum()), int((slots < -1).sum()), 0, 0, 0]


def test_no_rows_and_no_room_give_nothing(device: torch.device) -> None:
    store = make_store(torch.float32)
    none = Listed(*torch.zeros(3, 2, 2, 0, dtype=torch.int32).unbind())
    check(store, torch.randn(2, 4, 64), none, torch.zeros(2, 2, dtype=torch.int32), device)
    none = Listed(*torch.zeros(3, 0, 2, 4, dtype=torch.int32).unbind())
    check(store, torch.randn(0, 4, 64), none, torch.zeros(0, 2, dtype=torch.int32), device)


@pytest.mark.parametrize("wrong", ["counts", "slots", "host", "query"])
def test_what_a_kernel_would_misread_is_refused(device: torch.device, wrong: str) -> None:
    store = make_store(torch.float32).to(device)
    listed = Listed(*torch.zeros(3, 1, 2, 4, dtype=torch.int32, device=device).unbind())
    counts = torch.zeros(1, 2, dtype=torch.int32, device=device)
    query, host = torch.zeros(1, 4, 64, device=device), store.host
    if wrong == "counts":
        counts = counts.long()
    elif wrong == "slots":
        listed = listed._replace(slots=listed.slots[:, :, :2])
    elif wrong == "host":
        host = host._replace(elements=host.elements.half())
    else:
        query = query[:, :3]
    with pytest.raises(KernelError, match="q_heads=3" if wrong == "query" else f"{wrong}="):
        attend_listed(query, store.k_pool, store.v_pool, host, listed, counts, Tally(device), scale=SCALE)

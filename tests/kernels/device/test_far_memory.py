"""Places further apart than 32 bits count. What lies between is never touched, so that it takes no memory.

`attend_frames` has such a case in its own file.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tests.kernels.device.slots import SCALE, Pool, attend_reference, empty_states, make_pool
from tests.kernels.device.test_attend_slots import attend
from tests.kernels.device.test_code_scores import (
    check_close,
    expected_of,
    make_store,
    random_queries,
    score,
    unrotated,
)
from tests.kernels.device.test_listed_attention import make_store as make_pages
from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, load_pages, store_pages, store_tokens
from vllm_hybrid_sparse.kernels.copy.reference import unpack_page
from vllm_hybrid_sparse.kernels.listed_attention import reference
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.page_directory.gpu import look_up
from vllm_hybrid_sparse.kernels.page_directory.state import Listed, PageDirectory

HEAD_DIM = 32
PART = 16 * HEAD_DIM  # elements of a page's keys
LAST = 2**31 // PART  # the slot, or page, that begins at element 2**31


def far_pools(device: torch.device) -> tuple[Tensor, Tensor]:
    """K and V of a pool, of which slots 0 and LAST may be used: V lies where K does, a slot behind it."""
    memory = torch.empty(LAST + 2, 16, HEAD_DIM, dtype=torch.bfloat16, device=device)
    return memory[:-1], memory[1:]


def host_memory(elements: int, device: torch.device) -> Tensor:
    """Of the host store, as kernels of the device can read it."""
    return torch.empty(elements, dtype=torch.bfloat16, pin_memory=device.type == "cuda")


def ints(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def test_attention_over_slots(device: torch.device) -> None:
    near = make_pool([[[16, 9]]], HEAD_DIM, torch.bfloat16)
    far = Pool(*far_pools(device), torch.tensor([[[0, LAST]]], dtype=torch.int32), near.page_tokens)
    for part, own in ((far.k_pool, near.k_pool), (far.v_pool, near.v_pool)):
        part[[0, LAST]] = own[near.slots[0, 0].long()].to(device)
    query, states = torch.randn(1, 2, HEAD_DIM).bfloat16(), empty_states(1, 2, HEAD_DIM)
    expected = attend_reference(near, query, *states)
    for part, wanted in zip(attend(far, query, states, device), expected, strict=True):
        assert_close(part, wanted, torch.bfloat16)


def test_pages_that_are_moved(device: torch.device) -> None:
    pools, slots = far_pools(device), ints(0, LAST, device=device)
    host = host_memory(4 * PART, device).copy_(torch.randn(4 * PART))
    offsets = 2 * PART * torch.arange(2, device=device)
    load_pages(host, offsets, slots, *pools)
    for slot, page in zip((0, LAST), host.view(2, -1), strict=True):
        for pool, wanted in zip(pools, unpack_page(page, HEAD_DIM), strict=True):
            assert torch.equal(pool[slot].cpu(), wanted)
    back = host_memory(4 * PART, device).fill_(torch.nan)
    store_pages(back, offsets, slots, *pools)
    settle(device)
    assert torch.equal(back, host)


def test_frames_that_tokens_are_stored_in(device: torch.device) -> None:
    apart = 2**30
    memory = torch.empty(2 * apart + 2 * PART, dtype=torch.bfloat16, device=device)
    frames = [memory.as_strided((3, 1, 16, HEAD_DIM), (apart, PART, HEAD_DIM, 1), PART * part) for part in range(2)]
    tokens = torch.randn(2, 2, 1, HEAD_DIM, device=device).bfloat16()
    nowhere = torch.full((2, 1), -1, dtype=torch.int64, device=device)
    numbers, places = ints(2, 0, device=device), ints(5, 7, device=device)
    store_tokens(host_memory(PART, device), nowhere, places, *tokens, TokenFrames(*frames, numbers, places))
    for part, new in zip(frames, tokens, strict=True):
        assert torch.equal(part[[2, 0], 0, [5, 7]], new[:, 0])


def test_listed_pages_on_the_host_and_in_slots(device: torch.device) -> None:
    """First read on the host, from where they are put into slots, then in these."""
    near = make_pages(torch.bfloat16, blocks=2, kv_heads=1, head_dim=HEAD_DIM, of_block=1)
    counts, query = torch.tensor([[2]], dtype=torch.int32), torch.randn(1, 2, HEAD_DIM).bfloat16()
    listed = Listed(*torch.tensor([[[[-2, -3]]], [[[0, 1]]], [[[16, 16]]]], dtype=torch.int32))
    pools = near.k_pool.clone(), near.v_pool.clone()
    expected = reference.attend_listed(query, *pools, near.host, listed, counts, scale=SCALE)

    far, stride = far_pools(device), 2**30
    elements = host_memory(2 * stride + 2 * PART, device)
    for block in range(2):
        first = block * near.host.block_stride
        elements[2 * block * stride :][: 2 * PART] = near.host.elements[first : first + 2 * PART]
    host = HostStore(elements, stride, 2 * PART, 2 * PART, 1)
    for slots in ([-2, -2 - LAST], [0, LAST]):
        where = Listed(*(ints(*part, device=device).view(1, 1, 2) for part in (slots, (0, 2), (16, 16))))
        states = attend_listed(query.to(device), *far, host, where, counts.to(device), Tally(device), scale=SCALE)
        for part, wanted in zip(states, expected, strict=True):
            assert_close(part.cpu(), wanted, torch.bfloat16)
        for pool, wanted in zip(far, pools, strict=True):
            assert torch.equal(pool[[0, LAST]].cpu(), wanted[:2])
        settle(device)
        elements[: 2 * PART] = elements[-2 * PART :] = torch.nan


def test_tables_of_rows_that_are_scored(device: torch.device) -> None:
    store = make_store([2, 1, 5], head_dim=HEAD_DIM)
    queries, width = random_queries(3, 2, HEAD_DIM), store.blocks.shape[1]
    expected = expected_of(store, unrotated(queries))
    far = torch.empty(2**31 + width, dtype=torch.int32, device=device).as_strided((3, width), (2**30, 1))
    check_close(score(replace(store, blocks=far.copy_(store.blocks)), queries, device), expected)


def test_entries_of_the_last_kv_head(device: torch.device) -> None:
    heads, store_pages = 129, 2**24
    slots = torch.empty(heads * store_pages, dtype=torch.int32, device=device)
    slots[2**31 + 3] = 2
    directory = replace(PageDirectory.empty(1, 4, 1, device), slots=slots)
    counts = torch.zeros(1, heads, dtype=torch.int32, device=device)
    counts[0, -1] = 1
    listed = look_up(
        directory,
        torch.arange(8, dtype=torch.int32, device=device)[None],
        ints(128, device=device),
        ints(8, device=device),
        counts,
        torch.full((1, heads, 1), 3, device=device),
        first_page=0,
        most=1,
        pages_per_block=1,
        store_pages=store_pages,
        first_entry=0,
        kv_heads=heads,
    )
    assert [int(part[0, -1, 0]) for part in listed] == [2, 3, 16]

"""Pages and tokens between the host store and slots, against the host store's own layout."""

import pytest
import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor
from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, load_pages, store_pages, store_tokens
from vllm_hybrid_sparse.kernels.copy.reference import pack_token, unpack_page
from vllm_hybrid_sparse.memory.layout import BlockLayout

BLOCK_TOKENS = 48
KV_HEADS = 2


def host_block(layout: BlockLayout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A block of the host store, its K and V [tokens, kv_heads, head_dim], where its pages lie [kv_heads, pages]."""
    key, value = torch.randn(2, BLOCK_TOKENS, KV_HEADS, layout.head_dim).to(layout.torch_dtype)
    page_elements = layout.page_bytes // layout.element_bytes
    offsets = torch.arange(KV_HEADS * layout.pages_per_block).view(KV_HEADS, -1) * page_elements
    return layout.pack_reference(key, value), key, value, offsets


def on(device: torch.device, host: Tensor) -> Tensor:
    """Host memory as kernels of the device can read it."""
    return host.pin_memory() if device.type == "cuda" else host.clone()


def layout_of(dtype: str, head_dim: int) -> BlockLayout:
    return BlockLayout(dtype=dtype, head_dim=head_dim, block_tokens=BLOCK_TOKENS, summary="minmax")


shapes = pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bf16", 16), ("bf16", 80), ("bf16", 256), ("f16", 64), ("f32", 48)]
)


@shapes
def test_references_agree_with_the_layout_of_the_host_store(dtype: str, head_dim: int) -> None:
    block, key, value, offsets = host_block(layout_of(dtype, head_dim))
    page_elements = int(offsets[0, 1])
    packed = torch.full((page_elements,), torch.nan, dtype=key.dtype)
    for token in range(16):
        pack_token(packed, token, key[16 + token, 1], value[16 + token, 1])
    page = block[offsets[1, 1] : offsets[1, 1] + page_elements]
    assert torch.equal(packed, page)
    for part, wanted in zip(unpack_page(page, head_dim), (key, value), strict=True):
        assert torch.equal(part, wanted[16:32, 1])


@shapes
def test_loaded_pages_are_rows_and_other_slots_are_left(dtype: str, head_dim: int, device: torch.device) -> None:
    block, key, value, offsets = host_block(layout_of(dtype, head_dim))
    pools = torch.full((2, 9, 16, head_dim), torch.nan, dtype=key.dtype, device=device)
    # Page 1 of head 0 and slot 7 are skipped; the others go to slots in no order.
    wanted = offsets.clone().flatten()
    wanted[1] = -1
    slots = torch.tensor([4, 7, 0, 8, -1, 2], dtype=torch.int32)
    load_pages(on(device, block), wanted.to(device), slots.to(device), pools[0], pools[1])
    for pool, rows in zip(pools.cpu(), (key, value), strict=True):
        for index, slot in enumerate(slots.tolist()):
            page = rows.view(3, 16, KV_HEADS, head_dim)[index % 3, :, index // 3]
            if slot >= 0 and wanted[index] >= 0:
                assert torch.equal(pool[slot], page)
        assert pool[[1, 3, 5, 6, 7]].isnan().all()


@shapes
def test_stored_pages_are_the_block_again(dtype: str, head_dim: int, device: torch.device) -> None:
    layout = layout_of(dtype, head_dim)
    block, key, value, offsets = host_block(layout)
    pages = KV_HEADS * 3
    k_pool, v_pool = (
        part.view(3, 16, KV_HEADS, head_dim).permute(2, 0, 1, 3).reshape(pages, 16, head_dim).to(device)
        for part in (key, value)
    )
    host = on(device, torch.full_like(block, torch.nan))
    slots = torch.arange(pages, dtype=torch.int32, device=device)
    store_pages(host, offsets.flatten().to(device), slots, k_pool, v_pool)
    if device.type == "cuda":
        torch.cuda.synchronize()
    end_of_pages = pages * layout.page_bytes // layout.element_bytes
    assert torch.equal(host[:end_of_pages], block[:end_of_pages])
    assert host[end_of_pages:].isnan().all()


@shapes
def test_new_tokens_are_written_where_the_layout_has_them(dtype: str, head_dim: int, device: torch.device) -> None:
    block, _, _, offsets = host_block(layout_of(dtype, head_dim))
    places = [0, 1, 15, 16, 17, 47]
    wide = torch.randn(len(places), 2 * KV_HEADS, head_dim).to(block.dtype)
    new_key, new_value = wide[:, :KV_HEADS], wide[:, KV_HEADS:]  # as a fused projection gives them
    page_offsets = torch.stack([offsets[:, place // 16] for place in places])
    page_offsets[3, 1] = -1
    host = on(device, block)
    moved = wide.to(device)
    store_tokens(
        host,
        page_offsets.to(device),
        torch.tensor([place % 16 for place in places], dtype=torch.int32, device=device),
        moved[:, :KV_HEADS],
        moved[:, KV_HEADS:],
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    check_stored(host, block, page_offsets, places, (new_key, new_value), int(offsets[0, 1]))


@shapes
def test_tokens_lie_in_frames_as_well(dtype: str, head_dim: int, device: torch.device) -> None:
    """One layer of three has them; a token that the host store skips is there all the same."""
    block, key, _, offsets = host_block(layout_of(dtype, head_dim))
    host = on(device, block)
    places, frames = [0, 17, 47], [4, 0, 3]
    page_offsets = offsets[:, [place // 16 for place in places]].T.contiguous()
    page_offsets[1, 0] = -1
    new_key, new_value = torch.randn(2, len(places), KV_HEADS, head_dim).to(key.dtype)
    pool = torch.full((2, 5, 3, KV_HEADS, BLOCK_TOKENS, head_dim), torch.nan, dtype=key.dtype, device=device)
    before = pool.clone()

    def numbers(of: list[int]) -> Tensor:
        return torch.tensor(of, dtype=torch.int32, device=device)

    layer = TokenFrames(pool[0, :, 1], pool[1, :, 1], numbers(frames), numbers(places))
    in_page = numbers([place % 16 for place in places])
    store_tokens(host, page_offsets.to(device), in_page, new_key.to(device), new_value.to(device), layer)
    if device.type == "cuda":
        torch.cuda.synchronize()
    check_stored(host, block, page_offsets, places, (new_key, new_value), int(offsets[0, 1]))
    for part, new in enumerate((new_key, new_value)):
        for token, (frame, place) in enumerate(zip(frames, places, strict=True)):
            assert torch.equal(pool[part, frame, 1, :, place].cpu(), new[token])
            before[part, frame, 1, :, place] = new[token].to(device)
    assert torch.equal(pool.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0))


def test_frames_of_another_shape_are_refused() -> None:
    offsets, keys = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, 16)
    one, frames = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 3, 2, 32, 16)
    for name, changed in (
        ("k_frames", TokenFrames(frames[0, :, :1], frames[1], one, one)),
        ("v_frames", TokenFrames(frames[0], frames[1, :, :, :16], one, one)),
        ("frames", TokenFrames(*frames, one.long(), one)),
        ("frame_tokens", TokenFrames(*frames, one, one[:0])),
    ):
        with pytest.raises(KernelError, match=f"^{name}="):
            store_tokens(torch.zeros(1024), offsets, one, keys, keys, changed)


def check_stored(
    host: Tensor, block: Tensor, page_offsets: Tensor, places: list[int], new: tuple[Tensor, Tensor], page: int
) -> None:
    """The host's block is the one before, but for the tokens whose pages have an offset."""
    expected = block.clone()
    for index, place in enumerate(places):
        for head in range(KV_HEADS):
            start = int(page_offsets[index, head])
            if start >= 0:
                pack_token(expected[start : start + page], place % 16, new[0][index, head], new[1][index, head])
    assert torch.equal(host, expected)


def test_no_pages_and_no_tokens_are_no_work(device: torch.device) -> None:
    host = on(device, torch.zeros(512))
    pools = torch.zeros(2, 1, 16, 16, device=device)
    offsets = torch.empty(0, dtype=torch.int64, device=device)
    none = torch.empty(0, dtype=torch.int32, device=device)
    load_pages(host, offsets, none, pools[0], pools[1])
    keys = torch.empty(0, 2, 16, device=device)
    store_tokens(host, offsets.view(0, 2), none, keys, keys)
    assert not host.any()


def test_bad_arguments_are_refused_by_name() -> None:
    host, pools = torch.zeros(512), torch.zeros(2, 1, 16, 16)
    offsets, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"page_offsets=.*must be .* int64"):
        load_pages(host, offsets.int(), slots, pools[0], pools[1])
    with pytest.raises(KernelError, match=r"host=.*must be .* float32"):
        load_pages(host.half(), offsets, slots, pools[0], pools[1])
    with pytest.raises(KernelError, match=r"slots=\[2\]"):
        load_pages(host, offsets, slots.expand(2).contiguous(), pools[0], pools[1])
    with pytest.raises(KernelError, match=r"head_dim=8"):
        store_tokens(host, offsets.view(1, 1), slots, torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_pageable_host_memory_is_refused() -> None:
    pools = torch.zeros(2, 1, 16, 16, device="cuda")
    offsets = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(KernelError, match="must be pinned"):
        load_pages(torch.zeros(512), offsets, offsets.int(), pools[0], pools[1])


def test_along_a_dimension_of_one_any_stride_is_dense() -> None:
    """No kernel takes a step along it."""
    memory = torch.zeros(400)
    check_tensor("key", memory.as_strided((3, 1, 16), (64, 7, 1)), torch.float32, (3, 1, 16), CPU, strided_dims=1)
    with pytest.raises(KernelError, match="its last dimensions contiguous"):
        check_tensor("key", memory.as_strided((3, 2, 16), (64, 7, 1)), torch.float32, (3, 2, 16), CPU, strided_dims=1)

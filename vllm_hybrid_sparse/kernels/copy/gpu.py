"""Pages between pinned host memory and slots, read and written in place by kernels (UVA), repacked on the way."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_head_dim, check_host, check_pools, check_tensor
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.values import PAGE_TOKENS

_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)

_PROGRAMS = 64
"""For K, and as many for V, that move pages one after another: 512 KiB are on their way with pages of 128 dims in bf16,
where the link needs some 100 KiB; with a program a page the kernels of a step would wait for places on the device.
Reckoned, not tuned on a GPU."""


def load_pages(host: Tensor, page_offsets: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Copy whole pages from the host store to slots (PSA, Algorithm 1, line 9), without copy engine or staging area.

    What bounds it: the link to the host. Host memory is read in its own order, 16 bytes a thread, so that every read
    is a whole line; the elements are put into rows on the way into device memory, which is many times faster.

    host             [elements]                 of the KV dtype; pinned where the pool is on a GPU
    page_offsets     [pages]                    int64, elements from `host` to the page, multiples of 16, trusted;
                                                negative: skip
    slots            [pages]                    int32, each at most once, trusted to lie in the pool; negative: skip
    k_pool, v_pool   [slots, 16, head_dim]      bf16 | f16 | f32, out
    """
    _move_pages(host, page_offsets, slots, k_pool, v_pool, to_host=False)


def store_pages(host: Tensor, page_offsets: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor) -> None:
    """Copy whole pages from slots to the host store: `load_pages` the other way, with the same arguments.

    It is for prompts, which fill pages on the device; a host page that is written by a page lies in whole lines.
    """
    _move_pages(host, page_offsets, slots, k_pool, v_pool, to_host=True)


def _move_pages(
    host: Tensor, page_offsets: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor, *, to_host: bool
) -> None:
    head_dim = check_pools(k_pool, v_pool)
    device = k_pool.device
    check_host(host, k_pool.dtype, device)
    check_tensor("page_offsets", page_offsets, torch.int64, (None,), device)
    pages = page_offsets.shape[0]
    check_tensor("slots", slots, torch.int32, (pages,), device)
    if pages == 0:
        return
    _move_pages_kernel[(min(pages, _PROGRAMS), 2)](
        host,
        page_offsets,
        slots,
        k_pool,
        v_pool,
        pages,
        head_dim=head_dim,
        pack=packed_together(k_pool.dtype),
        block=triton.next_power_of_2(PAGE_TOKENS * head_dim),
        to_host=to_host,
    )


class TokenFrames(NamedTuple):
    """Places of tokens in frames of the pool, runs of slots that hold whole blocks (`memory/block_frames.py`)."""

    key: Tensor  # [frames, kv_heads, tokens of a block, head_dim], out; frames may be strided
    value: Tensor  # likewise
    numbers: Tensor  # [tokens] int32, the frame of each, trusted
    places: Tensor  # [tokens] int32, its place in the block, trusted


def store_tokens(
    host: Tensor,
    page_offsets: Tensor,
    page_tokens: Tensor,
    key: Tensor,
    value: Tensor,
    frames: TokenFrames | None = None,
) -> None:
    """Write new tokens' K and V through to their pages of the host store, and into frames of the pool beside it.

    What bounds it: the link to the host, by the number of its writes rather than by bytes. A token's key lies apart
    there, `packed_together` elements at a time. One token of a step is little; a prompt's pages go by `store_pages`.

    host           [elements]                      of the KV dtype, out; pinned where the keys are on a GPU
    page_offsets   [tokens, kv_heads]              int64, elements from `host` to the page, trusted; negative: skip
    page_tokens    [tokens]                        int32, place of the token in its page, 0 to 15, trusted
    key, value     [tokens, kv_heads, head_dim]    bf16 | f16 | f32, tokens may be strided
    frames         where the tokens are stored on the device, too; None: nowhere
    """
    device = key.device
    check_tensor("key", key, KV_DTYPES, (None, None, None), device, strided_dims=1)
    check_tensor("value", value, key.dtype, key.shape, device, strided_dims=1)
    tokens, kv_heads, head_dim = key.shape
    check_head_dim(head_dim)
    check_host(host, key.dtype, device)
    check_tensor("page_offsets", page_offsets, torch.int64, (tokens, kv_heads), device)
    check_tensor("page_tokens", page_tokens, torch.int32, (tokens,), device)
    if frames is not None:
        size = (None, kv_heads, None, head_dim)
        check_tensor("k_frames", frames.key, key.dtype, size, device, strided_dims=1)
        check_tensor("v_frames", frames.value, key.dtype, frames.key.shape, device, strided_dims=1)
        check_tensor("frames", frames.numbers, torch.int32, (tokens,), device)
        check_tensor("frame_tokens", frames.places, torch.int32, (tokens,), device)
    if tokens == 0 or kv_heads == 0:
        return
    _store_tokens_kernel[(tokens, kv_heads)](
        host,
        page_offsets,
        page_tokens,
        key,
        value,
        *(frames or (key, value, page_tokens, page_tokens)),
        key.stride(0),
        value.stride(0),
        0 if frames is None else frames.key.stride(0),
        0 if frames is None else frames.value.stride(0),
        0 if frames is None else frames.key.shape[2],
        framed=frames is not None,
        head_dim=head_dim,
        pack=packed_together(key.dtype),
        block_dim=triton.next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize=["pages"])
def _move_pages_kernel(
    host,
    page_offsets,
    slots,
    k_pool,
    v_pool,
    pages,
    head_dim: tl.constexpr,
    pack: tl.constexpr,
    block: tl.constexpr,
    to_host: tl.constexpr,
):
    part_elements: tl.constexpr = _PAGE_TOKENS * head_dim
    element = tl.arange(0, block)
    if tl.program_id(1) == 0:
        of_part = tl.full((), 0, tl.int64)
        pool = k_pool
        token = element // pack % _PAGE_TOKENS
        dim = element // (_PAGE_TOKENS * pack) * pack + element % pack
    else:
        of_part = tl.full((), part_elements, tl.int64)
        pool = v_pool
        token = element // (head_dim * pack) * pack + element % pack
        dim = element // pack % head_dim
    for page in range(tl.program_id(0), pages, tl.num_programs(0)):
        offset = tl.load(page_offsets + page)
        slot = tl.load(slots + page).to(tl.int64)
        is_moved = element < tl.where((offset >= 0) & (slot >= 0), part_elements, 0)
        # Pages and summaries are whole vectors of 16; without knowing it a thread moves an element at a time.
        hosted = host + tl.multiple_of(offset + of_part, 16) + element
        pooled = pool + slot * part_elements + token * head_dim + dim
        if to_host:
            tl.store(hosted, tl.load(pooled, mask=is_moved), mask=is_moved)
        else:
            tl.store(pooled, tl.load(hosted, mask=is_moved), mask=is_moved)


@triton.jit
def _store_tokens_kernel(
    host,
    page_offsets,
    page_tokens,
    key,
    value,
    k_frames,
    v_frames,
    frames,
    frame_tokens,
    key_token_stride,
    value_token_stride,
    k_frame_stride,
    v_frame_stride,
    tokens_of_frame,
    framed: tl.constexpr,
    head_dim: tl.constexpr,
    pack: tl.constexpr,
    block_dim: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dim = tl.arange(0, block_dim)
    is_dim = dim < head_dim
    k = tl.load(key + row * key_token_stride + kv_head * head_dim + dim, mask=is_dim)
    v = tl.load(value + row * value_token_stride + kv_head * head_dim + dim, mask=is_dim)
    if framed:
        frame = tl.load(frames + row).to(tl.int64)
        place = (kv_head * tokens_of_frame + tl.load(frame_tokens + row)) * head_dim + dim
        tl.store(k_frames + frame * k_frame_stride + place, k, mask=is_dim)
        tl.store(v_frames + frame * v_frame_stride + place, v, mask=is_dim)
    offset = tl.load(page_offsets + row * tl.num_programs(1) + kv_head)
    if offset < 0:
        return
    token = tl.load(page_tokens + row)
    tl.store(host + offset + (dim // pack * _PAGE_TOKENS + token) * pack + dim % pack, k, mask=is_dim)
    value_part = host + offset + _PAGE_TOKENS * head_dim
    tl.store(value_part + (token // pack * head_dim + dim) * pack + token % pack, v, mask=is_dim)

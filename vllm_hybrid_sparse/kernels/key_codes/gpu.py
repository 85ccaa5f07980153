"""Key codes on the device: made of pages in the host store; and queries as they are scored with codes."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_head_dim, check_host, check_tensor
from vllm_hybrid_sparse.kernels.copy.reference import packed_together
from vllm_hybrid_sparse.kernels.key_codes.reference import MEAN_LEVELS, rotation
from vllm_hybrid_sparse.values import CODE_BITS, PAGE_TOKENS, summary_bytes

_TILE_HEADS = 16
"""Query heads that a program rotates: the rows of one matrix instruction."""

_MATRIX_ELEMENTS = {torch.bfloat16: 2**14, torch.float16: 2**14, torch.float32: 2**12}
"""Of the rotation's matrix, those that one product takes. In half precision, which matrix instructions compute, all of
them up to head_dim 128, so that a page is one read. In float32 each thread has its part of both factors in registers.
Not tuned on a GPU yet."""

_MIN_BLOCK_DIM = 32
"""The dims of one line of codes of one bit."""

_QUERY_LEVELS = tl.constexpr(127)
_FACTOR_LEVELS = tl.constexpr(255)
_MEAN_LEVELS = tl.constexpr(MEAN_LEVELS)
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)
_TO_WHOLE = tl.constexpr(1.5 * 2**23)
"""A float32 has no bits for what is behind the point of a sum with it."""


class CodeWords(NamedTuple):
    """Where a page's key codes hold what, in words of 32 bits: `CodeLayout` of csrc/layout.h. The lines come first."""

    lines: int  # of 16 words, one for each token
    mean_word: int  # the first of head_dim / 8
    factor_word: int  # the first of 4
    unit_word: int  # the only one: bf16 unit of the factors, bf16 unit of the mean; zeros follow
    code_words: int  # of a page, with elements of as many bytes as are asked for

    @classmethod
    def of(cls, head_dim: int, code_bits: int, element_bytes: int) -> "CodeWords":
        """Raises KernelError for code_bits other than 1 and 2."""
        if code_bits not in CODE_BITS:
            raise KernelError(f"code_bits={code_bits}: must be 1 or 2")
        lines = -(-head_dim * code_bits // 32)
        mean_word = lines * PAGE_TOKENS
        factor_word = mean_word + head_dim // 8
        return cls(
            lines=lines,
            mean_word=mean_word,
            factor_word=factor_word,
            unit_word=factor_word + PAGE_TOKENS // 4,
            code_words=summary_bytes("key_codes", head_dim, element_bytes, code_bits) // 4,
        )


class RotatedQueries(NamedTuple):
    """Queries as codes are scored for them: unit * levels is about the rotated query. Of a query of zeros all is 0."""

    levels: Tensor  # [rows, q_heads, head_dim] bf16, whole numbers from -127 to 127
    units: Tensor  # [rows, q_heads] f32
    lengths: Tensor  # [rows, q_heads] f32, of the queries before they were rounded


def encode_pages(
    host: Tensor, page_offsets: Tensor, places: Tensor, codes: Tensor, *, head_dim: int, code_bits: int
) -> None:
    """Make the key codes of full pages in the host store: `pack_codes(encode_keys(keys, bits))` of reference.py.

    The sums are float32 and the reference's float64, so an element on the edge of two codes or levels may get the
    other one.

    What bounds it: the link to the host, 32 * head_dim bytes a page in bf16, of which only the K part is read: in its
    own order, 16 bytes a thread. The rotation's matrix is read anew by each program, from the device's cache.

    host           [elements]      bf16 | f16 | f32; pinned where the codes are on a GPU
    page_offsets   [pages]         int64, elements from `host` to the page, multiples of 16, trusted; negative: skip
    places         [pages]         int64, where in `codes` each goes, trusted, none twice; negative: skip
    codes          [any, bytes]    uint8, out, 16 bytes aligned; bytes are those of `summary_bytes`
    head_dim       a multiple of 16, 16 to 256
    code_bits      1 or 2 bits a dimension

    Raises KernelError for a tensor of another shape, dtype, device or stride, and for sizes out of their range.
    """
    device = codes.device
    check_host(host, KV_DTYPES, device)
    words, layout = check_codes(codes, (None,), head_dim, code_bits)
    check_tensor("page_offsets", page_offsets, torch.int64, (None,), device)
    check_tensor("places", places, torch.int64, page_offsets.shape, device)
    if page_offsets.shape[0] == 0:
        return
    signs, norms = _rotation_on(head_dim, host.dtype, device)
    block_dim = block_dims(head_dim)
    _encode_kernel[(page_offsets.shape[0],)](
        host,
        page_offsets,
        places,
        signs,
        norms,
        words,
        head_dim=head_dim,
        code_bits=code_bits,
        pack=packed_together(host.dtype),
        **layout._asdict(),
        block_dim=block_dim,
        inner=min(block_dim, _MATRIX_ELEMENTS[host.dtype] // block_dim),
    )


def rotate_queries(query: Tensor) -> RotatedQueries:
    """Rotate queries and round their elements to 8 bits, the largest of each to 127, as `estimate_scores` does.

    What bounds it: its launch. One program reads 16 heads of a row and the rotation's matrix, from the device's cache.

    query      [rows, q_heads, head_dim]   bf16 | f16 | f32, rows may be strided; head_dim a multiple of 16, 16 to 256
    returns    empty of no rows

    Raises KernelError for a tensor of another shape, dtype or stride.
    """
    device = query.device
    check_tensor("query", query, KV_DTYPES, (None, None, None), device, strided_dims=1)
    rows, q_heads, head_dim = query.shape
    check_head_dim(head_dim)
    levels = torch.empty(rows, q_heads, head_dim, dtype=torch.bfloat16, device=device)
    # Each of its own memory: a place at other multiples of 16 bytes would have kernels compiled anew.
    units, lengths = (torch.empty(rows, q_heads, dtype=torch.float32, device=device) for _ in range(2))
    if units.numel():
        signs, norms = _rotation_on(head_dim, query.dtype, device)
        block_dim = block_dims(head_dim)
        _rotate_kernel[(rows, triton.cdiv(q_heads, _TILE_HEADS))](
            query,
            signs,
            norms,
            levels,
            units,
            lengths,
            query.stride(0),
            q_heads,
            head_dim=head_dim,
            block_dim=block_dim,
            inner=min(block_dim, _MATRIX_ELEMENTS[query.dtype] // block_dim),
            tile=_TILE_HEADS,
        )
    return RotatedQueries(levels, units, lengths)


def check_codes(
    codes: Tensor, leading: tuple[int | None, ...], head_dim: int, code_bits: int
) -> tuple[Tensor, CodeWords]:
    """Return codes as the kernels take them, in words of 32 bits, and where these hold what. Raises KernelError.

    codes     [*leading, bytes] uint8; `leading` has None where any size will do, bytes are those of elements of two
              or four bytes
    """
    check_head_dim(head_dim)
    layout, other = (CodeWords.of(head_dim, code_bits, element_bytes) for element_bytes in (4, 2))
    if codes.dim() and codes.shape[-1] == 4 * other.code_words:
        layout = other
    check_tensor("codes", codes, torch.uint8, (*leading, 4 * layout.code_words), codes.device)
    if codes.data_ptr() % 16:
        raise KernelError(f"codes={list(codes.shape)} at {codes.data_ptr():#x}: must be aligned to 16 bytes")
    return codes.view(torch.int32), layout


def block_dims(head_dim: int) -> int:
    """The dims that a kernel computes with: a power of two, and whole lines of codes."""
    power: int = triton.next_power_of_2(head_dim)
    return max(_MIN_BLOCK_DIM, power)


@functools.cache
def _rotation_on(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rotation as the kernels take it: rotated x = (x @ signs) * norms; both stay on the device for good.

    Signs are exact in every KV dtype, where the matrix itself is not. The first call of its kind waits for the device.

    returns   signs [head_dim, head_dim], of the KV dtype: -1, 0 or 1; norms [head_dim] f32
    """
    matrix = rotation(head_dim).T
    return matrix.sign().to(dtype).contiguous().to(device), matrix.abs().amax(dim=0).float().to(device)


@triton.jit
def _signs_of(signs, before, dims, head_dim: tl.constexpr):
    """Rows `before` and columns `dims` of the rotation's signs, zeros outside of it."""
    return tl.load(
        signs + before[:, None] * head_dim + dims[None, :],
        mask=(before < head_dim)[:, None] & (dims < head_dim)[None, :],
        other=0.0,
    )


@triton.jit
def _in_units(x, unit):
    """x / unit; 0 where the unit is."""
    return tl.where(unit > 0.0, x / tl.where(unit > 0.0, unit, 1.0), 0.0)


@triton.jit
def _nearest(x):
    """The nearest whole number, the even one of two; |x| below 2^22."""
    return (x + _TO_WHOLE) - _TO_WHOLE


@triton.jit
def _bf16_bits(x):
    """The bits of the nearest bf16 to a number of 0 or more; Triton's interpreter would cut it off."""
    bits = x.to(tl.int32, bitcast=True)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


@triton.jit
def _of_bf16_bits(bits):
    """The bf16 of these bits, in float32; higher bits do not matter."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _less_mean(rotated, is_dim):
    """What is left of a page's keys without their mean: levels of the mean, bits of its unit, and the rest."""
    mean = tl.sum(rotated, axis=0) / _PAGE_TOKENS
    unit_bits = _bf16_bits(tl.max(tl.abs(mean), axis=0) / _MEAN_LEVELS)
    unit = _of_bf16_bits(unit_bits)
    exact = tl.where(unit > 0.0, (_in_units(mean, unit) + _MEAN_LEVELS) * 0.5, 0.0)
    levels = tl.minimum(tl.maximum(_nearest(exact), 0.0), _MEAN_LEVELS)
    kept = unit * (2.0 * levels - _MEAN_LEVELS)
    return levels.to(tl.int32), unit_bits, tl.where(is_dim[None, :], rotated - kept[None, :], 0.0)


@triton.jit
def _codes_of(residual, head_dim: tl.constexpr, code_bits: tl.constexpr):
    """The codes of what is left of a page's keys, the keys' factors, and the bits of the factors' unit."""
    lengths = tl.abs(residual)
    squares = tl.sum(residual * residual, axis=1)
    if code_bits == 2:
        far = residual * residual >= (squares / head_dim)[:, None]
        lengths = tl.where(far, 3.0 * lengths, lengths)
        codes = tl.where(residual >= 0.0, tl.where(far, 3, 2), tl.where(far, 0, 1))
    else:
        codes = tl.where(residual >= 0.0, 1, 0)
    factors = _in_units(squares, tl.sum(lengths, axis=1))
    unit_bits = _bf16_bits(tl.max(factors, axis=0) / _FACTOR_LEVELS)
    levels = tl.minimum(_nearest(_in_units(factors, _of_bf16_bits(unit_bits))), _FACTOR_LEVELS)
    return codes, levels.to(tl.int32), unit_bits


@triton.jit
def _encode_kernel(
    host,
    page_offsets,
    places,
    signs,
    norms,
    codes,
    head_dim: tl.constexpr,
    code_bits: tl.constexpr,
    pack: tl.constexpr,
    lines: tl.constexpr,
    mean_word: tl.constexpr,
    factor_word: tl.constexpr,
    unit_word: tl.constexpr,
    code_words: tl.constexpr,
    block_dim: tl.constexpr,
    inner: tl.constexpr,
):
    page = tl.program_id(0)
    offset = tl.load(page_offsets + page)
    place = tl.load(places + page)
    if (offset < 0) | (place < 0):
        return
    # Without knowing it a thread reads an element at a time.
    offset = tl.multiple_of(offset, 16)

    tokens = tl.arange(0, _PAGE_TOKENS)
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    rotated = tl.zeros((_PAGE_TOKENS, block_dim), tl.float32)
    for start in range(0, head_dim, inner):
        elements = start * _PAGE_TOKENS + tl.arange(0, _PAGE_TOKENS * inner)
        packed = tl.load(host + offset + elements, mask=elements < _PAGE_TOKENS * head_dim, other=0.0)
        by_token = tl.permute(tl.reshape(packed, (inner // pack, _PAGE_TOKENS, pack)), (1, 0, 2))
        matrix = _signs_of(signs, start + tl.arange(0, inner), dims, head_dim)
        rotated = tl.dot(tl.reshape(by_token, (_PAGE_TOKENS, inner)), matrix, acc=rotated, input_precision="ieee")
    rotated *= tl.load(norms + dims, mask=is_dim, other=0.0)[None, :]
    levels, mean_bits, residual = _less_mean(rotated, is_dim)
    page_codes, factors, factor_bits = _codes_of(residual, head_dim, code_bits)

    # All is written in words of 32 bits, which are the sums of their parts: no two parts have a bit in common.
    line_dims: tl.constexpr = 32 // code_bits
    block_lines: tl.constexpr = block_dim // line_dims
    out = codes + place * code_words

    shifts = dims % 4 * 8 + dims % line_dims // 4 * code_bits
    code_parts = tl.where(is_dim[None, :], page_codes << shifts[None, :], 0)
    code_sums = tl.sum(tl.reshape(code_parts, (_PAGE_TOKENS, block_lines, line_dims)), axis=2)
    line = tl.arange(0, block_lines)
    tl.store(out + line[None, :] * _PAGE_TOKENS + tokens[:, None], code_sums, mask=(line < lines)[None, :])

    mean_parts = tl.where(is_dim, levels << (dims % 8 * 4), 0)
    word = tl.arange(0, block_dim // 8)
    mean_sums = tl.sum(tl.reshape(mean_parts, (block_dim // 8, 8)), axis=1)
    tl.store(out + mean_word + word, mean_sums, mask=word < head_dim // 8)

    factor_sums = tl.sum(tl.reshape(factors << (tokens % 4 * 8), (_PAGE_TOKENS // 4, 4)), axis=1)
    tl.store(out + factor_word + tl.arange(0, _PAGE_TOKENS // 4), factor_sums)
    units_and_zeros = tl.where(tokens == 0, factor_bits | mean_bits << 16, 0)
    tl.store(out + unit_word + tokens, units_and_zeros, mask=tokens < code_words - unit_word)


@triton.jit
def _rotate_kernel(
    query,
    signs,
    norms,
    levels,
    units,
    lengths,
    query_row_stride,
    q_heads,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    inner: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * tile + tl.arange(0, tile)
    is_head = heads < q_heads
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    rotated = tl.zeros((tile, block_dim), tl.float32)
    for start in range(0, head_dim, inner):
        before = start + tl.arange(0, inner)
        q = tl.load(
            query + row * query_row_stride + heads[:, None] * head_dim + before[None, :],
            mask=is_head[:, None] & (before < head_dim)[None, :],
            other=0.0,
        )
        rotated = tl.dot(q, _signs_of(signs, before, dims, head_dim), acc=rotated, input_precision="ieee")
    rotated *= tl.load(norms + dims, mask=is_dim, other=0.0)[None, :]

    unit = tl.max(tl.abs(rotated), axis=1) / _QUERY_LEVELS
    whole = _nearest(_in_units(rotated, unit[:, None]))
    q_head = row * q_heads + heads
    is_element = is_head[:, None] & is_dim[None, :]
    tl.store(levels + q_head[:, None] * head_dim + dims[None, :], whole.to(tl.bfloat16), mask=is_element)
    tl.store(units + q_head, unit, mask=is_head)
    tl.store(lengths + q_head, tl.sqrt(tl.sum(rotated * rotated, axis=1)), mask=is_head)

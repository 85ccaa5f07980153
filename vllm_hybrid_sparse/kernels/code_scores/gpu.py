"""What pages weigh, from their key codes on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import block_group, check_tensor, group_size
from vllm_hybrid_sparse.kernels.code_scores.reference import CodeScores
from vllm_hybrid_sparse.kernels.key_codes.gpu import RotatedQueries, block_dims, check_codes
from vllm_hybrid_sparse.kernels.key_codes.reference import DEVIATION_PAGES, MEAN_LEVELS, code_deviation
from vllm_hybrid_sparse.values import PAGE_TOKENS

_TILE_PAGES = tl.constexpr(16)
"""Pages that a program scores: 256 tokens, 32 float32 sums a thread. Not tuned on a GPU yet."""
assert _TILE_PAGES.value == DEVIATION_PAGES, (
    "the first program of a row and KV head sees the pages that say how long keys are"
)

_MIN_DOT_COLUMNS = 8
"""Columns that a matrix instruction has at least, here the query heads; a smaller group is padded to it. With 16 a
warp executes a fifth more instructions (counted in Triton 3.6's code for sm_90), which seem to bound it."""

_MEAN_LEVELS = tl.constexpr(MEAN_LEVELS)
_PAGE_TOKENS = tl.constexpr(PAGE_TOKENS)


def score_codes(
    queries: RotatedQueries,
    codes: Tensor,
    blocks: Tensor,
    candidates: Tensor,
    *,
    first_page: int,
    most: int,
    pages_per_block: int,
    scale: float,
    code_bits: int,
) -> CodeScores:
    """Estimate what each candidate page weighs for each query head: `score_codes` of reference.py in float32.

    The weight is the logarithm of the sum over the page's tokens t of

        exp(scale * unit * (mean_unit * <levels, mean> + factor_t * <levels, elements_t>))

    Levels, elements and mean are small whole numbers, which bf16 holds; so are their products' sums in float32.
    Candidate c of a row is its request's page p = first_page + c, which lies in `codes` as page p % pages_per_block of
    block blocks[row, p // pages_per_block].

    What bounds it: the bytes of the codes, each read once for all query heads of the group: 640 a page and KV head of
    two bits at head_dim 128. A row of 32768 tokens and 8 KV heads reads 10 MiB a layer, which takes 3 us at 3.35 TB/s.

    queries      of `rotate_queries`                  [rows, q_heads, head_dim] bf16, twice [rows, q_heads] f32
    codes        [kv_heads, store_pages, bytes]       uint8, a layer's, 16 bytes aligned; bytes are those of
                                                      `summary_bytes`, store_pages those of whole blocks
    blocks       [rows, any]                          int32, rows may be strided: the blocks of each row's request,
                                                      trusted where its candidates lie; others are not looked at
    candidates   [rows]                               int32, candidate pages of each row, trusted to be 0 to `most`
    first_page   the first candidate's page, 0 or more; of all rows
    most         the pages of each row's result, 0 or more
    returns      f32; with most = 0 no deviation is written

    Raises KernelError for a tensor of another shape, dtype, device or stride, and for sizes out of their range.
    """
    device = codes.device
    check_tensor("levels", queries.levels, torch.bfloat16, (None, None, None), device)
    rows, q_heads, head_dim = queries.levels.shape
    check_tensor("units", queries.units, torch.float32, (rows, q_heads), device)
    check_tensor("lengths", queries.lengths, torch.float32, (rows, q_heads), device)
    words, layout = check_codes(codes, (None, None), head_dim, code_bits)
    kv_heads, store_pages, _ = codes.shape
    group = group_size(q_heads, kv_heads)
    if pages_per_block < 1 or store_pages % pages_per_block:
        raise KernelError(f"pages_per_block={pages_per_block}: must divide the {store_pages} pages of codes")
    check_tensor("blocks", blocks, torch.int32, (rows, None), device, strided_dims=1)
    check_tensor("candidates", candidates, torch.int32, (rows,), device)
    for name, value in (("first_page", first_page), ("most", most)):
        if value < 0:
            raise KernelError(f"{name}={value}: must be 0 or more")
    scores = torch.empty(rows, q_heads, most, dtype=torch.float32, device=device)
    deviations = torch.empty(rows, q_heads, dtype=torch.float32, device=device)
    if scores.numel():
        _score_codes_kernel[(rows, kv_heads, triton.cdiv(most, _TILE_PAGES.value))](
            *queries,
            words,
            blocks,
            candidates,
            scores,
            deviations,
            blocks.stride(0),
            store_pages,
            first_page,
            most,
            scale,
            code_deviation(code_bits),
            group=group,
            head_dim=head_dim,
            code_bits=code_bits,
            pages_per_block=pages_per_block,
            **layout._asdict(),
            block_group=block_group(group, least=_MIN_DOT_COLUMNS),
            block_dim=block_dims(head_dim),
        )
    return CodeScores(scores, deviations)


@triton.jit
def _above_128(small):
    """128 + small in bf16, of whole numbers below 128: by their bits, since to convert them would take longer."""
    return (small | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _for_tokens(of_pages):
    """What pages have, for each of their tokens."""
    by_page = tl.broadcast_to(of_pages[:, None], (_TILE_PAGES, _PAGE_TOKENS))
    return tl.reshape(by_page, (_TILE_PAGES * _PAGE_TOKENS,))


@triton.jit
def _levels_of_mean(page_words, is_page, head_dim: tl.constexpr, block_dim: tl.constexpr):
    """The levels of pages' means, eight in a word; [pages, dims] int32."""
    word = tl.arange(0, block_dim // 8)
    is_word = is_page[:, None] & (word < head_dim // 8)[None, :]
    words = tl.load(page_words[:, None] + word[None, :], mask=is_word, other=0)
    return tl.reshape(words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :] & 15, (_TILE_PAGES, block_dim))


@triton.jit(do_not_specialize=["blocks_row_stride", "first_page", "most"])
def _score_codes_kernel(
    levels,
    units,
    query_lengths,
    codes,
    blocks,
    candidates,
    scores,
    deviations,
    blocks_row_stride,
    store_pages,
    first_page,
    most,
    scale,
    code_deviation,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    code_bits: tl.constexpr,
    pages_per_block: tl.constexpr,
    lines: tl.constexpr,
    mean_word: tl.constexpr,
    factor_word: tl.constexpr,
    unit_word: tl.constexpr,
    code_words: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    heads = tl.arange(0, block_group)
    is_head = heads < group
    q_heads = (row * tl.num_programs(1) + kv_head) * group + heads
    first = tl.program_id(2) * _TILE_PAGES
    candidate = first + tl.arange(0, _TILE_PAGES)
    target = scores + q_heads[None, :] * most + candidate[:, None]
    is_target = is_head[None, :] & (candidate < most)[:, None]
    count = tl.load(candidates + row)
    if first >= count:
        if first == 0:
            tl.store(deviations + q_heads, tl.zeros((block_group,), tl.float32), mask=is_head)
        tl.store(target, tl.full((_TILE_PAGES, block_group), float("-inf"), tl.float32), mask=is_target)
        return

    is_page = candidate < count
    page = first_page + candidate
    block = tl.load(blocks + row * blocks_row_stride + page // pages_per_block, mask=is_page, other=0).to(tl.int64)
    place = kv_head * store_pages + block * pages_per_block + page % pages_per_block
    page_words = codes + place * code_words
    unit_bits = tl.load(page_words + unit_word, mask=is_page, other=0)

    # An element or a level of the mean is 2 c - top, and the products are with 128 + c: 256 + top times the sum of the
    # query's levels is too much. The largest sum, of 256 products of 127 and 143, is a whole number below 2^24.
    query = levels + q_heads[None, :] * head_dim
    dims = tl.arange(0, block_dim)
    whole_q = tl.load(query + dims[:, None], mask=(dims < head_dim)[:, None] & is_head[None, :], other=0.0)
    sums = tl.sum(whole_q.to(tl.float32), axis=0)[None, :]
    mean = _levels_of_mean(page_words + mean_word, is_page, head_dim, block_dim)
    of_mean = 2.0 * tl.dot(_above_128(mean), whole_q) - (256 + _MEAN_LEVELS) * sums

    token_words, is_token = _for_tokens(page_words), _for_tokens(is_page)
    token = tl.arange(0, _TILE_PAGES * _PAGE_TOKENS) % _PAGE_TOKENS
    line_dim = tl.arange(0, 32 // code_bits)
    shifts = line_dim % 4 * 8 + line_dim // 4 * code_bits
    top: tl.constexpr = (1 << code_bits) - 1
    products = tl.zeros((_TILE_PAGES * _PAGE_TOKENS, block_group), tl.float32)
    for line in range(lines):
        words = tl.load(token_words + line * _PAGE_TOKENS + token, mask=is_token, other=0)
        in_line = line * (32 // code_bits) + line_dim
        q = tl.load(query + in_line[:, None], mask=(in_line < head_dim)[:, None] & is_head[None, :], other=0.0)
        products = tl.dot(_above_128(words[:, None] >> shifts[None, :] & top), q, acc=products)
    factors = tl.load(token_words + factor_word + token // 4, mask=is_token, other=0) >> (token % 4 * 8) & 255
    lengths = factors.to(tl.float32) * _for_tokens((unit_bits << 16).to(tl.float32, bitcast=True))
    products = (2.0 * products - (256 + top) * sums) * lengths[:, None]
    unit = scale * tl.load(units + q_heads, mask=is_head, other=0.0)
    if first == 0:
        mean_factor = tl.sum(lengths, axis=0) / (tl.minimum(count, _TILE_PAGES) * _PAGE_TOKENS)
        of_query = tl.load(query_lengths + q_heads, mask=is_head, other=0.0)
        tl.store(deviations + q_heads, scale * code_deviation * mean_factor * of_query, mask=is_head)

    # The mean counts for all tokens of a page alike, so it is added to the logarithm of their sum.
    estimates = tl.reshape(products * unit[None, :], (_TILE_PAGES, _PAGE_TOKENS, block_group))
    peak = tl.max(estimates, axis=1)
    total = tl.sum(tl.exp(estimates - peak[:, None, :]), axis=1)
    mean_unit = (unit_bits >> 16 << 16).to(tl.float32, bitcast=True)
    weights = peak + tl.log(total) + unit[None, :] * mean_unit[:, None] * of_mean
    tl.store(target, tl.where(is_page[:, None], weights, float("-inf")), mask=is_target)

"""Attention of decode rows to contexts in frames, split over programs, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import (
    KV_DTYPES,
    attention_tile,
    block_group,
    check_head_dim,
    check_tensor,
    group_size,
)
from vllm_hybrid_sparse.kernels.merge.gpu import merge_splits

_PROGRAMS = 1024
"""Programs that contexts are split for. Reckoned, not tuned on a GPU: two to three times what an H100 holds at a time,
whose 132 multiprocessors have registers for three or four each at head_dim 128, so that rows of different lengths even
out."""

_MIN_SPLIT_TOKENS = 256
"""Tokens of a split at least. Reckoned, not tuned on a GPU: the partial results that are written and read again are
then at most group / 128 of the bytes of K and V in bf16."""

_TILE_TOKENS = 64
"""Tokens that a program reads at a time, where they fit (`attention_tile`). Not tuned on a GPU yet."""

_FRAME_TOKENS_STEP = 16


def attend_frames(
    query: Tensor,
    k_frames: Tensor,
    v_frames: Tensor,
    frames: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    *,
    scale: float,
    longest: int,
) -> None:
    """Attend with every decode row to its whole context, exactly: `attend_frames` of reference.py.

    A frame holds one block of a request, of all layers and KV heads; what is given here is one layer's part of all
    frames. The context is split over programs and their partial states are merged, as in flash-decoding (Dao et al.,
    2023). How many splits there are follows from `longest` and the number of rows, so a row's result may differ in its
    last bits with what it is batched with. Nothing waits for the device.

    What bounds it: the bytes of K and V, 4 * head_dim a token and KV head in bf16, each read once: one program reads
    its tokens of one KV head for all query heads of the group. A row of 32768 tokens, 8 KV heads and head_dim 128 reads
    128 MiB a layer, which takes 40 us at 3.35 TB/s.

    query                [rows, q_heads, head_dim]   of the KV dtype, rows may be strided
    k_frames, v_frames   [frames, kv_heads, frame_tokens, head_dim]   bf16 | f16 | f32, frames may be strided;
                                          frame_tokens a multiple of 16, head_dim too, 16 to 256
    frames               [rows, blocks]   int32, rows may be strided: the frame of each block of a row's request,
                                          trusted to be one for the blocks that seq_len reaches; others not looked at
    seq_lens             [rows]           int32, trusted to be at most `longest`; what lies behind them in a frame is
                                          not looked at
    output               [rows, q_heads, head_dim]   bf16 | f16 | f32 | f64, out, rows may be strided; never NaN where
                                          q, K and V are finite, zeros for a row of no tokens
    longest              the largest of seq_lens, 1 to blocks * frame_tokens

    Raises KernelError for a tensor of another shape, dtype, device or stride, and for a `longest` out of its range.
    """
    device = k_frames.device
    check_tensor("k_frames", k_frames, KV_DTYPES, (None, None, None, None), device, strided_dims=1)
    check_tensor("v_frames", v_frames, k_frames.dtype, k_frames.shape, device, strided_dims=1)
    _, kv_heads, frame_tokens, head_dim = k_frames.shape
    check_head_dim(head_dim)
    if frame_tokens % _FRAME_TOKENS_STEP or frame_tokens == 0:
        raise KernelError(f"frame_tokens={frame_tokens}: must be a multiple of {_FRAME_TOKENS_STEP}, above 0")
    check_tensor("query", query, k_frames.dtype, (None, None, head_dim), device, strided_dims=1)
    rows, q_heads, _ = query.shape
    group = group_size(q_heads, kv_heads)
    check_tensor("frames", frames, torch.int32, (rows, None), device, strided_dims=1)
    check_tensor("seq_lens", seq_lens, torch.int32, (rows,), device)
    check_tensor("output", output, (*KV_DTYPES, torch.float64), query.shape, device, strided_dims=1)
    if rows == 0:
        return
    room = frames.shape[1] * frame_tokens
    if not 1 <= longest <= room:
        raise KernelError(f"longest={longest}: must be 1 to {room}, the tokens of {frames.shape[1]} blocks")

    heads = block_group(group)
    splits = _splits(longest, rows * kv_heads)
    out = torch.empty(rows, q_heads, splits, head_dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows, q_heads, splits, dtype=torch.float32, device=device)
    _attend_frames_kernel[(rows, kv_heads, splits)](
        query,
        k_frames,
        v_frames,
        frames,
        seq_lens,
        out,
        lse,
        query.stride(0),
        k_frames.stride(0),
        v_frames.stride(0),
        frames.stride(0),
        scale,
        group=group,
        frame_tokens=frame_tokens,
        head_dim=head_dim,
        block_group=heads,
        block_dim=triton.next_power_of_2(head_dim),
        tile=attention_tile(_TILE_TOKENS, heads, head_dim, k_frames.dtype),
        least_tokens=_MIN_SPLIT_TOKENS,
    )
    merge_splits(out, lse, output)


def _splits(longest: int, groups: int) -> int:
    """How many splits the longest context has. Each row's is cut into as many, as far as they do not become too short.

    groups   rows times KV heads: the programs that there are without a split
    """
    return min(max(1, longest // _MIN_SPLIT_TOKENS), -(-_PROGRAMS // groups))


@triton.jit(do_not_specialize=["frames_row_stride"])  # which grows with contexts: not to be compiled anew
def _attend_frames_kernel(
    query,
    k_frames,
    v_frames,
    frames,
    seq_lens,
    out,
    lse,
    query_row_stride,
    k_frame_stride,
    v_frame_stride,
    frames_row_stride,
    scale,
    group: tl.constexpr,
    frame_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
    least_tokens: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_heads = tl.num_programs(1)
    splits = tl.num_programs(2)

    heads = tl.arange(0, block_group)
    is_head = heads < group
    q_heads = kv_head * group + heads
    states = (row * kv_heads * group + q_heads) * splits + split
    length = tl.load(seq_lens + row)
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(length, splits), tile) * tile, least_tokens)
    first = split * split_tokens
    end = tl.minimum(length, first + split_tokens)
    if first >= end:
        tl.store(lse + states, tl.full((block_group,), float("-inf"), tl.float32), mask=is_head)
        return

    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    is_output = is_head[:, None] & is_dim[None, :]
    q = tl.load(query + row * query_row_stride + q_heads[:, None] * head_dim + dims[None, :], mask=is_output, other=0.0)

    peak = tl.full((block_group,), float("-inf"), tl.float32)
    total = tl.zeros((block_group,), tl.float32)
    acc = tl.zeros((block_group, block_dim), tl.float32)
    for start in range(first, end, tile):
        tokens = start + tl.arange(0, tile)
        is_token = tokens < end
        frame = tl.load(frames + row * frames_row_stride + tokens // frame_tokens, mask=is_token, other=0).to(tl.int64)
        places = (kv_head * frame_tokens + tokens % frame_tokens)[:, None] * head_dim + dims[None, :]
        is_element = is_token[:, None] & is_dim[None, :]
        k = tl.load(k_frames + (frame * k_frame_stride)[:, None] + places, mask=is_element, other=0.0)
        v = tl.load(v_frames + (frame * v_frame_stride)[:, None] + places, mask=is_element, other=0.0)

        # Every tile of the loop holds a token, so the peak is finite from the first on.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        decay = tl.exp(peak - new_peak)
        weights = tl.exp(scores - new_peak[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    tl.store(out + states[:, None] * head_dim + dims[None, :], acc / total[:, None], mask=is_output)
    tl.store(lse + states, peak + tl.log(total), mask=is_head)

"""Attention of decode rows to contexts in frames in plain torch."""

import torch
from torch import Tensor


def attend_frames(
    query: Tensor,
    k_frames: Tensor,
    v_frames: Tensor,
    frames: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attend with every row to the tokens 0 to seq_len - 1 of its request: softmax(scale q K^T) V.

    query                [rows, q_heads, head_dim]                    bf16 | f16 | f32 | f64
    k_frames, v_frames   [frames, kv_heads, frame_tokens, head_dim]   same dtypes; q_heads a multiple of kv_heads
    frames               [rows, blocks]   int32 | int64, the frame of each block of frame_tokens tokens of a row's
                                          request; those behind seq_len are not looked at
    seq_lens             [rows]           int32 | int64, at most blocks * frame_tokens
    dtype                f64 | f32, what is computed in; K and V are converted a row at a time
    returns              [rows, q_heads, head_dim]   dtype; zeros where there is no token
    """
    rows, q_heads, head_dim = query.shape
    _, kv_heads, frame_tokens, _ = k_frames.shape
    output = torch.empty(rows, q_heads, head_dim, dtype=dtype, device=query.device)
    for row, tokens in enumerate(seq_lens.tolist()):
        context = frames[row, : -(-tokens // frame_tokens)]
        key, value = (
            part[context].transpose(0, 1).flatten(1, 2)[:, :tokens].to(dtype)  # [kv_heads, tokens, head_dim]
            for part in (k_frames, v_frames)
        )
        grouped = query[row].to(dtype).reshape(kv_heads, q_heads // kv_heads, head_dim)
        weights = (scale * grouped @ key.transpose(1, 2)).softmax(dim=-1)
        output[row] = (weights @ value).flatten(0, 1)
    return output

"""The same by torch's own fused kernels, which also give the log-sum-exp that its public function keeps to itself."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_tensor, group_size


def attend_dense(query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`attend_dense` of reference.py, on the device of its tensors.

    bf16 and f16 go to FlashAttention, on a CPU as on a GPU; f32 on a GPU to the memory-efficient kernel, FlashAttention
    having none. Without the causal rule a group's heads are rows of one head, so nothing is read twice; with it K and V
    are repeated for them, which are those of one chunk.

    query        [q_heads, rows, head_dim]      bf16 | f16 | f32, any strides but the last
    key, value   [kv_heads, tokens, head_dim]   of the same dtype, any strides but the last
    returns      (out, lse) f32: [q_heads, rows, head_dim], [q_heads, rows]
    """
    device = query.device
    check_tensor("query", query, KV_DTYPES, (None, None, None), device, strided_dims=2)
    q_heads, rows, head_dim = query.shape
    check_tensor("key", key, query.dtype, (None, None, head_dim), device, strided_dims=2)
    check_tensor("value", value, query.dtype, key.shape, device, strided_dims=2)
    kv_heads, tokens, _ = key.shape
    group = group_size(q_heads, kv_heads)
    if causal and rows != tokens:
        raise KernelError(f"rows={rows}: must be the {tokens} tokens where the order of both counts")
    if rows == 0 or tokens == 0:
        return torch.zeros(query.shape, device=device), torch.full((q_heads, rows), -torch.inf, device=device)
    if causal:
        key, value = (part.repeat_interleave(group, dim=0) for part in (key, value))
    else:
        query = query.reshape(kv_heads, group * rows, head_dim)
    out, lse = _fused(query[None], key[None], value[None], scale, causal)
    return out[0].reshape(q_heads, rows, head_dim).float(), lse[0].reshape(q_heads, rows)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """[1, heads, rows, head_dim] and [1, heads, rows] f32, natural log."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    elif query.dtype == torch.float32:
        out, lse = aten._scaled_dot_product_efficient_attention(
            query, key, value, None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal, scale=scale
        )[:2]
    else:
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]
    return out, lse[..., : query.shape[2]].float()  # which a kernel may pad

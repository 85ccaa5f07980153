"""Merging attention states on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_tensor

_TILE_STATES = 4
"""States that a program merges. Not tuned on a GPU yet."""


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Fold two partial attentions over disjoint keys into one (HGCA, section 3.3): `merge_states` of reference.py.

    State b may lie in pinned host memory, where the kernel reads it in place: results of the host need no copy.

    What bounds it: the bytes of three states; or, with b on the host, the link.

    out_a, out_b   [rows, q_heads, head_dim]   bf16 | f16 | f32, of an empty state not looked at
    lse_a, lse_b   [rows, q_heads]             f32, natural log, -inf where no key was seen
    returns        (out, lse), new, like a; empty with empty gives zeros and -inf, never NaN
    """
    device = out_a.device
    check_tensor("out_a", out_a, KV_DTYPES, (None, None, None), device)
    check_tensor("lse_a", lse_a, torch.float32, out_a.shape[:2], device)
    check_tensor("out_b", out_b, out_a.dtype, out_a.shape, out_b.device)
    check_tensor("lse_b", lse_b, torch.float32, out_a.shape[:2], out_b.device)
    if out_b.device != device and not (out_b.device.type == "cpu" and out_b.is_pinned() and lse_b.is_pinned()):
        raise KernelError(f"out_b=on {out_b.device}: must be on {device} or in pinned host memory")
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    states, head_dim = lse.numel(), out.shape[2]
    if states:
        _merge_kernel[(triton.cdiv(states, _TILE_STATES),)](
            out_a,
            lse_a,
            out_b,
            lse_b,
            out,
            lse,
            states,
            head_dim=head_dim,
            block_dim=triton.next_power_of_2(head_dim),
            tile=_TILE_STATES,
        )
    return out, lse


@triton.jit
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_states,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
):
    states = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    is_state = states < num_states
    log_a = tl.load(lse_a + states, mask=is_state, other=float("-inf"))
    log_b = tl.load(lse_b + states, mask=is_state, other=float("-inf"))
    peak = tl.maximum(log_a, log_b)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(log_a - base)
    weight_b = tl.exp(log_b - base)
    total = weight_a + weight_b
    divisor = tl.where(total > 0, total, 1.0)

    dims = tl.arange(0, block_dim)
    places = states[:, None] * head_dim + dims[None, :]
    is_element = is_state[:, None] & (dims < head_dim)[None, :]
    part_a = tl.load(out_a + places, mask=is_element & (weight_a > 0)[:, None], other=0.0).to(tl.float32)
    part_b = tl.load(out_b + places, mask=is_element & (weight_b > 0)[:, None], other=0.0).to(tl.float32)
    merged = (weight_a / divisor)[:, None] * part_a + (weight_b / divisor)[:, None] * part_b
    tl.store(out + places, merged.to(out.dtype.element_ty), mask=is_element)
    tl.store(lse + states, base + tl.log(total), mask=is_state)

"""Merging attention states on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import KV_DTYPES, check_tensor

_TILE_STATES = 4
"""States that a program merges. Not tuned on a GPU yet."""

_TILE_ELEMENTS = 8192
"""Elements of splits that a program merges at a time: of 64 splits at head_dim 128, nearly always all. Not tuned on a
GPU yet."""

_MOST_LOG_RATIO = tl.constexpr(60.0)
"""Of weights, as far as it matters which is larger."""


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


def merge_splits(out: Tensor, lse: Tensor, output: Tensor, output_lse: Tensor | None = None) -> None:
    """Fold the partial attentions of the splits of each row and head into one, as in flash-decoding (Dao et al., 2023).

    What bounds it: the bytes of the states that are not empty.

    out          [rows, q_heads, splits, head_dim]   f32, of an empty state not looked at
    lse          [rows, q_heads, splits]             f32, natural log, -inf where no key was seen
    output       [rows, q_heads, head_dim]           bf16 | f16 | f32 | f64, out, rows may be strided; zeros where all
                                                     splits are empty
    output_lse   [rows, q_heads]                     f32, out, -inf likewise; None: not wanted
    """
    device = out.device
    check_tensor("out", out, torch.float32, (None, None, None, None), device)
    rows, q_heads, splits, head_dim = out.shape
    check_tensor("lse", lse, torch.float32, (rows, q_heads, splits), device)
    check_tensor("output", output, (*KV_DTYPES, torch.float64), (rows, q_heads, head_dim), device, strided_dims=1)
    if output_lse is not None:
        check_tensor("output_lse", output_lse, torch.float32, (rows, q_heads), device)
    if rows == 0:
        return
    _merge_splits_kernel[(rows, q_heads)](
        out,
        lse,
        output,
        lse if output_lse is None else output_lse,
        output.stride(0),
        splits,
        head_dim=head_dim,
        block_dim=triton.next_power_of_2(head_dim),
        tile=_TILE_ELEMENTS // triton.next_power_of_2(head_dim),
        keep_lse=output_lse is not None,
    )


def merge_with_unread(
    retained: tuple[Tensor, Tensor],
    read: tuple[Tensor, Tensor],
    log_unread: Tensor | None,
    share: float,
    output: Tensor,
) -> None:
    """Fold the retained set and the candidates read, and let them stand for the unread: as in reference.py.

    What bounds it: the bytes of two states and of the output.

    retained, read   (out, lse): [rows, q_heads, head_dim] and [rows, q_heads] f32, normalised; natural log, -inf where
                     nothing was read: then `out` is not looked at
    log_unread       [rows, q_heads] f32, what the other candidates are estimated to weigh; not looked at where no
                     candidate was read; None: there are none
    share            of that, what the candidates read stand for; all that was read stands for the rest
    output           [rows, q_heads, head_dim]   bf16 | f16 | f32 | f64, out, rows may be strided; zeros where nothing
                     was read
    """
    device = output.device
    check_tensor("output", output, (*KV_DTYPES, torch.float64), (None, None, None), device, strided_dims=1)
    rows, q_heads, head_dim = output.shape
    for name, (out, lse) in (("retained", retained), ("read", read)):
        check_tensor(f"{name} out", out, torch.float32, output.shape, device)
        check_tensor(f"{name} lse", lse, torch.float32, (rows, q_heads), device)
    if log_unread is not None:
        check_tensor("log_unread", log_unread, torch.float32, (rows, q_heads), device)
    if rows == 0:
        return
    _merge_with_unread_kernel[(rows, q_heads)](
        *retained,
        *read,
        retained[1] if log_unread is None else log_unread,
        output,
        output.stride(0),
        share,
        head_dim=head_dim,
        block_dim=triton.next_power_of_2(head_dim),
        has_unread=log_unread is not None,
    )


@triton.jit(do_not_specialize=["num_states"])  # numbers that change from step to step: not to be compiled anew
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


@triton.jit(do_not_specialize=["splits"])
def _merge_splits_kernel(
    out,
    lse,
    output,
    output_lse,
    output_row_stride,
    splits,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
    keep_lse: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    state = row * tl.num_programs(1) + q_head
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim

    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((block_dim,), tl.float32)
    for start in range(0, splits, tile):
        places = start + tl.arange(0, tile)
        logs = tl.load(lse + state * splits + places, mask=places < splits, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logs, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp(peak - base)
        weights = tl.exp(logs - base)
        is_element = (logs > float("-inf"))[:, None] & is_dim[None, :]
        parts = tl.load(out + (state * splits + places)[:, None] * head_dim + dims[None, :], mask=is_element, other=0.0)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay + tl.sum(weights[:, None] * parts, axis=0)
        peak = new_peak

    merged = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(
        output + row * output_row_stride + q_head * head_dim + dims, merged.to(output.dtype.element_ty), mask=is_dim
    )
    if keep_lse:
        tl.store(output_lse + state, tl.where(total > 0.0, peak + tl.log(total), float("-inf")))


@triton.jit
def _merge_with_unread_kernel(
    retained_out,
    retained_lse,
    read_out,
    read_lse,
    log_unread,
    output,
    output_row_stride,
    share,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    has_unread: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1)
    state = row * tl.num_programs(1) + q_head
    dims = tl.arange(0, block_dim)
    is_dim = dims < head_dim
    log_retained = tl.load(retained_lse + state)
    log_read = tl.load(read_lse + state)
    peak = tl.maximum(log_retained, log_read)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    of_retained = tl.exp(log_retained - base)
    of_read = tl.exp(log_read - base)
    part = tl.load(retained_out + state * head_dim + dims, mask=is_dim, other=0.0)
    part = tl.where(of_retained > 0.0, part, 0.0)
    candidates = tl.load(read_out + state * head_dim + dims, mask=is_dim, other=0.0)
    candidates = tl.where(log_read > float("-inf"), candidates, 0.0)
    total = of_retained + of_read
    acc = of_retained * part + of_read * candidates
    merged = acc / tl.where(total > 0.0, total, 1.0)
    if has_unread:
        unread = tl.exp(tl.minimum(tl.load(log_unread + state) - base, _MOST_LOG_RATIO))
        unread = tl.where(log_read > float("-inf"), unread, 0.0)
        stand_in = share * candidates + (1.0 - share) * merged
        whole = total + unread
        merged = (acc + unread * stand_in) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(
        output + row * output_row_stride + q_head * head_dim + dims, merged.to(output.dtype.element_ty), mask=is_dim
    )

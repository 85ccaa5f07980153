"""Merged states: Triton's kernel, FlashInfer's conventions, and which of them a device gets."""

import logging
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels import merge
from vllm_hybrid_sparse.kernels.merge import choice, reference
from vllm_hybrid_sparse.kernels.merge.gpu import merge_splits, merge_states, merge_with_unread

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def states(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two states, some of them empty and then NaN."""
    outs, lses = torch.randn(2, rows, heads, head_dim).to(dtype), 10 * torch.randn(2, rows, heads)
    for part, at in ((0, 0), (1, 0), (0, 1), (1, 2)):
        lses[part].view(-1)[at::5] = -torch.inf
        outs[part].view(-1, head_dim)[at::5] = torch.nan
    return outs[0], lses[0], outs[1], lses[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 1, 16), (3, 5, 80), (2, 8, 64)])
def test_merging_is_the_reference_s(
    rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    parts = states(rows, heads, head_dim, dtype)
    out, lse = merge_states(*(part.to(device) for part in parts))
    expected = reference.merge_states(*(part.double() for part in parts))
    assert out.dtype == dtype
    assert_close(out.cpu(), expected[0])
    assert_close(lse.cpu(), expected[1])


@pytest.mark.parametrize("splits", [1, 16, 17, 40])
def test_splits_are_merged_one_after_another(splits: int, device: torch.device) -> None:
    outs, lses = torch.randn(2, 3, splits, 80), 10 * torch.randn(2, 3, splits)
    lses.view(-1)[::3] = -torch.inf
    lses[0, 0] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    output, output_lse = torch.full((2, 3, 80), torch.nan, device=device), torch.full((2, 3), torch.nan, device=device)
    merge_splits(outs.to(device), lses.to(device), output, output_lse)
    merged = torch.zeros(2, 3, 80).double(), torch.full((2, 3), -torch.inf).double()
    for split in range(splits):
        merged = reference.merge_states(*merged, outs[:, :, split].double(), lses[:, :, split].double())
    assert_close(output.cpu(), merged[0])
    assert_close(output_lse.cpu(), merged[1])
    alone = torch.full((2, 3, 80), torch.nan, dtype=torch.bfloat16, device=device)
    merge_splits(outs.to(device), lses.to(device), alone)
    assert_close(alone.cpu(), merged[0])


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_was_read_stands_for_the_unread(share: float, device: torch.device) -> None:
    retained_out, read_out = torch.randn(2, 3, 8, 64)
    retained_lse, read_lse, log_unread = 5 * torch.randn(3, 3, 8)
    log_unread[0] = -torch.inf
    expected = reference.merge_with_unread(
        *(part.double() for part in (retained_out, retained_lse, read_out, read_lse, log_unread)), share
    )
    retained, read = (
        (out.to(device), lse.to(device)) for out, lse in ((retained_out, retained_lse), (read_out, read_lse))
    )
    output = torch.full((3, 8, 64), torch.nan, device=device)
    merge_with_unread(retained, read, log_unread.to(device), share, output)
    assert_close(output.cpu(), expected)
    merge_with_unread(retained, read, None, share, output)
    assert_close(output.cpu(), reference.merge_states(retained_out, retained_lse, read_out, read_lse)[0])


@pytest.mark.parametrize("below", [80.0, 110.0, 500.0])
def test_what_was_read_stands_for_the_unread_however_little_it_weighs(below: float, device: torch.device) -> None:
    ones, lse = torch.ones(1, 4, 16, device=device), torch.zeros(1, 4, device=device)
    output = torch.full((1, 4, 16), torch.nan, device=device)
    merge_with_unread((ones, lse), (3 * ones, lse - below), lse + 1.1, 0.5, output)
    expected = reference.merge_with_unread(
        *(part.cpu().double() for part in (ones, lse, 3 * ones, lse - below, lse + 1.1)), 0.5
    )
    assert_close(output.cpu(), expected)


def test_where_no_candidate_was_read_the_unread_count_for_nothing(device: torch.device) -> None:
    retained = torch.randn(1, 4, 16, device=device), torch.randn(1, 4, device=device)
    nothing = torch.full((1, 4, 16), torch.nan, device=device), torch.full((1, 4), -torch.inf, device=device)
    output = torch.full((1, 4, 16), torch.nan, device=device)
    merge_with_unread(retained, nothing, torch.full((1, 4), 9.0, device=device), 0.5, output)
    assert_close(output.cpu(), retained[0].cpu())
    merge_with_unread(nothing, nothing, None, 0.5, output)
    assert torch.equal(output.cpu(), torch.zeros(1, 4, 16))


def test_two_empty_states_give_zeros_and_minus_infinity(device: torch.device) -> None:
    out, lse = torch.full((2, 3, 16), torch.nan, device=device), torch.full((2, 3), -torch.inf, device=device)
    merged = merge_states(out, lse, out, lse)
    assert torch.equal(merged[0], torch.zeros_like(out))
    assert torch.equal(merged[1], lse)


def test_extreme_weights_do_not_overflow(device: torch.device) -> None:
    for weight in (1e4, -1e4, 3e38):
        lse = torch.full((1, 1), weight, device=device)
        out = torch.ones(1, 1, 16, device=device)
        assert_close(merge_states(out, lse, 3 * out, lse)[0].cpu(), torch.full((1, 1, 16), 2.0))


def test_no_rows_give_no_states(device: torch.device) -> None:
    out, lse = torch.empty(0, 3, 16, device=device), torch.empty(0, 3, device=device)
    assert merge_states(out, lse, out, lse)[0].shape == (0, 3, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_state_in_pinned_host_memory_is_read_in_place() -> None:
    parts = states(4, 6, 64, torch.float32)
    on_device, on_host = (part.cuda() for part in parts[:2]), (part.pin_memory() for part in parts[2:])
    out, lse = merge_states(*on_device, *on_host)
    expected = reference.merge_states(*parts)
    assert_close(out.cpu(), expected[0])
    assert_close(lse.cpu(), expected[1])


def test_bad_arguments_are_refused_by_name() -> None:
    out, lse = torch.zeros(2, 3, 16), torch.zeros(2, 3)
    with pytest.raises(KernelError, match=r"lse_b=\[2, 4\]"):
        merge_states(out, lse, out, torch.zeros(2, 4))
    with pytest.raises(KernelError, match=r"out_b=.*float16.*must be .* float32"):
        merge_states(out, lse, out.half(), lse)
    with pytest.raises(KernelError, match=r"lse_a=.*contiguous"):
        merge_states(out, torch.zeros(3, 2).T, out, lse)


def merge_state_of_flashinfer(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """What FlashInfer documents: base 2, and nothing is done about states that are empty."""
    peak = torch.maximum(s_a, s_b)
    weight_a, weight_b = torch.exp2(s_a - peak), torch.exp2(s_b - peak)
    total = weight_a + weight_b
    merged = (weight_a / total)[..., None] * v_a.float() + (weight_b / total)[..., None] * v_b.float()
    return merged.to(v_a.dtype), total.log2() + peak


@pytest.fixture
def flashinfer_stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for FlashInfer, with its conventions; what was imported beside it does not outlive the test."""
    package, cascade = ModuleType("flashinfer"), ModuleType("flashinfer.cascade")
    cascade.merge_state = merge_state_of_flashinfer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.cascade", cascade)
    ours = f"{merge.__name__}.flashinfer"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    monkeypatch.delattr(merge, "flashinfer", raising=False)  # where `from merge import` looks first
    yield
    sys.modules.pop(ours, None)  # one that was there before is put back by monkeypatch
    vars(merge).pop("flashinfer", None)


@pytest.mark.usefixtures("flashinfer_stands_in")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_flashinfer_gets_base_2_and_never_an_infinity(dtype: torch.dtype) -> None:
    from vllm_hybrid_sparse.kernels.merge import flashinfer  # noqa: PLC0415  only beside its stand-in

    out_a, lse_a, out_b, lse_b = states(3, 7, 32, dtype)
    out_a, out_b = out_a.nan_to_num(0.0), out_b.nan_to_num(0.0)
    out, lse = flashinfer.merge_states(out_a, lse_a, out_b, lse_b)
    expected = reference.merge_states(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    with pytest.raises(KernelError, match=r"out_a=torch.float32"):
        flashinfer.merge_states(out_a.float(), lse_a, out_b.float(), lse_b)


@pytest.fixture
def no_choice_yet() -> Iterator[None]:
    """As in a fresh process; what is chosen does not outlive the test."""
    choice.choose_merge.cache_clear()
    yield
    choice.choose_merge.cache_clear()


@pytest.mark.usefixtures("no_choice_yet")
def test_the_cpu_gets_torch() -> None:
    assert choice.choose_merge("cpu", torch.bfloat16) == ("torch", reference.merge_states)


@pytest.mark.usefixtures("no_choice_yet", "flashinfer_stands_in")
def test_half_precision_goes_to_flashinfer_and_float32_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda _name: object())
    assert choice.choose_merge("cuda", torch.bfloat16)[0] == "flashinfer"
    assert choice.choose_merge("cuda", torch.float32) == ("triton", merge_states)


@pytest.mark.usefixtures("no_choice_yet")
@pytest.mark.parametrize(
    ("installed", "name", "said"),
    [({"triton"}, "triton", "FlashInfer is not installed"), (set(), "torch", "Neither FlashInfer nor Triton")],
)
def test_a_fallback_is_logged_once(
    installed: set[str], name: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda package: object() if package in installed else None)
    with caplog.at_level(logging.WARNING):
        assert choice.choose_merge("cuda", torch.bfloat16)[0] == name
        choice.choose_merge("cuda", torch.bfloat16)
    assert [said in message for message in caplog.messages] == [True]

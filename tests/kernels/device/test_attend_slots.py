"""Attention over slots: states and page weights against the plain-torch reference."""

import pytest
import torch
from torch import Tensor

from tests.kernels.device.slots import SCALE, Pool, attend_reference, empty_states, make_pool
from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def attend(
    pool: Pool,
    query: Tensor,
    state: tuple[Tensor, Tensor],
    device: torch.device,
    done: Tensor | None = None,
    token_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel on copies; returns out, lse and page_lse on the CPU, the latter NaN where it was not written."""
    out, lse = (part.clone().to(device) for part in state)
    done = torch.zeros(pool.slots.shape[:2], dtype=torch.uint8) if done is None else done
    page_lse = torch.full((len(query), query.shape[1], pool.slots.shape[2]), torch.nan, device=device)
    attend_slots(
        query.to(device),
        pool.k_pool.to(device),
        pool.v_pool.to(device),
        pool.slots.to(device),
        pool.page_tokens.to(device),
        done.to(device),
        out,
        lse,
        page_lse,
        scale=SCALE,
        token_scores=token_scores,
    )
    return out.cpu(), lse.cpu(), page_lse.cpu()


def check(pool: Pool, group: int, device: torch.device, state: tuple[Tensor, Tensor] | None = None) -> None:
    rows, kv_heads, _ = pool.slots.shape
    dtype, head_dim = pool.k_pool.dtype, pool.k_pool.shape[2]
    query = torch.randn(rows, kv_heads * group, head_dim).to(dtype)
    state = state or empty_states(rows, kv_heads * group, head_dim)
    actual = attend(pool, query, state, device)
    expected = attend_reference(pool, query, *state)
    assert_close(actual[0], expected[0], dtype)
    for part, wanted in zip(actual[1:], expected[1:], strict=True):
        assert_close(part, wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_every_group_size_and_dtype(dtype: torch.dtype, group: int, device: torch.device) -> None:
    check(make_pool([[[16, 16, 7], [16, 16, 16]]], 32, dtype), group, device)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 33, 64, 65, 130])
def test_every_number_of_tokens(tokens: int, device: torch.device) -> None:
    pages = [16] * (tokens // 16) + [tokens % 16]
    check(make_pool([[pages]], 16, torch.float32), 2, device)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_head_dim(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(make_pool([[[16, 5]]], head_dim, dtype), 3, device)


def test_a_group_larger_than_a_matrix_instruction(device: torch.device) -> None:
    check(make_pool([[[16, 5]]], 16, torch.float32), 20, device)


def test_missing_pages_between_others_are_not_read(device: torch.device) -> None:
    check(make_pool([[[-1, 16, -1, 9, -1, 16]], [[16, -1, -1, -1, -1, -1]]], 16, torch.float32), 3, device)


def test_a_state_is_folded_in(device: torch.device) -> None:
    state = torch.randn(2, 4, 16), 3 * torch.randn(2, 4)
    state[1][1, 2] = -torch.inf  # an empty state beside others
    state[0][1, 2] = torch.nan
    check(make_pool([[[16, 3], [2, 16]], [[16, 16], [-1, 4]]], 16, torch.float32), 2, device, state)


def test_microbatches_one_after_another_give_the_whole(device: torch.device) -> None:
    pool = make_pool([[[16] * 7, [16, 16, 16, 16, 16, 16, 2]]], 32, torch.float32)
    query = torch.randn(1, 6, 32)
    state: tuple[Tensor, Tensor] = empty_states(1, 6, 32)
    weights = []
    for start in range(0, 7, 3):
        part = Pool(
            pool.k_pool, pool.v_pool, pool.slots[..., start : start + 3], pool.page_tokens[..., start : start + 3]
        )
        *state, page_lse = attend(part, query, state, device)
        weights.append(page_lse)
    expected = attend_reference(pool, query, *empty_states(1, 6, 32))
    for actual, wanted in zip((*state, torch.cat(weights, dim=2)), expected, strict=True):
        assert_close(actual, wanted)


def test_nothing_selected_leaves_states_as_they_are_and_empty_ones_as_zeros(device: torch.device) -> None:
    pool = make_pool([[[-1, -1]], [[-1, -1]]], 16, torch.float32)
    state = torch.randn(2, 3, 16), torch.randn(2, 3)
    state[1][1], state[0][1] = -torch.inf, torch.nan
    out, lse, page_lse = attend(pool, torch.randn(2, 3, 16), state, device)
    assert_close(out[0], state[0][0])
    assert_close(lse[0], state[1][0])
    assert torch.equal(out[1], torch.zeros(3, 16))
    assert torch.equal(lse[1], torch.full((3,), -torch.inf))
    assert torch.equal(page_lse, torch.full((2, 3, 2), -torch.inf))


def test_done_rows_and_heads_are_left_untouched(device: torch.device) -> None:
    pool = make_pool([[[16], [16]], [[16], [16]]], 16, torch.float32)
    state = torch.randn(2, 4, 16), torch.randn(2, 4)
    query = torch.randn(2, 4, 16)
    done = torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8)
    out, lse, page_lse = attend(pool, query, state, device, done)
    expected = attend_reference(pool, query, *state)
    for row, heads, is_done in ((0, slice(0, 2), False), (0, slice(2, 4), True), (1, slice(0, 2), True)):
        if is_done:
            assert torch.equal(out[row, heads], state[0][row, heads])
            assert torch.equal(lse[row, heads], state[1][row, heads])
            assert page_lse[row, heads].isnan().all()
        else:
            assert_close(out[row, heads], expected[0][row, heads])


@pytest.mark.parametrize("size", [1e2, 1e-3])
def test_huge_and_tiny_scores_do_not_overflow(size: float, device: torch.device) -> None:
    pool = make_pool([[[16, 16, 16, 16, 16, 4]]], 16, torch.float32)
    pool.k_pool *= size
    query = size * torch.randn(1, 2, 16)
    out, lse, _ = attend(pool, query, empty_states(1, 2, 16), device)
    expected = attend_reference(pool, query, *empty_states(1, 2, 16))
    assert_close(lse, expected[1])
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-2, atol=1e-2)  # float32 scores of 1e4, to 1e-3


def test_strided_queries_and_parts_of_a_table(device: torch.device) -> None:
    pool = make_pool([[[16, 16, 16], [16, 4, 16]], [[16, 1, -1], [16, 16, 16]]], 16, torch.float32)
    whole = torch.randn(2, 12, 16, device=device)
    query = whole[:, 4:8]
    out, lse = (part.to(device) for part in empty_states(2, 4, 16))
    slots, tokens = pool.slots.to(device)[:, :, 1:], pool.page_tokens.to(device)[:, :, 1:]
    page_lse = torch.empty(2, 4, 2, device=device)
    done = torch.zeros(2, 2, dtype=torch.uint8, device=device)
    k_pool, v_pool = pool.k_pool.to(device), pool.v_pool.to(device)
    attend_slots(query, k_pool, v_pool, slots, tokens, done, out, lse, page_lse, scale=SCALE)
    part = Pool(pool.k_pool, pool.v_pool, pool.slots[..., 1:], pool.page_tokens[..., 1:])
    expected = attend_reference(part, query.cpu(), *empty_states(2, 4, 16))
    assert_close(out.cpu(), expected[0])
    assert_close(page_lse.cpu(), expected[2])


def test_scores_of_tokens_are_kept_where_they_are_wanted(device: torch.device) -> None:
    """In a part of a larger tensor, for the groups that are not done; the results are those without, in other tiles."""
    pool = make_pool([[[16, 16, 5], [16, 4, -1]], [[16, 1, -1], [16, 16, 16]]], 16, torch.float32)
    query, state = torch.randn(2, 6, 16), empty_states(2, 6, 16)
    done = torch.tensor([[0, 0], [0, 1]], dtype=torch.uint8)
    whole = torch.full((2, 6, 5 * 16), torch.nan, device=device)
    scores = whole[:, :, 16:64]
    plain, kept = (attend(pool, query, state, device, done, kept) for kept in (None, scores))
    for one, other in zip(plain, kept, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    scores = scores.cpu().unflatten(2, (3, 16))
    for row, kv_head in ((0, 0), (0, 1), (1, 0)):
        for page in range(3):
            slot, tokens = int(pool.slots[row, kv_head, page]), int(pool.page_tokens[row, kv_head, page])
            tokens = tokens if slot >= 0 else 0
            of_page = scores[row, 3 * kv_head : 3 * kv_head + 3, page]
            assert_close(
                of_page[:, :tokens], SCALE * query[row, 3 * kv_head : 3 * kv_head + 3] @ pool.k_pool[slot, :tokens].T
            )
            assert of_page[:, tokens:].eq(-torch.inf).all()
    assert scores[1, 3:].isnan().all()
    assert whole[:, :, :16].isnan().all()
    assert whole[:, :, 64:].isnan().all()


def test_no_rows_is_no_work(device: torch.device) -> None:
    pool = make_pool([[[16]]], 16, torch.float32)
    none = Pool(pool.k_pool, pool.v_pool, pool.slots[:0], pool.page_tokens[:0])
    assert attend(none, torch.empty(0, 2, 16), empty_states(0, 2, 16), device)[0].shape == (0, 2, 16)


def bad_arguments() -> list[tuple[str, dict[str, Tensor], str]]:
    return [
        ("query of another dtype", {"query": torch.randn(1, 2, 16).half()}, r"query=\[1, 2, 16\] float16"),
        (
            "query of another head_dim",
            {"query": torch.randn(1, 2, 32)},
            r"query=\[1, 2, 32\].*must be \[any, any, 16\]",
        ),
        ("slots of int64", {"slots": torch.zeros(1, 1, 2, dtype=torch.int64)}, "slots=.*int32"),
        ("slots apart", {"slots": torch.zeros(1, 1, 4, dtype=torch.int32)[..., ::2]}, "slots=.*contiguous"),
        ("page_tokens of another shape", {"page_tokens": torch.zeros(1, 1, 3, dtype=torch.int32)}, "page_tokens="),
        ("done as bool", {"done": torch.zeros(1, 1, dtype=torch.bool)}, "done=.*uint8"),
        ("out in bf16", {"out": torch.zeros(1, 2, 16, dtype=torch.bfloat16)}, "out=.*float32"),
        ("lse strided", {"lse": torch.zeros(1, 4)[:, ::2]}, "lse=.*contiguous"),
        ("page_lse too short", {"page_lse": torch.zeros(1, 2, 1)}, r"page_lse=\[1, 2, 1\]"),
        ("token_scores too short", {"token_scores": torch.zeros(1, 2, 16)}, r"token_scores=\[1, 2, 16\]"),
        ("head_dim of 24", {"k_pool": torch.zeros(4, 16, 24), "v_pool": torch.zeros(4, 16, 24)}, "head_dim=24"),
        ("heads that share unevenly", {"slots": torch.zeros(1, 3, 2, dtype=torch.int32)}, "page_tokens="),
        ("pages of 8 tokens", {"k_pool": torch.zeros(4, 8, 16)}, r"k_pool=\[4, 8, 16\]"),
        ("pools of two dtypes", {"v_pool": torch.zeros(4, 16, 16).half()}, "v_pool=.*float16"),
    ]


@pytest.mark.parametrize(("changed", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_arguments()])
def test_bad_arguments_are_refused_by_name(changed: dict[str, Tensor], message: str) -> None:
    arguments = {
        "query": torch.randn(1, 2, 16),
        "k_pool": torch.zeros(4, 16, 16),
        "v_pool": torch.zeros(4, 16, 16),
        "slots": torch.zeros(1, 1, 2, dtype=torch.int32),
        "page_tokens": torch.zeros(1, 1, 2, dtype=torch.int32),
        "done": torch.zeros(1, 1, dtype=torch.uint8),
        "out": torch.zeros(1, 2, 16),
        "lse": torch.zeros(1, 2),
        "page_lse": torch.zeros(1, 2, 2),
    }
    with pytest.raises(KernelError, match=message):
        attend_slots(**(arguments | changed), scale=1.0)

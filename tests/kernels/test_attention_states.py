"""The references of `sparse_attention` and `merge`: partial attentions over disjoint keys add up to the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages

State = tuple[torch.Tensor, torch.Tensor]


def random_state(generator: torch.Generator, empty: bool) -> State:
    out, lse = torch.randn(3, 16, generator=generator), 20 * torch.randn(3, generator=generator)
    return (torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)) if empty else (out, lse)


states = st.builds(
    lambda seed, empty: random_state(torch.Generator().manual_seed(seed), empty), st.integers(0, 2**31), st.booleans()
)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 48, 100])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_all_pages_give_ordinary_attention(tokens: int, group: int) -> None:
    query, key, value = torch.randn(group, 32), torch.randn(tokens, 32), torch.randn(tokens, 32)
    out, lse = attend_pages(query, key, value, range(-(-tokens // 16)), 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double()[None], key.double()[None], value.double()[None], scale=0.3
    )
    assert_close(out, expected[0])
    assert_close(lse, (0.3 * query.double() @ key.double().T).logsumexp(dim=1))


def test_no_pages_give_zeros_and_minus_infinity() -> None:
    out, lse = attend_pages(torch.randn(2, 16), torch.randn(40, 16), torch.randn(40, 16), [], 1.0)
    assert torch.equal(out, torch.zeros(2, 16, dtype=torch.float64))
    assert torch.equal(lse, torch.full((2,), -torch.inf, dtype=torch.float64))


def test_only_the_pages_asked_for_are_read() -> None:
    query, key, value = torch.randn(2, 16), torch.randn(40, 16), torch.randn(40, 16)
    expected = attend_pages(query, key, value, [2, 0], 1.0)
    key[16:32], value[16:32] = torch.nan, torch.nan
    for actual, wanted in zip(attend_pages(query, key, value, [0, 2], 1.0), expected, strict=True):
        assert_close(actual, wanted)


@given(st.integers(1, 80), st.integers(0, 2**31), st.data())
@settings(max_examples=40)
def test_merging_any_split_of_the_pages_gives_the_whole(tokens: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(2, 16, generator=generator)
    key, value = torch.randn(2, tokens, 16, generator=generator)
    pages = list(range(-(-tokens // 16)))
    part_of = [data.draw(st.booleans()) for _ in pages]
    parts = [[page for page in pages if part_of[page] is part] for part in (False, True)]
    merged = merge_states(*(x for part in parts for x in attend_pages(query, key, value, part, 1.0)))
    for actual, wanted in zip(merged, attend_pages(query, key, value, pages, 1.0), strict=True):
        assert_close(actual, wanted)


@given(states, states)
def test_merging_is_commutative(a: State, b: State) -> None:
    for left, right in zip(merge_states(*a, *b), merge_states(*b, *a), strict=True):
        assert_close(left, right)


@given(states, states, states)
def test_merging_is_associative(a: State, b: State, c: State) -> None:
    left, right = merge_states(*merge_states(*a, *b), *c), merge_states(*a, *merge_states(*b, *c))
    for one, other in zip(left, right, strict=True):
        assert_close(one, other)


@given(states)
def test_an_empty_state_changes_nothing(state: State) -> None:
    empty = (torch.full((3, 16), torch.nan), torch.full((3,), -torch.inf))
    out, lse = merge_states(*state, *empty)
    assert torch.equal(lse, state[1])
    assert_close(out, state[0].nan_to_num(0.0))


def test_two_empty_states_give_zeros_and_minus_infinity() -> None:
    empty = (torch.full((2, 5, 16), torch.nan, dtype=torch.bfloat16), torch.full((2, 5), -torch.inf))
    out, lse = merge_states(*empty, *empty)
    assert torch.equal(out, torch.zeros(2, 5, 16, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((2, 5), -torch.inf))


@pytest.mark.parametrize("lse", [1e4, -1e4, 3e38])
def test_extreme_weights_do_not_overflow(lse: float) -> None:
    out, merged_lse = merge_states(torch.ones(1, 16), torch.tensor([lse]), 3 * torch.ones(1, 16), torch.tensor([lse]))
    assert_close(out, torch.full((1, 16), 2.0))
    assert_close(merged_lse, torch.tensor([lse]).logaddexp(torch.tensor([lse])))

"""The references of `sparse_attention` and `merge`: partial attentions over disjoint keys add up to the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.merge.attribution import attribute_unread
from vllm_hybrid_sparse.kernels.merge.reference import merge_states, merge_with_unread
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


@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=60)
def test_unread_weight_goes_to_the_candidates_by_a_share(seed: int, share: float, spread: float) -> None:
    """The fast form, which knows the whole and the retained part, gives what the literal one does."""
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    retained, read, unread = spread * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    read = torch.maximum(read, retained - 9.0)  # with a smaller part the fast form gives nothing
    out, lse = merge_states(outs[0], retained, outs[1], read)
    given_away = attribute_unread(out, lse, outs[0], retained, unread, share)
    literal = merge_with_unread(outs[0], retained, outs[1], read, unread, share)
    torch.testing.assert_close(given_away, literal, rtol=1e-9, atol=1e-9)  # a difference of sums that are nearly equal
    if share == 0:
        assert_close(given_away, out)


def test_the_whole_unread_weight_is_as_if_the_candidates_were_heavier() -> None:
    (retained_out, retained_lse), (read_out, read_lse) = (
        random_state(torch.Generator().manual_seed(seed), empty=False) for seed in (1, 2)
    )
    unread = read_lse + 0.7
    heavier, _ = merge_states(retained_out, retained_lse, read_out, torch.logaddexp(read_lse, unread))
    assert_close(merge_with_unread(retained_out, retained_lse, read_out, read_lse, unread, 1.0), heavier)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_nothing_unread_or_no_candidate_read_leaves_the_output(share: float) -> None:
    out, lse = random_state(torch.Generator().manual_seed(3), empty=False)
    nothing = torch.full_like(lse, -torch.inf)
    assert torch.equal(attribute_unread(out, lse, torch.randn(3, 16), lse - 1.0, nothing, share), out)
    assert torch.equal(attribute_unread(out, lse, out, lse, lse + 90.0, share), out)
    zeros = torch.zeros(3, 16)
    assert torch.equal(attribute_unread(zeros, nothing, zeros, nothing, lse, share), zeros)
    huge = attribute_unread(out, lse, torch.randn(3, 16), lse - 1.0, lse + 500.0, share)
    assert huge.isfinite().all()


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("far", [40.0, 800.0, -3000.0])
@pytest.mark.parametrize("part", [3e-5, 3e-4, 3e-2])
def test_candidates_that_rounding_hides_are_given_nothing(share: float, far: float, part: float) -> None:
    """Of large log-sum-exps the difference is rounding: the weight is left out then, as far as the share says."""
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(2, 200, 16, generator=generator)
    retained, read = far + torch.rand(200, generator=generator), far + math.log(part)
    read = read + torch.rand(200, generator=generator)
    out, lse = merge_states(outs[0], retained, outs[1], read)
    unread = lse + 0.4
    given = attribute_unread(out, lse, outs[0], retained, unread, share)
    literal = merge_with_unread(*(state.double() for state in (outs[0], retained, outs[1], read, unread)), share)
    off = (given - literal).abs().amax(dim=1)
    as_it_was = (given == out).all(dim=1)
    assert (as_it_was | (off < 0.2)).all()
    assert as_it_was.all() == (part < 2e-6 * abs(far))

"""The retained set, and where a selection stops."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec, SelectionSpec

retained_sets = st.builds(
    RetainedSet,
    sink_tokens=st.integers(0, 8).map(lambda pages: 16 * pages),
    window_tokens=st.integers(1, 20).map(lambda pages: 16 * pages),
)


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [
        (0, (4, 4)),
        (1, (4, 4)),
        (256, (4, 4)),
        (335, (4, 4)),  # 64 + 256 + 15: the page after the sinks is not yet clear of the window
        (336, (4, 5)),
        (351, (4, 5)),
        (352, (4, 6)),
        (8192, (4, 496)),
    ],
)
def test_candidates_start_where_a_whole_page_leaves_the_window(seq_len: int, expected: tuple[int, int]) -> None:
    assert RetainedSet(sink_tokens=64, window_tokens=256).candidate_range(seq_len) == expected


@given(retained_sets, st.integers(0, 2000))
def test_a_page_is_a_candidate_exactly_by_its_definition(retained: RetainedSet, seq_len: int) -> None:
    first_page, end_page = retained.candidate_range(seq_len)
    by_definition = [
        page
        for page in range(math.ceil(seq_len / 16))
        if page >= retained.sink_tokens / 16 and page * 16 + 16 <= seq_len - retained.window_tokens
    ]
    assert list(range(first_page, end_page)) == by_definition


@given(retained_sets, st.integers(0, 2000))
def test_every_page_is_either_retained_or_a_candidate(retained: RetainedSet, seq_len: int) -> None:
    kept = retained.retained_pages(seq_len)
    assert kept == sorted(set(kept))
    assert sorted([*kept, *range(*retained.candidate_range(seq_len))]) == list(range(math.ceil(seq_len / 16)))


@given(retained_sets, st.integers(1, 2000))
def test_the_latest_tokens_are_retained(retained: RetainedSet, seq_len: int) -> None:
    kept = set(retained.retained_pages(seq_len))
    assert {token // 16 for token in range(max(0, seq_len - retained.window_tokens), seq_len)} <= kept


@pytest.mark.parametrize(
    ("sink_tokens", "window_tokens", "name"),
    [(-16, 256, "sink"), (8, 256, "sink"), (64, 0, "window"), (64, 20, "window")],
)
def test_a_retained_set_of_part_pages_is_refused(sink_tokens: int, window_tokens: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}_tokens=.*multiple of 16"):
        RetainedSet(sink_tokens=sink_tokens, window_tokens=window_tokens)


def test_no_candidates_cost_no_budget() -> None:
    assert SelectionSpec(ranked=True, budget_ratio=0.5, max_pages=3).budget_pages(0) == 0


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_ratio_given_in_percent_rounds_up_exactly(percent: int) -> None:
    spec = SelectionSpec(ranked=True, budget_ratio=percent / 100)
    for num_candidates in [*range(1, 300), *range(300, 10_000, 100)]:
        assert spec.budget_pages(num_candidates) == math.ceil(Fraction(percent, 100) * num_candidates)


@given(st.floats(0, 1, exclude_min=True), st.one_of(st.none(), st.integers(1, 10_000)), st.integers(1, 10_000))
def test_a_budget_is_at_least_one_page_and_at_most_every_limit(
    ratio: float, max_pages: int | None, num_candidates: int
) -> None:
    budget = SelectionSpec(ranked=True, budget_ratio=ratio, max_pages=max_pages).budget_pages(num_candidates)
    assert 1 <= budget <= min(num_candidates, max_pages or num_candidates)


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget_ratio": 0.0},
        {"budget_ratio": 1.01},
        {"max_pages": 0},
        {"threshold": 0.0},
        {"threshold": 1.01},
        {"threshold": math.nan},
        {"microbatch_pages": 0},
        {"prefix_sharers": 1},
        {"prefix_sharers": -1},
    ],
)
def test_a_selection_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=f"^{name}={value}: must be"):
        SelectionSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [{"budget_ratio": 0.5}, {"max_pages": 3}, {"threshold": 0.9}])
def test_what_is_read_in_part_is_ranked(limit: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"^ranked=False: must be True where a budget"):
        SelectionSpec(**limit)  # type: ignore[arg-type]
    SelectionSpec(ranked=True, **limit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        ({"beta": 0.0}, "beta=0.0: must be above 0 and finite"),
        ({"beta": float("inf")}, "beta=inf: must be above 0 and finite"),
        ({"alpha": 0.0}, "alpha=0.0: must be in"),
        ({"alpha": 1.5}, "alpha=1.5: must be in"),
    ],
)
def test_a_salience_out_of_range_is_refused(wrong: dict[str, float], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        SalienceSpec(**wrong)

"""Requests run side by side as far as their working sets fit, in their order, and each of them gets its turn."""

from collections import deque
from dataclasses import replace
from itertools import accumulate
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.policy.admission import Admission, RequestLength
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=64, window_tokens=256)
PROGRESSIVE = SelectionSpec(ranked=True, threshold=0.95, microbatch_pages=16)

selections = st.builds(
    SelectionSpec,
    ranked=st.just(True),
    budget_ratio=st.sampled_from([0.05, 0.5, 1.0]),
    max_pages=st.none() | st.integers(1, 40),
    threshold=st.sampled_from([0.9, 1.0]),
    microbatch_pages=st.integers(1, 32),
) | st.builds(SelectionSpec, microbatch_pages=st.integers(1, 32))
retained_sets = st.builds(
    RetainedSet,
    sink_tokens=st.integers(0, 8).map(PAGE_TOKENS.__mul__),
    window_tokens=st.integers(1, 20).map(PAGE_TOKENS.__mul__),
)


def admission(layer_pages: int, selection: SelectionSpec | None = PROGRESSIVE, kv_heads: int = 1) -> Admission:
    return Admission(retained=RETAINED, selection=selection, kv_heads=kv_heads, layer_pages=layer_pages)


def joins(rule: Admission, running: list[int], tokens: int, prompt: int = 1) -> bool:
    """Whether a request may join others, all with prompts of this many tokens, that come to these lengths."""
    return rule.admits([RequestLength(prompt, most) for most in running], RequestLength(prompt, tokens))


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [
        (0, 0),
        (1, 1),
        (16, 1),
        (17, 2),
        (336, 21),  # the sink, the window, and a page that the window only touches
        (337, 22),
        (100_000, 21 + 2 * 16),
    ],
)
def test_a_working_set_is_the_retained_set_and_two_microbatches(tokens: int, pages: int) -> None:
    assert admission(0).working_set_pages(tokens) == pages
    assert admission(0, kv_heads=3).working_set_pages(tokens) == 3 * pages


def test_a_policy_that_reads_less_than_two_microbatches_needs_no_more() -> None:
    fixed = SelectionSpec(ranked=True, max_pages=5)
    share = SelectionSpec(ranked=True, budget_ratio=0.05)
    assert admission(0, fixed).working_set_pages(100_000) == 21 + 5
    assert admission(0, share).working_set_pages(320 + 16 * 100) == 21 + 5
    assert admission(0, share).working_set_pages(100_000) == 21 + 2 * share.microbatch_pages
    assert admission(0, None).working_set_pages(100_000) == 21


@given(retained=retained_sets, selection=selections, most=st.integers(1, 4000), data=st.data())
def test_no_step_of_a_shorter_request_begins_with_more(
    retained: RetainedSet, selection: SelectionSpec, most: int, data: st.DataObject
) -> None:
    rule = Admission(retained=retained, selection=selection, kv_heads=1, layer_pages=0)
    tokens = data.draw(st.integers(1, most))
    first_page, end_page = retained.candidate_range(tokens)
    selected = min(selection.budget_pages(end_page - first_page), 2 * selection.microbatch_pages)
    assert len(retained.retained_pages(tokens)) + selected <= rule.working_set_pages(most) <= ceil(most / PAGE_TOKENS)


def test_the_one_that_fills_the_pool_is_admitted_and_the_next_is_not() -> None:
    of_one = admission(0).working_set_pages(1000)
    rule = admission(3 * of_one)
    assert joins(rule, [1000, 1000], 1000)
    assert not joins(rule, [1000, 1000, 1000], 1)
    assert not joins(admission(3 * of_one - 1), [1000, 1000], 1000)


def test_resident_contexts_leave_the_rest_of_the_pool_to_the_others() -> None:
    whole, of_one = 1000 // PAGE_TOKENS + 1, admission(0).working_set_pages(1000)
    rule = replace(admission(2 * whole + of_one), resident_pages=2 * whole)
    assert joins(rule, [1000, 1000], 1000)
    assert not joins(rule, [1000, 1000, 1000], 1)
    assert not joins(replace(rule, layer_pages=rule.layer_pages - 1), [1000, 1000], 1000)
    assert not joins(replace(rule, resident_pages=0), [1000] * 3, 1000)
    assert joins(replace(rule, resident_pages=0), [1000] * 2, 1000)


def test_a_request_that_will_not_stay_resident_takes_resident_pages_while_it_is_short() -> None:
    of_one = admission(0).working_set_pages(20_000)
    rule = replace(admission(1000), resident_pages=750)
    at_once = (1000 - 750) // of_one
    assert joins(rule, [20_000] * (at_once - 1), 20_000)
    assert not joins(rule, [20_000] * at_once, 20_000)
    # A prompt that just fits takes all of them; one that is too long to be resident takes none.
    assert not joins(rule, [20_000] * at_once, 20_000, prompt=750 * PAGE_TOKENS)
    too_long = 750 * PAGE_TOKENS + 1
    assert joins(rule, [20_000] * (1000 // of_one - 1), 20_000, prompt=too_long)
    assert not joins(rule, [20_000] * (1000 // of_one), 20_000, prompt=too_long)
    # A request of 30 pages beside it takes only those.
    least = replace(admission(30 + of_one), resident_pages=60)
    for rule, fits in ((least, True), (replace(least, layer_pages=30 + of_one - 1), False)):
        assert rule.admits([RequestLength(too_long, 20_000)], RequestLength(1, 30 * PAGE_TOKENS)) is fits


def test_who_comes_after_such_a_request_does_not_count_as_resident() -> None:
    rule = replace(admission(1000), resident_pages=750)
    grows, short = RequestLength(1, 20_000), RequestLength(500, 60 * PAGE_TOKENS)
    of_one, of_short = rule.working_set_pages(grows.most), rule.working_set_pages(short.most)
    behind = (1000 - 750 - of_one) // of_short
    assert 0 < behind < 750 // 60
    assert rule.admits([grows, *[short] * (behind - 1)], short)
    assert not rule.admits([grows, *[short] * behind], short)
    assert rule.admits([short] * (750 // 60), grows)  # who came before does


def test_whole_contexts_take_whole_blocks() -> None:
    rule = replace(admission(3 * 18, kv_heads=2), resident_pages=3 * 18)
    assert joins(rule, [129, 129], 129)
    assert not joins(replace(rule, block_pages=8), [129, 129], 1)
    assert joins(replace(rule, block_pages=8), [128, 128], 128)


def test_one_request_always_runs() -> None:
    assert joins(admission(1), [], 100_000)
    assert not joins(admission(1), [16], 16)
    assert joins(replace(admission(1), resident_pages=1), [], 100_000)


@given(
    selection=selections,
    layer_pages=st.integers(0, 200),
    resident_share=st.sampled_from([0.0, 0.5, 1.0]),
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000), st.integers(1, 6)), min_size=1, max_size=30),
)
def test_everyone_gets_a_turn_in_order_and_the_pool_is_never_overrun_but_by_one(
    selection: SelectionSpec, layer_pages: int, resident_share: float, arrivals: list[tuple[int, int, int]]
) -> None:
    """Requests have a length, come some steps apart and run for some steps. The rule alone decides who joins."""
    rule = replace(admission(layer_pages, selection), resident_pages=int(resident_share * layer_pages))
    times = list(accumulate(pause for pause, _, _ in arrivals))
    waiting: deque[int] = deque()
    running: dict[int, int] = {}  # steps that each has left
    begun: list[int] = []
    for now in range(sum(pause + steps for pause, _, steps in arrivals) + 1):
        waiting.extend(number for number, time in enumerate(times) if time == now)
        while waiting and joins(rule, [arrivals[number][1] for number in running], arrivals[waiting[0]][1]):
            begun.append(waiting.popleft())
            running[begun[-1]] = arrivals[begun[-1]][2]
        assert running or not waiting
        needed = sum(rule.working_set_pages(arrivals[number][1]) for number in running)
        assert needed <= layer_pages or len(running) == 1
        running = {number: left - 1 for number, left in running.items() if left > 1}
    assert begun == list(range(len(arrivals)))
    assert not running

"""The pages that each group may read, chosen for all rows at once, are what the selectors choose by the same scores."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from tests.tolerances import SCORE_TIE, THRESHOLD_TIE
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, score_deviation
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import attend_pages, score_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import native_selection
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch, stored_batch
from vllm_hybrid_sparse.kernels.paged_attention.page_tasks import OrderedPages, order_candidates, score_candidates
from vllm_hybrid_sparse.kernels.score.reference import log_unread_after
from vllm_hybrid_sparse.policy.selectors import SpecSelector, group_scores
from vllm_hybrid_sparse.values import GroupKey, RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
LENGTHS = (1003, 40, 4500, 131)
SELECTIONS = {
    "dense": SelectionSpec(),
    "topk": SelectionSpec(ranked=True, max_pages=5, attributed=0.5),
    "share": SelectionSpec(ranked=True, budget_ratio=0.3),
    "everything": SelectionSpec(ranked=True),
    "lightest": SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2),
    "estimated": SelectionSpec(
        ranked=True, threshold=0.9, microbatch_pages=3, estimated_remainder=True, attributed=0.5
    ),
    "capped": SelectionSpec(
        ranked=True, threshold=0.9, microbatch_pages=4, max_pages=9, estimated_remainder=True, attributed=0.5
    ),
}
CASES = [  # only key codes estimate what is unread and are compared with the retained set
    (name, summary, log_weight)
    for name, selection in SELECTIONS.items()
    for summary, log_weights in (("minmax", [3.0]), ("cuboid_mean", [3.0]), ("key_codes", [-20.0, 3.0, 60.0]))
    for log_weight in log_weights
    if summary == "key_codes" or not selection.estimated_remainder
]


class Rows:
    """Decode rows of some requests, with given weights of their retained sets."""

    def __init__(self, shape: Shape, log_weight: float) -> None:
        self.layer = ServedLayer(shape, num_blocks=sum(LENGTHS) // shape.block_tokens + 20)
        self.requests = [self.layer.start() for _ in LENGTHS]
        self.layer.step(list(zip(self.requests, LENGTHS, strict=True)), attend=False)
        self.query = 3 * self.layer.random(len(LENGTHS), shape.num_q_heads, shape.head_dim)
        self.tables = [torch.tensor(request.blocks, dtype=torch.int32) for request in self.requests]
        self.retained_lse = log_weight + torch.rand(self.query.shape[:2], generator=self.layer.generator)

    def batch(self) -> NativeBatch:
        return stored_batch([1] * len(LENGTHS), LENGTHS, self.tables, [-1] * len(LENGTHS), decode=True)

    def ordered(self, selection: SelectionSpec) -> dict[GroupKey, OrderedPages]:
        native, attention = native_selection(selection, RETAINED), self.layer.attention
        score_candidates(attention, native, self.layer.kv_cache, self.query, self.batch())
        return order_candidates(attention, native, self.retained_lse)

    def scores(self, group: GroupKey) -> np.ndarray:
        first, end = RETAINED.candidate_range(LENGTHS[group.row])
        attention, table = self.layer.attention, self.tables[group.row]
        scored = score_pages(attention, self.query[group.row], self.layer.kv_cache, table, first, end)
        return scored.unflatten(0, (attention.num_kv_heads, -1))[group.kv_head].double().numpy()

    def deviations(self, group: GroupKey) -> np.ndarray:
        """Of the estimated scores of a group's heads."""
        first, end = RETAINED.candidate_range(LENGTHS[group.row])
        keys, shape = self.requests[group.row].key[16 * first : 16 * end, group.kv_head], self.layer.shape
        heads = self.query[group.row].unflatten(0, (shape.num_kv_heads, -1))[group.kv_head]
        return score_deviation(heads, encode_keys(keys, shape.code_bits), shape.scale).numpy()


def check_group(rows: Rows, selection: SelectionSpec, group: GroupKey, ordered: OrderedPages) -> None:
    """Pages, share and rest of one group against the selectors."""
    weighs = rows.layer.attention.summary == "key_codes"
    first, end = RETAINED.candidate_range(LENGTHS[group.row])
    all_fit = selection.threshold == 1 and selection.budget_pages(end - first) == end - first
    if not selection.ranked or first == end or all_fit:  # nothing to choose
        assert ordered.pages.tolist() == list(range(first, end))
        assert ordered[1:] == (0, 0, 1.0, None)
        return
    scores = rows.scores(group)
    heads = slice(group.kv_head * len(scores), (group.kv_head + 1) * len(scores))
    retained = rows.retained_lse[group.row, heads].double().numpy()
    deviations = rows.deviations(group) if selection.stops_by_estimates else None
    expected = SpecSelector(selection).order(scores, retained if weighs else None, deviations)
    pages = ordered.pages - first
    assert ordered.scored == end - first
    if selection.estimated_remainder:
        odds = np.logaddexp.reduce(scores, axis=1) - retained
        share = (1 / (1 + np.exp(odds))).min()
        assert ordered.share == pytest.approx(share, abs=THRESHOLD_TIE)
        if share > selection.threshold:
            assert not len(ordered.pages)
            return
    else:
        assert ordered.share == 1.0
    best = group_scores(scores, retained if weighs else None, deviations)
    assert len(pages) == len(expected) == len(set(pages.tolist()))
    np.testing.assert_allclose(best[pages], best[expected], rtol=0, atol=SCORE_TIE)
    if selection.estimated_remainder or (weighs and selection.attributed):
        assert ordered.log_unread is not None
        check_expected(selection, retained, scores, ordered)
        rest = log_unread_after(scores, pages, selection.microbatch_pages)
        np.testing.assert_allclose(ordered.log_unread, rest, rtol=0, atol=SCORE_TIE)
    else:
        assert ordered.log_unread is None
        assert ordered.expected == 0


def check_expected(selection: SelectionSpec, retained: np.ndarray, scores: np.ndarray, ordered: OrderedPages) -> None:
    """By the estimates, the expected pages are enough and a microbatch less is not, or all pages are expected."""
    if not selection.estimated_remainder:
        assert ordered.expected == 0
        return
    assert ordered.log_unread is not None
    whole = np.logaddexp(retained, np.logaddexp.reduce(scores, axis=1))
    kept = 1 - np.exp(ordered.log_unread - whole).max(axis=1)
    looked = -(-ordered.expected // selection.microbatch_pages) - 1
    assert ordered.expected in (len(ordered.pages), (looked + 1) * selection.microbatch_pages)
    assert ordered.expected == len(ordered.pages) or kept[looked] > selection.threshold - THRESHOLD_TIE
    assert looked == 0 or kept[looked - 1] <= selection.threshold + THRESHOLD_TIE


def _cases_and_groups() -> list[Any]:
    """Each case with both groups, one of which is marked slow."""
    groups = [(1, 3), (3, 1)]  # query heads, threads
    return [
        pytest.param(*case, *group, marks=[] if group == groups[number % 2] else [pytest.mark.slow])
        for number, case in enumerate(CASES)
        for group in groups
    ]


@pytest.mark.parametrize(("name", "summary", "log_weight", "group", "threads"), _cases_and_groups())
def test_groups_read_what_the_selectors_say(
    isa: str, name: str, summary: str, log_weight: float, group: int, threads: int
) -> None:
    selection = SELECTIONS[name]
    rows = Rows(Shape(num_q_heads=2 * group, summary=summary, isa=isa, num_threads=threads), log_weight)
    ordered = rows.ordered(selection)
    assert set(ordered) == {GroupKey(row, head) for row in range(len(LENGTHS)) for head in range(2)}
    for of_group, pages in ordered.items():
        check_group(rows, selection, of_group, pages)
    if selection.estimated_remainder:
        reading = {len(ordered[GroupKey(row, 0)].pages) > 0 for row in (0, 2)}  # the rows with many candidates
        assert reading == {log_weight < 60}


def test_groups_may_attend_between_the_two_calls() -> None:
    """The host attends to a page in between if it could not be loaded."""
    rows = Rows(Shape(summary="key_codes"), 3.0)
    selection, attention = SELECTIONS["estimated"], rows.layer.attention
    expected = rows.ordered(selection)
    native = native_selection(selection, RETAINED)
    score_candidates(attention, native, rows.layer.kv_cache, rows.query, rows.batch())
    pages = torch.arange(200, dtype=torch.int32)
    attend_pages(attention, rows.query[2, 2:], rows.layer.kv_cache, rows.tables[2], 1, pages, LENGTHS[2])
    found = order_candidates(attention, native, rows.retained_lse)
    assert [one.pages.tolist() for one in found.values()] == [one.pages.tolist() for one in expected.values()]


@pytest.mark.parametrize(
    ("name", "summary", "rule"),
    [
        ("topk", "none", "summary=none: must be one that pages can be ranked by"),
        ("topk", "split_codes", "summary=split_codes: ranked by fluxion alone"),
        ("estimated", "minmax", "estimated_remainder=True: needs summary key_codes, not minmax"),
    ],
)
def test_summaries_that_do_not_serve_the_selection_are_refused(name: str, summary: str, rule: str) -> None:
    rows = Rows(Shape(summary=summary), 0.0)
    native = native_selection(SELECTIONS[name], RETAINED)
    with pytest.raises(KernelError, match=f"^{rule}$"):
        score_candidates(rows.layer.attention, native, rows.layer.kv_cache, rows.query, rows.batch())


def test_wrong_tensors_are_refused() -> None:
    rows = Rows(Shape(), 0.0)
    native = native_selection(SELECTIONS["topk"], RETAINED)
    attention, kv_cache = rows.layer.attention, rows.layer.kv_cache
    rule = r"query=\[4, 4, 64\] float16 on cpu, .* must be \[4, 4, 64\] \w+ on cpu, contiguous"
    with pytest.raises(KernelError, match=rule):
        score_candidates(attention, native, kv_cache, rows.query.half(), rows.batch())
    tables = [table[:1] for table in rows.tables]
    cut = stored_batch([1] * len(LENGTHS), LENGTHS, tables, [-1] * len(LENGTHS), decode=True)
    with pytest.raises(KernelError, match=rf"seq_lens={max(LENGTHS)}: the block table names 1 blocks"):
        score_candidates(attention, native, kv_cache, rows.query, cut)
    score_candidates(attention, native, kv_cache, rows.query, rows.batch())
    rule = r"retained_lse=\[4, 4\] float64 on cpu, .* must be \[4, 4\] float32 on cpu, contiguous"
    with pytest.raises(KernelError, match=rule):
        order_candidates(attention, native, rows.retained_lse.double())
    with pytest.raises(KernelError, match=r"retained_lse=\(3, 4\): must be of as many rows as were scored last"):
        order_candidates(attention, native, rows.retained_lse[:3])

"""Pages that requests begin with in common are read once for all of them, as if they belonged to the retained set."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import GEOMETRIES
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.tolerances import assert_close
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=48)
SINK_PAGES = RETAINED.sink_tokens // PAGE_TOKENS
DOCUMENT_TOKENS = 768  # whole blocks of every size
DOCUMENT_PAGES = DOCUMENT_TOKENS // PAGE_TOKENS
OWN_TOKENS = (900, 40, 1, 333)  # of the requests of a document; with 1 and 40 its last pages are in the window
SHARERS = len(OWN_TOKENS)
SELECTIONS = {
    "dense": SelectionSpec(),
    "topk": SelectionSpec(ranked=True, budget_ratio=0.2, attributed=0.5, prefix_sharers=2),
    "progressive": SelectionSpec(
        ranked=True, threshold=0.8, microbatch_pages=2, estimated_remainder=True, attributed=0.5, prefix_sharers=2
    ),
    "psa": SelectionSpec(ranked=True, threshold=0.8, microbatch_pages=2, prefix_sharers=2),
}
SUMMARIES = {"dense": "none", "topk": "key_codes", "progressive": "key_codes", "psa": "minmax"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def make_layer(shape: Shape) -> ServedLayer:
    return ServedLayer(shape, num_blocks=16 + 24576 // shape.block_tokens, seed=5)


def documents_with_sharers(layer: ServedLayer, documents: int, tokens: int = DOCUMENT_TOKENS) -> list[Request]:
    """The requests of some documents, neighbours of different ones."""
    roots = [layer.start() for _ in range(documents)]
    for root in roots:
        layer.step([(root, tokens)], attend=False)
    return [layer.fork(root, tokens, own_tokens) for own_tokens in OWN_TOKENS for root in roots]


Plans = list[list[list[int]]]


def decode(
    layer: ServedLayer,
    requests: Sequence[Request],
    query: Tensor,
    spec: SelectionSpec,
    retained: RetainedSet = RETAINED,
    sinks: Tensor | None = None,
    exact: Sequence[int] = (),
) -> tuple[Tensor, Plans, _native.Stats]:
    """One decode row of each request, [requests, q_heads, head_dim], each KV head's plan, and what was counted.

    exact   rows that read everything whatever the selection
    """
    count = len(requests)
    batch = layer.batch(requests, [1] * count, [row not in exact for row in range(count)], [-1] * count)
    output = torch.full_like(query, torch.nan)
    layer.attention.reset_stats()
    layer.attention.forward(query, None, None, layer.kv_cache, batch, spec, retained, output, None, None, sinks)
    heads = range(layer.shape.num_kv_heads)
    plans = [[layer.attention.last_plan(row, head) for head in heads] for row in range(count)]
    return output, plans, layer.attention.stats()


def with_prefix_retained(
    layer: ServedLayer,
    requests: Sequence[Request],
    query: Tensor,
    spec: SelectionSpec,
    prefix_pages: int,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Plans]:
    """Each row alone, its first pages a part of the retained set; a budget remains that of all its candidates."""
    retained = replace(RETAINED, sink_tokens=prefix_pages * PAGE_TOKENS)
    rows = []
    for row, request in enumerate(requests):
        budget = spec.budget_pages(len(candidate_pages(request)))
        alone = replace(spec, budget_ratio=1.0, max_pages=max(1, budget)) if spec.budget_ratio < 1 else spec
        rows.append(decode(layer, [request], query[row : row + 1], alone, retained, sinks))
    return torch.cat([output for output, _, _ in rows]), [plan for _, (plan,), _ in rows]


def candidate_pages(request: Request) -> range:
    """The pages between the sinks and the window."""
    return range(SINK_PAGES, max(SINK_PAGES, (len(request.key) - RETAINED.window_tokens) // PAGE_TOKENS))


@pytest.mark.parametrize("chosen", SELECTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_common_pages_count_as_retained(isa: str, dtype: torch.dtype, geometry: str, chosen: str) -> None:
    q_heads, kv_heads, head_dim, block_tokens = GEOMETRIES[geometry]
    shape = Shape(
        dtype=dtype,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        summary=SUMMARIES[chosen],
        isa=isa,
    )
    layer = make_layer(shape)
    requests = documents_with_sharers(layer, 2)
    query = 2.0 * layer.random(len(requests), q_heads, head_dim)
    spec = SELECTIONS[chosen]
    expected, plans = with_prefix_retained(layer, requests, query, spec, DOCUMENT_PAGES)
    together, plans_together, stats = decode(layer, requests, query, spec)
    assert_close(together, expected)
    for request, plan, plan_together in zip(requests, plans, plans_together, strict=True):
        common = [page for page in candidate_pages(request) if page < DOCUMENT_PAGES]
        for of_head, of_head_together in zip(plan, plan_together, strict=True):
            assert of_head_together == common + of_head
    assert stats.pages_shared == 2 * (SHARERS - 1) * DOCUMENT_PAGES * kv_heads
    selected = sum(len(of_head) for plan in plans_together for of_head in plan)
    pages = sum(-(-len(request.key) // PAGE_TOKENS) for request in requests) * kv_heads
    candidates = sum(len(candidate_pages(request)) for request in requests) * kv_heads
    assert (stats.pages_total, stats.pages_candidate) == (pages, candidates)
    assert stats.pages_read == pages - candidates + selected - stats.pages_shared


@pytest.mark.parametrize("chosen", ["dense", "topk", "progressive"])
def test_threads_divide_a_long_prefix(isa: str, chosen: str) -> None:
    """Into four parts for each of two KV heads. Block tables, which have 260 entries in common, are compared by 64."""
    pages, spec = 260, SELECTIONS[chosen]
    shape = Shape(num_q_heads=6, block_tokens=PAGE_TOKENS, isa=isa, num_threads=3, summary=SUMMARIES[chosen])
    layer = make_layer(shape)
    requests = documents_with_sharers(layer, 1, pages * PAGE_TOKENS)
    query = layer.random(len(requests), 6, 64)
    expected, _ = with_prefix_retained(layer, requests, query, spec, pages)
    together, _, stats = decode(layer, requests, query, spec)
    assert stats.pages_shared == (SHARERS - 1) * pages * 2
    assert_close(together, expected)


@pytest.mark.parametrize(("group", "sharers"), [(64, 3), (8, 16)])
def test_more_rows_than_one_pass_takes(isa: str, group: int, sharers: int) -> None:
    shape = Shape(dtype=torch.bfloat16, num_q_heads=group, num_kv_heads=1, head_dim=16, isa=isa, summary="key_codes")
    layer = make_layer(shape)
    root = documents_with_sharers(layer, 1)[0]
    requests = [layer.fork(root, DOCUMENT_TOKENS, 20 + 7 * i) for i in range(sharers)]
    query = 2.0 * layer.random(sharers, group, 16)
    spec = replace(SELECTIONS["progressive"], prefix_sharers=sharers)
    expected, _ = with_prefix_retained(layer, requests, query, spec, DOCUMENT_PAGES)
    together, _, stats = decode(layer, requests, query, spec)
    assert stats.pages_shared == (sharers - 1) * DOCUMENT_PAGES
    assert_close(together, expected)


def test_drafts_of_one_request_count_as_one(isa: str) -> None:
    """They are rows with one block table, each a token longer; here they begin a new block half-way."""
    layer = make_layer(Shape(num_q_heads=6, isa=isa, summary="key_codes", dtype=torch.bfloat16))
    first, other, *_ = documents_with_sharers(layer, 1)
    tokens = len(first.key) // layer.shape.block_tokens * layer.shape.block_tokens
    drafts = [Request(first.key[:end], first.value[:end], first.blocks) for end in range(tokens - 3, tokens + 4)]
    query = 2.0 * layer.random(len(drafts) + 1, 6, 64)
    for chosen in ("topk", "progressive"):
        spec = SELECTIONS[chosen]
        for selection in (spec, replace(spec, prefix_sharers=None)):
            output, plans, stats = decode(layer, drafts, query[:-1], selection)
            never, plans_never, _ = decode(layer, drafts, query[:-1], replace(spec, prefix_sharers=0))
            assert stats.pages_shared == 0
            assert plans == plans_never
            assert torch.equal(output, never)
        expected, _ = with_prefix_retained(layer, [*drafts, other], query, spec, DOCUMENT_PAGES)
        output, _, stats = decode(layer, [*drafts, other], query, spec)
        assert stats.pages_shared == len(drafts) * DOCUMENT_PAGES * 2
        assert_close(output, expected)


def test_rows_that_read_everything_count_too(isa: str) -> None:
    layer = make_layer(Shape(num_q_heads=6, isa=isa, summary="key_codes"))
    requests = documents_with_sharers(layer, 1)[:3]
    query = layer.random(3, 6, 64)
    spec = replace(SELECTIONS["progressive"], prefix_sharers=3)
    alone, _ = with_prefix_retained(layer, requests, query, spec, DOCUMENT_PAGES)
    for exact in range(3):
        whole, _, _ = decode(layer, [requests[exact]], query[exact : exact + 1], SelectionSpec())
        expected = alone.clone()
        expected[exact] = whole
        together, _, stats = decode(layer, requests, query, spec, exact=[exact])
        assert stats.pages_shared == 2 * DOCUMENT_PAGES * 2
        assert_close(together, expected)
        *_, stats = decode(layer, requests, query, replace(spec, prefix_sharers=4), exact=[exact])
        assert stats.pages_shared == 0


def test_learned_sinks_count_once(isa: str) -> None:
    for chosen in ("dense", "progressive"):
        layer = make_layer(Shape(num_q_heads=6, isa=isa, summary=SUMMARIES[chosen]))
        requests = documents_with_sharers(layer, 1)
        query, sinks = layer.random(len(requests), 6, 64), 6.0 + layer.random(6)
        expected, _ = with_prefix_retained(layer, requests, query, SELECTIONS[chosen], DOCUMENT_PAGES, sinks)
        without, _ = with_prefix_retained(layer, requests, query, SELECTIONS[chosen], DOCUMENT_PAGES)
        together, _, _ = decode(layer, requests, query, SELECTIONS[chosen], sinks=sinks)
        assert_close(together, expected)
        assert float((expected - without).abs().max()) > 0.01, "the sinks take hardly any weight"


def test_a_selection_decides_from_how_many_requests_on(isa: str) -> None:
    """Fewer select as they would alone. What reads everything needs two, whatever the number."""
    layer = make_layer(Shape(num_q_heads=6, isa=isa, summary="key_codes", dtype=torch.bfloat16))
    requests = documents_with_sharers(layer, 2)
    query = 2.0 * layer.random(len(requests), 6, 64)
    exact = [len(candidate_pages(request)) == 0 for request in requests]
    assert not any(exact)
    for chosen in ("topk", "progressive"):
        never, _, _ = decode(layer, requests, query, replace(SELECTIONS[chosen], prefix_sharers=0))
        for needed in (SHARERS, SHARERS + 1):
            spec = replace(SELECTIONS[chosen], prefix_sharers=needed)
            output, _, stats = decode(layer, requests, query, spec)
            assert (stats.pages_shared > 0) == (needed <= SHARERS)
            assert torch.equal(output, never) == (needed > SHARERS)
        by_default = replace(SELECTIONS[chosen], prefix_sharers=None)
        for count in (5, 6):  # of one document
            some = [layer.fork(requests[0], DOCUMENT_TOKENS, 500) for _ in range(count)]
            output, _, stats = decode(layer, some, query[:count], by_default)
            with_tiles = chosen == "progressive" and layer.attention.isa == "amx_bf16"
            assert (stats.pages_shared > 0) == (with_tiles and count >= 6)
    short = [layer.fork(requests[0], DOCUMENT_TOKENS, 1) for _ in range(2)]
    everything = replace(SELECTIONS["progressive"], threshold=1.0, prefix_sharers=9)
    assert decode(layer, short, query[:2], everything)[2].pages_shared == DOCUMENT_PAGES * 2
    never = replace(everything, prefix_sharers=0)
    assert decode(layer, short, query[:2], never)[2].pages_shared == 0


def fewest_readings(lengths: Sequence[int], common: Sequence[int], needed: int) -> int:
    """Of all ways to cut requests into runs of neighbours: the fewest pages read. Every run shares all that it can."""

    @cache
    def from_on(begin: int) -> int:
        if begin == len(lengths):
            return 0
        best = lengths[begin] + from_on(begin + 1)
        for end in range(begin + max(2, needed), len(lengths) + 1):
            shared = min(common[begin + 1 : end])
            if shared >= 16:  # pages; fewer are not worth it
                best = min(best, sum(lengths[begin:end]) - (end - begin - 1) * shared + from_on(end))
        return best

    return from_on(0)


@pytest.mark.parametrize("needed", [2, 4])
def test_runs_save_as_many_readings_as_they_can(needed: int) -> None:
    """Requests that leave a common text at several places, some of them early, some for another common text."""
    layer = ServedLayer(Shape(summary="key_codes", block_tokens=16), num_blocks=300, seed=1)
    root = layer.start()
    layer.step([(root, 640)], attend=False)
    branch = layer.fork(root, 352, 400)
    requests = [layer.fork(root, tokens, 130) for tokens in (640, 640, 512, 320, 128, 640)]
    requests += [layer.fork(branch, tokens, 90) for tokens in (720, 720, 416, 384)]
    query = layer.random(len(requests), 4, 64)
    spec = SelectionSpec(ranked=True, budget_ratio=0.5, prefix_sharers=needed)
    *_, stats = decode(layer, requests, query, spec)
    by_table = sorted(requests, key=lambda request: request.blocks)
    common = [0] + [
        next(place for place, (a, b) in enumerate(zip(one.blocks, other.blocks, strict=False)) if a != b)
        for one, other in pairwise(by_table)
    ]
    pages = [-(-len(request.key) // PAGE_TOKENS) for request in by_table]
    saved = sum(pages) - fewest_readings(pages, common, needed)
    assert saved > 0
    assert stats.pages_shared == saved * layer.shape.num_kv_heads

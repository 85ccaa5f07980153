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


def fork(layer: ServedLayer, of: Request, tokens: int, own_tokens: int) -> Request:
    """A request that shares the first `tokens`, whole blocks, with another and goes on with its own."""
    request = Request(of.key[:tokens], of.value[:tokens], of.blocks[: tokens // layer.shape.block_tokens])
    if own_tokens:
        layer.step([(request, own_tokens)], attend=False)
    return request


def make_layer(shape: Shape) -> ServedLayer:
    return ServedLayer(shape, num_blocks=16 + 12288 // shape.block_tokens, seed=5)


def documents_with_sharers(layer: ServedLayer, documents: int) -> list[Request]:
    """The requests of some documents, neighbours of different ones."""
    roots = [layer.start() for _ in range(documents)]
    for root in roots:
        layer.step([(root, DOCUMENT_TOKENS)], attend=False)
    return [fork(layer, root, DOCUMENT_TOKENS, own_tokens) for own_tokens in OWN_TOKENS for root in roots]


Plans = list[list[list[int]]]


def decode(
    layer: ServedLayer, requests: Sequence[Request], query: Tensor, spec: SelectionSpec, retained: RetainedSet = RETAINED
) -> tuple[Tensor, Plans, _native.Stats]:
    """One decode row of each request, [requests, q_heads, head_dim], each KV head's plan, and what was counted."""
    count = len(requests)
    batch = layer.batch(requests, [1] * count, [True] * count, [-1] * count)
    output = torch.full_like(query, torch.nan)
    layer.attention.reset_stats()
    layer.attention.forward(query, None, None, layer.kv_cache, batch, spec, retained, output)
    heads = range(layer.shape.num_kv_heads)
    plans = [[layer.attention.last_plan(row, head) for head in heads] for row in range(count)]
    return output, plans, layer.attention.stats()


def with_prefix_retained(
    layer: ServedLayer, requests: Sequence[Request], query: Tensor, spec: SelectionSpec, prefix_pages: int
) -> tuple[Tensor, Plans]:
    """Each row alone, its first pages a part of the retained set."""
    retained = replace(RETAINED, sink_tokens=prefix_pages * PAGE_TOKENS)
    rows = [decode(layer, [request], query[row : row + 1], spec, retained) for row, request in enumerate(requests)]
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


def test_sharing_threads_give_the_same(isa: str) -> None:
    for chosen, spec in SELECTIONS.items():
        shape = Shape(num_q_heads=6, isa=isa, num_threads=3, summary=SUMMARIES[chosen])
        layer = make_layer(shape)
        requests = documents_with_sharers(layer, 1)
        query = layer.random(len(requests), 6, 64)
        expected, _ = with_prefix_retained(layer, requests, query, spec, DOCUMENT_PAGES)
        together, _, stats = decode(layer, requests, query, spec)
        assert stats.pages_shared > 0
        if chosen != "psa":  # reads ahead where threads would wait
            assert_close(together, expected)


def test_learned_sinks_count_once(isa: str) -> None:
    for chosen in ("dense", "progressive"):
        layer = make_layer(Shape(num_q_heads=6, isa=isa, summary=SUMMARIES[chosen]))
        requests = documents_with_sharers(layer, 1)
        query, sinks = layer.random(len(requests), 6, 64), 3.0 + layer.random(6)
        spec = replace(SELECTIONS[chosen], threshold=0.999) if chosen == "progressive" else SELECTIONS[chosen]
        outputs = []
        for batch_of in ([requests], [[request] for request in requests]):
            for rows in batch_of:
                first = len(outputs[-1]) if len(batch_of) == 1 else requests.index(rows[0])
                batch = layer.batch(rows, [1] * len(rows), [True] * len(rows), [-1] * len(rows))
                output = torch.empty(len(rows), 6, 64)
                of = query if len(rows) == len(requests) else query[first : first + 1]
                layer.attention.forward(
                    of, None, None, layer.kv_cache, batch, spec, RETAINED, output, None, None, sinks
                )
                outputs.append(output)
        assert_close(outputs[0], torch.cat(outputs[1:]))

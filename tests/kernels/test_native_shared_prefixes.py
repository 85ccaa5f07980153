"""Requests whose prompts begin alike share blocks. If each selects its pages, rows give what they give alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import GEOMETRIES
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.kernels.test_common_keys import biased
from tests.tolerances import assert_close
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=48)
SELECTIONS = {
    "dense": SelectionSpec(prefix_sharers=0),
    "topk": SelectionSpec(ranked=True, budget_ratio=0.2, attributed=0.5),  # never, if not told to
    "progressive": SelectionSpec(
        ranked=True, threshold=0.9, microbatch_pages=4, estimated_remainder=True, attributed=0.5, prefix_sharers=0
    ),
    "psa": SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=4, prefix_sharers=0),
}
SUMMARIES = {"dense": "none", "topk": "key_codes", "progressive": "key_codes", "psa": "minmax"}
SYSTEM_TOKENS, DOCUMENT_TOKENS = 256, 1024  # whole blocks of every size
Plan = list[list[int]]


def served(shape: Shape, *, biased_keys: bool = False) -> tuple[ServedLayer, list[Request]]:
    """A layer and requests over three documents, two of which begin with one system prompt, in mixed order.

    Common keys are subtracted only if a step says which pages it fills, which one that attends does.
    """
    layer = ServedLayer(shape, num_blocks=40 + 16384 // shape.block_tokens, seed=3)

    def extend(request: Request, end: int) -> None:
        begin = len(request.key)
        tokens = biased(shape, end - begin, begin) if biased_keys else None
        layer.step([(request, end - begin)], attend=biased_keys, tokens=tokens)

    system = layer.start()
    extend(system, SYSTEM_TOKENS)
    documents = [layer.fork(system, shared, 0) for shared in (SYSTEM_TOKENS, SYSTEM_TOKENS, 0)]
    for document in documents:
        extend(document, DOCUMENT_TOKENS)
    requests = [layer.fork(documents[i % 3], DOCUMENT_TOKENS, 1 + 37 * i) for i in range(10)]
    requests += [layer.fork(documents[0], DOCUMENT_TOKENS // 2, own) for own in (5, 300)]  # leave it half-way
    requests.append(documents[1])  # the document itself
    requests += [layer.fork(system, SYSTEM_TOKENS, 70), layer.fork(system, 0, 500)]
    requests.append(layer.fork(system, 0, 20))  # nothing but its retained set
    random.Random(0).shuffle(requests)
    return layer, requests


def decode(layer: ServedLayer, requests: list[Request], query: Tensor, chosen: str) -> tuple[Tensor, list[Plan]]:
    """One decode row of each request, [requests, q_heads, head_dim], and the pages that each KV head read."""
    count = len(requests)
    batch = layer.batch(requests, [1] * count, [True] * count, [-1] * count)
    output = torch.full_like(query, torch.nan)
    layer.attention.forward(query, None, None, layer.kv_cache, batch, SELECTIONS[chosen], RETAINED, output)
    heads = range(layer.shape.num_kv_heads)
    return output, [[layer.attention.last_plan(row, head) for head in heads] for row in range(count)]


def decode_alone(layer: ServedLayer, requests: list[Request], query: Tensor, chosen: str) -> tuple[Tensor, list[Plan]]:
    """The same, each in a batch of its own."""
    rows = [decode(layer, [request], query[row : row + 1], chosen) for row, request in enumerate(requests)]
    return torch.cat([output for output, _ in rows]), [plan for _, (plan,) in rows]


@pytest.mark.parametrize("chosen", SELECTIONS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rows_are_what_they_are_alone(isa: str, geometry: str, chosen: str) -> None:
    q_heads, kv_heads, head_dim, block_tokens = GEOMETRIES[geometry]
    shape = Shape(
        dtype=torch.bfloat16,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        summary=SUMMARIES[chosen],
        isa=isa,
    )
    layer, requests = served(shape)
    query = 2.0 * layer.random(len(requests), q_heads, head_dim)
    expected, plans = decode_alone(layer, requests, query, chosen)
    together, plans_together = decode(layer, requests, query, chosen)
    assert plans_together == plans
    assert torch.equal(together, expected)
    order = torch.randperm(len(requests), generator=layer.generator)
    shuffled, _ = decode(layer, [requests[i] for i in order], query[order], chosen)
    assert torch.equal(shuffled, expected[order])
    if chosen in ("topk", "progressive"):
        distinct = {str(plan) for plan in plans}
        assert len(distinct) > 10, "rows of one document read the same: mixed-up scores would not be seen"


@pytest.mark.parametrize("chosen", ["topk", "progressive"])
def test_common_keys_are_added_to_every_row(isa: str, chosen: str) -> None:
    codes: dict[str, Any] = {"summary": "key_codes", "common_keys": True}
    layer, requests = served(Shape(num_q_heads=6, isa=isa, **codes), biased_keys=True)
    query = layer.random(len(requests), 6, 64)
    expected, plans = decode_alone(layer, requests, query, chosen)
    together, plans_together = decode(layer, requests, query, chosen)
    assert plans_together == plans
    assert torch.equal(together, expected)
    assert len({str(plan) for plan in plans}) > 5


@pytest.mark.parametrize("chosen", SELECTIONS)
def test_threads_share_the_work(isa: str, chosen: str) -> None:
    """Which thread adds up what depends on the batch, so the last bits do."""
    shape = Shape(num_q_heads=6, isa=isa, num_threads=3, summary=SUMMARIES[chosen])
    layer, requests = served(shape)
    query = 2.0 * layer.random(len(requests), 6, 64)
    expected, plans = decode_alone(layer, requests, query, chosen)
    together, plans_together = decode(layer, requests, query, chosen)
    if chosen != "psa":  # reads ahead where threads would wait, and drops what was not needed
        assert plans_together == plans
    assert_close(together, expected)

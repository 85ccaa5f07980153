"""Learned sinks (gpt-oss): every row sees one more token, which has a score for each head and no value."""

import math
from typing import Any

import pytest
import torch

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import ServedLayer, Shape, Step
from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def some_sinks(heads: int) -> torch.Tensor:
    """Sinks from one that counts for nothing to one that takes nearly all of the weight."""
    return torch.linspace(-30.0, 9.0, heads)


def expected(layer: ServedLayer, step: Step, sinks: torch.Tensor) -> torch.Tensor:
    pairs = zip(step.query.split(step.query_lens), step.requests, strict=True)
    shape = layer.shape
    return torch.cat(
        [
            asked_once(causal_attention, query, of.key, of.value, shape.scale, shape.sliding_window, sinks)
            for query, of in pairs
        ]
    )


@pytest.mark.parametrize(("window", "threads"), [(0, 3), (70, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_and_rows_that_read_everything(isa: str, dtype: torch.dtype, window: int, threads: int) -> None:
    shape = Shape(dtype=dtype, isa=isa, num_q_heads=8, num_threads=threads, sliding_window=window, summary="none")
    layer = ServedLayer(shape, num_blocks=80)
    sinks = some_sinks(8)
    one, other = layer.start(), layer.start()
    for rows in ([(one, 1)], [(one, 300), (other, 40)], [(one, 1), (other, 600)], [(one, 1), (other, 1)]):
        step = layer.step(rows, sinks=sinks, sharpness=2.0)
        assert_close(step.output, expected(layer, step, sinks))


@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean", "key_codes"])
@pytest.mark.parametrize("progressive", [False, True])
def test_rows_that_may_choose_and_read_everything(
    isa: str, geometry: dict[str, Any], progressive: bool, summary: str
) -> None:
    """For rows that look at a threshold, the sinks go into the retained set's state."""
    scale = geometry["head_dim"] ** -0.5
    layer = ServedLayer(Shape(isa=isa, summary=summary, scale=scale, **geometry), num_blocks=80)
    looks, takes = SelectionSpec(ranked=True, threshold=0.999999), SelectionSpec(ranked=True, max_pages=500)
    selection = looks if progressive else takes
    sinks = some_sinks(geometry["num_q_heads"])
    request = layer.start()
    layer.step([(request, 500)], selection=selection, retained=RETAINED, sinks=sinks)
    for _ in range(3):
        step = layer.step([(request, 1)], selection=selection, retained=RETAINED, sinks=sinks)
        assert_close(step.output, expected(layer, step, sinks))
    assert (layer.attention.stats().judged > 0) is progressive


def read_alone(layer: ServedLayer, step: Step, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a single row over the pages read, and the share of each head's weight on these and the sink."""
    (request,), group = step.requests, layer.shape.num_q_heads // layer.shape.num_kv_heads
    tokens = len(request.key)
    outputs, kept = [], []
    for head in range(layer.shape.num_q_heads):
        pages = {*step.retained.retained_pages(tokens), *layer.attention.last_plan(0, head // group)}
        is_read = torch.tensor([token // 16 in pages for token in range(tokens)] + [True])
        key, value = (part[:, head // group].double() for part in (request.key, request.value))
        scores = torch.cat((layer.shape.scale * (key @ step.query[0, head].double()), sinks[head : head + 1].double()))
        kept.append(scores.softmax(0)[is_read].sum())
        outputs.append(scores.masked_fill(~is_read, -torch.inf).softmax(0)[:-1] @ value)
    return torch.stack(outputs)[None], torch.stack(kept)


@pytest.mark.parametrize("summary", ["minmax", "key_codes"])
def test_rows_that_choose_some_pages(isa: str, summary: str) -> None:
    layer = ServedLayer(Shape(isa=isa, summary=summary, num_q_heads=6), num_blocks=80)
    selection = SelectionSpec(ranked=True, max_pages=7)
    request, sinks = layer.start(), some_sinks(6)
    layer.step([(request, 900)], selection=selection, retained=RETAINED, sinks=sinks)
    for _ in range(3):
        step = layer.step([(request, 1)], selection=selection, retained=RETAINED, sinks=sinks, sharpness=3.0)
        assert len(layer.attention.last_plan(0, 0)) == 7
        assert_close(step.output, read_alone(layer, step, sinks)[0])


@pytest.mark.parametrize("estimated", [False, True])
def test_a_threshold_is_a_share_of_the_whole_weight_sinks_included(isa: str, estimated: bool) -> None:
    """So if a sink takes nearly all of the weight, nothing is left to read for its head."""
    spec = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2, estimated_remainder=estimated)
    counts = []
    for sink in (-math.inf, 8.0, 20.0):
        layer = ServedLayer(Shape(isa=isa, summary="key_codes"), num_blocks=80)
        request, sinks = layer.start(), torch.full((4,), sink)
        layer.step([(request, 900)], selection=spec, retained=RETAINED, sinks=sinks)
        step = layer.step([(request, 1)], selection=spec, retained=RETAINED, sinks=sinks, sharpness=2.0)
        output, kept = read_alone(layer, step, sinks)
        assert_close(step.output, output)
        assert kept.min() > 0.75  # both rules estimate
        counts.append(sum(len(layer.attention.last_plan(0, head)) for head in range(2)))
    assert counts[0] > counts[1] > counts[2]
    assert counts[2] == (0 if estimated else 2 * 2)  # PSA looks after the first microbatch


def test_what_does_not_fit_is_refused() -> None:
    layer = ServedLayer(Shape(), num_blocks=8)
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2]):
        rule = r"sinks=\[\d\] \w+ on cpu, .* must be \[4\] float32 on cpu, contiguous"
        with pytest.raises(KernelError, match=rule):
            layer.step([(layer.start(), 1)], sinks=wrong)
    judged = ServedLayer(Shape(), num_blocks=8, salience=SalienceSpec(), retained=RetainedSet())
    request = judged.start()
    request.slot = 0
    with pytest.raises(KernelError, match="sinks: must be None beside hgca and fluxion"):
        judged.step([(request, 4)], sinks=torch.zeros(4))

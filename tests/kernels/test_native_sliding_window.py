"""Layers with a sliding window: every row attends to its latest tokens, and nothing before them is read."""

from typing import Any

import pytest
import torch

from tests.kernels.asked_once import asked_once
from tests.kernels.served_layer import NAN_BYTE, Request, ServedLayer, Shape, Step
from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.reference import causal_attention
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec, SelectionSpec

WINDOWS = {  # around pages and blocks; the ends do not depend on the dtype
    torch.bfloat16: [1, 15, 16, 17, 100, 256],
    torch.float16: [17],
    torch.float32: [16, 100],
}


def expected(layer: ServedLayer, step: Step) -> torch.Tensor:
    rows = step.query.split(step.query_lens)
    pairs = zip(rows, step.requests, strict=True)
    shape = layer.shape
    return torch.cat(
        [
            asked_once(causal_attention, query, of.key, of.value, shape.scale, shape.sliding_window)
            for query, of in pairs
        ]
    )


def free_what_is_out_of_sight(layer: ServedLayer, request: Request) -> None:
    """Free the blocks that no later row sees, as vLLM does before a step. Nothing stands in their place."""
    shape = layer.shape
    whole = max(0, len(request.key) + 1 - shape.sliding_window) // shape.block_tokens
    for place in range(whole):
        block = request.blocks[place]
        if block >= 0:
            layer.kv_cache[block] = NAN_BYTE
            layer.free_blocks.append(block)
            request.blocks[place] = -1


def steps(shape: Shape, *, num_blocks: int = 80) -> None:
    """Run prompts in chunks, alone and with rows that decode; blocks are freed as they leave the window."""
    layer = ServedLayer(shape, num_blocks=num_blocks)
    one, other = layer.start(), layer.start()
    batches = [[(one, 1)], [(one, 37)], [(one, 300), (other, 129)], [(one, 1), (other, 64)]]
    batches += [[(one, 1), (other, 1)]] * 20
    for rows in batches:
        for request, _ in rows:
            free_what_is_out_of_sight(layer, request)
        step = layer.step(rows, sharpness=2.0)
        assert_close(step.output, expected(layer, step))


@pytest.mark.parametrize(
    ("dtype", "window"), [(dtype, window) for dtype, windows in WINDOWS.items() for window in windows]
)
def test_every_row_sees_its_latest_tokens_alone(isa: str, dtype: torch.dtype, window: int) -> None:
    steps(Shape(dtype=dtype, isa=isa, block_tokens=16, summary="none", sliding_window=window))


@pytest.mark.parametrize("threads", [1, 3])
def test_every_geometry(isa: str, geometry: dict[str, Any], threads: int) -> None:
    steps(
        Shape(
            isa=isa,
            num_threads=threads,
            scale=geometry["head_dim"] ** -0.5,
            sliding_window=130,
            summary="none",
            **geometry,
        )
    )


def test_a_long_context_is_not_read(isa: str) -> None:
    """Of 5000 tokens, a step reads seven pages for each head."""
    shape = Shape(isa=isa, summary="none", sliding_window=100, block_tokens=32, num_threads=2)
    layer = ServedLayer(shape, num_blocks=180)
    request = layer.start()
    for _ in range(10):
        layer.step([(request, 500)])
    layer.attention.reset_stats()
    step = layer.step([(request, 1)])
    assert_close(step.output, expected(layer, step))
    stats = layer.attention.stats()
    assert (stats.pages_read, stats.pages_total, stats.pages_candidate) == (2 * 7, 2 * 7, 0)


def test_a_prompt_in_one_piece_of_any_length(isa: str) -> None:
    """Rows are also divided among threads, and every row's window begins elsewhere."""
    shape = Shape(isa=isa, summary="none", sliding_window=700, num_threads=3, num_q_heads=8)
    layer = ServedLayer(shape, num_blocks=300)
    for length in (699, 700, 701, 1500):
        request = layer.start()
        step = layer.step([(request, length)], sharpness=3.0)
        assert_close(step.output, expected(layer, step))


@pytest.mark.parametrize(
    ("selection", "salience"), [(SelectionSpec(ranked=True, budget_ratio=0.5), None), (None, SalienceSpec())]
)
def test_nothing_chooses_beside_a_window(selection: SelectionSpec | None, salience: SalienceSpec | None) -> None:
    layer = ServedLayer(Shape(sliding_window=64), num_blocks=8, salience=salience, retained=RetainedSet())
    request = layer.start()
    request.slot = 0
    with pytest.raises(KernelError, match="sliding_window=64: needs a selection of everything"):
        layer.step([(request, 20)], selection=selection)


def test_a_window_of_fewer_than_no_tokens_is_refused() -> None:
    with pytest.raises(KernelError, match="sliding_window=-1: must be 0 or more"):
        ServedLayer(Shape(sliding_window=-1), num_blocks=4)

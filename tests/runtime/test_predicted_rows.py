"""Fluxion on two tiers: anchors, budgets, pages and outputs are the reference's, whoever attends to what."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.fluxion_checks import MirroredFluxion, constant_predictor, some_predictor
from tests.kernels.served_layer import ServedLayer, Shape
from tests.runtime.broken_pages import break_pages
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.kernels.fluxion.native import fluxion_layer, native_predictor
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.values import RetainedSet

SMALL = {"policy": "fluxion", "sink_tokens": 16, "window_tokens": 32, "dense_tokens": 0}
LENGTHS = (7, 48, 64, 203, 480)  # all retained, one page more, a few, many

TINY = Shape(num_q_heads=6, head_dim=16, block_tokens=32)
CODES = replace(TINY, head_dim=64, summary="key_codes")


def mirrored(
    device: str, shape: Shape = TINY, predictor: Predictor | None = None, **settings: Any
) -> tuple[TieredModel, MirroredFluxion]:
    """A model of one layer, each of whose steps is checked."""
    summary = "key_codes" if shape.summary == "split_codes" else shape.summary
    given = {**SMALL, "summary": summary, "device_pool_pages": 128, "device": device, **settings}
    model = TieredModel(given, shape=shape, num_blocks=80)
    config = model.config
    assert config.prediction is not None
    mirror = MirroredFluxion(
        model.layers[0].shape,
        predictor or some_predictor(model.layers[0].shape, config.retained),
        config.retained,
        granularity=config.prediction.granularity,
        attributed=config.selection.attributed,
        dense_tokens=config.prediction.dense_tokens,
        layer=model.layers[0],
    )
    return model, mirror


def serve(model: TieredModel, mirror: MirroredFluxion, steps: int = 4, **options: Any) -> None:
    """Serve requests of every kind of length: first their prompts, then steps in which all of them decode."""
    rows = [(mirror.start(), length) for length in LENGTHS]
    mirror.step(*rows)
    for _ in range(steps):
        mirror.step(*((request, 1) for request, _ in rows), **options)
        model.settle()


@pytest.mark.parametrize("host_share", ["none", "uniform", "length", "queue"])
@pytest.mark.parametrize("summary", ["minmax", "key_codes", "split_codes"])
def test_requests_at_every_stage(kind: str, summary: str, host_share: str) -> None:
    shape = TINY if summary == "minmax" else replace(CODES, summary=summary)
    model, mirror = mirrored(kind, shape, host_share=host_share)
    with model:
        serve(model, mirror, sharpness=2.0)
        assert len(mirror.excuses) <= 4, mirror.excuses
        granularities = {mirror.layer.attention.last_budgets(row, head)[0] for row in range(2, 5) for head in (0, 1)}
        assert len(granularities) > 1
        tiers, stats = model.tier.take_stats(), model.layers[0].tiered_attention.stats()
        assert tiers.groups == stats.items == 4 * len(LENGTHS) * 2
        assert (tiers.groups_on_host > 0) == (tiers.pages_on_host > 0) == (host_share != "none")
        assert tiers.pages_wanted + tiers.pages_on_host == stats.pages_read < stats.pages_total
        assert stats.anchor_pages > 0
        assert tiers.microbatches > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_group(kind: str, dtype: torch.dtype) -> None:
    for q_heads, kv_heads in ((2, 2), (3, 1), (8, 2)):
        shape = replace(CODES, dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=16)
        model, mirror = mirrored(kind, shape, host_share="queue")
        with model:
            request = mirror.start()
            mirror.step((request, 250))
            for _ in range(3):
                mirror.step((request, 1))


def test_the_smallest_pool_reads_in_waves(kind: str) -> None:
    """The pool fits two microbatches of one group, so two rows' and heads' windows and candidates are read in turn."""
    model, mirror = mirrored(kind, window_tokens=192, device_pool_pages=16)
    with model:
        requests = [mirror.start(), mirror.start()]
        mirror.step(*((request, length) for request, length in zip(requests, (520, 410), strict=True)))
        for _ in range(3):
            mirror.step(*((request, 1) for request in requests))
            model.settle()
        assert model.tier.take_stats().pages_evicted > 0


@pytest.mark.parametrize("prompt_first", [False, True])
def test_prompts_in_chunks_beside_rows_that_decode(kind: str, prompt_first: bool) -> None:
    """The last row of the last chunk is the anchor, whatever the chunk's length."""
    model, mirror = mirrored(kind)
    with model:
        decoding, prompt = mirror.start(), mirror.start()
        mirror.step((decoding, 120))
        for tokens in (100, 5, 1, 3, 16, 40, 7):
            rows = ((prompt, tokens), (decoding, 1)) if prompt_first else ((decoding, 1), (prompt, tokens))
            mirror.step(*rows, decode=tokens > 1)
        for _ in range(2):
            mirror.step((prompt, 1), (decoding, 1))
        assert mirror.sequences[prompt.slot].anchor_tokens == 172


@pytest.mark.parametrize("sink_tokens", [0, 16])
def test_a_request_grows_beyond_what_it_attends_whole(kind: str, sink_tokens: int) -> None:
    model, mirror = mirrored(kind, dense_tokens=130, sink_tokens=sink_tokens)
    with model:
        request = mirror.start()
        mirror.step((request, 127))
        for _ in range(8):
            mirror.step((request, 1))
        assert [step is None for step in mirror.steps] == [False]


@pytest.mark.parametrize("streams", [True, False])
def test_what_every_head_says_alike(kind: str, *, streams: bool) -> None:
    """Heads that stream give the queue nothing; those that want everything read every candidate."""
    model, mirror = mirrored(kind, predictor=constant_predictor(1.0, streams=streams), host_share="uniform")
    with model:
        request = mirror.start()
        mirror.step((request, 400))
        mirror.step((request, 1))
        stats, tiers = model.layers[0].tiered_attention.stats(), model.tier.take_stats()
        assert tiers.groups_on_host == (0 if streams else 1)
        assert stats.streaming == (2 if streams else 0)
        assert stats.pages_read == (2 * 4 if streams else stats.pages_total)


def test_a_slot_that_is_given_again_begins_anew(kind: str) -> None:
    model, mirror = mirrored(kind)
    with model:
        for length in (200, 90, 130):
            request = mirror.start()
            mirror.step((request, length))
            mirror.step((request, 1))
            mirror.release(request)
            if model.layers[0].on_cuda is not None:
                model.layers[0].on_cuda.prompt_rows.release(request.slot)


@pytest.mark.usefixtures("interpreted")
def test_beside_a_gpu_the_last_query_of_a_prompt_waits_until_its_request_decodes() -> None:
    """As served: later chunks replace it, a released request's is forgotten, and the anchor is the native core's."""
    predictor = some_predictor(TINY, RetainedSet(sink_tokens=16, window_tokens=32))
    model, _ = mirrored("cuda", predictor=predictor)
    with model:
        layer = model.layers[0]
        layer.looks_back_at_once = False
        native = ServedLayer(TINY, num_blocks=80)
        native.fluxion = fluxion_layer(native_predictor(predictor), layer=3, tau=0.1)
        requests = [(served.start(), served.start()) for served in (layer, native)]
        for one, other in requests:
            one.slot, other.slot = 0, 1
        for length in (100, 5, 3):
            tokens = torch.randn(2 * length, 6 + 2 * 2, TINY.head_dim)
            for served, (one, other) in zip((layer, native), requests, strict=True):
                served.step([(one, length), (other, length)], tokens=tokens, retained=model.config.retained)
        assert layer.on_cuda is not None
        assert layer.fluxion is not None
        waiting = layer.on_cuda.prompt_rows.waiting(0)
        assert [(rows.slot, len(rows.query), rows.seq_len) for rows in waiting] == [(0, 1, 108), (1, 1, 108)]
        layer.on_cuda.prompt_rows.release(1)
        tokens = torch.randn(1, 6 + 2 * 2, TINY.head_dim)
        outputs = [
            served.step([(one, 1)], tokens=tokens, retained=model.config.retained).output
            for served, (one, _) in zip((layer, native), requests, strict=True)
        ]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        assert layer.fluxion.anchor_tokens(0) == native.fluxion.anchor_tokens(0) == 108
        assert layer.fluxion.anchor(0) == native.fluxion.anchor(0) != []
        assert layer.fluxion.anchor_tokens(1) == 0
        assert layer.on_cuda.prompt_rows.waiting(0) == []


def test_what_cannot_be_loaded_is_attended_where_it_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page each of the sink, of the window and of what was chosen."""
    model, mirror = mirrored(kind, predictor=constant_predictor(1.0), host_share="none")
    with model:
        request, other = mirror.start(), mirror.start()
        mirror.step((request, 150), (other, 150))
        broken = [(1, 2 * request.blocks[block] + page) for block, page in ((0, 0), (1, 1), (4, 0))]
        break_pages(model, broken, monkeypatch)
        mirror.step((request, 1), (other, 1))
        assert model.tier.take_stats().failed_loads == 3

"""HGCA on two tiers: salient entries, averages and outputs are the reference's, whichever device has the window."""

from typing import Any

import pytest
import torch

from tests.kernels.hgca_checks import MirroredLayer
from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.runtime.broken_pages import break_pages
from tests.runtime.tiered_layer import TieredModel
from tests.tolerances import WEIGHT_TIE
from vllm_hybrid_sparse.errors import KernelError

SMALL = {"policy": "hgca", "hgca_beta": 1.2, "hgca_alpha": 0.25, "sink_tokens": 16, "window_tokens": 32}
LENGTHS = (7, 48, 64, 203)  # no window yet, one exactly full, a page beyond it, and far beyond

TINY = Shape(num_q_heads=6, head_dim=16, block_tokens=32)


def mirrored(device: str, shape: Shape = TINY, **settings: Any) -> tuple[TieredModel, MirroredLayer]:
    """A model of one layer, each of whose steps is checked."""
    given = {**SMALL, "device_pool_pages": 128, "device": device, **settings}
    model = TieredModel(given, shape=shape, num_blocks=60)
    salience = model.config.salience
    assert salience is not None
    return model, MirroredLayer(shape, salience, model.config.retained, layer=model.layers[0])


def packed(mirror: MirroredLayer, request: Request, kv_head: int = 0) -> list[int]:
    assert mirror.layer.hgca is not None
    return list(mirror.layer.hgca.salient(request.slot, kv_head))


def test_requests_at_every_stage(kind: str) -> None:
    model, mirror = mirrored(kind)
    with model:
        rows = [(mirror.start(), length) for length in LENGTHS]
        mirror.step(*rows)
        for _ in range(20):
            mirror.step(*((request, 1) for request, _ in rows))
            model.settle()
        longest = rows[3][0]
        assert 0 < len(packed(mirror, longest)) < 160
        assert min(packed(mirror, longest)) < 160 <= max(packed(mirror, longest) + packed(mirror, longest, 1))
        stats, tiers = model.tier.take_decode_stats(), model.tier.take_stats()
        assert stats.selections == tiers.groups == 20 * len(LENGTHS) * 2
        assert 0 < stats.pages_read < stats.pages_total
        assert stats.read_bytes * stats.pages_total == stats.total_bytes * stats.pages_read
        assert tiers.pages_on_host > 0
        assert tiers.host_busy_s > 0
        assert tiers.pages_wanted + tiers.pages_on_host == stats.pages_read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_group(kind: str, dtype: torch.dtype) -> None:
    for q_heads, kv_heads in ((2, 2), (3, 1), (8, 2)):
        shape = Shape(dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=16, head_dim=16)
        model, mirror = mirrored(kind, shape)
        with model:
            request = mirror.start()
            mirror.step((request, 150))
            for _ in range(3):
                mirror.step((request, 1))


def test_the_smallest_pool_reads_the_window_in_waves(kind: str) -> None:
    """The pool fits two microbatches of one group, so two rows' and heads' windows of 13 pages are read in turn."""
    model, mirror = mirrored(kind, window_tokens=192, device_pool_pages=16)
    with model:
        requests = [mirror.start(), mirror.start()]
        mirror.step(*((request, length) for request, length in zip(requests, (320, 250), strict=True)))
        for _ in range(3):
            mirror.step(*((request, 1) for request in requests))
            model.settle()
        assert model.tier.take_stats().pages_evicted > 0


@pytest.mark.parametrize("prompt_first", [False, True])
def test_prompts_in_chunks_beside_rows_that_decode(kind: str, prompt_first: bool) -> None:
    """Chunks are whole pages, within a page, across two, or single rows. In all of them the last page's rows judge."""
    model, mirror = mirrored(kind)
    with model:
        decoding, prompt = mirror.start(), mirror.start()
        mirror.step((decoding, 120))
        for tokens in (100, 5, 1, 3, 16, 40, 7):
            rows = ((prompt, tokens), (decoding, 1)) if prompt_first else ((decoding, 1), (prompt, tokens))
            mirror.step(*rows, decode=tokens > 1)
        for _ in range(2):
            mirror.step((prompt, 1), (decoding, 1))


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
        assert mirror.layer.hgca is not None
        assert mirror.layer.hgca.packed_bytes == 0


@pytest.mark.usefixtures("interpreted")
def test_beside_a_gpu_prompts_are_judged_when_their_requests_decode() -> None:
    """As served: chunks wait, a released request's are forgotten, and the others judge as in the native core."""
    model, _ = mirrored("cuda")
    with model:
        layer, salience = model.layers[0], model.config.salience
        layer.looks_back_at_once = False
        native = ServedLayer(TINY, num_blocks=60, salience=salience, retained=model.config.retained)
        requests = [(served.start(), served.start()) for served in (layer, native)]
        for one, other in requests:
            one.slot, other.slot = 0, 1
        for length in (100, 5, 3):
            tokens = torch.randn(2 * length, 6 + 2 * 2, TINY.head_dim)
            for served, (one, other) in zip((layer, native), requests, strict=True):
                served.step([(one, length), (other, length)], tokens=tokens, decode=False)
        assert layer.hgca is not None
        assert native.hgca is not None
        assert layer.on_cuda is not None
        assert layer.hgca.averages(0, 0) == []
        assert [(rows.slot, len(rows.query), rows.seq_len) for rows in layer.on_cuda.prompt_rows.waiting(0)] == [
            *((0, 4, 100), (0, 5, 105), (0, 3, 108)),  # a page's rows, in three chunks
            *((1, 4, 100), (1, 5, 105), (1, 3, 108)),
        ]
        layer.on_cuda.prompt_rows.release(1)
        tokens = torch.randn(1, 6 + 2 * 2, TINY.head_dim)
        for served, (one, _) in zip((layer, native), requests, strict=True):
            served.step([(one, 1)], tokens=tokens)
        for kv_head in (0, 1):
            assert layer.hgca.salient(0, kv_head) == native.hgca.salient(0, kv_head) != []
            kept, wanted = (torch.tensor(of.averages(0, kv_head)) for of in (layer.hgca, native.hgca))
            torch.testing.assert_close(kept, wanted, rtol=WEIGHT_TIE, atol=1e-7)
        assert layer.hgca.averages(1, 0) == []
        assert layer.on_cuda.prompt_rows.waiting(0) == []


def test_what_cannot_be_loaded_is_attended_where_it_lies(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scores are kept, too: the averages are the reference's."""
    model, mirror = mirrored(kind)
    with model:
        request, other = mirror.start(), mirror.start()
        mirror.step((request, 150), (other, 150))
        break_pages(model, [(1, 2 * request.blocks[3] + 1)], monkeypatch)  # of the window: tokens 112 to 127
        mirror.step((request, 1), (other, 1))
        stats = model.tier.take_stats()
        assert stats.failed_loads == 1


def test_a_row_whose_state_is_of_other_tokens_is_refused() -> None:
    model, mirror = mirrored("emulated")
    with model:
        request = mirror.start()
        mirror.step((request, 150))
        assert mirror.layer.hgca is not None
        mirror.layer.hgca.release(request.slot)
        with pytest.raises(KernelError, match="slot=0: its state is not for the first 150 tokens"):
            mirror.layer.step([(request, 1)])
        model.settle()  # what the device had begun is finished

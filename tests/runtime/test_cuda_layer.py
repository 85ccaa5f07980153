"""Layers on a GPU, their kernels interpreted over tensors in CPU memory: the same attention as the references.

Here `StreamedPrefill` computes prompts and kernels store them, so decode rows read what was stored that way.
"""

import threading
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import Request, Shape
from tests.kernels.step_checks import check_step
from tests.runtime.broken_pages import break_pages
from tests.runtime.test_step import EXACT, POLICIES, SMALL, serve, smallest_pool
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.runtime import prefill

TINY = Shape(head_dim=16, block_tokens=32)
LENGTHS = (1, 16, 17, 49, 150)


pytestmark = pytest.mark.usefixtures("interpreted")


def model_of(settings: dict[str, Any], **options: Any) -> TieredModel:
    return TieredModel({**SMALL, **settings, "device": "cuda"}, **{"shape": TINY, **options})


@pytest.mark.parametrize("host_share", ["none", "queue"])
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_those_of_the_references(policy: str, host_share: str) -> None:
    with model_of({**POLICIES[policy], "device_pool_pages": 128, "host_share": host_share}) as model:
        excuses = serve(model, LENGTHS, steps=2, sharpness=3.0)
        assert len(excuses) <= 2, excuses
        stats = model.tier.take_stats()
        assert stats.groups == 2 * len(LENGTHS) * 2
        assert stats.pages_hit + stats.pages_fetched == stats.pages_wanted
        assert stats.device_busy_s > 0
        if POLICIES[policy].get("threshold", 1) < 1:
            assert 0.9 * stats.looked_groups < stats.kept_mass <= stats.looked_groups


@pytest.mark.parametrize("policy", EXACT)
def test_a_pool_of_one_group_evicts_in_every_step_and_stays_exact(policy: str) -> None:
    settings = POLICIES[policy]
    with model_of({**settings, "device_pool_pages": smallest_pool(settings)}, layers=2) as model:
        serve(model, (130,), steps=2)
        assert model.tier.take_stats().pages_evicted
        assert not model.tier.take_stats().pages_evicted  # since then


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (3, 1), (8, 2)])
def test_every_dtype_and_group(dtype: torch.dtype, q_heads: int, kv_heads: int) -> None:
    shape = Shape(dtype=dtype, num_q_heads=q_heads, num_kv_heads=kv_heads, block_tokens=16, head_dim=16)
    with model_of({"policy": "dense", "device_pool_pages": 64}, shape=shape) as model:
        serve(model, (17, 150), steps=2)


@pytest.mark.parametrize("chunks", [(1, 1, 1), (5, 6, 7), (16, 16), (3, 100, 47, 1), (40, 333)])
def test_a_prompt_in_chunks_sees_all_that_came_before(chunks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STAGED_PAGES", 2)  # both halves of the staging area take turns
    with model_of({"policy": "dense", "device_pool_pages": 64}) as model:
        request = model.start()
        for tokens in chunks:
            (step,) = model.step([(request, tokens)], decode=False)
            check_step(model.layers[0], step)
        (step,) = model.step([(request, 1)])
        check_step(model.layers[0], step)


def test_decode_and_prefill_in_one_step() -> None:
    with model_of({"policy": "dense", "device_pool_pages": 64}, layers=2) as model:
        one, other = model.start(), model.start()
        model.step([(one, 100)], decode=False)
        for tokens in (33, 1, 50):
            for layer, step in zip(model.layers, model.step([(other, tokens), (one, 1)]), strict=True):
                check_step(layer, step)


def test_a_prefix_is_shared_in_the_step_that_stores_it() -> None:
    """vLLM caches blocks when they are scheduled, so a request may begin with blocks that the same step fills."""
    with model_of({"policy": "dense", "device_pool_pages": 64}) as model:
        layer = model.layers[0]
        first, second = layer.start(), layer.start()
        tokens = torch.randn(64 + 65, 8, TINY.head_dim)
        tokens[64:128] = tokens[:64]
        first_key, first_value = tokens[:64, 4:6], tokens[:64, 6:8]
        step = layer.step([(first, 64)], tokens=tokens[:64], retained=model.config.retained, decode=False)
        blocks = list(first.blocks)
        block_bytes = layer.kv_cache[blocks].clone()
        layer.kv_cache[blocks] = 0xFF  # as before the step
        first.key, first.value, first.blocks = first.key[:0], first.value[:0], []
        layer.free_blocks[:0] = blocks
        second.key, second.value, second.blocks = first_key, first_value, [*blocks, layer.free_blocks.pop()]
        step = layer.step(
            [(second, 1), (first, 64)],
            tokens=torch.cat((tokens[128:], tokens[:64])),
            retained=model.config.retained,
            decode=False,
        )
        check_step(layer, step)
        assert torch.equal(
            layer.kv_cache[blocks, : block_bytes.shape[1] // 2], block_bytes[:, : block_bytes.shape[1] // 2]
        )


def test_what_cannot_be_loaded_is_attended_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    with model_of({"policy": "dense", "device_pool_pages": 128}) as model:
        request, other = model.start(), model.start()
        model.step([(request, 150)], decode=False)
        model.step([(other, 150)], decode=False)
        break_pages(model, {(0, 2 * request[0].blocks[0])}, monkeypatch)
        (step,) = model.step([(request, 1), (other, 1)])
        check_step(model.layers[0], step)
        assert model.tier.take_stats().failed_loads == 1


def test_blocks_that_are_copied_take_their_summaries_along() -> None:
    with model_of({"policy": "topk", "topk_pages": 2, "device_pool_pages": 128}) as model:
        layer = model.layers[0]
        request = model.start()
        model.step([(request, 150)], decode=False)
        target = layer.free_blocks.pop(0)
        source = request[0].blocks[1]
        assert layer.on_cuda is not None
        layer.on_cuda.copy_blocks([(source, target)])
        layer.on_cuda.copy_blocks([])
        copy = Request(request[0].key, request[0].value, [*request[0].blocks])
        copy.blocks[1] = target
        layer.kv_cache[source] = 0xFF  # the copy must not depend on it
        (step,) = [layer.step([(copy, 1)], selection=model.config.selection, retained=model.config.retained)]
        check_step(layer, step)


def test_the_stop_flag_ends_loading_early() -> None:
    settings = {"policy": "progressive", "threshold": 0.5, "microbatch_pages": 2, "summary": "minmax"}
    with model_of({**settings, "device_pool_pages": 64}) as model:
        request = model.start()
        model.step([(request, 600)], decode=False)
        model.step([(request, 1)], sharpness=12.0)
        stats = model.tier.take_stats()
        assert stats.early_stops == stats.looked_groups == 2
        assert stats.microbatches < 2 * 17
        assert stats.kept_mass > 2 * 0.5


@torch.inference_mode()
def test_a_step_in_inference_mode() -> None:
    """vLLM runs steps so. The mode belongs to the step's thread, and its tensors cannot be written outside the mode."""
    settings = {"policy": "progressive", "threshold": 0.9, "device_pool_pages": 64, "host_share": "queue"}
    with model_of(settings) as model:
        serve(model, (17, 150), steps=2)


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with model_of({"policy": "dense", "device_pool_pages": 64}) as model:
        serve(model, (40,), steps=1)
        assert threading.active_count() == before + 4
    assert threading.active_count() == before

"""Blocks that something other than a layer writes lose their device slots before the step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.glue.bare_worker import bare_worker
from tests.memory.pages import named
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.runtime.host import HostRuntime

KV_HEADS, BLOCKS, LAYERS = 2, 6, 2


def step(**changes: Any) -> Any:
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    given: dict[str, Any] = {
        "finished_req_ids": set(),
        "preempted_req_ids": None,
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": nothing,
        "kv_cache_block_copies": None,
        "new_block_ids_to_zero": None,
    }
    return SimpleNamespace(**(given | changes))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker without a model; its pool holds every page of two layers."""
    monkeypatch.setattr(CPUWorker, "execute_model", lambda *_: "done")
    made: Any = bare_worker()
    made._runtime = runtime = HostRuntime(HybridSparseConfig(device="emulated", num_threads=1))
    made._interval_s, made._connected = 0.0, True
    made.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=32))
    kernel = runtime.attention(
        dtype=torch.float32, num_q_heads=2, num_kv_heads=KV_HEADS, head_dim=16, block_tokens=32, scale=1.0
    )
    caches = torch.zeros(LAYERS, BLOCKS, KV_HEADS * kernel.layout.head_block_bytes, dtype=torch.uint8)
    runtime.open_device(list(caches), [kernel, kernel])
    assert runtime.device_tier is not None
    heads, pages = np.arange(KV_HEADS)[:, None], np.arange(12)
    held = np.stack([page_numbers(layer, heads, pages).ravel() for layer in range(LAYERS)])
    runtime.device_tier.pool.take(held, np.ones(LAYERS, dtype=np.bool_))
    runtime.device_tier.pool.release(held)
    yield made
    runtime.close()


def resident(worker: Any) -> set[int]:
    """Blocks that have every page in the pool. The others may have none there."""
    keys = named(worker._runtime.device_tier.pool._table.pages())
    counts = {block: sum(key.page // 2 == block for key in keys) for block in range(BLOCKS)}
    assert set(counts.values()) <= {0, 2 * KV_HEADS * LAYERS}
    return {block for block, count in counts.items() if count}


def test_blocks_that_are_copied_zeroed_or_loaded_are_dropped_in_every_layer(worker: Any) -> None:
    new = SimpleNamespace(block_ids=([5, 4],), num_computed_tokens=32)  # a connector may have loaded the first
    assert worker.execute_model(step()) == "done"
    assert resident(worker) == {0, 1, 2, 3, 4, 5}
    copies = [KVCacheBlockCopy(src_block_id=0, dst_block_id=1)]
    worker.execute_model(step(kv_cache_block_copies=copies, new_block_ids_to_zero=[3], scheduled_new_reqs=[new]))
    assert resident(worker) == {0, 2, 4}


def test_a_block_that_was_loaded_in_part_is_dropped_too(worker: Any) -> None:
    new = SimpleNamespace(block_ids=([5, 4, 3],), num_computed_tokens=33)
    worker.execute_model(step(scheduled_new_reqs=[new]))
    assert worker._runtime.loaded_blocks.blocks.tolist() == [5, 4]
    assert resident(worker) == {0, 1, 2, 3}
    worker.execute_model(step())
    assert worker._runtime.loaded_blocks is None  # they are dropped and summarised once


@pytest.mark.parametrize(("resumed", "left"), [({"a"}, {1, 3, 4, 5}), (set(), {0, 1, 2, 3, 4, 5})])
def test_of_a_request_that_goes_on_blocks_are_dropped_where_it_was_preempted(
    resumed: set[str], left: set[int], worker: Any
) -> None:
    """A preempted request's blocks may have been loaded. The blocks of any other are new and hold nothing."""
    cached = SimpleNamespace(
        req_ids=["a", "b"],
        new_block_ids=[([2, 0, 1],), None],
        num_computed_tokens=[64, 32],
        resumed_req_ids=resumed,
    )
    worker.execute_model(step(scheduled_cached_reqs=cached))
    assert resident(worker) == left


def test_layers_of_two_shapes_cannot_share_a_pool(worker: Any) -> None:
    runtime = worker._runtime
    kernels = [
        runtime.attention(
            dtype=torch.float32, num_q_heads=2, num_kv_heads=2, head_dim=head_dim, block_tokens=32, scale=1.0
        )
        for head_dim in (16, 32)
    ]
    with pytest.raises(ConfigError, match="all attention layers must have one shape, and the model has 2"):
        runtime.open_device([torch.zeros(1, 1)], kernels)


def test_a_runtime_without_a_device_has_no_tier() -> None:
    runtime = HostRuntime(HybridSparseConfig(num_threads=1))
    runtime.open_device([], [])
    assert runtime.device_tier is None
    runtime.close()

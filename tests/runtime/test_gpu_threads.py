"""Threads that serve a GPU choose it before anything else, or CUDA would open a context on the first GPU as well."""

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from tests.runtime.test_step import POLICIES, SMALL
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.memory.queues import choose_device
from vllm_hybrid_sparse.memory.transfers import THREAD_NAME as LOADER
from vllm_hybrid_sparse.memory.transfers import Loader
from vllm_hybrid_sparse.runtime import cuda, tiers
from vllm_hybrid_sparse.runtime.cuda import LAND_THREAD, LAUNCH_THREAD, CudaDevice
from vllm_hybrid_sparse.runtime.tiers import THREAD_NAME as LAUNCHER
from vllm_hybrid_sparse.runtime.tiers import DeviceTier

SECOND = torch.device("cuda", 1)


def name_of_thread() -> str:
    return threading.current_thread().name.rsplit("_", 1)[0]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What threads do, in order: their names with the GPU that they choose, or with "task"."""
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append((name_of_thread(), device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(cuda, "open_queue", lambda device: SimpleNamespace(device=device))
    return seen


def pool_on(device: torch.device) -> Any:
    return SimpleNamespace(
        key=SimpleNamespace(device=device),
        queue=SimpleNamespace(device=device),
        shape=SimpleNamespace(capacity_pages=64, layers=1),
        evictions=0,
    )


def run_in_each(done: list[tuple[str, Any]], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two tasks in each of the threads that a tier over slots on this device has."""
    pool = pool_on(device)
    monkeypatch.setattr(tiers, "open_device", lambda *_: (pool, CudaDevice(pool)))
    monkeypatch.setattr(tiers, "free_device_bytes", lambda _: 2**40)
    settings = {**SMALL, **POLICIES["topk"], "device": "cuda", "device_ranking": "host", "device_resident_share": 0.0}
    config = HybridSparseConfig.from_mapping({**settings, "device_pool_pages": 64})
    layer = ServedLayer(Shape(summary=config.summary or "none"), num_blocks=4, seed=0, retained=config.retained)
    with DeviceTier(config, [layer.kv_cache], layer.attention, device=device) as tier, ExitStack() as threads:
        on_cuda: Any = tier.device
        loader = Loader(pool)
        threads.callback(loader.close)
        for executor in (tier.launcher, loader._stream, on_cuda._launches, on_cuda._landings):
            for _ in range(2):
                executor.submit(lambda: done.append((name_of_thread(), "task"))).result(timeout=10)


def test_each_thread_chooses_its_gpu_before_its_first_task(
    done: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_each(done, SECOND, monkeypatch)
    for name in (LAUNCHER, LOADER, LAUNCH_THREAD, LAND_THREAD):
        assert [what for thread, what in done if thread == name] == [1, "task", "task"], name


def test_over_cpu_memory_no_thread_chooses_one(done: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_each(done, torch.device("cpu"), monkeypatch)
    assert {what for _, what in done} == {"task"}


@pytest.mark.usefixtures("done")
@pytest.mark.parametrize(("device", "chosen"), [(SECOND, 1), (torch.device("cuda"), 2)])
def test_a_gpu_without_a_number_is_the_one_of_who_starts_the_thread(
    device: torch.device, chosen: int, done: list[tuple[str, Any]]
) -> None:
    choose = choose_device(device)
    assert choose is not None
    choose()
    assert [what for _, what in done] == [chosen]

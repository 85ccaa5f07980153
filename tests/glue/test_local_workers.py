"""How many workers share a machine, as each of them learns it in a process of its own."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import ParallelConfig
from vllm.v1.worker.gpu_worker import Worker

from tests.glue.fake_config import config_of, platform_of
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import cuda_worker
from vllm_hybrid_sparse.glue.cuda_worker import HybridSparseCUDAWorker
from vllm_hybrid_sparse.glue.local_workers import gpus_on_cores, local_workers
from vllm_hybrid_sparse.glue.registration import member
from vllm_hybrid_sparse.runtime.host import HostRuntime

GIB = 2**30


def rank_of_a_dense_model(monkeypatch: pytest.MonkeyPatch, *, on_cuda: bool = True) -> ParallelConfig:
    """The configuration that a worker gets: as vLLM's front end, then the engine's process have left it."""
    config = config_of(
        member(), parallel_config=ParallelConfig(data_parallel_size=2, data_parallel_size_local=2, numa_bind=False)
    )
    platform = platform_of(monkeypatch, on_cuda=on_cuda)
    platform.check_and_update_config(config)
    config.parallel_config = pickle.loads(pickle.dumps(config.parallel_config))
    config.parallel_config.data_parallel_rank_local = 1
    config.parallel_config.reconfigure_for_independent_dp_rank()
    platform.check_and_update_config(config)
    return pickle.loads(pickle.dumps(config.parallel_config))


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_rank_of_a_dense_model_knows_of_the_others(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = rank_of_a_dense_model(monkeypatch, on_cuda=on_cuda)
    assert parallel.data_parallel_size_local == 1  # what vLLM makes each of them believe
    assert local_workers(parallel) == 2


def test_without_a_record_the_configuration_counts() -> None:
    parallel = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, tensor_parallel_size=2)
    assert local_workers(parallel) == 4
    assert local_workers(SimpleNamespace(local_world_size=2, data_parallel_size_local=0)) == 2  # no engine here


@pytest.mark.usefixtures("no_loggers")
@pytest.mark.parametrize(
    ("asked", "available", "first", "wanted"),
    [
        (None, 40, 40, 10),
        (19, 40, 40, 19),
        (20, 40, 40, None),
        (19, 21, 40, 19),  # the other rank has its store by now
        (19, 20, 40, None),  # and something else has taken more since
    ],
)
def test_ranks_share_the_host_memory_of_their_machine(
    asked: int | None, available: int, first: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In GiB, `first` when the workers start, `available` when this one takes its store."""
    runtime = HostRuntime(HybridSparseConfig(device="cuda", device_pool_pages=64, num_threads=1))
    worker: Any = HybridSparseCUDAWorker.__new__(HybridSparseCUDAWorker)
    worker.parallel_config = rank_of_a_dense_model(monkeypatch)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None if asked is None else asked * GIB)
    worker.vllm_config, worker._layers = None, list
    monkeypatch.setattr(Worker, "init_device", lambda _worker: None)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda _worker: 0)
    monkeypatch.setattr(cuda_worker, "settings_of", lambda _config: runtime.settings)
    monkeypatch.setattr(cuda_worker, "host_runtime", lambda _settings: runtime)
    monkeypatch.setattr(cuda_worker, "available_bytes", lambda: first * GIB)
    worker.init_device()
    monkeypatch.setattr(cuda_worker, "available_bytes", lambda: available * GIB)
    if wanted is None:
        with pytest.raises(ConfigError, match=f"^kv_cache_memory_bytes={asked * GIB if asked else None}: "):
            worker.determine_available_memory()
    else:
        assert worker.determine_available_memory() == wanted * GIB


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"numa_bind": False}, None),
        ({"numa_bind": True}, None),
        ({"numa_bind": True, "numa_bind_nodes": [0, 0, 0, 1]}, 3),
        ({"numa_bind": True, "numa_bind_nodes": [0, 0], "numa_bind_cpus": ["0-3", "4-7"]}, 1),
        ({"numa_bind": True, "numa_bind_nodes": [0, 0], "numa_bind_cpus": ["0-3", "0-3"]}, 2),
    ],
)
def test_workers_that_are_bound_to_the_same_cores_are_counted(given: dict[str, Any], gpus: int | None) -> None:
    assert gpus_on_cores(ParallelConfig(**given)) == gpus

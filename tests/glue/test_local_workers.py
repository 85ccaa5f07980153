"""How many workers share a machine, as each of them learns it in a process of its own."""

import pickle
from pathlib import Path
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
from vllm_hybrid_sparse.glue.local_workers import BoundWorkers, bound_with, gpus_on_cores, local_workers
from vllm_hybrid_sparse.glue.registration import member
from vllm_hybrid_sparse.memory import pinned
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


def worker_of(parallel_config: Any, asked: int | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that can say how large its host store is; `asked` in GiB."""
    runtime = HostRuntime(HybridSparseConfig(device="cuda", device_pool_pages=64, num_threads=1))
    worker: Any = HybridSparseCUDAWorker.__new__(HybridSparseCUDAWorker)
    worker.parallel_config, worker.local_rank = parallel_config, 0
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None if asked is None else asked * GIB)
    worker.vllm_config, worker._layers = None, list
    monkeypatch.setattr(Worker, "init_device", lambda _worker: None)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda _worker: 0)
    monkeypatch.setattr(cuda_worker, "settings_of", lambda _config: runtime.settings)
    monkeypatch.setattr(cuda_worker, "host_runtime", lambda _settings: runtime)
    return worker


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
    worker = worker_of(rank_of_a_dense_model(monkeypatch), asked, monkeypatch)
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


def machine(root: Path, available: int, nodes: dict[int, int]) -> Path:
    """A file system that says how many GiB the machine and its NUMA nodes have available; half of it is cached."""
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemAvailable: {available * 2**20} kB\n")
    for node, of_node in nodes.items():
        path = root / f"sys/devices/system/node/node{node}"
        path.mkdir(parents=True, exist_ok=True)
        free, kept = of_node * 2**19, of_node * 2**18
        parts = {"MemTotal": 2**40, "MemFree": free, "Active(file)": kept, "Inactive(file)": kept, "FilePages": 2**30}
        lines = [f"Node {node} {name}:   {size:8} kB\n" for name, size in parts.items()]
        (path / "meminfo").write_text("".join([*lines, f"Node {node} HugePages_Total:     0\n"]))
    return root


def on_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_worker, "available_bytes", lambda: pinned.available_bytes(root))
    monkeypatch.setattr(cuda_worker, "node_available_bytes", lambda node: pinned.node_available_bytes(node, root))


def bound(nodes: list[int] | None, **sizes: int) -> ParallelConfig:
    return ParallelConfig(numa_bind=True, numa_bind_nodes=nodes, **sizes)


TWO_ENGINES = {"data_parallel_size": 2, "data_parallel_size_local": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("asked", "nodes", "gpu", "wanted"),
    [
        (None, None, 0, 64),  # bound to none
        (None, [0], 0, 30),
        (58, [0], 0, 58),
        (None, [0, 0, 1, 1], 0, 30),  # one worker, whatever other GPUs there are
        (None, [0, 7], 1, 64),  # a node of which the system says nothing
    ],
)
def test_a_bound_worker_s_store_fits_its_numa_node(
    asked: int | None,
    nodes: list[int] | None,
    gpu: int,
    wanted: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In GiB: 60 of the machine's 128 are on each node."""
    on_machine(machine(tmp_path, 128, {0: 60, 1: 60}), monkeypatch)
    worker = worker_of(bound(nodes), asked, monkeypatch)
    worker.init_device()
    worker.local_rank = gpu  # as vLLM sets it there
    assert worker.determine_available_memory() == wanted * GIB


@pytest.mark.parametrize(("asked", "sizes", "workers"), [(100, {}, 1), (30, {"tensor_parallel_size": 2}, 2)])
def test_a_size_that_only_several_nodes_have_is_refused(
    asked: int, sizes: dict[str, int], workers: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_machine(machine(tmp_path, 128, {0: 60, 1: 60}), monkeypatch)
    worker = worker_of(bound([0, 0], **sizes), asked, monkeypatch)
    worker.init_device()
    with pytest.raises(
        ConfigError,
        match=rf"^kv_cache_memory_bytes={asked * GIB}: .* at most {58 * GIB // workers} for each of {workers} workers: "
        r"60\.0 GiB are available on NUMA node 0, .*\(--numa-bind\), of which 2 GiB must stay$",
    ):
        worker.determine_available_memory()


@pytest.mark.parametrize(("asked", "wanted"), [(14, 14), (15, None)])
def test_ranks_that_are_bound_to_a_node_share_what_the_start_left_there(
    asked: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two engines of two workers each, all on one node; the other engine has its stores by now."""
    on_machine(machine(tmp_path, 128, {0: 60}), monkeypatch)
    worker = worker_of(bound([0] * 4, **TWO_ENGINES), asked, monkeypatch)
    worker.init_device()
    machine(tmp_path, 100, {0: 32})
    worker.local_rank = 3
    if wanted is None:
        with pytest.raises(ConfigError, match="for each of 4 workers"):
            worker.determine_available_memory()
    else:
        assert worker.determine_available_memory() == wanted * GIB


@pytest.mark.parametrize(
    ("nodes", "gpu", "expected"),
    [
        ([0, 0, 1, 1], 1, BoundWorkers(0, 2, 2)),
        ([0, 1, 0, 1], 3, BoundWorkers(1, 2, 1)),
        ([0, 1, 1, 1, 1, 1], 2, BoundWorkers(1, 3, 2)),  # the last two GPUs have no worker
        ([0, 0, 0, 1, 1, 1], 4, BoundWorkers(1, 3, 2)),  # a rank that was started alone, behind those it knows of
        ([0, 0], 3, None),
        (None, 0, None),
    ],
)
def test_workers_whose_memory_is_bound_to_one_node_are_counted(
    nodes: list[int] | None, gpu: int, expected: BoundWorkers | None
) -> None:
    """There are two engines of two workers each."""
    assert bound_with(bound(nodes, **TWO_ENGINES), gpu) == expected


def test_workers_that_are_not_bound_are_not_counted() -> None:
    assert bound_with(ParallelConfig(numa_bind=False, numa_bind_nodes=None), 0) is None

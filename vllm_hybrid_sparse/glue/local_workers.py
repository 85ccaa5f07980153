"""How many workers the engines of a server have on one machine, which share its memory and its cores."""

from collections import Counter
from typing import Any, NamedTuple

_RECORD = "_hybrid_sparse_local_engines"  # an attribute of vLLM's ParallelConfig, so that it goes to every process


def record_local_engines(parallel_config: Any) -> None:
    """Record how many engines this machine has. A later call changes nothing.

    vLLM checks a configuration where a server starts, where the number is right, and again in the process of each
    engine. There a data-parallel rank of a dense model believes that it is the only one
    (`reconfigure_for_independent_dp_rank`).
    """
    if not hasattr(parallel_config, _RECORD):
        setattr(parallel_config, _RECORD, parallel_config.data_parallel_size_local)


def local_workers(parallel_config: Any) -> int:
    """The number of workers that the engines have on this machine."""
    engines: int = getattr(parallel_config, _RECORD, parallel_config.data_parallel_size_local)
    return int(parallel_config.local_world_size) * max(1, engines)


def started_alone(parallel_config: Any) -> tuple[str, object] | None:
    """The setting, and its value, that has each data-parallel rank started by itself; None if it is otherwise.

    Such a rank does not know how many share its machine. Ask before `record_local_engines`: in the process of an engine
    the local rank is always set.
    """
    if parallel_config.data_parallel_external_lb:
        return "data_parallel_external_lb", True
    size, rank = parallel_config.data_parallel_size, parallel_config.data_parallel_rank_local
    if size > 1 and rank is not None and not hasattr(parallel_config, _RECORD):
        return "data_parallel_rank_local", rank  # vLLM's VLLM_DP_RANK_LOCAL, for ranks without a server
    return None


def gpus_on_cores(parallel_config: Any) -> int | None:
    """How many GPUs' workers vLLM binds to the same cores, at the most (--numa-bind); None if it binds none.

    vLLM writes the nodes that it finds itself into the configuration before it starts a worker.
    """
    if not parallel_config.numa_bind:
        return None
    places = parallel_config.numa_bind_cpus or parallel_config.numa_bind_nodes  # one for each GPU that is visible
    return max(Counter(places).values()) if places else None


class BoundWorkers(NamedTuple):
    """The workers whose memory vLLM binds to one NUMA node."""

    node: int
    workers: int  # of all engines of this machine
    engine_workers: int  # of one engine


def bound_with(parallel_config: Any, gpu: int) -> BoundWorkers | None:
    """The workers that take their memory where a GPU's worker takes its own; None if vLLM binds it to no node.

    gpu   of the worker: its `local_rank`, once vLLM has initialised the device. Workers have the first GPUs of those
          that are visible, and so the first of `numa_bind_nodes`, engine by engine
    """
    nodes = parallel_config.numa_bind_nodes if parallel_config.numa_bind else None
    if not nodes or gpu >= len(nodes):  # vLLM itself has refused too short a list, wherever it binds workers
        return None
    node, of_engine = nodes[gpu], int(parallel_config.local_world_size)
    first = gpu - gpu % of_engine
    count = Counter(nodes[: max(local_workers(parallel_config), first + of_engine)])[node]
    return BoundWorkers(node, count, Counter(nodes[first : first + of_engine])[node])

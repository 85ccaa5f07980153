"""What workers on a CPU are started with so that their threads get the cores, and leave them to others in time."""

import logging
import os
from typing import Any

from vllm_hybrid_sparse.runtime.cores import RESERVED_VARIABLE, vllm_chooses_cores

SPIN_COUNT_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "8000"
"""Rounds that a thread of GNU's OpenMP looks for work before it sleeps: some 200 µs on a Zen 4, more where `pause`
waits longer.

Longer than what lies between two parallel regions of a forward pass, and shorter than what lies between two passes.
"""

logger = logging.getLogger("vllm.hybrid_sparse")  # among those that vLLM logs from INFO on


def prepare_threads(parallel_config: Any) -> None:
    """Set what this process's workers read when they are started, where the user says nothing of it."""
    _shorten_waits()
    _keep_no_core_of_two(parallel_config)


def _shorten_waits() -> None:
    """Have OpenMP's threads sleep soon.

    GNU's OpenMP looks for work for milliseconds by itself when its threads are bound to cores, which vLLM's are. So
    where they are bound to all of them, a thread that has nothing to do between two steps holds the core that the
    engine needs to begin the next one. vLLM shortens the wait of Intel's OpenMP (`KMP_BLOCKTIME`), and not this one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT_VARIABLE, SPIN_COUNT)


def _keep_no_core_of_two(parallel_config: Any) -> None:
    """Have vLLM bind a lone worker to both cores of a machine that has two.

    It would keep one for the API server and the engine, which need little of it: half of the machine.
    """
    if vllm_chooses_cores() and parallel_config.world_size_across_dp == 1 and _num_physical_cores() == 2:
        os.environ[RESERVED_VARIABLE] = "0"
        logger.info("hybrid_sparse: computes on both cores, vLLM would keep one (%s=1 keeps it)", RESERVED_VARIABLE)


def _num_physical_cores() -> int:
    """How many cores this process may use, as vLLM counts them: hardware threads of one core are one."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list  # noqa: PLC0415  (where the backend is selected)

    return len({(cpu.numa_node, cpu.physical_core) for cpu in get_allowed_cpu_list()})

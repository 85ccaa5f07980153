"""Environment variables by which a CPU worker's threads get the cores, and leave them to others in time."""

import logging
import os
from typing import Any

from vllm_hybrid_sparse.glue.environment import give
from vllm_hybrid_sparse.glue.local_workers import local_workers
from vllm_hybrid_sparse.runtime.cores import RESERVED_VARIABLE, vllm_chooses_cores

SPIN_COUNT_VARIABLE = "GOMP_SPINCOUNT"
SPIN_COUNT = "8000"
"""How many rounds a thread of GNU's OpenMP looks for work before it sleeps: about 200 µs on a Zen 4, more on CPUs whose
`pause` waits longer.

This is longer than the gap between two parallel regions of a forward pass, and shorter than the gap between two passes.
"""

logger = logging.getLogger("vllm.hybrid_sparse")  # under vLLM's own logger, so it logs from INFO on


def prepare_threads(parallel_config: Any) -> None:
    """Set the variables that this process's workers read when they start, unless the user has set them."""
    _shorten_waits()
    _keep_no_core_of_two(parallel_config)


def _shorten_waits() -> None:
    """Make OpenMP's threads sleep soon.

    vLLM binds its threads to cores. By default, bound threads of GNU's OpenMP look for work for milliseconds before
    they sleep. If they are bound to all cores, a thread that is idle between two steps holds the core that the engine
    needs to begin the next one. vLLM shortens this wait for Intel's OpenMP (`KMP_BLOCKTIME`), but not for GNU's.
    """
    if not {"OMP_WAIT_POLICY", SPIN_COUNT_VARIABLE}.intersection(os.environ):
        give(SPIN_COUNT_VARIABLE, SPIN_COUNT)


def _keep_no_core_of_two(parallel_config: Any) -> None:
    """Make vLLM bind a lone worker to both cores of a machine that has two.

    Otherwise vLLM would keep one of them, half of the machine, for the API server and the engine, which need little.
    """
    if vllm_chooses_cores() and local_workers(parallel_config) == 1 and _num_physical_cores() == 2:
        give(RESERVED_VARIABLE, "0")
        logger.info("hybrid_sparse: computes on both cores, vLLM would keep one (%s=1 keeps it)", RESERVED_VARIABLE)


def _num_physical_cores() -> int:
    """How many cores this process may use, as vLLM counts them: the hardware threads of one core count once."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list  # noqa: PLC0415  (where the backend is selected)

    return len({(cpu.numa_node, cpu.physical_core) for cpu in get_allowed_cpu_list()})

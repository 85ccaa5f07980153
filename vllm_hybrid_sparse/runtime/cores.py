"""Which cores the CPU kernel's threads run on: those that vLLM bound the worker to, and one that it leaves idle."""

import os
import re

import torch

RESERVED_VARIABLE = "VLLM_CPU_NUM_OF_RESERVED_CPU"


def vllm_chooses_cores() -> bool:
    """Whether the user names neither the cores to compute on nor how many to keep for vLLM's other processes."""
    named = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto"
    return not (named or os.environ.get(RESERVED_VARIABLE))


def bound_cores() -> list[int]:
    """The cores that vLLM bound OpenMP's threads to, the calling thread's first; empty where it bound none.

    As it sets them for GNU's and for Intel's OpenMP, which bind the calling thread to the first one.
    """
    intel = re.search(r"proclist=\[([0-9,]*)\]", os.environ.get("KMP_AFFINITY", ""))
    listed = intel[1].split(",") if intel else os.environ.get("GOMP_CPU_AFFINITY", "").split()
    return [int(core) for core in listed if core.isdigit()]


def other_cores() -> list[int]:
    """Cores that vLLM bound nobody of this worker to, of those that the process may run on that started it."""
    bound = bound_cores()
    return sorted(os.sched_getaffinity(os.getppid()) - set(bound)) if bound else []


def num_usable_cores() -> int:
    """How many cores threads of this process can have: its own, and those that vLLM bound nobody of it to."""
    return len(os.sched_getaffinity(0).union(bound_cores(), other_cores()))


def helper_cpus(threads: int) -> list[int]:
    """A core for each helper thread, the caller's excluded; empty: none in particular.

    Threads inherit the core that the caller is bound to, so a helper that is to be of use is bound to another.
    """
    return [*bound_cores(), *other_cores()][1:threads]


def default_threads(device: str, local_workers: int = 1) -> int:
    """Threads of the CPU kernel where the settings do not number them.

    As many as torch has. By default vLLM binds a lone worker to one hardware thread of each core. Where that is a
    single one of two, a helper runs on the other, which is idle most of the time. Where more than one is bound,
    OpenMP's own threads wait there for work, and helpers beside them would be in their way.

    Beside a GPU vLLM leaves torch one thread. There the kernel takes an equal part of the process's cores for each GPU
    of the machine, less one, which launches.

    local_workers   of the engine on this machine: what one leaves may be another's
    """
    if device == "cuda":
        return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()) - 1)
    threads = torch.get_num_threads()
    lone = threads == len(bound_cores()) == local_workers == 1
    return 2 if vllm_chooses_cores() and lone and len(other_cores()) == 1 else threads

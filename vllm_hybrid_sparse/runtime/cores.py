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
    """The cores that vLLM bound OpenMP's threads to, the calling thread's first; empty if it bound none.

    Read from what vLLM sets for GNU's and Intel's OpenMP, which bind the calling thread to the first core.
    """
    intel = re.search(r"proclist=\[([0-9,]*)\]", os.environ.get("KMP_AFFINITY", ""))
    listed = intel[1].split(",") if intel else os.environ.get("GOMP_CPU_AFFINITY", "").split()
    return [int(core) for core in listed if core.isdigit()]


def other_cores() -> list[int]:
    """Cores that the parent process may run on and that vLLM bound none of this worker's threads to."""
    bound = bound_cores()
    return sorted(os.sched_getaffinity(os.getppid()) - set(bound)) if bound else []


def usable_cores() -> set[int]:
    """The cores that this process's threads can have: its own, and those that vLLM bound none of them to."""
    return os.sched_getaffinity(0).union(bound_cores(), other_cores())


def helper_cpus(threads: int) -> list[int]:
    """A core for each helper thread, excluding the caller's; empty: no particular ones.

    Threads inherit the caller's core, so a helper is of use only if it is bound to another.
    """
    return [*bound_cores(), *other_cores()][1:threads]


def default_threads(device: str, local_workers: int = 1, gpus_on_cores: int | None = None) -> int:
    """Threads of the CPU kernel if the settings give no number.

    Normally as many as torch has. By default vLLM binds a lone worker to one hardware thread of each core. If that is
    one of only two, a helper runs on the other, which is idle most of the time. If more than one is bound, OpenMP's own
    threads wait there for work, and helpers would get in their way.

    With a GPU, vLLM leaves torch one thread. The kernel then takes the process's cores divided by the GPUs whose
    workers have them (all of the machine's, unless it is bound to some cores), less one core for the thread that
    launches.

    local_workers   of the engine on this machine: a core that one leaves idle may be another's
    gpus_on_cores   GPUs whose workers are bound to the same cores; None: this one is bound to none in particular
    """
    if device == "cuda":
        own = len(os.sched_getaffinity(0))
        bound = own < (os.cpu_count() or 0)  # vLLM goes on without binding if the system does not let it
        gpus = (gpus_on_cores if bound else None) or torch.cuda.device_count()
        return max(1, own // max(1, gpus) - 1)
    threads = torch.get_num_threads()
    lone = threads == len(bound_cores()) == local_workers == 1
    return 2 if vllm_chooses_cores() and lone and len(other_cores()) == 1 else threads

"""Pinned host memory: a host store that a GPU reads and writes in place.

vLLM allocates the store as ordinary memory. It is populated in huge pages (`memory/prefault.py`) and then pinned where
it lies. Pinned memory cannot be paged out, so the whole machine lacks it until it is unpinned.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import ConfigError

SHARE = 0.5
"""Share of the memory available at start-up that a host store takes if nobody gave its size."""

LEFT_BYTES = 2 * 2**30
"""Bytes that a host store must leave: vLLM's own processes need them, and a machine without free memory stops
working."""

_GIB = 2.0**30


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that may still be taken: the machine's, or less if a control group that holds this process has a limit.

    Files that the system caches in memory, such as weights just read, do not count as taken, because they give way.

    root   root of the file system that has /proc and /sys
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *(left for group in _control_groups(root) if (left := _left_bytes(group)) is not None)])


def node_available_bytes(node: int, root: Path = Path("/")) -> int | None:
    """Memory that may still be taken on one NUMA node: what is free, and what cached files take, which give way.

    Neither shared memory nor what the kernel itself could give back counts, so this is at most what there is.

    root      root of the file system that has /sys
    returns   bytes; None if the system does not say
    """
    try:
        text = (root / f"sys/devices/system/node/node{node}/meminfo").read_text(encoding="ascii")
        # "Node 0 MemFree:   1234 kB"; unlike FilePages, the two lists of files leave out shared memory
        fields = dict(line.split(maxsplit=2)[2].split(":", 1) for line in text.splitlines())
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemFree", "Active(file)", "Inactive(file)"))
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _control_groups(root: Path) -> list[Path]:
    """The control group (version 2) of this process and those around it, as far as they can be seen."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    own = top / path.strip("/")
    # In a container the path may be the host's (then there is no such folder) or lead out of what is mounted.
    return [top] if ".." in own.parts else [own, *(group for group in own.parents if group.is_relative_to(top))]


def _left_bytes(group: Path) -> int | None:
    """Bytes that a control group may still take; None if it has no limit."""
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such control group, or no limit: "max"
        return None
    return max(0, limit - used + _cached_bytes(group / "memory.stat"))


def _cached_bytes(path: Path) -> int:
    """Bytes of cached files in a control group's memory; 0 if it does not say."""
    try:
        fields = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
        return int(fields["active_file"]) + int(fields["inactive_file"])  # `file` would include shared memory
    except (OSError, ValueError, KeyError):
        return 0


def host_store_bytes(
    asked: int | None, available: int, ranks: int, left_bytes: int = LEFT_BYTES, node: int | None = None
) -> int:
    """Bytes of one worker's host store.

    asked       vLLM's --kv-cache-memory-bytes, which is for each worker; None: an equal part of SHARE
    available   bytes, before any worker of this machine has taken its own
    ranks       workers on this machine
    left_bytes  of what is available, bytes that must stay if the size is given
    node        if memory and workers are those of one NUMA node: which
    raises      ConfigError if the machine, or the node, does not have that much
    """
    if asked is None:
        return int(SHARE * available) // ranks
    if ranks * asked > available - left_bytes:
        stays = f", of which {left_bytes / _GIB:.0f} GiB must stay" if left_bytes else ""
        there = "" if node is None else f" on NUMA node {node}, to which they are bound (--numa-bind)"
        raise ConfigError(
            f"kv_cache_memory_bytes={asked}: with attention backend hybrid_sparse this is host memory, and must be at "
            f"most {max(0, available - left_bytes) // ranks} for each of {ranks} workers: {available / _GIB:.1f} GiB "
            f"are available{there}{stays}"
        )
    return asked


def pin(tensor: Tensor, runtime: Any = None) -> None:
    """Pin the memory behind a tensor; its contents and its views stay as they are.

    runtime   CUDA's runtime; None: torch's
    raises    ConfigError if the driver refuses
    """
    storage = tensor.untyped_storage()
    cudart = runtime or torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0))
    if code != 0:
        raise ConfigError(
            f"kv_cache_memory_bytes={storage.nbytes()}: the driver refused to pin so much host memory (CUDA error "
            f"{code}); give less, or raise what the process may lock (`ulimit -l`) or, in a container, its memory limit"
        )


def unpin(tensor: Tensor, runtime: Any = None) -> None:
    """Undo `pin`, once; nothing on the device may still use the memory."""
    (runtime or torch.cuda.cudart()).cudaHostUnregister(tensor.untyped_storage().data_ptr())

"""How much host memory a store may take, and what follows if the driver refuses."""

from pathlib import Path

import pytest
import torch

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.memory.pinned import (
    LEFT_BYTES,
    SHARE,
    available_bytes,
    host_store_bytes,
    node_available_bytes,
    pin,
    unpin,
)

GIB = 2**30


class Runtime:
    """Stands for CUDA's runtime: pins what it is told to, or refuses."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if not self.code:
            self.pinned[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def machine(root: Path, available_kib: int, limit: str | None = None, used: int = 0) -> Path:
    """A file system with the files that say how much memory there is."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal:       99999999 kB\nMemAvailable: {available_kib} kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, 0, 8 * GIB), ("max", 0, 8 * GIB), (str(6 * GIB), 2 * GIB, 4 * GIB), (str(GIB), 2 * GIB, 0)],
)
def test_what_is_available_is_the_machine_s_or_the_control_group_s(
    limit: str | None, used: int, expected: int, tmp_path: Path
) -> None:
    assert available_bytes(machine(tmp_path, 8 * GIB // 1024, limit, used)) == expected


def test_files_that_a_control_group_holds_in_memory_give_way(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB // 1024, str(6 * GIB), 5 * GIB)
    stat = root / "sys/fs/cgroup/memory.stat"
    stat.write_text(f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n")
    assert available_bytes(root) == 4 * GIB
    stat.write_text("anon 1\n")
    assert available_bytes(root) == GIB


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/system.slice/vllm.service", {"system.slice/vllm.service": 3}, 3),
        ("0::/system.slice/vllm.service", {"system.slice": 2, "system.slice/vllm.service": 3}, 2),
        ("0::/system.slice/vllm.service", {"system.slice/other.service": 1, "user.slice": 1}, 8),
        ("3:memory:/other\n0::/mine\n", {"other": 1, "mine": 5}, 5),
        ("0::/docker/of-the-host", {"": 4}, 4),
        ("0::/../sibling", {"": 4, "../sibling": 1}, 4),
    ],
)
def test_the_tightest_group_around_this_process_counts(
    own: str, limits: dict[str, int], expected: int, tmp_path: Path
) -> None:
    root = machine(tmp_path, 8 * GIB // 1024)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text(own)
    for name, limit in limits.items():
        group = root / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{(limit + 1) * GIB}\n")
        (group / "memory.current").write_text(f"{GIB}\n")
    assert available_bytes(root) == expected * GIB


def test_a_numa_node_has_what_is_free_there_and_what_files_take(tmp_path: Path) -> None:
    """Shared memory does not give way. A node that says nothing, or too little, is unknown."""
    path = tmp_path / "sys/devices/system/node/node1/meminfo"
    path.parent.mkdir(parents=True)
    parts = {"MemTotal": 900, "MemFree": 100, "Active(file)": 20, "Inactive(file)": 3, "FilePages": 500, "Shmem": 477}
    lines = [f"Node 1 {name + ':':16} {size:8} kB\n" for name, size in parts.items()]
    path.write_text("".join([*lines, "Node 1 HugePages_Total:     0\n"]))
    assert node_available_bytes(1, tmp_path) == 123 * 1024
    assert node_available_bytes(0, tmp_path) is None
    path.write_text("".join(lines[:2]))
    assert node_available_bytes(1, tmp_path) is None


def test_this_machine_has_memory() -> None:
    assert 0 < available_bytes() < 2**60
    of_node = node_available_bytes(0)
    assert of_node is None or 0 < of_node < 2**60


def test_a_store_of_no_given_size_shares_half_of_what_is_there() -> None:
    assert host_store_bytes(None, 100 * GIB, 1) == SHARE * 100 * GIB
    assert host_store_bytes(None, 100 * GIB, 4) == SHARE * 25 * GIB


def test_what_was_asked_for_is_taken_or_refused() -> None:
    fits = 100 * GIB - LEFT_BYTES
    assert host_store_bytes(fits, 100 * GIB, 1) == fits
    assert host_store_bytes(fits // 4, 100 * GIB, 4) == fits // 4
    with pytest.raises(
        ConfigError, match=rf"kv_cache_memory_bytes={fits + 1}: .* at most {fits} for each of 1 workers"
    ):
        host_store_bytes(fits + 1, 100 * GIB, 1)
    with pytest.raises(ConfigError, match="for each of 4 workers"):
        host_store_bytes(fits // 2, 100 * GIB, 4)
    assert host_store_bytes(25 * GIB, 100 * GIB, 4, left_bytes=0) == 25 * GIB
    with pytest.raises(ConfigError, match=r"for each of 4 workers: 100\.0 GiB are available$"):
        host_store_bytes(25 * GIB + 1, 100 * GIB, 4, left_bytes=0)


def test_the_whole_memory_behind_a_view_is_pinned_and_unpinned() -> None:
    store, runtime = torch.zeros(64), Runtime()
    pin(store[8:16], runtime)
    assert runtime.pinned == {store.data_ptr(): 256}
    unpin(store[8:16], runtime)
    assert runtime.pinned == {}


def test_a_refusal_of_the_driver_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_bytes=256: the driver refused .* \(CUDA error 2\); give less"
    ):
        pin(torch.zeros(64), Runtime(code=2))

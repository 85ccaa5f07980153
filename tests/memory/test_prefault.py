"""The host store is real memory before the first request."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_hybrid_sparse.memory import advice
from vllm_hybrid_sparse.memory import prefault as prefault_module
from vllm_hybrid_sparse.memory.prefault import prefault

MIB = 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


def test_memory_is_populated_or_said_not_to_be() -> None:
    mapped = mmap.mmap(-1, 64 * MIB)  # torch.empty may give memory that another test has used and freed
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    before = resident_bytes()
    declined = prefault(tensor)
    grown = resident_bytes() - before
    assert grown > 60 * MIB or any(name.startswith("populate") for name in declined)


def test_pieces_populate_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault_module, "_PIECE_BYTES", 6 * MIB)  # not a divisor: the last one is smaller
    test_memory_is_populated_or_said_not_to_be()


def test_contents_stay_and_a_part_of_a_storage_populates_all_of_it() -> None:
    tensor = torch.arange(8 * MIB, dtype=torch.int32)
    expected = tensor.clone()
    prefault(tensor[:1])
    assert torch.equal(tensor, expected)


def test_what_the_kernel_declines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "COLLAPSE", 10**4)  # as to a kernel that does not know it
    declined = prefault(torch.empty(4 * MIB, dtype=torch.uint8))
    assert declined[-1] == "collapse: Invalid argument"


def test_less_than_a_page_is_left_alone() -> None:
    assert prefault(torch.zeros(3)) == []
    assert prefault(torch.zeros(0)) == []


def test_threads_take_the_cores_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that calls may be bound to one of them: vLLM binds it on CPUs."""
    cores = sorted(os.sched_getaffinity(0))
    pools = []

    class Watched(ThreadPoolExecutor):
        def __exit__(self, *error: Any) -> None:
            pools.append((self._max_workers, self.submit(os.sched_getaffinity, 0).result()))
            super().__exit__(*error)

    monkeypatch.setattr(advice, "ThreadPoolExecutor", Watched)
    tensor = torch.empty(MIB, dtype=torch.uint8)
    os.sched_setaffinity(0, cores[:1])  # of this thread
    try:
        prefault(tensor)
        prefault(tensor, cores)
        prefault(tensor, [10**4])  # no such core
    finally:
        os.sched_setaffinity(0, cores)
    taken = [(1, {cores[0]}), (min(8, len(cores)), set(cores)), (1, {cores[0]})]
    assert pools == [threads for threads in taken for _ in range(3)]  # each gives three pieces of advice

"""Memory in use is gathered into huge pages, and nothing else is."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.memory import advice, huge_pages
from vllm_hybrid_sparse.memory.huge_pages import Gathered, gather_resident, huge_bytes
from vllm_hybrid_sparse.memory.prefault import prefault

HUGE_BYTES = huge_bytes() or 2 << 20
PIECES = 40  # more than one call takes, where a huge page has 2 MiB


def bytes_in_huge_pages(array: np.ndarray) -> int:
    """Bytes in huge pages, of the mappings that begin in this memory."""
    start, found, total = array.ctypes.data, False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if head := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            found = start <= int(head[1], 16) < start + array.nbytes
        elif found and line.startswith("AnonHugePages:"):
            total += int(line.split()[1]) * 1024
    return total


def resident_bytes(array: np.ndarray) -> int:
    pages = np.zeros(array.nbytes // mmap.PAGESIZE, np.uint8)
    assert advice.libc().mincore(array.ctypes.data, array.nbytes, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * mmap.PAGESIZE


def aligned_memory(pieces: int) -> np.ndarray:
    """Fresh memory in small pages, at the boundary of a huge page, in a mapping of its own."""
    size = pieces * HUGE_BYTES
    mapped = mmap.mmap(-1, size + 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = np.frombuffer(mapped, np.uint8)
    begin = -everything.ctypes.data % HUGE_BYTES
    inner = everything[begin : begin + size]
    # Advice that differs from the neighbours' makes the mapping end there.
    assert advice.advise([(inner.ctypes.data, size)], mmap.MADV_DONTFORK) == [0]
    return inner


@pytest.fixture
def memory() -> np.ndarray:
    return aligned_memory(PIECES)


@pytest.fixture
def collapses() -> None:
    """Skips where the kernel makes no huge pages when asked, or makes them without being asked."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[always]" in setting.read_text(encoding="ascii"):
        pytest.skip("memory is in huge pages from the start")
    piece = aligned_memory(1)
    piece[:] = 1
    if advice.advise([(piece.ctypes.data, piece.nbytes)], advice.COLLAPSE) != [0]:
        pytest.skip("no huge pages on request")


@pytest.mark.usefixtures("collapses")
def test_what_is_resident_is_gathered_and_keeps_its_contents(memory: np.ndarray) -> None:
    memory[:] = np.arange(memory.size, dtype=np.uint8)
    assert bytes_in_huge_pages(memory) == 0
    gathered = gather_resident()
    assert 0 < memory.nbytes - gathered.declined <= bytes_in_huge_pages(memory)  # a full machine may have too few
    assert gathered.bytes + gathered.declined >= memory.nbytes
    assert np.array_equal(memory, np.arange(memory.size, dtype=np.uint8))


@pytest.mark.usefixtures("collapses")
def test_pieces_with_a_page_that_is_not_resident_stay_as_they_are(memory: np.ndarray) -> None:
    memory[2 * HUGE_BYTES : 5 * HUGE_BYTES] = 1
    memory[5 * HUGE_BYTES : 8 * HUGE_BYTES - mmap.PAGESIZE] = 1  # the last piece lacks one page
    memory[20 * HUGE_BYTES :: 2 * mmap.PAGESIZE] = 1  # every second page
    resident = resident_bytes(memory)
    gathered = gather_resident()
    assert resident_bytes(memory) == resident
    whole = (3 + 2) * HUGE_BYTES
    assert 0 < whole - gathered.declined <= bytes_in_huge_pages(memory) <= whole


@pytest.mark.usefixtures("collapses")
def test_what_the_kernel_declines_is_counted(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    memory[:] = 1
    monkeypatch.setattr(huge_pages, "COLLAPSE", 10**4)  # as to a kernel without it
    gathered = gather_resident()
    assert gathered.bytes == 0
    assert gathered.declined >= memory.nbytes
    assert bytes_in_huge_pages(memory) == 0


def test_memory_that_is_shared_or_a_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * HUGE_BYTES))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
        shared = mmap.mmap(-1, 4 * HUGE_BYTES)  # shared is the default
        arrays = [np.frombuffer(each, np.uint8) for each in (mapped, shared)]
        for array in arrays:
            array[:] = 1
        gather_resident()
        assert [bytes_in_huge_pages(array) for array in arrays] == [0, 0]
        del arrays, array


@pytest.mark.usefixtures("collapses")
def test_populated_memory_that_is_in_huge_pages_counts(memory: np.ndarray) -> None:
    memory[:] = 1
    if declined := prefault(torch.from_numpy(memory)):
        pytest.skip(str(declined))
    assert bytes_in_huge_pages(memory) == memory.nbytes
    gathered = gather_resident()
    assert gathered.bytes + gathered.declined >= memory.nbytes
    assert bytes_in_huge_pages(memory) == memory.nbytes


def test_without_huge_pages_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_HUGE_BYTES", tmp_path / "none")
    assert gather_resident() == Gathered(0, 0)

"""Gathers memory that a process has in use into huge pages.

On CPUs each token reads all of the model's weights. They lie in glibc's heap and in mappings of small pages, where
reading is slower than in huge pages: the processor translates 512 addresses for one. No library that allocates them
asks for huge pages, so they are gathered once, after the model is loaded.
"""

import ctypes
import mmap
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vllm_hybrid_sparse.memory.advice import COLLAPSE, Range, advise, libc

_MAPS = Path("/proc/self/maps")
_HUGE_BYTES = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MOST_BYTES = 32 << 20  # of a range for one call, or one huge page if that is larger

# Private anonymous memory that can be written: no file's, no thread's stack that is named, nothing shared.
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0 *(\[heap\]|\[anon:.*\])?$")


@dataclass(frozen=True)
class Gathered:
    """What became of memory that was in use.

    bytes      now in huge pages, those that were in huge pages before included
    declined   bytes that Linux left in small pages
    """

    bytes: int
    declined: int


def gather_resident(cores: Collection[int] = ()) -> Gathered:
    """Gather this process's resident memory into huge pages. Contents and addresses stay as they are.

    Only pieces of a huge page's size whose pages are all resident are gathered, so resident memory does not grow. Other
    threads may allocate and free meanwhile: a piece that is gone is declined. Without huge pages nothing is gathered.

    cores   for the threads that gather; empty: the caller's
    """
    huge = huge_bytes()
    if huge == 0:
        return Gathered(0, 0)
    pieces = [piece for mapping in _anonymous_mappings(huge) for piece in _resident_pieces(*mapping, huge)]
    errors = advise(pieces, COLLAPSE, cores)
    declined = sum(size for (_, size), error in zip(pieces, errors, strict=True) if error)
    return Gathered(sum(size for _, size in pieces) - declined, declined)


def huge_bytes() -> int:
    """Bytes of a huge page, 2 MiB where pages have 4 KiB; 0 if there are none, or on another system than Linux."""
    try:
        return int(_HUGE_BYTES.read_text(encoding="ascii"))
    except OSError:
        return 0


def _anonymous_mappings(huge: int) -> Iterator[Range]:
    """This process's mappings that can hold huge pages, cut to whole ones."""
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := _ANONYMOUS.match(line):
            start = -(-int(found[1], 16) // huge) * huge
            length = (int(found[2], 16) - start) // huge * huge
            if length > 0:
                yield start, length


def _resident_pieces(start: int, length: int, huge: int) -> Iterator[Range]:
    """Runs of huge pages' ranges in which every page is resident, none longer than a call is to take."""
    pages = np.zeros(length // mmap.PAGESIZE, np.uint8)
    if libc().mincore(start, length, ctypes.c_void_p(pages.ctypes.data)) != 0:
        return  # unmapped meanwhile
    whole = (pages & 1).reshape(-1, huge // mmap.PAGESIZE).all(axis=1)
    edges = np.flatnonzero(np.diff(whole, prepend=False, append=False)) * huge
    most = max(_MOST_BYTES, huge)
    for begin, end in edges.reshape(-1, 2).tolist():
        for first in range(begin, end, most):
            yield start + first, min(most, end - first)

import ctypes
import platform

import psutil
import pytest

from vllm_hybrid_sparse.memory.heap import INTERVAL_S, HeapTrimmer, glibc_trim


def test_the_first_call_trims_and_the_next_only_when_the_interval_has_passed() -> None:
    trims: list[float] = []
    now_s = 1000.0
    heap = HeapTrimmer(lambda: trims.append(now_s))

    for now_s in (1000.0, 1000.5, 1000.0 + INTERVAL_S - 0.5, 1000.0 + INTERVAL_S, 1000.5 + INTERVAL_S):
        heap.tidy(now_s)

    assert trims == [1000.0, 1000.0 + INTERVAL_S]


def test_without_a_function_that_trims_nothing_happens() -> None:
    HeapTrimmer(None).tidy(0.0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_between_what_is_still_used_goes_back_to_the_system() -> None:
    """Blocks below the size that glibc maps apart, of which every 64th stays: without a trim their memory does too."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    size, number = 16 * 1024, 16 * 1024
    blocks = [libc.malloc(size) for _ in range(number)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for index, block in enumerate(blocks):
        if index % 64:
            libc.free(block)
    before = psutil.Process().memory_info().rss

    HeapTrimmer(glibc_trim()).tidy(0.0)

    after = psutil.Process().memory_info().rss
    for block in blocks[::64]:
        libc.free(block)
    assert before - after > 0.9 * size * number

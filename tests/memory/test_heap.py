import ctypes
import platform
import threading
from collections.abc import Iterator

import psutil
import pytest

from vllm_hybrid_sparse.memory.heap import HeapTrimmer, glibc_trim, resident_bytes

SOON_S = 60.0  # time limit for what must happen; only a failure takes this long


class Trims:
    """Counts trims, and lets a test wait for one."""

    def __init__(self) -> None:
        self.number = 0
        self._another = threading.Semaphore(0)

    def __call__(self) -> None:
        self.number += 1
        self._another.release()

    def wait(self) -> bool:
        """Wait for one more trim; return whether it came."""
        return self._another.acquire(timeout=SOON_S)


@pytest.fixture
def trims() -> Trims:
    return Trims()


@pytest.fixture
def trimmer(trims: Trims) -> Iterator[HeapTrimmer]:
    trimmer = HeapTrimmer(trims, idle_s=0.05)
    yield trimmer
    trimmer.close()


def test_there_is_one_trim_after_each_time_of_work(trims: Trims, trimmer: HeapTrimmer) -> None:
    for times in (1, 2, 3):
        with trimmer.work():
            pass
        assert trims.wait()
        assert trims.number == times


def test_work_that_fails_has_ended_too(trims: Trims, trimmer: HeapTrimmer) -> None:
    with pytest.raises(RuntimeError, match="a step"), trimmer.work():
        raise RuntimeError("a step")
    assert trims.wait()


def test_nothing_is_trimmed_before_there_was_work(trims: Trims) -> None:
    HeapTrimmer(trims, idle_s=0.0).close()
    assert trims.number == 0


def test_work_that_goes_on_is_not_disturbed(trims: Trims) -> None:
    """It never rests for as long as a trim requires."""
    trimmer = HeapTrimmer(trims, idle_s=SOON_S)
    for _ in range(100):
        with trimmer.work():
            pass
    trimmer.close()
    assert trims.number == 0


def test_work_that_never_rests_is_trimmed_behind_once_memory_has_grown(trims: Trims) -> None:
    sizes = iter((500, 300, 340, 400, 401, 310, 410, 411, 320))  # of one look each, and of one more behind each trim
    trimmer = HeapTrimmer(trims, idle_s=SOON_S, resident=lambda: next(sizes), look_s=0.0, growth_bytes=100)
    counts = []
    for _ in range(7):
        with trimmer.work():
            within = trims.number
        counts.append((within, trims.number))
    trimmer.close()
    assert counts == [(0, 0), (0, 0), (0, 0), (0, 0), (0, 1), (1, 1), (1, 2)]
    assert next(sizes, None) is None


def test_memory_is_looked_at_now_and_then() -> None:
    looks = []
    trimmer = HeapTrimmer(lambda: None, idle_s=SOON_S, resident=lambda: looks.append(1) or 0, look_s=SOON_S)
    for _ in range(20):
        with trimmer.work():
            pass
    trimmer.close()
    assert len(looks) == 1


def test_the_process_has_memory() -> None:
    assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_nothing_is_trimmed_within_work_that_takes_longer_than_the_rest(trims: Trims, trimmer: HeapTrimmer) -> None:
    with trimmer.work():
        pass
    assert trims.wait()
    with trimmer.work():
        pass
    with trimmer.work():  # begins before the rest is over, unless this thread is held up
        before = trims.number
        threading.Event().wait(0.2)
        assert trims.number == before
    assert trims.wait()


def test_the_thread_ends(trims: Trims) -> None:
    before = threading.active_count()
    trimmer = HeapTrimmer(trims, idle_s=SOON_S)
    assert threading.active_count() == before + 1
    with trimmer.work():
        pass
    trimmer.close()
    assert threading.active_count() == before


def test_without_a_function_that_trims_there_is_no_thread() -> None:
    before = threading.active_count()
    trimmer = HeapTrimmer(None)
    with trimmer.work():
        pass
    assert threading.active_count() == before
    trimmer.close()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_memory_between_what_is_still_used_goes_back_to_the_system() -> None:
    """Blocks are below the size that glibc maps apart. Every 64th stays, so without a trim all memory would stay."""
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

    trim = glibc_trim()
    assert trim is not None
    trim()

    after = psutil.Process().memory_info().rss
    for block in blocks[::64]:
        libc.free(block)
    assert before - after > 0.9 * size * number

"""The native core's threads: asleep when there is nothing to do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vllm_hybrid_sparse import _native

MORE_THAN_CORES = 24


def test_helpers_that_miss_the_end_of_a_session_fall_asleep_all_the_same() -> None:
    """If there are more helpers than cores, whole sessions pass while some helpers have no core."""
    pool = _native.ThreadPool(MORE_THAN_CORES, helpers=_native.Helpers.own)
    memory = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(5000):
        _native.read_bandwidth(pool, memory.data_ptr(), 4096, piece=4096)
    time.sleep(0.3)
    begun_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun_s < 0.25  # a single thread that does not sleep takes 0.5 s


_WITHOUT_THREADS = """
import os, resource
from vllm_hybrid_sparse import _native
if os.geteuid() == 0:
    os.setuid(65534)  # root may start as many as it likes
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try:
    _native.ThreadPool(8, helpers=_native.Helpers.own)
except RuntimeError as error:
    print(error)
"""


def test_threads_that_cannot_be_started_are_an_error_that_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_THREADS], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("num_threads=8: only 1 threads can be started (")


_THROWS = """
import ctypes, resource
from pathlib import Path
import torch
from tests.kernels.served_layer import ServedLayer, Shape
from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.kernels.paged_attention import native
from vllm_hybrid_sparse.values import RetainedSet, SalienceSpec

torch.set_num_threads(2)
native.make_thread_pool = lambda threads: _native.ThreadPool(2, helpers=_native.Helpers.openmp)
layer = ServedLayer(Shape(summary="none"), num_blocks=4, salience=SalienceSpec(), retained=RetainedSet())
request = layer.start()
request.slot = 0
layer.step([(request, 20)], decode=False)
request.slot = 2**28  # states of that many requests: 2 GiB of pointers
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**29, held + 2**29))
try:
    layer.step([(request, 1)])
except MemoryError:
    print("level", ctypes.CDLL(None).omp_get_level())
request.slot = 0
layer.step([(request, 1)])
print("served")
"""


@pytest.mark.skipif(not _native.openmp_is_loaded(), reason="torch's OpenMP is not GNU's here")
def test_an_error_in_a_session_of_borrowed_threads_ends_their_parallel_region() -> None:
    """Otherwise all that the thread computes from then on lies inside that region, and is serial."""
    ended = subprocess.run(
        [sys.executable, "-c", _THROWS], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n") == ["level 0", "served", ""]

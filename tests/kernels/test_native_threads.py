"""The native core's threads: asleep when there is nothing to do."""

import subprocess
import sys
import time

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

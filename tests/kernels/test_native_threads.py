"""The native core's threads: asleep when there is nothing to do."""

import time

import torch

from vllm_hybrid_sparse import _native

MORE_THAN_CORES = 24


def test_helpers_that_miss_the_end_of_a_session_fall_asleep_all_the_same() -> None:
    """With more helpers than cores some are off their core while whole sessions pass."""
    pool = _native.ThreadPool(MORE_THAN_CORES, helpers=_native.Helpers.own)
    memory = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(5000):
        _native.read_bandwidth(pool, memory.data_ptr(), 4096, piece=4096)
    time.sleep(0.3)
    begun_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun_s < 0.25  # one thread alone that does not sleep takes 0.5 s

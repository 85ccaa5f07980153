"""The CPU worker without vLLM's own set-up and without a model."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.memory.heap import HeapTrimmer


def bare_worker(**attributes: Any) -> HybridSparseCPUWorker:
    """A worker that trims no heap, with attributes that its methods need."""
    worker = HybridSparseCPUWorker.__new__(HybridSparseCPUWorker)
    worker._heap = HeapTrimmer(None)
    no_request = np.zeros(0, dtype=np.bool_)
    worker.model_runner = SimpleNamespace(
        input_batch=SimpleNamespace(generators={}), discard_request_mask=SimpleNamespace(np=no_request)
    )
    worker.parallel_config = SimpleNamespace(local_world_size=1, data_parallel_size_local=1, numa_bind=False)
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    for name, value in attributes.items():
        setattr(worker, name, value)
    return worker

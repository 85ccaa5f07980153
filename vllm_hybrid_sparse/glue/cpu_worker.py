"""vLLM's CPU worker over a host store."""

import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.worker import HostStoreWorker
from vllm_hybrid_sparse.memory.heap import HeapTrimmer, glibc_trim


class HybridSparseCPUWorker(HostStoreWorker, CPUWorker):
    """On a machine without a GPU vLLM's own KV memory is the host store, and every page is computed where it lies."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the host store ready, and learn from the runner which requests a step has."""
        super().initialize_from_config(kv_cache_config)
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)
        self._heap = HeapTrimmer(glibc_trim())

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The end of a step. Once a minute what prompts of many lengths left of the heap goes back to the system."""
        output = super().sample_tokens(grammar_output)
        self._heap.tidy(time.monotonic())
        return output

"""vLLM's CPU worker, with the host store made ready before the first request and its use reported."""

import time
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.memory.prefault import prefault
from vllm_hybrid_sparse.runtime.host import host_runtime

logger = init_logger("vllm.hybrid_sparse")


class HybridSparseCPUWorker(CPUWorker):
    """On a machine without a GPU vLLM's own KV memory is the host store, and every page is computed where it lies."""

    def get_kv_cache_spec(self) -> Any:
        """The layers' specs; the backend reads our settings from the current configuration to size a block."""
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV memory, back it with real pages, and say once what the settings became."""
        super().initialize_from_config(kv_cache_config)
        self._runtime = host_runtime(settings_of(self.vllm_config))
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)
        self._interval_s = self._runtime.settings.log_interval_s
        self._next_report = time.monotonic() + self._interval_s
        started = time.monotonic()
        declined = prefault(self.model_runner.kv_caches[0]) if self.model_runner.kv_caches else []
        logger.info("hybrid_sparse: %s", self._runtime.describe())
        logger.info(
            "hybrid_sparse: KV memory ready in %.1f s%s",
            time.monotonic() - started,
            f" (the kernel declined {'; '.join(declined)})" if declined else "",
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step; every log_interval_s with decoding in it, a line on how much of the cache was read.

        Requests that finished or were aborted since the last step, or were preempted for this one, lose their state
        first: one that is resumed, or comes with the same id, begins again.
        """
        self._runtime.requests.release(scheduler_output.finished_req_ids)
        self._runtime.requests.release(scheduler_output.preempted_req_ids or ())
        result = super().execute_model(scheduler_output)
        if self._interval_s and time.monotonic() >= self._next_report:
            self._report()
        return result

    def shutdown(self) -> None:
        """Report what the last interval left."""
        if getattr(self, "_interval_s", 0.0):
            self._report()
        super().shutdown()

    def _report(self) -> None:
        self._next_report = time.monotonic() + self._interval_s
        stats = self._runtime.take_stats()
        if stats.pages_total:
            logger.info("%s", stats.describe())

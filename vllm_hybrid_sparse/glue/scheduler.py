"""vLLM's schedulers, which admit to the running batch only requests that the device pool serves side by side."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.policy.admission import Admission, RequestLength
from vllm_hybrid_sparse.values import PAGE_TOKENS

logger = init_logger("vllm.hybrid_sparse")


class _AdmitsByWorkingSet:
    """Checks each waiting request before vLLM's scheduler looks at it; everything else is vLLM's.

    vLLM asks for `max_num_active_reqs` before each request that it might take from its queues. If the next request's
    working set fits next to those that run, the answer is the number that the user configured. Otherwise it is the
    number that run, which ends vLLM's search. So no request overtakes another, in whichever order vLLM keeps its
    queues. Running requests end or are preempted, and one may always run, so every request gets its turn. A request
    whose prompt is being computed needs no slot yet, but it counts: once it decodes, it would be too late.
    """

    vllm_config: Any  # these are attributes of vLLM's scheduler
    kv_cache_config: Any
    max_model_len: int
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = settings_of(self.vllm_config)
        groups = self.kv_cache_config.kv_cache_groups
        layers = sum(len(group.layer_names) for group in groups)
        self._admission: Admission | None = None
        if settings.device_pool_pages is None:
            logger.info("hybrid_sparse: requests are admitted by vLLM alone: admission needs device_pool_pages on cuda")
            return
        if not layers:
            return
        self._admission = Admission(
            retained=settings.retained,
            selection=None if settings.salience else settings.selection,
            kv_heads=max(group.kv_cache_spec.num_kv_heads for group in groups),
            layer_pages=settings.device_pool_pages // layers,
            resident_pages=int(settings.device_pool_pages * (settings.device_resident_share or 0.0)) // layers,
            block_pages=max(group.kv_cache_spec.block_size for group in groups) // PAGE_TOKENS,
        )
        logger.info(
            "hybrid_sparse: requests are admitted by their working sets: %d pages of a layer for one of %d tokens, and "
            "the device pool has %d",
            self._admission.working_set_pages(self.max_model_len),
            self.max_model_len,
            self._admission.layer_pages,
        )

    @property
    def max_num_active_reqs(self) -> int:
        """How many requests may run, given the request that vLLM would take next."""
        queue = self.kv_holding_waiting or self.waiting
        if not queue or self._admission is None:
            return self._configured_active_reqs
        running = [self._length(request) for request in self.running]
        if self._admission.admits(running, self._length(queue.peek_request())):
            return self._configured_active_reqs
        return min(self._configured_active_reqs, len(running))

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, configured: int) -> None:
        self._configured_active_reqs = configured

    def _length(self, request: Any) -> RequestLength:
        wanted = request.num_prompt_tokens + request.max_tokens
        return RequestLength(request.num_prompt_tokens, min(wanted, self.max_model_len))


class HybridSparseScheduler(_AdmitsByWorkingSet, Scheduler):
    """Admits by working set, in the order of vLLM's synchronous scheduler."""


class HybridSparseAsyncScheduler(_AdmitsByWorkingSet, AsyncScheduler):
    """Admits by working set, in the order of vLLM's asynchronous scheduler."""

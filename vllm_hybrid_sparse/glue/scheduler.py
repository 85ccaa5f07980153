"""vLLM's schedulers, which admit to the running batch only requests that the device pool serves side by side."""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.worker_report import reported_layer_pages
from vllm_hybrid_sparse.policy.admission import Admission, RequestLength
from vllm_hybrid_sparse.values import PAGE_TOKENS

logger = init_logger("vllm.hybrid_sparse")


class HybridSparseScheduler(Scheduler):
    """vLLM's synchronous scheduler, with a check of each waiting request before vLLM looks at it.

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
        """The rule, if the settings say how large the pool is; otherwise the first report of a worker makes it."""
        super().__init__(*args, **kwargs)
        self._admission: Admission | None = None
        pages = settings_of(self.vllm_config).device_pool_pages
        layers = sum(len(group.layer_names) for group in self.kv_cache_config.kv_cache_groups)
        self._awaits_size = bool(layers) and pages is None
        if self._awaits_size:
            logger.info(
                "hybrid_sparse: requests are admitted by vLLM alone until the first step has said how many pages the "
                "device pool got from profiling"
            )
        elif layers:
            assert pages is not None
            self._admit_within(pages // layers)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step's output. The first that says how large the pool is begins admission by working sets."""
        if self._awaits_size and (pages := reported_layer_pages(model_runner_output)) is not None:
            self._awaits_size = False
            self._admit_within(pages)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _admit_within(self, layer_pages: int) -> None:
        """Admit by working sets from now on, in a pool with this many slots for each layer."""
        settings = settings_of(self.vllm_config)
        host_reads_candidates = settings.salience is not None or settings.host_share == "all"
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        self._admission = Admission(
            retained=settings.retained,
            selection=None if host_reads_candidates else settings.selection,
            kv_heads=max(spec.num_kv_heads for spec in specs),
            layer_pages=layer_pages,
            resident_pages=int(layer_pages * (settings.device_resident_share or 0.0)),
            block_pages=max(spec.block_size for spec in specs) // PAGE_TOKENS,
        )
        logger.info(
            "hybrid_sparse: requests are admitted by their working sets: %d pages of a layer for one of %d tokens, and "
            "the device pool has %d",
            self._admission.working_set_pages(self.max_model_len),
            self.max_model_len,
            layer_pages,
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
        return len(running)

    @max_num_active_reqs.setter
    def max_num_active_reqs(self, configured: int) -> None:
        self._configured_active_reqs = configured

    def _length(self, request: Any) -> RequestLength:
        wanted = request.num_prompt_tokens + request.max_tokens
        return RequestLength(request.num_prompt_tokens, min(wanted, self.max_model_len))


class HybridSparseAsyncScheduler(HybridSparseScheduler, AsyncScheduler):
    """Admits by working set, in the order of vLLM's asynchronous scheduler."""

"""vLLM's own scheduler without a model: what it admits, step by step. Every request writes the token 7."""

from collections import deque
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_hybrid_sparse.glue.worker_report import WorkerReport

LAYERS, KV_HEADS = 3, 2
BLOCK_TOKENS = 32


def request(name: str, prompt_tokens: int, answer_tokens: int, priority: int = 0) -> Request:
    """A request that ends after `answer_tokens` tokens."""
    sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
    return Request(name, [3] * prompt_tokens, sampling, None, priority=priority)


class Scheduled:
    """An engine's loop around a scheduler. If asynchronous, it plans a step before the last step's tokens are there."""

    def __init__(self, config: VllmConfig, blocks: int) -> None:
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=KV_HEADS, head_size=16, dtype=torch.float32)
        names = [f"layers.{layer}" for layer in range(LAYERS)]
        config.cache_config.block_size = BLOCK_TOKENS
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(names, spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            log_stats=True,
        )
        self._ahead = 1 if config.scheduler_config.async_scheduling else 0
        self._flying: deque[tuple[SchedulerOutput, set[str]]] = deque()
        self.begun: list[str] = []  # in the order in which they were first scheduled
        self.preempted: list[str] = []
        self.finished: list[str] = []
        self.report: WorkerReport | None = None  # that a worker puts on every step's output

    def add(self, name: str, prompt_tokens: int, answer_tokens: int, priority: int = 0) -> None:
        """Have a request arrive."""
        self.scheduler.add_request(request(name, prompt_tokens, answer_tokens, priority))

    def abort(self, name: str) -> None:
        """Have a client hang up."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[str]:
        """Run one step; return the requests that are running."""
        output = self.scheduler.schedule()
        self.begun += [new.req_id for new in output.scheduled_new_reqs]
        self.preempted += sorted(output.preempted_req_ids or ())
        if output.num_scheduled_tokens:
            whole = {name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk}
            self._flying.append((output, whole))
        if self._flying and (len(self._flying) > self._ahead or not output.num_scheduled_tokens):
            self._land(*self._flying.popleft())
        return [request.request_id for request in self.scheduler.running]

    def _land(self, output: SchedulerOutput, whole: set[str]) -> None:
        """Write a step's tokens: one for each request whose prompt is complete after it."""
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if name in whole else [] for name in names],
        )
        if self.report is not None:
            result = self.report.attach(result)
        for outputs in self.scheduler.update_from_output(output, result).values():
            self.finished += [one.request_id for one in outputs.outputs if one.finish_reason is not None]

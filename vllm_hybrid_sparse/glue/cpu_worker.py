"""vLLM's CPU worker over a host store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm import envs
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.worker import HostStoreWorker, logger
from vllm_hybrid_sparse.kernels.paged_attention.native import lacks_bf16
from vllm_hybrid_sparse.memory.heap import IdleTrimmer, glibc_trim

# What the worker's process has in its environment where the user set nothing.
_ENVIRONMENT = {
    # vLLM has every matrix product keep its code for the 32 numbers of tokens that it met last, and a model has five
    # kinds of product. oneDNN keeps 1024 by itself: ever more pieces of heap between the tensors of prompts, so that it
    # grows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(5 * 32),
    # vLLM's own store of a compiled model cannot be loaded again on CPUs, so that every start would compile anew;
    # without it Inductor's store is used.
    "VLLM_USE_AOT_COMPILE": "0",
}
_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def prepare_environment() -> None:
    """Set what vLLM, torch and oneDNN read when the model is loaded, compiled and first run.

    Inductor's store goes beside vLLM's other ones, and so outlives the system's temporary directory, which is where it
    would be; the user's choice of another place is left.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    temporary = default_cache_dir()
    if os.environ.get(_INDUCTOR_CACHE, temporary) == temporary:  # torch writes its own choice there, too
        os.environ[_INDUCTOR_CACHE] = str(Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache", "inductor"))


@contextmanager
def without_seeds(model_runner: Any) -> Iterator[None]:
    """Keep the generators of requests in the middle of their prompts away from vLLM's runner."""
    batch = model_runner.input_batch
    discarded = model_runner.discard_request_mask.np
    kept = {row: batch.generators.pop(row) for row in list(batch.generators) if discarded[row]}
    try:
        yield
    finally:
        batch.generators.update(kept)


class HybridSparseCPUWorker(HostStoreWorker, CPUWorker):
    """On a machine without a GPU vLLM's own KV memory is the host store, and every page is computed where it lies."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare_environment()
        super().__init__(*args, **kwargs)
        self._heap = IdleTrimmer(glibc_trim())

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the host store ready, and learn from the runner which requests a step has."""
        super().initialize_from_config(kv_cache_config)
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)
        if self.model_config.dtype == torch.bfloat16 and lacks_bf16():
            logger.info(
                "hybrid_sparse: this CPU has no bfloat16 instructions, which makes prompts and steps of several "
                "requests slow; --dtype float32 avoids that, and --kv-cache-dtype bfloat16 beside it keeps the KV "
                "cache as small as it is"
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass of one step; when steps rest, what prompts left of the heap goes back to the system."""
        with self._heap.work():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The end of a step, without the seeds of requests whose prompts it has not computed to their ends.

        vLLM draws a token for them, too, throws it away, and turns the generator of a seeded one back, which a CPU's
        cannot be: the engine would end. Without its generator there is nothing to turn back, and the first token that
        counts is drawn as on a GPU.
        """
        with without_seeds(self.model_runner):
            return super().sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """End what the worker began."""
        self._heap.close()
        super().shutdown()

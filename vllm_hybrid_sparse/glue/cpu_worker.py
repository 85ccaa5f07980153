"""vLLM's CPU worker over a host store."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm import envs
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.environment import give
from vllm_hybrid_sparse.glue.worker import HostStoreWorker, logger
from vllm_hybrid_sparse.kernels.paged_attention.native import lacks_bf16
from vllm_hybrid_sparse.memory.heap import HeapTrimmer, glibc_trim
from vllm_hybrid_sparse.memory.huge_pages import gather_resident
from vllm_hybrid_sparse.memory.pinned import available_bytes, host_store_bytes
from vllm_hybrid_sparse.runtime.cores import usable_cores

# Variables that the worker's process gets unless the user set them.
_ENVIRONMENT = {
    # In vLLM each matrix product keeps its code for the last 32 numbers of tokens that it met, and a model has five
    # kinds of product. oneDNN's own default is to keep 1024: it would leave more and more pieces of heap between the
    # tensors of prompts, so the heap would grow.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(5 * 32),
    # On CPUs vLLM cannot load its own store of a compiled model again, so every start would compile anew. Without that
    # store, Inductor's is used.
    "VLLM_USE_AOT_COMPILE": "0",
}
_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def prepare_environment() -> None:
    """Set the variables that vLLM, torch and oneDNN read when the model is loaded, compiled and first run.

    By default Inductor's store lies in the system's temporary directory. It goes next to vLLM's other stores instead,
    so that it lasts longer. If the user chose another place for it, that stays.
    """
    for name, value in _ENVIRONMENT.items():
        if name not in os.environ:
            give(name, value)
    temporary = default_cache_dir()
    if os.environ.get(_INDUCTOR_CACHE, temporary) == temporary:  # torch writes its own default there
        give(_INDUCTOR_CACHE, str(Path(envs.VLLM_CACHE_ROOT, "torch_compile_cache", "inductor")))


@contextmanager
def without_seeds(model_runner: Any) -> Iterator[None]:
    """Hide from vLLM's runner the random generators of requests whose prompts are not finished."""
    batch = model_runner.input_batch
    discarded = model_runner.discard_request_mask.np
    kept = {row: batch.generators.pop(row) for row in list(batch.generators) if discarded[row]}
    try:
        yield
    finally:
        batch.generators.update(kept)


class HybridSparseCPUWorker(HostStoreWorker, CPUWorker):
    """The worker on a machine without a GPU: vLLM's own KV memory is the host store, and pages are read in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare_environment()
        super().__init__(*args, **kwargs)
        self._heap = HeapTrimmer(glibc_trim())

    def determine_available_memory(self) -> int:
        """Return the bytes of the host store. ConfigError if the engine's workers together asked for too many.

        vLLM checks each worker's by itself. Here too nothing needs to stay, so that one worker may still fill a small
        machine. Other engines of the machine may have taken theirs already, so only this engine's workers count.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        if asked is not None:
            host_store_bytes(asked, available_bytes(), self.parallel_config.local_world_size, left_bytes=0)
        store: int = super().determine_available_memory()
        return store

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the host store ready, and learn from the runner which requests a step has."""
        self._gather_weights()
        super().initialize_from_config(kv_cache_config)
        self._runtime.requests.follow(lambda: self.model_runner.input_batch.req_ids)
        if self.model_config.dtype == torch.bfloat16 and lacks_bf16():
            logger.info(
                "hybrid_sparse: this CPU has no bfloat16 instructions, which makes prompts and steps of several "
                "requests slow; --dtype float32 avoids that, and --kv-cache-dtype bfloat16 beside it keeps the KV "
                "cache as small as it is"
            )

    def _gather_weights(self) -> None:
        """Gather the model's weights into huge pages, with all else that the process has in use before its KV cache."""
        trim = glibc_trim()
        if trim is not None:
            trim()  # first: a piece that is free in part would fall apart when that part is given back later
        started = time.monotonic()
        gathered = gather_resident(usable_cores())
        logger.info(
            "hybrid_sparse: weights and what else is in use: %.2f GiB in huge pages after %.1f s%s",
            gathered.bytes / 2**30,
            time.monotonic() - started,
            f" (the kernel declined {gathered.declined / 2**30:.2f} GiB)" if gathered.declined else "",
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step's forward pass.

        Heap memory that prompts left free goes back to the system once steps rest, or behind a step once it has grown.
        """
        with self._heap.work():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step, hiding the generators of seeded requests whose prompts are not finished.

        vLLM draws a token for such a request too, discards it, and turns the request's generator back. A CPU generator
        cannot be turned back, so the engine would end. Without the generator there is nothing to turn back, and the
        first token that counts is drawn as on a GPU.
        """
        with without_seeds(self.model_runner):
            return super().sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """Stop the heap trimmer, then vLLM's worker."""
        self._heap.close()
        super().shutdown()

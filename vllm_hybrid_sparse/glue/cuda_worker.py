"""vLLM's GPU worker over a host store, with either of its model runners."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.worker import HostStoreWorker, local_workers, one_of_each_storage
from vllm_hybrid_sparse.memory.pinned import available_bytes, host_store_bytes, pin, unpin
from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers
from vllm_hybrid_sparse.runtime.host import host_runtime

logger = init_logger("vllm.hybrid_sparse")


class HybridSparseCUDAWorker(HostStoreWorker, Worker):
    """The KV cache lies in pinned host memory; what the model leaves of the GPU's memory is the pool of page slots.

    With tensor parallelism each worker has the host store, the pool and the host threads of its own KV heads.
    """

    _pool_bytes = 0  # of GPU memory for the pool, once it was profiled
    _pinned: tuple[torch.Tensor, ...] = ()  # one of each memory that is pinned

    def determine_available_memory(self) -> int:
        """Bytes of the host store, by which vLLM counts its blocks; what profiling leaves of the GPU is the pool's.

        Where the settings number the pool's pages nothing needs to be measured, and vLLM only runs the model once.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        available = available_bytes()
        store = host_store_bytes(asked, available, local_workers(self.parallel_config))
        with set_current_vllm_config(self.vllm_config):
            runtime = host_runtime(settings_of(self.vllm_config))
        pages = runtime.settings.device_pool_pages
        left = self._memory_left(measured=pages is None, store=store)
        working = self._working_bytes()
        self._pool_bytes = max(0, left - working)
        logger.info(
            "hybrid_sparse: %.1f GiB of host memory for the KV cache%s; on the GPU %s for the pool, %.1f GiB for steps",
            store / 2**30,
            "" if asked else f" (of {available / 2**30:.1f} GiB available; --kv-cache-memory-bytes gives another size)",
            f"{self._pool_bytes / 2**30:.1f} GiB" if pages is None else f"device_pool_pages={pages}",
            working / 2**30,
        )
        return store

    def _working_bytes(self) -> int:
        """Bytes of GPU memory that a step takes beside the pool; all layers have one shape."""
        layers = self._layers()
        if not layers:
            return 0
        impl, tokens = layers[0].impl, self.vllm_config.scheduler_config.max_num_batched_tokens
        return CudaLayers.working_bytes(impl.num_heads, impl.num_kv_heads, impl.head_size, impl.stored_dtype, tokens)

    def _memory_left(self, *, measured: bool, store: int) -> int:
        """Bytes of GPU memory that the model leaves, as vLLM profiles it; 0 where they are not to be measured."""
        asked = self.cache_config.kv_cache_memory_bytes
        self.cache_config.kv_cache_memory_bytes = None if measured else store  # with it vLLM does not profile
        try:
            left: int = super().determine_available_memory()
        finally:
            self.cache_config.kv_cache_memory_bytes = asked
        # By which vLLM would advise a --kv-cache-memory-bytes later, of GPU memory.
        self.__dict__.pop("peak_activation_memory", None)
        return left if measured else 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the host store, pin it, and open the pool."""
        with allocated_on_host(v2=self.use_v2_model_runner):
            super().initialize_from_config(kv_cache_config)

    def open_device(self, kv_caches: list[torch.Tensor]) -> None:
        """Pin the host store, and make the pool and what attends to it."""
        for kv_cache in one_of_each_storage(kv_caches):
            pin(kv_cache)
            self._pinned = (*self._pinned, kv_cache)
        self._runtime.open_device(
            kv_caches,
            self._attentions(),
            device=self.device,
            device_bytes=self._pool_bytes,
            captures=self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE,  # not --enforce-eager
        )

    def compile_or_warm_up_model(self) -> Any:
        """Also what long contexts alone launch: the first of them would wait for Triton otherwise."""
        times = super().compile_or_warm_up_model()
        layers = self._runtime.cuda_layers
        if layers is not None:
            started = time.monotonic()
            try:
                layers.warm_up()
            except Exception as error:  # noqa: BLE001 - Triton's have no other base, and requests can do without
                logger.warning("hybrid_sparse: kernels are compiled when they are first needed (%s)", error)
            else:
                logger.info("hybrid_sparse: kernels for long contexts ready in %.1f s", time.monotonic() - started)
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """The forward pass of one step, with the block tables of its requests in host memory."""
        mirror = self._runtime.blocks
        follow(mirror, scheduler_output)
        layers = self._runtime.cuda_layers
        copies = scheduler_output.kv_cache_block_copies or ()
        if layers is not None:  # runner V2 copies only what lies on its device; V1 does the same again, to no effect
            layers.copy_blocks([(copy.src_block_id, copy.dst_block_id) for copy in copies])
        with mirror.step(self._batch_ids):
            return super().execute_model(scheduler_output)

    def _batch_ids(self, order: Any) -> Sequence[str]:
        """The requests of the step, in the order of its rows; `order` is runner V2's, as indices of its states."""
        if not self.use_v2_model_runner:
            ids: Sequence[str] = self.model_runner.input_batch.req_ids
            return ids
        names = self.model_runner.req_states.index_to_req_id
        return [names[int(index)] for index in order]

    def shutdown(self) -> None:
        """End the tier's threads, and give the pinned memory back."""
        super().shutdown()
        for kv_cache in self._pinned:
            unpin(kv_cache)
        self._pinned = ()


@contextmanager
def allocated_on_host(*, v2: bool) -> Iterator[None]:
    """Have vLLM allocate KV caches as it does, views and all, but in CPU memory.

    Both runners call one function of vLLM with the device to allocate on; meanwhile it gets another.
    """
    if v2:
        from vllm.v1.worker.gpu import attn_utils as module  # noqa: PLC0415  (the one that is used, and no other)
    else:
        from vllm.v1.worker import gpu_model_runner as module  # noqa: PLC0415
    allocate = module.allocate_kv_cache

    def allocate_on_host(kv_cache_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return allocate(kv_cache_config, torch.device("cpu"), *args, **kwargs)

    module.allocate_kv_cache = allocate_on_host
    try:
        yield
    finally:
        module.allocate_kv_cache = allocate


def follow(mirror: Any, scheduler_output: Any) -> None:
    """Tell the mirror of block tables what the scheduler says of a step."""
    mirror.drop(scheduler_output.finished_req_ids)
    mirror.drop(scheduler_output.preempted_req_ids or ())
    for new in scheduler_output.scheduled_new_reqs:
        mirror.start(new.req_id, new.block_ids[0])
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if block_ids is None:
            continue
        if request_id in cached.resumed_req_ids:
            mirror.start(request_id, block_ids[0])
        else:
            mirror.extend(request_id, block_ids[0])

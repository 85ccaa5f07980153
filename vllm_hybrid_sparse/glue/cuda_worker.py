"""vLLM's GPU worker over a host store, with either of its model runners."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_hybrid_sparse.glue.agreement import least_of
from vllm_hybrid_sparse.glue.local_workers import bound_with, local_workers
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.worker import HostStoreWorker, one_of_each_storage
from vllm_hybrid_sparse.kernels.fallbacks import count_fallback
from vllm_hybrid_sparse.memory.pinned import available_bytes, host_store_bytes, node_available_bytes, pin, unpin
from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers
from vllm_hybrid_sparse.runtime.host import host_runtime

logger = init_logger("vllm.hybrid_sparse")


class HybridSparseCUDAWorker(HostStoreWorker, Worker):
    """Keeps the KV cache in pinned host memory, and the pool of page slots in the GPU memory that the model leaves.

    With tensor parallelism each worker has the host store, the pool and the host threads of its own KV heads.
    """

    # Bytes of host memory that were available before any worker of this server took its own, of the machine (None) and
    # of each NUMA node that vLLM binds a worker's memory to.
    _available_first: Mapping[int | None, int] = {}
    _pool_bytes = 0  # of GPU memory for the pool, once vLLM has profiled it
    _pinned: tuple[torch.Tensor, ...] = ()  # one for each storage that is pinned

    def init_device(self) -> None:
        """Measure the host memory while all workers are still starting, then initialise the device."""
        nodes = (self.parallel_config.numa_bind_nodes or ()) if self.parallel_config.numa_bind else ()
        self._available_first = {place: self._available(place) or 0 for place in (None, *nodes)}
        super().init_device()

    @staticmethod
    def _available(node: int | None) -> int | None:
        """Bytes of host memory that may be taken now, of the machine (None) or of a NUMA node; None if unknown."""
        return available_bytes() if node is None else node_available_bytes(node)

    def determine_available_memory(self) -> int:
        """Return the bytes of the host store, from which vLLM counts its blocks.

        The pool gets what profiling leaves of the GPU, less what steps take. If the settings give the pool's pages,
        nothing needs to be measured, and vLLM only runs the model once.
        """
        asked = self.cache_config.kv_cache_memory_bytes
        store, available = self._store_bytes(asked)
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

    def _store_bytes(self, asked: int | None) -> tuple[int, int]:
        """Bytes of the host store, and of the memory that it is a part of: the machine's, or a NUMA node's if bound.

        An engine's own workers come here together, those of data-parallel ranks at times of their own. So what was
        asked for must fit for the former now, and for all of them where the start left it.
        """
        config = self.parallel_config
        places: list[tuple[int | None, int, int]] = [(None, int(config.local_world_size), local_workers(config))]
        bound = bound_with(config, self.local_rank)
        if bound is not None:
            places.append((bound.node, bound.engine_workers, bound.workers))
        sizes = []
        for node, engine_workers, workers in places:
            available = self._available(node)
            if available is None:  # a node of which the system says nothing
                continue
            if asked is not None:
                host_store_bytes(asked, available, engine_workers, node=node)
                available = max(available, self._available_first.get(node, 0))
            sizes.append((host_store_bytes(asked, available, workers, node=node), available))
        return min(sizes)

    def _working_bytes(self) -> int:
        """Bytes of GPU memory that a step takes in addition to the pool. All layers have one shape."""
        layers = self._layers()
        if not layers:
            return 0
        impl, tokens = layers[0].impl, self.vllm_config.scheduler_config.max_num_batched_tokens
        return CudaLayers.working_bytes(impl.num_heads, impl.num_kv_heads, impl.head_size, impl.stored_dtype, tokens)

    def _memory_left(self, *, measured: bool, store: int) -> int:
        """Bytes of GPU memory that the model leaves, as vLLM profiles it; 0 if not `measured`."""
        asked = self.cache_config.kv_cache_memory_bytes
        self.cache_config.kv_cache_memory_bytes = None if measured else store  # if set, vLLM does not profile
        try:
            left: int = super().determine_available_memory()
        finally:
            self.cache_config.kv_cache_memory_bytes = asked
        # From it vLLM would later suggest a --kv-cache-memory-bytes, meaning GPU memory.
        self.__dict__.pop("peak_activation_memory", None)
        return left if measured else 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the host store, pin it, and open the pool."""
        with allocated_on_host(v2=self.use_v2_model_runner):
            super().initialize_from_config(kv_cache_config)

    def open_device(self, kv_caches: list[torch.Tensor]) -> None:
        """Pin the host store, and make the pool and the device that attends to it."""
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
        """Warm up vLLM, and our kernels at its end.

        Nobody reads the outputs of vLLM's own warm-up, so nothing is reported on them. All workers have their pools by
        now, so they settle here what the scheduler is told.
        """
        reports, self._reports = self._reports, False
        times = super().compile_or_warm_up_model()
        self._reports = reports
        tier = self._runtime.device_tier
        if tier is not None and tier.settings.device_pool_pages is None:
            groups = get_tp_group().cpu_group, get_pp_group().cpu_group
            self._layer_pages = least_of(tier.layer_pages, groups)
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """Warm up our kernels, whether vLLM's own warm-up has launched them or not: requests would wait for Triton.

        vLLM calls this when its own warm-up has ended. From then on it may warn of every compilation, or raise.
        """
        layers = self._runtime.cuda_layers
        if layers is not None:
            started = time.monotonic()
            try:
                layers.warm_up()
            except Exception as error:  # noqa: BLE001 - Triton's have no other base, and requests can do without
                count_fallback("warm_up")
                logger.warning("hybrid_sparse: kernels are compiled when they are first needed (%s)", error)
            else:
                logger.info("hybrid_sparse: kernels for long contexts ready in %.1f s", time.monotonic() - started)
        super()._maybe_activate_jit_monitor()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass of one step, with its requests' block tables mirrored in host memory."""
        mirror = self._runtime.blocks
        follow(mirror, scheduler_output)
        layers = self._runtime.cuda_layers
        copies = scheduler_output.kv_cache_block_copies or ()
        if layers is not None:  # runner V2 copies only caches on its device; V1 repeats our copies, to no effect
            layers.copy_blocks([(copy.src_block_id, copy.dst_block_id) for copy in copies])
        with mirror.step(self._batch_ids):
            return super().execute_model(scheduler_output)

    def _batch_ids(self, order: Any) -> Sequence[str]:
        """The step's requests, in the order of its rows. `order` is runner V2's, as indices into its states."""
        if not self.use_v2_model_runner:
            ids: Sequence[str] = self.model_runner.input_batch.req_ids
            return ids
        names = self.model_runner.req_states.index_to_req_id
        return [names[int(index)] for index in order]

    def shutdown(self) -> None:
        """End the device tier's threads, and unpin the host store."""
        super().shutdown()
        for kv_cache in self._pinned:
            unpin(kv_cache)
        self._pinned = ()


@contextmanager
def allocated_on_host(*, v2: bool) -> Iterator[None]:
    """Make vLLM allocate its KV caches, views included, in CPU memory.

    Both runners pass the device to one allocating function of vLLM. Inside this context it gets the CPU instead.
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
    """Update the mirrored block tables from the scheduler's output for a step."""
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

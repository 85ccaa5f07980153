"""Workers whose KV cache lies in host memory: they make it ready before the first request, and report its use."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerBase

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.backend import HybridSparseBackend
from vllm_hybrid_sparse.glue.impl import HybridSparseImpl
from vllm_hybrid_sparse.glue.local_workers import gpus_on_cores, local_workers
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.glue.support import cutting_window
from vllm_hybrid_sparse.glue.worker_report import WorkerReport
from vllm_hybrid_sparse.kernels.fallbacks import take_fallbacks
from vllm_hybrid_sparse.memory.call_frames import with_frame_room
from vllm_hybrid_sparse.memory.prefault import prefault
from vllm_hybrid_sparse.metrics import DecodeStats, Interval, TierStats
from vllm_hybrid_sparse.runtime.cores import usable_cores
from vllm_hybrid_sparse.runtime.host import begin_engine, host_runtime
from vllm_hybrid_sparse.runtime.loaded_blocks import LoadedBlocks

logger = init_logger("vllm.hybrid_sparse")


class ReportedOutput(AsyncModelRunnerOutput):
    """The promise of a step's output, as runner V2 and async scheduling return it, with the report that goes along."""

    def __init__(self, output: AsyncModelRunnerOutput, report: WorkerReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step's tokens, and attach the report."""
        return self._report.attach(self._output.get_output())


class HostStoreWorker(WorkerBase):
    """A mixin to put before one of vLLM's workers, which does all the rest."""

    _connected = False  # whether a KV connector is configured
    _ready = False  # whether there is a KV cache, and so something to report
    _reports = False  # whether outputs of steps carry reports
    _late: tuple[DecodeStats, TierStats | None] = (DecodeStats(), None)  # taken, not yet reported
    _layer_pages: int | None = None  # the pool's slots for a layer, if the scheduler has to be told

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model. Its layers share nothing with those of an earlier engine in this process.

        Raises ConfigError for a model that chooses its attention backend itself.
        """
        begin_engine(local_workers(self.parallel_config), gpus_on_cores(self.parallel_config))
        super().load_model(load_dummy_weights=load_dummy_weights)
        for name, layer in get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase).items():
            if not isinstance(layer, MambaBase):
                _refuse_own_choice(name, layer)
        for layer in get_layers_from_vllm_config(self.vllm_config, Attention).values():
            # A layer whose window never cuts is one that sees everything, and shares their blocks and block tables.
            layer.sliding_window = cutting_window(layer.sliding_window, self.vllm_config)

    def get_kv_cache_spec(self) -> Any:
        """The layers' specs. To size a block, the backend reads our settings from the current configuration."""
        with set_current_vllm_config(self.vllm_config):
            return super().get_kv_cache_spec()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV memory, back it with real pages, and say once what the settings became."""
        super().initialize_from_config(kv_cache_config)
        started = time.monotonic()
        self._runtime = host_runtime(settings_of(self.vllm_config))
        self._connected = self.vllm_config.kv_transfer_config is not None
        self._logs = self._runtime.settings.log_interval_s > 0
        self._interval = Interval(self._runtime.settings.log_interval_s)
        for layer in self._layers():
            layer.impl.lay_out(layer.kv_cache.shape[2])
        self._reports = self.vllm_config.ec_transfer_config is None
        if not self._reports:
            logger.warning("hybrid_sparse: no metrics beside an encoder cache connector, whose channel they take")
        kv_caches = self.kv_caches()
        self._host_kv_bytes = _bytes_of(kv_caches)
        self._ready = True
        declined = prefault(kv_caches[0], usable_cores()) if kv_caches else []
        self.open_device(kv_caches)
        logger.info("hybrid_sparse: %s", self._runtime.describe())
        logger.info(
            "hybrid_sparse: KV memory ready in %.1f s%s",
            time.monotonic() - started,
            f" (the kernel declined {'; '.join(declined)})" if declined else "",
        )

    def kv_caches(self) -> list[torch.Tensor]:
        """The KV memory of every attention layer, [blocks, kv_heads, block_tokens, state_content]."""
        return [layer.kv_cache for layer in self._layers()]

    def open_device(self, kv_caches: list[torch.Tensor]) -> None:
        """Make the device tier, if the settings ask for one."""
        self._runtime.open_device(kv_caches, self._attentions())

    @with_frame_room
    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass of one step.

        First, requests that finished or were aborted since the last step, or were preempted for this one, lose their
        state. A request that is resumed, or comes with the same id, begins again.
        """
        self._runtime.requests.release(scheduler_output.finished_req_ids)
        self._runtime.requests.release(scheduler_output.preempted_req_ids or ())
        self._runtime.loaded_blocks = self._loaded_blocks(scheduler_output) if self._connected else None
        if self._runtime.device_tier is not None:
            self._runtime.device_tier.forget_blocks(self._blocks_written_elsewhere(scheduler_output))
        return super().execute_model(scheduler_output)

    @with_frame_room
    def sample_tokens(self, grammar_output: Any) -> Any:
        """End a step: return its tokens, with a report of what was read for them.

        For every log_interval_s with decoding in it, lines in the log say the same. A step that computes prompts alone
        has nothing to report but the size of a pool that the scheduler does not know from the settings.
        """
        output = super().sample_tokens(grammar_output)
        stats, tiers = self._take_stats()
        if not stats.rows:
            self._late = stats, tiers
            return output if self._layer_pages is None else self._reported(output, DecodeStats(), None)
        now_s = time.monotonic()
        if self._logs and self._interval.due(now_s):
            self._write_lines()  # without this step: the time before it may have been idle
        self._interval.add(stats, tiers, now_s)
        return self._reported(output, stats, tiers)

    def _reported(self, output: Any, stats: DecodeStats, tiers: TierStats | None) -> Any:
        """The output with a report, if it is a step's final output or the promise of it, and reports are possible."""
        if not self._reports:
            return output
        if isinstance(output, AsyncModelRunnerOutput):
            return ReportedOutput(output, self._report(stats, tiers))
        return self._report(stats, tiers).attach(output) if isinstance(output, ModelRunnerOutput) else output

    def _take_stats(self) -> tuple[DecodeStats, TierStats | None]:
        """What was read since the last report, including what a device said in a step without decode rows."""
        stats, tiers = self._runtime.take_stats(), self._runtime.take_tier_stats()
        (late_stats, late_tiers), self._late = self._late, (DecodeStats(), None)
        if tiers is not None and late_tiers is not None:
            tiers = tiers + late_tiers
        return stats + late_stats, tiers

    def _loaded_blocks(self, scheduler_output: Any) -> LoadedBlocks | None:
        """The cached blocks of requests that begin or resume in this step: a KV connector may have loaded them.

        Blocks that were cached here are among them; summarising those again changes nothing.
        """
        cached = scheduler_output.scheduled_cached_reqs
        begun = [(new.block_ids, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        begun += [
            (block_ids, computed)
            for req_id, block_ids, computed in zip(
                cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
            if req_id in cached.resumed_req_ids and block_ids is not None
        ]
        block_tokens = self.vllm_config.cache_config.block_size
        return LoadedBlocks.of(block_ids[0][: -(-computed // block_tokens)] for block_ids, computed in begun)

    def _blocks_written_elsewhere(self, scheduler_output: Any) -> list[int]:
        """Blocks that something other than the layers writes in this step: a KV connector's load, a copy or zeroing."""
        loaded = self._runtime.loaded_blocks
        blocks = set() if loaded is None else set(loaded.blocks.tolist())
        blocks.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
        blocks.update(scheduler_output.new_block_ids_to_zero or ())
        return sorted(blocks)

    def _layers(self) -> list[Any]:
        """vLLM's attention layers that are ours, in the model's order."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        return [layer for layer in layers if isinstance(getattr(layer, "impl", None), HybridSparseImpl)]

    def _attentions(self) -> list[Any]:
        """The kernels of these layers."""
        return [layer.impl.attention for layer in self._layers()]

    def shutdown(self) -> None:
        """Log the rest of the last interval, and end the device tier's threads."""
        if self._ready and self._logs:
            self._write_lines()
        if self._ready:
            self._runtime.close()
        super().shutdown()

    def failed_loads(self) -> int:
        """How many loads to the device have failed since the start. The host attended to their pages."""
        tier = self._runtime.device_tier
        return 0 if tier is None else tier.failures

    def _report(self, stats: DecodeStats, tiers: TierStats | None) -> WorkerReport:
        return WorkerReport(
            decode=stats,
            tiers=tiers,
            host_kv_bytes=self._host_kv_bytes,
            packed_bytes=self._runtime.packed_bytes,
            isa=self._runtime.isa,
            threads=self._runtime.pool.size,
            thread_pool=self._runtime.helpers,
            layer_pages=self._layer_pages,
            fallbacks=take_fallbacks(),
        )

    def _write_lines(self) -> None:
        for line in self._interval.take(self._runtime.packed_bytes):
            logger.info("%s", line)


def one_of_each_storage(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor for each storage, however many tensors share it."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors; a shared storage counts once."""
    return sum(tensor.untyped_storage().nbytes() for tensor in one_of_each_storage(tensors))


def _refuse_own_choice(name: str, layer: AttentionLayerBase) -> None:
    """Refuse a layer whose backend the model chose itself, or whose values differ in size from keys (MiMo-V2's).

    layer   of any class that has keys to attend to: some models have a class of their own beside vLLM's Attention
    """
    backend = layer.get_attn_backend()
    if backend is not HybridSparseBackend:
        raise ConfigError(
            f"{name}: the model has it attend by {backend.__name__}, beside which hybrid_sparse is not supported"
        )
    if isinstance(layer, Attention) and layer.head_size_v != layer.head_size:
        rule = f"values of another size than keys ({layer.head_size}) are not supported"
        raise ConfigError(f"head_size_v={layer.head_size_v}: {rule} (attention backend hybrid_sparse)")

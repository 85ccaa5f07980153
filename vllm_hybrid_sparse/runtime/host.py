"""The host tier of one worker process: one thread pool, one kernel per layer shape, and their statistics."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.fluxion.native import fluxion_layer, native_predictor
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, make_thread_pool, native_selection
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.predictor.choice import choose_predictor
from vllm_hybrid_sparse.predictor.model import ModelShape
from vllm_hybrid_sparse.runtime.block_mirror import BlockMirror
from vllm_hybrid_sparse.runtime.cores import default_threads, helper_cpus, usable_cores
from vllm_hybrid_sparse.runtime.launch_graphs import CudaCapture
from vllm_hybrid_sparse.runtime.loaded_blocks import LoadedBlocks
from vllm_hybrid_sparse.runtime.requests import RequestSlots
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import CODE_BITS, SPLIT_HEAD_DIM, SelectionSpec

if TYPE_CHECKING:
    from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers

logger = logging.getLogger(__name__)


class _Engine:
    """What is known about the engine that this process is making."""

    local_workers = 1  # on this machine
    # GPUs whose workers are bound to the same cores as this one; None: it is not bound.
    gpus_on_cores: int | None = None


class HostRuntime:
    """Made once per engine from the settings; layers of one shape share a kernel and its scratch memory."""

    def __init__(
        self,
        settings: HybridSparseConfig,
        local_workers: int = 1,
        gpus_on_cores: int | None = None,
        *,
        common_keys: bool = True,
    ) -> None:
        """No layer is known yet.

        local_workers, gpus_on_cores   of the engine on this machine, as `default_threads` needs them
        common_keys                    whether kernels may subtract what keys have in common; never beside a device
        """
        self.settings = settings
        self._common_keys = common_keys and settings.device == "none"  # a device writes pages without their sequence
        self.selection = native_selection(settings.selection, settings.retained)
        self.everything = native_selection(SelectionSpec(), settings.retained)  # for layers with a sliding window
        threads = settings.num_threads or default_threads(settings.device, local_workers, gpus_on_cores)
        if settings.num_threads > (cores := len(usable_cores())):
            logger.warning(
                "hybrid_sparse.num_threads=%d: more than the %d cores there are, where they wait for each other",
                threads,
                cores,
            )
        helpers = settings.thread_pool
        if helpers == "auto":
            has_team = settings.device != "cuda" and _native.openmp_is_loaded() and threads <= torch.get_num_threads()
            helpers = "openmp" if has_team else "own"
        elif helpers == "openmp" and not _native.openmp_is_loaded():
            raise ConfigError("hybrid_sparse.thread_pool='openmp': GNU OpenMP is not loaded: must be auto or own")
        self.pool = make_thread_pool(threads, helpers=helpers, cpus=helper_cpus(threads))
        # Blocks of the current step's requests that a KV connector may have written. The worker sets it, and each layer
        # summarises them before it attends.
        self.loaded_blocks: LoadedBlocks | None = None
        self.requests = RequestSlots()
        self.blocks = BlockMirror()  # for a CUDA device; its worker keeps it up to date
        self.device_tier: DeviceTier | None = None  # once `open_device` has made it
        self.cuda_layers: CudaLayers | None = None  # likewise, for a CUDA device
        self._hgca_layers: list[_native.HgcaLayer] = []
        self._predictor: tuple[_native.HeadPredictor, float] | None = None  # with tau, the error that it was made for
        self._attention: dict[tuple[torch.dtype, int, int, int, int, float, int], NativeAttention] = {}
        self._layers = self._windowed = 0  # attention layers; of these, layers with a sliding window

    def attention(
        self,
        *,
        dtype: torch.dtype,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        scale: float,
        sliding_window: int = 0,
    ) -> NativeAttention:
        """The kernel for one more layer of this shape; with a sliding window it keeps no summaries."""
        self._layers += 1
        self._windowed += sliding_window > 0
        shape = (dtype, num_q_heads, num_kv_heads, head_dim, block_tokens, scale, sliding_window)
        if shape not in self._attention:
            self._attention[shape] = NativeAttention(
                dtype=dtype,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_tokens=block_tokens,
                scale=scale,
                summary="none" if sliding_window else self._summary(head_dim),
                sliding_window=sliding_window,
                code_bits=self.settings.page_code_bits,
                common_keys=self._common_keys,
                isa=self.settings.isa,
                pool=self.pool,
            )
        return self._attention[shape]

    def _summary(self, head_dim: int) -> str:
        """The kind of summary that the kernel for heads of this size keeps; for Fluxion two-bit codes are split."""
        settings = self.settings
        splits = settings.page_summary == "key_codes" and settings.code_bits == CODE_BITS[-1]
        if settings.prediction is not None and splits and head_dim % SPLIT_HEAD_DIM == 0:
            return "split_codes"
        return settings.page_summary

    @property
    def keeps_request_state(self) -> bool:
        """Whether the policy keeps state per request in addition to the KV cache, so that batches need `slots`."""
        return self.settings.salience is not None or self.settings.prediction is not None

    def hgca_layer(self, attention: NativeAttention) -> _native.HgcaLayer | None:
        """One layer's HGCA states, by the slots of `requests`; None under another policy."""
        if self.settings.salience is None:
            return None
        layer = attention.hgca_layer(self.settings.salience, self.settings.retained)
        self._hgca_layers.append(layer)
        self.requests.attach(layer)
        return layer

    @property
    def isa(self) -> str:
        """The instruction set that the kernels run on."""
        return ", ".join(sorted({attention.isa for attention in self._attention.values()}))

    def _prefix_sharers(self) -> int:
        """From how many requests on a selecting row attends exactly to what they begin with; 0: never."""
        if self.settings.device != "none":
            return 0
        return max((each.prefix_sharers(self.settings.selection) for each in self._attention.values()), default=0)

    @property
    def helpers(self) -> str:
        """Whose threads help: own or openmp."""
        return "openmp" if self.pool.helpers == _native.Helpers.openmp else "own"

    @property
    def packed_bytes(self) -> int:
        """Bytes that HGCA's packed copies hold now."""
        return sum(layer.packed_bytes for layer in self._hgca_layers)

    def use_model(self, shape: ModelShape) -> None:
        """Read the predictor if the policy has one. Call it before `fluxion_layer`; later calls do nothing.

        raises   ConfigError if no predictor serves a model of this shape with these settings
        """
        if self.settings.prediction is not None and self._predictor is None:
            predictor, origin = choose_predictor(self.settings.prediction, shape, self.settings.retained)
            if origin.unread_attributed > self.settings.selection.attributed:
                logger.warning(
                    "hybrid_sparse.unread_attributed=%s: the predictor's budgets count on %s, so more than tau=%s may "
                    "be lost; make one with `hybrid-sparse calibrate --unread-attributed`",
                    self.settings.selection.attributed,
                    origin.unread_attributed,
                    origin.tau,
                )
            self._predictor = native_predictor(predictor), origin.tau

    def fluxion_layer(self, layer: int) -> _native.FluxionLayer | None:
        """One layer's Fluxion states, by the slots of `requests`; `layer` counts from 0. None under another policy."""
        prediction = self.settings.prediction
        if prediction is None:
            return None
        assert self._predictor is not None
        native, tau = self._predictor
        states = fluxion_layer(
            native, layer=layer, tau=tau, granularity=prediction.granularity, dense_tokens=prediction.dense_tokens
        )
        self.requests.attach(states)
        return states

    def open_device(
        self,
        kv_caches: Sequence[torch.Tensor],
        attentions: Sequence[NativeAttention],
        *,
        device: torch.device | None = None,
        device_bytes: int = 0,
        captures: bool = False,
    ) -> None:
        """Make the device tier if the settings ask for a device. ConfigError if it cannot be served.

        kv_caches      the KV memory of every layer
        attentions     the kernels of these layers, which must be one and the same: the pool's pages have one shape
        device         CUDA only: where the model's tensors lie
        device_bytes   CUDA only: memory for the pool, if the settings do not give the number of its slots
        captures       CUDA only: whether repeated launches may be captured in CUDA graphs
        """
        self.close()
        if self.settings.device == "none":
            return
        kernels = {id(attention): attention for attention in attentions}
        if len(kernels) != 1:
            raise ConfigError(
                f"hybrid_sparse.device={self.settings.device!r}: all attention layers must have one shape, and the "
                f"model has {len(kernels)}"
            )
        (attention,) = kernels.values()
        self.device_tier = DeviceTier(self.settings, kv_caches, attention, device=device, device_bytes=device_bytes)
        if device is not None:
            from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers  # noqa: PLC0415  (Triton, which others lack)

            capture = CudaCapture(device) if captures and self.settings.device_graphs == "on" else None
            self.cuda_layers = CudaLayers(self.device_tier, attention, kv_caches, capture)
            self.requests.attach(self.cuda_layers.prompt_rows)

    def close(self) -> None:
        """End the threads of the device tier, if there is one."""
        if self.device_tier is not None:
            self.device_tier.close()
            self.device_tier = self.cuda_layers = None

    def describe(self) -> str:
        """Settings in effect and what they became on this machine."""
        text = f"{self.settings.describe()}; running on {self.isa} with {self.pool.size} {self.helpers} threads"
        if sharers := self._prefix_sharers():
            text += f"; what {sharers} requests or more begin with is read once and attended to exactly"
        if self._windowed:
            text += f"; {self._windowed} of {self._layers} layers have a sliding window, which they read whole"
        return text

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call."""
        total = DecodeStats()
        layer_rows = 0
        for attention in self._attention.values():
            stats = DecodeStats.from_native(attention.stats(), attention.layout)
            layer_rows += stats.selections // attention.num_kv_heads
            total = total + stats
            attention.reset_stats()
        if self.device_tier is not None:
            stats = self.device_tier.take_decode_stats()
            layer_rows += stats.selections // self.device_tier.kv_heads
            total = total + stats
        return replace(total, rows=layer_rows // self._layers if self._layers else 0)

    def take_tier_stats(self) -> TierStats | None:
        """What device and host did since the last call; None without a device."""
        return self.device_tier.take_stats() if self.device_tier is not None else None


@lru_cache(maxsize=1)
def host_runtime(settings: HybridSparseConfig) -> HostRuntime:
    """The runtime of the engine that this process is making, the same for all of its layers."""
    return HostRuntime(settings, _Engine.local_workers, _Engine.gpus_on_cores)


def begin_engine(local_workers: int = 1, gpus_on_cores: int | None = None) -> None:
    """Begin another engine: `host_runtime` makes a new runtime for it.

    local_workers, gpus_on_cores   of that engine on this machine, as `HostRuntime` takes them
    """
    _Engine.local_workers, _Engine.gpus_on_cores = local_workers, gpus_on_cores
    host_runtime.cache_clear()

"""The host tier of one worker process: one thread pool, one kernel per layer shape, and their statistics."""

import os
from collections.abc import Sequence
from functools import lru_cache

import torch

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, make_thread_pool, native_selection
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.runtime.requests import RequestSlots
from vllm_hybrid_sparse.runtime.tiers import DeviceTier


def helper_cpus(threads: int) -> list[int]:
    """A core for each helper thread, the caller's excluded: those that vLLM bound OpenMP to, else none in particular.

    GNU OpenMP binds the calling thread to its first core, and threads started from it inherit that one core.
    """
    bound = [int(core) for core in os.environ.get("GOMP_CPU_AFFINITY", "").split() if core.isdigit()]
    return bound[1:threads]


class HostRuntime:
    """Made once a process from the settings; layers of one shape share a kernel and its scratch memory."""

    def __init__(self, settings: HybridSparseConfig) -> None:
        self.settings = settings
        self.selection = native_selection(settings.selection, settings.retained)
        threads = settings.num_threads or torch.get_num_threads()
        helpers = settings.thread_pool
        if helpers == "auto":
            helpers = "openmp" if _native.openmp_is_loaded() else "own"
        self.pool = make_thread_pool(threads, helpers=helpers, cpus=helper_cpus(threads))
        # Blocks of requests in the step under way that a KV connector may have written; the worker sets it, each layer
        # summarises them before it attends.
        self.loaded_blocks: torch.Tensor | None = None
        self.requests = RequestSlots()
        self.device_tier: DeviceTier | None = None  # once `open_device` has made it
        self._hgca_layers: list[_native.HgcaLayer] = []
        self._attention: dict[tuple[torch.dtype, int, int, int, int, float], NativeAttention] = {}

    def attention(
        self,
        *,
        dtype: torch.dtype,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        scale: float,
    ) -> NativeAttention:
        """The kernel for layers of this shape."""
        shape = (dtype, num_q_heads, num_kv_heads, head_dim, block_tokens, scale)
        if shape not in self._attention:
            self._attention[shape] = NativeAttention(
                dtype=dtype,
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                block_tokens=block_tokens,
                scale=scale,
                summary=self.settings.summary or "none",
                code_bits=self.settings.code_bits or 2,
                isa=self.settings.isa,
                pool=self.pool,
            )
        return self._attention[shape]

    @property
    def keeps_request_state(self) -> bool:
        """Whether the policy keeps state of a request beside its KV cache, so that batches need `slots`."""
        return self.settings.salience is not None

    def hgca_layer(self, attention: NativeAttention) -> _native.HgcaLayer | None:
        """What one layer keeps of the requests, by the slots of `requests`; None where the policy keeps nothing."""
        if self.settings.salience is None:
            return None
        layer = attention.hgca_layer(self.settings.salience, self.settings.retained)
        self._hgca_layers.append(layer)
        self.requests.attach(layer)
        return layer

    def open_device(self, kv_caches: Sequence[torch.Tensor], attentions: Sequence[NativeAttention]) -> None:
        """Make the device tier, where the settings ask for a device. ConfigError where it cannot be served.

        kv_caches    the KV memory of every layer
        attentions   the kernels of these layers, which must be one and the same: the pool's pages have one shape
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
        self.device_tier = DeviceTier(self.settings, kv_caches, attention)

    def close(self) -> None:
        """End the threads of the device tier; a runtime without one has none to end."""
        if self.device_tier is not None:
            self.device_tier.close()
            self.device_tier = None

    def describe(self) -> str:
        """Settings in effect and what they became on this machine."""
        isas = sorted({attention.isa for attention in self._attention.values()})
        helpers = "openmp" if self.pool.helpers == _native.Helpers.openmp else "own"
        return f"{self.settings.describe()}; running on {', '.join(isas)} with {self.pool.size} {helpers} threads"

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call."""
        total = DecodeStats(packed_bytes=sum(layer.packed_bytes for layer in self._hgca_layers))
        for attention in self._attention.values():
            total = total + DecodeStats.from_native(attention.stats(), attention.layout)
            attention.reset_stats()
        return total if self.device_tier is None else total + self.device_tier.take_decode_stats()


@lru_cache(maxsize=1)
def host_runtime(settings: HybridSparseConfig) -> HostRuntime:
    """The process's runtime."""
    return HostRuntime(settings)

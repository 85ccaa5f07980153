"""What the settings become in the host runtime, and where its threads run."""

from typing import Any

import pytest
import torch

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.runtime import host
from vllm_hybrid_sparse.runtime.host import HostRuntime
from vllm_hybrid_sparse.values import summary_bytes


def kernel_of(runtime: HostRuntime) -> NativeAttention:
    return runtime.attention(
        dtype=torch.float32, num_q_heads=2, num_kv_heads=1, head_dim=64, block_tokens=16, scale=0.125
    )


def test_the_settings_reach_the_kernel() -> None:
    runtime = HostRuntime(HybridSparseConfig(isa="scalar", code_bits=1, num_threads=3, thread_pool="own"))
    kernel = kernel_of(runtime)
    assert (kernel.isa, runtime.isa) == ("scalar", "scalar")
    assert kernel.layout.summary_bytes == summary_bytes("key_codes", 64, 4, 1) != summary_bytes("key_codes", 64, 4, 2)
    assert (runtime.pool.size, runtime.helpers) == (3, "own")
    hgca = kernel_of(HostRuntime(HybridSparseConfig(policy="hgca", num_threads=1)))
    assert hgca.layout.summary_bytes == 0


def kernel_for_fluxion(head_dim: int, **settings: Any) -> NativeAttention:
    runtime = HostRuntime(HybridSparseConfig(policy="fluxion", num_threads=1, **settings))
    return runtime.attention(
        dtype=torch.float32, num_q_heads=2, num_kv_heads=1, head_dim=head_dim, block_tokens=16, scale=0.125
    )


def test_fluxion_splits_codes_of_two_bits_where_that_takes_no_more_bytes() -> None:
    assert kernel_for_fluxion(64).summary == "split_codes"
    assert kernel_for_fluxion(80).summary == "key_codes"
    assert kernel_for_fluxion(64, code_bits=1).summary == "key_codes"
    assert kernel_for_fluxion(64, summary="minmax").summary == "minmax"
    assert kernel_of(HostRuntime(HybridSparseConfig(num_threads=1))).summary == "key_codes"


def test_fluxion_s_settings_reach_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = HostRuntime(HybridSparseConfig(policy="fluxion", num_threads=1, granularity=32, dense_tokens=160))
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(host, "fluxion_layer", lambda _predictor, **options: given.append(options))
    monkeypatch.setattr(runtime, "_predictor", (None, 0.25))
    monkeypatch.setattr(runtime.requests, "attach", lambda _layer: None)
    for layer in range(2):
        runtime.fluxion_layer(layer)
    assert given == [{"layer": layer, "tau": 0.25, "granularity": 32, "dense_tokens": 160} for layer in range(2)]


@pytest.mark.skipif(not _native.openmp_is_loaded(), reason="torch's OpenMP is not GNU's here")
@pytest.mark.parametrize("thread_pool", ["auto", "openmp"])
def test_torch_s_threads_help_where_they_are_there(thread_pool: str) -> None:
    threads = torch.get_num_threads()  # of the team that can be borrowed
    assert HostRuntime(HybridSparseConfig(thread_pool=thread_pool, num_threads=threads)).helpers == "openmp"


def test_torch_s_threads_are_refused_by_their_setting_where_they_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "openmp_is_loaded", lambda: False)
    with pytest.raises(ConfigError, match=r"^hybrid_sparse\.thread_pool='openmp': GNU OpenMP is not loaded"):
        HostRuntime(HybridSparseConfig(thread_pool="openmp", num_threads=1))

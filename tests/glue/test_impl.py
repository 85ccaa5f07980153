"""What a layer makes of its window, of rows of another dtype than the KV cache's, and of a cache with scales."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import impl
from vllm_hybrid_sparse.glue.impl import HybridSparseImpl
from vllm_hybrid_sparse.glue.support import FP8
from vllm_hybrid_sparse.runtime.host import HostRuntime


def layer_with_window(monkeypatch: pytest.MonkeyPatch, max_model_tokens: int, **settings: Any) -> HybridSparseImpl:
    """A layer with a window of 200 tokens, in a server of requests of up to `max_model_tokens`."""
    runtime = HostRuntime(HybridSparseConfig(num_threads=1, **settings))
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=max_model_tokens),
        cache_config=SimpleNamespace(kv_offloading_size=None),
        kv_transfer_config=None,
    )
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(impl, "settings_of", lambda _config: runtime.settings)
    monkeypatch.setattr(impl, "host_runtime", lambda _settings: runtime)
    layer = HybridSparseImpl(2, 64, 0.125, 1, sliding_window=200)
    layer.lay_out(16)
    return layer


@pytest.mark.parametrize(("max_model_tokens", "cuts"), [(200, False), (201, True)])
def test_a_window_counts_only_if_a_request_may_be_longer(
    monkeypatch: pytest.MonkeyPatch, max_model_tokens: int, cuts: bool
) -> None:
    layer = layer_with_window(monkeypatch, max_model_tokens, policy="topk", topk_pages=2)
    runtime = layer._runtime
    assert layer.attention.sliding_window == (200 if cuts else 0)
    assert layer.attention.summary == ("none" if cuts else "key_codes")
    assert layer._selection is (runtime.everything if cuts else runtime.selection)
    assert ("have a sliding window" in runtime.describe()) == cuts


def test_a_policy_with_state_needs_windows_that_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layer_with_window(monkeypatch, 200, policy="hgca")._hgca is not None
    with pytest.raises(ConfigError, match="sliding_window=200: is not supported with policy=hgca"):
        layer_with_window(monkeypatch, 201, policy="hgca")


def test_loaded_blocks_get_the_summaries_of_host_and_device_before_they_are_read() -> None:
    called: list[Any] = []
    blocks, starts = torch.tensor([5, 4], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    kv_cache = torch.empty(0)
    layer_of_ours: Any = SimpleNamespace(
        stored_dtype=None,
        attention=SimpleNamespace(dtype=torch.float32, summarize=lambda *given: called.append(("host", *given))),
        _runtime=SimpleNamespace(
            settings=SimpleNamespace(prediction=None),
            loaded_blocks=SimpleNamespace(blocks=blocks, starts=starts),
            device_tier=SimpleNamespace(encode_blocks=lambda *given: called.append(("device", *given))),
        ),
        _fluxion=None,
        _appends=True,
        _attend=lambda *_: called.append("attend"),
    )
    rows = torch.zeros(1, 2, 16)
    metadata: Any = SimpleNamespace(batch=SimpleNamespace())
    HybridSparseImpl.forward(layer_of_ours, SimpleNamespace(), rows, rows, rows, kv_cache, metadata, rows.clone())
    assert called == [("host", kv_cache, blocks, starts), ("device", kv_cache, [5, 4]), "attend"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("k_scale", "v_scale"), [(1.0, 1.0), (0.25, 4.0)])
def test_a_checkpoints_scales_are_taken_out_of_keys_and_values_and_put_back(
    dtype: torch.dtype, k_scale: float, v_scale: float
) -> None:
    query, key, value = torch.randn(3, 5, 2, 16).to(torch.bfloat16).to(dtype)
    given: list[Tensor] = []

    def attend(*rows: Any) -> None:
        given.extend(rows[:3])
        rows[5].copy_(rows[2])  # the output is the values as they are stored

    runtime = SimpleNamespace(settings=SimpleNamespace(prediction=None), loaded_blocks=None)
    layer_of_ours: Any = SimpleNamespace(
        stored_dtype=FP8,
        attention=SimpleNamespace(dtype=torch.bfloat16),
        _runtime=runtime,
        _fluxion=None,
        _appends=True,
        _attend=attend,
    )
    layer = SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale)
    metadata: Any = SimpleNamespace(batch=SimpleNamespace())
    output = HybridSparseImpl.forward(
        layer_of_ours, layer, query, key, value, torch.empty(0), metadata, torch.empty_like(value)
    )
    assert [rows.dtype for rows in given] == [torch.bfloat16] * 3
    for rows, wanted in zip(given, (query * k_scale, key / k_scale, value / v_scale), strict=True):
        assert torch.equal(rows.to(dtype), wanted)  # powers of two: nothing is rounded
    assert output.dtype == dtype
    assert torch.equal(output, value)


def layer_of_vllm(monkeypatch: pytest.MonkeyPatch, **given: Any) -> HybridSparseImpl:
    """A layer with blocks of 16 tokens, one KV head and two query heads of 16 dimensions, in float32."""
    runtime = HostRuntime(HybridSparseConfig(num_threads=1, policy="dense"))
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(impl, "settings_of", lambda _config: runtime.settings)
    monkeypatch.setattr(impl, "host_runtime", lambda _settings: runtime)
    layer = HybridSparseImpl(2, 16, 0.25, 1, **given)
    layer.lay_out(16)
    return layer


@pytest.mark.parametrize("update", ["copy_", "data.copy_", "data"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_learned_sinks_that_are_updated_in_place_count_at_the_next_call(
    dtype: torch.dtype, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's loaders write through `data`, which leaves a tensor's version as it was."""
    sinks = torch.nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    layer = layer_of_vllm(monkeypatch, sinks=sinks)
    layer.process_weights_after_loading(dtype)
    given: list[list[float]] = []
    monkeypatch.setattr(layer.attention, "forward", lambda *rows: given.append(rows[-1].tolist()))
    rows = torch.zeros(1, 2, 16)
    metadata: Any = SimpleNamespace(batch=SimpleNamespace())

    def call() -> None:
        layer.forward(SimpleNamespace(), rows, rows[:, :1], rows[:, :1], torch.empty(0), metadata, rows.clone())

    call()
    new = torch.tensor([1.0, 2.0], dtype=dtype)
    if update == "copy_":
        sinks.copy_(new)
    elif update == "data.copy_":
        sinks.data.copy_(new)
    else:
        sinks.data = new
    call()
    assert given == [[0.0, 0.0], [1.0, 2.0]]


def test_a_layer_that_looks_at_chunks_is_refused_and_one_that_says_it_does_not_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rnj-1 gives every layer a number of chunks to look back, and -1 to those without chunks."""
    layer_of_vllm(monkeypatch, chunk_lookback=-1, layer_idx=3)
    with pytest.raises(ConfigError, match="chunk_lookback=1: chunked local attention is not supported"):
        layer_of_vllm(monkeypatch, chunk_lookback=1)
    with pytest.raises(ConfigError, match="another=-1: not supported"):
        layer_of_vllm(monkeypatch, another=-1)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_outputs_that_are_to_be_quantised_are_refused_by_name_and_value(name: str) -> None:
    given: Any = {name: torch.tensor(0.5)}
    rows = torch.zeros(1, 4, 64)
    with pytest.raises(ConfigError, match=rf"^{name}=0\.5: fused output quantisation is not supported"):
        HybridSparseImpl.forward(SimpleNamespace(), None, rows, rows, rows, rows, None, rows, **given)  # type: ignore[arg-type]

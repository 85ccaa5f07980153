import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.glue.bare_worker import bare_worker
from tests.glue.fake_config import config_of, platform_of
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue import cpu_worker
from vllm_hybrid_sparse.glue.backend import HybridSparseBackend
from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.glue.worker import HostStoreWorker
from vllm_hybrid_sparse.kernels.paged_attention import native
from vllm_hybrid_sparse.memory.huge_pages import Gathered
from vllm_hybrid_sparse.runtime.cores import usable_cores

ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
AOT_COMPILE = "VLLM_USE_AOT_COMPILE"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def seen_by_vllms_worker(monkeypatch: pytest.MonkeyPatch, name: str, given: str | None) -> str:
    """A variable's value when vLLM's worker begins and may compute. The user gave the value `given`, or none."""
    seen = []
    monkeypatch.setattr(CPUWorker, "__init__", lambda *_args, **_kwargs: seen.append(os.environ[name]))
    os.environ.pop(name, None)
    if given is not None:
        os.environ[name] = given
    HybridSparseCPUWorker(vllm_config=None)._heap.close()
    return seen[0]


@pytest.mark.parametrize(
    ("name", "given", "in_effect"),
    [(ONEDNN_CACHE, None, "160"), (ONEDNN_CACHE, "7", "7"), (AOT_COMPILE, None, "0"), (AOT_COMPILE, "1", "1")],
)
def test_the_environment_is_ours_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str | None, in_effect: str
) -> None:
    assert seen_by_vllms_worker(monkeypatch, name, given) == in_effect


@pytest.mark.parametrize("given", [None, default_cache_dir()])
def test_compiled_code_outlives_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))

    where = Path(seen_by_vllms_worker(monkeypatch, INDUCTOR_CACHE, given))

    assert where.is_relative_to(tmp_path)


def test_compiled_code_goes_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert seen_by_vllms_worker(monkeypatch, INDUCTOR_CACHE, str(tmp_path)) == str(tmp_path)


def test_an_engine_in_this_process_leaves_another_backend_s_as_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ONEDNN_CACHE, AOT_COMPILE, INDUCTOR_CACHE):
        os.environ.pop(name, None)
    os.environ[INDUCTOR_CACHE] = default_cache_dir()
    before = dict(os.environ)
    cpu_worker.prepare_environment()
    assert len(os.environ.items() - before.items()) == 3
    platform_of(monkeypatch, on_cuda=False).check_and_update_config(config_of(None))
    assert dict(os.environ) == before


def test_steps_count_as_work_after_which_the_heap_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bare_worker()
    within = []
    monkeypatch.setattr(
        HostStoreWorker, "execute_model", lambda self, scheduled: within.append(self._heap._working) or scheduled
    )

    assert [worker.execute_model(number) for number in (1, 2)] == [1, 2]
    assert within == [True, True]
    assert not worker._heap._working
    assert worker._heap._worked.is_set()


def test_shutdown_ends_the_thread_that_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(CPUWorker, "__init__", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(HostStoreWorker, "shutdown", lambda _self: ended.append("vLLM's"))
    before = threading.active_count()

    worker = HybridSparseCPUWorker()
    assert threading.active_count() == before + 1
    worker.shutdown()

    assert threading.active_count() == before
    assert ended == ["vLLM's"]


def ready_worker(dtype: torch.dtype) -> None:
    """A worker of a model with this dtype makes its memory ready."""
    requests = SimpleNamespace(follow=lambda _order: None)
    bare_worker(
        _runtime=SimpleNamespace(requests=requests), model_config=SimpleNamespace(dtype=dtype)
    ).initialize_from_config(None)


@pytest.mark.parametrize(
    ("machine", "isas", "dtype", "said"),
    [
        ("x86_64", ["scalar", "avx2", "avx512"], torch.bfloat16, True),
        ("x86_64", ["scalar", "avx2", "avx512"], torch.float32, False),
        ("x86_64", ["scalar", "avx2", "avx512", "avx512_bf16"], torch.bfloat16, False),
        ("aarch64", ["scalar"], torch.bfloat16, False),
    ],
)
def test_a_slow_dtype_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, machine: str, isas: list[str], dtype: torch.dtype, said: bool
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(HostStoreWorker, "initialize_from_config", lambda *_: None)
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "supported_isas", lambda: isas)
    monkeypatch.setattr(cpu_worker, "gather_resident", lambda _cores: Gathered(0, 0))
    monkeypatch.setattr(cpu_worker.logger, "info", lambda line, *values: lines.append(line % values))

    ready_worker(dtype)

    assert [("--dtype float32" in line) for line in lines[1:]] == [True] * said


@pytest.mark.parametrize(
    ("declined", "said"),
    [(0, "in use: 1.50 GiB in huge pages"), (2**29, "(the kernel declined 0.50 GiB)")],
)
def test_what_is_in_use_is_gathered_into_huge_pages_after_free_memory_is_gone(
    monkeypatch: pytest.MonkeyPatch, declined: int, said: str
) -> None:
    calls: list[object] = []
    lines: list[str] = []

    def gather(cores: set[int]) -> Gathered:
        calls.append(cores)
        return Gathered(3 * 2**29, declined)

    monkeypatch.setattr(HostStoreWorker, "initialize_from_config", lambda *_: calls.append("store"))
    monkeypatch.setattr(cpu_worker, "glibc_trim", lambda: lambda: calls.append("trim"))
    monkeypatch.setattr(cpu_worker, "gather_resident", gather)
    monkeypatch.setattr(cpu_worker.logger, "info", lambda line, *values: lines.append(line % values))

    ready_worker(torch.float32)

    assert calls == ["trim", usable_cores(), "store"]
    assert [said in line for line in lines] == [True]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"attn_backend": CPUAttentionBackend}, r"^layers\.0: the model has it attend by CPUAttentionBackend"),
        ({"head_size_v": 32}, r"^head_size_v=32: values of another size than keys \(64\) are not supported"),
    ],
)
def test_a_model_that_chooses_for_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], refusal: str | None
) -> None:
    """MiMo-V2's layers have values of another size and take a backend for these, whichever was asked for."""
    monkeypatch.setattr(CPUWorker, "load_model", lambda *_, **__: None)
    layer = Attention.__new__(Attention)
    asked_for = {
        "layer_name": "layers.0",
        "attn_backend": HybridSparseBackend,
        "head_size": 64,
        "head_size_v": 64,
        "sliding_window": None,
    }
    for name, value in (asked_for | changes).items():
        setattr(layer, name, value)
    worker = bare_worker()
    worker.vllm_config.compilation_config.static_forward_context.update({"layers.0": layer, "others": object()})

    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        worker.load_model()


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        (AttentionLayerBase, r"^layers\.1: the model has it attend by CPUAttentionBackend, beside which"),
        (MambaBase, None),
    ],
)
def test_a_class_of_layers_of_the_model_s_own_is_refused_if_it_attends(
    monkeypatch: pytest.MonkeyPatch, kind: type, refusal: str | None
) -> None:
    """As MiniMax-M3 has one. Layers that keep a state have backends of their own too, and are served."""
    monkeypatch.setattr(CPUWorker, "load_model", lambda *_, **__: None)
    layer_class = type("Own", (kind,), {"get_attn_backend": lambda _self: CPUAttentionBackend})
    layer_class.__abstractmethods__ = frozenset()  # the rest is not asked for
    worker = bare_worker()
    worker.vllm_config.compilation_config.static_forward_context["layers.1"] = layer_class()

    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        worker.load_model()


@pytest.mark.parametrize(("max_model_tokens", "kept"), [(200, None), (201, 200)])
def test_layers_whose_window_never_cuts_get_the_blocks_of_those_that_see_everything(
    monkeypatch: pytest.MonkeyPatch, max_model_tokens: int, kept: int | None
) -> None:
    """A group of blocks of their own would have tables of its own, which devices and connectors do not read."""
    monkeypatch.setattr(CPUWorker, "load_model", lambda *_, **__: None)
    layer = Attention.__new__(Attention)
    layer.attn_backend, layer.head_size, layer.head_size_v, layer.sliding_window = HybridSparseBackend, 64, 64, 200
    worker = bare_worker()
    worker.vllm_config.model_config = SimpleNamespace(max_model_len=max_model_tokens)
    worker.vllm_config.compilation_config.static_forward_context["layers.0"] = layer

    worker.load_model()

    assert layer.sliding_window == kept


@pytest.mark.parametrize(("asked", "workers", "fits"), [(12, 2, False), (11, 2, True), (22, 1, True), (None, 2, True)])
def test_the_stores_of_all_workers_must_fit_together(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, workers: int, fits: bool
) -> None:
    monkeypatch.setattr(CPUWorker, "determine_available_memory", lambda _worker: 7)
    monkeypatch.setattr(cpu_worker, "available_bytes", lambda: 22 * 2**30)
    worker = bare_worker(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None if asked is None else asked * 2**30),
        parallel_config=SimpleNamespace(local_world_size=workers, data_parallel_size_local=3),
    )
    refusal = r"^kv_cache_memory_bytes=12884901888: .* at most 11811160064 for each of 2 workers: 22.0 GiB are "
    with nullcontext() if fits else pytest.raises(ConfigError, match=refusal):
        assert worker.determine_available_memory() == 7


def test_a_prompt_that_is_not_whole_yet_draws_nothing_from_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM samples for every row and rewinds the generators of discarded rows. A CPU's generator cannot be rewound."""
    generators = {row: torch.Generator().manual_seed(row) for row in (0, 2, 3)}
    batch = SimpleNamespace(generators=dict(generators))
    discarded = np.array([True, True, False, True])
    drawn: list[float] = []

    def sample(_worker: Any, _grammar: Any) -> str:
        for row in range(4):
            generator = batch.generators.get(row)
            drawn.append(torch.rand(1, generator=generator).item())
            if discarded[row] and generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return "tokens"

    monkeypatch.setattr(HostStoreWorker, "sample_tokens", sample)
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=SimpleNamespace(np=discarded))
    worker = bare_worker(model_runner=runner)
    assert worker.sample_tokens(None) == "tokens"
    assert batch.generators == generators
    assert drawn[2] == torch.rand(1, generator=torch.Generator().manual_seed(2)).item()
    for row in (0, 3):
        assert torch.equal(generators[row].get_state(), torch.Generator().manual_seed(row).get_state())
    discarded[:] = False
    worker.sample_tokens(None)
    assert drawn[4] == torch.rand(1, generator=torch.Generator().manual_seed(0)).item()

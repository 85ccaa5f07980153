import os
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.glue.bare_worker import bare_worker
from vllm_hybrid_sparse.glue import cpu_worker
from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.glue.worker import HostStoreWorker

ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.mark.parametrize(("given", "in_effect"), [(None, "160"), ("7", "7")])
def test_onednn_keeps_little_code_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None, in_effect: str
) -> None:
    """And it is said before vLLM's worker begins, which may compute."""
    seen = []
    monkeypatch.setattr(CPUWorker, "__init__", lambda *_args, **_kwargs: seen.append(os.environ[ONEDNN_CACHE]))
    if given is None:
        monkeypatch.delenv(ONEDNN_CACHE, raising=False)
    else:
        monkeypatch.setenv(ONEDNN_CACHE, given)

    HybridSparseCPUWorker(vllm_config=None)._heap.close()

    assert seen == [in_effect]


def test_steps_count_as_work_after_which_the_heap_is_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bare_worker()
    worked = []
    monkeypatch.setattr(worker._heap, "worked", lambda: worked.append("step"))
    monkeypatch.setattr(HostStoreWorker, "execute_model", lambda _self, scheduled: scheduled)

    assert [worker.execute_model(number) for number in (1, 2)] == [1, 2]
    assert worked == ["step", "step"]


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
    monkeypatch.setattr(cpu_worker.platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu_worker, "supported_isas", lambda: isas)
    monkeypatch.setattr(cpu_worker.logger, "info", lines.append)
    requests = SimpleNamespace(follow=lambda _order: None)

    bare_worker(
        _runtime=SimpleNamespace(requests=requests), model_config=SimpleNamespace(dtype=dtype)
    ).initialize_from_config(None)

    assert [("--dtype float32" in line) for line in lines] == [True] * said

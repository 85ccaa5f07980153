import os

import pytest

pytest.importorskip("vllm")

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker

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

    HybridSparseCPUWorker(vllm_config=None)

    assert seen == [in_effect]

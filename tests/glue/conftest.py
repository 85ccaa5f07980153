"""What tests of the glue share: this process's environment stays as it was, and vLLM's loggers can be left alone."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from vllm_hybrid_sparse.glue import environment


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Undo after each test what a configuration or a worker has set."""
    with mock.patch.dict(os.environ), mock.patch.dict(environment._given, clear=True):
        yield


@pytest.fixture
def no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave vLLM's loggers alone."""
    from vllm_hybrid_sparse.glue import platform_hook  # noqa: PLC0415  (imports vllm)

    monkeypatch.setattr(platform_hook, "hook_stat_loggers", lambda: None)

"""The same numbers every run, on every device that can be tested without a GPU."""

import pytest
import torch

from tests.kernels.device.interpreter import interprets, mend_interpreter


@pytest.fixture(autouse=True)
def same_numbers_every_run() -> None:
    """Seed torch before every test."""
    torch.manual_seed(0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the device's kernels interpreted, over tensors in CPU memory."""
    if not interprets():
        pytest.skip("the kernels are compiled in this run")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter reads it again at its first launch
    mend_interpreter()


@pytest.fixture(params=["emulated", "cuda"])
def kind(request: pytest.FixtureRequest) -> str:
    """The setting `device` of a test."""
    if request.param == "cuda":
        request.getfixturevalue("interpreted")
    return str(request.param)

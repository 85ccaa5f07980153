"""The tests of the device's kernels run on the CPU, interpreted, or on a GPU, compiled (tests/conftest.py)."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.device.interpreter import interprets, mend_interpreter


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels of a test run."""
    if request.param == "interpreted":
        if not interprets():
            pytest.skip("the kernels are compiled in this run")
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # the interpreter asks again at its first launch
        mend_interpreter()
        return torch.device("cpu")
    if interprets():
        pytest.skip("the kernels are interpreted in this run; for the GPU: TRITON_INTERPRET=0 pytest -m gpu")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def infinities_are_quiet() -> Iterator[None]:
    """The interpreter computes in numpy, which warns of the logarithms of zero that a GPU takes as they come."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        yield

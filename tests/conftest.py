"""Triton decides when a kernel is defined whether it will be interpreted or compiled; a run of the tests decides here.

Test modules define the kernels, by importing them, while pytest collects. With `-m gpu` they are compiled for the GPU;
in any other run they are interpreted, so that the device's kernels are tested where there is no device. The variable is
taken back before the first test runs: servers that a test starts are not to inherit it.
"""

import os

import pytest

_VARIABLE = "TRITON_INTERPRET"
_before = os.environ.get(_VARIABLE)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr != "gpu":
        os.environ[_VARIABLE] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    if _before is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = _before

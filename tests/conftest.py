"""What all tests share: no clock decides, waiting threads sleep, and the device's kernels are interpreted.

Hypothesis's time limits are off, so no test fails because the machine is busy.

OpenMP's threads would spin while they wait, and two test processes would hold each other up. OpenMP reads its variable
when torch loads it.

Triton decides when a kernel is defined whether it is interpreted or compiled. Here it is told to interpret, so the
device's kernels are tested on machines without a device. The variable must be set before torch is imported, because
torch imports Triton. It is removed once the tests are collected, when all kernels have been defined: servers that a
test starts must not inherit it. On a GPU: `TRITON_INTERPRET=0 python -m pytest -m gpu`, as `make gpu-check` does.
"""

import os

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_machine")

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_VARIABLE = "TRITON_INTERPRET"
_given = _VARIABLE in os.environ
os.environ.setdefault(_VARIABLE, "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    if not _given:
        os.environ.pop(_VARIABLE, None)

"""What all tests share: no clock decides, threads that wait sleep, and the device's kernels are interpreted.

Hypothesis's limits on time are off: a busy machine fails no test.

OpenMP's threads would spin while they wait, and so two test processes hold each other up. Its library reads what to
do when torch loads it.

Triton decides when a kernel is defined whether it will be interpreted or compiled: here it is told to interpret.

So the device's kernels are tested where there is no device. It must be said before torch is imported, which imports
Triton, and it is taken back when the tests have been collected, and with them all kernels defined: servers that a test
starts are not to inherit it. On a GPU: `TRITON_INTERPRET=0 python -m pytest -m gpu`, as `make gpu-check` does.
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

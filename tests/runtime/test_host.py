"""Where the host runtime's own threads run."""

import pytest

from vllm_hybrid_sparse.runtime.host import helper_cpus


@pytest.mark.parametrize(
    ("variable", "value"),
    [("GOMP_CPU_AFFINITY", "4 5 6 7"), ("KMP_AFFINITY", "granularity=fine,explicit,proclist=[4,5,6,7]")],
)
def test_helpers_get_the_cores_that_vllm_bound_openmp_to(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM sets them for GNU's and for Intel's OpenMP; the first core is the calling thread's."""
    for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    assert helper_cpus(3) == []
    monkeypatch.setenv(variable, value)
    assert helper_cpus(3) == [5, 6]
    assert helper_cpus(8) == [5, 6, 7]
    assert helper_cpus(1) == []
    monkeypatch.setenv(variable, "granularity=fine,compact" if variable == "KMP_AFFINITY" else "0-3")
    assert helper_cpus(3) == []

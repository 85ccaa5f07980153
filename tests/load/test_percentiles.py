"""Percentiles against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_hybrid_sparse.load.percentiles import Distribution, percentile

_VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(values=_VALUES, percent=st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


@given(values=_VALUES)
def test_a_distribution_sums_up_what_numpy_does(values: list[float]) -> None:
    seen = Distribution.of([None, *values, None])
    expected = [np.mean(values), *np.percentile(values, (50, 90, 99)), max(values)]
    assert [seen.mean, seen.p50, seen.p90, seen.p99, seen.max] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert seen.count == len(values)


def test_nothing_has_no_percentile() -> None:
    assert Distribution.of([None]) == Distribution(0, None, None, None, None, None)
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)

"""How busy the machine is, from what /proc/stat says."""

import pytest

from vllm_hybrid_sparse.cli.machine_load import busy_share


def test_what_is_neither_idle_nor_waits_for_disks_is_busy() -> None:
    said = iter(("cpu  100 0 50 800 40 5 5 0 70 0\ncpu0 1 2", "cpu  130 4 56 890 50 6 8 6 99 0\ncpu0 1 2"))
    assert busy_share(0.0, lambda: next(said)) == pytest.approx(50 / 150)


@pytest.mark.parametrize("said", ["", "cpu", "cpu  a b c d e", "cpu  1 0 0 5 0 0 0 0"])
def test_what_is_not_known_counts_as_idle(said: str) -> None:
    assert busy_share(0.0, lambda: said) == 0.0


def test_this_machine_says() -> None:
    assert 0 <= busy_share(0.05) <= 1

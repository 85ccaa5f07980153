"""The cases of the device's kernel benchmark are right, at sizes that the interpreter can run."""

import pytest
import torch

from benchmarks.kernels.device_cases import TOLERANCE, all_cases, make_machine, relative_error
from benchmarks.kernels.ranked_cases import ranked_cases


def test_every_case_is_right(device: torch.device) -> None:
    machine = make_machine(device, pool_bytes=2**16, dtype=torch.bfloat16, kv_heads=2, group=3, head_dim=32)
    names = []
    for case in all_cases(machine, rows=(1, 2), context_pages=(9,), microbatches=(2, 5)):
        assert case.error() < TOLERANCE, case.name
        assert case.moved_bytes > 0
        names.append(case.name)
    assert len(names) == 3 + 2 * (2 + 4 + 2 + 4)


def test_every_case_of_ranked_rows_is_right(device: torch.device) -> None:
    machine = make_machine(device, pool_bytes=2**17, dtype=torch.bfloat16, kv_heads=2, group=3, head_dim=32)
    names = []
    for case in ranked_cases(machine, 2, 16, 3):
        assert case.error() < TOLERANCE, case.name
        assert case.moved_bytes > 0
        names.append(case.name)
    assert names == ["encode_pages", "score_codes", "attend_listed, in slots", "attend_listed, on the host"]


@pytest.mark.parametrize("wrong", [1.5, torch.nan])
def test_a_wrong_result_is_seen(wrong: float) -> None:
    expected = torch.tensor([1.0, -2.0])
    assert not relative_error(torch.tensor([1.0, -2.0 + wrong]), expected) < TOLERANCE

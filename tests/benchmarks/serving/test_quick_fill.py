"""A KV cache is filled by repeating numbers that were drawn once."""

import pytest
import torch

from benchmarks.gpu_timing import QUICK_CONNECTOR
from benchmarks.serving import quick_fill
from benchmarks.serving.quick_fill import QuickFillWorker


def test_all_of_a_cache_is_random_whatever_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_fill, "_DRAWN", 4 * 24)  # four blocks, so the last piece is smaller
    worker = QuickFillWorker.__new__(QuickFillWorker)
    cache = torch.zeros(10, 2, 12, dtype=torch.bfloat16).transpose(1, 2)
    worker._fill_tensor(cache, 0.0, 1.0, torch.bfloat16)
    assert torch.equal(cache[:4], cache[4:8])
    assert torch.equal(cache[:2], cache[8:])
    first = cache[:4].float()
    assert (first != 0).all()
    assert len(first.unique()) > 60
    assert 0.7 < float(first.std()) < 1.3


def test_it_goes_by_the_name_that_cuda_takes() -> None:
    assert QUICK_CONNECTOR["kv_connector"] == quick_fill.DecodeBenchConnector.__name__ == "DecodeBenchConnector"
    assert QUICK_CONNECTOR["kv_connector_module_path"] == quick_fill.__name__

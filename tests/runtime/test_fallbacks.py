"""Whatever falls back is counted, by kind, once for each time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.kernels.fallbacks import FALLBACKS, count_fallback, take_fallbacks
from vllm_hybrid_sparse.kernels.merge import choice
from vllm_hybrid_sparse.runtime.launch_graphs import LaunchGraphs
from vllm_hybrid_sparse.runtime.tiers import DeviceTier

SMALL = {"policy": "dense", "sink_tokens": 16, "window_tokens": 32, "device_pool_pages": 64}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    take_fallbacks()
    choice.choose_merge.cache_clear()
    yield
    take_fallbacks()
    choice.choose_merge.cache_clear()


def test_what_was_taken_is_not_counted_again() -> None:
    for kind in FALLBACKS:
        count_fallback(kind)
    count_fallback("warm_up")
    assert take_fallbacks() == {**dict.fromkeys(FALLBACKS, 1), "warm_up": 2}
    assert take_fallbacks() == {}


@pytest.mark.parametrize(
    ("installed", "dtype", "counted"),
    [
        ((), torch.float32, 1),
        (("triton",), torch.float32, 0),
        (("triton",), torch.bfloat16, 1),
        (("triton", "flashinfer"), torch.float32, 0),  # not FlashInfer's, which merges no float32 anyway
    ],
)
def test_a_merging_kernel_that_is_not_installed(
    installed: tuple[str, ...], dtype: torch.dtype, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(choice, "find_spec", lambda package: object() if package in installed else None)
    for _ in range(2):
        choice.choose_merge("cuda", dtype)
    assert take_fallbacks() == ({"merge_kernel": counted} if counted else {})
    choice.choose_merge("cpu", dtype)
    assert take_fallbacks() == {}


def test_launches_that_cannot_be_captured() -> None:
    def refuse(_launch: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = LaunchGraphs(refuse)
    for _ in range(5):
        graphs.run("key", lambda: None)
    assert take_fallbacks() == {"device_graphs": 1}


def test_a_device_without_the_memory_to_rank() -> None:
    with TieredModel({**SMALL, "device": "emulated", "device_ranking": "device"}) as model:
        tier: DeviceTier = model.tier
        assert tier._may_rank(torch.device("cpu"), stored_pages=1000, device_bytes=1000)  # the settings give the slots
        assert take_fallbacks() == {}
        object.__setattr__(tier.settings, "device_pool_pages", None)
        assert not tier._may_rank(torch.device("cpu"), stored_pages=1000, device_bytes=1000)
        assert take_fallbacks() == {"device_ranking": 1}


@pytest.mark.parametrize(("share", "counted"), [(0.9, False), (0.01, True)])
def test_a_share_that_holds_no_block(share: float, counted: bool) -> None:
    with TieredModel({**SMALL, "device": "emulated", "device_resident_share": share}):
        assert take_fallbacks() == ({"device_resident_share": 1} if counted else {})

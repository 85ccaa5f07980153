"""What all kernel tests share: one torch thread, the same numbers every run, and each instruction set by name.

All tensors are small, so one torch thread is faster, and it leaves the machine to the native pool.

The instruction sets of a case follow each other, and so do its numbers of threads: they share what the references say
(asked_once.py).
"""

from collections.abc import Hashable, Iterator
from typing import Any

import pytest
import torch

from tests.kernels.asked_once import answers_kept, case_of
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas
from vllm_hybrid_sparse.settings import ISAS

GEOMETRIES = {  # (query heads, KV heads, head_dim, block_tokens): groups of 1, 3, 4, 8
    "g1-d64-b16": (2, 2, 64, 16),
    "g3-d16-b128": (3, 1, 16, 128),
    "g4-d80-b16": (8, 2, 80, 16),
    "g8-d128-b128": (8, 1, 128, 128),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the tests of a case together, where the first of them is."""
    cases: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(case_of(item), []).append(item)
    items[:] = [item for case in cases.values() for item in case]


@pytest.fixture(autouse=True)
def references_asked_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what the references say until the next case."""
    with answers_kept(case_of(request.node)):
        yield


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Run the references on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_numbers_every_run() -> None:
    """Seed torch before every test."""
    torch.manual_seed(0)


@pytest.fixture(params=[name for name in ISAS if name != "auto"])
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set by name; those that this machine lacks are skipped by name."""
    if request.param not in supported_isas():
        pytest.skip(f"this machine has no {request.param}")
    dtype = request.node.callspec.params.get("dtype", torch.bfloat16)
    if request.param == "amx_bf16" and dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        pytest.skip(f"in {dtype} amx_bf16 has the kernels of avx512_vnni")
    return str(request.param)


@pytest.fixture(params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def geometry(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A layer's heads and blocks, as arguments of `Shape`. They are few, for long tests."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "block_tokens")
    return dict(zip(names, request.param, strict=True))

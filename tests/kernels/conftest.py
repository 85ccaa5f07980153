"""What all kernel tests share: one torch thread, the same numbers every run, and each instruction set by name.

Small tensors everywhere: one torch thread is faster, and leaves the machine to the native pool.
"""

from collections.abc import Iterator

import pytest
import torch

from vllm_hybrid_sparse.config import ISAS
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas


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
    return str(request.param)

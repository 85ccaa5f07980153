"""Small tensors everywhere: one torch thread is faster, and leaves the machine to the native pool."""

from collections.abc import Iterator

import pytest
import torch


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

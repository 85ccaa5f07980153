"""The same numbers every run."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_every_run() -> None:
    """Seed torch before every test."""
    torch.manual_seed(0)

"""Shards keep what they were given, and files that are no shards are refused."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.samples import Samples


def made(steps: int) -> Samples:
    rng = np.random.default_rng(steps)
    parts = (rng.random((steps, 2, 3, size), np.float32) for size in (41, 5, 4))
    return Samples(*parts, np.arange(steps) + 100)


def test_a_shard_comes_back(tmp_path: Path) -> None:
    samples, path = made(3), tmp_path / "shard.npz"
    samples.save(path)
    again = Samples.load(path)
    assert all(np.array_equal(getattr(samples, entry.name), getattr(again, entry.name)) for entry in fields(Samples))
    assert [*tmp_path.iterdir()] == [path]


def test_joined_samples_are_in_order() -> None:
    joined = Samples.joined([made(2), made(1)])
    assert joined.host_tokens.tolist() == [100, 101, 100]
    assert np.array_equal(joined.budgets[2], made(1).budgets[0])


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard.npz"
    made(1).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="must be a shard that `hybrid-sparse calibrate` wrote"):
        Samples.load(path)

"""Rows recorded in batches give the same record as rows recorded one by one."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks.accuracy.kept_mass import KeptMass
from benchmarks.accuracy.step_batches import in_batches
from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.values import RetainedSet

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
ROOM = torch.randn(2, 2, 300, 16, generator=torch.Generator().manual_seed(0))


def row(tokens: int, layer: int = 0, room: torch.Tensor = ROOM) -> DecodeStep:
    """The decode row of the last of `tokens` tokens. It reads pages that depend on `tokens`, and some packed tokens."""
    generator = torch.Generator().manual_seed(tokens)
    query, output = (2 * torch.randn(6, 16, generator=generator) for _ in range(2))
    plans, packed = [[1 + tokens % 3], [2, 3]], [[20, 40], [90 - tokens % 7]]
    return DecodeStep(layer, query, room[0, :, :tokens], room[1, :, :tokens], 0.25, plans, output, packed)


def batches_of(steps: Sequence[DecodeStep]) -> list[list[int]]:
    """For each batch, the number of tokens of its rows."""
    seen: list[list[int]] = []
    with in_batches(lambda batch: seen.append([step.keys.shape[1] for step in batch])) as watch:
        for step in steps:
            watch(step)
    return seen


def test_rows_recorded_in_batches_are_those_recorded_one_by_one() -> None:
    steps = [row(tokens, layer) for layer in range(2) for tokens in range(140, 220)]
    single, batched = KeptMass(RETAINED, 0.9), KeptMass(RETAINED, 0.9)
    for step in steps:
        single.watch([step])
    with in_batches(batched.watch) as watch:
        for step in steps:
            watch(step)
    assert len(single.kept) == 2 * 80 * 2
    for name in ("kept", "error"):
        torch.testing.assert_close(torch.tensor(getattr(batched, name)), torch.tensor(getattr(single, name)))
    for name in ("pages", "oracle", "candidates", "place"):
        assert getattr(batched, name) == getattr(single, name), name
    assert len(set(single.candidates)) > 1  # the ranges change within a batch
    assert len(set(single.oracle)) > 3


def test_a_batch_holds_rows_of_one_layer_that_follow_one_another() -> None:
    assert batches_of([row(tokens) for tokens in range(100, 104)]) == [[100, 101, 102, 103]]
    assert batches_of([row(100), row(101), row(100, layer=1), row(101, layer=1)]) == [[100, 101], [100, 101]]
    assert batches_of([row(100), row(101, layer=1)]) == [[100], [101]]
    assert batches_of([row(100), row(102), row(101)]) == [[100], [102], [101]]
    for copied in (
        replace(row(101), keys=ROOM.clone()[0, :, :101]),
        replace(row(101), values=ROOM.clone()[1, :, :101]),
    ):  # nothing shows that it is the same sequence
        assert batches_of([row(100), copied]) == [[100], [101]]
    assert batches_of([row(tokens) for tokens in range(100, 230)]) == [
        list(range(100, 164)), list(range(164, 228)), [228, 229],
    ]  # fmt: skip
    assert batches_of([]) == []

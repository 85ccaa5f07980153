"""Tensors that every step uploads anew, to the same places."""

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.memory import step_tensors
from vllm_hybrid_sparse.memory.step_tensors import StepTensors

CPU = torch.device("cpu")


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_contents_change_and_places_do_not() -> None:
    tensors = StepTensors(CPU)
    table = np.arange(12, dtype=np.int64).reshape(3, 4)
    place, first = tensors.upload("rows", {"lengths": numbers(5, 6), "table": table})
    assert first["lengths"].tolist() == [5, 6]
    assert torch.equal(first["table"], torch.from_numpy(table))
    places = {name: part.data_ptr() for name, part in first.items()}
    again, second = tensors.upload("rows", {"lengths": numbers(7, 8), "table": table[::-1]})
    assert again == place
    assert {name: part.data_ptr() for name, part in second.items()} == places
    assert first["lengths"].tolist() == [7, 8]
    assert first["table"][0].tolist() == [8, 9, 10, 11]


def test_what_is_needed_at_the_same_time_lies_apart() -> None:
    tensors = StepTensors(CPU)
    (place, one), (other, two) = (tensors.upload(name, {"part": numbers(name)}) for name in (0, 1))
    assert place != other
    assert (one["part"].tolist(), two["part"].tolist()) == ([0], [1])


@pytest.mark.parametrize("changed", [{"part": np.zeros(2, np.int32)}, {"part": np.zeros(1, np.int64)}])
def test_other_shapes_and_dtypes_lie_elsewhere(changed: dict[str, np.ndarray]) -> None:
    tensors = StepTensors(CPU)
    place, kept = tensors.upload("rows", {"part": numbers(3)})
    other, made = tensors.upload("rows", changed)
    assert place != other
    assert kept["part"].tolist() == [3]
    assert made["part"].tolist() == changed["part"].tolist()
    assert made["part"].dtype == torch.from_numpy(changed["part"]).dtype


def test_parts_begin_where_torch_has_tensors_begin() -> None:
    parts = {name: numbers(*range(length)) for name, length in (("one", 1), ("two", 129), ("none", 0), ("last", 3))}
    _, uploaded = StepTensors(CPU).upload("rows", parts)
    first = uploaded["one"].data_ptr()
    assert [(part.data_ptr() - first) % 512 for part in uploaded.values() if part.numel()] == [0, 0, 0]
    assert [part.tolist() for part in uploaded.values()] == [part.tolist() for part in parts.values()]


def test_the_kind_used_longest_ago_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tensors, "_MOST", 2)
    tensors = StepTensors(CPU)
    kept, part = tensors.upload("kept", {"part": numbers(1)})
    tensors.upload("old", {"part": numbers(2)})
    assert tensors.upload("kept", {"part": numbers(3)})[0] == kept
    tensors.upload("new", {"part": numbers(4)})  # instead of "old"
    assert tensors.upload("kept", {"part": numbers(5)})[0] == kept
    assert part["part"].tolist() == [5]

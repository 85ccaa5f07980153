"""Answers decoded from a shared prefill equal those of separate runs."""

import pytest
import torch
from transformers import DynamicCache

from benchmarks.accuracy.answers import Answer, Prefill, answer
from benchmarks.accuracy.kept_mass import KeptMass
from benchmarks.accuracy.selections import SELECTIONS, open_decoding
from tests.benchmarks.tiny import tiny_model
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.values import RetainedSet

LIMIT = 12


def ids() -> torch.Tensor:
    return torch.randint(256, (900,), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def greedy(selection: str, count: int) -> list[int]:
    """The answer of a run that shares nothing."""
    model, cache, said = tiny_model(), DynamicCache(), []
    with open_decoding(model, "full", max_tokens=1000):
        model(ids()[None, :-1], past_key_values=cache)
    with open_decoding(model, selection, max_tokens=1000) as decoding:
        decoding.adopt()
        fed = int(ids()[-1])
        while len(said) < count:
            fed = int(model(torch.tensor([[fed]]), past_key_values=cache).logits[0, -1].argmax())
            said.append(fed)
    return said


def test_one_prefill_serves_selections_one_after_another() -> None:
    prefill = Prefill(tiny_model(), ids(), new_tokens=LIMIT)
    full = answer(prefill, "full", None, LIMIT, set())
    assert full.token_ids == full.along == greedy("full", LIMIT)
    differ = 0
    for selection in ("quest-2%", "random-5%", "full", "quest-2%"):
        said = answer(prefill, selection, full.token_ids, LIMIT, set())
        assert said.token_ids == greedy(selection, LIMIT)
        assert len(said.along) == LIMIT
        assert len(said.record.kept) == LIMIT * 2 * 2  # steps along the answer, layers, KV heads; no later steps
        differ += said.token_ids != full.token_ids
    assert differ >= 2


@torch.inference_mode()
def test_hgca_answers_from_a_shared_prefill_as_from_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELECTIONS, "hgca", {"policy": "hgca", "hgca_beta": 2, "window_tokens": 64})
    model, cache = tiny_model(), DynamicCache()
    own: list[int] = []
    with open_decoding(model, "hgca", max_tokens=1000):
        model(ids()[None, :-1], past_key_values=cache)
        fed = int(ids()[-1])
        while len(own) < LIMIT:
            fed = int(model(torch.tensor([[fed]]), past_key_values=cache).logits[0, -1].argmax())
            own.append(fed)
    prefill = Prefill(tiny_model(), ids(), new_tokens=LIMIT)
    full = answer(prefill, "full", None, LIMIT, set()).token_ids
    said = answer(prefill, "hgca", full, LIMIT, set())
    assert said.token_ids == own != full
    assert len(said.record.kept) == LIMIT * 2 * 2  # without the rows that judge and the steps decoded again
    assert 0 < said.stats.pages_read < said.stats.pages_total


def test_full_attention_agrees_with_itself_and_reads_everything() -> None:
    prefill = Prefill(tiny_model(), ids(), new_tokens=LIMIT)
    full = answer(prefill, "full", None, LIMIT, set())
    again = answer(prefill, "full", full.token_ids, LIMIT, set())
    assert again.agreement(full.token_ids) == {
        "top1_agreement": 1.0, "equal_before_difference": 1.0, "exactly_equal": 1.0,
    }  # fmt: skip
    assert again.stats == full.stats
    assert full.stats.pages_read == full.stats.pages_total > 0


def test_an_answer_ends_with_the_end_of_the_sequence() -> None:
    prefill = Prefill(tiny_model(), ids(), new_tokens=LIMIT)
    full = answer(prefill, "full", None, LIMIT, set()).token_ids
    assert answer(prefill, "full", None, LIMIT, {full[4]}).token_ids == full[: full.index(full[4]) + 1]
    quest = answer(prefill, "quest-2%", full, LIMIT, set()).token_ids
    stop = next(token for token in quest if token not in full)
    assert answer(prefill, "quest-2%", full, LIMIT, {stop}).token_ids == quest[: quest.index(stop) + 1]


@pytest.mark.parametrize(
    ("along", "shares"),
    [([5, 6, 7, 8], (1.0, 1.0, 1.0)), ([5, 0, 7, 8], (0.75, 0.25, 0.0)), ([0, 6, 7, 0], (0.5, 0.0, 0.0))],
)
def test_agreement_by_hand(along: list[int], shares: tuple[float, ...]) -> None:
    said = Answer([], along, DecodeStats(), KeptMass(RetainedSet(), 0.9))
    assert tuple(said.agreement([5, 6, 7, 8]).values()) == shares

"""The laboratory's figures against counting by hand."""

import dataclasses
import itertools

import torch

from benchmarks.accuracy.kept_mass import KeptMass, oracle_pages, page_shares, token_weights
from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.values import RetainedSet

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)


def make_step(tokens: int, plans: list[list[int]]) -> DecodeStep:
    generator = torch.Generator().manual_seed(tokens)
    keys = torch.randn(2, tokens, 16, generator=generator)
    query = 3 * torch.randn(6, 16, generator=generator)
    return DecodeStep(0, query, keys, keys, 0.25, plans, torch.zeros(6, 16))


def test_shares_are_those_of_the_softmax() -> None:
    step = make_step(100, [[], []])
    shares = page_shares(step)
    assert shares.shape == (2, 3, 7)
    weights = (0.25 * step.query[4] @ step.keys[1].T).softmax(dim=0)
    torch.testing.assert_close(shares[1, 1, 6], weights[96:].sum())
    torch.testing.assert_close(shares.sum(dim=-1), torch.ones(2, 3))


def test_an_oracle_of_one_head_reads_as_few_pages_as_any_choice() -> None:
    for seed in range(20):
        shares = torch.rand(1, 7, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)
        candidates, retained = shares[:, :6], shares[:, 6]
        enough = [
            size
            for size in range(7)
            for pages in itertools.combinations(range(6), size)
            if float(retained + candidates[:, list(pages)].sum(dim=1)) >= 0.6
        ]
        assert oracle_pages(candidates, retained, 0.6) == min(enough)


def test_a_promise_that_the_retained_set_keeps_costs_nothing() -> None:
    assert oracle_pages(torch.tensor([[0.01, 0.02], [0.03, 0.01]]), torch.tensor([0.97, 0.96]), 0.95) == 0


def test_the_head_that_kept_least_counts() -> None:
    record = KeptMass(RETAINED, 0.95)
    step = make_step(130, [[2, 4], [1, 2, 3, 4, 5]])
    record.watch([step])
    first, end = RETAINED.candidate_range(130)
    assert (first, end) == (1, 6)
    assert record.pages == [2, 5]
    assert record.candidates == [5, 5]
    dropped = page_shares(step)[0][:, [1, 3, 5]].sum(dim=1)
    assert abs(record.kept[0] - float(1 - dropped.max())) < 1e-6
    assert abs(record.kept[1] - 1) < 1e-6
    summary = record.summary()
    assert summary["pages_read"] == 0.7
    assert summary["kept_worst"] == record.kept[0]


def test_salient_tokens_count_as_read_in_the_pages_that_hold_their_copies() -> None:
    record = KeptMass(RETAINED, 0.95)
    packed = [[17, 18, 95], list(range(16, 96, 4))]
    step = dataclasses.replace(make_step(130, [[], []]), packed=packed)
    record.watch([step])
    assert record.pages == [1, 2]
    weights = token_weights(step.query, step.keys, step.scale)
    for head, positions in enumerate(packed):
        kept = weights[head][:, [*range(16), *positions, *range(96, 130)]].sum(dim=1)
        assert abs(record.kept[head] - float(kept.min())) < 1e-6


def test_deciles_of_a_layer_are_those_of_its_steps_and_heads() -> None:
    record = KeptMass(RETAINED, 0.95)
    for tokens in range(120, 140):
        record.watch([dataclasses.replace(make_step(tokens, [[], []]), layer=tokens % 2)])
    of_second = sorted(
        need / candidates
        for need, candidates, (layer, _) in zip(record.oracle, record.candidates, record.place, strict=True)
        if layer == 1
    )
    deciles = record.oracle_deciles()
    assert [len(layer) for layer in deciles] == [11, 11]
    assert (deciles[1][0], deciles[1][10]) == (round(of_second[0], 5), round(of_second[-1], 5))
    assert abs(deciles[1][5] - (of_second[9] + of_second[10]) / 2) < 1e-5
    assert KeptMass(RETAINED, 0.95).oracle_deciles() == []


def test_a_layer_of_which_nothing_was_recorded_has_no_deciles() -> None:
    record = KeptMass(RETAINED, 0.95)
    record.watch([dataclasses.replace(make_step(130, [[], []]), layer=2)])
    assert [len(layer) for layer in record.oracle_deciles()] == [0, 0, 11]


def test_a_promise_that_nothing_keeps_needs_all_candidates() -> None:
    record = KeptMass(RETAINED, 1.01)
    record.watch([make_step(130, [[], []])])
    assert record.oracle == record.candidates == [5, 5]


def test_means_by_layer_and_head_are_those_of_the_records() -> None:
    record = KeptMass(RETAINED, 0.95)
    steps = [(0, make_step(130, [[2, 4], [1]])), (1, make_step(131, [[], [3]])), (1, make_step(132, [[5], [1, 2]]))]
    for layer, step in steps:
        record.watch([dataclasses.replace(step, layer=layer)])
    heads = record.by_head()
    assert heads["pages_read"] == [[0.4, 0.2], [0.1, 0.3]]
    expected = [record.kept[:2], [(record.kept[2] + record.kept[4]) / 2, (record.kept[3] + record.kept[5]) / 2]]
    torch.testing.assert_close(torch.tensor(heads["kept"]), torch.tensor(expected), atol=1e-5, rtol=0)


def test_the_output_error_is_relative_to_the_longest_output_of_the_layer() -> None:
    step = make_step(100, [[1], [1]])
    values = step.values
    weights = token_weights(step.query, step.keys, step.scale)
    true = (weights @ values).reshape(6, 16)
    wrong = true.clone()
    wrong[4] += 0.5
    record = KeptMass(RETAINED, 0.95)
    record.watch([dataclasses.replace(step, output=wrong)])
    norms = [float(sum(value**2 for value in row.tolist()) ** 0.5) for row in true]
    assert abs(record.error[0]) < 1e-6
    assert abs(record.error[1] - 0.5 * 16**0.5 / max(norms)) < 1e-5


def test_a_group_reads_until_all_its_heads_have_enough() -> None:
    candidates = torch.tensor([[[0.4, 0.1, 0.0], [0.0, 0.2, 0.3]], [[0.1, 0.1, 0.1], [0.1, 0.1, 0.1]]])
    retained = 1 - candidates.sum(dim=-1)
    assert oracle_pages(candidates, retained, 0.85).tolist() == [3, 2]  # order 0, 2, 1: head 1 has 0.8 after two
    assert oracle_pages(candidates, retained, 0.75).tolist() == [2, 1]
    assert oracle_pages(candidates[..., :0], torch.ones(2, 2), 0.9).tolist() == [0, 0]

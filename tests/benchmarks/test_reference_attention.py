"""The reference reads the pages that its rule chooses, and no others."""

import pytest
import torch
from transformers import DynamicCache

from benchmarks.accuracy.kept_mass import KeptMass, page_shares
from benchmarks.accuracy.reference_attention import PageRule, ReferenceSession
from benchmarks.accuracy.selections import REFERENCES, SELECTIONS, open_decoding
from tests.benchmarks.tiny import tiny_model
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep
from vllm_hybrid_sparse.values import RetainedSet

TOKENS = 700
RETAINED = RetainedSet(sink_tokens=16, window_tokens=64)


@torch.inference_mode()
def decode(rule: PageRule) -> tuple[torch.Tensor, list[DecodeStep], ReferenceSession]:
    model, steps, cache = tiny_model(), list[DecodeStep](), DynamicCache()
    ids = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with ReferenceSession(model, rule, watch=steps.append) as session:
        model(ids[:, :-1], past_key_values=cache)
        logits = model(ids[:, -1:], past_key_values=cache).logits
    return logits, steps, session


@torch.inference_mode()
def test_row_by_row_one_call_decodes_as_many_calls() -> None:
    model, ids = tiny_model(), torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    results = []
    for at_once in (False, True):
        cache, steps = DynamicCache(), list[DecodeStep]()
        with ReferenceSession(model, PageRule(order="oracle", ratio=0.1), watch=steps.append) as session:
            model(ids[:, :680], past_key_values=cache)
            if at_once:
                with session.row_by_row():
                    logits = model(ids[:, 680:], past_key_values=cache).logits
            else:
                logits = torch.cat(
                    [model(ids[:, [place]], past_key_values=cache).logits for place in range(680, 700)], 1
                )
            plans = [step.plans for step in sorted(steps, key=lambda step: (step.keys.shape[1], step.layer))]
            results.append((logits, plans, session.take_stats()))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-4, rtol=1e-4)
    assert results[1][1:] == results[0][1:]


@torch.inference_mode()
def test_reading_everything_is_full_attention() -> None:
    logits, steps, session = decode(PageRule(order="oracle", ratio=1.0))
    ids = torch.randint(256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits[0, -1], tiny_model()(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
    stats = session.take_stats()
    assert stats.pages_read == stats.pages_total == 2 * 2 * 44  # layers, KV heads, pages of 700 tokens
    assert session.take_stats().pages_total == 0
    assert len(steps) == 2


def test_the_output_is_the_attention_over_exactly_the_chosen_pages() -> None:
    rule = PageRule(order="random", ratio=0.1, retained=RETAINED)
    _, steps, session = decode(rule)
    step = steps[0]
    assert all(len(plan) == 4 for plan in step.plans)  # 10 % of 38 candidates, rounded up
    for head in range(6):
        plan = step.plans[head // 3]
        pages = sorted([0, *plan, *range(39, 44)])
        places = [16 * page + offset for page in pages for offset in range(16) if 16 * page + offset < TOKENS]
        keys, values = step.keys[head // 3][places], step.values[head // 3][places]
        weights = (step.scale * keys @ step.query[head]).softmax(dim=0)
        torch.testing.assert_close(step.output[head], weights @ values)
    stats = session.take_stats()
    assert stats.pages_read == 2 * 2 * (4 + 6)
    assert stats.read_bytes == stats.pages_read * 2 * 16 * 16 * 4


def test_the_oracle_reads_the_heaviest_pages_and_chance_reads_others() -> None:
    _, (step, _), _ = decode(PageRule(order="oracle", ratio=0.1, retained=RETAINED))
    shares = page_shares(step)[:, :, 1:39].amax(dim=1)
    for head in range(2):
        assert sorted(step.plans[head]) == sorted((shares[head].topk(4).indices + 1).tolist())
    _, (other, _), _ = decode(PageRule(order="random", ratio=0.1, retained=RETAINED))
    assert other.plans != step.plans
    assert decode(PageRule(order="random", ratio=0.1, retained=RETAINED))[1][0].plans == other.plans  # repeatable


def test_an_oracle_keeps_its_promise_in_every_head_with_no_page_to_spare() -> None:
    _, steps, _ = decode(PageRule(order="oracle", promise=0.8, retained=RETAINED))
    record = KeptMass(RETAINED, 0.8)
    for step in steps:
        record.watch([step])
    assert min(record.kept) >= 0.8 - 1e-6
    assert record.pages == record.oracle
    assert 0 < sum(record.pages) < sum(record.candidates)


@pytest.mark.parametrize(
    "wrong", [{"order": "best", "ratio": 0.1}, {"order": "oracle"}, {"order": "random", "promise": 0.9}]
)
def test_what_is_no_rule_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"order=|ratio=|promise="):
        PageRule(**wrong)


def test_one_session_at_a_time() -> None:
    with (
        open_decoding(tiny_model(), "oracle-5%", max_tokens=10),
        pytest.raises(ValueError, match="one at a time"),
        open_decoding(tiny_model(), "random-5%", max_tokens=10),
    ):
        pass


def test_every_selection_can_be_opened_and_is_one_thing() -> None:
    assert not set(SELECTIONS) & set(REFERENCES)
    for settings in SELECTIONS.values():
        HybridSparseConfig.from_mapping(settings)

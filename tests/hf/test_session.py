"""Transformers models answer as before where our attention is exact, and read less where it is not."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPTJConfig, GPTJForCausalLM, PreTrainedModel

from tests.hf.tiny_models import NEW_TOKENS, PROMPT_TOKENS, answer, prompt, tiny_gpt2, tiny_llama
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError, KernelError
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.predictor.model import ModelShape, Predictor, PredictorOrigin
from vllm_hybrid_sparse.values import PageRanking, RetainedSet


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize(
    "settings", [{"policy": "dense"}, {"policy": "progressive", "threshold": 1}], ids=["dense", "progressive"]
)
def test_exact_policies_answer_as_before(make: type[PreTrainedModel], settings: dict[str, object]) -> None:
    model = make()
    before = [answer(model, prompt(seed)) for seed in (1, 2)]
    with SparseSession(model, HybridSparseConfig.from_mapping(settings), max_tokens=1024):
        assert [answer(model, prompt(seed)) for seed in (1, 2)] == before
    assert answer(model, prompt()) == before[0]  # and after the session


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_in_eight_bits_are_near_those_of_the_model(dtype: torch.dtype) -> None:
    model, seen = tiny_llama(dtype), list[DecodeStep]()
    settings = HybridSparseConfig(policy="dense")
    with SparseSession(model, settings, max_tokens=1024, watch=seen.append, kv_dtype=torch.float8_e4m3fn):
        answer(model, prompt())
    for step in seen:
        key, value = (
            rows.to(torch.bfloat16).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            for rows in (step.keys, step.values)
        )
        query = step.query.to(torch.bfloat16).float().view(2, 3, 16)
        expected = (step.scale * query @ key.transpose(1, 2)).softmax(dim=-1) @ value
        torch.testing.assert_close(step.output.float().view(2, 3, 16), expected, rtol=2e-2, atol=2e-2)
        exact = (step.scale * query @ step.keys.float().transpose(1, 2)).softmax(dim=-1) @ step.values.float()
        assert not torch.allclose(expected, exact, rtol=1e-3, atol=1e-3), "nothing was rounded"


def test_a_sparse_policy_reads_less_and_says_what() -> None:
    model, seen = tiny_llama(torch.bfloat16), list[DecodeStep]()
    settings = HybridSparseConfig(policy="topk", topk_pages=3)
    with SparseSession(model, settings, max_tokens=1024, watch=seen.append) as session:
        answer(model, prompt())
        stats = session.runtime.take_stats()
    assert len(seen) == 3 * (NEW_TOKENS - 1)  # the first token comes from the prefill
    assert all(len(plan) == 3 for step in seen for plan in step.plans)
    assert seen[0].query.shape == (6, 16)
    assert seen[0].keys.shape == (2, PROMPT_TOKENS + 1, 16)
    assert 0 < stats.pages_read < stats.pages_total
    assert stats.rows == NEW_TOKENS - 1
    assert stats.selections == 3 * 2 * stats.rows  # layers × KV heads


def test_hgca_with_everything_salient_answers_as_before() -> None:
    model = tiny_llama()
    before = [answer(model, prompt(seed)) for seed in (1, 2)]
    settings = HybridSparseConfig(policy="hgca", hgca_beta=1e-30, window_tokens=64)
    with SparseSession(model, settings, max_tokens=1024):
        assert [answer(model, prompt(seed)) for seed in (1, 2)] == before


def test_hgca_reads_less_and_a_turn_that_is_appended_is_judged_anew() -> None:
    model = tiny_llama(torch.bfloat16)
    settings = HybridSparseConfig(policy="hgca", hgca_beta=2, window_tokens=64)
    with SparseSession(model, settings, max_tokens=1024) as session, torch.no_grad():
        cache = model(prompt()).past_key_values
        for token in prompt(2)[0, :20]:
            model(token[None, None], past_key_values=cache)
        packed = [session.hgca_positions(layer) for layer in range(3)]
        model(prompt(3)[:, :37], past_key_values=cache)
        assert all(session.hgca_positions(layer) != packed[layer] for layer in range(3))
        model(prompt(3)[:, :1], past_key_values=cache)
        stats = session.runtime.take_stats()
        assert session.runtime.packed_bytes > 0
    assert 0 < stats.pages_read < stats.pages_total


def test_hgca_begins_every_sequence_with_nothing_of_the_last() -> None:
    model = tiny_llama()
    settings = HybridSparseConfig(policy="hgca", hgca_beta=3, window_tokens=64)
    with SparseSession(model, settings, max_tokens=1024):
        first = answer(model, prompt(1))
        answer(model, prompt(2))
        assert answer(model, prompt(1)) == first


def save_predictor(path: Path, base_budget: float, layers: int = 3, unread_attributed: float = 0.0) -> str:
    """Save a predictor for the tiny Llama that gives every head this share of the host segment; return its path."""
    predictor = Predictor()
    predictor.target_mean.copy_(torch.tensor([base_budget, 0.0]))
    predictor.target_std.zero_()
    with torch.no_grad():
        predictor.outputs.bias[2] = -100.0
    shape = ModelShape(layers=layers, query_heads=6, kv_heads=2, head_dim=16)
    retained = RetainedSet(window_tokens=64)
    origin = PredictorOrigin(
        shape=shape,
        model="",
        tau=0.1,
        retained=retained,
        ranking=PageRanking(),
        command="",
        validation={},
        unread_attributed=unread_attributed,
    )
    predictor.save(path, origin)
    return str(path)


def test_fluxion_with_everything_selected_answers_as_before(tmp_path: Path) -> None:
    model = tiny_llama()
    before = [answer(model, prompt(seed)) for seed in (1, 2)]
    predictor = save_predictor(tmp_path / "all.safetensors", 1.0)
    settings = HybridSparseConfig(policy="fluxion", predictor=predictor, window_tokens=64, dense_tokens=0)
    with SparseSession(model, settings, max_tokens=1024) as session:
        assert [answer(model, prompt(seed)) for seed in (1, 2)] == before
        stats = session.take_stats()
    assert stats.pages_read == stats.pages_total
    assert stats.anchor_bytes > 0
    assert "anchors took" in stats.describe()


@pytest.mark.parametrize(("setting", "warned"), [(0.5, False), (1.0, False), (0.25, True), (0.0, True)])
def test_a_predictor_that_counts_on_more_of_the_unread_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, setting: float, warned: bool
) -> None:
    predictor = save_predictor(tmp_path / "p.safetensors", 0.1, unread_attributed=0.5)
    settings = HybridSparseConfig(policy="fluxion", predictor=predictor, window_tokens=64, unread_attributed=setting)
    with SparseSession(tiny_llama(), settings, max_tokens=1024):
        said = f"hybrid_sparse.unread_attributed={setting}: the predictor's budgets count on 0.5" in caplog.text
        assert said == warned


@torch.inference_mode()
def test_fluxion_reads_less_from_a_prefill_and_from_an_adopted_cache(tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompt()
    predictor = save_predictor(tmp_path / "little.safetensors", 0.1)
    settings = HybridSparseConfig(
        policy="fluxion", predictor=predictor, window_tokens=64, granularity=16, dense_tokens=0
    )
    seen = list[DecodeStep]()
    with SparseSession(model, settings, max_tokens=1024, watch=seen.append) as session:
        cache = DynamicCache()
        model(ids[:, :690], past_key_values=cache)
        first = [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(690, 700)]
        cache.crop(-10)
        session.adopt()
        again = [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(690, 700)]
    candidates = len(range(*RetainedSet(window_tokens=64).candidate_range(691)))
    assert all(math.ceil(0.1 * candidates) <= len(plan) <= 3 * 4 < candidates for step in seen for plan in step.plans)
    # A predictor that says the same of every head uses nothing of the anchor, so both ways read the same.
    torch.testing.assert_close(torch.cat(again), torch.cat(first))


def test_a_predictor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    other = save_predictor(tmp_path / "other.safetensors", 0.1, layers=4)
    for settings, refusal in (
        ({"predictor": other, "window_tokens": 64}, f"predictor={other}: made for layers=4, not 3"),
        ({}, "hybrid_sparse.predictor: must be given"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            SparseSession(model, HybridSparseConfig(policy="fluxion", **settings), max_tokens=1024)


def test_what_cannot_be_served_is_refused() -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError, match="device='emulated': a session attends on the CPU alone"):
        SparseSession(model, HybridSparseConfig(device="emulated"), max_tokens=64)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        SparseSession(model, HybridSparseConfig(), max_tokens=0)
    with SparseSession(model, HybridSparseConfig(), max_tokens=512):
        with pytest.raises(ConfigError, match=r"query\.shape\[0\]=2: must be 1"):
            model(prompt().repeat(2, 1))
        padded = torch.ones_like(prompt())
        padded[0, :3] = 0
        with pytest.raises(ConfigError, match="attention_mask: must be all ones"):
            model(prompt(), attention_mask=padded)
        with pytest.raises(ConfigError, match=r"attention_mask of shape \(1, 1, \d+, \d+\): must be none"):
            model(prompt(), attention_mask=torch.zeros(1, 1, PROMPT_TOKENS, PROMPT_TOKENS))
        with pytest.raises(ConfigError, match=f"max_tokens=512: the sequence has {PROMPT_TOKENS}"):
            model(prompt())
        with (
            pytest.raises(ConfigError, match="one at a time"),
            SparseSession(model, HybridSparseConfig(), max_tokens=1),
        ):
            pass
    model.set_attn_implementation("hybrid_sparse")
    with pytest.raises(ConfigError, match="enter a SparseSession"):
        model(prompt())


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"position_bias": 1.0}, "position_bias=1.0: must be none"),
        ({"block_indices": 3}, "block_indices=3: must be none"),
    ],
)
def test_what_a_layer_asks_of_its_attention_is_not_ignored(asked: dict[str, Any], refusal: str) -> None:
    """Transformers hands on what it does not know."""
    model = tiny_llama()
    with SparseSession(model, HybridSparseConfig(), max_tokens=512), pytest.raises(ConfigError, match=refusal):
        model(prompt()[:, :20], **asked)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.is_causal = False
    refusal = "is_causal=False: must be true"
    with SparseSession(model, HybridSparseConfig(), max_tokens=512), pytest.raises(ConfigError, match=refusal):
        model(prompt()[:, :20])


def test_a_model_that_attends_by_code_of_its_own_is_refused() -> None:
    model = GPTJForCausalLM(GPTJConfig(vocab_size=128, n_positions=256, n_embd=64, n_layer=1, n_head=4, rotary_dim=16))
    with (
        pytest.raises(ConfigError, match="model=GPTJForCausalLM: must attend through Transformers' AttentionInterface"),
        SparseSession(model, HybridSparseConfig(), max_tokens=64),
    ):
        pass


def test_sequences_side_by_side_are_refused() -> None:
    model, half = tiny_llama(), torch.arange(PROMPT_TOKENS // 2)
    with (
        SparseSession(model, HybridSparseConfig(), max_tokens=1024),
        pytest.raises(ConfigError, match="must be causal over one whole sequence"),
    ):
        model(prompt(), position_ids=torch.cat((half, half))[None], use_cache=False)


def test_a_cache_of_another_sequence_is_not_taken_for_the_stored_one() -> None:
    model, token = tiny_llama(), torch.tensor([[5]])
    with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=1024) as session, torch.no_grad():
        first = model(prompt(1)).past_key_values
        alone = model(token, past_key_values=copy.deepcopy(first)).logits
        second = model(prompt(2)).past_key_values
        with pytest.raises(KernelError, match=r"another sequence than is stored; call adopt\(\) before"):
            model(token, past_key_values=copy.deepcopy(first))
        session.adopt()
        torch.testing.assert_close(model(token, past_key_values=first).logits, alone)
        session.adopt()
        model(token, past_key_values=second)


@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean", "key_codes"])
@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 130, 511, 512, 513])
def test_an_adopted_cache_is_decoded_as_if_prefilled_here(summary: str, tokens: int) -> None:
    model, ids = tiny_llama(), prompt()[:, : tokens + 1]
    settings = HybridSparseConfig(policy="topk", topk_pages=2, summary=summary, window_tokens=64)
    results = []
    for adopts in (False, True):
        cache, seen = DynamicCache(), list[DecodeStep]()
        if adopts:
            with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=512 + 1):
                model(ids[:, :-1], past_key_values=cache)
        with SparseSession(model, settings, max_tokens=512 + 2, watch=seen.append) as session:
            if adopts:
                session.adopt()
            else:
                model(ids[:, :-1], past_key_values=cache)
                session.take_stats()
            seen.clear()
            logits = model(ids[:, -1:], past_key_values=cache).logits
            results.append((logits, [step.plans for step in seen], session.take_stats()))
    (logits, plans, stats), (adopted_logits, adopted_plans, adopted_stats) = results
    torch.testing.assert_close(adopted_logits, logits)
    assert adopted_plans == plans
    if tokens > 1:  # a whole prompt of one token is a decode row and counted as one
        assert adopted_stats == stats


def biased_llama() -> PreTrainedModel:
    """A model whose keys have a large bias. What they have in common is taken out of 32 pages together."""
    model = tiny_llama(attention_bias=True)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias[[4, 5, 6, 7, 12, 13, 14, 15]] = 60.0  # pairs of the first KV head that turn slowly
    return model


@torch.inference_mode()
def test_what_keys_have_in_common_stays_in_where_that_is_asked_for() -> None:
    model, ids = biased_llama(), prompt()
    query = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    scores = {}
    for common_keys in (True, False):
        settings = HybridSparseConfig(window_tokens=64)
        with SparseSession(model, settings, max_tokens=PROMPT_TOKENS, common_keys=common_keys) as session:
            model(ids, past_key_values=DynamicCache())
            scores[common_keys] = session.score_candidates(0, query)
    first_head = slice(0, 3)  # the group whose keys are biased
    assert not torch.allclose(scores[True][first_head], scores[False][first_head], atol=0.1)
    torch.testing.assert_close(scores[True][3:], scores[False][3:])


def test_keys_with_a_large_bias_are_encoded_alike_in_an_adopted_cache() -> None:
    """They are encoded 32 pages together, that is four of the stored blocks."""
    model, ids = biased_llama(), prompt()
    query = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    scores = []
    for adopts in (False, True):
        cache = DynamicCache()
        if adopts:
            with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=PROMPT_TOKENS):
                model(ids[:, :-1], past_key_values=cache)
        with SparseSession(model, HybridSparseConfig(window_tokens=64), max_tokens=PROMPT_TOKENS) as session:
            if adopts:
                session.adopt()
            else:
                model(ids[:, :-1], past_key_values=cache)
            model(ids[:, -1:], past_key_values=cache)
            scores.append([session.score_candidates(index, query) for index in range(3)])
    torch.testing.assert_close(scores[1], scores[0])


@pytest.mark.parametrize("tokens", [15, 16, 17, 450, 464, 465])
@torch.inference_mode()
def test_hgca_packs_of_an_adopted_cache_what_it_packs_after_a_prefill(tokens: int) -> None:
    model, ids = tiny_llama(), prompt()
    settings = HybridSparseConfig(policy="hgca", hgca_beta=1.5, window_tokens=64)
    before = max(0, tokens - 16)
    results = []
    for adopts in (False, True):
        cache, seen = DynamicCache(), list[DecodeStep]()
        if adopts and before:
            with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=1024):
                model(ids[:, :before], past_key_values=cache)
        with SparseSession(model, settings, max_tokens=1024, watch=seen.append) as session:
            if adopts:
                model(prompt(2)[:, : before + 1])  # another sequence: nothing of it may stay
                session.adopt()
            model(ids[:, 0 if not adopts else before : tokens], past_key_values=cache)
            session.take_stats()
            seen.clear()
            packed = [session.hgca_positions(layer) for layer in range(3)]
            logits = [model(ids[:, [place]], past_key_values=cache).logits for place in range(tokens, tokens + 40)]
            after = [session.hgca_positions(layer) for layer in range(3)]
            results.append((torch.cat(logits), packed, after, [step.packed for step in seen], session.take_stats()))
    (logits, *found), (adopted_logits, *adopted) = results
    # Another chunk of the prompt adds up in another order, in each of three layers.
    torch.testing.assert_close(adopted_logits, logits, rtol=1.3e-6, atol=2e-5)
    assert adopted == found
    assert any(found[0][0]) == (tokens > 64 + 64 + 16)
    assert found[2][-3:] == found[1]  # what a watcher is told of the last step


@torch.inference_mode()
def test_hgca_does_not_adopt_a_cache_without_the_rows_that_judge() -> None:
    model, ids, cache = tiny_llama(), prompt(), DynamicCache()
    with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=1024):
        model(ids[:, :500], past_key_values=cache)
    with SparseSession(model, HybridSparseConfig(policy="hgca"), max_tokens=1024) as session:
        session.adopt()
        with pytest.raises(ConfigError, match=r"tokens=4: .*at least the last page's 8"):
            model(ids[:, 500:504], past_key_values=cache)


@pytest.mark.parametrize("settings", [{"policy": "topk", "topk_pages": 2}, {"policy": "hgca"}], ids=["topk", "hgca"])
@torch.inference_mode()
def test_row_by_row_one_call_decodes_as_many_calls(settings: dict[str, object]) -> None:
    model, ids = tiny_llama(), prompt()
    results = []
    for at_once in (False, True):
        cache, seen = DynamicCache(), list[DecodeStep]()
        config = HybridSparseConfig.from_mapping({**settings, "window_tokens": 64})
        with SparseSession(model, config, max_tokens=1024, watch=seen.append) as session:
            model(ids[:, :600], past_key_values=cache)
            if at_once:
                with session.row_by_row():
                    logits = model(ids[:, 600:650], past_key_values=cache).logits
            else:
                single = [model(ids[:, [place]], past_key_values=cache).logits for place in range(600, 650)]
                logits = torch.cat(single, dim=1)
            stats = session.take_stats()
            model(ids[:, 650:], past_key_values=cache)  # rows of a prompt again
            assert session.take_stats().pages_total == 0
        steps = sorted(seen, key=lambda step: (step.keys.shape[1], step.layer))
        results.append((logits, stats, [(step.plans, step.packed) for step in steps]))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-4, rtol=1e-4)
    assert results[1][1:] == results[0][1:]


@torch.inference_mode()
def test_a_cropped_cache_can_be_decoded_from_again() -> None:
    model, ids = tiny_llama(), prompt()
    settings = HybridSparseConfig(policy="topk", topk_pages=2, window_tokens=64)
    with SparseSession(model, settings, max_tokens=1024) as session:
        cache = DynamicCache()
        model(ids[:, :650], past_key_values=cache)
        first = [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(650, 690)]
        cache.crop(-40)
        with pytest.raises(KernelError, match="690 are stored"):
            model(ids[:, 650:651], past_key_values=copy.deepcopy(cache))
        session.adopt()
        again = [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(650, 690)]
    torch.testing.assert_close(torch.cat(again), torch.cat(first))


def test_what_a_watcher_sees_put_out_is_the_attention_over_what_was_read() -> None:
    model, seen = tiny_llama(), list[DecodeStep]()
    with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=1024, watch=seen.append):
        answer(model, prompt())
    step = seen[4]
    keys, values = (part.repeat_interleave(3, dim=0) for part in (step.keys, step.values))
    weights = (step.scale * torch.einsum("hd,htd->ht", step.query, keys)).softmax(dim=-1)
    torch.testing.assert_close(step.output, torch.einsum("ht,htd->hd", weights, values))

"""Layers with a sliding window attend as before; the others beside them are read sparsely."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tests.hf.tiny_models import NEW_TOKENS, answer, prompt, tiny_gemma3
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("layers", [(SLIDING, FULL, SLIDING, FULL), (FULL, SLIDING), (SLIDING, SLIDING)])
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_layers_with_a_window_see_it_whole(layers: tuple[str, ...], rows: int) -> None:
    model, ids = tiny_gemma3(layers), prompt()
    with torch.no_grad():
        expected = model(ids).logits[:, -rows:]
        assert not torch.allclose(expected, tiny_gemma3((FULL,) * len(layers))(ids).logits[:, -rows:], atol=1e-2)
        with SparseSession(model, HybridSparseConfig(policy="dense"), max_tokens=1024) as session:
            cache = model(ids[:, :-rows]).past_key_values
            with session.row_by_row():
                given = model(ids[:, -rows:], past_key_values=cache).logits
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def test_beside_layers_with_a_window_the_others_are_read_sparsely() -> None:
    model, seen = tiny_gemma3((SLIDING, FULL, SLIDING, FULL)), list[DecodeStep]()
    settings = HybridSparseConfig(policy="topk", topk_pages=3)
    with SparseSession(model, settings, max_tokens=1024, watch=seen.append) as session:
        answer(model, prompt())
        stats = session.take_stats()
    assert [step.layer for step in seen] == [1, 3] * (NEW_TOKENS - 1)
    assert all(len(plan) == 3 for step in seen for plan in step.plans)
    assert stats.rows == NEW_TOKENS - 1
    assert stats.selections == 2 * stats.rows


@pytest.mark.parametrize("policy", ["hgca", "fluxion"])
def test_policies_with_state_of_requests_are_refused_beside_windows(policy: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    mistral = MistralForCausalLM(MistralConfig(vocab_size=128, num_key_value_heads=2, sliding_window=64, **sizes))
    for model in (tiny_gemma3((SLIDING, FULL)), mistral):
        with pytest.raises(ConfigError, match=f"policy='{policy}': not supported beside layers with a sliding window"):
            SparseSession(model, HybridSparseConfig(policy=policy), max_tokens=64)

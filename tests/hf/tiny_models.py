"""Small Transformers models with random weights, and what is asked of them."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

PROMPT_TOKENS, NEW_TOKENS = 700, 8


def tiny_llama(dtype: torch.dtype = torch.float32, *, attention_bias: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        attention_bias=attention_bias,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_positions=1024, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    return GPT2LMHeadModel(config).eval()


def prompt(seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 128, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(seed))


def answer(model: PreTrainedModel, ids: torch.Tensor) -> list[int]:
    generated = model.generate(
        ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    return generated[0, ids.shape[1] :].tolist()


def tiny_gemma3(layers: tuple[str, ...]) -> PreTrainedModel:
    """A Gemma 3 with a window of 64 tokens in the layers that are `sliding_attention`."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        layer_types=list(layers),
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return Gemma3ForCausalLM(config).eval()

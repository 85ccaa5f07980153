"""Tiny random-weight checkpoints of the families that users run, made on the fly and offline.

The weights are scaled so that attention is far from flat (score deviation about 2.5) and every layer matters: an
attention that drops or repeats a page changes the greedy answer. Run as a program to make and list them all:

    python -m tests.system.tiny_models DIRECTORY
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SCORE_DEVIATION = 2.5  # of query·key/√head_dim at random weights; 0.1 with the library's own initialisation
MAX_POSITIONS = 2048
BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCABULARY = 384  # a multiple of 64 above the 259 tokens in use


def _shared(**changes: object) -> dict[str, object]:
    """The settings that all families share, with `changes` on top."""
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 3,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": BYTE_TOKENS,
        "eos_token_id": BYTE_TOKENS + 1,
        "pad_token_id": BYTE_TOKENS + 2,
    }
    return settings | changes


def _llama(q_heads: int, kv_heads: int, head_dim: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            **_shared(
                hidden_size=q_heads * head_dim,
                intermediate_size=512,
                num_attention_heads=q_heads,
                num_key_value_heads=kv_heads,
                head_dim=head_dim,
            )
        )
    )


def _qwen2() -> Qwen2ForCausalLM:  # Qwen2.5-0.5B: groups of 7, head_dim 64, biases on q, k and v
    return Qwen2ForCausalLM(
        Qwen2Config(**_shared(hidden_size=896, intermediate_size=512, num_attention_heads=14, num_key_value_heads=2))
    )


def _qwen3() -> Qwen3ForCausalLM:  # groups of 2, head_dim 128, norms on q and k
    return Qwen3ForCausalLM(
        Qwen3Config(
            **_shared(
                hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128
            )
        )
    )


def _mistral(sliding_window: int | None) -> MistralForCausalLM:
    return MistralForCausalLM(
        MistralConfig(
            **_shared(
                hidden_size=512,
                intermediate_size=512,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=128,
                sliding_window=sliding_window,
            )
        )
    )


def _opt() -> OPTForCausalLM:  # learned positions, no rotary embedding
    return OPTForCausalLM(
        OPTConfig(**_shared(hidden_size=256, word_embed_proj_dim=256, ffn_dim=512, num_attention_heads=4))
    )


def _gpt_neox(head_dim: int) -> GPTNeoXForCausalLM:  # rotary embedding on a quarter of the head, parallel residual
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            **_shared(hidden_size=4 * head_dim, intermediate_size=512, num_attention_heads=4, rotary_pct=0.25)
        )
    )


def _bloom() -> BloomForCausalLM:  # alibi
    return BloomForCausalLM(BloomConfig(**_shared(hidden_size=256, n_layer=2, n_head=4)))


def _gemma2() -> Gemma2ForCausalLM:  # soft cap on the scores, alternating sliding windows
    return Gemma2ForCausalLM(
        Gemma2Config(
            **_shared(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                attn_logit_softcapping=50.0,
                sliding_window=MAX_POSITIONS,
            )
        )
    )


def _gemma3() -> Gemma3ForCausalLM:  # sliding windows in two of three layers, norms on q and k, head_dim 256
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_shared(
                hidden_size=256,
                intermediate_size=512,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=256,
                sliding_window=150,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                query_pre_attn_scalar=256,
            )
        )
    )


def _gemma4() -> Gemma4ForCausalLM:  # smaller heads and longer blocks in layers with a window; shared caches
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            **_shared(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=64,
                global_head_dim=128,
                sliding_window=150,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_kv_shared_layers=2,
                hidden_size_per_layer_input=32,
                vocab_size_per_layer_input=VOCABULARY,
            )
        )
    )


def _qwen3_next() -> Qwen3NextForCausalLM:  # gated delta nets, whose state makes blocks of attention larger; experts
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **_shared(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=64,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=64,
                linear_value_head_dim=64,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
                layer_types=["linear_attention", "full_attention"] * 2,
            )
        )
    )


def _gpt_oss() -> GptOssForCausalLM:  # learned sinks, sliding windows in one of two layers, experts
    return GptOssForCausalLM(
        GptOssConfig(
            **_shared(
                hidden_size=256,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                head_dim=64,
                num_local_experts=4,
                num_experts_per_tok=2,
                sliding_window=150,
                layer_types=["sliding_attention", "full_attention"],
            )
        )
    )


def _deepseek_v2() -> DeepseekV2ForCausalLM:  # multi-head latent attention
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **_shared(
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                kv_lora_rank=512,
                q_lora_rank=None,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                first_k_dense_replace=2,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
            )
        )
    )


SERVED: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-mha": lambda: _llama(4, 4, 64),
    "llama-gqa": lambda: _llama(8, 2, 128),
    "qwen2.5": _qwen2,
    "qwen3": _qwen3,
    "mistral": lambda: _mistral(sliding_window=None),
    "opt": _opt,
    "gpt-neox": lambda: _gpt_neox(64),
    "mistral-sliding": lambda: _mistral(sliding_window=200),
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "gemma4": _gemma4,
}
SERVED_TOO: dict[str, Callable[[], PreTrainedModel]] = {  # less common head sizes and groups, for the slow run
    "llama-gqa3-dim64": lambda: _llama(9, 3, 64),
    "llama-gqa8-dim64": lambda: _llama(8, 1, 64),
    "gpt-neox-dim80": lambda: _gpt_neox(80),
    "gpt-neox-dim96": lambda: _gpt_neox(96),
}
SERVED_IN_BFLOAT16: dict[str, Callable[[], PreTrainedModel]] = {"qwen3-next": _qwen3_next}  # vLLM's only dtype on CPUs
REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "bloom": _bloom,
    "gemma2": _gemma2,
    "deepseek-v2": _deepseek_v2,
    "llama-dim20": lambda: _llama(4, 4, 20),
}
ALL = SERVED | SERVED_TOO | SERVED_IN_BFLOAT16 | REFUSED


def save_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer of one token a byte (ids 0–255), then <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)


@torch.no_grad()
def scale_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every matrix with a deviation of 1/√inputs, queries and keys larger, so that scores deviate by 2.5."""
    generator = torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=1.0, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(std=module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(std=0.1, generator=generator)
            if name.endswith(("q_proj", "k_proj", "query_key_value")):
                module.weight.mul_(SCORE_DEVIATION**0.5)
        elif isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
            sinks.copy_(torch.linspace(-3.0, 9.0, len(sinks)))  # from next to nothing to most of the weight
        elif name.endswith(("q_norm", "k_norm")):  # Qwen3 normalises after the projection: scale there
            module.weight.fill_(SCORE_DEVIATION**0.5)


def make_tiny_model(family: str, directory: Path) -> Path:
    """Write the checkpoint of `family` (a key of `ALL`) below `directory`, once, and return its path."""
    target = directory / family
    if (target / "config.json").exists():
        return target
    torch.manual_seed(0)
    model = ALL[family]().to(torch.float32).eval()
    scale_weights(model, seed=sorted(ALL).index(family))
    save_byte_tokenizer(target)
    model.save_pretrained(target)  # writes config.json before the weights: a second caller must be the same process
    return target


if __name__ == "__main__":
    for name in ALL:
        print(make_tiny_model(name, Path(sys.argv[1])))

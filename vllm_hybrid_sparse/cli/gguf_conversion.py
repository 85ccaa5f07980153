"""Converts a llama.cpp GGUF file of a Llama-type model to a folder that Hugging Face's libraries and vLLM load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_hybrid_sparse.errors import HybridSparseError

_CONTROL_TOKEN = 3  # gguf's type for tokens that text never produces, such as <|im_start|>
_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROUND_TRIP_TEXT = "Dr. O'Neil's 1,024 tests —\n\n\tnaïve café, 東京 🙂:  x += 3.14;"

Report = Callable[[str], None]


class GGUFConversionError(HybridSparseError, RuntimeError):
    """The file lacks something, or what was made from it is not the model."""


def convert(source: Path, target: Path, report: Report = print) -> None:
    """Fill the existing, empty folder `target` with config, bf16 weights and tokenizer of the GGUF file `source`."""
    report(f"model: reading {source.name}")
    reader = GGUFReader(source)
    config = _config(reader)
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation_config(config))
    report("model: rebuilding the tokenizer")
    _write_tokenizer(reader, target)
    weights = _weights(reader, config, report)
    report(f"model: writing {sum(w.nbytes for w in weights.values()) / 2**20:.0f} MiB of weights")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise GGUFConversionError(f"{name}: missing from the GGUF file")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    hidden_size = _field(reader, "llama.embedding_length")
    heads = _field(reader, "llama.attention.head_count")
    rope_theta = float(_field(reader, "llama.rope.freq_base"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "head_dim": hidden_size // heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),  # stored as f32
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "rope_theta": rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_tokenizer(reader: GGUFReader, target: Path) -> None:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]

    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    # What llama.cpp calls the pre-tokenizer "smollm": single digits, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    _check_tokenizer(tokenizer, tokens, special)

    named = {role: tokens[_field(reader, f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos", "padding")}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named["bos"],
        eos_token=named["eos"],
        pad_token=named["padding"],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        extra_special_tokens=special[1:3],
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=_field(reader, "tokenizer.chat_template"),
    )
    fast.save_pretrained(target)


def _check_tokenizer(tokenizer: Tokenizer, tokens: list[str], special: list[str]) -> None:
    if tokenizer.get_vocab_size() != len(tokens):
        raise GGUFConversionError(f"tokenizer holds {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}")
    for token in special:
        if tokenizer.encode(token).ids != [tokens.index(token)]:
            raise GGUFConversionError(f"tokenizer splits the special token {token}")
    if tokenizer.decode(tokenizer.encode(_ROUND_TRIP_TEXT).ids) != _ROUND_TRIP_TEXT:
        raise GGUFConversionError("tokenizer does not give a text back as it was")


def _weights(reader: GGUFReader, config: dict[str, Any], report: Report) -> dict[str, torch.Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for index, tensor in enumerate(reader.tensors):
        if index % 54 == 0:
            report(f"model: dequantising tensor {index} of {len(reader.tensors)}")
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = _undo_rope_permutation(values, heads[part])
        name = _hugging_face_name(tensor.name)
        if name is not None:
            writable = np.array(values)  # norms come as views of the read-only mapped file
            weights[name] = torch.from_numpy(writable).to(torch.bfloat16)
    return weights


def _undo_rope_permutation(values: np.ndarray, heads: int) -> np.ndarray:
    """Put the rows of q or k back in Hugging Face's order.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + head_dim / 2). So llama.cpp's
    converter interleaves the two halves of every head: [heads, 2, half] became [heads, half, 2].
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hugging_face_name(name: str) -> str | None:
    """Translate a GGUF tensor name; None for a tensor that Hugging Face's model computes itself."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    if name == "rope_freqs.weight":
        return None
    prefix, layer, part, suffix = name.split(".")
    if prefix != "blk" or part not in _TENSOR_NAMES:
        raise GGUFConversionError(f"{name}: not a tensor of this model")
    return f"model.layers.{layer}.{_TENSOR_NAMES[part]}.{suffix}"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""A tiny Llama-type model through a GGUF file and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from vllm_hybrid_sparse.cli.gguf_conversion import GGUFConversionError, convert

HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 2, 8, 48
HIDDEN = HEADS * HEAD_DIM
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*CONTROL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġhe"]
MERGES = ["h e", "Ġ he"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SHAPES = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (FEED_FORWARD, HIDDEN),
    "ffn_up": (FEED_FORWARD, HIDDEN),
    "ffn_down": (HIDDEN, FEED_FORWARD),
}


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's own converter does to the rows of q and k."""
    rows, columns = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def random_weights() -> dict[str, np.ndarray]:
    """Tensors by GGUF name, in Hugging Face's order of rows; exact in bf16."""
    rng = np.random.default_rng(0)
    shapes = {f"blk.0.{name}.weight": shape for name, shape in SHAPES.items()}
    shapes |= {"token_embd.weight": (len(VOCABULARY), HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: rng.integers(-100, 100, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, weights: dict[str, np.ndarray], **replaced: Any) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_token_list(replaced.get("tokens", VOCABULARY))
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(VOCABULARY) - len(CONTROL_TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if "template" not in replaced:
        writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, llama_cpp_permute(values, heads).copy() if heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert len(GGUFReader(path).tensors) == len(weights)
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    target = folder / "model"
    target.mkdir()
    convert(write_gguf(folder / "model.gguf", random_weights()), target, report=lambda _line: None)
    return target


def test_weights_come_back_in_hugging_face_order_and_names(converted: Path) -> None:
    found = load_file(converted / "model.safetensors")
    weights = random_weights()
    expected = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    assert found.keys() == expected.keys()
    for name, source in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), torch.from_numpy(weights[source]))


def test_config_describes_the_model(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text(encoding="utf-8"))
    assert config["num_attention_heads"] == HEADS
    assert config["num_key_value_heads"] == KV_HEADS
    assert config["head_dim"] == HEAD_DIM
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True


def test_tokenizer_merges_keeps_special_tokens_whole_and_round_trips(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer("<|im_start|>he he<|im_end|>").input_ids == [
        1,
        VOCABULARY.index("he"),
        VOCABULARY.index("Ġhe"),
        2,
    ]
    text = "12 naïve cafés,\n\t東京"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert shown == "<|im_start|>he<|im_end|>"


def test_unknown_tensor_is_refused(tmp_path: Path) -> None:
    weights = random_weights() | {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
    with pytest.raises(GGUFConversionError, match=r"blk\.0\.attn_q_norm\.weight: not a tensor of this model"):
        convert(write_gguf(tmp_path / "model.gguf", weights), tmp_path, report=lambda _line: None)


def test_missing_field_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_weights(), template=None)
    with pytest.raises(GGUFConversionError, match=r"tokenizer\.chat_template: missing"):
        convert(path, tmp_path, report=lambda _line: None)


def test_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    tokens = [token if token != "Ã" else "unused" for token in VOCABULARY]
    path = write_gguf(tmp_path / "model.gguf", random_weights(), tokens=tokens)
    with pytest.raises(GGUFConversionError, match="does not give a text back"):
        convert(path, tmp_path, report=lambda _line: None)

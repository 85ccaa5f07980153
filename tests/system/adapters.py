"""A LoRA adapter with random weights for a tiny model's queries, keys and values."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def make_adapter(model: Path, directory: Path) -> Path:
    """Write an adapter in PEFT's format for the Llama checkpoint in `model`, and return its path, below `directory`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kv_features = config["num_key_value_heads"] * config["head_dim"]
    features = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "k_proj": kv_features,
        "v_proj": kv_features,
    }
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, outputs in features.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = random(RANK, config["hidden_size"])
            weights[f"{name}.lora_B.weight"] = random(outputs, RANK)
    target = directory / f"{model.name}-adapter"
    target.mkdir()
    save_file(weights, target / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(features)}
    (target / "adapter_config.json").write_text(json.dumps(described), encoding="utf-8")
    return target

"""What a Transformers configuration says about a model's attention."""

from transformers import PretrainedConfig

from vllm_hybrid_sparse.predictor.model import ModelShape


def model_shape(config: PretrainedConfig) -> ModelShape:
    """The shape that a predictor is tied to, from the Transformers configuration of the language model itself."""
    query_heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )


def windowed_layers(config: PretrainedConfig) -> int:
    """How many layers have a sliding window, by the Transformers configuration of the language model itself."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds.count("sliding_attention")
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0

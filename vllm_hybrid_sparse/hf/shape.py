"""The shape of a Transformers model, to which a predictor is tied."""

from transformers import PretrainedConfig

from vllm_hybrid_sparse.predictor.model import ModelShape


def model_shape(config: PretrainedConfig) -> ModelShape:
    """The shape that a predictor is tied to, from a Transformers configuration of the language model itself."""
    query_heads = config.num_attention_heads
    return ModelShape(
        layers=config.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
    )

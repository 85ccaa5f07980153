"""Attention of our own inside a Transformers model, for as long as a context is entered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

Attend = Callable[..., tuple[Tensor, None]]
"""Attention as Transformers calls it: (module, query, key, value, mask, …), each [batch, heads, tokens, head_dim]."""


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str, attend: Attend) -> Iterator[None]:
    """Have the model attend by `attend`, registered under `name`; its implementation before comes back at the end.

    No mask is built: one unpadded sequence is causal. The name stays registered, so `attend` must refuse calls that
    come outside of the context.
    """
    before = model.config._attn_implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _no_mask(*_: Any, **__: Any) -> None:
    """What stands in for a mask."""

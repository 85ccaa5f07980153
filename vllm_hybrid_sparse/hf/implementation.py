"""Our own attention inside a Transformers model, while a context is entered."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from vllm_hybrid_sparse.errors import ConfigError

# Arguments that change what a row attends to. Transformers' own attention, which takes the windows, serves the last.
_REFUSED_BESIDE_WINDOWS = ("softcap", "s_aux", "indices", "block_indices")
_REFUSED = (*_REFUSED_BESIDE_WINDOWS, "position_bias")

Attend = Callable[..., tuple[Tensor, None]]
"""Attention as Transformers calls it: (module, query, key, value, mask, …), each [batch, heads, tokens, head_dim]."""


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str, attend: Attend) -> Iterator[None]:
    """Have the model attend by `attend`, registered under `name`; at the end restore its previous implementation.

    Layers with a sliding window attend by Transformers' own scaled_dot_product_attention instead. For the others no
    mask is built, since one unpadded sequence is causal. Padding, soft-capped scores, learned sinks, biases of
    positions, tokens that the model chooses itself, attention that is not causal, and a model with attention code of
    its own raise ConfigError. The name stays registered, so `attend` must refuse calls from outside the context.
    """
    before = model.config._attn_implementation
    AttentionInterface.register(name, _beside_windows(attend))
    AttentionMaskInterface.register(name, _window_mask)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # Transformers only logs that it leaves things as they are
        raise ConfigError(f"model={type(model).__name__}: must attend through Transformers' AttentionInterface")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class AttentionSession:
    """While entered, the model attends by `attend`, registered under `name`.

    Only one session of a name at a time, otherwise ConfigError.
    """

    _sessions: ClassVar[dict[str, Any]] = {}  # entered, by name

    def __init__(self, model: PreTrainedModel, name: str, attend: Attend) -> None:
        self._model = model
        self._row_by_row = False
        self._name, self._attend_by = name, attend
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        if self._name in self._sessions:
            raise ConfigError(f"{type(self).__name__}: another one is entered; one at a time")
        self._entered.enter_context(attention_implementation(self._model, self._name, self._attend_by))
        self._sessions[self._name] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._sessions[self._name]
        self._entered.close()

    @classmethod
    def entered(cls, name: str) -> Any:
        """The session that is entered under a name; None if there is none."""
        return cls._sessions.get(name)

    @contextmanager
    def row_by_row(self) -> Iterator[None]:
        """Inside it the rows of a call are decoded one after another, as if each came in a call of its own.

        If all tokens are known beforehand, as in teacher forcing, one call replaces many and reads the model's weights
        once.
        """
        self._row_by_row = True
        try:
            yield
        finally:
            self._row_by_row = False


def _beside_windows(attend: Attend) -> Attend:
    """`attend` for layers without a sliding window, Transformers' attention for those that have one."""

    def attended(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        for name in _REFUSED if sliding_window is None else _REFUSED_BESIDE_WINDOWS:
            if extra.get(name) is not None:
                raise ConfigError(f"{name}={extra[name]}: must be none")
        if sliding_window is None:
            causal = extra.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                raise ConfigError("is_causal=False: must be true, since rows see earlier tokens alone")
            return attend(module, query, key, value, attention_mask, **extra)
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **extra)
        return output, None

    return attended


def _window_mask(
    *,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **rest: Any,
) -> Tensor | None:
    """The mask of layers with a sliding window, as Transformers makes it; None for layers without one.

    attention_mask   [1, tokens], 0 where a token is padding
    local_size       tokens of the window, or of a chunk; layers that attend in chunks are refused when they are called
    returns          [1, 1, new tokens, tokens] bool, True where a token is seen; None: all earlier tokens are seen
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError("attention_mask: must be all ones, since padding is not supported; leave it out")
    if mask_function is causal_mask_function:
        return None
    if local_size is None:  # of sequences side by side, or of a prefix
        raise ConfigError("attention_mask: must be causal over one whole sequence, and the model's is not")
    mask: Tensor | None = sdpa_mask(
        attention_mask=attention_mask, mask_function=mask_function, local_size=local_size, **rest
    )
    return mask

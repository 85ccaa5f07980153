"""Attention of our own inside a Transformers model, for as long as a context is entered."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from vllm_hybrid_sparse.errors import ConfigError

Attend = Callable[..., tuple[Tensor, None]]
"""Attention as Transformers calls it: (module, query, key, value, mask, …), each [batch, heads, tokens, head_dim]."""


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str, attend: Attend) -> Iterator[None]:
    """Have the model attend by `attend`, registered under `name`; its implementation before comes back at the end.

    No mask is built: one unpadded sequence is causal, and padding raises ConfigError, as does a model that attends by
    code of its own. The name stays registered, so `attend` must refuse calls that come outside of the context.
    """
    before = model.config._attn_implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:  # Transformers only logs that it leaves things as they are
        raise ConfigError(f"model={type(model).__name__}: must attend through Transformers' AttentionInterface")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class AttentionSession:
    """While entered, the model attends by `attend`, registered under `name`.

    One session of a name at a time, else ConfigError.
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
        """The session that is entered under a name; None where none is."""
        return cls._sessions.get(name)

    @contextmanager
    def row_by_row(self) -> Iterator[None]:
        """Within it the rows of a call are decoded one after another, as if each came in a call of its own.

        Where all tokens are known before, as in teacher forcing, one call does what many would and reads the model's
        weights once.
        """
        self._row_by_row = True
        try:
            yield
        finally:
            self._row_by_row = False


def _no_mask(
    *_: Any,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **__: Any,
) -> None:
    """What stands in for a mask; attention_mask [1, tokens], 0 where a token is padding."""
    if mask_function is not causal_mask_function:  # of a window, of chunks, of sequences side by side, of a prefix
        raise ConfigError("attention_mask: must be causal over one whole sequence, and the model's is not")
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError("attention_mask: must be all ones, since padding is not supported; leave it out")

"""A Transformers cache with room for coming tokens, so that a decode step copies one token and not all of them."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


class _RoomyLayer(DynamicLayer):
    def __init__(self, capacity_tokens: int) -> None:
        super().__init__()
        self._capacity_tokens = capacity_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the room."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        self._key_room = torch.empty(batch, heads, self._capacity_tokens, head_dim, dtype=self.dtype)
        self._value_room = torch.empty(*self._key_room.shape[:3], value_states.shape[3], dtype=self.dtype)
        self.keys, self.values = self._key_room[:, :, :0], self._value_room[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values as views of the room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.keys.shape[2]
        end = begin + key_states.shape[2]
        if end > self._capacity_tokens:
            raise ValueError(f"capacity_tokens={self._capacity_tokens}: the sequence has {end} tokens")
        self._key_room[:, :, begin:end] = key_states
        self._value_room[:, :, begin:end] = value_states
        self.keys, self.values = self._key_room[:, :, :end], self._value_room[:, :, :end]
        return self.keys, self.values


def roomy_cache(layers: int, capacity_tokens: int) -> Cache:
    """An empty cache of at most `capacity_tokens` tokens a layer; ValueError if more are appended."""
    return Cache(layers=[_RoomyLayer(capacity_tokens) for _ in range(layers)])

"""A registered attention implementation for Transformers models that runs the shipped kernels.

    from vllm_hybrid_sparse.hf import SparseSession

    with SparseSession(model, HybridSparseConfig(policy="progressive"), max_tokens=8192):
        model.generate(**inputs)

One sequence at a time, on the CPU. Prefill is exact; single tokens are decoded as the policy says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError, KernelError
from vllm_hybrid_sparse.hf.implementation import AttentionSession
from vllm_hybrid_sparse.hf.shape import model_shape, windowed_layers
from vllm_hybrid_sparse.kernels.paged_attention.host_tasks import score_pages
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.runtime.host import HostRuntime
from vllm_hybrid_sparse.values import PAGE_TOKENS

IMPLEMENTATION = "hybrid_sparse"
_BLOCK_TOKENS = 128
_SEQUENCE = "the sequence"


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One layer's decode row, for `watch`."""

    layer: int
    query: Tensor  # [q_heads, head_dim], in the model's dtype, rotary embedding applied
    keys: Tensor  # [kv_heads, tokens, head_dim], including the current token
    values: Tensor  # likewise
    scale: float
    plans: list[list[int]]  # [kv_heads] candidate pages read, in reading order
    output: Tensor  # [q_heads, head_dim], what the model was given
    packed: list[list[int]] = field(default_factory=list)  # [kv_heads] HGCA's salient positions; otherwise empty


@dataclass(slots=True)
class _Layer:
    """What is stored of the sequence in one layer."""

    attention: NativeAttention
    kv_cache: Tensor  # [blocks, kv_heads * head_block_bytes] uint8
    hgca: _native.HgcaLayer | None
    fluxion: _native.FluxionLayer | None
    tokens: int = 0
    last_key: Tensor = field(default_factory=lambda: torch.empty(0))  # [kv_heads, head_dim] of the last stored token
    adoption: int = 0  # the session's count when `tokens` was last true

    def rows(self, part: Tensor) -> Tensor:
        """Turn [heads, tokens, head_dim] into [tokens, heads, head_dim], in the kernel's dtype."""
        return part.transpose(0, 1).to(self.attention.dtype).contiguous()


class SparseSession(AttentionSession):
    """While it is entered, the model attends by our kernels. A prefill begins a new sequence, and so does `adopt`.

    max_tokens   the longest sequence; its memory is taken layer by layer at the first call
    watch        called after every decode row of every layer
    kv_dtype     of the KV cache, as `NativeAttention` takes it; None: the model's
    common_keys  as `HostRuntime` takes it

    Layers with a sliding window keep Transformers' attention to the whole window, and are not counted.

    Raises ConfigError for what the kernels cannot serve: batches of more than one sequence, padding and masks, a device
    other than the CPU, sliding windows with policy hgca or fluxion, a sequence longer than max_tokens, and a model
    without a predictor with policy fluxion.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: HybridSparseConfig,
        *,
        max_tokens: int,
        watch: Callable[[DecodeStep], None] | None = None,
        kv_dtype: torch.dtype | None = None,
        common_keys: bool = True,
    ) -> None:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens}: must be at least 1")
        if model.device.type != "cpu":
            raise ConfigError(f"device={model.device}: must be cpu")
        if settings.device != "none":
            raise ConfigError(
                f"device={settings.device!r}: a session attends on the CPU alone; serve with vLLM for that"
            )
        super().__init__(model, IMPLEMENTATION, _attend)
        self.runtime = HostRuntime(settings, common_keys=common_keys)
        config = model.config.get_text_config()
        if self.runtime.keeps_request_state and windowed_layers(config):
            raise ConfigError(f"policy={settings.policy!r}: not supported beside layers with a sliding window")
        if settings.prediction is not None:
            self.runtime.use_model(model_shape(config))
        self._blocks = math.ceil(max_tokens / _BLOCK_TOKENS)
        self._max_tokens = max_tokens
        self._watch = watch
        self._kv_dtype = kv_dtype
        self._layers: dict[int, _Layer] = {}
        self._block_table = torch.arange(self._blocks, dtype=torch.int32)[None]
        self._slots = self.runtime.requests.of([_SEQUENCE])
        self._adoption = 0

    def adopt(self) -> None:
        """Take over the sequence from the cache of the model's next call, whoever computed it.

        The earlier tokens in that cache are stored again, without attending. So one prefill serves sessions of any
        settings, and decoding can start again from a cropped cache. If `keeps_request_state`, that state comes from the
        last rows of a prompt: the next call should bring 16 tokens of the prompt or all of it, and tokens to decode
        should follow in later calls. Policy hgca refuses a call with fewer tokens than the last page has (ConfigError).
        With policy fluxion, a call with a single token decodes it and makes it the anchor.
        """
        self.runtime.requests.release([_SEQUENCE])
        self._slots = self.runtime.requests.of([_SEQUENCE])
        self._adoption += 1

    @property
    def keeps_request_state(self) -> bool:
        """Whether what is read depends on queries of earlier calls, not only on the cache."""
        return self.runtime.keeps_request_state

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call of this."""
        return self.runtime.take_stats()

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Append the new keys and values of one layer, and attend.

        query        [q_heads, new tokens, head_dim]
        key, value   [kv_heads, tokens, head_dim]   those of the whole sequence
        returns      [new tokens, q_heads, head_dim]
        """
        if not self._row_by_row:
            return self._attend_rows(index, query, key, value, scale)
        before = key.shape[1] - query.shape[1]
        outputs = [
            self._attend_rows(index, query[:, [row]], key[:, : before + row + 1], value[:, : before + row + 1], scale)
            for row in range(query.shape[1])
        ]
        return torch.cat(outputs)

    def _attend_rows(self, index: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Like `attend`; a single row is a decode row."""
        new, total = query.shape[1], key.shape[1]
        if total > self._max_tokens:
            raise ConfigError(f"max_tokens={self._max_tokens}: the sequence has {total} tokens")
        layer = self._layer(index, query, key, scale)
        if total == new:
            layer.tokens = 0
        elif layer.adoption != self._adoption:
            of_page = (total - 1) % PAGE_TOKENS + 1
            if layer.hgca is not None and new < of_page:
                raise ConfigError(f"tokens={new}: the call after adopt() must bring at least the last page's {of_page}")
            self._store(layer, key[:, : total - new], value[:, : total - new], query.shape[0])
        layer.adoption = self._adoption
        if layer.tokens != total - new:
            raise KernelError(
                f"layer {index}: {new} tokens follow {total - new}, but {layer.tokens} are stored; begin with a prefill"
            )
        if total > new and not torch.equal(layer.last_key, key[:, total - new - 1]):
            raise KernelError(f"layer {index}: the cache is of another sequence than is stored; call adopt() before")
        new_key, new_value = (layer.rows(part[:, total - new :]) for part in (key, value))
        output = torch.empty(new, query.shape[0], query.shape[2], dtype=layer.attention.dtype)
        batch = NativeBatch.from_tensors(
            torch.tensor([0, new], dtype=torch.int32),
            torch.tensor([total], dtype=torch.int32),
            self._block_table,
            torch.arange(total - new, total),
            torch.tensor([new == 1]),
            self._slots,
        )
        layer.attention.forward(
            layer.rows(query),
            new_key,
            new_value,
            layer.kv_cache,
            batch,
            self.runtime.selection,
            None,
            output,
            layer.hgca,
            layer.fluxion,
        )
        layer.tokens, layer.last_key = total, key[:, -1].clone()
        if self._watch and new == 1:
            plans = [layer.attention.last_plan(0, head) for head in range(key.shape[0])]
            packed = self.hgca_positions(index) if layer.hgca is not None else []
            self._watch(DecodeStep(index, query[:, 0], key, value, scale, plans, output[0], packed))
        return output.to(query.dtype)

    def _store(self, layer: _Layer, key: Tensor, value: Tensor, q_heads: int) -> None:
        """Make `key` and `value` all that the layer holds.

        key, value   [kv_heads, tokens, head_dim]

        The kernel stores what it attends to. So each block goes to it as a request of its own, with queries of zero;
        this attends within blocks only, and the result is dropped. A last block of one token goes with the block
        before, since single rows are decode rows, which are counted. At the end all pages are summarised again as pages
        of one sequence, because what their keys have in common spans more than a block.
        """
        tokens = key.shape[1]
        starts = torch.arange(0, max(1, tokens - 1), _BLOCK_TOKENS, dtype=torch.int32)
        bounds = torch.cat((starts, torch.tensor([tokens], dtype=torch.int32)))
        block = starts // _BLOCK_TOKENS
        batch = NativeBatch.from_tensors(
            bounds,
            bounds.diff(),
            torch.stack((block, block + 1), dim=1),
            torch.arange(tokens),
            torch.zeros(len(starts), dtype=torch.bool),
        )
        query = torch.zeros(tokens, q_heads, key.shape[2], dtype=layer.attention.dtype)
        new_key, new_value = (layer.rows(part) for part in (key, value))
        layer.attention.forward(
            query, new_key, new_value, layer.kv_cache, batch, self.runtime.selection, None, torch.empty_like(query)
        )
        layer.attention.summarize(layer.kv_cache, torch.arange(-(-tokens // _BLOCK_TOKENS), dtype=torch.int32))
        layer.tokens, layer.last_key = tokens, key[:, -1].clone()

    def hgca_positions(self, index: int) -> list[list[int]]:
        """The positions that HGCA has packed in one layer, for each KV head. ConfigError with other policies."""
        layer = self._layers[index]
        if layer.hgca is None:
            raise ConfigError(f"policy={self.runtime.settings.policy!r}: packs nothing")
        return [list(layer.hgca.salient(0, head)) for head in range(layer.attention.num_kv_heads)]

    def score_candidates(self, index: int, query: Tensor) -> Tensor:
        """Scores of the sequence's candidate pages from their summaries, as stored in one layer.

        query     [q_heads, head_dim]
        returns   [q_heads, candidate pages] f32; with key codes the logarithm of a page's estimated weight
        """
        layer = self._layers[index]
        first, end = self.runtime.settings.retained.candidate_range(layer.tokens)
        query = query.to(layer.attention.dtype).contiguous()
        return score_pages(layer.attention, query, layer.kv_cache, self._block_table[0], first, end)

    def _layer(self, index: int, query: Tensor, key: Tensor, scale: float) -> _Layer:
        if index not in self._layers:
            attention = self.runtime.attention(
                dtype=self._kv_dtype or query.dtype,
                num_q_heads=query.shape[0],
                num_kv_heads=key.shape[0],
                head_dim=query.shape[2],
                block_tokens=_BLOCK_TOKENS,
                scale=scale,
            )
            block_bytes = key.shape[0] * attention.layout.head_block_bytes
            kv_cache = torch.empty(self._blocks, block_bytes, dtype=torch.uint8)
            self._layers[index] = _Layer(
                attention, kv_cache, self.runtime.hgca_layer(attention), self.runtime.fluxion_layer(index)
            )
        return self._layers[index]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it: [batch, heads, tokens, head_dim]; the query has only the new tokens."""
    session = SparseSession.entered(IMPLEMENTATION)
    if session is None:
        raise ConfigError(f"attn_implementation={IMPLEMENTATION}: enter a SparseSession first")
    if query.shape[0] != 1:
        raise ConfigError(f"query.shape[0]={query.shape[0]}: must be 1")
    if attention_mask is not None:
        raise ConfigError(f"attention_mask of shape {tuple(attention_mask.shape)}: must be none; a sequence is causal")
    if query.device.type != "cpu":
        raise ConfigError(f"device={query.device}: must be cpu")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = session.attend(module.layer_idx, query[0], key[0], value[0], scale)
    return output[None], None

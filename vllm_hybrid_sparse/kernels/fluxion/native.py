"""What the CPU kernel (`csrc/fluxion.cpp`, `csrc/anchor.cpp`) needs for Fluxion: the predictor and a layer's states.

If a device attends, decode rows are computed in parts (`csrc/fluxion_tasks.cpp`): the host chooses what each group
reads.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor
from vllm_hybrid_sparse.kernels.latest_rows import LatestRows
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.features import FEATURES
from vllm_hybrid_sparse.predictor.model import HIDDEN_SIZES, Predictor
from vllm_hybrid_sparse.values import GroupKey


class PredictedPages(NamedTuple):
    """The pages that the groups of decode rows read in addition to their retained sets."""

    pages: dict[GroupKey, NDArray[np.int64]]  # of every group, ascending; page 0 is the request's first
    log_unread: Tensor  # [rows, q_heads] f32, natural log: weight of the rest, estimated from codes; -inf: none known


def native_predictor(predictor: Predictor) -> _native.HeadPredictor:
    """The kernel's copy of the predictor, which all layers share. KernelError if its tensors have other shapes."""
    sizes = (len(FEATURES), *HIDDEN_SIZES, 3)
    linear = [layer for layer in predictor.backbone if isinstance(layer, torch.nn.Linear)] + [predictor.outputs]
    weights, biases = [layer.weight.detach() for layer in linear], [layer.bias.detach() for layer in linear]
    statistics = {
        name: getattr(predictor, name) for name in ("feature_mean", "feature_std", "target_mean", "target_std")
    }
    wanted: list[tuple[int, ...]] = [
        *[(len(FEATURES),)] * 2,
        *[(2,)] * 2,
        *((outputs, inputs) for inputs, outputs in pairwise(sizes)),
        *((outputs,) for outputs in sizes[1:]),
    ]
    tensors = [*statistics.values(), *weights, *biases]
    if [tuple(tensor.shape) for tensor in tensors] != wanted:
        raise KernelError(f"predictor={[tuple(tensor.shape) for tensor in tensors]}: must be {wanted}")
    held = [tensor.to("cpu", torch.float32).contiguous() for tensor in tensors]
    addresses = [tensor.data_ptr() for tensor in held]
    return _native.HeadPredictor(  # copies everything, so `held` may be freed
        feature_mean=addresses[0],
        feature_std=addresses[1],
        target_mean=addresses[2],
        target_std=addresses[3],
        weights=addresses[4 : 4 + len(weights)],
        biases=addresses[4 + len(weights) :],
    )


def fluxion_layer(
    predictor: _native.HeadPredictor, *, layer: int, tau: float, granularity: int = 0, dense_tokens: int = 0
) -> _native.FluxionLayer:
    """What Fluxion keeps of requests in one layer (see `reference.py`). Each layer needs its own.

    layer         index in the model, from 0
    tau           error for the budgets that are features of the anchor (eq. 2): the predictor's; > 0
    granularity   tokens of a logical block, one of 16, 32, 64, 128; 0: by eq. 3
    dense_tokens  sequences of this many tokens or fewer attend to everything; >= 0
    """
    if granularity not in (0, *GRANULARITIES):
        raise KernelError(f"granularity={granularity}: must be 0 or one of {', '.join(map(str, GRANULARITIES))}")
    if layer < 0:
        raise KernelError(f"layer={layer}: must be 0 or more")
    if not tau > 0:
        raise KernelError(f"tau={tau}: must be above 0")
    if dense_tokens < 0:
        raise KernelError(f"dense_tokens={dense_tokens}: must be 0 or more")
    return _native.FluxionLayer(
        predictor=predictor, layer=layer, tau=tau, granularity=granularity, dense_tokens=dense_tokens
    )


def choose_pages(
    attention: NativeAttention,
    layer: _native.FluxionLayer,
    selection: _native.Selection,
    kv_cache: Tensor,
    query: Tensor,
    batch: NativeBatch,
    sink: tuple[Tensor, Tensor],
    local: tuple[Tensor, Tensor],
) -> PredictedPages:
    """Choose what decode rows read (sections 5.2 and 5.3).

    The rows' tokens are stored and their retained sets attended. Anchors that are due are observed first. The rows are
    counted, and their last queries kept, as `NativeAttention.forward` does it.

    selection     from `native_selection`, made once
    query         [rows, q_heads, head_dim]   of the KV dtype, contiguous
    batch         the rows, one stored token each; a row without a slot keeps no state and reads everything
    sink, local   (out, lse)                  [rows, q_heads, head_dim] and [rows, q_heads] f32: normalised attention
                                              to the pages before and behind the candidates, zeros and -inf for none
    """
    attention.check_policy(selection, batch, fluxion=layer)
    shape = (batch.num_tokens, attention.num_q_heads, attention.head_dim)
    check_tensor("query", query, attention.dtype, shape, CPU)
    for name, (out, lse) in (("sink", sink), ("local", local)):
        check_tensor(f"{name} out", out, torch.float32, shape, CPU)
        check_tensor(f"{name} lse", lse, torch.float32, shape[:2], CPU)
    attention.check_reach(batch, kv_cache)
    engine = attention.engine
    engine.choose_fluxion_pages(
        kv_cache.data_ptr(),
        attention.block_stride(kv_cache),
        query.data_ptr(),
        query.stride(0),
        batch.native,
        selection,
        layer,
        sink[0].data_ptr(),
        sink[1].data_ptr(),
        local[0].data_ptr(),
        local[1].data_ptr(),
    )
    result = PredictedPages({}, torch.full(shape[:2], -torch.inf))
    size = attention.num_q_heads // attention.num_kv_heads
    for row in range(len(batch.seq_lens)):
        for head in range(attention.num_kv_heads):
            group = GroupKey(row, head)
            pages = result.pages[group] = np.array(engine.last_plan(row, head), dtype=np.int64)
            if len(pages) and (unread := engine.last_unread(row, head)):
                result.log_unread[row, head * size : (head + 1) * size] = torch.tensor(unread)
    return result


def keep_queries(attention: NativeAttention, layer: _native.FluxionLayer, appended: Sequence[LatestRows]) -> None:
    """Keep the last queries of prompts that were computed elsewhere. The next decode row makes such a query its anchor.

    appended   at most one for each request, whose last row is at the end of `query`
    """
    for of in appended:
        last = of.query[-1]
        check_tensor("query", last, attention.dtype, (attention.num_q_heads, attention.head_dim), CPU)
        attention.engine.keep_fluxion_query(layer, of.slot, last.data_ptr(), of.seq_len)

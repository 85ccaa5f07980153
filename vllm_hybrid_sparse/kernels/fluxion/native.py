"""What the CPU kernel (`csrc/fluxion.cpp`, `csrc/anchor.cpp`) needs for Fluxion: the predictor, a layer's states."""

from itertools import pairwise

import torch

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.features import FEATURES
from vllm_hybrid_sparse.predictor.model import HIDDEN_SIZES, Predictor


def native_predictor(predictor: Predictor) -> _native.HeadPredictor:
    """A copy of the predictor, which all layers share. KernelError where its tensors are not those of its kind."""
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
    return _native.HeadPredictor(  # copies everything, so that `held` may go
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
    """What Fluxion keeps of the requests of one layer; one for each layer. `reference.py` says what.

    layer         index in the model, from 0
    tau           error of the budgets among the anchor's features (eq. 2); the predictor's; > 0
    granularity   tokens of a logical block, one of 16, 32, 64, 128; 0: by eq. 3
    dense_tokens  sequences of so many tokens or fewer attend to everything; >= 0
    """
    if granularity not in (0, *GRANULARITIES):
        raise KernelError(f"granularity={granularity}: must be 0 or one of {', '.join(map(str, GRANULARITIES))}")
    if layer < 0 or not tau > 0:
        raise KernelError(f"layer={layer}, tau={tau}: must be 0 or more, and above 0")
    if dense_tokens < 0:
        raise KernelError(f"dense_tokens={dense_tokens}: must be 0 or more")
    return _native.FluxionLayer(
        predictor=predictor, layer=layer, tau=tau, granularity=granularity, dense_tokens=dense_tokens
    )

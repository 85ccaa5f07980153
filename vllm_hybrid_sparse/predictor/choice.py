"""Which predictor serves a model: the one that the user names, else the shipped one, where it fits."""

from pathlib import Path

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.model import (
    SMOLLM2_PREDICTOR,
    ModelShape,
    Predictor,
    PredictorOrigin,
    load_predictor,
)
from vllm_hybrid_sparse.values import PredictionSpec, RetainedSet


def choose_predictor(
    prediction: PredictionSpec, shape: ModelShape, retained: RetainedSet
) -> tuple[Predictor, PredictorOrigin]:
    """Read the predictor for a model of this shape and this retained set.

    raises   ConfigError where the file is none or was made for another shape or retained set, and where none is named
             and the shipped one does not fit: with the command that makes one
    """
    if prediction.predictor is not None:
        return load_predictor(Path(prediction.predictor).expanduser(), shape, retained)
    try:
        return load_predictor(SMOLLM2_PREDICTOR, shape, retained)
    except ConfigError as error:
        raise ConfigError(
            "hybrid_sparse.predictor: must be given, since the shipped one does not fit this model and these settings "
            f"({error}): `hybrid-sparse calibrate MODEL --texts FILE... --out predictor.safetensors`"
        ) from error

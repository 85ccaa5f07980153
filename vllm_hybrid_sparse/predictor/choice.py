"""Which predictor serves a model: the one that the user names, otherwise the shipped one if it fits."""

from pathlib import Path

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.model import (
    SMOLLM2_PREDICTORS,
    ModelShape,
    Predictor,
    PredictorOrigin,
    load_predictor,
)
from vllm_hybrid_sparse.values import PageRanking, PredictionSpec, RetainedSet


def choose_predictor(
    prediction: PredictionSpec, shape: ModelShape, retained: RetainedSet
) -> tuple[Predictor, PredictorOrigin]:
    """Read the predictor for a model of this shape, this retained set and the prediction's ranking.

    raises   ConfigError if the file is not a predictor or was made for something else. If none is named and no shipped
             one fits, the error has the command that makes one
    """
    ranking = prediction.ranking
    if prediction.predictor is not None:
        return load_predictor(_path(prediction.predictor), shape, retained, ranking)
    shipped = SMOLLM2_PREDICTORS.get(ranking, SMOLLM2_PREDICTORS[PageRanking()])
    try:
        return load_predictor(shipped, shape, retained, ranking, name=shipped.name)
    except ConfigError as error:
        codes = f" --code-bits {ranking.code_bits}" if ranking.code_bits else ""
        usual = RetainedSet()
        sink = f" --sink-tokens {retained.sink_tokens}" if retained.sink_tokens != usual.sink_tokens else ""
        window = f" --window-tokens {retained.window_tokens}" if retained.window_tokens != usual.window_tokens else ""
        raise ConfigError(
            "hybrid_sparse.predictor: must be given, since the shipped one does not fit this model and these settings "
            f"({error}): `hybrid-sparse calibrate MODEL --texts FILE... --out predictor.safetensors --summary "
            f"{ranking.summary}{codes}{sink}{window}`"
        ) from error


def _path(named: str) -> Path:
    try:
        return Path(named).expanduser()
    except RuntimeError as error:  # ~user of somebody unknown, or no home folder at all
        raise ConfigError(f"hybrid_sparse.predictor={named}: must be a file's path ({error})") from error

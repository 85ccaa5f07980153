"""The head-property predictor: a network with a shared backbone, and its file (Fluxion, section 5.2)."""

import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.predictor.features import FEATURE_VERSION, FEATURES
from vllm_hybrid_sparse.values import PageRanking, RetainedSet
from vllm_hybrid_sparse.whole_file import whole_file

_BOUNDS: Final = PageRanking(summary="minmax", code_bits=None)

SMOLLM2_PREDICTORS: Final = {
    PageRanking(): Path(__file__).with_name("smollm2-135m-instruct.safetensors"),
    _BOUNDS: Path(__file__).with_name("smollm2-135m-instruct-minmax.safetensors"),
}
"""The predictors that the package ships, for SmolLM2-135M-Instruct, by what ranks the pages. The metadata of each file
contain the command that made it."""

HIDDEN_SIZES: Final = (256, 256, 128)
PARAMETERS: Final = 109_827
"""Weights and biases: 41 * 256 + 256 + 256 * 256 + 256 + 256 * 128 + 128 + 128 * 3 + 3, about 0.11 M."""

_METADATA: Final = "hybrid_sparse_predictor"
_FEATURE_LIMIT: Final = 10.0  # standard deviations; training saw nothing beyond


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a language model that a predictor is tied to."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) < 1:
                raise ConfigError(f"{entry.name}={getattr(self, entry.name)}: must be 1 or more")
        if self.query_heads % self.kv_heads:
            raise ConfigError(f"query_heads={self.query_heads}: must be a multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorOrigin:
    """What a predictor was made for, and how. Its file keeps this as metadata."""

    shape: ModelShape
    model: str  # name of the language model, without a path
    tau: float  # the error that the budgets must not exceed (eq. 2)
    retained: RetainedSet  # what is attended to whatever is predicted
    ranking: PageRanking  # what ranked the blocks
    command: str  # the command that made the predictor, with file names and no paths
    validation: dict[str, float]  # figures on held-out prompts
    unread_attributed: float = 0.0  # the value of this setting that its budgets count on

    def to_metadata(self) -> dict[str, str]:
        """The metadata for safetensors: one entry, because it writes several in no particular order."""
        return {_METADATA: json.dumps(asdict(self) | {"feature_version": FEATURE_VERSION})}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str], name: str) -> Self:
        """The inverse. Raises ConfigError if the metadata are not a predictor's, or another release made them."""
        if _METADATA not in metadata:
            raise ConfigError(f"hybrid_sparse.predictor={name}: must be a file that `hybrid-sparse calibrate` wrote")
        try:
            content: dict[str, Any] = json.loads(metadata[_METADATA])
            if (version := content.pop("feature_version")) != FEATURE_VERSION:
                raise ConfigError(
                    f"hybrid_sparse.predictor={name}: feature_version={version}: must be {FEATURE_VERSION}; {_REMEDY}"
                )
            content["shape"], content["retained"] = ModelShape(**content["shape"]), RetainedSet(**content["retained"])
            # Files that do not say what ranks pages date from when only bounds did.
            content["ranking"] = PageRanking(**content["ranking"]) if "ranking" in content else _BOUNDS
            return cls(**content)
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"hybrid_sparse.predictor={name}: made by another release ({error!r}); {_REMEDY}"
            ) from error

    def check(self, name: str, shape: ModelShape, retained: RetainedSet, ranking: PageRanking) -> None:
        """Raise ConfigError unless the predictor serves this model, retained set and ranking."""
        wanted = asdict(shape) | asdict(retained) | asdict(ranking)
        made_for = asdict(self.shape) | asdict(self.retained) | asdict(self.ranking)
        for key, value in wanted.items():
            if made_for[key] != value:
                raise ConfigError(
                    f"hybrid_sparse.predictor={name}: made for {key}={made_for[key]}, not {value}; {_REMEDY}"
                )


_REMEDY: Final = "make one with `hybrid-sparse calibrate`"


@dataclass(frozen=True, slots=True)
class HeadProperties:
    """The predicted (bgt_h,0, k_h, s_h) of any number of query heads. Budgets are shares of the host segment."""

    base_budget: Tensor  # [heads]
    growth: Tensor  # [heads]
    streaming: Tensor  # [heads] in [0, 1]; from 0.5 on the head is taken for a streaming head


class Predictor(nn.Module):
    """A feed-forward network: 41 standardised features, three hidden layers, and the three properties.

    The paper only says that there are 0.112 M parameters, a shared backbone and an output layer for each task; the
    sizes and ReLU are ours. Features are standardised with the statistics of the training set, which are kept here as
    buffers, and clamped to 10 standard deviations. The regression outputs are standardised too.
    """

    feature_mean: Tensor
    feature_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self) -> None:
        super().__init__()
        sizes = (len(FEATURES), *HIDDEN_SIZES)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.backbone = nn.Sequential(*layers)
        self.outputs = nn.Linear(sizes[-1], 3)  # bgt_0 and k standardised, logit of s: one row a task
        for name, size in (("feature", len(FEATURES)), ("target", 2)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        assert sum(weight.numel() for weight in self.parameters()) == PARAMETERS

    def forward(self, features: Tensor) -> Tensor:
        """Map raw features [heads, 41] f32 to [heads, 3]: standardised bgt_0 and k, and the logit of s."""
        standard = (features - self.feature_mean) / self.feature_std
        outputs: Tensor = self.outputs(self.backbone(standard.clamp(-_FEATURE_LIMIT, _FEATURE_LIMIT)))
        return outputs

    def line(self, outputs: Tensor) -> Tensor:
        """Map `forward`'s outputs [heads, 3] f32 to [heads, 2]: bgt_0 and k of eq. 1, shares of the host segment."""
        return outputs[:, :2] * self.target_std + self.target_mean

    @torch.inference_mode()
    def predict(self, features: Tensor) -> HeadProperties:
        """Predict the properties of heads from their features, [heads, 41] f32."""
        outputs = self(features)
        base_budget, growth = self.line(outputs).unbind(dim=1)
        return HeadProperties(base_budget, growth, outputs[:, 2].sigmoid())

    def save(self, path: Path, origin: PredictorOrigin) -> None:
        """Write the predictor as safetensors; the file appears whole or not at all."""
        with whole_file(path) as scratch:
            save_file(self.state_dict(), scratch, origin.to_metadata())


def load_predictor(
    path: Path, shape: ModelShape, retained: RetainedSet, ranking: PageRanking, name: str | None = None
) -> tuple[Predictor, PredictorOrigin]:
    """Read a predictor, and check that it serves this model shape, retained set and ranking of pages.

    name     what errors call the file; None: its path
    raises   ConfigError, `predictor=name: rule`, if there is no such file, it cannot be read or is no predictor, or it
             was made for another model shape, retained set, ranking or version of the features
    """
    name = str(path) if name is None else name
    try:
        if not path.is_file():
            what = "must be a file, not a folder" if path.is_dir() else "no such file"
            raise ConfigError(f"hybrid_sparse.predictor={name}: {what}; {_REMEDY}")
        path.open("rb").close()  # safetensors would say that a file without read permission does not exist
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise ConfigError(f"hybrid_sparse.predictor={name}: must be a safetensors file ({error})") from error
    except OSError as error:
        raise ConfigError(f"hybrid_sparse.predictor={name}: cannot be read ({error.strerror or error})") from error
    origin = PredictorOrigin.from_metadata(metadata, name)
    origin.check(name, shape, retained, ranking)
    # Nothing may be computed here: vLLM's first process runs this too, and torch's threads would not outlive its fork.
    with torch.device("meta"):
        predictor = Predictor()
    try:
        predictor.load_state_dict(tensors, assign=True)
    except RuntimeError as error:  # its lines say which tensors differ
        raise ConfigError(f"hybrid_sparse.predictor={name}: made by another release ({error}); {_REMEDY}") from error
    return predictor.eval(), origin

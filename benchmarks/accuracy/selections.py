"""Which pages are read, by name: settings of the shipped kernels, and rules of the reference that bound them."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from transformers import PreTrainedModel

from benchmarks.accuracy.reference_attention import PageRule, ReferenceSession
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.values import RetainedSet

PROMISE = 0.95
FULL = "full"

SELECTIONS: dict[str, dict[str, object]] = {
    FULL: {"policy": "dense"},
    "quest-5%": {"policy": "topk", "topk_ratio": 0.05, "summary": "minmax"},
    "quest-2%": {"policy": "topk", "topk_ratio": 0.02, "summary": "minmax"},
    "cuboid-5%": {"policy": "topk", "topk_ratio": 0.05, "summary": "cuboid_mean"},
    "cuboid-2%": {"policy": "topk", "topk_ratio": 0.02, "summary": "cuboid_mean"},
    "codes1-5%": {"policy": "topk", "topk_ratio": 0.05, "code_bits": 1},
    "codes1-2%": {"policy": "topk", "topk_ratio": 0.02, "code_bits": 1},
    "codes2-5%": {"policy": "topk", "topk_ratio": 0.05, "code_bits": 2},
    "codes2-2%": {"policy": "topk", "topk_ratio": 0.02, "code_bits": 2},
    "codes2-0.95": {"policy": "progressive", "threshold": PROMISE},
    "codes1-0.95": {"policy": "progressive", "threshold": PROMISE, "code_bits": 1},
    "psa-0.95": {"policy": "progressive", "threshold": PROMISE, "summary": "cuboid_mean", "microbatch_pages": 8},
    "fluxion": {"policy": "fluxion"},
    "fluxion-16": {"policy": "fluxion", "granularity": 16},
    "psa-codes2-0.95": {"policy": "progressive", "threshold": PROMISE, "remainder": "lightest_page"},
}
"""Settings of the shipped kernels."""

REFERENCES: dict[str, PageRule] = {
    "oracle-5%": PageRule(order="oracle", ratio=0.05),
    "oracle-2%": PageRule(order="oracle", ratio=0.02),
    "oracle-0.95": PageRule(order="oracle", promise=PROMISE),
    "random-5%": PageRule(order="random", ratio=0.05),
    "random-2%": PageRule(order="random", ratio=0.02),
}
"""Rules of the reference in plain torch."""


class Decoding(Protocol):
    """What runs a model's decode steps: a SparseSession, or the reference."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def adopt(self) -> None:
        """Take the sequence over from the cache of the model's next call."""

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call."""


def runs_on(selection: str) -> str:
    """`shipped` where the kernels that serve requests run, else `reference`."""
    return "reference" if selection in REFERENCES else "shipped"


def retained_of(selection: str) -> RetainedSet:
    """The tokens that a selection always reads."""
    if selection in REFERENCES:
        return REFERENCES[selection].retained
    return HybridSparseConfig.from_mapping(SELECTIONS[selection]).retained


def open_decoding(
    model: PreTrainedModel, selection: str, *, max_tokens: int, watch: Callable[[DecodeStep], None] | None = None
) -> Decoding:
    """A session, to be entered, that decodes by the selection of that name; KeyError where there is none."""
    if selection in REFERENCES:
        return ReferenceSession(model, REFERENCES[selection], watch=watch)
    settings = HybridSparseConfig.from_mapping(SELECTIONS[selection])
    return SparseSession(model, settings, max_tokens=max_tokens, watch=watch)


def chosen(names: str) -> list[str]:
    """The selections of a comma-separated list, full attention first; ValueError for an unknown one."""
    asked = [name for name in names.split(",") if name]
    known = [*SELECTIONS, *REFERENCES]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"selections={','.join(unknown)}: must be among {', '.join(known)}")
    return sorted(dict.fromkeys(asked), key=lambda name: name != FULL)

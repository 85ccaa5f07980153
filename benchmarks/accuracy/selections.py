"""Ways of choosing pages, by name: settings of the shipped kernels, and rules of the reference that bound them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Protocol, Self

import torch
from transformers import PreTrainedModel

from benchmarks.accuracy.fixed_budget import write_fixed_predictor
from benchmarks.accuracy.reference_attention import PageRule, ReferenceSession
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.hf.shape import model_shape
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet

PROMISE = 0.95
FULL = "full"

TOPK_RATIOS = (0.01, 0.02, 0.05, 0.10, 0.20, 0.30, 0.40, 0.60, 0.70, 0.80)
THRESHOLDS = (0.80, 0.90, PROMISE, 0.98)
HGCA_BETAS = (0.25, 0.5, 0.75, 1.0)
HGCA_SHARES = (0.25, 0.5, 0.75)
HEAD_BUDGETS = (0.02, 0.05)
HGCA_TOKENS = 4096  # length of the sequences of which the dense window is a share


def _topk(family: str, **settings: object) -> dict[str, dict[str, object]]:
    return {f"{family}-{ratio:.0%}": {"policy": "topk", "topk_ratio": ratio, **settings} for ratio in TOPK_RATIOS}


def _thresholds(family: str, **settings: object) -> dict[str, dict[str, object]]:
    return {
        f"{family}-{threshold:.2f}": {"policy": "progressive", "threshold": threshold, **settings}
        for threshold in THRESHOLDS
    }


def hgca_name(beta: float, share: float) -> str:
    """The selection of HGCA's table 1 at this β and the dense window's share of the KV cache."""
    return f"hgca-{beta:g}-{share:.0%}"


def _hgca() -> dict[str, dict[str, object]]:
    """The dense window, with its 64 sink tokens, is a share of `HGCA_TOKENS` tokens, in whole pages."""
    return {
        hgca_name(beta, share): {
            "policy": "hgca",
            "hgca_beta": beta,
            "window_tokens": int(share * HGCA_TOKENS) // PAGE_TOKENS * PAGE_TOKENS - 64,
        }
        for beta in HGCA_BETAS
        for share in HGCA_SHARES
    }


SELECTIONS: dict[str, dict[str, object]] = {
    FULL: {"policy": "dense"},
    **_topk("quest", summary="minmax"),
    **_topk("cuboid", summary="cuboid_mean"),
    **_topk("codes1", code_bits=1),
    **_topk("codes2", code_bits=2),
    **_thresholds("codes1", code_bits=1),
    **_thresholds("codes2", code_bits=2),
    **_thresholds("psa", summary="cuboid_mean", microbatch_pages=8),
    **_thresholds("psa-codes2", remainder="lightest_page", unread_attributed=0),
    **_topk("left-out-codes2", unread_attributed=0),
    **_thresholds("left-out-codes2", unread_attributed=0),
    **_hgca(),
    "fluxion-codes2": {"policy": "fluxion"},
    "fluxion-codes2-16": {"policy": "fluxion", "granularity": 16},
    "fluxion-left-out-codes2-16": {"policy": "fluxion", "granularity": 16, "unread_attributed": 0},
    "fluxion-minmax": {"policy": "fluxion", "summary": "minmax"},
    "fluxion-minmax-16": {"policy": "fluxion", "summary": "minmax", "granularity": 16},
    **{
        f"fixed16-codes2-{budget:.0%}": {
            "policy": "fluxion",
            "granularity": 16,
            "dense_tokens": 0,
            "unread_attributed": 0,
        }
        for budget in HEAD_BUDGETS
    },
    **{
        f"fixed16-minmax-{budget:.0%}": {"policy": "fluxion", "summary": "minmax", "granularity": 16, "dense_tokens": 0}
        for budget in HEAD_BUDGETS
    },
}
"""Settings of the shipped kernels."""

FIXED_BUDGETS = {f"fixed16-{ranked}-{budget:.0%}": budget for ranked in ("codes2", "minmax") for budget in HEAD_BUDGETS}
"""Selections in which every head reads the same share of its blocks (Fluxion's baseline)."""

REFERENCES: dict[str, PageRule] = {
    "oracle-5%": PageRule(order="oracle", ratio=0.05),
    "oracle-2%": PageRule(order="oracle", ratio=0.02),
    "oracle-0.95": PageRule(order="oracle", promise=PROMISE),
    "random-5%": PageRule(order="random", ratio=0.05),
    "random-2%": PageRule(order="random", ratio=0.02),
}
"""Rules of the reference in plain torch."""


@dataclass(frozen=True, slots=True)
class Family:
    """One way of choosing pages at several budgets."""

    name: str
    summary: str  # that it ranks pages by
    selections: tuple[str, ...]


PSA_FAMILIES = (
    Family("top-k", "cuboid_mean", tuple(_topk("cuboid"))),
    Family("PSA's rule", "cuboid_mean", tuple(_thresholds("psa"))),
    Family("top-k", "key_codes", tuple(_topk("codes2"))),
    Family("PSA's rule", "key_codes", tuple(_thresholds("psa-codes2"))),
    Family("estimated remainder", "key_codes", tuple(_thresholds("codes2"))),
)
"""PSA's figure 5: thresholds against top-k with the same summaries."""

GROUPS: dict[str, list[str]] = {
    "main": [
        FULL, "quest-5%", "quest-2%", "cuboid-5%", "cuboid-2%", "codes1-5%", "codes1-2%", "codes2-5%", "codes2-2%",
        "codes2-0.95", "codes1-0.95", "psa-0.95", "psa-codes2-0.95", *REFERENCES,
    ],
    "psa": [FULL, *(name for family in PSA_FAMILIES for name in family.selections)],
    "hgca": [FULL, *_hgca()],
}  # fmt: skip
"""Selections by the purpose of measuring them: the trade-off, PSA's figures 2 and 5, HGCA's table 1."""


class Decoding(Protocol):
    """Runs a model's decode steps: a SparseSession, or the reference."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def keeps_request_state(self) -> bool:
        """Whether the choice of pages depends on queries of earlier calls, and not on the cache alone."""

    def adopt(self) -> None:
        """Take over the sequence from the cache of the model's next call."""

    def row_by_row(self) -> AbstractContextManager[None]:
        """A context in which the rows of a call are decoded one after another, as if each came in its own call."""

    def take_stats(self) -> DecodeStats:
        """What was decoded since the last call."""


def runs_on(selection: str) -> str:
    """`shipped` if the kernels that serve requests run, else `reference`."""
    return "reference" if selection in REFERENCES else "shipped"


def retained_of(selection: str) -> RetainedSet:
    """The tokens that a selection always reads."""
    if selection in REFERENCES:
        return REFERENCES[selection].retained
    return HybridSparseConfig.from_mapping(SELECTIONS[selection]).retained


def open_decoding(
    model: PreTrainedModel,
    selection: str,
    *,
    max_tokens: int,
    watch: Callable[[DecodeStep], None] | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Decoding:
    """A session, to be entered, that decodes by the selection of that name; KeyError if there is none.

    kv_dtype   of the shipped kernels' KV cache; None: the model's
    """
    if selection in REFERENCES:
        return ReferenceSession(model, REFERENCES[selection], watch=watch)
    settings = HybridSparseConfig.from_mapping(SELECTIONS[selection])
    session = partial(SparseSession, model, max_tokens=max_tokens, watch=watch, kv_dtype=kv_dtype)
    if selection not in FIXED_BUDGETS:
        return session(settings)
    assert settings.prediction is not None
    with TemporaryDirectory() as folder:  # the session reads the file before this returns
        path = Path(folder) / "fixed.safetensors"
        shape = model_shape(model.config.get_text_config())
        write_fixed_predictor(path, FIXED_BUDGETS[selection], shape, settings.retained, settings.prediction.ranking)
        return session(replace(settings, predictor=str(path)))


def chosen(names: str) -> list[str]:
    """The selections that a comma-separated list of selections and `GROUPS` names, full attention first.

    raises   ValueError if one is unknown
    """
    asked = [one for name in names.split(",") if name for one in GROUPS.get(name, [name])]
    known = [*SELECTIONS, *REFERENCES]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"selections={','.join(unknown)}: must be among {', '.join([*GROUPS, *known])}")
    return sorted(dict.fromkeys(asked), key=lambda name: name != FULL)

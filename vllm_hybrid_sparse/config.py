"""The user's settings: frozen, checked where they enter, and translated for the layers below."""

import difflib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Self

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.setting import SECTION, Setting, checked, refusal, setting_of
from vllm_hybrid_sparse.settings import CUDA_RESIDENT_SHARE, Settings
from vllm_hybrid_sparse.values import (
    CODE_BITS,
    PageRanking,
    PredictionSpec,
    RetainedSet,
    SalienceSpec,
    SelectionSpec,
)

FLUXION_SUMMARIES = ("key_codes", "minmax")  # those with which a block's score follows from its pages' scores


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSparseConfig(Settings):
    """The settings in effect.

    A setting that the policy in effect does not use is None, and giving it is an error. Numbers may come as text, as
    `--additional-config.hybrid_sparse.threshold 0.9` passes them on. Raises ConfigError,
    `hybrid_sparse.name=value: rule`.
    """

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                object.__setattr__(self, entry.name, checked(entry.name, value, setting_of(entry)))
        for entry in fields(self):  # in order: whether one is used may depend on the default of an earlier one
            self._check_use(entry)
            setting = setting_of(entry)
            replaced = setting.unless and getattr(self, setting.unless) is not None
            used = setting.policies or setting.summaries or setting.devices
            if getattr(self, entry.name) is None and used and not self._unused_because(setting) and not replaced:
                object.__setattr__(self, entry.name, self._default_of(entry.name, setting))
        if self.policy == "fluxion" and self.summary not in FLUXION_SUMMARIES:
            raise refusal("summary", self.summary, f"must be {' or '.join(FLUXION_SUMMARIES)} with policy fluxion")
        if self.remainder == "auto":
            estimates = self.summary == "key_codes"
            object.__setattr__(self, "remainder", "estimated" if estimates else "lightest_page")
        if self.remainder == "estimated" and self.summary != "key_codes":
            raise refusal("remainder", self.remainder, f"needs summary key_codes, and the summary is {self.summary}")
        self._check_device()

    def _default_of(self, name: str, setting: Setting) -> int | float | str | None:
        """The value of a setting that is used but not given; None: there is none, or the worker decides."""
        if self.policy == "dense" and name == "summary":
            return None
        if self.device == "cuda" and name == "device_pool_pages":
            return None
        if self.device == "cuda" and name == "device_resident_share" and self.device_pool == "unified":
            return CUDA_RESIDENT_SHARE
        if self.policy == "fluxion" and name == "host_share":
            return "queue"
        if self.device == "cuda" and name == "device_ranking" and not self._ranked_by_host_because():
            return "device"
        return setting.default

    def _check_device(self) -> None:
        """Refuse a device that could not serve one group."""
        if self.device == "none":
            return
        least = self.selection.pages_in_flight
        if self.device_pool_pages is not None and self.device_pool_pages < least:
            rule = f"must be at least {least}: the microbatch that a group attends to, and the one that is loaded"
            raise refusal("device_pool_pages", self.device_pool_pages, rule)
        if self.device_ranking == "device" and (reason := self._ranked_by_host_because()):
            raise refusal("device_ranking", self.device_ranking, reason)
        if self.device_resident_share and self.device_pool != "unified":
            raise refusal(
                "device_resident_share",
                self.device_resident_share,
                f"needs device_pool unified, since a block is of all layers, and the pool is {self.device_pool}",
            )

    def _ranked_by_host_because(self) -> str:
        """Why the device cannot choose pages by itself; empty if it can."""
        reads_all = self.policy == "dense"
        for name, value, needed, rule in (
            ("device_pool", self.device_pool, self.device_pool == "unified", "unified"),
            ("device_eviction", self.device_eviction, self.device_eviction == "cyclic", "cyclic"),
            ("host_share", self.host_share, self.host_share == "none", "none"),
            ("summary", self.summary, reads_all or self.summary == "key_codes", "key_codes"),
            ("remainder", self.remainder, self.remainder in (None, "auto", "estimated"), "estimated"),
        ):
            if not needed:
                return f"needs {name} {rule}, and it is {value}"
        return ""

    def _unused_because(self, setting: Setting) -> str:
        """Why the setting has no effect; empty if it has one."""
        for kind, chosen, users in (
            ("policy", self.policy, setting.policies),
            ("summary", self.page_summary, setting.summaries),
            ("device", self.device, setting.devices),
        ):
            if users and chosen not in users:
                return f"used by {kind} {' and '.join(users)} only, and the {kind} is {chosen}"
        return ""

    def _check_use(self, entry: Field[Any]) -> None:
        """Refuse a setting that is given but would have no effect."""
        setting, value = setting_of(entry), getattr(self, entry.name)
        if value is None:
            return
        if reason := self._unused_because(setting):
            raise refusal(entry.name, value, reason)
        if setting.unless and getattr(self, setting.unless) is not None:
            raise refusal(entry.name, value, f"give it or {setting.unless}, not both")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """The settings of `additional_config["hybrid_sparse"]`; an absent or null key takes its default."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{SECTION}={mapping!r}: must be a mapping of setting names to values")
        known = [entry.name for entry in fields(cls)]
        for name, value in mapping.items():
            if name not in known:
                close = difflib.get_close_matches(str(name).replace("-", "_").lower(), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"
                raise refusal(name, value, f"no such setting; {hint}")
        return cls(**{name: value for name, value in mapping.items() if value is not None})

    @property
    def retained(self) -> RetainedSet:
        """The tokens that every decode row reads."""
        return RetainedSet(sink_tokens=self.sink_tokens, window_tokens=self.window_tokens)

    @property
    def page_summary(self) -> str:
        """The kind of summary that pages have, as the kernels name it; `none` if pages have none."""
        return self.summary or "none"

    @property
    def page_code_bits(self) -> int:
        """Bits per dimension of key codes. The kernels take this number with any summary."""
        return self.code_bits or CODE_BITS[-1]

    @property
    def selection(self) -> SelectionSpec:
        """The policy as the kernels take it; hgca uses `salience` instead, and fluxion uses `prediction`."""
        attributed = self.unread_attributed or 0.0
        if self.policy in ("dense", "hgca", "fluxion"):
            return SelectionSpec(attributed=attributed)
        if self.policy == "topk":
            ratio, pages = self.topk_ratio or 1.0, self.topk_pages
            return SelectionSpec(
                ranked=True,
                budget_ratio=ratio,
                max_pages=pages,
                attributed=attributed,
                prefix_sharers=self.prefix_sharers,
            )
        assert self.threshold is not None
        assert self.microbatch_pages is not None
        return SelectionSpec(
            ranked=True,
            threshold=self.threshold,
            microbatch_pages=self.microbatch_pages,
            estimated_remainder=self.remainder == "estimated",
            attributed=attributed,
            prefix_sharers=self.prefix_sharers,
        )

    @property
    def salience(self) -> SalienceSpec | None:
        """HGCA's rule; None under another policy."""
        if self.policy != "hgca":
            return None
        assert self.hgca_beta is not None
        assert self.hgca_alpha is not None
        return SalienceSpec(beta=self.hgca_beta, alpha=self.hgca_alpha)

    @property
    def prediction(self) -> PredictionSpec | None:
        """Fluxion's rule; None under another policy."""
        if self.policy != "fluxion":
            return None
        assert self.granularity is not None
        assert self.dense_tokens is not None
        return PredictionSpec(
            predictor=self.predictor,
            granularity=self.granularity,
            dense_tokens=self.dense_tokens,
            ranking=PageRanking(summary=self.page_summary, code_bits=self.code_bits),
        )

    def describe(self) -> str:
        """The settings in effect as one line, `name=value` separated by blanks."""
        pairs = [(entry.name, getattr(self, entry.name)) for entry in fields(self)]
        return " ".join(f"{name}={value}" for name, value in pairs if value is not None)

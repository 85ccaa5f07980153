"""The user's settings: frozen, checked where they enter, and described from the metadata of the fields."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Self

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.setting import SECTION, Setting, checked, choice_field, refusal, setting_field, setting_of
from vllm_hybrid_sparse.values import (
    CODE_BITS,
    PAGE_TOKENS,
    SUMMARY_VECTORS,
    UNREAD_ATTRIBUTED,
    PageRanking,
    PredictionSpec,
    RetainedSet,
    SalienceSpec,
    SelectionSpec,
)

PAGE_POLICIES = ("dense", "topk", "progressive")
POLICIES = (*PAGE_POLICIES, "hgca", "fluxion")
SUMMARIES = tuple(name for name in SUMMARY_VECTORS if name not in ("none", "split_codes"))  # what a user may ask for
BLOCK_GRANULARITIES = (0, 16, 32, 64, 128)
REMAINDERS = ("auto", "estimated", "lightest_page")
THREAD_POOLS = ("auto", "own", "openmp")
ISAS = ("auto", "amx_bf16", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "scalar")
DEVICES = ("none", "emulated", "cuda")
TIERED_DEVICES = ("emulated", "cuda")
DEVICE_POOLS = ("unified", "per_layer")
DEVICE_EVICTIONS = ("cyclic", "lru", "fifo")
DEVICE_RANKINGS = ("host", "device")
DEVICE_GRAPHS = ("on", "off")
HOST_SHARES = ("none", "uniform", "length", "queue")
ADMISSIONS = ("working_set", "none")
CUDA_RESIDENT_SHARE = 0.75
"""A quarter stays for the requests that do not fit. Reckoned, not measured."""

FLUXION_SUMMARIES = ("key_codes", "minmax")  # those of which a block's score is composed of its pages'
_MAX_TOKENS = 2**24
_MAX_PAGES = _MAX_TOKENS // PAGE_TOKENS
_MAX_SLOTS = 2**31 - 1  # the kernels count them in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridSparseConfig:
    """Every setting of the backend.

    A setting that the policy in effect does not use is None, and giving it is an error. Numbers may come as text, the
    way `--additional-config.hybrid_sparse.threshold 0.9` passes them on. Raises ConfigError,
    `hybrid_sparse.name=value: rule`.
    """

    policy: str = choice_field(
        "progressive",
        POLICIES,
        "which candidates a decode step reads: all pages, the best few, enough of them, HGCA's salient tokens, or as "
        "many for each head as Fluxion's predictor says",
    )
    threshold: float | None = setting_field(
        Setting(
            kind=float,
            default=0.95,
            values="above 0 and at most 1",
            allows=lambda value: 0 < value <= 1,
            meaning="share of a query's attention weight to gather before reading stops (PSA's ε); 1 reads every page",
            policies=("progressive",),
        )
    )
    microbatch_pages: int | None = setting_field(
        Setting(
            kind=int,
            default=16,
            values="1 to 1024",
            allows=lambda value: 1 <= value <= 1024,
            meaning="pages read between two looks at the threshold (PSA's m); where the rest is estimated, "
            "the steps in which a round of reading grows",
            unit="pages",
            policies=("progressive",),
        )
    )
    remainder: str | None = setting_field(
        Setting(
            kind=str,
            default="auto",
            values=f"one of {', '.join(REMAINDERS)}",
            allows=REMAINDERS.__contains__,
            meaning="what the unread pages are taken to weigh: what their key codes say, or each as much as the "
            "lightest page read (PSA); auto estimates where the summary is key_codes",
            policies=("progressive",),
        )
    )
    topk_ratio: float | None = setting_field(
        Setting(
            kind=float,
            default=0.05,
            values="above 0 and at most 1",
            allows=lambda value: 0 < value <= 1,
            meaning="share of the candidate pages to read, rounded up to a page",
            policies=("topk",),
            unless="topk_pages",
        )
    )
    topk_pages: int | None = setting_field(
        Setting(
            kind=int,
            default=None,
            values=f"1 to {_MAX_PAGES}",
            allows=lambda value: 1 <= value <= _MAX_PAGES,
            meaning="number of candidate pages to read",
            unit="pages",
            policies=("topk",),
            unless="topk_ratio",
        )
    )
    hgca_beta: float | None = setting_field(
        Setting(
            kind=float,
            default=1.0,
            values="above 0, finite",
            allows=lambda value: value > 0 and math.isfinite(value),
            meaning="a token is salient to a head that gives it more than so many times the mean attention weight "
            "(HGCA's β); lower reads more",
            policies=("hgca",),
        )
    )
    hgca_alpha: float | None = setting_field(
        Setting(
            kind=float,
            default=0.1,
            values="above 0 and at most 1",
            allows=lambda value: 0 < value <= 1,
            meaning="share of the latest step in the moving average of a token's attention weight (HGCA's α)",
            policies=("hgca",),
        )
    )
    predictor: str | None = setting_field(
        Setting(
            kind=str,
            default=None,
            values="the path of a file that `hybrid-sparse calibrate` wrote",
            allows=bool,
            meaning="what predicts the budget of each head; without one, the shipped predictor, where it was made for "
            "this model's shape",
            policies=("fluxion",),
        )
    )
    granularity: int | None = setting_field(
        Setting(
            kind=int,
            default=0,
            values=f"one of {', '.join(map(str, BLOCK_GRANULARITIES))}",
            allows=BLOCK_GRANULARITIES.__contains__,
            meaning="size of the logical blocks that are ranked and read; 0 chooses for each group and step the one "
            "that moves the least data (Fluxion's eq. 3)",
            unit="tokens",
            policies=("fluxion",),
        )
    )
    dense_tokens: int | None = setting_field(
        Setting(
            kind=int,
            default=2048,
            values=f"0 to {_MAX_TOKENS}",
            allows=lambda value: 0 <= value <= _MAX_TOKENS,
            meaning="requests of so many tokens or fewer attend to everything: choosing takes longer "
            "there than reading",
            unit="tokens",
            policies=("fluxion",),
        )
    )
    summary: str | None = setting_field(
        Setting(
            kind=str,
            default="key_codes",
            values=f"one of {', '.join(SUMMARIES)}",
            allows=SUMMARIES.__contains__,
            meaning="what is kept of a page to estimate its score: bits of its keys (RaBitQ), ArkVale's centre, "
            "Quest's bounds; fluxion takes key_codes or minmax, whichever its predictor was made for; dense, which "
            "reads none, keeps none where it is not given",
            policies=(*PAGE_POLICIES, "fluxion"),
        )
    )
    code_bits: int | None = setting_field(
        Setting(
            kind=int,
            default=2,
            values=f"one of {', '.join(map(str, CODE_BITS))}",
            allows=CODE_BITS.__contains__,
            meaning="bits a dimension of a key's code",
            unit="bits",
            summaries=("key_codes",),
        )
    )
    unread_attributed: float | None = setting_field(
        Setting(
            kind=float,
            default=UNREAD_ATTRIBUTED,
            values="0 to 1",
            allows=lambda value: 0 <= value <= 1,
            meaning="how much of the attention weight that key codes estimate of the unread pages goes to the "
            "candidates read, which then count for more beside the retained set; 0 leaves it out, as the papers do",
            policies=(*PAGE_POLICIES[1:], "fluxion"),
            summaries=("key_codes",),
        )
    )
    sink_tokens: int = setting_field(
        Setting(
            kind=int,
            default=64,
            values=f"a multiple of {PAGE_TOKENS}, 0 to {_MAX_TOKENS}",
            allows=lambda value: 0 <= value <= _MAX_TOKENS and value % PAGE_TOKENS == 0,
            meaning="first tokens of a request, always read",
            unit="tokens",
        )
    )
    window_tokens: int = setting_field(
        Setting(
            kind=int,
            default=256,
            values=f"a multiple of {PAGE_TOKENS}, {PAGE_TOKENS} to {_MAX_TOKENS}",
            allows=lambda value: PAGE_TOKENS <= value <= _MAX_TOKENS and value % PAGE_TOKENS == 0,
            meaning="latest tokens of a request, always read",
            unit="tokens",
        )
    )
    isa: str = choice_field("auto", ISAS, "instruction set of the CPU kernel; auto takes the best that the machine has")
    num_threads: int = setting_field(
        Setting(
            kind=int,
            default=0,
            values="0 to 1024",
            allows=lambda value: 0 <= value <= 1024,
            meaning="threads of the CPU kernel; 0 takes as many as torch's OpenMP has, and one more where vLLM by "
            "itself leaves a second core idle, on cuda an equal part of the cores for each GPU, less one",
            unit="threads",
        )
    )
    thread_pool: str = choice_field(
        "auto",
        THREAD_POOLS,
        "whose threads help: the kernel's own, or torch's GNU OpenMP team; auto takes openmp where it is loaded and "
        "has as many",
    )
    device: str = choice_field(
        "none",
        DEVICES,
        "where decode rows attend: none, on the CPU where the pages lie; emulated, through a pool of page slots and "
        "threads that stand for a GPU and its streams (slow: for tests and for studying the pool); cuda, on a GPU and "
        "its host, which is what vLLM's CUDA platform gets by default and the only one it takes",
    )
    device_pool_pages: int | None = setting_field(
        Setting(
            kind=int,
            default=4096,
            values=f"1 to {_MAX_SLOTS}, and no fewer than two microbatches, of each layer under per_layer",
            allows=lambda value: 1 <= value <= _MAX_SLOTS,
            meaning="page slots of the device, all layers together; on cuda, where it is not given, as many as fit the "
            "memory that vLLM's profiling leaves",
            unit="pages",
            devices=TIERED_DEVICES,
        )
    )
    device_pool: str | None = choice_field(
        "unified",
        DEVICE_POOLS,
        "whether all layers share the slots (PSA) or each has an equal part to itself",
        devices=TIERED_DEVICES,
    )
    device_eviction: str | None = choice_field(
        "cyclic",
        DEVICE_EVICTIONS,
        "which page makes room for another: cyclic, one that its layer left out lately, else the one used last, since "
        "layers take turns; lru, the one used longest ago; fifo, the one loaded first",
        devices=TIERED_DEVICES,
    )
    device_resident_share: float | None = setting_field(
        Setting(
            kind=float,
            default=0.0,
            values="0 or more, below 1",
            allows=lambda value: 0 <= value < 1,
            meaning="part of the slots that may hold whole blocks: a request all of whose blocks are there is read "
            "whole, by the device alone; 0 has none; on cuda with a unified pool "
            f"{CUDA_RESIDENT_SHARE} where it is not given",
            policies=PAGE_POLICIES,
            devices=TIERED_DEVICES,
        )
    )
    host_share: str | None = choice_field(
        "none",
        HOST_SHARES,
        "which groups of query heads the host computes beside the device: none, every second one, the longest rows, or "
        "what it takes from one queue for both (Fluxion); under hgca the device has the window, the host the rest",
        policies=(*PAGE_POLICIES, "fluxion"),
        devices=TIERED_DEVICES,
    )
    device_ranking: str | None = choice_field(
        "host",
        DEVICE_RANKINGS,
        "who chooses the pages of a decode row that is not read whole: the host, layer by layer, or the device, which "
        "then keeps codes and places of all pages of the host store in its memory and waits for nobody; on cuda device "
        "where it is not given and can be: with a unified pool, cyclic eviction, no host_share, and a policy that "
        "ranks by key codes with an estimated remainder, or not at all",
        policies=PAGE_POLICIES,
        devices=TIERED_DEVICES,
    )
    device_graphs: str | None = choice_field(
        "on",
        DEVICE_GRAPHS,
        "whether what is launched for rows that the device reads by itself, or whose pages it chooses, is captured in "
        "CUDA graphs and launched as one from then on; --enforce-eager has none either",
        policies=PAGE_POLICIES,
        devices=("cuda",),
    )
    admission: str | None = choice_field(
        "working_set",
        ADMISSIONS,
        "which requests run side by side: working_set, only as many as the pool holds the pages of that a step begins "
        "with, and one at the least (PSA), the others wait in their order; none, as many as vLLM admits, and so on "
        "cuda where device_pool_pages is not given",
        devices=TIERED_DEVICES,
    )
    log_interval_s: float = setting_field(
        Setting(
            kind=float,
            default=60.0,
            values="0 or more, finite",
            allows=lambda value: value >= 0 and math.isfinite(value),
            meaning="time between two log lines on how much of the cache was read; 0 writes none",
            unit="s",
        )
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is not None:
                object.__setattr__(self, entry.name, checked(entry.name, value, setting_of(entry)))
        for entry in fields(self):  # in their order: whether one is used may depend on the default of one before it
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
        """What a setting that is used and not given becomes; None: there is none, or the worker decides."""
        if self.policy == "dense" and name == "summary":
            return None
        if self.device == "cuda" and name == "device_pool_pages":
            return None
        if self.device == "cuda" and name == "device_resident_share" and self.device_pool == "unified":
            return CUDA_RESIDENT_SHARE
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
        """Why the device cannot choose pages by itself; empty where it can."""
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
        """Why the setting has no effect; empty where it has."""
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
        """The kind of summary that pages have, as the kernels name it; `none` where the policy scores no pages."""
        return self.summary or "none"

    @property
    def page_code_bits(self) -> int:
        """Bits a dimension of key codes, as the kernels take it whatever the summary."""
        return self.code_bits or CODE_BITS[-1]

    @property
    def selection(self) -> SelectionSpec:
        """The policy as the kernels take it; hgca has `salience` instead, and fluxion `prediction`."""
        attributed = self.unread_attributed or 0.0
        if self.policy in ("dense", "hgca", "fluxion"):
            return SelectionSpec(attributed=attributed)
        if self.policy == "topk":
            ratio, pages = self.topk_ratio or 1.0, self.topk_pages
            return SelectionSpec(ranked=True, budget_ratio=ratio, max_pages=pages, attributed=attributed)
        assert self.threshold is not None
        assert self.microbatch_pages is not None
        return SelectionSpec(
            ranked=True,
            threshold=self.threshold,
            microbatch_pages=self.microbatch_pages,
            estimated_remainder=self.remainder == "estimated",
            attributed=attributed,
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


def settings_table() -> str:
    """Every setting as a Markdown table with one row each; the README carries this text."""
    lines = ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in fields(HybridSparseConfig):
        setting = setting_of(entry)
        values = f"{setting.values} ({setting.unit})" if setting.unit else setting.values
        default = "not set" if setting.default is None else f"`{setting.default}`"
        meaning = setting.meaning
        if setting.policies:
            meaning += f"; policy {' and '.join(setting.policies)} only"
        if setting.summaries:
            meaning += f"; summary {' and '.join(setting.summaries)} only"
        if setting.devices:
            meaning += f"; device {' and '.join(setting.devices)} only"
        if setting.unless:
            meaning += f", and not together with `{setting.unless}`"
        lines.append(f"| `{entry.name}` | {values} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"

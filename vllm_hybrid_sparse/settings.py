"""Every setting of the backend: its values, default and meaning. Checks and documents are made from these."""

import math
from dataclasses import dataclass, fields

from vllm_hybrid_sparse.setting import Setting, choice_field, setting_field, setting_of
from vllm_hybrid_sparse.values import CODE_BITS, PAGE_TOKENS, SUMMARY_VECTORS, UNREAD_ATTRIBUTED

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
HOST_SHARES = ("none", "uniform", "length", "queue", "all")
ADMISSIONS = ("working_set", "none")
CUDA_RESIDENT_SHARE = 0.75
"""The remaining quarter is for requests that do not fit. This was reasoned, not measured."""

_MAX_TOKENS = 2**24
_MAX_PAGES = _MAX_TOKENS // PAGE_TOKENS
_MAX_SLOTS = 2**31 - 1  # the kernels count them in 32 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of the backend as the user gives it; None: not given."""

    policy: str = choice_field(
        "progressive",
        POLICIES,
        "which candidates a decode step reads: dense, all pages; topk, the best few; progressive, the best until they "
        "reach the threshold; hgca, HGCA's salient tokens; fluxion, as many for each head as Fluxion's predictor says",
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
            meaning="pages read between two checks of the threshold (PSA's m); if the remainder is estimated, a round "
            "of reading grows in steps of this size",
            unit="pages",
            policies=("progressive",),
        )
    )
    remainder: str | None = choice_field(
        "auto",
        REMAINDERS,
        "how the weight of unread pages is estimated: estimated, from their key codes; lightest_page, by assuming that "
        "each weighs as much as the lightest page read (PSA); auto takes estimated if the summary is key_codes, "
        "otherwise lightest_page",
        policies=("progressive",),
    )
    topk_ratio: float | None = setting_field(
        Setting(
            kind=float,
            default=0.05,
            values="above 0 and at most 1",
            allows=lambda value: 0 < value <= 1,
            meaning="share of the candidate pages to read, rounded up to a whole page",
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
            meaning="a token is salient to a head that gives it more than this many times the mean attention weight "
            "(HGCA's β); lower values read more",
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
            meaning="predicts the budget of each head; if not set, the shipped predictor is used, provided that it was "
            "made for this model's shape",
            policies=("fluxion",),
        )
    )
    granularity: int | None = setting_field(
        Setting(
            kind=int,
            default=0,
            values=f"one of {', '.join(map(str, BLOCK_GRANULARITIES))}",
            allows=BLOCK_GRANULARITIES.__contains__,
            meaning="size of the logical blocks that are ranked and read; 0 chooses, for each group and step, the size "
            "that moves the least data as Fluxion's eq. 3 counts it",
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
            meaning="requests of at most this many tokens attend to everything, because choosing would take longer "
            "than reading",
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
            meaning="what is kept of each page to estimate its score: key_codes, bits of its keys (RaBitQ); "
            "cuboid_mean, ArkVale's centre; minmax, Quest's bounds; fluxion takes key_codes or minmax, whichever its "
            "predictor was made for; dense reads no summaries, and keeps none unless this is set",
            policies=(*PAGE_POLICIES, "fluxion"),
        )
    )
    code_bits: int | None = setting_field(
        Setting(
            kind=int,
            default=2,
            values=f"one of {', '.join(map(str, CODE_BITS))}",
            allows=CODE_BITS.__contains__,
            meaning="bits per dimension of a key's code",
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
            meaning="share of the unread pages' attention weight, estimated from their key codes, that goes to the "
            "candidates read, which then count for more relative to the retained set; 0 ignores unread pages, as the "
            "papers do",
            policies=(*PAGE_POLICIES[1:], "fluxion"),
            summaries=("key_codes",),
        )
    )
    prefix_sharers: int | None = setting_field(
        Setting(
            kind=int,
            default=None,
            values="0, or 2 to 1024",
            allows=lambda value: value == 0 or 2 <= value <= 1024,
            meaning="from how many requests of a step on the pages that they begin with in common (prefix caching) are "
            "read once and attended to exactly, instead of as each request selects; 0: never; if not set, progressive "
            "does so from 6 requests on with AMX in bfloat16, where it takes less time (measured at 7K tokens and a "
            "threshold of 0.95), and topk never",
            unit="requests",
            policies=PAGE_POLICIES[1:],
            devices=("none",),
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
    isa: str = choice_field("auto", ISAS, "instruction set of the CPU kernel; auto takes the best the machine has")
    num_threads: int = setting_field(
        Setting(
            kind=int,
            default=0,
            values="0 to 1024",
            allows=lambda value: 0 <= value <= 1024,
            meaning="threads of the CPU kernel; 0 takes as many as torch's OpenMP has, plus one if vLLM by its own "
            "choice binds a lone worker to one of two CPUs; on cuda, 0 takes each GPU's equal share of the cores, less "
            "one",
            unit="threads",
        )
    )
    thread_pool: str = choice_field(
        "auto",
        THREAD_POOLS,
        "whose threads help: own, the kernel's own; openmp, torch's GNU OpenMP team; auto takes openmp if it is loaded "
        "and has enough threads",
    )
    device: str = choice_field(
        "none",
        DEVICES,
        "where decode rows attend: none, on the CPU, where the pages lie; emulated simulates a GPU and its pool of "
        "page slots with threads (slow: for tests and for studying the pool); cuda, on a GPU and its host, is the "
        "default and the only choice on vLLM's CUDA platform",
    )
    device_pool_pages: int | None = setting_field(
        Setting(
            kind=int,
            default=4096,
            values=f"1 to {_MAX_SLOTS}, and at least two microbatches (with per_layer, for each layer)",
            allows=lambda value: 1 <= value <= _MAX_SLOTS,
            meaning="page slots of the device, all layers together; on cuda, if not set, as many as fit the memory "
            "that vLLM's profiling leaves",
            unit="pages",
            devices=TIERED_DEVICES,
        )
    )
    device_pool: str | None = choice_field(
        "unified",
        DEVICE_POOLS,
        "who owns the slots: unified, all layers share them (PSA); per_layer, each layer has an equal part to itself",
        devices=TIERED_DEVICES,
    )
    device_eviction: str | None = choice_field(
        "cyclic",
        DEVICE_EVICTIONS,
        "which page makes room for another: cyclic, one that its layer did not use in its last turn, otherwise the "
        "most recently used one, since layers take turns; lru, the least recently used; fifo, the first loaded",
        devices=TIERED_DEVICES,
    )
    device_resident_share: float | None = setting_field(
        Setting(
            kind=float,
            default=0.0,
            values="0 or more, below 1",
            allows=lambda value: 0 <= value < 1,
            meaning="part of the slots that may hold whole blocks; if all blocks of a request are there, the device "
            "alone reads the whole request; 0 turns this off; on cuda with a unified pool the default is "
            f"{CUDA_RESIDENT_SHARE}",
            policies=PAGE_POLICIES,
            devices=TIERED_DEVICES,
        )
    )
    host_share: str | None = choice_field(
        "none",
        HOST_SHARES,
        "which groups of query heads the host computes while the device computes the others: none; uniform, every "
        "second one; length, the longest rows; queue, what the host takes from a queue that both share (Fluxion); all, "
        "every one, so that the device reads the retained set alone; with fluxion the default is queue; with hgca the "
        "device always has the window and the host the rest",
        policies=(*PAGE_POLICIES, "fluxion"),
        devices=TIERED_DEVICES,
    )
    device_ranking: str | None = choice_field(
        "host",
        DEVICE_RANKINGS,
        "who chooses the pages of a decode row that is not read whole: host, layer by layer; device, which keeps the "
        "codes and places of all pages of the host store in its own memory and does not wait for the host; on cuda the "
        "default is device if the pool is unified, eviction cyclic and host_share none, and the policy ranks by key "
        "codes with an estimated remainder or does not rank",
        policies=PAGE_POLICIES,
        devices=TIERED_DEVICES,
    )
    device_graphs: str | None = choice_field(
        "on",
        DEVICE_GRAPHS,
        "whether kernel launches for rows that the device reads by itself, or whose pages it chooses, are captured in "
        "CUDA graphs and replayed from then on; --enforce-eager also turns this off",
        policies=PAGE_POLICIES,
        devices=("cuda",),
    )
    admission: str | None = choice_field(
        "working_set",
        ADMISSIONS,
        "which requests run side by side: working_set, at least one, and only as many as have room in the pool for the "
        "pages that a step begins with, while the others wait in order (PSA); none, as many as vLLM admits, which on "
        "cuda is also the case until the first step is done if device_pool_pages is not set",
        devices=TIERED_DEVICES,
    )
    log_interval_s: float = setting_field(
        Setting(
            kind=float,
            default=60.0,
            values="0 or more, finite",
            allows=lambda value: value >= 0 and math.isfinite(value),
            meaning="time between two log lines that say how much of the cache was read; 0 writes none",
            unit="s",
        )
    )


def settings_table() -> str:
    """Every setting as a Markdown table with one row each; the README carries this text."""
    lines = ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for entry in fields(Settings):
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

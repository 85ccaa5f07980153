"""Native core of vllm_hybrid_sparse: paged sparse attention on the CPU."""

from collections.abc import Sequence
import enum


PAGE_TOKENS: int = 16

class DType(enum.Enum):
    bf16 = 0

    f16 = 1

    f32 = 2

class Summary(enum.Enum):
    minmax = 0

    cuboid_mean = 1

    key_codes = 2

    none = 3

    split_codes = 4

class Helpers(enum.Enum):
    own = 0

    openmp = 1

def supported_isas() -> list[str]:
    """Instruction sets that this machine runs, best first."""

def openmp_is_loaded() -> bool: ...

def read_bandwidth(pool: ThreadPool, address: int, bytes: int, piece: int, shuffled: bool = False) -> float: ...

class Layout:
    def __init__(self, dtype: DType, head_dim: int, block_tokens: int, summary: Summary, code_bits: int) -> None: ...

    @property
    def pages_per_block(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def summary_bytes(self) -> int: ...

    @property
    def head_block_bytes(self) -> int: ...

class ThreadPool:
    def __init__(self, num_threads: int, helpers: Helpers = Helpers.own, cpus: Sequence[int] = []) -> None: ...

    @property
    def size(self) -> int: ...

    @property
    def helpers(self) -> Helpers: ...

class Batch:
    def __init__(self, requests: int, query_start: int, seq_lens: int, block_table: int, block_table_stride: int, slot_mapping: int, decode: int, slots: int = 0) -> None: ...

    @property
    def has_slots(self) -> bool: ...

class HgcaLayer:
    def __init__(self, *, group: int, kv_heads: int, beta: float, alpha: float, sink_tokens: int, window_tokens: int) -> None: ...

    def release(self, slot: int) -> None: ...

    @property
    def packed_bytes(self) -> int: ...

    def salient(self, slot: int, kv_head: int) -> list[int]: ...

    def averages(self, slot: int, kv_head: int) -> list[float]: ...

def features() -> list[str]:
    """Names of the columns that HeadPredictor takes."""

class HeadPredictor:
    def __init__(self, *, feature_mean: int, feature_std: int, target_mean: int, target_std: int, weights: Sequence[int], biases: Sequence[int]) -> None: ...

class FluxionLayer:
    def __init__(
        self, *, predictor: HeadPredictor, layer: int, tau: float, granularity: int, dense_tokens: int
    ) -> None: ...

    def release(self, slot: int) -> None: ...

    def anchor(self, slot: int) -> list[float]: ...

    def anchor_tokens(self, slot: int) -> int: ...

class Selection:
    def __init__(self, *, ranked: bool, budget_ratio: float, max_pages: int, threshold: float, microbatch_pages: int, estimated_remainder: bool, attributed: float, sink_tokens: int, window_tokens: int) -> None: ...

    @property
    def ranked(self) -> bool: ...

    @property
    def estimated_remainder(self) -> bool: ...

    def budget(self, candidates: int) -> int: ...

class Stats:
    @property
    def calls(self) -> int: ...

    @property
    def items(self) -> int: ...

    @property
    def pages_total(self) -> int: ...

    @property
    def pages_candidate(self) -> int: ...

    @property
    def pages_read(self) -> int: ...

    @property
    def pages_wasted(self) -> int: ...

    @property
    def summaries_scored(self) -> int: ...

    @property
    def summary_bytes(self) -> int: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def judged(self) -> int: ...

    @property
    def kept_mass(self) -> float: ...

    @property
    def stopped_early(self) -> int: ...

    @property
    def streaming(self) -> int: ...

    @property
    def anchor_pages(self) -> int: ...

class Engine:
    def __init__(self, layout: Layout, q_heads: int, kv_heads: int, scale: float, isa: str, pool: ThreadPool) -> None: ...

    @property
    def isa(self) -> str: ...

    def forward(self, kv: int, block_stride: int, query: int, query_stride: int, key: int, key_stride: int, value: int, value_stride: int, out: int, out_stride: int, batch: Batch, selection: Selection, hgca: HgcaLayer | None, fluxion: FluxionLayer | None) -> None: ...

    def summarize(self, arg0: int, arg1: int, arg2: int, arg3: int, /) -> None: ...

    def score_pages(self, kv: int, block_stride: int, block_table: int, query: int, page_begin: int, count: int, scores: int) -> None: ...

    def attend_pages(self, kv: int, block_stride: int, block_table: int, query: int, kv_head: int, pages: int, count: int, seq_len: int, out: int, lse: int, lightest_lse: int) -> None: ...

    def stats(self) -> Stats: ...

    def reset_stats(self) -> None: ...

    def last_plan(self, request: int, kv_head: int) -> list[int]: ...

    def last_features(self, request: int, kv_head: int) -> list[float]: ...

    def last_budgets(self, request: int, kv_head: int) -> list[int]: ...

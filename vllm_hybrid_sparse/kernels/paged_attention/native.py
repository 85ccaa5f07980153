"""The CPU kernel (`csrc/`): append, exact prefill rows and sparse decode rows of one layer in one call.

`reference.py` is a readable version of it; the page layout is in `memory/layout.py` and `csrc/layout.h`.
"""

import math
import platform

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import CPU, check_tensor, row_dtype
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.predictor.features import FEATURES
from vllm_hybrid_sparse.values import (
    CODE_BITS,
    SPLIT_HEAD_DIM,
    SUMMARY_VECTORS,
    RetainedSet,
    SalienceSpec,
    SelectionSpec,
    head_dim_fits,
    head_dim_rule,
)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
STORED_NAMES = {**DTYPE_NAMES, torch.float8_e4m3fn: "e4m3"}
"""Dtypes of a KV cache."""


def supported_isas() -> list[str]:
    """Names of the instruction sets that this machine runs, best first."""
    return list(_native.supported_isas())


def lacks_bf16() -> bool:
    """Whether this is an x86 CPU without instructions for bfloat16 products. CPUs with AMX have AVX-512's too."""
    return platform.machine() == "x86_64" and "avx512_bf16" not in supported_isas()


def make_thread_pool(num_threads: int, *, helpers: str = "own", cpus: list[int] | None = None) -> _native.ThreadPool:
    """Threads for one or more `NativeAttention`; the caller counts as one of them.

    helpers   own: threads of the pool, asleep between calls; openmp: borrowed from torch's GNU OpenMP team, which
              already spins on the same cores (KernelError if it is not loaded)
    cpus      a core for each own helper; empty or None: wherever the kernel puts them
    """
    if num_threads < 1:
        raise KernelError(f"num_threads={num_threads}: must be at least 1")
    if helpers == "openmp" and not _native.openmp_is_loaded():
        raise KernelError("helpers='openmp': GNU OpenMP is not loaded in this process")
    return _native.ThreadPool(num_threads, getattr(_native.Helpers, helpers), cpus or [])


def native_selection(selection: SelectionSpec, retained: RetainedSet) -> _native.Selection:
    """The policy and the retained set as the kernel takes them."""
    return _native.Selection(
        ranked=selection.ranked,
        budget_ratio=selection.budget_ratio,
        max_pages=selection.max_pages or 0,
        threshold=selection.threshold,
        microbatch_pages=selection.microbatch_pages,
        estimated_remainder=selection.estimated_remainder,
        attributed=selection.attributed,
        prefix_sharers=-1 if selection.prefix_sharers is None else selection.prefix_sharers,
        sink_tokens=retained.sink_tokens,
        window_tokens=retained.window_tokens,
    )


class NativeAttention:
    """Paged attention for layers of one shape. One call at a time; KernelError for tensors that do not fit."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_tokens: int,
        scale: float,
        summary: str = "minmax",
        code_bits: int = 2,
        common_keys: bool = False,
        sliding_window: int = 0,
        isa: str = "auto",
        num_threads: int = 1,
        pool: _native.ThreadPool | None = None,
    ) -> None:
        """Check every argument, and make a kernel without a KV cache of its own.

        dtype            of the KV cache, queries, new keys and values, and outputs; with torch.float8_e4m3fn all but
                         the KV cache are bf16, and a number that is too large is stored as the largest, 448
        common_keys      subtract what the keys of 32 pages have in common before they are encoded, if it is long
                         compared with their differences (`common_key` of kernels/key_codes/reference.py); `summarize`
                         then needs whole sequences
        sliding_window   how many tokens a row attends to, its own included; it attends to all of them, so `forward`
                         takes only a selection of everything; 0: no window
        """
        if dtype not in STORED_NAMES:
            raise KernelError(f"dtype={dtype}: must be bfloat16, float16, float32 or float8_e4m3fn")
        if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
            raise KernelError(f"num_q_heads={num_q_heads}: must be a multiple of num_kv_heads={num_kv_heads}")
        if not head_dim_fits(head_dim):
            raise KernelError(f"head_dim={head_dim}: {head_dim_rule()}")
        if block_tokens < 16 or block_tokens % 16:
            raise KernelError(f"block_tokens={block_tokens}: must be a multiple of 16")
        if not 0.0 < scale < math.inf:
            raise KernelError(f"scale={scale}: must be above 0 and finite")
        if summary not in SUMMARY_VECTORS:
            raise KernelError(f"summary={summary!r}: must be one of {', '.join(SUMMARY_VECTORS)}")
        if code_bits not in CODE_BITS:
            raise KernelError(f"code_bits={code_bits}: must be 1 or 2")
        if summary == "split_codes" and (head_dim % SPLIT_HEAD_DIM or code_bits != CODE_BITS[-1]):
            raise KernelError(
                f"summary='split_codes': needs code_bits=2, not {code_bits}, and a head_dim that is a multiple of "
                f"{SPLIT_HEAD_DIM}, not {head_dim}"
            )
        if sliding_window < 0:
            raise KernelError(f"sliding_window={sliding_window}: must be 0 or more")
        names = supported_isas()
        if isa not in ("auto", *names):
            raise KernelError(f"isa={isa!r}: must be auto or one that this machine runs: {', '.join(names)}")
        self.dtype = row_dtype(dtype)  # of queries, new keys and values, and outputs
        self.num_q_heads = num_q_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.pool = pool or make_thread_pool(num_threads)
        self.layout = _native.Layout(
            getattr(_native.DType, STORED_NAMES[dtype]),
            head_dim,
            block_tokens,
            getattr(_native.Summary, summary),
            code_bits,
        )
        self.summary = summary
        self.engine = _native.Engine(
            self.layout, num_q_heads, num_kv_heads, scale, sliding_window, common_keys, isa, self.pool
        )
        self.isa: str = self.engine.isa
        self._block_tokens = block_tokens
        self._block_bytes = num_kv_heads * self.layout.head_block_bytes

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        batch: NativeBatch,
        selection: _native.Selection | SelectionSpec,
        retained: RetainedSet | None,
        output: Tensor,
        hgca: _native.HgcaLayer | None = None,
        fluxion: _native.FluxionLayer | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Append the batch's keys and values, summarise the pages they fill, attend, and write `output`.

        query, output   [tokens, q_heads, head_dim]    of `dtype`, a token's heads contiguous
        key, value      [tokens, kv_heads, head_dim]   likewise; None: nothing to append
        kv_cache        [blocks, …]                    any dtype; a row's first kv_heads * head_block_bytes bytes are
                                                       the block, contiguous
        selection       a SelectionSpec with `retained`, or one that `native_selection` made once, with None
        hgca            from `hgca_layer`; it takes the place of the selection: decode rows read its dense window and
                        what it has packed
        fluxion         from `kernels.fluxion.native.fluxion_layer`; likewise: decode rows read the retained set and
                        what Fluxion chooses
        sinks           [q_heads] f32, learned sinks: scores of one more token, without a value, that every row sees

        All on the CPU. Slots and lengths are checked against the cache; the block table's entries are trusted.
        """
        if isinstance(selection, SelectionSpec):
            if retained is None:
                raise KernelError("retained=None: must be given with a SelectionSpec")
            selection = native_selection(selection, retained)
        elif retained is not None:
            raise KernelError(f"retained={retained}: must be None with a selection that has its own")
        self.check_policy(selection, batch, hgca, fluxion)
        if sinks is not None:
            check_tensor("sinks", sinks, torch.float32, (self.num_q_heads,), CPU)
            if hgca is not None or fluxion is not None:
                raise KernelError("sinks: must be None beside hgca and fluxion")
        self.check_reach(batch, kv_cache)
        tokens = batch.num_tokens
        self._check_rows("query", query, self.num_q_heads, tokens)
        self._check_rows("output", output, self.num_q_heads, tokens)
        key_address = value_address = key_stride = value_stride = 0
        if (key is None) is not (value is None):
            raise KernelError(f"{'key' if key is None else 'value'}=None: give both key and value, or neither")
        if key is not None and value is not None:
            self._check_rows("key", key, self.num_kv_heads, tokens)
            self._check_rows("value", value, self.num_kv_heads, tokens)
            key_address, key_stride = key.data_ptr(), key.stride(0)
            value_address, value_stride = value.data_ptr(), value.stride(0)
        self.engine.forward(
            kv_cache.data_ptr(),
            self.block_stride(kv_cache),
            query.data_ptr(),
            query.stride(0),
            key_address,
            key_stride,
            value_address,
            value_stride,
            output.data_ptr(),
            output.stride(0),
            0 if sinks is None else sinks.data_ptr(),
            batch.native,
            selection,
            hgca,
            fluxion,
        )

    def hgca_layer(self, salience: SalienceSpec, retained: RetainedSet) -> _native.HgcaLayer:
        """What HGCA keeps of requests in one layer (see `kernels/hgca/reference.py`). Each layer needs its own."""
        return _native.HgcaLayer(
            group=self.num_q_heads // self.num_kv_heads,
            kv_heads=self.num_kv_heads,
            beta=salience.beta,
            alpha=salience.alpha,
            sink_tokens=retained.sink_tokens,
            window_tokens=retained.window_tokens,
        )

    def summarize(self, kv_cache: Tensor, blocks: Tensor, starts: Tensor | None = None) -> None:
        """Summarise the pages of some blocks again, after something other than `forward` has written their keys.

        kv_cache   as in `forward`
        blocks     [blocks] int32, on the CPU: those of sequences from their beginnings, one sequence after another;
                   summaries of pages that are not full are never used
        starts     [sequences + 1] int32, on the CPU: where each sequence's blocks begin, then the number of blocks;
                   None: there is one sequence
        """
        if starts is None:
            starts = torch.tensor([0, len(blocks)], dtype=torch.int32)
        for name, given in (("blocks", blocks), ("starts", starts)):
            check_tensor(name, given, torch.int32, (None,), CPU)
        if not len(starts) or starts[0] != 0 or starts[-1] != len(blocks) or bool((starts.diff() < 0).any()):
            raise KernelError(f"starts={starts.tolist()}: must ascend from 0 to the number of blocks, {len(blocks)}")
        if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(kv_cache):
            raise KernelError(
                f"blocks={int(blocks.min())} to {int(blocks.max())}: must be within the {len(kv_cache)} there are"
            )
        self.engine.summarize(
            kv_cache.data_ptr(), self.block_stride(kv_cache), blocks.data_ptr(), starts.data_ptr(), len(starts) - 1
        )

    def block_stride(self, kv_cache: Tensor) -> int:
        """Bytes from one block to the next. KernelError if a row is too short for a block, or not on the CPU."""
        block_stride = kv_cache.stride(0) * kv_cache.element_size()
        if block_stride < self._block_bytes:
            raise KernelError(
                f"kv_cache: a row of {block_stride} bytes is too short for a block of {self._block_bytes}"
            )
        if kv_cache.device.type != "cpu":
            raise KernelError(f"kv_cache: must be on cpu, not {kv_cache.device}")
        return block_stride

    def check_reach(self, batch: NativeBatch, kv_cache: Tensor) -> None:
        """Raise KernelError if a token lies behind the end of the cache or of its request's block table."""
        block_tokens, blocks = self._block_tokens, len(kv_cache)
        if batch.last_slot >= blocks * block_tokens:
            raise KernelError(f"slot_mapping={batch.last_slot}: must be below {blocks} blocks of {block_tokens} tokens")
        if batch.longest > batch.table_blocks * block_tokens:
            raise KernelError(
                f"seq_lens={batch.longest}: the block table names {batch.table_blocks} blocks of {block_tokens} tokens"
            )

    def check_policy(
        self,
        selection: _native.Selection,
        batch: NativeBatch,
        hgca: _native.HgcaLayer | None = None,
        fluxion: _native.FluxionLayer | None = None,
    ) -> None:
        """Raise KernelError if the pages' summaries do not serve the policy, or the batch lacks its slots."""
        if self.sliding_window and (selection.ranked or hgca is not None or fluxion is not None):
            raise KernelError(f"sliding_window={self.sliding_window}: needs a selection of everything")
        if selection.ranked and self.summary == "none":
            raise KernelError("summary=none: must be one that pages can be ranked by")
        if selection.ranked and self.summary == "split_codes":
            raise KernelError("summary=split_codes: ranked by fluxion alone")
        if selection.estimated_remainder and self.summary != "key_codes":
            raise KernelError(f"estimated_remainder=True: needs summary key_codes, not {self.summary}")
        if fluxion is not None:
            if hgca is not None:
                raise KernelError("hgca: must be None beside fluxion")
            if self.summary not in ("key_codes", "split_codes", "minmax"):
                raise KernelError(f"summary={self.summary}: fluxion needs key_codes, split_codes or minmax")
        if (hgca is not None or fluxion is not None) and not batch.native.has_slots:
            raise KernelError("slots=None: must be given where a layer keeps the state of requests")

    def _check_rows(self, name: str, tensor: Tensor, heads: int, tokens: int) -> None:
        shape = tensor.shape
        if (
            tensor.dtype != self.dtype
            or len(shape) != 3
            or shape[0] < tokens
            or shape[1] != heads
            or shape[2] != self.head_dim
            or tensor.stride(2) != 1
            or (heads > 1 and tensor.stride(1) != self.head_dim)
            or tensor.device.type != "cpu"
        ):
            raise KernelError(
                f"{name}={tuple(shape)} {tensor.dtype} strides {tensor.stride()} on {tensor.device}: must be at least "
                f"{tokens} tokens of [{heads}, {self.head_dim}] {self.dtype} on cpu, contiguous within a token"
            )

    def prefix_sharers(self, selection: SelectionSpec) -> int:
        """How many requests must begin with the same pages for selecting rows to attend to these together; 0: never."""
        return self.engine.prefix_sharers(native_selection(selection, RetainedSet()))

    def stats(self) -> _native.Stats:
        """Sums over the calls since the last `reset_stats`; see `Stats` in csrc/layer_call.h."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        """Start the sums again."""
        self.engine.reset_stats()

    def last_plan(self, decode_index: int, kv_head: int) -> list[int]:
        """Candidate pages that request `decode_index` of the last batch read for the KV head, in order of reading."""
        return list(self.engine.last_plan(decode_index, kv_head))

    def last_features(self, decode_index: int, kv_head: int) -> Tensor:
        """Fluxion's features of the same row, [group, 41]; [0, 41] if it read everything."""
        return torch.tensor(self.engine.last_features(decode_index, kv_head)).reshape(-1, len(FEATURES))

    def last_budgets(self, decode_index: int, kv_head: int) -> tuple[int, list[int]]:
        """Fluxion's granularity for the same row (0: its heads stream) and each head's blocks; (0, []) without any."""
        budgets = list(self.engine.last_budgets(decode_index, kv_head))
        return (budgets[0], budgets[1:]) if budgets else (0, [])

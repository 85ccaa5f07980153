"""Compile every device kernel for sm_90 as its wrapper launches it, on a machine that needs no GPU.

    python -m tests.kernels.device.compile_sm90 [--few]

The wrappers are called with tensors of the CPU; where Triton would launch, it stops after it has compiled. Prints a
JSON list: kernel, case, and what one program takes of a multiprocessor. TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from vllm_hybrid_sparse.kernels.code_scores.gpu import score_codes
from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, load_pages, store_pages, store_tokens
from vllm_hybrid_sparse.kernels.frame_attention.gpu import attend_frames
from vllm_hybrid_sparse.kernels.key_codes.gpu import encode_pages, rotate_queries
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.merge.gpu import merge_states, merge_with_unread
from vllm_hybrid_sparse.kernels.page_directory.gpu import forget, give_back, look_up, set_aside, turn_over
from vllm_hybrid_sparse.kernels.page_directory.state import Listed, PageDirectory
from vllm_hybrid_sparse.kernels.reading.gpu import PageTables, RankedPages, plan_reading, read_on
from vllm_hybrid_sparse.kernels.score.gpu import group_scores, score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.summarize.gpu import summarize_slots
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.values import CODE_BITS, summary_bytes

TARGET = GPUTarget("cuda", 90, 32)
CASES = (
    (torch.bfloat16, 128, 4),
    (torch.bfloat16, 80, 3),
    (torch.bfloat16, 128, 32),
    (torch.bfloat16, 256, 8),
    (torch.float16, 64, 1),
    (torch.float32, 256, 8),
)
"""KV dtype, head_dim, query heads of a KV head."""
FEW_CASES = ((torch.bfloat16, 128, 4), (torch.float32, 80, 3))
"""What is compiled wherever the tests run; all cases take minutes."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """Never used: nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._target


ROWS, KV_HEADS, PAGES = 2, 2, 8


class Paged(NamedTuple):
    """What attention to pages takes and gives."""

    pools: Tensor
    query: Tensor
    table: Tensor
    out: Tensor
    lse: Tensor
    page_lse: Tensor

    @classmethod
    def empty(cls, dtype: torch.dtype, head_dim: int, group: int) -> Self:
        """For `ROWS` rows of `PAGES` pages each."""
        q_heads = KV_HEADS * group
        return cls(
            torch.zeros(2, 64, 16, head_dim, dtype=dtype),
            torch.zeros(ROWS, q_heads, head_dim, dtype=dtype),
            torch.zeros(ROWS, KV_HEADS, PAGES, dtype=torch.int32),
            torch.zeros(ROWS, q_heads, head_dim),
            torch.zeros(ROWS, q_heads),
            torch.zeros(ROWS, q_heads, PAGES),
        )


def launch_attention(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Call the wrappers of attention to slots and to frames once in each of their forms."""
    rows, kv_heads, pages, q_heads = ROWS, KV_HEADS, PAGES, KV_HEADS * group
    pools, query, table, out, lse, page_lse = Paged.empty(dtype, head_dim, group)
    done = torch.zeros(rows, kv_heads, dtype=torch.uint8)
    attend_slots(query, pools[0], pools[1], table, table, done, out, lse, page_lse, scale=0.1)
    scores = torch.zeros(rows, q_heads, pages * 16)
    attend_slots(query, pools[0], pools[1], table, table, done, out, lse, page_lse, scale=0.1, token_scores=scores)

    seq_lens, blocks = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 8, dtype=torch.int32)
    for frame_tokens in (16, 128):
        key, value = torch.zeros(4, 3, 2, kv_heads, frame_tokens, head_dim, dtype=dtype)[:, 1].unbind(1)
        for output in (query, out):
            attend_frames(query, key, value, blocks, seq_lens, output, scale=0.1, longest=8 * frame_tokens)


def launch_everything(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Call every wrapper once in each of its forms, but those of a reading."""
    launch_attention(dtype, head_dim, group)
    rows, kv_heads, pages, q_heads = ROWS, KV_HEADS, PAGES, KV_HEADS * group
    pools, query, table, out, lse, page_lse = Paged.empty(dtype, head_dim, group)
    seq_lens, blocks = torch.ones(rows, dtype=torch.int32), torch.zeros(rows, 8, dtype=torch.int32)

    host = torch.zeros(4096 * 4, dtype=dtype)
    offsets, slots = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int32)
    load_pages(host, offsets, slots, pools[0], pools[1])
    store_pages(host, offsets, slots, pools[0], pools[1])
    key = torch.zeros(rows, kv_heads, head_dim, dtype=dtype)
    page_offsets = torch.zeros(rows, kv_heads, dtype=torch.int64)
    store_tokens(host, page_offsets, slots[:rows], key, key)
    in_frames = torch.zeros(4, 3, kv_heads, 128, head_dim, dtype=dtype)[:, 1]
    token_frames = TokenFrames(in_frames, in_frames, slots[:rows], slots[:rows])
    store_tokens(host, page_offsets, slots[:rows], key, key, token_frames)

    for summary, vectors in (("minmax", 2), ("cuboid_mean", 1)):
        summaries = torch.zeros(64, vectors, head_dim, dtype=dtype)
        summarize_slots(pools[0], slots, slots, summaries, summary=summary)
        score_pages(query, summaries, table, scale=0.1, summary=summary)
    group_scores(page_lse, kv_heads)
    group_scores(page_lse, kv_heads, lse)
    group_scores(page_lse, kv_heads, lse, lse)

    queries = rotate_queries(query)
    for code_bits in CODE_BITS:
        size = summary_bytes("key_codes", head_dim, dtype.itemsize, code_bits)
        codes = torch.zeros(kv_heads, 32, size, dtype=torch.uint8)
        encode_pages(host, offsets, offsets, codes[0], head_dim=head_dim, code_bits=code_bits)
        for per_block in (1, 8):
            numbers = {"first_page": 4, "most": 20, "pages_per_block": per_block, "code_bits": code_bits}
            score_codes(queries, codes, blocks, seq_lens, scale=0.1, **numbers)

    counts = torch.full((rows, kv_heads), 8, dtype=torch.int32)
    directory = PageDirectory.empty(3 * kv_heads * 64, 64, 16, torch.device("cpu"))
    places = {"pages_per_block": 8, "store_pages": 64, "first_entry": 64 * kv_heads, "kv_heads": kv_heads}
    for order in (None, torch.zeros(rows, kv_heads, pages, dtype=torch.int64)):
        look_up(directory, blocks, seq_lens, seq_lens, counts, order, first_page=4, most=pages, **places)
    turn_over(directory, step=2, hand=0, window=32)
    forget(directory, offsets, store_pages=64, heads=3 * kv_heads)
    set_aside(directory, slots, 4)
    give_back(directory, slots, 4)
    progress = Progress.begin(counts, counts, q_heads)
    verify(lse, page_lse, progress, threshold=0.9)
    verify(lse, page_lse, progress, threshold=0.9, log_left=lse)
    verify(lse, page_lse[:, :, :0].contiguous(), progress, threshold=0.9)
    merge_states(out, lse, out, lse)
    merge_states(query, lse, query, lse)


def launch_reading(dtype: torch.dtype, head_dim: int, group: int) -> None:
    """Call the wrappers of a reading whose pages are listed."""
    rows, kv_heads, most = 2, 2, 12
    q_heads = kv_heads * group
    k_pool, v_pool = torch.zeros(2, 64, 16, head_dim, dtype=dtype)
    query = torch.zeros(rows, q_heads, head_dim, dtype=dtype)
    host = HostStore(torch.zeros(2**16, dtype=dtype), 2**14, 2**12, 32 * head_dim, 2)
    listed = Listed(*torch.zeros(3, rows, kv_heads, most, dtype=torch.int32).unbind())
    counts, numbers = torch.ones(rows, kv_heads, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    tally, order = Tally(query.device), torch.zeros(rows, kv_heads, most, dtype=torch.int64)
    read = attend_listed(query, k_pool, v_pool, host, listed, counts, tally, scale=0.1)
    pages = RankedPages(order, torch.zeros(rows, q_heads, most), numbers, numbers)
    plan_reading(pages, read[1], threshold=1.0, microbatch_pages=8)
    rule: dict[str, Any] = {"threshold": 0.95, "microbatch_pages": 16}
    plan = plan_reading(pages, read[1], **rule)
    tables = PageTables(torch.zeros(rows, 8, dtype=torch.int32), torch.zeros(256, dtype=torch.int32), 4, 64, 32)
    read_on(query, k_pool, v_pool, host, pages, tables, read[1], read, plan, tally, scale=0.1, **rule)
    for output in (query, read[0]):
        merge_with_unread(read, read, plan.log_unread, 0.5, output)
        merge_with_unread(read, read, None, 0.5, output)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and local memory, which are where registers did not suffice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", shown))
    return {"registers": int(found["REG"]), "stack_bytes": int(found["STACK"]), "local_bytes": int(found["LOCAL"])}


@contextmanager
def compiling(
    add: Callable[[str, Any], None], target: GPUTarget = TARGET, skips: Callable[[str], bool] = lambda _name: False
) -> Iterator[None]:
    """Have launches end when they are compiled; `add` is told the kernel's name and the binary.

    skips   asked for each launch whether to end before that, by the kernel's name
    """
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        if skips(self.fn.__name__):
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        add(self.fn.__name__, kernel)
        return kernel

    driver.set_active(NoDevice(target))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def compile_everything(cases: Sequence[tuple[torch.dtype, int, int]]) -> list[dict[str, object]]:
    """Compile all kernels in some cases; one row for each binary."""
    rows: list[dict[str, object]] = []

    def add(name: str, kernel: Any) -> None:
        rows.append(
            {
                "kernel": name,
                "case": case,
                "arch": kernel.metadata.target.arch,
                "warps": kernel.metadata.num_warps,
                "shared_bytes": kernel.metadata.shared,
                **resources(kernel.asm["cubin"]),
            }
        )

    with compiling(add):
        for dtype, head_dim, group in cases:
            case = f"{str(dtype).removeprefix('torch.')}, head_dim {head_dim}, group {group}"
            launch_everything(dtype, head_dim, group)
            launch_reading(dtype, head_dim, group)
    return rows


def main() -> int:
    """Compile and print; the table goes to standard error."""
    rows = compile_everything(FEW_CASES if sys.argv[1:] == ["--few"] else CASES)
    for row in rows:
        print(*row.values(), sep="\t", file=sys.stderr)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

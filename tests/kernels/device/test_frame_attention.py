"""Attention over contexts in frames against its plain-torch reference, and that against attention written out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.frame_attention import gpu
from vllm_hybrid_sparse.kernels.frame_attention.gpu import attend_frames
from vllm_hybrid_sparse.kernels.frame_attention.reference import attend_frames as attend_reference
from vllm_hybrid_sparse.kernels.merge import gpu as merge_gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALE = 0.2
NO_FRAME = (-7, 2**31 - 1)  # what may stand in a table behind a row's blocks


@dataclass
class Contexts:
    """One layer of frames whose unused tokens are NaN, and the table of each row; built on the CPU."""

    k_frames: Tensor
    v_frames: Tensor
    frames: Tensor  # [rows, blocks] int32
    seq_lens: Tensor  # [rows] int32

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    def tokens(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V of a row, one token after another, [tokens, kv_heads, head_dim]."""
        size = self.k_frames.shape[2]
        places = [(int(self.frames[row, token // size]), token % size) for token in range(int(self.seq_lens[row]))]
        key, value = (
            torch.stack([part[frame, :, i] for frame, i in places]) for part in (self.k_frames, self.v_frames)
        )
        return key, value


def make_contexts(
    seq_lens: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    kv_heads: int = 1,
    head_dim: int = 64,
    frame_tokens: int = 16,
) -> Contexts:
    """Contexts of these lengths in frames of three layers and in no order, with unused frames among them."""
    blocks = [math.ceil(tokens / frame_tokens) for tokens in seq_lens]
    spare = 2
    memory = torch.full((sum(blocks) + spare, 3, 2, kv_heads, frame_tokens, head_dim), torch.nan, dtype=dtype)
    k_frames, v_frames = memory[:, 1].unbind(1)
    free = torch.randperm(len(memory)).tolist()
    frames = torch.empty(len(seq_lens), max(blocks, default=0) + 2, dtype=torch.int32)
    frames[:, ::2], frames[:, 1::2] = NO_FRAME
    for row, tokens in enumerate(seq_lens):
        for block in range(blocks[row]):
            frame, used = free.pop(), min(frame_tokens, tokens - block * frame_tokens)
            frames[row, block] = frame
            k_frames[frame, :, :used], v_frames[frame, :, :used] = torch.randn(2, kv_heads, used, head_dim).to(dtype)
    return Contexts(k_frames, v_frames, frames, torch.tensor(seq_lens, dtype=torch.int32))


def attend(
    contexts: Contexts, query: Tensor, device: torch.device, output: Tensor | None = None, longest: int | None = None
) -> Tensor:
    """Run the kernel, by default into an output of the KV dtype; returns it on the CPU."""
    output = torch.full(query.shape, torch.nan, dtype=query.dtype, device=device) if output is None else output
    attend_frames(
        query.to(device),
        to_device(contexts.k_frames, device),
        to_device(contexts.v_frames, device),
        to_device(contexts.frames, device),
        contexts.seq_lens.to(device),
        output,
        scale=SCALE,
        longest=longest or contexts.longest,
    )
    return output.cpu()


def to_device(part: Tensor, device: torch.device) -> Tensor:
    """The same part of a copy of the whole memory that it lies in, where it is not there already."""
    if part.device == device:
        return part
    whole = part.as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0).to(device)
    return whole.as_strided(part.shape, part.stride(), part.storage_offset())


def expected_of(contexts: Contexts, query: Tensor) -> Tensor:
    arguments = (query, contexts.k_frames, contexts.v_frames, contexts.frames, contexts.seq_lens)
    return attend_reference(*arguments, scale=SCALE)


def check(contexts: Contexts, group: int, device: torch.device) -> None:
    rows, kv_heads = len(contexts.seq_lens), contexts.k_frames.shape[1]
    dtype = contexts.k_frames.dtype
    query = torch.randn(rows, kv_heads * group, contexts.k_frames.shape[3]).to(dtype)
    assert_close(attend(contexts, query, device), expected_of(contexts, query), dtype)


def splits_into(tokens: int, monkeypatch: pytest.MonkeyPatch, programs: int = 1024) -> None:
    monkeypatch.setattr(gpu, "_MIN_SPLIT_TOKENS", tokens)
    monkeypatch.setattr(gpu, "_PROGRAMS", programs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_is_attention_to_each_token_of_a_row(dtype: torch.dtype) -> None:
    contexts = make_contexts([1, 37, 16], kv_heads=2, head_dim=32)
    query = torch.randn(3, 6, 32)
    arguments = (query, contexts.k_frames, contexts.v_frames, contexts.frames, contexts.seq_lens)
    actual = attend_reference(*arguments, scale=SCALE, dtype=dtype)
    assert actual.dtype == dtype
    assert actual.shape == (3, 6, 32)
    for row in range(3):
        key, value = (part.double() for part in contexts.tokens(row))
        for head in range(6):
            weights = torch.exp(SCALE * key[:, head // 3] @ query[row, head].double())
            assert_close(actual[row, head], weights @ value[:, head // 3] / weights.sum())


def test_the_reference_gives_zeros_where_there_is_no_token() -> None:
    contexts = make_contexts([0, 3], frame_tokens=32)
    assert torch.equal(expected_of(contexts, torch.randn(2, 2, 64))[0], torch.zeros(2, 64).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_every_group_size_and_dtype(dtype: torch.dtype, group: int, device: torch.device) -> None:
    check(make_contexts([70, 3], dtype, kv_heads=2), group, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("frame_tokens", [16, 32, 128])
def test_every_head_dim_and_frame(
    dtype: torch.dtype, head_dim: int, frame_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_into(64, monkeypatch)
    check(make_contexts([150], dtype, kv_heads=2, head_dim=head_dim, frame_tokens=frame_tokens), 2, device)


def test_frames_that_a_tile_does_not_divide(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_into(64, monkeypatch)
    check(make_contexts([200], frame_tokens=48), 2, device)


def test_a_group_larger_than_a_matrix_instruction(device: torch.device) -> None:
    check(make_contexts([21], head_dim=16), 20, device)


@pytest.mark.parametrize("min_split_tokens", [64, 256])
@pytest.mark.parametrize("frame_tokens", [16, 32, 128])
def test_every_number_of_tokens(
    frame_tokens: int, min_split_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_into(min_split_tokens, monkeypatch)
    for tokens in (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129):
        check(make_contexts([tokens], head_dim=16, frame_tokens=frame_tokens), 1, device)


@pytest.mark.parametrize("tokens", [255, 256, 257, 511, 512, 513, 1023, 1025])
def test_lengths_around_the_edges_of_splits(tokens: int, device: torch.device) -> None:
    check(make_contexts([tokens], head_dim=16, frame_tokens=128), 2, device)


@pytest.mark.parametrize("growth", [0.9, 1.1])
def test_more_splits_than_a_merge_takes_at_a_time(
    growth: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest scores in the last splits or the first."""
    splits_into(64, monkeypatch)
    monkeypatch.setattr(merge_gpu, "_TILE_ELEMENTS", 16 * 16)
    contexts = make_contexts([64 * 36, 64 * 16 + 1], head_dim=16, frame_tokens=128)
    assert gpu._splits(contexts.longest, 2) == 36
    for block, frame in enumerate(contexts.frames[0, :18].tolist()):
        contexts.k_frames[frame] *= growth**block
    check(contexts, 2, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_very_different_lengths(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_into(64, monkeypatch)
    check(make_contexts([1, 700, 64, 65, 17, 320], dtype, frame_tokens=32), 3, device)


def test_each_row_is_split_by_its_own_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the splits of a shorter one has no share in them."""
    contexts = make_contexts([5000, 1100, 130], head_dim=16, frame_tokens=128)
    query = torch.randn(3, 2, 16)
    states = []
    merge = gpu.merge_splits

    def watch(out: torch.Tensor, lse: torch.Tensor, output: torch.Tensor) -> None:
        states.append(lse.isfinite().sum(dim=2).tolist())
        merge(out, lse, output)

    monkeypatch.setattr(gpu, "merge_splits", watch)
    splits_into(128, monkeypatch, programs=24)
    assert_close(attend(contexts, query, device), expected_of(contexts, query))
    assert states == [[[8, 8], [6, 6], [2, 2]]]  # of 640, 192 and 128 tokens


def test_states_of_splits_behind_a_row_are_not_looked_at(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_into(64, monkeypatch)
    contexts = make_contexts([3, 400, 64, 0], head_dim=16)
    query = torch.randn(4, 2, 16)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kinds: torch.full(sizes, torch.nan, **kinds))
    result = attend(contexts, query, device)
    monkeypatch.undo()
    assert_close(result, expected_of(contexts, query))


def test_splits_are_as_many_as_there_are_programs_for(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is shorter than the least length, or no multiple of the tile."""
    launched = []
    launch = gpu._attend_frames_kernel

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return launch[grid]

    monkeypatch.setattr(gpu, "_attend_frames_kernel", Watched())
    for tokens, programs, splits in ((300, 1024, 1), (511, 1024, 1), (512, 1024, 2), (1100, 1024, 4), (1100, 6, 2)):
        splits_into(256, monkeypatch, programs)
        check(make_contexts([tokens, 2], kv_heads=2, head_dim=16, frame_tokens=128), 1, device)
        assert launched.pop() == (2, 2, splits), tokens
    for longest in (1, 63, 300, 5000, 131072, 10**6):
        for groups in (1, 8, 100, 5000):
            splits = gpu._splits(longest, groups)
            assert splits == 1 or longest >= 256 * splits
            assert splits == 1 or (splits - 1) * groups < 1024


def test_memory_behind_the_ends_does_not_matter(device: torch.device) -> None:
    """Whatever stands there: the contexts above lie in NaN, here it is infinities and huge numbers."""
    contexts = make_contexts([5, 90], kv_heads=2, frame_tokens=32)
    query = torch.randn(2, 4, 64)
    results = []
    for poison in (torch.inf, -torch.inf, 3e38):
        others = (part.nan_to_num(nan=poison) for part in (contexts.k_frames, contexts.v_frames))
        results.append(attend(Contexts(*others, contexts.frames, contexts.seq_lens), query, device))
    for result in results:
        assert torch.equal(result, attend(contexts, query, device))


def test_longest_may_be_longer_than_all_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    splits_into(64, monkeypatch)
    contexts = make_contexts([100, 20])
    query = torch.randn(2, 2, 64)
    room = contexts.frames.shape[1] * 16
    assert_close(attend(contexts, query, device, longest=room), expected_of(contexts, query))


def test_a_row_of_no_tokens_gives_zeros(device: torch.device) -> None:
    contexts = make_contexts([40, 0], frame_tokens=32)
    query = torch.randn(2, 2, 64)
    result = attend(contexts, query, device)
    assert torch.equal(result[1], torch.zeros(2, 64))
    assert_close(result, expected_of(contexts, query))


def test_rows_share_frames(device: torch.device) -> None:
    contexts = make_contexts([64, 50], frame_tokens=32)
    contexts.frames[1, 0] = contexts.frames[0, 0]
    check(contexts, 2, device)
    contexts.frames[1], contexts.seq_lens[1] = contexts.frames[0], 33  # a part of the other's last frame
    check(contexts, 2, device)


@pytest.mark.parametrize("output_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_output_is_in_its_own_dtype(dtype: torch.dtype, output_dtype: torch.dtype, device: torch.device) -> None:
    contexts = make_contexts([30], dtype)
    query = torch.randn(1, 4, 64).to(dtype)
    actual = attend(contexts, query, device, torch.full((1, 4, 64), torch.nan, dtype=output_dtype, device=device))
    coarser = max(dtype, output_dtype, key=lambda one: torch.finfo(one).eps)
    assert_close(actual, expected_of(contexts, query), coarser)


def test_rows_of_query_output_and_table_may_be_strided(device: torch.device) -> None:
    contexts = make_contexts([40, 17], kv_heads=2, head_dim=32)
    whole = torch.randn(2, 12, 32, device=device)
    outputs = torch.full((2, 12, 32), torch.nan, device=device)
    table = torch.full((2, 20), NO_FRAME[0], dtype=torch.int32)
    table[:, 3 : 3 + contexts.frames.shape[1]] = contexts.frames
    part = replace(contexts, frames=table[:, 3 : 3 + contexts.frames.shape[1]])
    attend(part, whole[:, 4:8], device, outputs[:, 2:6])
    assert_close(outputs[:, 2:6].cpu(), expected_of(contexts, whole[:, 4:8].cpu()))
    assert outputs[:, :2].isnan().all()
    assert outputs[:, 6:].isnan().all()


def test_frames_lie_further_apart_than_32_bits_count(device: torch.device) -> None:
    apart, size = 2**30, 16 * 64  # elements; the memory between is never touched, nor copied
    memory = torch.empty(2 * apart + 2 * size, dtype=torch.bfloat16, device=device)
    k_frames, v_frames = (memory.as_strided((3, 1, 16, 64), (apart, size, 64, 1), size * i) for i in range(2))
    for part in (k_frames, v_frames):
        part[[0, 2]] = torch.randn(2, 1, 16, 64, device=device).bfloat16()
    contexts = Contexts(k_frames, v_frames, torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20]).int())
    query = torch.randn(1, 2, 64).bfloat16()
    near = replace(contexts, k_frames=k_frames[::2].clone().cpu(), v_frames=v_frames[::2].clone().cpu())
    near.frames = torch.tensor([[1, 0]], dtype=torch.int32)
    assert_close(attend(contexts, query, device), expected_of(near, query))


@pytest.mark.parametrize("size", [1e2, 1e-3])
def test_huge_and_tiny_scores_do_not_overflow(
    size: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits_into(64, monkeypatch)
    contexts = make_contexts([300], head_dim=16)
    contexts.k_frames.mul_(size)
    query = size * torch.randn(1, 2, 16)
    result = attend(contexts, query, device)
    # Scores of 1e4 in float32 are right to 1e-3.
    torch.testing.assert_close(result.double(), expected_of(contexts, query), rtol=1e-2, atol=1e-2)


def test_no_rows_is_no_work(device: torch.device) -> None:
    contexts = make_contexts([])
    assert attend(contexts, torch.empty(0, 2, 64), device, longest=1).shape == (0, 2, 64)


def bad_arguments() -> list[tuple[str, dict[str, Tensor | int], str]]:
    def pair(*shape: int) -> dict[str, Tensor | int]:
        return {"k_frames": torch.zeros(shape), "v_frames": torch.zeros(shape)}

    return [
        ("query of another dtype", {"query": torch.zeros(2, 4, 16).half()}, r"query=\[2, 4, 16\] float16"),
        ("query of another head_dim", {"query": torch.zeros(2, 4, 32)}, r"query=.*must be \[any, any, 16\]"),
        ("heads that share unevenly", {"query": torch.zeros(2, 3, 16)}, "q_heads=3: must be a multiple of kv_heads=2"),
        ("k_frames of f64", {"k_frames": torch.zeros(4, 2, 32, 16).double()}, "k_frames=.*float64"),
        ("k_frames without heads", {"k_frames": torch.zeros(4, 32, 16)}, r"k_frames=\[4, 32, 16\]"),
        (
            "k_frames of another order",
            {"k_frames": torch.zeros(4, 32, 2, 16).transpose(1, 2)},
            "k_frames=.*its last dimensions contiguous",
        ),
        ("v_frames of another dtype", {"v_frames": torch.zeros(4, 2, 32, 16).half()}, "v_frames=.*float16"),
        ("v_frames of another shape", {"v_frames": torch.zeros(5, 2, 32, 16)}, r"v_frames=\[5, 2, 32, 16\]"),
        ("frames of 24 tokens", pair(4, 2, 24, 16), "frame_tokens=24: must be a multiple of 16"),
        ("frames of no tokens", pair(4, 2, 0, 16), "frame_tokens=0"),
        ("head_dim of 24", pair(4, 2, 32, 24), "head_dim=24"),
        ("frames of int64", {"frames": torch.zeros(2, 3, dtype=torch.int64)}, "frames=.*int64.*must be.*int32"),
        ("frames of other rows", {"frames": torch.zeros(3, 3).int()}, r"frames=\[3, 3\]"),
        ("frames apart", {"frames": torch.zeros(2, 6).int()[:, ::2]}, "frames=.*contiguous"),
        ("seq_lens of int64", {"seq_lens": torch.ones(2, dtype=torch.int64)}, "seq_lens=.*int64"),
        ("seq_lens of other rows", {"seq_lens": torch.ones(3).int()}, r"seq_lens=\[3\]"),
        ("seq_lens apart", {"seq_lens": torch.ones(4).int()[::2]}, "seq_lens=.*contiguous"),
        ("output of another shape", {"output": torch.zeros(2, 4, 32)}, r"output=\[2, 4, 32\]"),
        ("output of whole numbers", {"output": torch.zeros(2, 4, 16).int()}, "output=.*int32"),
        ("output of another order", {"output": torch.zeros(2, 16, 4).transpose(1, 2)}, "output=.*contiguous"),
        ("seq_lens elsewhere", {"seq_lens": torch.ones(2, device="meta").int()}, "seq_lens=.*on meta"),
        ("longest of none", {"longest": 0}, "longest=0: must be 1 to 96"),
        ("longest beyond the table", {"longest": 97}, "longest=97: must be 1 to 96, the tokens of 3 blocks"),
    ]


@pytest.mark.parametrize(("changed", "message"), [pytest.param(*case[1:], id=case[0]) for case in bad_arguments()])
def test_bad_arguments_are_refused_by_name(changed: dict[str, Tensor | int], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 16),
        "k_frames": torch.zeros(4, 2, 32, 16),
        "v_frames": torch.zeros(4, 2, 32, 16),
        "frames": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.ones(2, dtype=torch.int32),
        "output": torch.zeros(2, 4, 16),
        "longest": 50,
    }
    with pytest.raises(KernelError, match=message):
        attend_frames(**(arguments | changed), scale=1.0)

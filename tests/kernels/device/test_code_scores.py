"""Page weights from key codes on the device against their plain-torch reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.kernels.device.test_key_codes import encode
from tests.tolerances import CODE_TIE, assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.code_scores.gpu import score_codes
from vllm_hybrid_sparse.kernels.code_scores.reference import CodeScores
from vllm_hybrid_sparse.kernels.code_scores.reference import score_codes as score_reference
from vllm_hybrid_sparse.kernels.key_codes.gpu import RotatedQueries, rotate_queries
from vllm_hybrid_sparse.kernels.key_codes.reference import (
    encode_keys,
    estimate_weights,
    pack_codes,
    rotation,
    score_deviation,
)

SCALE = 0.2
FIRST_PAGE = 4
NO_BLOCK = (-7, 2**31 - 1)  # what may stand in a table behind a row's candidates


@dataclass
class Store:
    """Codes of one layer by block, those of no candidate with bytes that read NaN, and the table of each row."""

    codes: Tensor  # [kv_heads, store_pages, bytes]
    blocks: Tensor  # [rows, blocks] int32
    candidates: Tensor  # [rows] int32
    pages_per_block: int
    code_bits: int

    @property
    def most(self) -> int:
        return int(self.candidates.max())


def make_store(
    candidates: Sequence[int],
    *,
    kv_heads: int = 1,
    head_dim: int = 64,
    code_bits: int = 2,
    pages_per_block: int = 2,
    first_page: int = FIRST_PAGE,
    spread: float = 1.0,
) -> Store:
    """Rows with so many candidates, in blocks in no order, with unused blocks among them.

    spread   how much longer a page's last token is than its first
    """
    counts = [-(-(first_page + count) // pages_per_block) if count else 0 for count in candidates]
    num_blocks = sum(counts) + 3
    keys = torch.randn(kv_heads * sum(candidates), 16, head_dim) + 0.5 * torch.randn(head_dim)
    keys *= torch.linspace(1, spread, 16)[:, None]
    made = pack_codes(encode_keys(keys.flatten(0, 1), code_bits)).view(kv_heads, sum(candidates), -1)
    codes = torch.full((kv_heads, num_blocks * pages_per_block, made.shape[2]), 0xFF, dtype=torch.uint8)
    blocks = torch.empty(len(candidates), max(counts, default=0) + 2, dtype=torch.int32)
    blocks[:, ::2], blocks[:, 1::2] = NO_BLOCK
    free, taken = torch.randperm(num_blocks).tolist(), 0
    for row, count in enumerate(candidates):
        for block in range(first_page // pages_per_block, counts[row]):
            blocks[row, block] = free.pop()
        pages = first_page + torch.arange(count)
        places = blocks[row, pages // pages_per_block] * pages_per_block + pages % pages_per_block
        codes[:, places] = made[:, taken : taken + count]
        taken += count
    return Store(codes, blocks, torch.tensor(candidates, dtype=torch.int32), pages_per_block, code_bits)


def random_queries(rows: int, q_heads: int, head_dim: int) -> RotatedQueries:
    """Whole numbers, the largest 127, and their units."""
    levels = torch.randint(-126, 127, (rows, q_heads, head_dim)).bfloat16()
    levels[:, :, 3] = 127
    units = torch.rand(rows, q_heads) / 50 + 1e-3
    return RotatedQueries(levels, units, (levels.float() * units[:, :, None]).norm(dim=2))


def unrotated(queries: RotatedQueries) -> Tensor:
    """The queries of which these are the rotated ones, rounded to the same levels."""
    rotated = queries.levels.double() * queries.units.double()[:, :, None]
    return rotated @ rotation(queries.levels.shape[2])


def score(
    store: Store, queries: RotatedQueries, device: torch.device, *, most: int | None = None, first: int = FIRST_PAGE
) -> CodeScores:
    scores = score_codes(
        RotatedQueries(*(part.to(device) for part in queries)),
        store.codes.to(device),
        store.blocks.to(device),
        store.candidates.to(device),
        first_page=first,
        most=store.most if most is None else most,
        pages_per_block=store.pages_per_block,
        scale=SCALE,
        code_bits=store.code_bits,
    )
    return CodeScores(scores.weights.cpu(), scores.deviations.cpu())


def expected_of(store: Store, query: Tensor, *, most: int | None = None, first: int = FIRST_PAGE) -> CodeScores:
    return score_reference(
        query,
        store.codes,
        store.blocks,
        store.candidates,
        first_page=first,
        most=store.most if most is None else most,
        pages_per_block=store.pages_per_block,
        scale=SCALE,
        code_bits=store.code_bits,
    )


def check(store: Store, group: int, head_dim: int, device: torch.device) -> None:
    queries = random_queries(len(store.candidates), group * len(store.codes), head_dim)
    check_close(score(store, queries, device), expected_of(store, unrotated(queries)))


def check_close(actual: CodeScores, expected: CodeScores) -> None:
    for part, wanted in zip(actual, expected, strict=True):
        assert_close(part, wanted)


def test_the_reference_is_the_estimate_of_each_page_of_a_row() -> None:
    keys, query = torch.randn(2, 5 * 16, 48), torch.randn(1, 6, 48)
    codes = [encode_keys(head, 1) for head in keys]
    order = torch.tensor([2, 0, 3, 4, 1])  # where the store has the pages
    stored = torch.stack([pack_codes(of_head)[order] for of_head in codes])
    blocks, candidates = order.argsort()[None].int(), torch.tensor([3], dtype=torch.int32)
    scores, deviations = score_reference(
        query, stored, blocks, candidates, first_page=1, most=4, pages_per_block=1, scale=SCALE, code_bits=1
    )
    assert scores.shape == (1, 6, 4)
    for head in range(6):
        wanted = estimate_weights(query[0, head : head + 1], codes[head // 3], SCALE)[0, 1:4]
        torch.testing.assert_close(scores[0, head, :3], wanted)
        assert scores[0, head, 3] == -torch.inf
        of_candidates = encode_keys(keys[head // 3, 16:64], 1)
        torch.testing.assert_close(deviations[0, head], score_deviation(query[0], of_candidates, SCALE)[head])


@pytest.mark.parametrize("code_bits", [1, 2])
@pytest.mark.parametrize(
    ("head_dim", "group", "pages_per_block"),
    [(16, 1, 1), (48, 8, 8), (64, 4, 2), (80, 3, 1), (128, 8, 8), (256, 3, 2), (256, 17, 8)],
)
def test_scores_are_the_reference_s(
    head_dim: int, group: int, pages_per_block: int, code_bits: int, device: torch.device
) -> None:
    store = make_store([5, 0, 21], kv_heads=2, head_dim=head_dim, code_bits=code_bits, pages_per_block=pages_per_block)
    check(store, group, head_dim, device)


@pytest.mark.parametrize("candidates", [[1], [0, 1], [16, 15, 17], [33, 1, 32, 0]])
@pytest.mark.parametrize("pages_per_block", [1, 8])
def test_rows_of_any_number_of_candidates(candidates: list[int], pages_per_block: int, device: torch.device) -> None:
    check(make_store(candidates, head_dim=16, pages_per_block=pages_per_block), 2, 16, device)


@pytest.mark.parametrize("first_page", [0, 1, 7, 13])
def test_the_first_candidate_may_be_any_page(first_page: int, device: torch.device) -> None:
    store = make_store([3, 19], head_dim=16, pages_per_block=8, first_page=first_page)
    queries = random_queries(2, 1, 16)
    expected = expected_of(store, unrotated(queries), first=first_page)
    check_close(score(store, queries, device, first=first_page), expected)


@pytest.mark.parametrize("most", [20, 40])
def test_behind_a_row_s_candidates_there_is_nothing(most: int, device: torch.device) -> None:
    store = make_store([0, 7, 20], kv_heads=2, head_dim=32)
    queries = random_queries(3, 6, 32)
    scores, deviations = score(store, queries, device, most=most)
    check_close(CodeScores(scores, deviations), expected_of(store, unrotated(queries), most=most))
    assert (deviations[0] == 0).all()
    assert (deviations[1:] > 0).all()
    for row, count in enumerate(store.candidates):
        assert scores[row, :, :count].isfinite().all()
        assert (scores[row, :, count:] == -torch.inf).all()


def test_the_first_pages_say_how_long_keys_are(device: torch.device) -> None:
    """The pages behind them may have keys of any length, and a row may have fewer."""
    keys = torch.randn(20, 16, 64)
    keys[16:] *= 10
    codes = pack_codes(encode_keys(keys.flatten(0, 1), 2))[None]
    blocks = torch.arange(20, dtype=torch.int32).repeat(2, 1)
    store = Store(codes, blocks, torch.tensor([20, 3], dtype=torch.int32), 1, 2)
    queries = random_queries(2, 2, 64)
    _, deviations = score(store, queries, device, first=0)
    for row, pages in enumerate((16, 3)):
        of_pages = encode_keys(keys[:pages].flatten(0, 1), 2)
        assert_close(deviations[row], score_deviation(unrotated(queries)[row], of_pages, SCALE))


@pytest.mark.parametrize("code_bits", [1, 2])
def test_tokens_whose_estimates_are_far_apart_do_not_overflow(code_bits: int, device: torch.device) -> None:
    store = make_store([6], head_dim=64, code_bits=code_bits, spread=1e4)
    queries = random_queries(1, 4, 64)
    expected = expected_of(store, unrotated(queries)).weights
    assert expected.abs().max() > 1e3
    # The sum of two parts, of which each is as large as the largest: right to a few of its last bits.
    torch.testing.assert_close(
        score(store, queries, device).weights.double(), expected, rtol=0, atol=1e-6 * float(expected.abs().max())
    )


def test_pages_of_zeros_and_queries_of_zeros_weigh_their_tokens(device: torch.device) -> None:
    store = make_store([4, 4], head_dim=32)
    zeros = pack_codes(encode_keys(torch.zeros(16, 32), 2))
    first = int(store.blocks[0, FIRST_PAGE // 2]) * 2
    store.codes[:, first] = zeros
    queries = random_queries(2, 2, 32)
    queries.levels[1], queries.units[1], queries.lengths[1] = 0, 0, 0
    actual = score(store, queries, device)
    check_close(actual, expected_of(store, unrotated(queries)))
    scores = actual.weights
    log_tokens = torch.tensor(16.0).log()
    assert_close(scores[0, :, 0], log_tokens.expand(2))
    assert_close(scores[1], log_tokens.expand(2, 4))


def test_the_table_s_rows_may_lie_apart(device: torch.device) -> None:
    store = make_store([5, 9], head_dim=16)
    wide = torch.full((2, store.blocks.shape[1] + 9), NO_BLOCK[0], dtype=torch.int32, device=device)
    wide[:, 4:-5] = store.blocks.to(device)
    queries = random_queries(2, 1, 16)
    expected = expected_of(store, unrotated(queries))
    store.blocks = wide[:, 4:-5]
    check_close(score(store, queries, device), expected)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "code_bits"), [(torch.bfloat16, 128, 2), (torch.float16, 80, 1), (torch.float32, 64, 2)]
)
def test_from_keys_and_queries_to_scores(
    dtype: torch.dtype, head_dim: int, code_bits: int, device: torch.device
) -> None:
    """All on the device: an element of a query may round another way."""
    keys = (torch.randn(9 * 16, head_dim) + torch.randn(head_dim)).to(dtype)
    codes = encode(keys, code_bits, device)[None]
    blocks = torch.arange(9, dtype=torch.int32)[None]
    store = Store(codes, blocks, torch.tensor([5], dtype=torch.int32), 1, code_bits)
    query = torch.randn(1, 4, head_dim).to(dtype)
    actual, expected = score(store, rotate_queries(query.to(device)), device), expected_of(store, query)
    for part, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=0, atol=CODE_TIE)


def test_no_rows_and_no_pages_are_no_work(device: torch.device) -> None:
    store = make_store([3])
    assert score(store, random_queries(1, 2, 64), device, most=0).weights.shape == (1, 2, 0)
    store.blocks, store.candidates = store.blocks[:0], store.candidates[:0]
    assert score(store, random_queries(0, 2, 64), device, most=5).weights.shape == (0, 2, 5)


def test_bad_arguments_are_refused_by_name() -> None:
    store, queries = make_store([3, 4]), random_queries(2, 2, 64)
    good = {
        "queries": queries,
        "codes": store.codes,
        "blocks": store.blocks,
        "candidates": store.candidates,
        "first_page": FIRST_PAGE,
        "most": 4,
        "pages_per_block": 2,
        "scale": SCALE,
        "code_bits": 2,
    }
    score_codes(**good)
    for changed, message in (
        ({"queries": queries._replace(levels=queries.levels.float())}, "levels=.*must be .* bfloat16"),
        ({"queries": queries._replace(units=queries.units[:1])}, r"units=\[1, 2\]"),
        ({"queries": queries._replace(lengths=queries.lengths.double())}, "lengths=.*must be .* float32"),
        ({"queries": random_queries(2, 2, 128)}, "codes=.*must be"),
        ({"queries": random_queries(2, 2, 24)}, "head_dim=24"),
        ({"codes": store.codes[0]}, "codes=.*must be"),
        ({"codes": store.codes.repeat(3, 1, 1)}, "q_heads=2: must be a multiple of kv_heads=3"),
        ({"codes": store.codes[:, :-1].contiguous()}, r"pages_per_block=2: must divide the \d+ pages"),
        ({"pages_per_block": 0}, "pages_per_block=0"),
        ({"blocks": store.blocks.long()}, "blocks=.*must be .* int32"),
        ({"blocks": store.blocks[:1]}, "blocks=.*must be"),
        ({"candidates": store.candidates[:1]}, r"candidates=\[1\]"),
        ({"first_page": -1}, "first_page=-1: must be 0 or more"),
        ({"most": -1}, "most=-1: must be 0 or more"),
        ({"code_bits": 1}, "codes=.*must be"),
        ({"code_bits": 4}, "code_bits=4: must be 1 or 2"),
    ):
        with pytest.raises(KernelError, match=message):
            score_codes(**{**good, **changed})

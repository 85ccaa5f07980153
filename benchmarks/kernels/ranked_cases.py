"""The cases that the kernels of ranked rows are timed on: codes, and attention to listed pages."""

from collections.abc import Iterator

import torch

from benchmarks.kernels.device_cases import Case, Machine, relative_error
from vllm_hybrid_sparse.kernels.code_scores import reference as code_scores
from vllm_hybrid_sparse.kernels.code_scores.gpu import score_codes
from vllm_hybrid_sparse.kernels.key_codes.gpu import encode_pages, rotate_queries
from vllm_hybrid_sparse.kernels.key_codes.reference import encode_keys, pack_codes
from vllm_hybrid_sparse.kernels.listed_attention.gpu import attend_listed
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore, Tally
from vllm_hybrid_sparse.kernels.page_directory.state import Listed
from vllm_hybrid_sparse.values import PAGE_TOKENS, summary_bytes

_CODE_BITS = 2
_CHECKED_PAGES = 8  # of each KV head: the first of the first row, and as many last ones of the last row
_UNTOUCHED = 0xA5  # what codes are filled with before they are made


def ranked_cases(machine: Machine, rows: int, pages: int, budget: int) -> Iterator[Case]:
    """Score all candidates of a context by their codes, and attend to a few pages.

    pages    candidates of each row
    budget   how many pages each group reads
    """
    yield from code_cases(machine, rows, pages)
    for on_host in (False, True):
        yield listed_case(machine, rows, budget, on_host=on_host)


def code_cases(machine: Machine, rows: int, pages: int) -> Iterator[Case]:
    """Make codes of pages on the host, and score by them."""
    store_pages, elements = rows * pages, 2 * PAGE_TOKENS * machine.head_dim
    size = summary_bytes("key_codes", machine.head_dim, machine.dtype.itemsize, _CODE_BITS)
    codes = torch.zeros(machine.kv_heads, store_pages, size, dtype=torch.uint8, device=machine.device)
    places = torch.arange(machine.kv_heads * store_pages, device=machine.device)
    offsets = places % machine.num_slots * elements

    def encode() -> None:
        encode_pages(
            machine.host, offsets, places, codes.flatten(0, 1), head_dim=machine.head_dim, code_bits=_CODE_BITS
        )

    query = machine.randn(rows, machine.kv_heads * machine.group, machine.head_dim)
    blocks = torch.arange(store_pages, dtype=torch.int32, device=machine.device).view(rows, pages)
    candidates = torch.full((rows,), pages, dtype=torch.int32, device=machine.device)
    numbers = {"first_page": 0, "most": pages, "pages_per_block": 1, "code_bits": _CODE_BITS}

    def score() -> torch.Tensor:
        scale = machine.head_dim**-0.5
        return score_codes(rotate_queries(query), codes, blocks, candidates, scale=scale, **numbers).weights

    def error() -> float:
        """The share of wrong bytes, of which rounding makes few, or the error of scores, large if one page is wrong."""
        codes.fill_(_UNTOUCHED)
        encode()
        checked = [*range(_CHECKED_PAGES), *range(store_pages - _CHECKED_PAGES, store_pages)]
        keys = [machine.stored(of_head[checked])[0] for of_head in offsets.view(machine.kv_heads, store_pages)]
        wanted = torch.stack([pack_codes(encode_keys(of_head, _CODE_BITS), machine.dtype.itemsize) for of_head in keys])
        wrong_bytes = float((codes[:, checked].cpu() != wanted).double().mean())
        expected = code_scores.score_codes(
            query[[0, -1]].cpu(),
            wanted,
            torch.arange(len(checked), dtype=torch.int32).view(2, -1),
            torch.full((2,), _CHECKED_PAGES, dtype=torch.int32),
            scale=machine.head_dim**-0.5,
            **numbers | {"most": _CHECKED_PAGES},
        ).weights
        scores = score()
        scores = torch.stack((scores[0, :, :_CHECKED_PAGES], scores[-1, :, -_CHECKED_PAGES:]))
        return float(torch.tensor((wrong_bytes, relative_error(scores.cpu(), expected))).max())  # NaN if either is

    case = f"{rows} rows, {pages} pages"
    key_bytes = codes.shape[0] * store_pages * machine.page_bytes // 2
    yield Case(name="encode_pages", size=case, run=encode, error=error, moved_bytes=key_bytes, ceiling="from_host")
    yield Case(name="score_codes", size=case, run=score, error=error, moved_bytes=codes.numel(), ceiling="device")


def listed_case(machine: Machine, rows: int, budget: int, *, on_host: bool) -> Case:
    """Attend to the pages that each group reads: all of them in slots, or all on the host and read in place."""
    elements = 2 * PAGE_TOKENS * machine.head_dim
    host = HostStore(machine.host, machine.kv_heads * elements, elements, elements, 1)
    query = machine.randn(rows, machine.kv_heads * machine.group, machine.head_dim)
    slots = machine.slots(rows, machine.kv_heads, budget)
    pages = slots % (machine.num_slots // machine.kv_heads)
    listed = Listed(torch.full_like(slots, -1) if on_host else slots, pages, torch.full_like(slots, PAGE_TOKENS))
    counts = torch.full((rows, machine.kv_heads), budget, dtype=torch.int32, device=machine.device)
    tally, scale = Tally(machine.device), machine.head_dim**-0.5

    def run() -> torch.Tensor:
        return attend_listed(query, machine.k_pool, machine.v_pool, host, listed, counts, tally, scale=scale)[0]

    def error() -> float:
        heads = query[0, : machine.group].float().cpu()
        if on_host:
            keys, values = (part.float() for part in machine.stored(pages[0, 0].long() * host.block_stride))
        else:
            chosen = slots[0, 0].long()
            keys, values = (pool[chosen].flatten(0, 1).float().cpu() for pool in (machine.k_pool, machine.v_pool))
        return relative_error(run()[0, : machine.group].cpu(), (scale * heads @ keys.T).softmax(dim=1) @ values)

    return Case(
        name=f"attend_listed, {'on the host' if on_host else 'in slots'}",
        size=f"{rows} rows, {budget} pages",
        run=run,
        error=error,
        moved_bytes=slots.numel() * machine.page_bytes,
        ceiling="from_host" if on_host else "device",
    )

"""New keys and values from a GPU into the pinned host store: whole pages of prompts, and single tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, store_pages, store_tokens
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import DeviceQueue, Mark, current_queue, upload
from vllm_hybrid_sparse.values import PAGE_TOKENS

Encode = Callable[[Sequence[int]], None]
"""Makes the summaries of pages of a layer, all KV heads, on the caller's queue."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What was stored in one layer's host store. It may still be under way: the host must `wait` before it reads it."""

    marks: tuple[Mark, ...]  # behind the stores of each queue; empty: there were none
    blocks: list[int]  # ascending; with filled pages whose summaries are missing

    def wait(self) -> None:
        """Wait until the host store holds it."""
        for mark in self.marks:
            mark.wait()


class WriteThrough:
    """One layer's way into its host store: stores are launched, not waited for. Only for the step's thread."""

    def __init__(self, source: HostPages, queue: DeviceQueue, encode: Encode | None = None) -> None:
        """Nothing is under way.

        source   the layer's host store, pinned if there is a GPU
        queue    for the stores, and for whatever else reads the store on the device
        encode   summarises filled pages on the device; None: the host does so when it is told to
        """
        self._source, self._queue, self._encode = source, queue, encode
        self._stored: Mark | None = None  # behind the chunks
        self._rows_stored: Mark | None = None  # behind the rows
        self._blocks: set[int] = set()  # with pages that were filled since the last `take`
        self._unencoded: list[int] = []  # pages that chunks filled
        self._encoded: Mark | None = None  # behind the summaries of what chunks filled

    def store(self, key: Tensor, value: Tensor, first_token: int, pages: Tensor) -> None:
        """Store a chunk of one request. Earlier work that the queue holds or follows must make the keys and values.

        key, value    [tokens, kv_heads, head_dim]   of the KV dtype, on the device
        first_token   the chunk's first token in the request
        pages         [pages] int64                  of the host store, those that hold the tokens, in order
        """
        tokens = len(key)
        end_token = first_token + tokens
        first_page = first_token // PAGE_TOKENS
        first_whole, end_whole = -(-first_token // PAGE_TOKENS), end_token // PAGE_TOKENS
        if first_whole < end_whole:
            whole = slice(first_whole * PAGE_TOKENS - first_token, end_whole * PAGE_TOKENS - first_token)
            self._store_pages(key[whole], value[whole], pages[first_whole - first_page : end_whole - first_page])
        head, tail = min(tokens, first_whole * PAGE_TOKENS - first_token), max(0, end_whole * PAGE_TOKENS - first_token)
        rest = [*range(head), *range(max(head, tail), tokens)]
        if rest:
            self._store_tokens(key, value, rest, first_token, first_page, pages)
        filled: list[int] = pages[: end_whole - first_page].tolist()
        if self._encode is None:
            self._fill_blocks(filled)
        else:
            self._unencoded += filled
        self._stored = self._queue.mark()

    def store_rows(
        self,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        places: Tensor,
        frames: TokenFrames | None,
        filled_pages: Sequence[int],
    ) -> None:
        """Store one token for each of some requests on the caller's queue, in the host store and, if given, in frames.

        offsets, places   [rows, kv_heads] int64, [rows] int32   on the device: as `store_tokens` takes them
        key, value        [rows, kv_heads, head_dim]             of the KV dtype, on the device; rows may be strided
        frames            None: store in the host store only
        filled_pages      of the host store, those that the tokens fill
        """
        self.launch_rows(key, value, offsets, places, frames)
        self.rows_stored(filled_pages)

    def launch_rows(
        self, key: Tensor, value: Tensor, offsets: Tensor, places: Tensor, frames: TokenFrames | None
    ) -> None:
        """The launches of `store_rows`. Call `rows_stored` afterwards."""
        store_tokens(self._source.elements, offsets, places, key, value, frames)

    def rows_stored(self, filled_pages: Sequence[int]) -> None:
        """Note that the caller's queue now has the stores of rows; see `store_rows`."""
        if self._encode is None:
            self._fill_blocks(filled_pages)
        elif filled_pages:
            self._encode(filled_pages)
        self._rows_stored = current_queue(self._queue.device).mark()

    def encode_chunks(self) -> None:
        """If the device summarises pages, launch the summaries of pages that chunks filled.

        It reads these pages from the host store, so over the link. Nobody needs these summaries before the next step,
        so what follows the stores does not wait for them.
        """
        if self._encode is None or not self._unencoded:
            return
        with self._queue.launching():
            self._encode(self._unencoded)
        self._encoded, self._unencoded = self._queue.mark(), []

    def follow_codes(self) -> None:
        """Make the caller's queue follow the summaries of pages that earlier chunks filled."""
        if self._encoded is not None:
            current_queue(self._queue.device).follow(self._encoded)

    def wait_for_codes(self) -> None:
        """Wait until the summaries of pages that chunks filled are made: before the host writes to such pages."""
        if self._encoded is not None:
            self._encoded.wait()

    def take(self) -> Stored:
        """What was stored since the last call."""
        marks = tuple(mark for mark in (self._stored, self._rows_stored) if mark is not None)
        stored = Stored(marks, sorted(self._blocks))
        self._stored, self._rows_stored, self._blocks = None, None, set()
        return stored

    def _fill_blocks(self, pages: Sequence[int]) -> None:
        """Note filled pages whose summaries the host has to make."""
        self._blocks.update(page // self._source.pages_per_block for page in pages)

    def _store_pages(self, key: Tensor, value: Tensor, pages: Tensor) -> None:
        heads, head_dim = key.shape[1:]
        offsets = self._offsets(heads, pages)  # [heads, pages]
        with self._queue.launching():
            staged = [  # [heads * pages, 16, head_dim], as slots are
                part.unflatten(0, (-1, PAGE_TOKENS)).permute(2, 0, 1, 3).reshape(-1, PAGE_TOKENS, head_dim)
                for part in (key, value)
            ]
            slots = torch.arange(len(staged[0]), dtype=torch.int32, device=key.device)
            store_pages(
                self._source.elements, upload(offsets.flatten(), key.device), slots, *map(Tensor.contiguous, staged)
            )

    def _store_tokens(
        self, key: Tensor, value: Tensor, tokens: list[int], first_token: int, first_page: int, pages: Tensor
    ) -> None:
        positions = first_token + torch.tensor(tokens)
        offsets = self._offsets(key.shape[1], pages[positions // PAGE_TOKENS - first_page]).T.contiguous()
        places = (positions % PAGE_TOKENS).to(torch.int32)
        with self._queue.launching():
            index = upload(torch.tensor(tokens), key.device)
            store_tokens(
                self._source.elements,
                upload(offsets, key.device),
                upload(places, key.device),
                key[index].contiguous(),
                value[index].contiguous(),
            )

    def _offsets(self, heads: int, pages: Tensor) -> Tensor:
        return self._source.offsets(torch.arange(heads)[:, None], pages[None])

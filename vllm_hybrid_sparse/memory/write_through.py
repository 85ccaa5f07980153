"""New keys and values from a GPU into the pinned host store: a prompt's pages as wholes, the rest by the token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, store_pages, store_tokens
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.queues import DeviceQueue, Mark, current_queue, upload
from vllm_hybrid_sparse.values import PAGE_TOKENS

Encode = Callable[[Sequence[int]], None]
"""Makes the summaries of pages of a layer, all KV heads, on the queue of the caller."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What was stored in one layer's host store, maybe still under way. The host reads none of it before `wait`."""

    marks: tuple[Mark, ...]  # behind the stores of each queue; empty: there were none
    blocks: list[int]  # with pages that were filled, whose summaries are missing; ascending

    def wait(self) -> None:
        """Until the host store holds it."""
        for mark in self.marks:
            mark.wait()


class WriteThrough:
    """One layer's way into its host store: stores are launched and not waited for. For the step's thread alone."""

    def __init__(self, source: HostPages, queue: DeviceQueue, encode: Encode | None = None) -> None:
        """Nothing is under way.

        source   the layer's host store, pinned beside a GPU
        queue    where stores go, and whatever else reads the store on the device
        encode   summarises pages on the device when they are filled; None: the host does, once it is told to
        """
        self._source, self._queue, self._encode = source, queue, encode
        self._stored: Mark | None = None  # behind the chunks
        self._rows_stored: Mark | None = None  # behind the rows
        self._blocks: set[int] = set()  # with pages that were filled since they were last taken
        self._unencoded: list[int] = []  # pages that chunks filled
        self._encoded: Mark | None = None  # behind the summaries of what chunks filled

    def store(self, key: Tensor, value: Tensor, first_token: int, pages: Tensor) -> None:
        """Store a chunk of one request; what its queue was given before must have made the keys and values.

        key, value    [tokens, kv_heads, head_dim]   of the KV dtype, on the device
        first_token   of the request, 0 its first
        pages         [pages] int64                  of the host store, those that the tokens lie in, in order
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
        """Store one token of each of some requests, in frames of the pool as well, on the queue of the caller.

        offsets, places   [rows, kv_heads] int64, [rows] int32   on the device: as `store_tokens` takes them
        key, value        [rows, kv_heads, head_dim]             of the KV dtype, on the device; rows may be strided
        frames            None: the host store is all that gets them
        filled_pages      of the host store, those that the tokens fill
        """
        self.launch_rows(key, value, offsets, places, frames)
        self.rows_stored(filled_pages)

    def launch_rows(
        self, key: Tensor, value: Tensor, offsets: Tensor, places: Tensor, frames: TokenFrames | None
    ) -> None:
        """What `store_rows` launches first; `rows_stored` must follow."""
        store_tokens(self._source.elements, offsets, places, key, value, frames)

    def rows_stored(self, filled_pages: Sequence[int]) -> None:
        """Rows were stored by what the caller's queue was given; see `store_rows`."""
        if self._encode is None:
            self._fill_blocks(filled_pages)
        elif filled_pages:
            self._encode(filled_pages)
        self._rows_stored = current_queue(self._queue.device).mark()

    def encode_chunks(self) -> None:
        """Have the device summarise what chunks filled, where it does: from the host store, so over the link.

        Nobody needs it before the next step, so what follows the stores does not wait for it.
        """
        if self._encode is None or not self._unencoded:
            return
        with self._queue.launching():
            self._encode(self._unencoded)
        self._encoded, self._unencoded = self._queue.mark(), []

    def follow_codes(self) -> None:
        """Have the queue of the caller come behind the summaries of what chunks filled before."""
        if self._encoded is not None:
            current_queue(self._queue.device).follow(self._encoded)

    def take(self) -> Stored:
        """What was stored since the last call."""
        marks = tuple(mark for mark in (self._stored, self._rows_stored) if mark is not None)
        stored = Stored(marks, sorted(self._blocks))
        self._stored, self._rows_stored, self._blocks = None, None, set()
        return stored

    def _fill_blocks(self, pages: Sequence[int]) -> None:
        """Pages were filled whose summaries the host is to make."""
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

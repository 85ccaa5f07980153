"""The requests of one step as the CPU kernel reads them, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vllm_hybrid_sparse import _native
from vllm_hybrid_sparse.errors import KernelError


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """The requests of one step, as the kernel reads them; keeps the tensors alive."""

    native: _native.Batch
    num_tokens: int
    tensors: tuple[Tensor, ...]
    table_blocks: int  # how many blocks the block table names for each request
    longest: int  # the largest of `seq_lens`
    last_slot: int  # the highest slot at which a token is stored; -1: none is

    @property
    def seq_lens(self) -> Tensor:
        """[requests] int32, as given."""
        return self.tensors[1]

    @classmethod
    def from_tensors(
        cls,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        decode_mask: Tensor,
        slots: Tensor | None = None,
    ) -> Self:
        """Check and wrap. All tensors are on the CPU; `slot_mapping` may be longer than the batch.

        query_start_loc   [requests + 1]         int32  first query token of each request, then the number of tokens:
                                                        from 0 on, never descending
        seq_lens          [requests]             int32  tokens of each request, the batch's included; 0 with one query
                                                        token: its keys are stored, its output is left as it is; 0
                                                        without any: padding
        block_table       [requests, max_blocks] int32  block ids, rows may be strided
        slot_mapping      [tokens]               int64  block * block_tokens + offset, negative: do not store
        decode_mask       [requests]             bool | uint8  true: it attends sparsely if it has one query token; with
                                                        more, exactly, like requests without it
        slots             [requests]             int32  where a layer keeps each request's state, no two the same;
                                                        negative: nowhere; None: the layers keep none
        """
        requests = seq_lens.shape[0]
        wanted = (
            ("query_start_loc", query_start_loc, torch.int32, 1),
            ("seq_lens", seq_lens, torch.int32, 1),
            ("block_table", block_table, torch.int32, 2),
            ("slot_mapping", slot_mapping, torch.int64, 1),
            *((("slots", slots, torch.int32, 1),) if slots is not None else ()),
        )
        for name, tensor, dtype, dims in wanted:
            if tensor.dtype != dtype or tensor.dim() != dims or tensor.device.type != "cpu":
                raise KernelError(
                    f"{name}={tensor.dtype} of {tensor.dim()} dims on {tensor.device}: must be {dtype} of {dims} on cpu"
                )
            if tensor.numel() and tensor.stride(-1) != 1:
                raise KernelError(f"{name}: its last dimension must be contiguous")
        if query_start_loc.shape[0] != requests + 1 or block_table.shape[0] < requests:
            raise KernelError(
                f"seq_lens has {requests} requests: query_start_loc={query_start_loc.shape[0]} must be one more and "
                f"block_table={block_table.shape[0]} no fewer"
            )
        if (
            decode_mask.dim() != 1
            or decode_mask.device.type != "cpu"
            or decode_mask.dtype not in (torch.bool, torch.uint8)
        ):
            raise KernelError(
                f"decode_mask={tuple(decode_mask.shape)} {decode_mask.dtype} on {decode_mask.device}: must be "
                f"[{requests}] bool or uint8 on cpu"
            )
        mask = decode_mask.to(torch.uint8).contiguous()
        _check_lengths(query_start_loc, seq_lens)
        num_tokens = int(query_start_loc[-1]) if requests else 0
        if slot_mapping.shape[0] < num_tokens or mask.shape[0] != requests:
            raise KernelError(
                f"slot_mapping={slot_mapping.shape[0]}, decode_mask={mask.shape[0]}: must cover {num_tokens} tokens "
                f"and {requests} requests"
            )
        if slots is not None and slots.shape[0] < requests:
            raise KernelError(f"slots={slots.shape[0]}: must cover {requests} requests")
        native = _native.Batch(
            requests,
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            block_table.data_ptr(),
            block_table.stride(0),
            slot_mapping.data_ptr(),
            mask.data_ptr(),
            slots.data_ptr() if slots is not None else 0,
        )
        kept = (query_start_loc, seq_lens, block_table, slot_mapping, mask, *((slots,) if slots is not None else ()))
        longest = int(seq_lens.max()) if requests else 0
        last_slot = int(slot_mapping[:num_tokens].max()) if num_tokens else -1
        return cls(native, num_tokens, kept, block_table.shape[1], longest, last_slot)


def _check_lengths(query_start_loc: Tensor, seq_lens: Tensor) -> None:
    """Raise KernelError if a request's query tokens are not the last ones of its tokens. Once a step, so in numpy."""
    starts, lengths = query_start_loc.numpy(), seq_lens.numpy()
    descends = starts[1:] < starts[:-1]
    if starts[0] or descends.any():
        raise KernelError(f"query_start_loc={starts.tolist()}: must begin with 0 and never descend")
    tokens = starts[1:] - starts[:-1]
    too_many = (tokens > lengths) & ((tokens != 1) | (lengths != 0))
    if too_many.any():
        request = int(too_many.argmax())
        raise KernelError(
            f"seq_lens={lengths[request]}: must be at least the {tokens[request]} query tokens of request {request}"
        )


def stored_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Tensor],
    slots: Sequence[int],
    *,
    decode: bool,
) -> NativeBatch:
    """A batch of the latest tokens of some requests. Their keys and values are stored already.

    query_lens, seq_lens   tokens of each request in the batch, and all its tokens; at least one request
    block_tables           [blocks] int32 of each request
    slots                  where a layer keeps each request's state
    """
    return NativeBatch.from_tensors(
        torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.nn.utils.rnn.pad_sequence(list(block_tables), batch_first=True),
        torch.full((sum(query_lens),), -1, dtype=torch.int64),
        torch.full((len(seq_lens),), decode),
        torch.tensor(slots, dtype=torch.int32),
    )

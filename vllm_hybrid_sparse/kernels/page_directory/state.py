"""What the directory keeps in device memory, and what a look into it gives.

A page of the host store is an *entry*: (layer * kv_heads + kv_head) * store_pages + store_page. A slot that is empty
for a page to arrive in stands in the *reserve*, which is filled before a step's first layer and drawn from by its
layers.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import check_tensor

NOWHERE = -1
"""Of an entry: the page lies in no slot."""

ARRIVING = -2
"""Of an entry: it was asked for in this step, and lies in a slot, if it got one, from the next turn on."""

NOTHING = -1
"""Of a slot: it holds no page. Of a place in the reserve: there is no slot in it."""

FREE = -1
"""Stamp of a slot that holds nothing and serves nobody: older than every step, so it is taken before any other."""

IN_RESERVE = 2**31 - 2
"""Stamp of a slot in the reserve; later than every step, so it is never taken."""

SET_ASIDE = 2**31 - 1
"""Stamp of a slot that serves something else; likewise."""


@dataclass(frozen=True, slots=True)
class PageDirectory:
    """The pages that lie in slots. The kernels of gpu.py are the only writers, on one queue and in its order.

    Raises KernelError where the tensors do not belong together.
    """

    slots: Tensor  # [entries] int32, by entry: its slot, NOWHERE or ARRIVING
    pages: Tensor  # [capacity] int64, by slot: the entry it holds, or NOTHING
    used: Tensor  # [capacity] int32, by slot: the step it was read in last, or one of the stamps above
    reserve: Tensor  # [room] int32, slots that are empty for arrivals, or NOTHING
    arrivals: Tensor  # [room] int64, by place in the reserve: the entry that got it; looked at below `cursor` alone
    cursor: Tensor  # [1] int32, how often a place was asked for since the last turn; may be above room
    clock: Tensor  # [1] int32, the step under way, as the last turn said; 0: none has begun

    def __post_init__(self) -> None:
        device = self.slots.device
        check_tensor("slots", self.slots, torch.int32, (None,), device)
        check_tensor("pages", self.pages, torch.int64, (None,), device)
        check_tensor("used", self.used, torch.int32, self.pages.shape, device)
        check_tensor("reserve", self.reserve, torch.int32, (None,), device)
        check_tensor("arrivals", self.arrivals, torch.int64, self.reserve.shape, device)
        check_tensor("cursor", self.cursor, torch.int32, (1,), device)
        check_tensor("clock", self.clock, torch.int32, (1,), device)
        for name, value in (("capacity", self.capacity), ("room", self.room)):
            if value < 1:
                raise KernelError(f"{name}={value}: must be above 0")

    @classmethod
    def empty(cls, entries: int, capacity: int, room: int, device: torch.device) -> Self:
        """All slots free, none of them in the reserve yet.

        entries    pages of the host store, all layers and KV heads together
        capacity   slots, 1 or more
        room       places of the reserve: the most pages that are given slots between two turns; 1 or more
        """
        return cls(
            slots=torch.full((entries,), NOWHERE, dtype=torch.int32, device=device),
            pages=torch.full((capacity,), NOTHING, dtype=torch.int64, device=device),
            used=torch.full((capacity,), FREE, dtype=torch.int32, device=device),
            reserve=torch.full((room,), NOTHING, dtype=torch.int32, device=device),
            arrivals=torch.full((room,), NOTHING, dtype=torch.int64, device=device),
            cursor=torch.zeros(1, dtype=torch.int32, device=device),
            clock=torch.zeros(1, dtype=torch.int32, device=device),
        )

    @property
    def entries(self) -> int:
        """Pages of the host store."""
        return self.slots.shape[0]

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.pages.shape[0]

    @property
    def room(self) -> int:
        """Places of the reserve."""
        return self.reserve.shape[0]


class Listed(NamedTuple):
    """Where pages lie that are to be read, each [rows, kv_heads, most] int32; not looked at behind a group's count."""

    slots: Tensor  # s >= 0: in that slot; -1: on the host; s <= -2: on the host, and to be put into slot -2 - s
    pages: Tensor  # of the host store
    tokens: Tensor  # of the page that the request has, 1 to 16

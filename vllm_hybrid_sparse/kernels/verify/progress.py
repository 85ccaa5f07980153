"""What the verifying kernel keeps of the rows of one layer between microbatches."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.arguments import check_tensor, group_size


@dataclass(frozen=True, slots=True)
class Progress:
    """How far every row and KV head has come. The verifying kernel is the only writer of all of it.

    Keep it until the work that was launched with it has ended: the kernel writes `stop` in host memory, which torch
    would give to another tensor without asking the device.
    """

    lightest: Tensor  # [rows, q_heads] f32, log AS_min; +inf: no page read yet
    pages_left: Tensor  # [rows, kv_heads] int32, N_left: candidates that are not read
    budget_left: Tensor  # [rows, kv_heads] int32, pages that may still be read
    done: Tensor  # [rows, kv_heads] uint8
    mass: Tensor  # [rows, q_heads] f32, P_acc at the last look; 0 before the first
    active: Tensor  # [1] int32, rows and KV heads that are not done
    stop: Tensor  # [1] int32 in host memory, pinned beside a GPU: 1 once none is active

    @classmethod
    def begin(
        cls,
        candidates: Tensor,
        budget: Tensor,
        q_heads: int,
        stop: Tensor | None = None,
        active: int | None = None,
    ) -> Self:
        """Nothing read, no row done.

        candidates   [rows, kv_heads]   int32, candidate pages of each group (Algorithm 1, line 7)
        budget       [rows, kv_heads]   int32, the most of them that may be read
        stop         [1]                int32, 0, in host memory; None: a new one. Before it is set to 0 again, the work
                                        that writes it must have ended
        active       rows and KV heads that are to be done before the stop flag is set; None: all. With fewer, the
                     caller marks the others as done
        """
        check_tensor("candidates", candidates, torch.int32, (None, None), candidates.device)
        check_tensor("budget", budget, torch.int32, candidates.shape, candidates.device)
        rows, kv_heads = candidates.shape
        group_size(q_heads, kv_heads)
        device = candidates.device
        if stop is None:
            stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        check_tensor("stop", stop, torch.int32, (1,), torch.device("cpu"))
        return cls(
            lightest=torch.full((rows, q_heads), torch.inf, device=device),
            pages_left=candidates.clone(),
            budget_left=budget.clone(),
            done=torch.zeros(rows, kv_heads, dtype=torch.uint8, device=device),
            mass=torch.zeros(rows, q_heads, device=device),
            active=torch.full((1,), rows * kv_heads if active is None else active, dtype=torch.int32, device=device),
            stop=stop,
        )

"""Which pages a model's decode steps read, and how a device pool serves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.accuracy.answers import Prefill
from vllm_hybrid_sparse.cli.smollm2 import model_dir
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.hf import DecodeStep, SparseSession
from vllm_hybrid_sparse.kernels.page_directory import reference
from vllm_hybrid_sparse.memory.device_directory import DeviceDirectory
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.values import PAGE_TOKENS

Trace = list[list[list[list[int]]]]
"""[steps][layers][kv_heads][pages]: pages of one request in the order of reading, the retained set first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """What a replay asked of the pool after its first step, which finds it empty."""

    wanted_pages: int
    hit_pages: int
    evicted_pages: int
    late_wanted_pages: int = 0  # those of the second half of the steps
    late_hit_pages: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the wanted pages that were in the pool."""
        return self.hit_pages / self.wanted_pages if self.wanted_pages else float("nan")

    @property
    def late_hit_rate(self) -> float:
        """The same for the second half of the steps."""
        return self.late_hit_pages / self.late_wanted_pages if self.late_wanted_pages else float("nan")


def record(prefill: Prefill, decoded: torch.Tensor, settings: HybridSparseConfig) -> Trace:
    """Decode some tokens, feeding the true one whatever the model says, and note what each step reads.

    prefill   of everything before `decoded`
    decoded   [steps] int64
    """
    trace: Trace = []

    def watch(step: DecodeStep) -> None:
        if step.layer == 0:
            trace.append([])
        retained = settings.retained.retained_pages(step.keys.shape[1])
        trace[-1].append([[*retained, *plan] for plan in step.plans])

    with SparseSession(prefill.model, settings, max_tokens=prefill.max_tokens, watch=watch) as session:
        prefill.rewind(session)
        for token in [prefill.last_token, *decoded[:-1].tolist()]:
            prefill.feed(token)
    return trace


def model_and_tokens(text: Path) -> tuple[PreTrainedModel, torch.Tensor]:
    """SmolLM2 in float32, and a text's [tokens] int64."""
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    return model, tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]


def record_windows(
    model: PreTrainedModel, windows: Sequence[torch.Tensor], steps: int, policies: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Trace]]:
    """Record the last tokens of some windows under each policy, from one prefill per window.

    windows    [tokens] int64 each, more than `steps`
    policies   settings by the policy's name
    """
    recorded: dict[str, list[Trace]] = {policy: [] for policy in policies}
    for window in tqdm(windows, desc="recording", unit="window"):
        prefill = Prefill(model, window[:-steps], new_tokens=steps)
        for policy, settings in policies.items():
            recorded[policy].append(record(prefill, window[-steps:], HybridSparseConfig(**settings)))
    return recorded


def pages_apart(traces: Sequence[Trace]) -> int:
    """The factor for a request's number that makes pages of different requests differ."""
    return 1 + max(page for trace in traces for step in trace for layer in step for head in layer for page in head)


def read_pages(
    pool: DevicePool, layer: int, first_page: int, heads: Sequence[Sequence[int]], microbatch_pages: int
) -> tuple[int, int]:
    """Read a layer's pages for one request's step, pinning one microbatch of a group at a time: (pages, those found).

    first_page   added to the numbers of the request's pages
    """
    wanted = found = 0
    for head, pages in enumerate(heads):
        for first in range(0, len(pages), microbatch_pages):
            listed = np.array(pages[first : first + microbatch_pages], dtype=np.int64)
            numbers = page_numbers(layer, head, first_page + listed)
            taken = pool.take(numbers[None], np.ones(1, dtype=np.bool_))
            for error in taken.refused.values():
                raise error
            found += int((~taken.fresh).sum())
            wanted += len(numbers)
            pool.release(numbers)
    return wanted, found


def replay(traces: Sequence[Trace], shape: PoolShape, microbatch_pages: int) -> PoolUse:
    """Serve the requests of some traces side by side, layer after layer, from one pool.

    One microbatch of a group is pinned at a time. Raises CapacityError if the pool cannot hold one.
    """
    pool = DevicePool(shape)
    apart = pages_apart(traces)
    counts, evicted = [], 0
    for number, steps in enumerate(zip(*traces, strict=True)):
        if number == 1:
            evicted = pool.evictions
        counts.append(
            np.sum(
                [
                    read_pages(pool, layer, request * apart, step[layer], microbatch_pages)
                    for layer in range(shape.layers)
                    for request, step in enumerate(steps)
                ],
                axis=0,
            )
        )
    pool.check_integrity()
    return pool_use(counts, pool.evictions - evicted)


def pool_use(counts: Sequence[NDArray[np.int64]], evicted_pages: int) -> PoolUse:
    """What a replay came to.

    counts          for each step, the pages that were wanted and those that were found
    evicted_pages   after the first step
    """
    wanted, hits = np.sum(counts[1:], axis=0).tolist()
    late_wanted, late_hits = np.sum(counts[len(counts) // 2 :], axis=0).tolist()
    return PoolUse(
        wanted_pages=wanted,
        hit_pages=hits,
        evicted_pages=evicted_pages,
        late_wanted_pages=late_wanted,
        late_hit_pages=late_hits,
    )


def replay_directory(traces: Sequence[Trace], capacity_pages: int) -> PoolUse:
    """The same with slots that the device's own directory manages, all requests in one look-up.

    Every page counts as full. An eviction is a slot that no longer holds what it did a step before.
    """
    layers, kv_heads = len(traces[0][0]), len(traces[0][0][0])
    apart, rows = pages_apart(traces), len(traces)
    directory = DeviceDirectory(
        layers, kv_heads, rows * apart, 1, capacity_pages, torch.device("cpu"), kernels=reference
    )
    blocks = torch.arange(rows * apart, dtype=torch.int32).view(rows, apart)
    lengths, none = torch.full((rows,), apart * PAGE_TOKENS, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    counts, evicted, held = [], 0, directory.state.pages.clone()
    for number, steps in enumerate(zip(*traces, strict=True)):
        directory.begin_step([])
        now = directory.state.pages.clone()
        evicted += int(((held >= 0) & (now != held)).sum()) if number > 1 else 0
        held, wanted, hits = now, 0, 0
        for layer in range(layers):
            lists = [[torch.tensor(head) for head in step[layer]] for step in steps]
            listed = torch.tensor([[len(head) for head in row] for row in lists], dtype=torch.int32)
            most = int(listed.max())
            order = torch.zeros(rows, kv_heads, most, dtype=torch.int64)
            for row, of_row in enumerate(lists):
                for head, pages in enumerate(of_row):
                    order[row, head, : len(pages)] = pages
            found = directory.look_up(layer, blocks, lengths, none, listed, order, first_page=0, most=most)
            wanted += int(listed.sum())
            hits += int((found.slots[torch.arange(most) < listed[..., None]] >= 0).sum())
        counts.append(np.array([wanted, hits]))
    reference.check_integrity(directory.state)
    return pool_use(counts, evicted)


def layer_pages(traces: Sequence[Trace]) -> list[float]:
    """Pages that a step reads in each layer: mean over steps, all requests and KV heads together."""
    layers = len(traces[0][0])
    steps = len(traces[0])
    return [
        sum(len(head) for trace in traces for step in trace for head in step[layer]) / steps for layer in range(layers)
    ]

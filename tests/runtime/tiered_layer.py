"""Layers as a server drives them, with a device: the requests and tokens of a `ServedLayer`, through the executor."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch

from tests.kernels.served_layer import Request, ServedLayer, Shape, Step
from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.kernels.page_directory.reference import check_integrity
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.kernels.reading.plan import RankedPages, ReadingPlan
from vllm_hybrid_sparse.runtime.both_sides import BothSides, ReadResult
from vllm_hybrid_sparse.runtime.cuda_layer import CudaLayers
from vllm_hybrid_sparse.runtime.decode_rows import DecodeRows
from vllm_hybrid_sparse.runtime.device_batch import DeviceBatch
from vllm_hybrid_sparse.runtime.launch_graphs import Capture
from vllm_hybrid_sparse.runtime.ranking import DeviceRanking
from vllm_hybrid_sparse.runtime.ranking_kernels import RankingKernels
from vllm_hybrid_sparse.runtime.readings import Reading
from vllm_hybrid_sparse.runtime.requests import RequestSlots
from vllm_hybrid_sparse.runtime.residency import Divide, StepResidency
from vllm_hybrid_sparse.runtime.step import TieredLayer
from vllm_hybrid_sparse.runtime.step_rows import RankedRows
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.settings import PAGE_POLICIES
from vllm_hybrid_sparse.values import PAGE_TOKENS, GroupKey


class _RecordingSides(BothSides):
    """Keeps what the last readings of page policies read, in the order of reading."""

    pages: dict[GroupKey, list[int]] = {}  # noqa: RUF012  (replaced, not changed)

    def read(self, step: DecodeRows, readings: Mapping[GroupKey, Reading]) -> ReadResult:
        result = super().read(step, readings)
        self.pages = {group: readings[group].pages[:count].tolist() for group, count in result.pages.items()}
        return result


class _Plans:
    """Keeps the order and the plan of every part of ranked rows that has candidates, until they are asked for."""

    def __init__(self, ranking: DeviceRanking) -> None:
        self._kernels: Any = ranking._kernels
        names = [name for name in vars(RankingKernels) if not name.startswith("_")]
        recording: Any = SimpleNamespace(**{name: getattr(self._kernels, name) for name in names})
        recording.plan_reading = self._plan_reading
        ranking._kernels = recording
        self._made: list[tuple[RankedPages, ReadingPlan]] = []

    def _plan_reading(self, pages: RankedPages, *args: Any, **rule: Any) -> ReadingPlan:
        plan: ReadingPlan = self._kernels.plan_reading(pages, *args, **rule)
        self._made.append((pages, plan))  # reading on changes the plan in place
        return plan

    def take(self, ranked: Sequence[RankedRows], first_page: int) -> dict[tuple[int, int], list[int]]:
        """Candidates read since the last call, in the order of reading, by token of the batch and KV head.

        ranked       all that was attended since then
        first_page   of the candidates
        """
        read = {}
        wanted = [rows for rows in ranked if rows.most_candidates]
        made = self._made[len(self._made) - len(wanted) :]  # before these, those of a warm-up
        for rows, (pages, plan) in zip(wanted, made, strict=True):
            for row, token in enumerate(rows.tokens):
                for head, count in enumerate(plan.counts[row].tolist()):
                    read[token, head] = [first_page + page for page in pages.order[row, head, :count].tolist()]
        self._made.clear()
        return read


class _Executor:
    """Takes the place of the native kernel that a `ServedLayer` calls."""

    def __init__(self, layer: "TieredServedLayer", places: dict[tuple[Any, ...], torch.Tensor]) -> None:
        """Copy what it is given to `places`, which all layers of a model share."""
        self._layer, self._native = layer, layer.tiered_attention
        self.num_kv_heads = layer.shape.num_kv_heads
        self._requests = RequestSlots()
        self._ranked: dict[tuple[int, int], list[int]] = {}  # in the last step, by token and KV head
        self._read: dict[GroupKey, list[int]] = {}  # likewise, of two-tier rows
        self._places = places
        self._starts: list[int] = []  # first token of each of its requests

    def forward(self, query: Any, key: Any, value: Any, kv_cache: Any, batch: Any, *rest: Any) -> None:
        output, *states = rest[2:]
        hgca, fluxion = states
        query_start, seq_lens, block_table, slot_mapping, mask = batch.tensors[:5]
        self._starts = query_start.tolist()
        slots = batch.tensors[5] if hgca is not None or fluxion is not None else None
        if hgca is not None:
            mask = mask.bool() & self._requests.advance(slots, seq_lens, query_start.diff())
        if self._layer.on_cuda is not None:
            tables = [row[row >= 0].tolist() for row in block_table]
            of_block = self._layer.shape.block_tokens
            on_device = DeviceBatch.from_tensors(
                query_start, seq_lens, mask.bool(), tables, of_block, slots, divide=self._layer.divide
            )
            placed = [
                self._placed(name, part) for name, part in (("q", query), ("k", key), ("v", value), ("o", output))
            ]
            self._layer.on_cuda.forward(*placed[:3], kv_cache, on_device, placed[3], *states)
            output.copy_(placed[3])
            self._keep_pages(on_device.ranked)
            if self._layer.looks_back_at_once:
                layer = self._layer.tier.layer_of(kv_cache)
                waiting = [rows.slot for rows in self._layer.on_cuda.prompt_rows.waiting(layer)]
                self._layer.on_cuda.look_back(layer, waiting, *states)
            return
        tiered = TieredBatch.from_tensors(
            query_start, seq_lens, block_table, slot_mapping, mask, slots, divide=self._layer.divide
        )
        self._layer.tiered.forward(query, key, value, kv_cache, tiered, output, *states)
        self._keep_pages(tiered.ranked)

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the same place as the last one of this shape, like tensors between a model's captured graphs.

        Whichever layer that was of: a layer's tensors may lie where another's did, and tell nobody which layer it is.
        """
        place = self._places.setdefault((name, *tensor.shape), torch.empty_like(tensor))
        return place.copy_(tensor)

    def _keep_pages(self, ranked: Sequence[RankedRows]) -> None:
        """Copy what the layer read, before the next layer overwrites it."""
        self._read = self._layer.sides.pages
        plans, sink_tokens = self._layer.plans, self._layer.tier.settings.retained.sink_tokens
        self._ranked = {} if plans is None else plans.take(ranked, sink_tokens // PAGE_TOKENS)

    def _is_resident(self, request: int) -> bool:
        divided = self._layer.divided
        decodes = [index for index, decodes in enumerate(self._layer.last_mask) if decodes]
        return divided is not None and bool(divided.resident[decodes.index(request)])

    def _row(self, request: int) -> int:
        decodes = [index for index, decodes in enumerate(self._layer.last_mask) if decodes]
        return [index for index in decodes if not self._is_resident(index)].index(request)

    def last_plan(self, request: int, kv_head: int) -> list[int]:
        settings = self._layer.tier.settings
        ranked = self._layer.tier.ranking is not None
        if self._is_resident(request) or (ranked and settings.policy == "dense"):
            tokens = self._layer.last_lengths[request]
            return list(range(*settings.retained.candidate_range(tokens)))
        if ranked:
            return self._ranked.get((self._starts[request], kv_head), [])
        if self._layer.fluxion is not None:
            return self._native.last_plan(self._row(request), kv_head)
        return self._read[GroupKey(self._row(request), kv_head)]

    def last_features(self, request: int, kv_head: int) -> torch.Tensor:
        return self._native.last_features(self._row(request), kv_head)

    def last_budgets(self, request: int, kv_head: int) -> tuple[int, list[int]]:
        return self._native.last_budgets(self._row(request), kv_head)


class TieredServedLayer(ServedLayer):
    """One layer of a device tier. `check_step` of the kernel tests takes it as it takes a `ServedLayer`."""

    tier: DeviceTier
    tiered: TieredLayer
    tiered_attention: NativeAttention  # one for all layers
    sides: _RecordingSides
    plans: _Plans | None  # one for all layers
    on_cuda: CudaLayers | None = None
    looks_back_at_once = True  # so states include the step's last tokens; otherwise the next decode step does it
    last_mask: list[bool]
    last_lengths: list[int]
    divide: Divide | None = None  # of a step, the same for all layers
    divided: StepResidency | None = None  # its answer

    def batch(
        self, requests: Sequence[Request], query_lens: Sequence[int], decode_mask: Sequence[bool], slots: Sequence[int]
    ) -> NativeBatch:
        self.last_mask = list(decode_mask)
        self.last_lengths = [len(request.key) for request in requests]
        return super().batch(requests, query_lens, decode_mask, slots)


class TieredModel:
    """Some layers over one device tier; closing it checks that nothing is left."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        shape: Shape | None = None,
        layers: int = 1,
        num_blocks: int = 40,
        capture: Capture | None = None,
    ) -> None:
        """With `device: cuda` in the settings the kernels run interpreted, over slots in CPU memory.

        capture   captures the layers' launches; must work over tensors in CPU memory
        """
        self._started = 0
        self.divided: StepResidency | None = None  # in the last step
        defaults: dict[str, Any] = {"device": "emulated"}
        if settings.get("policy", "progressive") in PAGE_POLICIES:
            defaults |= {"device_resident_share": 0.0, "device_ranking": "host"}  # whatever the device's own defaults
        self.config = HybridSparseConfig.from_mapping({**defaults, **settings})
        device = torch.device("cpu") if self.config.device == "cuda" else None
        shape = shape or Shape()
        if shape.summary != "split_codes":
            shape = replace(shape, summary=self.config.summary or "none")
        self.layers = [
            TieredServedLayer(
                shape, num_blocks=num_blocks, seed=0, salience=self.config.salience, retained=self.config.retained
            )
            for _ in range(layers)
        ]
        # From here on each layer draws its own numbers, so that a layer that is taken for another is noticed. The free
        # blocks are drawn already: a request has the same blocks in all layers.
        for index, layer in enumerate(self.layers[1:], start=1):
            layer.generator.manual_seed(index)
        kernel = self.layers[0].attention
        self.tier = DeviceTier(self.config, [layer.kv_cache for layer in self.layers], kernel, device=device)
        self.tier.pool.key.fill_(torch.nan)
        self.tier.pool.value.fill_(torch.nan)
        kv_caches = [layer.kv_cache for layer in self.layers]
        on_cuda = CudaLayers(self.tier, kernel, kv_caches, capture) if device else None
        plans = None if self.tier.ranking is None else _Plans(self.tier.ranking)
        places: dict[tuple[Any, ...], torch.Tensor] = {}
        for layer in self.layers:
            layer.tier, layer.on_cuda, layer.tiered_attention = self.tier, on_cuda, kernel
            layer.tiered = on_cuda.tiered if on_cuda else TieredLayer(self.tier, kernel)
            pages = layer.tiered._pages
            if not isinstance(pages._sides, _RecordingSides):  # on a GPU all layers have the same
                pages._sides = _RecordingSides(self.tier, pages._host)
            layer.plans, layer.sides = plans, pages._sides
            layer.attention = _Executor(layer, places)  # type: ignore[assignment]

    def start(self) -> list[Request]:
        """One request, as each layer sees it, with a slot of its own."""
        self._started += 1
        requests = [layer.start() for layer in self.layers]
        for request in requests:
            request.slot = self._started - 1
        return requests

    def _divide_once(self) -> Divide:
        """Like a server, divide a step once. Here every layer asks, must ask the same, and gets the first answer."""
        asked: list[tuple[list[Any], StepResidency | None]] = []

        def divide(*step: Any) -> StepResidency | None:
            tokens, tables, seq_lens, written = step
            question = [list(tokens), [table[table >= 0].tolist() for table in tables], list(seq_lens), list(written)]
            if not asked:
                asked.append((question, self.tier.divide(*step)))
                self.divided = asked[0][1]
                for layer in self.layers:
                    layer.divided = self.divided
            assert question == asked[0][0], "the layers' requests have the same blocks"
            return asked[0][1]

        return divide

    def step(self, rows: Sequence[tuple[list[Request], int]], **options: Any) -> list[Step]:
        """Run one step of all layers; afterwards nothing is pinned."""
        divide = self._divide_once()
        for layer in self.layers:
            layer.divide, layer.divided = divide, None
        steps = [
            layer.step(
                [(request[index], tokens) for request, tokens in rows],
                selection=self.config.selection,
                retained=self.config.retained,
                **options,
            )
            for index, layer in enumerate(self.layers)
        ]
        for layer in self.layers:
            layer.divide = None
        self.settle()
        return steps

    def settle(self) -> None:
        """Wait for the loader; the pool must be sound and nothing in use."""
        self.tier.loader.settled().result(timeout=10)
        self.tier.pool.check_integrity()
        assert self.tier.pool.pinned_pages == 0
        if self.tier.ranking is not None:
            check_integrity(self.tier.ranking.directory.state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

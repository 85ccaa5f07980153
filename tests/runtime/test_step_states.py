"""Random lives of requests on two tiers, loads that fail among them: each decoded row attends to its own tokens."""

from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.kernels.served_layer import Request, Shape
from tests.kernels.step_checks import check_step
from tests.memory.pages import named
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.values import PAGE_TOKENS

LAYERS, BLOCKS, BLOCK_TOKENS = 2, 14, 32
SETTINGS = (
    {"policy": "dense", "device_pool_pages": 32},
    {"policy": "dense", "device_pool_pages": 90, "device_pool": "per_layer", "device_eviction": "fifo"},
    {"policy": "dense", "device_pool_pages": 50, "device_eviction": "lru", "host_share": "length"},
    {"policy": "topk", "topk_pages": 3, "summary": "minmax", "device_pool_pages": 40, "host_share": "queue"},
    {"policy": "progressive", "threshold": 1.0, "microbatch_pages": 2, "device_pool_pages": 8, "host_share": "uniform"},
    {"policy": "dense", "device_pool_pages": 88, "device_resident_share": 0.28},  # three frames of eight slots
)


class StepStates(RuleBasedStateMachine):
    """Requests are prefilled, decoded side by side, forked at a block, and end; their blocks are used again."""

    @initialize(chosen=st.sampled_from(SETTINGS))
    def begin(self, chosen: dict[str, object]) -> None:
        retained = {"sink_tokens": 16, "window_tokens": 32}
        shape = Shape(head_dim=16, block_tokens=BLOCK_TOKENS)
        self.model = TieredModel({**retained, **chosen}, shape=shape, layers=LAYERS, num_blocks=BLOCKS)
        self.requests: list[list[Request]] = []
        self.broken: set[tuple[int, int]] = set()  # blocks of a layer that the loader cannot read
        read = HostPages.read

        def failing(pages: HostPages, numbers: Any) -> Any:
            if self.broken & {(key.layer, key.page * PAGE_TOKENS // BLOCK_TOKENS) for key in named(numbers)}:
                raise OSError("uncorrectable memory error")
            return read(pages, numbers)

        self.loading = patch.object(HostPages, "read", failing)
        self.loading.start()

    @property
    def free_tokens(self) -> int:
        return BLOCK_TOKENS * min(len(layer.free_blocks) for layer in self.model.layers)

    @precondition(lambda self: self.free_tokens)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Prefill a request in one chunk or two."""
        tokens = data.draw(st.integers(1, min(200, self.free_tokens)))
        request = self.model.start()
        self.requests.append(request)
        first = data.draw(st.integers(1, tokens))
        for chunk in filter(None, (first, tokens - first)):
            for layer, step in zip(self.model.layers, self.model.step([(request, chunk)], decode=False), strict=True):
                check_step(layer, step)

    @precondition(lambda self: self.requests and self.free_tokens >= BLOCK_TOKENS * len(self.requests))
    @rule(data=st.data(), steps=st.integers(1, 3))
    def decode(self, data: st.DataObject, steps: int) -> None:
        """A few tokens of some requests."""
        rows = data.draw(st.lists(st.sampled_from(range(len(self.requests))), min_size=1, unique=True))
        for _ in range(steps):
            for layer, step in zip(
                self.model.layers, self.model.step([(self.requests[row], 1) for row in rows]), strict=True
            ):
                check_step(layer, step)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another request that begins with the whole blocks of one."""
        source = data.draw(st.sampled_from(self.requests))
        blocks = len(source[0].key) // BLOCK_TOKENS
        if blocks:
            end = blocks * BLOCK_TOKENS
            self.requests.append([Request(of.key[:end], of.value[:end], of.blocks[:blocks]) for of in source])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request finishes, is aborted or preempted: blocks that no other has are the next to be used."""
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        for index, layer in enumerate(self.model.layers):
            shared = {block for other in self.requests for block in other[index].blocks}
            layer.free_blocks[:0] = [block for block in request[index].blocks if block not in shared]

    @rule(layer=st.integers(0, LAYERS - 1), block=st.integers(0, BLOCKS - 1))
    def fail(self, layer: int, block: int) -> None:
        """A block cannot be read any more, or can again."""
        self.broken ^= {(layer, block)}

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.loading.stop()
            self.model.settle()
            self.model.tier.close()


TestStepStates = StepStates.TestCase
TestStepStates.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)

"""Pages of the host store that no device can load."""

from collections.abc import Collection
from typing import Any

import pytest

from tests.memory.pages import named
from tests.runtime.tiered_layer import TieredModel
from vllm_hybrid_sparse.memory.host_pages import HostPages


def break_pages(model: TieredModel, pages: Collection[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every load fail that asks for one of the pages, given as (KV head, page)."""

    def check(numbers: Any) -> None:
        if any((key.kv_head, key.page) in pages for key in named(numbers)):
            raise OSError("uncorrectable memory error")

    if model.config.device == "cuda":
        fill = model.tier.pool.fill

        def failing_fill(slots: Any, source: Any, numbers: Any) -> None:
            check(numbers)
            fill(slots, source, numbers)

        monkeypatch.setattr(model.tier.pool, "fill", failing_fill)
        return
    read = HostPages.read

    def failing_read(self: HostPages, numbers: Any) -> Any:
        check(numbers)
        return read(self, numbers)

    monkeypatch.setattr(HostPages, "read", failing_read)

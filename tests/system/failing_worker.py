"""A worker whose loader cannot read one page, for `--worker-cls`: how an error passes through a real server."""

from typing import Any

from vllm_hybrid_sparse.glue.cpu_worker import HybridSparseCPUWorker
from vllm_hybrid_sparse.memory.host_pages import HostPages

REASON = "uncorrectable memory error"


class FailingLoads(HybridSparseCPUWorker):
    """The first page that the loader is asked for can never be copied to the device, whichever request has it."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Break the loader once the KV memory is there."""
        super().initialize_from_config(kv_cache_config)
        read = HostPages.read
        broken: list[int] = []

        def failing(pages: HostPages, numbers: Any) -> Any:
            asked = numbers.tolist()
            broken.extend(asked[: not broken])
            if broken[0] in asked:
                raise OSError(REASON)
            return read(pages, numbers)

        HostPages.read = failing  # type: ignore[method-assign]

"""Carries a worker's figures of a step to the API server that counts them.

vLLM carries statistics from a worker to the scheduler with the output of a step, and from there to exactly one API
server with the scheduler's statistics of that step. On this way two fields, both meant for connectors, take any
dictionary. We use the encoder cache connector's, since text models have no such connector. A report holds the
*difference* to the report before. So counters are right in sum, whichever of several API servers adds a report. The
logger that takes the report off (`stat_logger.py`) stands before vLLM's own, which see the field as it was without us.
On the way the scheduler looks up how large the device pool is (`scheduler.py`).

With tensor or pipeline parallelism vLLM reads the output of one worker, so the figures are those of its heads and
layers.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

from vllm_hybrid_sparse.metrics import DecodeStats, TierStats

_KEY = "hybrid_sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker reports with one step."""

    decode: DecodeStats  # since its last report
    tiers: TierStats | None = None  # likewise; None without a device
    host_kv_bytes: int  # of host memory for the KV cache
    packed_bytes: int  # of HGCA's packed copies
    isa: str  # instruction set of the kernels
    threads: int
    thread_pool: str  # own or openmp
    # Slots that the device pool has for each layer, of the worker that has the fewest. None: there is no pool, or the
    # settings say how large it is.
    layer_pages: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)  # by kind, since its last report

    def attach(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The step's output, or a copy of it, with the report; not possible with an encoder cache connector."""
        assert output.ec_connector_output is None
        carrier = ECConnectorOutput(ec_connector_stats=ECConnectorStats(data={_KEY: asdict(self)}))
        return ModelRunnerOutput.with_ec_conn_output(output, carrier)


def reported_layer_pages(output: ModelRunnerOutput) -> int | None:
    """`layer_pages` of the report on a step's output; None if it has no report. The report stays on the output."""
    carrier = output.ec_connector_output
    carried = carrier.ec_connector_stats if carrier is not None else None
    report = carried.data.get(_KEY) if carried is not None else None
    return None if report is None else report["layer_pages"]


def take_report(scheduler_stats: Any) -> WorkerReport | None:
    """Take the report off vLLM's SchedulerStats and return it; None if there is none."""
    carried = scheduler_stats.ec_connector_stats if scheduler_stats is not None else None
    if not carried or _KEY not in carried:
        return None
    scheduler_stats.ec_connector_stats = None
    report: dict[str, Any] = carried[_KEY]
    tiers = report["tiers"]
    sums = {"decode": DecodeStats(**report["decode"]), "tiers": None if tiers is None else TierStats(**tiers)}
    return WorkerReport(**{**report, **sums})

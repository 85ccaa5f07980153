"""How a worker's figures of a step reach the API server that counts them.

vLLM carries statistics from its workers to its API servers: on the worker's output of a step to the scheduler, and
on the scheduler's statistics of that step to exactly one API server. Two fields on that way take any dictionary,
both meant for connectors; the encoder cache connector's is used, since text models have none. What rides there is
the *difference* to the step before: counters that any of several API servers adds it to are right in sum. The
logger that takes it off (`stat_logger.py`) stands before vLLM's own, which see the field as it was without us.

With tensor or pipeline parallelism vLLM reads the output of one worker, so the figures are those of its heads and
layers.
"""

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput, ModelRunnerOutput

from vllm_hybrid_sparse.metrics import DecodeStats, TierStats

_KEY = "hybrid_sparse"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker says with one step."""

    decode: DecodeStats  # since its last report
    tiers: TierStats | None = None  # likewise; None without a device
    host_kv_bytes: int  # that hold the KV cache
    packed_bytes: int  # that HGCA's packed copies hold
    isa: str  # instruction set of the kernels
    threads: int
    thread_pool: str  # own or openmp

    def attach(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """The step's output, or a copy of it, with the report; not beside an encoder cache connector."""
        assert output.ec_connector_output is None
        carrier = ECConnectorOutput(ec_connector_stats=ECConnectorStats(data={_KEY: asdict(self)}))
        return ModelRunnerOutput.with_ec_conn_output(output, carrier)


def take_report(scheduler_stats: Any) -> WorkerReport | None:
    """The report on vLLM's SchedulerStats, taken off them; None where there is none."""
    carried = scheduler_stats.ec_connector_stats if scheduler_stats is not None else None
    if not carried or _KEY not in carried:
        return None
    scheduler_stats.ec_connector_stats = None
    report: dict[str, Any] = carried[_KEY]
    tiers = report["tiers"]
    sums = {"decode": DecodeStats(**report["decode"]), "tiers": None if tiers is None else TierStats(**tiers)}
    return WorkerReport(**{**report, **sums})

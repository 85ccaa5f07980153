"""What is measured: contexts, policies, thread settings, and the bars of the project's first milestone."""

from dataclasses import dataclass, field

# Settings of our backend by the name of the column.
POLICIES: dict[str, dict[str, object]] = {
    "topk": {"policy": "topk", "topk_ratio": 0.05},
    "progressive": {"policy": "progressive", "threshold": 0.95},
    "dense": {"policy": "dense"},
    "default": {},
}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one length at the same time."""

    name: str
    context_tokens: int
    requests: int = 1
    filled: bool = False  # the KV comes from vLLM's DecodeBenchConnector instead of a prefill
    # Stock vLLM on two cores takes 16 ms bound to one and 17 to both at 1K, 35 and 28 at 8K; above, both win clearly.
    threads: tuple[str, ...] = ("all",)
    topk_bar: float | None = None  # least ratio of stock's time per output token to ours
    progressive_bar: float | None = None
    dense_bar: float | None = 1.0
    rounds: int = 3
    fresh: bool = True  # every round computes prompts of its own; else they repeat and hit the prefix cache

    @property
    def model_tokens(self) -> int:
        """Positions that the server must allow; cases with the same number share servers."""
        return {1024: 2048, 8192: 9216}.get(self.context_tokens, 131072 + 1024 if self.filled else 33792)

    def bar(self, policy: str) -> float | None:
        """Return the least ratio that the policy must reach; None if there is no bar."""
        if self.context_tokens <= 1024:
            return 1 / 1.05
        return {"topk": self.topk_bar, "progressive": self.progressive_bar, "dense": self.dense_bar}.get(policy)


TTFT_BAR = 1 / 1.05

CASES = (
    Case("1Kx1", 1024, threads=("all", "default"), rounds=5),
    Case("8Kx1", 8192, topk_bar=1.45, progressive_bar=1.25),
    Case("8Kx4", 8192, requests=4, topk_bar=2.2, rounds=4, fresh=False),
    Case("32Kx1", 32768, filled=True, topk_bar=2.7),
    Case("128Kx1", 131072, filled=True, topk_bar=5.0),
)
FULL_CASES = (Case("32Kx1-prefill", 32768, topk_bar=2.7, progressive_bar=2.0, rounds=1),)


@dataclass(slots=True)
class Samples:
    """The samples of one side in one case with one thread setting, all rounds together."""

    tpot_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)


def select_cases(names: str, full: bool) -> list[Case]:
    """Return the cases of a comma-separated list, all if it is empty; ValueError for an unknown name."""
    known = {case.name: case for case in (*CASES, *FULL_CASES)}
    if not names:
        return [*CASES, *(FULL_CASES if full else ())]
    unknown = set(names.split(",")) - set(known)
    if unknown:
        raise ValueError(f"cases={','.join(sorted(unknown))}: must be among {', '.join(known)}")
    return [known[name] for name in names.split(",")]

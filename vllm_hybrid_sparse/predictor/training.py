"""Training of the predictor and its validation on prompts that it has not seen (Fluxion, section 5.2)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.policy.budget import GRANULARITIES
from vllm_hybrid_sparse.predictor.labels import fit_growth, is_streaming
from vllm_hybrid_sparse.predictor.model import Predictor
from vllm_hybrid_sparse.predictor.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How the predictor is trained."""

    epochs: int = 40  # >= 1
    batch_heads: int = 1024  # samples per optimiser step; >= 1
    learning_rate: float = 2e-3  # at the start, falling to 0 by a cosine; > 0
    weight_decay: float = 1e-3  # AdamW's; >= 0
    quantile: float = 0.9  # how often a budget must suffice, including 0 for a streaming head; in (0, 1)
    validation_share: float = 0.2  # of the prompts, in (0, 1); at least one, and one is left to train on
    seed: int = 0

    def __post_init__(self) -> None:
        for name, legal, rule in (
            ("epochs", self.epochs >= 1, "1 or more"),
            ("batch_heads", self.batch_heads >= 1, "1 or more"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("quantile", 0 < self.quantile < 1, "above 0 and below 1"),
            ("validation_share", 0 < self.validation_share < 1, "above 0 and below 1"),
        ):
            if not legal:
                raise ConfigError(f"{name}={getattr(self, name)}: must be {rule}")


def split_prompts(sources: Sequence[str], config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Indices of the prompts to train on and to validate on, drawn by the seed from each source separately.

    sources   the text that each prompt comes from. A source with one prompt is for training, but if all sources have
              only one, the last prompt is for validation
    raises    ConfigError for fewer than two prompts
    """
    if len(sources) < 2:
        raise ConfigError(f"prompts={len(sources)}: must be 2 or more, one of which is held out")
    generator = torch.Generator().manual_seed(config.seed)
    held_out: list[int] = []
    for source in sorted(set(sources)):
        prompts = [index for index, name in enumerate(sources) if name == source]
        count = min(max(1, round(config.validation_share * len(prompts))), len(prompts) - 1)
        held_out += [prompts[index] for index in torch.randperm(len(prompts), generator=generator)[:count].tolist()]
    held_out = held_out or [len(sources) - 1]
    return sorted(set(range(len(sources))) - set(held_out)), sorted(held_out)


def train(prompts: Sequence[Samples], config: TrainingConfig, report: Callable[[int, float], None]) -> Predictor:
    """Fit a predictor to the samples; the same for the same samples, settings, torch and number of threads.

    The paper says "regression objectives" for bgt_0 and k. Here the two are trained for their purpose: their loss is
    the pinball loss, over the retrieval heads, of the budgets that eq. 1 gives at the granularities that the selector
    chooses from. Its quantile says how often such a budget must suffice. (Separate quantiles of bgt_0 and k would add
    up to more than the quantile of their budgets, and a line through the budget at one token fits the others worse.) So
    bgt_0 is where the line meets blk = 1, not a budget to use. The loss for s is the cross entropy over all heads. A
    head counts as streaming if its probability of that is at least the quantile.

    prompts   at least one, with a retrieval head among them, otherwise ConfigError
    report    is told each epoch, from 1, and its mean loss
    """
    samples = Samples.joined(list(prompts))
    features = torch.from_numpy(samples.features).flatten(0, 2)
    budgets = torch.from_numpy(samples.budgets).flatten(0, 2)
    streaming = is_streaming(budgets)
    properties = torch.stack((budgets[:, 0], fit_growth(budgets)), dim=1)
    if bool(streaming.all()):
        raise ConfigError(
            f"retrieval heads=0 of {len(streaming)}: must be 1 or more; longer windows or a smaller tau help"
        )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        predictor = Predictor()
    predictor.feature_mean.copy_(features.mean(dim=0))
    predictor.feature_std.copy_(_deviation(features))
    predictor.target_mean.copy_(properties[~streaming].mean(dim=0))
    predictor.target_std.copy_(_deviation(properties[~streaming]))
    targets, log_blk = budgets[:, 1:], torch.tensor(GRANULARITIES, dtype=budgets.dtype).log2()
    deviation = _deviation(targets[~streaming])

    steps = config.epochs * math.ceil(len(features) / config.batch_heads)
    optimizer = torch.optim.AdamW(predictor.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(config.seed)
    for epoch in range(1, config.epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(features), generator=generator).split(config.batch_heads):
            outputs = predictor(features[batch])
            base_budget, growth = predictor.line(outputs).split(1, dim=1)
            short = (targets[batch] - base_budget - growth * log_blk) / deviation
            loss = _loss(short, outputs[:, 2], streaming[batch], config.quantile)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch)
        report(epoch, total / len(features))
    with torch.no_grad():
        predictor.outputs.bias[2] -= math.log(config.quantile / (1 - config.quantile))
    return predictor.eval()


def _deviation(values: Tensor) -> Tensor:
    """The standard deviation of each column; 1 for a column of equal values, so that these standardise to 0."""
    deviation = values.std(dim=0, correction=0)
    return torch.where(deviation > 1e-6 * values.abs().amax(dim=0), deviation, 1.0)


def _loss(short: Tensor, logits: Tensor, streaming: Tensor, quantile: float) -> Tensor:
    """The loss of a batch.

    short       [heads, granularities]   what the predicted budgets lack, in standard deviations
    logits      [heads]                  of s
    streaming   [heads] bool             whether the labels call the head streaming
    """
    pinball = torch.maximum(quantile * short, (quantile - 1) * short)[~streaming].mean(dim=1)
    return pinball.sum() / max(len(pinball), 1) + functional.binary_cross_entropy_with_logits(
        logits, streaming.to(logits.dtype)
    )

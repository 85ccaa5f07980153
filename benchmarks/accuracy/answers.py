"""One dense prefill, and answers decoded from it by as many selections as wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.accuracy.kept_mass import KeptMass
from benchmarks.accuracy.roomy_cache import roomy_cache
from benchmarks.accuracy.selections import FULL, PROMISE, Decoding, open_decoding, retained_of
from benchmarks.accuracy.step_batches import in_batches
from vllm_hybrid_sparse.metrics import DecodeStats
from vllm_hybrid_sparse.values import PAGE_TOKENS


class Prefill:
    """The keys and values of a text except its last token, which every selection decodes itself."""

    def __init__(
        self, model: PreTrainedModel, token_ids: Tensor, *, new_tokens: int, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Compute them with exact attention by the shipped kernels.

        token_ids    [tokens] int64, at least two
        new_tokens   room for what is decoded
        kv_dtype     of the kernels' KV cache; None: the model's
        """
        self.model = model
        self.kv_dtype = kv_dtype
        self._token_ids = token_ids[:-1]
        self.last_token = int(token_ids[-1])
        self.tokens = len(token_ids) - 1
        self.max_tokens = self.tokens + 1 + new_tokens
        self._cache = roomy_cache(model.config.num_hidden_layers, self.max_tokens)
        with open_decoding(model, FULL, max_tokens=self.max_tokens, kv_dtype=kv_dtype), torch.inference_mode():
            model(token_ids[None, :-1], past_key_values=self._cache, logits_to_keep=1)

    @torch.inference_mode()
    def rewind(self, decoding: Decoding, fed: Sequence[int] = ()) -> None:
        """Forget all but the prefill and the tokens `fed` since (`last_token` first); `decoding` goes on from there.

        If it keeps state in addition to the cache, the prefill's last rows and `fed` are computed again.
        """
        kept = self.tokens + len(fed)
        if decoding.keeps_request_state:
            kept = max(0, self.tokens - PAGE_TOKENS)
        excess = self._cache.get_seq_length() - kept
        if excess > 0:
            self._cache.crop(-excess)
        decoding.adopt()
        if decoding.keeps_request_state:
            self.model(self._token_ids[None, kept:], past_key_values=self._cache, logits_to_keep=1)
            if fed:
                self.follow(decoding, fed)

    @torch.inference_mode()
    def follow(self, decoding: Decoding, tokens: Sequence[int]) -> Tensor:
        """Decode these tokens, whatever the model says: logits [tokens, vocabulary] after each of them."""
        with decoding.row_by_row():
            logits: Tensor = self.model(torch.tensor([list(tokens)]), past_key_values=self._cache).logits[0].float()
        return logits

    @torch.inference_mode()
    def feed(self, token: int) -> Tensor:
        """One decode step: logits [vocabulary] after that token."""
        logits: Tensor = self.model(torch.tensor([[token]]), past_key_values=self._cache).logits[0, -1].float()
        return logits


@dataclass(frozen=True, slots=True)
class Answer:
    """What a selection answered, and how far it agrees with full attention's answer."""

    token_ids: list[int]  # decoded greedily, an end-of-sequence token included
    along: list[int]  # the most likely token at every place of full attention's answer, when that answer is fed
    stats: DecodeStats  # of the steps along that answer
    record: KeptMass  # likewise

    def agreement(self, full: Sequence[int]) -> dict[str, float]:
        """Shares of full attention's answer: tokens that agree if it is fed, and those before the first difference."""
        same = [ours == theirs for ours, theirs in zip(self.along, full, strict=True)]
        before = same.index(False) if False in same else len(same)
        return {
            "top1_agreement": sum(same) / len(same),
            "equal_before_difference": before / len(same),
            "exactly_equal": float(before == len(same)),
        }


def answer(prefill: Prefill, selection: str, full: Sequence[int] | None, limit: int, stops: set[int]) -> Answer:
    """Answer greedily, in at most `limit` tokens, ending with an end of sequence (`stops`) if one comes.

    full   full attention's answer, which is fed first: up to the first difference both ways of decoding are the same.
           None: this is full attention
    """
    record = KeptMass(retained_of(selection), PROMISE)
    with (
        in_batches(record.watch) as watch,
        open_decoding(prefill.model, selection, max_tokens=prefill.max_tokens, watch=watch) as decoding,
    ):
        prefill.rewind(decoding)
        if full is None:
            along = _go_on(prefill, [], limit, stops)
        else:
            along = prefill.follow(decoding, [prefill.last_token, *full[:-1]]).argmax(dim=-1).tolist()
        stats = decoding.take_stats()
    own = _until_difference(along, full or along)
    if own != list(full or along) and own[-1] not in stops and len(own) < limit:
        with open_decoding(prefill.model, selection, max_tokens=prefill.max_tokens) as decoding:
            prefill.rewind(decoding, fed=[prefill.last_token, *own[:-1]])
            own = _go_on(prefill, own, limit, stops)
    return Answer(own, along, stats, record)


def _go_on(prefill: Prefill, said: Sequence[int], limit: int, stops: set[int]) -> list[int]:
    """`said` and what greedily follows it, at most `limit` tokens, ending with a stop if one comes."""
    own = list(said)
    while len(own) < limit and not (own and own[-1] in stops):
        own.append(int(prefill.feed(own[-1] if own else prefill.last_token).argmax()))
    return own


def _until_difference(ours: list[int], theirs: Sequence[int]) -> list[int]:
    """Ours up to and including the first token that differs from theirs."""
    for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            return ours[: place + 1]
    return list(ours)

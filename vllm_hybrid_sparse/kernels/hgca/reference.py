"""HGCA (section 3) for one request and one KV head, with the line numbers of its Algorithms 1 (KV manager) and 2.

The dense window ("GPU" in the paper) is the retained set: the sink and the recent window, in pages of 16 tokens. The
oldest page of the recent window leaves first. The tokens between the two are the host side ("CPU"). An entry is one
token of one KV head.

Where the paper leaves a choice, this is ours:

- Salience is judged by query head, but the heads of a group share keys and values, so they share the packed entries:
  an entry that is salient to one is attended by all ("neighbouring heads merged with padding", section 3.3). Merging
  heads of different KV heads would join entries of different memory and only save tasks, which the thread pool shares
  out anyway.
- Salience on eviction compares the average with β / n. n is the number of entries whose weights the average is made
  of: those of the dense window before the eviction.
- The averages of evicted entries are used only to decide whether they are salient. Renormalising them (section 3.2.2)
  would change no output, since attention over the packed entries computes its own softmax.
- Re-evaluation happens whenever rows are appended, the prompt's first rows included. A_cpu is the mean over the
  latest appended rows: those of the sequence's last page (1 to 16), in however many calls they came. All of them see
  the whole host side, and a prefix cache, which holds whole blocks, never has them. The averages of the window begin
  again with the mean of the same rows' weights. So the state after a prompt depends on its tokens alone, not on how it
  was cut into chunks or on what was cached.
- Eviction, packing and re-evaluation are done within the step's call, by the threads that also attend (`csrc/hgca.cpp`,
  `csrc/reevaluate.cpp`). In the paper "async" threads do them beside the GPU (Algorithm 1, section 3.2.2). Here a row
  attends after its evictions are packed, so it never depends on how far another thread is.
- The sink belongs to the dense window. It is attended densely, never leaves, and counts in n and in the softmax of the
  weights that are averaged. The paper's window holds recent tokens alone.
- A decoded token's average begins at 0, so its first weight counts α. The paper does not say how an average begins.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.merge.reference import merge_states
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet, SalienceSpec


@dataclass(slots=True)
class HgcaHead:
    """The state of one KV head of one request, and the operations on it. All tensors inside are f64.

    averages   [group, tokens]  A_maw of every entry of the dense window, by position; 0 elsewhere
    salient    positions in the order they were packed (KV_ctx)
    judges     [rows, group, head_dim]   the queries of the rows that judge, kept until a token is decoded
    judged     for every entry judged last, its largest weight divided by the limit: salient above 1
    """

    salience: SalienceSpec
    retained: RetainedSet
    scale: float
    averages: Tensor = field(default_factory=lambda: torch.empty(0, 0))
    judges: Tensor = field(default_factory=lambda: torch.empty(0))
    salient: list[int] = field(default_factory=list)
    judged: dict[int, float] = field(default_factory=dict)

    def host_range(self, tokens: int) -> tuple[int, int]:
        """The first position of the host side, and the one behind its last; equal if it is empty."""
        first_page, end_page = self.retained.candidate_range(tokens)
        return min(PAGE_TOKENS * first_page, tokens), min(PAGE_TOKENS * end_page, tokens)

    def window(self, tokens: int) -> Tensor:
        """Positions of the entries of the dense window."""
        begin, end = self.host_range(tokens)
        return torch.tensor([*range(begin), *range(end, tokens)], dtype=torch.long)

    def append(self, query: Tensor, key: Tensor) -> None:
        """Re-evaluate after rows were appended (Algorithm 1, lines 19 to 22).

        query   [rows, group, head_dim]   the rows appended
        key     [tokens, head_dim]        keys of the sequence, those of the rows included
        """
        tokens = len(key)
        appended = torch.cat((self.judges, query.double())) if len(self.judges) else query.double()
        self.judges = judges = appended[-min(len(appended), (tokens - 1) % PAGE_TOKENS + 1) :]
        begin, end = self.host_range(tokens)
        scores = self.scale * torch.einsum("rgd,td->rgt", judges, key.double())
        host_weights = scores[..., begin:end].softmax(-1).mean(0)  # A_cpu
        self.salient = []
        self._judge(host_weights, range(begin, end), end - begin)  # lines 20 and 21
        window = self.window(tokens)
        self.averages = torch.zeros(query.shape[1], tokens, dtype=torch.float64)
        for row, of_row in enumerate(scores):
            seen = window[window <= tokens - len(judges) + row]
            self.averages[:, seen] += of_row[:, seen].softmax(-1) / len(judges)

    def decode(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with the latest token.

        query        [group, head_dim]
        key, value   [tokens, head_dim]   its own included
        returns      [group, head_dim]    f64
        """
        tokens, alpha = len(key), self.salience.alpha
        self.judges = torch.empty(0)
        self.evict(tokens)
        window = self.window(tokens)
        weights, out, lse = self._attend(query, key, value, window)  # Algorithm 2, line 10
        packed = torch.tensor(self.salient, dtype=torch.long)
        _, packed_out, packed_lse = self._attend(query, key, value, packed)  # Algorithm 2, line 12
        entering = torch.zeros(len(query), tokens - self.averages.shape[1], dtype=torch.float64)
        self.averages = torch.cat((self.averages.reshape(len(query), self.averages.shape[1]), entering), dim=1)
        self.averages[:, window] = (1 - alpha) * self.averages[:, window] + alpha * weights  # Algorithm 1, line 8
        merged, _ = merge_states(out, lse, packed_out, packed_lse)
        return merged

    def evict(self, tokens: int) -> None:
        """Judge what leaves the window before a sequence of `tokens` is attended (Algorithm 1, lines 10-14, 23-25)."""
        before = tokens - 1
        sink = self.host_range(tokens)[0]
        leaving = range(max(sink, self.host_range(before)[1]), self.host_range(tokens)[1])
        self._judge(self.averages[:, leaving.start : leaving.stop], leaving, len(self.window(before)))
        self.averages[:, leaving.start : leaving.stop] = 0

    def _judge(self, weights: Tensor, positions: range, entries: int) -> None:
        """Pack the entries at `positions` that some head of the group weighs above β / entries."""
        ratios = (weights * entries / self.salience.beta).amax(0) if len(positions) else torch.empty(0)
        self.judged = dict(zip(positions, ratios.tolist(), strict=True))
        self.salient += [position for position, ratio in self.judged.items() if ratio > 1]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, output and log-sum-exp over some entries; output zeros and -inf if there are none."""
        scores = self.scale * query.double() @ key[positions].double().T
        weights = scores.softmax(-1) if len(positions) else scores
        return weights, weights @ value[positions].double(), scores.logsumexp(-1)

"""Credits part of the weight of the unread candidates to those that were read."""

from torch import Tensor

_MOST_LOG_RATIO = 60.0
"""Log ratio of two weights above which it no longer matters how much larger one is."""

_LEAST_SHARE = 1e-5
"""Share of the candidates in what was read below which the difference of the two states is only rounding."""

_LEAST_SHARE_OF_LOG = 2e-6
"""The same for each unit of the log-sum-exp, of which float32 keeps all but 6e-8: large ones hide more."""


def attribute_unread(
    out: Tensor, lse: Tensor, retained_out: Tensor, retained_lse: Tensor, log_unread: Tensor, share: float
) -> Tensor:
    """Give part of the unread weight to the candidates that were read; the rest stays left out.

    r, m and u are the weights of the retained set, of the candidates read and of the unread ones, o_r and o_m the
    outputs of the first two, and o = (r o_r + m o_m) / (r + m) the output of everything read. The result is
    (r o_r + m o_m + u (share o_m + (1 - share) o)) / (r + m + u).
    That an unread candidate is more like those read than like the sink or the latest tokens is our own observation
    (docs/ACCURACY.md). The papers leave out all of the unread weight: a share of 0. SparQ Attention (Ribar et al. 2024)
    gives it to the mean of all values instead.

    out, retained_out   [..., head_dim]   floating point, normalised: of everything read, and of the retained set alone;
                                          finite even where nothing was read
    lse, retained_lse   [...]             natural log, -inf where nothing was read
    log_unread          [...]             natural log; a row stays as it is if this is -inf, or if no candidate was read
                                          (less than 1e-5 of the weight, or than 2e-6 |lse|)
    share               0 to 1
    returns             [..., head_dim]   of the dtype of `out`
    """
    of_retained = (retained_lse - lse).exp().nan_to_num(nan=1.0)  # r / (r + m)
    of_candidates = 1.0 - of_retained
    unread = (log_unread - lse).clamp(max=_MOST_LOG_RATIO).exp().nan_to_num(nan=0.0)  # u / (r + m)
    given = share * unread / (1.0 + (1.0 - share) * unread)
    least = (_LEAST_SHARE_OF_LOG * lse.abs()).clamp(min=_LEAST_SHARE).nan_to_num()
    given = given.masked_fill(of_candidates < least, 0.0)[..., None]
    candidates = (out - of_retained[..., None] * retained_out) / of_candidates.maximum(least)[..., None]
    return (out + given * candidates) / (1.0 + given)

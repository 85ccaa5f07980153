"""Merging attention states in plain torch."""

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Fold two partial attentions over disjoint keys into one (HGCA, section 3.3, "Merging states").

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), lse = log(e^lse_a + e^lse_b), scaled so that nothing
    overflows. The `out` of an empty state is ignored.

    out_a, out_b   [..., head_dim]   bf16 | f32 | f64
    lse_a, lse_b   [...]             f32 | f64, natural log, -inf where no key was seen
    returns        (out, lse) in the dtypes of a; empty with empty gives zeros and -inf, never NaN
    """
    peak = torch.maximum(lse_a, lse_b)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = weight_a + weight_b
    out = torch.zeros_like(out_a, dtype=torch.promote_types(out_a.dtype, total.dtype))
    for part, weight in ((out_a, weight_a), (out_b, weight_b)):
        out += torch.where(weight.unsqueeze(-1) > 0, (weight / total).unsqueeze(-1) * part, 0.0)
    return out.to(out_a.dtype), (peak + total.log()).to(lse_a.dtype)


def merge_with_unread(
    retained_out: Tensor, retained_lse: Tensor, read_out: Tensor, read_lse: Tensor, log_unread: Tensor, share: float
) -> Tensor:
    """Fold the states of the retained set and of the candidates read, and credit the unread weight to what was read.

    `attribute_unread` has the formula.

    retained_out, read_out   [..., head_dim]   normalised
    retained_lse, read_lse   [...]             natural log, -inf where nothing was read
    log_unread               [...]             natural log of the other candidates' estimated weight, -inf for none
    share                    of that weight for the candidates read; the rest is for everything that was read
    returns                  [..., head_dim]
    """
    out, _ = merge_states(retained_out, retained_lse, read_out, read_lse)
    logs = torch.stack([retained_lse, read_lse, log_unread])
    retained, read, unread = (logs - logs.amax(dim=0)).exp()[..., None]
    stand_in = share * read_out + (1 - share) * out
    merged: Tensor = (retained * retained_out + read * read_out + unread * stand_in) / (retained + read + unread)
    return merged

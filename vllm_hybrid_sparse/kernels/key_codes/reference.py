"""Key codes in plain torch.

RaBitQ (Gao and Long, 2024) and its extension to several bits, taken to the pages of a KV cache: keys are rotated, less
their page's mean, and kept as the signs of their elements and, with two bits, whether these are long. A factor for each
key makes the estimate of its inner product with any query unbiased over the rotations.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS, fine_bytes, summary_bytes

MEAN_LEVELS = 15
COMMON_KEY_PAGES = 32
"""Pages from whose first is taken what their keys have in common."""
COMMON_KEY_RATIO = 5.0
"""How long that must be beside the deviation of that page's keys to be taken out."""
SIGN_FACTOR = 1 + 2 * math.exp(-0.5)
"""What the factor of an estimate by signs alone is to that by two bits. Elements beyond the root mean square count
three times in the latter, and of normally distributed elements these are e^(-1/2) of the sum of lengths."""
DEVIATION_PAGES = 16
"""Pages whose factors say how long keys are, which `score_deviation` needs."""
_MASK64 = 2**64 - 1


def code_deviation(bits: int) -> float:
    """sqrt(E[e^2] - E[x e]^2) of a normally distributed x and its code's element e, as long as x at the least: see
    `score_deviation`."""
    product = math.sqrt(2 / math.pi)  # E[|x|]
    if bits == 1:
        return math.sqrt(1 - product**2)
    far = math.erfc(math.sqrt(0.5))  # P(|x| > 1), where e counts three times
    return math.sqrt(1 + 8 * far - (product * SIGN_FACTOR) ** 2)


class KeyCodes(NamedTuple):
    """What is kept of the pages of one KV head."""

    codes: Tensor  # [pages, 16, head_dim] uint8, 0 to 2^bits - 1: the element is 2 code - (2^bits - 1)
    factors: Tensor  # [pages, 16] uint8
    factor_unit: Tensor  # [pages] bf16
    mean: Tensor  # [pages, head_dim] uint8, 0 to 15: the element is 2 level - 15
    mean_unit: Tensor  # [pages] bf16
    bits: int


@functools.cache
def rotation(head_dim: int) -> Tensor:
    """The orthogonal matrix R of the rotation, R x being the rotated x; [head_dim, head_dim] f64. Not to be written to.

    Fixed random signs, then a Hadamard transform of each piece, the largest powers of two that head_dim splits into.
    """
    signs = torch.tensor([-1.0 if _splitmix64(d) >> 63 else 1.0 for d in range(head_dim)], dtype=torch.float64)
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    begin = 0
    while begin < head_dim:
        size = 1 << ((head_dim - begin).bit_length() - 1)
        piece = torch.ones(1, 1, dtype=torch.float64)
        while len(piece) < size:
            piece = torch.cat((torch.cat((piece, piece), 1), torch.cat((piece, -piece), 1)), 0)
        matrix[begin : begin + size, begin : begin + size] = piece / size**0.5
        begin += size
    return matrix * signs


def _splitmix64(index: int) -> int:
    x = (index + 1) * 0x9E3779B97F4A7C15 & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31


def common_key(page: Tensor) -> Tensor | None:
    """The mean of a page's keys, where it is more than `COMMON_KEY_RATIO` times as long as their deviation from it.

    page   [16, head_dim]   the first of `COMMON_KEY_PAGES`, whose keys, less this vector, are encoded

    Its product with a query belongs to every score of these pages.
    """
    mean = page.double().mean(dim=0)
    deviation = (page.double() - mean).square().sum(dim=1).mean()
    return mean.float() if mean.square().sum() > COMMON_KEY_RATIO**2 * deviation else None


def encode_keys(keys: Tensor, bits: int) -> KeyCodes:
    """Encode full pages of keys.

    keys   [tokens, head_dim]   bf16 | f16 | f32; tokens a multiple of 16
    bits   a dimension: 1 keeps the sign of an element; 2 also whether it is as long as the root mean square of the
           key's elements or longer, and then it counts three times
    """
    rotated = keys.double() @ rotation(keys.shape[-1]).T
    pages = rotated.reshape(-1, PAGE_TOKENS, keys.shape[-1])
    exact_mean = pages.mean(dim=1)
    mean_unit = (exact_mean.abs().amax(dim=1) / MEAN_LEVELS).bfloat16()
    unit = mean_unit.double()[:, None]
    levels = torch.where(unit > 0, (exact_mean / unit + MEAN_LEVELS) / 2, 0).round().clamp(0, MEAN_LEVELS)
    residual = pages - (unit * (2 * levels - MEAN_LEVELS))[:, None]
    positive = residual >= 0
    if bits == 1:
        codes = positive.to(torch.uint8)
    else:
        far = residual.square() >= residual.square().mean(dim=-1, keepdim=True)
        codes = torch.where(positive, 2 + far.to(torch.uint8), 1 - far.to(torch.uint8)).to(torch.uint8)
    elements = 2.0 * codes.double() - (2**bits - 1)
    products = (residual * elements).sum(dim=-1)
    exact_factors = torch.where(products > 0, residual.square().sum(dim=-1) / products, 0.0)
    factor_unit = (exact_factors.amax(dim=1) / 255).bfloat16()
    unit = factor_unit.double()[:, None]
    factors = torch.where(unit > 0, exact_factors / unit, 0.0).round().clamp(0, 255).to(torch.uint8)
    return KeyCodes(codes, factors, factor_unit, levels.to(torch.uint8), mean_unit, bits)


def estimate_scores(query: Tensor, codes: KeyCodes, scale: float) -> Tensor:
    """Estimate the attention score of every encoded key to each query head of a group.

    The query is rotated and its elements rounded to 8 bits, the largest to 127.

    query     [group, head_dim]   bf16 | f16 | f32
    returns   [group, pages, 16]  f64, softmax scale applied
    """
    rotated = query.double() @ rotation(query.shape[-1]).T
    unit = rotated.abs().amax(dim=1, keepdim=True) / 127
    rounded = torch.where(unit > 0, (rotated / unit).round(), 0.0) * unit
    mean = codes.mean_unit.double()[:, None] * (2 * codes.mean.double() - MEAN_LEVELS)
    elements = 2 * codes.codes.double() - (2**codes.bits - 1)
    factors = codes.factor_unit.double()[:, None] * codes.factors.double()
    products = torch.einsum("gd,ptd->gpt", rounded, elements) * factors
    return scale * (torch.einsum("gd,pd->gp", rounded, mean)[:, :, None] + products)


def estimate_weights(query: Tensor, codes: KeyCodes, scale: float) -> Tensor:
    """Estimate what each page weighs: the logarithm of the sum of exp(score) over its keys; [group, pages] f64."""
    return estimate_scores(query, codes, scale).logsumexp(dim=-1)


def score_deviation(query: Tensor, codes: KeyCodes, scale: float) -> Tensor:
    """The standard deviation of an estimated score of a key, from how long the keys of some pages are.

    An estimate is f <q, e>, with e the elements of the code and f the factor that makes f e - x normal to the rotated
    key x (RaBitQ, theorem 3.2). The rotation turns f e - x into any direction normal to x, so the estimate's variance
    is |q|^2 |f e - x|^2 / dims, which is (|q| f)^2 (E[e^2] - E[x e]^2) if x's elements are normally distributed with a
    variance of 1. For f stands the mean over the keys of the first `DEVIATION_PAGES` pages.

    query     [group, head_dim]   bf16 | f16 | f32
    codes     of one page at the least
    returns   [group]             f64, natural log, softmax scale applied
    """
    factors = codes.factor_unit.double()[:, None] * codes.factors.double()
    length = query.double().square().sum(dim=1).sqrt()
    return scale * code_deviation(codes.bits) * factors[:DEVIATION_PAGES].mean() * length


def pack_codes(codes: KeyCodes, element_bytes: int = 2) -> Tensor:
    """The bytes of each page's summary as they lie in memory (`memory/layout.py`); [pages, summary_bytes] uint8.

    element_bytes   of keys and values in rows, 2 or 4
    """
    pages, _, head_dim = codes.codes.shape
    fields = 8 // codes.bits  # dims in a byte
    padded = torch.nn.functional.pad(codes.codes.to(torch.int32), (0, -head_dim % (4 * fields)))
    by_line = padded.reshape(pages, PAGE_TOKENS, -1, fields, 4).permute(0, 2, 1, 4, 3)
    shifts = codes.bits * torch.arange(fields, dtype=torch.int32)
    code_bytes = (by_line << shifts).sum(dim=-1).to(torch.uint8).reshape(pages, -1)
    low, high = codes.mean.reshape(pages, -1, 2).unbind(dim=-1)
    units = torch.stack((codes.factor_unit, codes.mean_unit), dim=1).view(torch.uint8)
    parts = torch.cat((code_bytes, low | high << 4, codes.factors, units), dim=1)
    size = summary_bytes("key_codes", head_dim, element_bytes, codes.bits)
    return torch.nn.functional.pad(parts, (0, size - parts.shape[1]))


def unpack_codes(packed: Tensor, head_dim: int, bits: int) -> KeyCodes:
    """The other way from `pack_codes`: what lies in memory of pages.

    packed   [pages, summary_bytes] uint8
    """
    fields = 8 // bits
    lines = -(-head_dim * bits // 32)
    code_bytes, mean, factors, units, _ = packed.split(
        (64 * lines, head_dim // 2, PAGE_TOKENS, 4, packed.shape[1] - 64 * lines - head_dim // 2 - PAGE_TOKENS - 4), 1
    )
    shifts = bits * torch.arange(fields, dtype=torch.uint8)
    by_line = code_bytes.reshape(-1, lines, PAGE_TOKENS, 4, 1) >> shifts & 2**bits - 1
    codes = by_line.permute(0, 2, 1, 4, 3).reshape(-1, PAGE_TOKENS, 4 * fields * lines)[:, :, :head_dim]
    factor_unit, mean_unit = units.contiguous().view(torch.bfloat16).unbind(dim=1)
    levels = torch.stack((mean & 15, mean >> 4), dim=2).flatten(1)
    return KeyCodes(codes, factors, factor_unit, levels, mean_unit, bits)


def signs_of(codes: KeyCodes) -> KeyCodes:
    """Codes of one bit from those of two: the signs, with the factors times what signs alone ask for."""
    unit = (codes.factor_unit.float() * SIGN_FACTOR).bfloat16()
    return codes._replace(codes=codes.codes >> 1, factor_unit=unit, bits=1)


def pack_split_codes(codes: KeyCodes) -> tuple[Tensor, Tensor]:
    """Both parts of two-bit codes as they lie in memory (`memory/layout.py`): [pages, coarse or fine bytes] uint8."""
    head_dim = codes.codes.shape[2]
    rest = codes._replace(codes=codes.codes & 1, bits=1)
    fine = pack_codes(rest)[:, : fine_bytes("split_codes", head_dim)]
    coarse = pack_codes(signs_of(codes), element_bytes=4)
    own_unit = fine.shape[1] + head_dim // 2 + PAGE_TOKENS + 4
    coarse[:, own_unit : own_unit + 2] = codes.factor_unit[:, None].contiguous().view(torch.uint8)
    return coarse, fine

"""Which draft tokens of a step are accepted: those that equal the tokens drawn in their place.

Row j of a sequence is drawn as if the drafts before it were its text. The first drawn token that differs from its
draft, or ends the sequence, is the last new token. So the text is the one without drafts, however good they are.

A client's drafts with logits are tested by ratios instead: with p as drawn from and q as the client drew from, a draft
x becomes the token of its row with probability min(1, p(x) / q(x)); else the token is drawn from max(p - q, 0). So each
token has the distribution p, and the drafts are accepted as often as that allows (Leviathan et al., 2211.17192).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..triton_kernels.reference.philox import ACCEPTANCE, REST_BLOCKS, REST_TOKENS, uniform
from ..triton_kernels.reference.sample_token import drawn, kept
from .slots import BEAMS

# Features of sequences whose drafts are not verified: several of their rows in a step are beams.
UNVERIFIED = BEAMS


class SpoiltDraftsError(RuntimeError):
    """Drafts may have made a row before them unusable. The step can run without them."""


def offsets_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ([r] place of each row in its sequence, [r] bool: whether a draft follows it); counts [n]: drafts."""
    starts = np.cumsum(1 + counts) - (1 + counts)
    offsets = np.arange(int((1 + counts).sum())) - np.repeat(starts, 1 + counts)
    return offsets, offsets < np.repeat(counts, 1 + counts)


def accepted(arrays: Mapping[str, np.ndarray], counts: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (is_new [r] bool: rows whose tokens are new tokens, [n]: how many each sequence has, at least 1).

    If the row after an accepted draft is not finite, the sequence keeps the tokens before it. Its next step then
    computes that row as its first one, and fails as without drafts.

    arrays   `tokens`, `finish` and `finite` [r] of the rows: 1 + its drafts for each sequence, in order
    counts   [n] draft tokens of each sequence
    drafts   [sum of counts] the draft tokens
    """
    starts = np.cumsum(1 + counts) - (1 + counts)
    offsets, has_draft = offsets_of(counts)
    goes_on = has_draft.copy()
    goes_on[has_draft] = arrays["tokens"][has_draft] == drafts
    goes_on &= (arrays["finish"] == 0) & (arrays["finite"] != 0)
    last = np.minimum.reduceat(np.where(goes_on, len(offsets), offsets), starts)
    last -= (last > 0) & (arrays["finite"][starts + last] == 0)
    return offsets <= np.repeat(last, 1 + counts), 1 + last


@dataclass(frozen=True, slots=True, eq=False)
class RatioRows:
    """Rows of a step whose drafts are tested by ratios.

    rows     [k] int64 on the host: indices of the rows of logits
    drafts   [k] int64 on the device: the draft after each row
    logits   [k, vocab] float32 on the device: the client's logits, from which it drew the draft
    """

    rows: np.ndarray
    drafts: torch.Tensor
    logits: torch.Tensor

    def part(self, row: int) -> "RatioRows | None":
        """Return the row alone, as row 0; None if it is none of these."""
        (found,) = np.nonzero(self.rows == row)
        if not len(found):
            return None
        part = slice(int(found[0]), int(found[0]) + 1)
        return RatioRows(np.zeros(1, np.int64), self.drafts[part], self.logits[part])


def decided_by_ratio(logits: torch.Tensor, draft_logits: torch.Tensor, drafts: torch.Tensor, tokens: torch.Tensor,
                     temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor,
                     seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the token of each row [k]: its draft if the test accepts it, else one that is drawn from the rest.

    Greedy rows keep their token. A draft that the client cannot have drawn, with q = 0, is rejected.

    logits         [k, vocab] finite logits after the stages
    draft_logits   [k, vocab] the client's; it drew from their softmax at the request's temperature, cut by its filters
    tokens         [k] the tokens that `sample_token` drew
    The others are those of `sample_token`, [k].
    """
    greedy = (temperature == 0) | (top_k == 1) | ((top_k == 0) & (top_p == 0))
    warm = temperature.double().where(~greedy, 1)

    def distribution(own: torch.Tensor) -> torch.Tensor:
        x = own.double()
        weights = kept(x, (x / warm[:, None]).softmax(1), top_k, top_p, x.amax(1) + warm * min_p.double().log())
        return weights / weights.sum(1, keepdim=True)

    p, q = distribution(logits), distribution(draft_logits)
    p_of, q_of = (of.gather(1, drafts[:, None])[:, 0] for of in (p, q))
    accepts = (q_of > 0) & (uniform(seed, position, ACCEPTANCE, torch.zeros_like(seed)).double() * q_of < p_of)
    rest = (p - q).clamp_(min=0)
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)              # equal but for rounding
    decided = torch.where(accepts, drafts, drawn(rest, seed, position, (REST_BLOCKS, REST_TOKENS)))
    return torch.where(greedy, tokens.long(), decided)

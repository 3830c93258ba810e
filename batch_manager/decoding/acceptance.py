"""Which draft tokens of a step are accepted: those that equal the tokens drawn in their place.

Row j of a sequence is drawn as if the drafts before it were its text. The first drawn token that differs from its
draft, or ends the sequence, is the last new token. So the text is the one without drafts, however good they are.
"""

from collections.abc import Mapping

import numpy as np

from .slots import BEAMS, POST_PROCESSED

# Features of sequences whose drafts are not verified: several of their rows in a step are beams.
UNVERIFIED = BEAMS | POST_PROCESSED


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

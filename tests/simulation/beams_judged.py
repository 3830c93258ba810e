"""Checks that the beams of a final response are the oracle's finished beams, or its live beams after as many steps."""

from typing import TYPE_CHECKING

from .oracle import END_ID, LENGTH, STOP_WORDS, Oracle, Text

if TYPE_CHECKING:
    from .history import Handed, Sent

TIMED_OUT, CANCELLED = 4, 5
NATURAL = (END_ID, STOP_WORDS, LENGTH)
REASONS = (*NATURAL, TIMED_OUT, CANCELLED)


def beams_wrong(oracle: Oracle, max_seq_len: int, item: "Handed", sent: "Sent") -> str | None:
    """Return a description of what is wrong with the beams of the final response `sent`, or None."""
    limit = min(item.max_new_tokens, max_seq_len - len(item.prompt))
    start = 0 if item.excludes else len(item.prompt)
    got = [[tokens[start:], *rest] for tokens, *rest in sent.beams]
    if any(beam[0][:start] != item.prompt[:start] for beam in sent.beams):
        return "does not begin with its prompt in every beam"
    if sent.reason not in REASONS:
        return f"ended with reason {sent.reason}"
    steps = max(len(tokens) for tokens, *_ in got)
    if sent.reason in NATURAL:
        texts = oracle.beams(item, limit)
    elif steps:
        texts = oracle.live_beams(item, limit, steps)
        if texts is None:
            return f"goes on after {steps} tokens, when the search is over"
    else:
        texts = [Text() for _ in got]
    expected = [[text.tokens, text.reason if sent.reason in NATURAL else sent.reason, text.sum, text.log_probs]
                for text in texts]
    expected += [[[], 0, float("-inf"), []]] * (item.beam_width - len(texts))
    if not item.log_probs:
        expected = [[*beam[:2], None, None] for beam in expected]
    wrong_at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
    if got != expected:
        return f"has a beam {wrong_at} of {len(got)} that is not the oracle's"
    return None

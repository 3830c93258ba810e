"""A budget of reasoning tokens, as a logits post-processor."""

from typing import Any

import torch

from ..tokenizer import encode
from .formats import ReasoningFormat
from .output import ParsedOutput

_SENTINEL = "\x02"     # precedes a text that is encoded alone, so that the tokenizer puts no space before it


class ThinkingBudget:
    """Ends the reasoning of one request after a number of tokens, with the tokens of the format's own end.

    most     tokens of reasoning, from 0 on
    parsed   a new ParsedOutput of the request, for this object alone

    It is a logits post-processor of one request. It sets all logits but one to -inf while it writes the end.
    """

    def __init__(self, tokenizer: Any, form: ReasoningFormat, most: int, parsed: ParsedOutput) -> None:
        before = encode(tokenizer, _SENTINEL, add_special_tokens=False)
        ids = encode(tokenizer, _SENTINEL + form.end, add_special_tokens=False)
        same = ids[:len(before)] == before
        self._end = ids[len(before):] if same else encode(tokenizer, form.end, add_special_tokens=False)
        self._most, self._parsed = most, parsed
        self._num_tokens: int | None = None      # length of the sequence up to the last token that was parsed
        self._forced_from: int | None = None     # length of the sequence at which the end began

    def __call__(self, request_id: int, logits: torch.Tensor, beams: list[list[int]]) -> torch.Tensor:
        tokens = beams[0]
        if self._num_tokens is None:             # the first call is for the first token after the prompt
            self._num_tokens = len(tokens)
        for token in tokens[self._num_tokens:] if self._forced_from is None else ():
            self._parsed.add_token(token)
        self._num_tokens = max(self._num_tokens, len(tokens))
        if self._forced_from is None and self._parsed.is_reasoning and self._parsed.reasoning_tokens >= self._most:
            self._forced_from = len(tokens)
        if self._forced_from is not None and 0 <= (at := len(tokens) - self._forced_from) < len(self._end):
            logits.fill_(-torch.inf)
            logits[..., self._end[at]] = 0.0
        return logits

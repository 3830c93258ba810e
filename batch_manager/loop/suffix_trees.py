"""Drafts from a suffix tree of a request's own text, which the library arctic-inference keeps.

Source of the method: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Its tree over all requests is left out:
drafts that one user's text gave another one would tell by their speed what was asked.
"""

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..requests.llm_request import LlmRequest
from .ngrams import MOST_INDEXED


class SuffixDrafter:
    """A Drafter that continues the longest end of a request's text which occurred in it before, with the tokens that
    followed most often. Tokens of one request never become drafts of another one.

    max_tree_depth   most tokens of a path of the tree: of an end that is looked for, with its drafts
    max_spec_factor   most drafts for each token of that end
    min_token_prob   a draft ends before a token that followed more rarely

    Raises ConfigError if arctic-inference is not installed.
    """

    def __init__(self, max_tree_depth: int, max_spec_factor: float, min_token_prob: float) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise ConfigError("arctic-inference is not installed", "SpeculativeConfig.method 'suffix' requires it",
                              'pip install "batch-manager[suffix]"') from error
        self._trees: Any = SuffixDecodingCache(max_tree_depth, max_cached_requests=0)
        self._options = {"max_spec_factor": max_spec_factor, "min_token_prob": min_token_prob}
        self._depth = max_tree_depth
        self._known: dict[LlmRequest, int] = {}              # -> number of its tokens in its tree

    def propose(self, requests: Sequence[LlmRequest], max_lengths: Sequence[int]) -> Sequence[Sequence[int]]:
        left, proposed = MOST_INDEXED, []
        for request, most in zip(requests, max_lengths):
            tokens = request.tokens[0]
            left -= self._read(request, tokens, left)
            proposed.append(self._trees.speculate(request, tokens[-self._depth:], most, **self._options).token_ids)
        return proposed

    def _read(self, request: LlmRequest, tokens: list[int], most: int) -> int:
        """Add up to `most` of the tokens that are not in its tree yet. Returns how many they were."""
        first = self._known.get(request)
        if first is None:
            first = self._known[request] = 0
            self._trees.start_request(request, ())
        new = tokens[first : first + most]
        if new:
            self._trees.add_active_response(request, new)
            self._known[request] = first + len(new)
        return len(new)

    def release(self, request: LlmRequest) -> None:
        if self._known.pop(request, None) is not None:
            self._trees.stop_request(request)

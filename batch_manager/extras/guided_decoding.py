"""Output that matches a regular expression, a JSON schema or a grammar. Needs llguidance: the extra `guided`.

    guided = GuidedDecoding("folder/tokenizer.json", vocab_size=32000, end_id=2)
    manager = GptManager(..., parts=Parts(logits_post_processor_batched=guided))

    guided.constrain(7, guided.regex(r"(yes|no), because [a-z ]{5,40}\\."))    # before the request is handed over
    request = InferenceRequest(7, {..., "end_id": 2}, logits_post_processor="batched")
    guided.release(7)                                                        # in its final response

In every step it asks the grammar of each request which tokens may come next and forbids the others, so that whatever is
drawn matches, greedy or sampled. The end id is allowed where the text is complete, and nothing else is where it cannot
go on. A request should set `end_id`, and enough `request_output_len`: a text that is cut off is a beginning of one that
matches.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, InvalidRequestError
from ..triton_kernels import dispatch


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that was compiled for one tokenizer; any number of requests may share it."""

    matcher: Any


@dataclass(slots=True)
class _Session:
    """Where one request stands.

    prompt_length   tokens before the first one that the grammar says something about; None: not known yet
    num_tokens      tokens the matcher has seen, the prompt included
    """

    matcher: Any
    prompt_length: int | None = None
    num_tokens: int = 0


class GuidedDecoding:
    """A batched logits post-processor that holds each request to its grammar.

    tokenizer    tokenizer.json of the model, as Hugging Face's tokenizers write it; or a `tokenizers.Tokenizer`
    vocab_size   of the model, which may be larger than the tokenizer's
    end_id       token that ends a text; requests must use the same. To the grammar further end ids of a request are
                 tokens like all others

    `regex`, `json_schema` and `lark` compile, which may take a while: call them where requests are made, not in a
    callback of the engine. `constrain` and `release` may be called from any thread. Beam search is not done.

    Raises ConfigError without llguidance, or for a tokenizer it cannot read.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_id: int) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError("llguidance is not installed", "guided decoding needs it",
                              'pip install "batch-manager[guided]"') from error
        try:
            source = tokenizer.to_str() if hasattr(tokenizer, "to_str") else os.fspath(tokenizer)
            self._tokenizer = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=end_id)
        except (ValueError, RuntimeError, OSError) as error:
            what = "the tokenizer" if hasattr(tokenizer, "to_str") else repr(os.fspath(tokenizer))
            raise ConfigError(f"llguidance cannot use {what}: {error}",
                              "the tokenizer.json of the model", "pass the path of that file") from error
        self._make_matcher = llguidance.LLMatcher
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._sessions: dict[int, _Session] = {}

    def regex(self, pattern: str) -> Grammar:
        """Texts that match all of a regular expression, without look-around or back-references.

        Raises InvalidRequestError, as the next two do, for what does not compile.
        """
        return self._compile(self._make_matcher.grammar_from_regex(pattern))

    def json_schema(self, schema: str | dict[str, Any]) -> Grammar:
        """JSON that a JSON schema allows, on one line."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            grammar = self._make_matcher.grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
        except ValueError as error:
            raise _unusable(error) from error
        return self._compile(grammar)

    def lark(self, grammar: str) -> Grammar:
        """Texts of a context-free grammar in llguidance's variant of Lark."""
        return self._compile(self._make_matcher.grammar_from_lark(grammar))

    def _compile(self, grammar: str) -> Grammar:
        matcher = self._make_matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _unusable(matcher.get_error().strip().splitlines()[0])
        return Grammar(matcher)

    def constrain(self, request_id: int, grammar: Grammar) -> None:
        """Hold the request to the grammar, from its first generated token on. Replaces what the id had before."""
        self._sessions[request_id] = _Session(grammar.matcher.deep_copy())

    def processor(self, grammar: Grammar) -> Callable[[int, torch.Tensor, list[list[int]]], torch.Tensor]:
        """A logits post-processor for one request, whose id need not be known. Slower than the batched one.

            InferenceRequest(7, {...}, logits_post_processor=guided.processor(grammar))
        """
        session = _Session(grammar.matcher.deep_copy())

        def process(request_id: int, logits: torch.Tensor, beams: list[list[int]]) -> torch.Tensor:
            forbid(logits.view(1, -1), self._mask(request_id, session, beams)[None])
            return logits
        return process

    def release(self, request_id: int) -> None:
        """Forget the request. An id that has no grammar is passed over."""
        self._sessions.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Those that have a grammar."""
        return len(self._sessions)

    def __call__(self, request_ids: list[int], logits: torch.Tensor, token_ids: list[list[list[int]]]) -> None:
        """Forbid what does not fit; see decoding/logits_post_processors.py. Mutates `logits` [n, 1, 1, vocab].

        Raises for a request without a grammar, one with beams, and one whose tokens do not match: that request ends.
        """
        masks = np.empty((len(request_ids), self._num_words), np.int32)
        for row, (request_id, beams) in enumerate(zip(request_ids, token_ids, strict=True)):
            session = self._sessions.get(request_id)
            if session is None:
                raise InvalidRequestError(f"request {request_id} has no grammar",
                                          "every request that is constrained has one",
                                          "call constrain(request_id, grammar) before the request is handed over")
            masks[row] = self._mask(request_id, session, beams)
        forbid(logits.view(len(request_ids), -1), masks)

    def _mask(self, request_id: int, session: _Session, beams: list[list[int]]) -> np.ndarray:
        if len(beams) > 1:
            raise InvalidRequestError(f"request {request_id} has {len(beams)} beams", "guided decoding follows one",
                                      "set beam_width to 1")
        _catch_up(session, beams[0])
        return np.frombuffer(session.matcher.compute_bitmask(), np.int32)[: self._num_words]


def forbid(logits: torch.Tensor, masks: np.ndarray) -> None:
    """The meaning of `token_bitmask`, with masks on the host. Mutates `logits` [r, vocab]."""
    if logits.device.type == "cpu":        # bytes instead of shifts: a tenth of the oracle's time
        forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        logits.masked_fill_(torch.from_numpy(forbidden.view(np.bool_)), -torch.inf)
    else:
        dispatch.kernel("token_bitmask", logits.device)(logits, torch.from_numpy(masks).to(logits.device))


def _catch_up(session: _Session, tokens: list[int]) -> None:
    """Show the matcher the tokens it has not seen. A step that runs again shows it none."""
    if session.prompt_length is None:                # the first call is for the first token after the prompt
        session.prompt_length = session.num_tokens = len(tokens)
    if session.num_tokens > len(tokens):
        session.matcher.reset()
        session.num_tokens = session.prompt_length
    if new := tokens[session.num_tokens:]:
        session.matcher.consume_tokens(new)
        session.num_tokens = len(tokens)
    if session.matcher.is_error():
        raise InvalidRequestError("the tokens do not match the grammar, or it became too complex",
                                  "each token is one that the grammar allowed",
                                  "let nothing else choose the tokens, or simplify the grammar")


def _unusable(reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"the grammar does not compile: {str(reason)[:300]!r}",
                               "a regular expression, a JSON schema or a grammar of llguidance", "correct it")

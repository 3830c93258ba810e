"""Constrain output to a regular expression, a JSON schema or a grammar. Needs llguidance: the extra `guided`.

    guided = GuidedDecoding("folder/tokenizer.json", vocab_size=32000, end_id=2)
    manager = GptManager(..., parts=Parts(logits_post_processor_batched=guided))

    guided.constrain(7, guided.regex(r"(yes|no), because [a-z ]{5,40}\\."))    # before the request is submitted
    request = InferenceRequest(7, {..., "end_id": 2}, logits_post_processor="batched")
    guided.release(7)                                                        # on its final response

In each step, the grammar of each request determines the allowed next tokens. All other tokens get the logit -inf. The
end id is allowed where the output may end, and is the only allowed token where the output must end. A request should
set `end_id` and a sufficient `request_output_len`, because an output that is cut off is only a prefix of a match.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, InvalidRequestError
from ..triton_kernels import dispatch
from .token_bytes import TokenBytes
from .tokenizer import encode, load_tokenizer

# Precedes a text that is encoded alone, so that the tokenizer puts no space before the text.
_SENTINEL = "\x02"
LONGEST_TOKEN = 1024     # bytes; llguidance panics for a longer one, so that no grammar allows it


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar compiled for one tokenizer. Any number of requests may share it."""

    matcher: Any


@dataclass(slots=True)
class _Session:
    """Progress of one request.

    prompt_length   number of tokens before the first constrained token; None: unknown until the first step
    consumed        tokens after the prompt that the matcher has consumed; the last ones may be drafts
    """

    grammar: Grammar
    matcher: Any = None
    prompt_length: int | None = None
    consumed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.matcher = self.grammar.matcher.deep_copy()


class GuidedDecoding:
    """A batched logits post-processor that constrains each request to its grammar.

    tokenizer    path of the model's tokenizer.json or of its folder, or a tokenizer of `tokenizers` or transformers
    vocab_size   vocabulary size of the model; may be larger than the tokenizer's
    end_id       token that ends an output; must be an end id of each request. The grammar treats other end ids of a
                 request as ordinary tokens
    more_end_ids   further tokens that are allowed where the output may end; they must be end ids of each request, too

    `regex`, `json_schema` and `lark` compile a grammar, which can be slow. Call them where requests are created, not in
    a callback of the engine. `constrain` and `release` may be called from any thread. Beam search is not supported.
    Drafts are: those that a grammar forbids are not verified.

    Raises ConfigError if llguidance is not installed, or if the tokens of the tokenizer cannot be decoded one by one.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, end_id: int, more_end_ids: Sequence[int] = ()) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError("llguidance is not installed", "it is required for guided decoding",
                              'pip install "batch-manager[guided]"') from error
        if not callable(getattr(tokenizer, "decode", None)):
            tokenizer = load_tokenizer(tokenizer)
        vocabulary = _Vocabulary(tokenizer, vocab_size, end_id)
        try:
            self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=end_id)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"llguidance cannot use the tokenizer: {error}",
                              "expected the tokenizer of the model", "pass the path of its tokenizer.json") from error
        self._make_matcher = llguidance.LLMatcher
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._sessions: dict[int, _Session] = {}
        self._end_id, self._more_ends = end_id, None
        if more := [token for token in more_end_ids if token != end_id and token < vocab_size]:
            self._more_ends = np.zeros(self._num_words, np.int32)
            np.bitwise_or.at(self._more_ends.view(np.uint32), np.array(more) // 32,
                             np.uint32(1) << np.array(more, np.uint32) % np.uint32(32))

    def regex(self, pattern: str) -> Grammar:
        """Compile a regular expression that the whole output must match.

        Look-around and back-references are not supported. Raises InvalidRequestError if `pattern` does not compile.
        """
        return self._compile(self._make_matcher.grammar_from_regex(pattern), "regular expression")

    def json_schema(self, schema: str | dict[str, Any]) -> Grammar:
        """Compile a JSON schema.

        The output is JSON on one line. Raises InvalidRequestError if the schema does not compile.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            grammar = self._make_matcher.grammar_from_json_schema(
                text, overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "})
        except ValueError as error:
            raise _unusable(error, "JSON schema") from error
        return self._compile(grammar, "JSON schema")

    def lark(self, grammar: str) -> Grammar:
        """Compile a context-free grammar in llguidance's Lark syntax.

        Raises InvalidRequestError if `grammar` does not compile.
        """
        return self._compile(self._make_matcher.grammar_from_lark(grammar), "Lark grammar")

    def _compile(self, grammar: str, kind: str) -> Grammar:
        matcher = self._make_matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _unusable(matcher.get_error(), kind)
        return Grammar(matcher)

    def constrain(self, request_id: int, grammar: Grammar) -> None:
        """Constrain the output of a request to `grammar`. Replaces an earlier grammar of the request id."""
        self._sessions[request_id] = _Session(grammar)

    def processor(self, grammar: Grammar) -> Callable[[int, torch.Tensor, list[list[int]]], torch.Tensor]:
        """Return a logits post-processor for one request, whose id need not be known.

        The processor keeps the state of this request: pass it to no other request. It is slower than the batched
        post-processor.

            InferenceRequest(7, {...}, logits_post_processor=guided.processor(grammar))
        """
        return _Processor(self, grammar)

    def release(self, request_id: int) -> None:
        """Remove the grammar of a request. Ignores an id without a grammar."""
        self._sessions.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        """Number of requests with a grammar."""
        return len(self._sessions)

    def __call__(self, request_ids: list[int], logits: torch.Tensor, token_ids: list[list[list[int]]]) -> None:
        """Set the logits of disallowed tokens to -inf. Mutates `logits` [n, 1, 1, vocab].

        The signature is described in decoding/logits_post_processors.py. Raises InvalidRequestError for a request that
        has no grammar, has several beams, has tokens that its grammar does not allow, or has a grammar that became too
        complex; the engine then ends that request.
        """
        masks = np.empty((len(request_ids), self._num_words), np.int32)
        for row, (request_id, beams) in enumerate(zip(request_ids, token_ids, strict=True)):
            session = self._sessions.get(request_id)
            if session is None:
                raise InvalidRequestError(f"request {request_id} has no grammar",
                                          "each request with this post-processor needs a grammar",
                                          "call constrain(request_id, grammar) before you submit the request")
            masks[row] = self.mask(request_id, session, beams)
        forbid(logits.view(len(request_ids), -1), masks)

    def allowed_drafts(self, request_id: int, token_ids: list[int], drafts: list[int]) -> int:
        """Return how many of the drafts the grammar of a request allows after its tokens, up to the end id."""
        session = self._sessions.get(request_id)
        return 0 if session is None else self.count_allowed(session, token_ids, drafts)

    def count_allowed(self, session: _Session, token_ids: list[int], drafts: list[int]) -> int:
        """Return `allowed_drafts` of a session."""
        if session.prompt_length is None:
            return 0
        _catch_up(session, token_ids)
        allowed: int = session.matcher.validate_tokens(drafts)
        return drafts.index(self._end_id, 0, allowed) if self._end_id in drafts[:allowed] else allowed

    def mask(self, request_id: int, session: _Session, beams: list[list[int]]) -> np.ndarray:
        """Return the mask of the token after those of a request, [ceil(vocab / 32)] int32."""
        if len(beams) > 1:
            raise InvalidRequestError(f"request {request_id} has {len(beams)} beams", "guided decoding supports one",
                                      "set beam_width to 1")
        _catch_up(session, beams[0])
        mask = np.frombuffer(session.matcher.compute_bitmask(), np.int32)[: self._num_words]
        if self._more_ends is not None and mask[self._end_id // 32] >> self._end_id % 32 & 1:
            return mask | self._more_ends
        return mask


class _Processor:
    """A logits post-processor of one request. See GuidedDecoding.processor."""

    def __init__(self, guided: GuidedDecoding, grammar: Grammar) -> None:
        self._guided, self._session = guided, _Session(grammar)

    def __call__(self, request_id: int, logits: torch.Tensor, beams: list[list[int]]) -> torch.Tensor:
        forbid(logits.view(1, -1), self._guided.mask(request_id, self._session, beams)[None])
        return logits

    def allowed_drafts(self, request_id: int, token_ids: list[int], drafts: list[int]) -> int:
        return self._guided.count_allowed(self._session, token_ids, drafts)


class _Vocabulary:
    """A tokenizer as llguidance reads it: the bytes of each token, and the special tokens, which match no text."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_id: int) -> None:
        known = TokenBytes(tokenizer)
        if not known.have_own_bytes:
            raise ConfigError("the tokens of this tokenizer cannot be decoded one by one",
                              "guided decoding needs the bytes of each token",
                              "pass a tokenizer whose decoder is ByteLevel, ByteFallback, Metaspace or WordPiece")
        self._tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, end_id, None
        self.tokens: Sequence[bytes] = [content if len(content := known[token]) <= LONGEST_TOKEN else b""
                                        for token in range(vocab_size)]
        self._special = known.special.keys()
        self.special_token_ids: Sequence[int] = [token for token in known.special if token < vocab_size]

        self._before = encode(tokenizer, _SENTINEL, add_special_tokens=False)
        self._by_bytes: dict[bytes, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text that continues another one. Their joined bytes are those of the text."""
        if not isinstance(text, str):
            raise TypeError("expected a string")
        ids = encode(self._tokenizer, _SENTINEL + text, add_special_tokens=False)
        rest = ids[len(self._before):]
        is_text = not any(token in self._special or token >= len(self.tokens) for token in rest)
        if ids[: len(self._before)] == self._before and is_text and self._joined(rest) == text.encode():
            return rest
        return self._greedy(text.encode())

    def _joined(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids)

    def _greedy(self, text: bytes) -> list[int]:
        if not self._by_bytes:
            self._by_bytes = {content: token for token, content in enumerate(self.tokens)
                                   if content and token not in self._special}
        ids, start, longest = [], 0, max(map(len, self._by_bytes))
        while start < len(text):
            end = next((end for end in range(min(len(text), start + longest), start, -1)
                        if text[start:end] in self._by_bytes), None)
            if end is None:                      # the vocabulary cannot spell the text
                break
            ids.append(self._by_bytes[text[start:end]])
            start = end
        return ids


def forbid(logits: torch.Tensor, masks: np.ndarray) -> None:
    """Set the logits of tokens whose mask bit is 0 to -inf. Mutates `logits` [r, vocab].

    masks   [r, ceil(vocab / 32)] int32 on the host, in the format of the kernel `token_bitmask`
    """
    if logits.device.type == "cpu":        # unpackbits takes a tenth of the time of the kernel's oracle
        forbidden = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
        logits.masked_fill_(torch.from_numpy(forbidden.view(np.bool_)), -torch.inf)
    else:
        # From pinned memory, because the host would wait for another copy.
        masks_there = torch.from_numpy(masks).pin_memory().to(logits.device, non_blocking=True)
        dispatch.kernel("token_bitmask", logits.device)(logits, masks_there)


def _catch_up(session: _Session, tokens: list[int]) -> None:
    """Make `tokens` those that the matcher has consumed. It takes back what differs, such as rejected drafts."""
    if session.prompt_length is None:                # the first call is for the first token after the prompt
        session.prompt_length = len(tokens)
    matcher, consumed, tokens = session.matcher, session.consumed, tokens[session.prompt_length:]
    if tokens[:len(consumed)] != consumed:
        pairs = enumerate(zip(consumed, tokens))
        common = next((place for place, (before, now) in pairs if before != now), min(len(consumed), len(tokens)))
        matcher.rollback(len(consumed) - common)
        del consumed[common:]
    if matcher.is_error():                           # a draft was to blame, or cannot be taken back
        matcher = session.matcher = session.grammar.matcher.deep_copy()
        consumed.clear()
    if new := tokens[len(consumed):]:
        consumed += new[:matcher.try_consume_tokens(new)]
    if len(consumed) < len(tokens) or matcher.is_error():
        raise InvalidRequestError("the tokens do not match the grammar, or the grammar became too complex",
                                  "every token must be allowed by the grammar",
                                  "remove anything else that changes the logits, or simplify the grammar")


def _unusable(reason: object, kind: str) -> InvalidRequestError:
    """Return the error for a grammar of a kind. A regular expression's reason is in a later line than the first."""
    lines = str(reason).strip().splitlines() or [""]
    told = " ".join([lines[0], *[line for line in lines[1:] if line.startswith("error: ")][:1]])
    return InvalidRequestError(f"the grammar does not compile: {told[:300]!r}",
                               f"expected a {kind} that llguidance supports",
                               "see llguidance's documentation for the supported syntax")

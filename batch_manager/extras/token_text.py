"""Incremental decoding for tokenizers with known decoders.

`tokenizers` decodes a whole list of tokens at once. Its decoders are small programs over the list. tokenizer.json names
the decoders of a tokenizer. In this module, each decoder is a step that takes tokens as they arrive and returns text
that no later token can change:

    tokens -> pieces (cached per token id) -> bytes or runs of byte tokens -> text -> steps over the joined text

A step holds back a bounded amount: the bytes of an incomplete character, the current run of byte tokens (one invalid
byte turns the whole run into U+FFFD), or a space that may be joined with the next token. `WholeText` handles
decoders that are unknown or hold back an unbounded amount: it decodes all tokens at the end.
"""

import codecs
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Protocol

from ..errors import InvalidRequestError, printable

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# The replacements of transformers' `clean_up_tokenization_spaces`, in order.
CLEAN_UP = ((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
            (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"))
_NOTHING_TO_CLEAN_UP = re.compile(r" (?:[.?!,'n]|\Z)")

# The replacements that the WordPiece decoder applies to each token.
_WORD_PIECE_CLEAN_UP = (*CLEAN_UP[:7], (" do not", " don't"), *CLEAN_UP[7:])

# A byte token. Rust's integer parser, which tokenizers uses, accepts a plus sign as the first digit.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>")


class Text(Protocol):
    """The text of a growing list of tokens.

    feed   add tokens and return the new final text; changes nothing on an error
    rest   return the text that would follow if no more tokens came; changes nothing
    """

    def feed(self, tokens: Sequence[int]) -> str: ...

    def rest(self) -> str: ...


class TextStep(Protocol):
    """A stage of decoding that edits the text joined from all pieces.

    feed   take the next piece of text and return the new final text
    rest   take a piece of text and return what `feed` would return for it if no text came after it; changes nothing
    """

    def feed(self, text: str) -> str: ...

    def rest(self, text: str) -> str: ...


# ---------------------------------------------------------------------- steps over one token

# (token, is_first) -> token
Each = Callable[[str, bool], str]


def _with_space(token: str, is_first: bool) -> str:
    """Put a space before every token but the first.

    The library `tokenizers` does this for a tokenizer without a decoder. Slow tokenizers do it too.
    """
    return token if is_first else " " + token


def _metaspace(step: dict) -> Each:
    mark, drops_first = step["replacement"], step["prepend_scheme"] != "never"
    return lambda token, is_first: token.replace(mark, "" if is_first and drops_first else " ")


def _word_piece(step: dict) -> Each:
    prefix, cleans_up = step["prefix"], step["cleanup"]

    def decode(token: str, is_first: bool) -> str:
        if not is_first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleans_up:
            for pattern, content in _WORD_PIECE_CLEAN_UP:
                token = token.replace(pattern, content)
        return token

    return decode


def _replace(step: dict) -> Each | None:
    pattern, content = step["pattern"].get("String"), step["content"]
    return (lambda token, is_first: token.replace(pattern, content)) if pattern else None


def _strip(step: dict) -> Each | None:
    content, start = step["content"], step["start"]
    if step["stop"]:    # tokenizers panics on tokens that are shorter than the stripped part
        return None
    return lambda token, is_first: token[min(start, len(token) - len(token.lstrip(content))):]


_EACH: dict[str, Callable[[dict], Each | None]] = {
    "Metaspace": _metaspace, "WordPiece": _word_piece, "Replace": _replace, "Strip": _strip}


# ---------------------------------------------------------------------- steps over the joined text


class _StripStart:
    """Removes the character `content` up to `count` times from the start of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def feed(self, text: str) -> str:
        if self._count:
            dropped = min(self._count, len(text) - len(text.lstrip(self._content)))
            self._count = self._count - dropped if dropped == len(text) else 0
            return text[dropped:]
        return text

    def rest(self, text: str) -> str:
        return text[min(self._count, len(text) - len(text.lstrip(self._content))):]


class _ReplaceInText:
    """Replaces every occurrence of a string, from the left. Holds back a suffix that may start an occurrence."""

    def __init__(self, pattern: str, content: str) -> None:
        self.pattern, self._content = pattern, content
        self.held = ""

    def feed(self, text: str) -> str:
        if not self.held and self.pattern not in text and self.pattern[0] not in text[1 - len(self.pattern):]:
            return text
        parts = (self.held + text).split(self.pattern)
        end = parts[-1]        # replacement text is never part of another occurrence
        kept = next((n for n in range(min(len(end), len(self.pattern) - 1), 0, -1)
                     if end.endswith(self.pattern[:n])), 0)
        parts[-1], self.held = end[: len(end) - kept], end[len(end) - kept:]
        return self._content.join(parts)

    def rest(self, text: str) -> str:
        return (self.held + text).replace(self.pattern, self._content)


class _CleanUp:
    """transformers' clean-up of spaces, such as a space before a full stop: a fixed list of replacements, in order."""

    def __init__(self) -> None:
        self._steps = [_ReplaceInText(*pair) for pair in CLEAN_UP]
        self._space = ""    # a trailing space, held back so that most pieces can skip the steps
        self._is_idle = True

    def feed(self, text: str) -> str:
        text = self._space + text
        self._space = " " if text.endswith(" ") else ""
        text = text[: len(text) - len(self._space)]
        if self._is_idle and _NOTHING_TO_CLEAN_UP.search(text) is None:
            return text
        for step in self._steps:
            text = step.feed(text)
        self._is_idle = not any(step.held for step in self._steps)
        return text

    def rest(self, text: str) -> str:
        text = self._space + text
        for step in self._steps:
            text = step.rest(text)
        return text


# ---------------------------------------------------------------------- the rule, from the serialized decoder


@dataclass(frozen=True)
class Rule:
    """How a tokenizer converts tokens to text.

    before   functions (token, whether it is the first of the text) -> token, which are applied to each token in order
    joins    "text": tokens are strings; "bytes": every token is a byte string, as in ByteLevel; "runs": some tokens are
             single bytes, and a run of them is valid only if the whole run is UTF-8, as in ByteFallback
    after    the same kind of functions, applied to each token after each run has been joined to one token
    steps    functions without arguments, each of which creates a TextStep that edits the joined text
    """

    before: tuple[Each, ...] = ()
    joins: str = "text"
    after: tuple[Each, ...] = ()
    steps: tuple[Callable[[], TextStep], ...] = ()

    def replaced(self, piece: str) -> str:
        """Apply the steps that replace single characters to the text of one token."""
        for step in (make() for make in self.steps):
            if isinstance(step, _ReplaceInText) and len(step.pattern) == 1:
                piece = step.rest(piece)
        return piece

    def with_clean_up(self) -> "Rule":
        return Rule(self.before, self.joins, self.after, (*self.steps, _CleanUp))


JOINED_BY_SPACES = Rule((_with_space,))
BYTE_LEVEL = Rule(joins="bytes")


def read_rule(decoder: dict[str, Any] | None) -> Rule | None:
    """Return the Rule for a decoder of tokenizer.json; None if the decoder is unknown or cannot work incrementally.

    decoder   None: the tokenizer has no decoder, and spaces join its tokens
    """
    if decoder is None:
        return JOINED_BY_SPACES
    before: list[Each] = []
    after: list[Each] = []
    steps: list[Callable[[], TextStep]] = []
    joins, is_joined = "text", False
    for step in _flat(decoder):
        kind = step["type"]
        if kind == "Fuse":
            is_joined = True
        elif is_joined and kind == "Strip" and step["stop"] == 0:
            steps.append(lambda step=step: _StripStart(step["content"], step["start"]))
        elif is_joined and kind == "Replace" and step["pattern"].get("String"):
            steps.append(lambda step=step: _ReplaceInText(step["pattern"]["String"], step["content"]))
        elif is_joined:
            return None
        elif kind == "ByteLevel" and joins == "text":
            joins, is_joined = "bytes", True
        elif kind == "ByteFallback" and joins == "text":
            joins = "runs"
        else:
            each = _EACH[kind](step) if kind in _EACH else None
            if each is None:
                return None
            (after if joins == "runs" else before).append(each)
    return Rule(tuple(before), joins, tuple(after), tuple(steps))


def _flat(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flat(step)
    else:
        yield decoder


# ---------------------------------------------------------------------- pieces, cached per token id


class Pieces(dict):
    """Cache of token id -> piece, which is what the token adds to a text when it is not the first token of the text.

    A piece is a str, bytes, an int (the byte of a token such as `<0xE4>`) or None (no text). The cache is filled on
    lookup, and shared by all texts of a tokenizer.

    token_of   function that returns the token string of an id, or None for an unknown id; may raise for an invalid id
    skips      function (id, token) -> whether the token is omitted
    """

    def __init__(self, rule: Rule, token_of: Callable[[int], str | None], skips: Callable[[int, str], bool]) -> None:
        super().__init__()
        self.rule, self._token_of, self._skips = rule, token_of, skips

    def __missing__(self, token_id: int) -> "str | bytes | int | None":
        try:
            token = self._token_of(index(token_id))
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise not_a_token(token_id) from error
        if token is None:        # not cached: the number of unknown ids is unbounded
            return None
        piece = self[token_id] = self.piece(token_id)
        return piece

    def piece(self, token_id: int, is_first: bool = False, is_first_after: bool = False) -> Any:
        """Return the piece of a token, computed without the cache.

        is_first         passed to the functions in `rule.before`: whether the token is the first of the text
        is_first_after   passed to the functions in `rule.after`: whether the token is the first of the text after
                         each run of byte tokens has been joined to one token
        """
        token = self._token_of(token_id)
        if token is None or self._skips(token_id, token):
            return None
        for each in self.rule.before:
            token = each(token, is_first)
        if self.rule.joins == "bytes":
            return _bytes_of(token)
        if self.rule.joins == "runs" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return int(byte[1], 16)
        return self.after(token, is_first_after)

    def after(self, token: str, is_first: bool) -> str:
        for each in self.rule.after:
            token = each(token, is_first)
        return token


def not_a_token(token_id: object) -> InvalidRequestError:
    return InvalidRequestError(f"the tokenizer has no token {printable(repr(token_id)[:60])}",
                               "expected integers, as in the tensor output_ids",
                               "pass a list or a one-dimensional array of token ids")


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte, for the characters that represent bytes in GPT-2's tokenizer."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{chr(byte): byte for byte in printed}, **{chr(256 + n): byte for n, byte in enumerate(others)}}


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Return the bytes of a token.

    In GPT-2's tokenizer, each character of a token represents a byte. A token with any other character is an added
    token, which is plain text.
    """
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


# ---------------------------------------------------------------------- texts


class _InPieces:
    """Base class of texts to which each token adds a piece. The piece does not depend on the neighbouring tokens.

    is_first   whether the next token is the first of the text and may therefore add a different piece
    """

    def __init__(self, pieces: Pieces, is_first: bool) -> None:
        self._pieces, self._is_first = pieces, is_first

    def _added(self, tokens: Sequence[int]) -> list[Any]:
        """Return the pieces that `tokens` add to the text. Tokens that add no text are left out.

        tokens   the next tokens of the text
        """
        pieces = self._pieces
        added = [piece for token in tokens if (piece := pieces[token]) is not None]
        if self._is_first and added:
            first = next(token for token in tokens if pieces[token] is not None)
            added[0] = pieces.piece(first, is_first=True)
            self._is_first = False
        return added


class _JoinedText(_InPieces):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces, is_first=True)

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join(self._added(tokens))

    def rest(self) -> str:
        return ""


class _ByteText(_InPieces):
    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces, is_first=bool(pieces.rule.before))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(self._added(tokens)))

    def rest(self) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")


class _TextWithRuns:
    """A text with byte tokens (`<0xE4>`). `feed` holds back a run of byte tokens until the run ends.

    If the bytes of a run are not valid UTF-8, each byte of the run becomes one U+FFFD.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._is_first = self._is_first_after = True

    def feed(self, tokens: Sequence[int]) -> str:
        pieces, run, text = self._pieces, self._run, []
        added = [(token, piece) for token in tokens if (piece := pieces[token]) is not None]
        for token, piece in added:
            if self._is_first or self._is_first_after:
                piece = pieces.piece(token, self._is_first, self._is_first_after and not run)
                self._is_first = False
            if type(piece) is int:
                run.append(piece)
                continue
            if run:
                text.append(self.rest())
                run.clear()
            text.append(piece)
            self._is_first_after = False
        return "".join(text)

    def rest(self) -> str:
        if not self._run:
            return ""
        try:
            tokens = [self._run.decode()]
        except UnicodeDecodeError:
            tokens = [REPLACEMENT] * len(self._run)
        return "".join(self._pieces.after(token, self._is_first_after and not n) for n, token in enumerate(tokens))


class _TextInSteps:
    def __init__(self, text: Text, steps: list[TextStep]) -> None:
        self._text, self._steps = text, steps

    def feed(self, tokens: Sequence[int]) -> str:
        text = self._text.feed(tokens)
        for step in self._steps:
            text = step.feed(text)
        return text

    def rest(self) -> str:
        text = self._text.rest()
        for step in self._steps:
            text = step.rest(text)
        return text


class WholeText:
    """A text that is decoded as a whole at the end. Works for any tokenizer."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        added = []
        for token in tokens:
            try:
                added.append(index(token))
            except TypeError as error:
                raise not_a_token(token) from error
        self._tokens += added
        return ""

    def rest(self) -> str:
        try:
            return self._decode(list(self._tokens))
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise InvalidRequestError(f"the tokenizer cannot decode these tokens: {type(error).__name__}",
                                      "expected tokens of its vocabulary",
                                      "pass the tokenizer of the model") from error


_JOINS: dict[str, Callable[[Pieces], Text]] = {"text": _JoinedText, "bytes": _ByteText, "runs": _TextWithRuns}


def text_of(pieces: Pieces) -> Text:
    """Return an empty `Text` that decodes tokens by `pieces.rule`, and caches their pieces in `pieces`."""
    text = _JOINS[pieces.rule.joins](pieces)
    return _TextInSteps(text, [make() for make in pieces.rule.steps]) if pieces.rule.steps else text


# ---------------------------------------------------------------------- comparing a rule with its tokenizer


class Sample(NamedTuple):
    """What `agrees` decodes to compare a Rule with its tokenizer: the token lists in `texts`, and random token lists.

    num_tokens   vocabulary size
    special      ids of added tokens; if there are any, every random list includes at least one
    texts        token lists of real texts
    """

    num_tokens: int
    special: Sequence[int]
    texts: Sequence[Sequence[int]]


def agrees(pieces: Pieces, decode: Callable[[list[int]], str], sample: Sample) -> bool:
    """Whether `pieces.rule` decodes like `decode`, the tokenizer's function.

    The function compares the results of the two for the token lists in `sample.texts` and for a fixed set of random
    token lists. A rule that was read from the serialized decoder can be wrong for another version of the library,
    or for a class that overrides `decode`.
    """
    generator = random.Random(0)
    lists: list[Sequence[int]] = [*sample.texts]
    for length in (1, 2, 3, 5, 8, 13, 40):
        for _ in range(8):
            tokens = generator.choices(range(max(sample.num_tokens, 1)), k=length)
            if sample.special:
                tokens[generator.randrange(length)] = generator.choice(sample.special)
            lists.append(tokens)
    try:
        for tokens in lists:
            text = text_of(pieces)
            if text.feed(tokens) + text.rest() != decode(list(tokens)):
                return False
    except Exception:    # either side may raise for an unknown id
        return False
    return True

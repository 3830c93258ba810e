"""The bytes of single tokens, for names of tokens, positions in a text, and guided decoding."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .text import kind_of
from .token_text import REPLACEMENT


class TokenBytes:
    """The bytes that each token adds to a text that has begun.

    For every kind of decoder, the joined bytes of the tokens after the first are those of the text: a byte-level token
    has the bytes of its characters, a byte token (`<0xC3>`) one byte, a token of SentencePiece a space for each mark,
    and a word of WordPiece a space before it. At the start of a text, tokenizers drop some spaces: see `at_start`. If
    tokens of this tokenizer cannot be decoded one by one (`TextStream.comes_in_pieces` is False), the bytes are those
    of the token decoded alone.

    tokenizer   a `tokenizers.Tokenizer`, or a tokenizer of transformers

    special         special tokens, which the text of an output omits, by id
    have_own_bytes  whether tokens can be decoded one by one

    Raises ConfigError for an object that is not a tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        kind = kind_of(tokenizer, skips=False)
        self.special: Mapping[int, str] = kind_of(tokenizer, skips=True).omitted
        self.have_own_bytes = kind.pieces is not None
        self._pieces, self._tokenizer = kind.pieces, tokenizer
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Return the bytes of a token; those of its name for a special token; none for an id without a token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def is_byte_token(self, token: int) -> bool:
        """Whether the token is one byte of a run that is text only as a whole, as `<0xC3>` is."""
        return self._pieces is not None and type(self._pieces[token]) is int

    def at_start(self, before: list[int], token: int) -> bytes:
        """Return the bytes that a token adds to a text of the tokens `before`, which so far has no characters."""
        start = self._tokenizer.decode(before, skip_special_tokens=True)
        text = self._tokenizer.decode([*before, token], skip_special_tokens=True)
        if REPLACEMENT in text or not text.startswith(start):
            return self[token]
        return text[len(start):].encode("utf-8", "replace")

    def begins(self, tokens: Iterable[int]) -> bool:
        """Whether the text of the tokens has characters, so that it drops no more spaces at its start."""
        tokens = list(tokens)
        if any(self[token].strip(b" ") for token in tokens if token not in self.special):
            return True
        return bool(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _look_up(self, token: int) -> bytes:
        if token in self.special:
            return self.special[token].encode()
        if self._pieces is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode("utf-8", "replace")
        piece = self._pieces[token]
        if isinstance(piece, int):
            return bytes([piece])
        if isinstance(piece, str):
            return self._pieces.rule.replaced(piece).encode("utf-8", "replace")
        return piece or b""


class TokenPositions:
    """The positions of successive tokens in a text, in characters, and the bytes that they add to it.

    If a token begins in the middle of a character, its position is the position of this character. Each invalid
    byte sequence counts as one character, and each byte of an invalid run of byte tokens, as in the text. A special
    token adds nothing.

    before   tokens before the first one, whose text does not count
    offset   number of characters before the first token
    """

    def __init__(self, tokens: TokenBytes, before: Iterable[int], offset: int) -> None:
        self._tokens, self._offset = tokens, offset
        before = list(before)
        self._before = None if tokens.begins(before) else before    # None: the text has begun
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run, self._run_offset = bytearray(), 0

    def content(self, token: int) -> bytes:
        """Return the bytes that `token` would add here."""
        if token in self._tokens.special:
            return b""
        return self._tokens[token] if self._before is None else self._tokens.at_start(self._before, token)

    def next(self, token: int) -> int:
        """Add the next token, and return its position."""
        content = self.content(token)
        if not content:
            if self._before is not None:
                self._before.append(token)
            return self._offset
        self._before = None
        if self._tokens.is_byte_token(token):
            if not self._run:
                self._run_offset = self._offset
            self._run += content
        elif self._run:
            self._end_run()
        state = self._decoder.getstate()
        first = self._decoder.decode(content[:1])
        position = self._offset + len(first) - (not self._decoder.getstate()[0])
        self._decoder.setstate(state)
        self._offset += len(self._decoder.decode(content))
        return position

    def _end_run(self) -> None:
        try:
            self._run.decode()
        except UnicodeDecodeError:
            self._offset = self._run_offset + len(self._run)
        self._run.clear()
        self._decoder.reset()


class SpelledPositions:
    """The positions of the tokens of an encoded text, in characters. Every character belongs to a token.

    Special tokens that the text spells have their characters. A token that the tokenizer adds has none, and what a
    normalizer changes counts as in the text.

    ends   (first character, character after the last one) of each token, as the tokenizer states them
    """

    def __init__(self, ends: Sequence[tuple[int, int]]) -> None:
        self._ends, self._offset = iter(ends), 0

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> "SpelledPositions | None":
        """Return the positions in `text`; None: the tokenizer does not state them."""
        if hasattr(tokenizer, "encode_batch"):
            (encoding,) = tokenizer.encode_batch([text])     # unlike `encode`, releases the interpreter lock
            return cls(encoding.offsets)
        if getattr(tokenizer, "is_fast", False):
            return cls(tokenizer(text, return_offsets_mapping=True)["offset_mapping"])
        return None

    def next(self, _: int) -> int:
        """Return the position of the next token."""
        start, end = next(self._ends)
        position = self._offset if start == end else min(start, self._offset)    # `start` may be after a space
        self._offset = max(self._offset, end)
        return position

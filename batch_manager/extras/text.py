"""Incremental detokenization with stop strings, for tokenizers of `tokenizers` and transformers.

    stream = TextStream(tokenizer, prompt_ids, stop=["\\n\\n", "User:"])
    send(stream.push(tokens))             # for every response: the new final text
    if stream.stopped_by is not None: ... # stop the request through the poll callback
    send(stream.finish())                 # for the final response: the text held back

Also exports `chat_prompt`, which formats messages as a prompt. The module needs the library of the tokenizer, and
`chat_prompt` needs jinja2. The extra `text` of this package installs `tokenizers` and jinja2.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from os.path import commonprefix
from typing import Any, NamedTuple

from ..contained_log import log
from ..errors import ConfigError, InvalidRequestError, type_name
from .chat_template import chat_prompt
from .stop_strings import TextWithSpecialTokens, stop_strings
from .token_text import (
    BYTE_LEVEL,
    JOINED_BY_SPACES,
    Pieces,
    Rule,
    Sample,
    Text,
    WholeText,
    agrees,
    not_a_token,
    read_rule,
    text_of,
)

__all__ = ["TextStream", "chat_prompt"]

# Modules in which transformers 4 and 5 define the default methods of tokenizers.
_TRANSFORMERS_BASE = "transformers.tokenization_utils_base"
_TRANSFORMERS_FAST = ("transformers.tokenization_utils_tokenizers", "transformers.tokenization_utils_fast")
_TRANSFORMERS_SLOW = ("transformers.tokenization_python", "transformers.tokenization_utils")

# Every replacement of the clean-up of spaces changes this string.
_PROBE = "Well , is n't it ? He 'll say I 'm , we 've , you 're , it 's ' so ' . No ! do not"


class TextStream:
    """Detokenizes one request incrementally.

    tokenizer             a `tokenizers.Tokenizer`, or a fast or slow tokenizer of transformers
    prompt_ids            tokens before the first pushed token. Their text is not returned, but they affect the text
                          after them: for example, SentencePiece may add a leading space
    stop                  a stop string, or any number of them; None: no stop string
    skip_special_tokens   omit special tokens, such as the end id

    The concatenation of everything that `push` and `finish` return does not depend on how tokens are grouped into
    pushes. It equals what `tokenizer.decode(prompt_ids + tokens)` adds to `tokenizer.decode(prompt_ids)`. If the prompt
    ends within a character, `decode(prompt_ids)` is not always a prefix of `decode(prompt_ids + tokens)`. In this case
    the concatenation is the rest of the second text after the longest common prefix of both texts.

    Returned text is final. `push` holds back bytes of an incomplete character, a space that the tokenizer may still
    remove, a run of byte tokens (`<0xE4>`; valid only if the whole run is UTF-8), and text that may be the start of a
    stop string. `finish` returns the remainder, with U+FFFD for invalid bytes. A character is a code point: an emoji
    of several code points, or a letter and its combining accent, may arrive in several pieces.

    The text ends before the stop string that is completed first. If one character completes two stop strings, the text
    ends before the shorter one. `stopped_by` is the stop string that ended the text, otherwise None. A stop string may
    be a special token or contain special tokens, although the text omits them: `<|end|>`, `\\n<|user|>`.

    `comes_in_pieces` is False for a tokenizer whose tokens cannot be decoded incrementally: its decoder is CTC,
    BPEDecoder, a custom decoder or one that replaces regular expressions, or its class overrides `decode`, as classes
    of slow SentencePiece tokenizers do. A warning is then logged, and `finish` searches the whole text for stop strings
    and returns the text. A tokenizer is examined once, for a few milliseconds, and again after its decoder, vocabulary
    size or special tokens have changed.

    A token takes a few microseconds, whatever the length of the sequence. Prompt tokens cost the same. Not thread-safe,
    but several threads may use streams of the same tokenizer.

    Raises ConfigError for an object that is not a tokenizer, and InvalidRequestError for an invalid `stop` and for
    token ids that are not integers or that the tokenizer cannot look up, such as negative ones. An integer without a
    token is skipped, as in `decode`.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Iterable[int] = (),
                 stop: str | Iterable[str] | None = (), skip_special_tokens: bool = True) -> None:
        self.stopped_by: str | None = None
        kind = kind_of(tokenizer, bool(skip_special_tokens))
        self._text, self._new_text, self._omitted = kind.new_text(), kind.new_text, kind.omitted
        self.comes_in_pieces = not isinstance(self._text, WholeText)
        self._stop = stop_strings(stop)
        self._shown = None if self._stop is None else TextWithSpecialTokens(self._stop)
        self._held = ""    # text that may be the start of a stop string
        self._is_finished = False
        self._feed(prompt_ids)
        # Text that decoding the prompt alone would end with. It belongs to the prompt unless later tokens change it.
        self._prompt_end = self._text.rest()

    def push(self, tokens: Iterable[int]) -> str:
        """Add token ids, as a list or a one-dimensional array or tensor, and return the new final text.

        Returns "" after a stop string. Raises InvalidRequestError for invalid token ids and after `finish`, without
        changing the stream.
        """
        if self.stopped_by is not None:
            return ""
        if self._is_finished:
            raise InvalidRequestError("push was called after finish", "a finished stream accepts no tokens",
                                      "make a new TextStream for every request")
        tokens = _listed(tokens)
        if self._stop is None or not self._has_omitted(tokens):
            return self._up_to_a_stop(self._feed(tokens))
        self._new_text().feed(tokens)        # raises for invalid token ids, before this stream changes
        pieces = []
        for token in tokens:
            pieces.append(self._up_to_a_stop(self._feed([token]), self._omitted.get(token)))
            if self.stopped_by is not None:
                break
        return "".join(pieces)

    def finish(self) -> str:
        """End the text and return the text held back. Returns "" after a stop string and on further calls."""
        if self._is_finished or self.stopped_by is not None:
            return ""
        text = self._up_to_a_stop(self._text.rest())
        self._is_finished = True
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _feed(self, tokens: Iterable[int]) -> str:
        try:
            return self._text.feed(_listed(tokens))
        except TypeError as error:    # an unhashable item
            raise not_a_token(tokens) from error

    def _has_omitted(self, tokens: list[int]) -> bool:
        try:
            return not self._omitted.keys().isdisjoint(tokens)
        except TypeError as error:
            raise not_a_token(tokens) from error

    def _up_to_a_stop(self, text: str, special: str | None = None) -> str:
        """Return the text that is final, up to a stop string, after `text` and then the omitted token `special`."""
        if self._prompt_end and text:
            text = self._after_prompt(text)
        if self._stop is None:
            return text
        text, num_seen = self._held + text, len(self._held)
        found, shown = self._stop.first(text, num_seen), self._shown.add(text[num_seen:])
        if special is not None and found is shown is None:
            pending = self._text.rest()
            pending = pending[len(commonprefix((pending, self._prompt_end))):]
            shown = self._shown.add_token(text[self._stop.begun(text):], pending, special)
            if shown is not None:
                text += pending
                found = self._stop.first(text, num_seen)
        if shown is not None:
            completed = len(text) - shown.from_end, shown.ends_in_token, len(shown.string)
            if found is None or completed < (found[0] + len(found[1]), False, len(found[1])):
                found = max(0, len(text) - shown.from_start), shown.string
        if found is not None:
            position, self.stopped_by = found
            self._held = ""
            return text[:position]
        kept = min(self._stop.begun(text), len(text) - self._shown.num_held)
        self._held = text[kept:]
        return text[:kept]

    def _after_prompt(self, text: str) -> str:
        same = len(commonprefix((text, self._prompt_end)))
        self._prompt_end = self._prompt_end[same:] if same == len(text) else ""
        return text[same:]


def _listed(tokens: Iterable[int]) -> list[int]:
    if type(tokens) is list:
        return tokens
    try:
        return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    except TypeError as error:    # not iterable
        raise not_a_token(tokens) from error


# ---------------------------------------------------------------------- the kind of tokenizer


class _Kind(NamedTuple):
    """What a stream needs of a tokenizer.

    new_text   returns an empty text
    omitted    the special tokens that the text omits, by id
    pieces     what each token adds to a text; None: tokens cannot be decoded one by one
    """

    new_text: Callable[[], Text]
    omitted: Mapping[int, str]
    pieces: Pieces | None


class _Identity:
    """A cache key that compares by identity. It keeps the object alive, so that its id() is not reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def kind_of(tokenizer: Any, skips: bool) -> _Kind:
    """Return what texts need of a tokenizer, with or without (`skips`) special tokens. Examines a tokenizer once.

    Raises ConfigError for an object that is not a tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if _is_fast(tokenizer) or _is_fast(backend):
        backend = tokenizer if _is_fast(tokenizer) else backend
        traits = _decoder_of(backend), backend.get_vocab_size(), _special_of(backend), _cleans_up(tokenizer)
        return _fast_kind(_Identity(tokenizer), skips, *traits)
    if callable(getattr(tokenizer, "decode", None)):
        special = tuple(getattr(tokenizer, "all_special_ids", ()))
        traits = _length(tokenizer), special, _cleans_up(tokenizer)
        return _slow_kind(_Identity(tokenizer), skips, *traits)
    raise ConfigError(f"the tokenizer is of type {type_name(tokenizer)}", "expected an object that decodes tokens",
                      "pass a tokenizers.Tokenizer, or a tokenizer of transformers")


def _is_fast(tokenizer: Any) -> bool:
    return all(hasattr(tokenizer, name) for name in ("decode", "id_to_token", "decoder", "get_added_tokens_decoder"))


def _decoder_of(backend: Any) -> bytes | str | None:
    """Return the serialized decoder, "" if there is no decoder, or None if the decoder cannot be serialized."""
    decoder = backend.decoder
    if decoder is None:
        return ""
    try:
        return decoder.__getstate__()
    except Exception:    # a custom decoder, written in Python
        return None


def _special_of(backend: Any) -> frozenset[str]:
    return frozenset(token.content for token in backend.get_added_tokens_decoder().values() if token.special)


def _cleans_up(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))


def _length(tokenizer: Any) -> int:
    try:
        return len(tokenizer)
    except TypeError:
        return 0


def _defined_in(tokenizer: Any, name: str) -> str:
    return getattr(getattr(tokenizer, name, None), "__module__", None) or ""


def _is_plain_fast(tokenizer: Any) -> bool:
    return (_defined_in(tokenizer, "decode") == _TRANSFORMERS_BASE
            and _defined_in(tokenizer, "_decode") in _TRANSFORMERS_FAST
            and _defined_in(tokenizer, "clean_up_tokenization") == _TRANSFORMERS_BASE)


def _read(decoder: bytes | str) -> Rule | None:
    try:
        return read_rule(json.loads(decoder) if decoder else None)
    except (LookupError, TypeError, ValueError):    # a format of another version of tokenizers
        return None


def _probe(encode: Callable[[str], list[int]]) -> list[list[int]]:
    try:
        return [encode(_PROBE)]
    except Exception:    # a vocabulary without these characters or an unknown token
        return []


@lru_cache(maxsize=16)
def _fast_kind(key: _Identity, skips: bool, decoder: bytes | str | None, num_tokens: int, special: frozenset[str],
               cleans_up: bool) -> _Kind:
    tokenizer = key.value
    backend = tokenizer if _is_fast(tokenizer) else tokenizer.backend_tokenizer
    rules: list[Rule] = []
    if decoder is not None and (rule := _read(decoder)):
        if tokenizer is backend:
            rules = [rule]
        elif _is_plain_fast(tokenizer):    # whether `decode` cleans up differs between versions
            rules = [rule.with_clean_up(), rule] if cleans_up else [rule]
    added = backend.get_added_tokens_decoder()
    omitted = {number: token.content for number, token in added.items() if skips and token.special}
    probe = _probe(lambda text: backend.encode(text, add_special_tokens=False).ids)
    sample = Sample(num_tokens, sorted(added), probe)
    return _kind(tokenizer, skips, rules, backend.id_to_token, lambda _, token: token in special, sample, omitted)


@lru_cache(maxsize=16)
def _slow_kind(key: _Identity, skips: bool, num_tokens: int, special: tuple[int, ...], cleans_up: bool) -> _Kind:
    tokenizer = key.value
    rules: list[Rule] = []
    if hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "convert_tokens_to_string"):
        if _defined_in(tokenizer, "convert_tokens_to_string") in _TRANSFORMERS_SLOW:
            rules = [JOINED_BY_SPACES]
        elif isinstance(getattr(tokenizer, "byte_decoder", None), dict):
            rules = [BYTE_LEVEL]
    if cleans_up:
        rules = [*(rule.with_clean_up() for rule in rules), *rules]
    probe = _probe(lambda text: tokenizer.encode(text, add_special_tokens=False)) if rules else []
    sample = Sample(num_tokens, sorted({*getattr(tokenizer, "added_tokens_decoder", ()), *special}), probe)
    token_of = getattr(tokenizer, "convert_ids_to_tokens", None)
    omitted = {number: token_of(number) for number in special} if skips and token_of is not None else {}
    return _kind(tokenizer, skips, rules, token_of, lambda token_id, _: token_id in special, sample, omitted)


def _kind(tokenizer: Any, skips: bool, rules: list[Rule], token_of: Callable[[int], str | None] | None,
          is_special: Callable[[int, str], bool], sample: Sample, omitted: Mapping[int, str]) -> _Kind:
    decode = partial(tokenizer.decode, skip_special_tokens=skips)
    for rule in rules:
        pieces = Pieces(rule, token_of, is_special if skips else lambda *_: False)
        if agrees(pieces, decode, sample):
            return _Kind(partial(text_of, pieces), omitted, pieces)
    log.warning("text: tokens of a %s cannot be detokenized incrementally; each text arrives in one piece, when it "
                "is finished", type_name(tokenizer))
    try:
        decode([])
    except Exception as error:
        raise ConfigError(f"the tokenizer, of type {type_name(tokenizer)}, cannot decode: {type(error).__name__}",
                          f"decode(list of tokens, skip_special_tokens={skips}) must return a str",
                          "pass a tokenizers.Tokenizer, or a tokenizer of transformers") from error
    return _Kind(partial(WholeText, decode), omitted, None)

"""From tokens to text, piece by piece, with stop strings. For tokenizers of `tokenizers` and of transformers.

    stream = TextStream(tokenizer, prompt_ids, stop=["\\n\\n", "User:"])
    send(stream.push(tokens))             # in every response: the new text that is certain
    if stream.stopped_by is not None:     # tell the engine, by the stop signals
    send(stream.finish())                 # in the final one: what was kept back

and from messages to the text of a prompt: `chat_prompt`. Needs what makes the tokenizer, and jinja2 for `chat_prompt`:
the extra `text`.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from os.path import commonprefix
from typing import Any

from ..contained_log import log
from ..errors import ConfigError, InvalidRequestError, type_name
from .chat_template import chat_prompt
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

# Where transformers 4 and 5 define what its classes do unless they say otherwise.
_TRANSFORMERS_BASE = "transformers.tokenization_utils_base"
_TRANSFORMERS_FAST = ("transformers.tokenization_utils_tokenizers", "transformers.tokenization_utils_fast")
_TRANSFORMERS_SLOW = ("transformers.tokenization_python", "transformers.tokenization_utils")

# A text in which every clean-up of spaces would change something.
_PROBE = "Well , is n't it ? He 'll say I 'm , we 've , you 're , it 's ' so ' . No ! do not"


class TextStream:
    """The text of the tokens of one request, in pieces.

    tokenizer             a `tokenizers.Tokenizer`, or one of transformers, fast or slow
    prompt_ids            tokens before the first one that is pushed; their text is not given out. They decide, for
                          instance, whether a text of SentencePiece begins with a space
    stop                  strings that end the text; one, or any number; None: none
    skip_special_tokens   leave out special tokens, such as the end id

    However the tokens are cut into pushes, the pieces that `push` and `finish` return are, joined, what
    `tokenizer.decode(prompt_ids + tokens)` has after `tokenizer.decode(prompt_ids)`. Where the second is no beginning
    of the first, because the prompt ends within a character, it is what follows the longest beginning they have in
    common. What is returned is never taken back: bytes of a character that is not complete, a space that the
    tokenizer may still remove, and a run of byte tokens (`<0xE4>`, which are text only if the whole run is UTF-8) are
    kept until it is certain what they are, and the last of them come from `finish`, U+FFFD for what is no character.
    A character is a code point: an emoji of several, or a letter and its accent, may come in several pieces.

    With stop strings the pieces are that text up to the first stop string: the one that is complete first, and where
    two are complete with the same character the shorter one. Nothing of it is returned, all before it is, and then
    nothing any more. Text that may be the beginning of a stop string is kept back.

    `stopped_by` is the stop string that ended the text, None while there is none. `comes_in_pieces` is False for a
    tokenizer whose decoding is not known to be cut in pieces: one with a decoder CTC, BPEDecoder or of one's own, a
    decoder that replaces regular expressions, or a class with a `decode` of its own, SentencePiece's slow ones among
    them. Such a text is right too, but all of it comes from `finish`, stop strings are found there, and a warning in
    the log says so. A tokenizer is looked at once, for a few milliseconds, and again when its decoder, its number of
    tokens or its special tokens have changed.

    Time: a few microseconds a token at any length, those of the prompt included. One thread at a time; streams of one
    tokenizer may be used by several.

    Raises ConfigError for an object that is no tokenizer and for an empty stop string, InvalidRequestError for tokens
    that are no integers and ids that cannot be any token's; ids beyond the vocabulary are left out, as `decode` does.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Iterable[int] = (),
                 stop: str | Iterable[str] | None = (), skip_special_tokens: bool = True) -> None:
        self.stopped_by: str | None = None
        self._text = _new_text(tokenizer, bool(skip_special_tokens))
        self.comes_in_pieces = not isinstance(self._text, WholeText)
        self._stop = _stop_strings(stop)
        self._state, self._held = 0, ""    # of the search for stop strings: what was read of one, and its text
        self._is_finished = False
        self._feed(prompt_ids)
        # What finishing here would add is part of the prompt's text, as far as it stays what it is.
        self._of_the_prompt = self._text.rest()

    def push(self, tokens: Iterable[int]) -> str:
        """The new text that is certain with these tokens: a list of ids, or a one-dimensional array or tensor.

        Returns "" once a stop string was found. Raises InvalidRequestError for tokens that are no ids, and after
        `finish`; the stream is then as it was.
        """
        if self.stopped_by is not None:
            return ""
        if self._is_finished:
            raise InvalidRequestError("tokens were pushed after finish()", "the text has ended there",
                                      "make a new TextStream for every request")
        return self._up_to_a_stop(self._feed(tokens))

    def finish(self) -> str:
        """The rest of the text: what was kept back. Returns "" when it is called again, and after a stop string."""
        if self._is_finished or self.stopped_by is not None:
            return ""
        text = self._up_to_a_stop(self._text.rest())
        self._is_finished = True
        if self.stopped_by is None:
            text, self._held = text + self._held, ""
        return text

    def _feed(self, tokens: Iterable[int]) -> str:
        try:
            if type(tokens) is not list:
                tokens = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
            return self._text.feed(tokens)
        except TypeError as error:    # no iterable, or something in it that is no key
            raise not_a_token(tokens) from error

    def _up_to_a_stop(self, text: str) -> str:
        if self._of_the_prompt and text:
            text = self._behind_the_prompt(text)
        if self._stop is None:
            return text
        self._state, end, found = self._stop.scan(self._state, text)
        before, text = len(self._held), self._held + text
        if found is not None:
            self.stopped_by, self._held = found, ""
            return text[: before + end - len(found)]
        kept = len(text) - self._stop.depths[self._state]
        self._held = text[kept:]
        return text[:kept]

    def _behind_the_prompt(self, text: str) -> str:
        same = len(commonprefix((text, self._of_the_prompt)))
        self._of_the_prompt = self._of_the_prompt[same:] if same == len(text) else ""
        return text[same:]


# ---------------------------------------------------------------------- stop strings


class _StopStrings:
    """Aho and Corasick's automaton: reads each character once, whatever the strings.

    A state is the longest beginning of a stop string that the text ends with; `depths` has its length, `found` the
    shortest stop string that it ends with.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depths, self._found = [0], [None]
        for string in sorted(strings, key=len):
            state = 0
            for character in string:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self.depths.append(self.depths[state] + 1)
                    self._found.append(None)
                state = self._next[state][character]
            self._found[state] = string
        self._fallback = [0] * len(self._next)
        states = list(self._next[0].values())
        for state in states:    # grows: breadth first, so that the fallback of a state is complete before its own
            for character, then in self._next[state].items():
                self._fallback[then] = self._step(self._fallback[state], character)
                states.append(then)
            self._found[state] = self._found[self._fallback[state]] or self._found[state]    # the shorter one
        self._begins = re.compile("[" + "".join(map(re.escape, self._next[0])) + "]")

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """(state, position after the first stop string, that string); the string is None where there is none."""
        position = 0
        while position < len(text):
            if not state:
                match = self._begins.search(text, position)
                if match is None:
                    break
                position = match.start()
            state = self._step(state, text[position])
            position += 1
            if self._found[state] is not None:
                return state, position, self._found[state]
        return state, position, None


_make_stop_strings = lru_cache(maxsize=64)(_StopStrings)


def _stop_strings(stop: str | Iterable[str] | None) -> _StopStrings | None:
    if not isinstance(stop, Iterable | None):
        raise ConfigError(f"stop is of type {type_name(stop)}", "a text, a list of texts, or None", "correct it")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"{string!r:.60} is a stop string", "stop strings are texts of at least one character",
                              "leave it out")
    return _make_stop_strings(strings) if strings else None


# ---------------------------------------------------------------------- which tokenizer is it?


class _Same:
    """A key that is equal for the same object only, and keeps it alive: an id is used again, an object is not."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def _new_text(tokenizer: Any, skips: bool) -> Text:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if _is_fast(tokenizer) or _is_fast(backend):
        backend = tokenizer if _is_fast(tokenizer) else backend
        looks = _decoder_of(backend), backend.get_vocab_size(), _special_of(backend), _cleans_up(tokenizer)
        return _maker_for_fast(_Same(tokenizer), skips, *looks)()
    if callable(getattr(tokenizer, "decode", None)):
        special = tuple(getattr(tokenizer, "all_special_ids", ()))
        looks = _length(tokenizer), special, _cleans_up(tokenizer)
        return _maker_for_slow(_Same(tokenizer), skips, *looks)()
    raise ConfigError(f"a {type_name(tokenizer)} is no tokenizer", "an object that decodes tokens",
                      "pass a tokenizers.Tokenizer, or a tokenizer of transformers")


def _is_fast(tokenizer: Any) -> bool:
    return all(hasattr(tokenizer, name) for name in ("decode", "id_to_token", "decoder", "get_added_tokens_decoder"))


def _decoder_of(backend: Any) -> bytes | str | None:
    """The description of the decoder; "" where it has none, None where it cannot be described."""
    decoder = backend.decoder
    if decoder is None:
        return ""
    try:
        return decoder.__getstate__()
    except Exception:    # a decoder of one's own, in Python
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
    except (LookupError, TypeError, ValueError):    # described as another version of tokenizers does
        return None


def _probe(encode: Callable[[str], list[int]]) -> list[list[int]]:
    try:
        return [encode(_PROBE)]
    except Exception:    # a vocabulary without these characters, and without a token for unknown ones
        return []


@lru_cache(maxsize=16)
def _maker_for_fast(key: _Same, skips: bool, decoder: bytes | str | None, num_tokens: int, special: frozenset[str],
                    cleans_up: bool) -> Callable[[], Text]:
    tokenizer = key.value
    backend = tokenizer if _is_fast(tokenizer) else tokenizer.backend_tokenizer
    rules: list[Rule] = []
    if decoder is not None and (rule := _read(decoder)):
        if tokenizer is backend:
            rules = [rule]
        elif _is_plain_fast(tokenizer):    # which of them cleans up, and when, differs between versions
            rules = [rule.with_clean_up(), rule] if cleans_up else [rule]
    added = sorted(backend.get_added_tokens_decoder())
    probe = _probe(lambda text: backend.encode(text, add_special_tokens=False).ids)
    sample = Sample(num_tokens, added, probe)
    return _maker(tokenizer, skips, rules, backend.id_to_token, lambda _, token: token in special, sample)


@lru_cache(maxsize=16)
def _maker_for_slow(key: _Same, skips: bool, num_tokens: int, special: tuple[int, ...],
                    cleans_up: bool) -> Callable[[], Text]:
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
    return _maker(tokenizer, skips, rules, getattr(tokenizer, "convert_ids_to_tokens", None),
                  lambda token_id, _: token_id in special, sample)


def _maker(tokenizer: Any, skips: bool, rules: list[Rule], token_of: Callable[[int], str | None] | None,
           is_special: Callable[[int, str], bool], sample: Sample) -> Callable[[], Text]:
    decode = partial(tokenizer.decode, skip_special_tokens=skips)
    for rule in rules:
        pieces = Pieces(rule, token_of, is_special if skips else lambda *_: False)
        if agrees(pieces, decode, sample):
            return partial(text_of, pieces)
    log.warning("text: a %s decodes in a way that is not known to be cut in pieces; its texts come all at once, when "
                "they are finished", type_name(tokenizer))
    try:
        decode([])
    except Exception as error:
        raise ConfigError(f"a {type_name(tokenizer)} cannot decode: {type(error).__name__}",
                          f"decode(list of tokens, skip_special_tokens={skips}) returns a text",
                          "pass a tokenizers.Tokenizer, or a tokenizer of transformers") from error
    return partial(WholeText, decode)

"""Build the tokenizer and chat template of a GGUF file. Needs tokenizers: the extra `text`.

A GGUF file has no tokenizer.json. Its metadata contains the vocabulary, the merges or scores, and the name of the
pre-tokenizer. This module maps each known name to a pre-tokenizer. It refuses unknown names, because a wrong
pre-tokenizer degrades the output without an error.
"""

import os
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import numpy as np

from ..errors import ConfigError, counted, printable
from ..weights.folder import gguf_file, is_gguf_name
from ..weights.gguf_header import GgufArray, GgufHeader, read_gguf_array, read_gguf_header

LONGEST_TOKEN = 1024     # characters
MOST_TOKENS = 2**20      # four times the largest known vocabularies
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
TEMPLATE_KEY = "tokenizer.chat_template"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"    # SentencePiece's symbol for a space

# GGUF's token types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                   "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"}

# Architectures whose metadata does not fully describe the tokenizer -> what the tokenizer does that is missing.
_INCOMPLETE_METADATA = {
    "gemma": "merges tokens in an order that the file does not record",
    "gemma2": "merges tokens in an order that the file does not record"}
# Gemma 3 also merges to user-defined tokens, such as runs of spaces. Their scores, 0 in its tokenizer.model, are not in
# the file.
_GEMMA3 = "gemma3"
# Phi-3's special tokens absorb the spaces after them, except these. The file does not record it.
_PHI3, _PHI3_KEEP_SPACES = "phi3", ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How text is split into words before merging.

    pattern         regular expression that matches words; None: GPT-2's pattern, built into tokenizers
    digits          whether every digit is split off before the pattern is applied
    normalizes      whether Unicode NFC normalization is applied first
    ignore_merges   whether a word that is a token stays whole, whatever the merges are
    adds_bos        whether prompts get a bos token if the file does not say whether they do
    """

    pattern: str | None = None
    digits: bool = False
    normalizes: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
          rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
          r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA_3 = _PreTokenizer(_GPT4, ignore_merges=True, adds_bos=True)

# By `tokenizer.ggml.pre`. Has only the names that identify one tokenizer with a known tokenizer.json.
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "phi-2": _PreTokenizer(),
    "olmo": _PreTokenizer(normalizes=True),
    "mpt": _PreTokenizer(normalizes=True),
    "smollm": _PreTokenizer(digits=True),
    "starcoder": _PreTokenizer(digits=True),
    "refact": _PreTokenizer(digits=True),
    "command-r": _PreTokenizer(digits=True, normalizes=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "dbrx": _PreTokenizer(_GPT4),
    "qwen2": _PreTokenizer(_GPT4.replace(r"\p{N}{1,3}", r"\p{N}"), normalizes=True),
    "tekken": _PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": _PreTokenizer(_GPT4O),
}


def is_gguf_file(path: str | os.PathLike) -> bool:
    """Whether a path has the name of a GGUF file and is not a folder. The file need not exist."""
    return is_gguf_name(os.fspath(path)) and not os.path.isdir(path)


def load_gguf_tokenizer(path: str | os.PathLike) -> Any:
    """Build the `tokenizers.Tokenizer` of a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

    Control tokens and user-defined tokens are matched as a whole in text. Control tokens are special. The file
    can say whether the tokenizer adds a bos token and an eos token. By default, the tokenizer adds no eos token. It
    adds a bos token by default if it is SentencePiece, or if `_PreTokenizer.adds_bos` is True.

    Raises ConfigError if the library is not installed, the tokenizer is unsupported or the file is broken.
    """
    try:
        from tokenizers import AddedToken, processors
    except ImportError as error:
        raise ConfigError("tokenizers is not installed", "it is required to encode and decode text",
                          'pip install "batch-manager[text]"') from error
    metadata = _Metadata(read_gguf_header(gguf_file(path)))
    model = metadata.text("tokenizer.ggml.model")
    if model not in (BYTE_LEVEL, SENTENCE_PIECE):
        raise metadata.fault("tokenizer.ggml.model", f"{BYTE_LEVEL!r} or {SENTENCE_PIECE!r}")
    architecture = metadata.text("general.architecture")
    missing = _INCOMPLETE_METADATA.get(architecture)
    if architecture == _PHI3 and model == BYTE_LEVEL:
        missing = "has special tokens that absorb spaces, which the file does not record"
    if missing is not None:
        raise metadata.fault("general.architecture", "an architecture whose tokenizer the file describes; the "
                             f"tokenizer of this one {missing}")
    tokens, kinds = metadata.vocabulary()
    absorbing = set(tokens) - {*_PHI3_KEEP_SPACES} if architecture == _PHI3 else ()
    try:
        if model == BYTE_LEVEL:
            tokenizer, adds_bos = _byte_level(metadata, tokens), _pre_tokenizer(metadata).adds_bos
        else:
            tokenizer, adds_bos = _sentence_piece(metadata, tokens, kinds), True
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True, rstrip=token in absorbing)
                                      for token, kind in zip(tokens, kinds) if kind in (CONTROL, UNKNOWN)])
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False, rstrip=token in absorbing)
                              for token, kind in zip(tokens, kinds) if kind == USER_DEFINED])
        template, special = ["$A"], []
        for name, default in (("bos", adds_bos), ("eos", False)):
            if metadata.flag(f"tokenizer.ggml.add_{name}_token", default):
                token_id = metadata.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens))
                if token_id is None:
                    raise metadata.fault(f"tokenizer.ggml.{name}_token_id", f"the token id of {name}, which the "
                                         "tokenizer adds")
                template.insert(0 if name == "bos" else 2, name)
                special.append({"id": name, "ids": [token_id], "tokens": [tokens[token_id]]})
        if special:
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    except ConfigError:
        raise
    except Exception as error:    # the library raises a plain Exception, for example for a merge of unknown tokens
        raise ConfigError(f"{metadata.where}: the library tokenizers rejects the vocabulary of this file: "
                          f"{printable(str(error)[:300])}",
                          "expected a vocabulary and merges that match", "download the file again") from error
    return tokenizer


def load_gguf_chat(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, str]]:
    """Return (chat templates by name, special tokens by template variable) of a GGUF file.

    An unnamed template is `default`. Raises ConfigError if the file is broken.
    """
    metadata = _Metadata(read_gguf_header(gguf_file(path)))
    templates = {key.removeprefix(TEMPLATE_KEY)[1:] or "default": metadata.text(key)
                 for key in metadata.values if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + ".")}
    special = {}
    if "tokenizer.ggml.tokens" in metadata.values:
        tokens = read_gguf_array(metadata.header, "tokenizer.ggml.tokens")
        for name, key in _SPECIAL_TOKENS.items():
            token_id = metadata.token_id(f"tokenizer.ggml.{key}", len(tokens))
            if token_id is not None:
                special[name] = tokens[token_id]
    return templates, special


# ---------------------------------------------------------------------- the two tokenizer models


def _pre_tokenizer(metadata: "_Metadata") -> _PreTokenizer:
    name = metadata.text("tokenizer.ggml.pre", None)
    if name not in _PRE_TOKENIZERS:
        raise metadata.fault("tokenizer.ggml.pre", f"one of {', '.join(_PRE_TOKENIZERS)}")
    return _PRE_TOKENIZERS[name]


def _byte_level(metadata: "_Metadata", tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre_tokenizer = _pre_tokenizer(metadata)
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise metadata.fault("tokenizer.ggml.merges", "two tokens with a space between them in each entry",
                                 f"a list with the entry {merge!r:.60}")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges,
                                     ignore_merges=pre_tokenizer.ignore_merges))
    steps = []
    if pre_tokenizer.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre_tokenizer.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre_tokenizer.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre_tokenizer.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: "_Metadata", tokens: list[str], kinds: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if metadata.values.get(key):
            raise metadata.fault(key, "no value, because this text normalization is not supported")
    begins_with_space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    special = {metadata.token_id(f"tokenizer.ggml.{key}", len(tokens)) for key in _SPECIAL_TOKENS.values()}
    within = [token for n, (token, kind) in enumerate(zip(tokens, kinds))
              if kind in (CONTROL, USER_DEFINED) and n not in special]
    if begins_with_space and within and metadata.text("general.architecture") != _PHI3:
        # Original tokenizers differ in whether they add this space.
        raise metadata.fault("tokenizer.ggml.add_space_prefix", "false, because the file does not specify whether "
                             f"the space prefix also precedes text after the token {within[0]!r:.60}",
                             "true or missing")
    unknown = metadata.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    if unknown is None:
        unknown = next((n for n, kind in enumerate(kinds) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(
        {token: n for n, token in enumerate(tokens)}, _merges_by_score(metadata, tokens, kinds),
        unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if begins_with_space
                            else replace)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(metadata: "_Metadata", tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Convert SentencePiece's scores to merges.

    The merges are all pairs of tokens whose concatenation is a token, in descending order of the score of the
    concatenation.
    """
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    if not np.isfinite(scores).all():
        raise metadata.fault("tokenizer.ggml.scores", "finite numbers", "a list with NaN or infinity")
    if metadata.text("general.architecture") == _GEMMA3:
        return _merges_of_gemma3(tokens, np.where(np.equal(kinds, USER_DEFINED), 0, scores), kinds)
    joined = {token for token, kind in zip(tokens, kinds) if kind in (NORMAL, UNUSED)}
    groups: dict[float, dict[str, list[tuple[str, str]]]] = {}      # score -> token -> its pairs
    for number in np.argsort(-scores, kind="stable").tolist():
        token = tokens[number]
        if kinds[number] != NORMAL:
            continue
        pairs = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in joined and token[n:] in joined]
        if pairs:
            groups.setdefault(float(scores[number]), {})[token] = pairs
    return [pair for group in groups.values() for token in _ordered(metadata, group) for pair in group[token]]


def _merges_of_gemma3(tokens: list[str], scores: np.ndarray, kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges of Gemma 3's tokenizer.json, in its order: by score, then by the lengths of the left and the
    right part, all descending. This order decides between pairs of equal scores: a run of 40 spaces becomes 16 and 24.
    """
    numbers = {token: number for number, token in enumerate(tokens) if kinds[number] in (NORMAL, USER_DEFINED)}
    merges = [(-float(scores[number]), -n, n - len(token), number, token[:n], token[n:])
              for token, number in numbers.items() for n in range(1, len(token))
              if token[:n] in numbers and token[n:] in numbers]
    return [(left, right) for *_, left, right in sorted(merges)]


def _ordered(metadata: "_Metadata", group: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Order tokens of equal scores so that the leftmost pair is merged first, as in llama.cpp.

    Runs of spaces come in descending length: the first two spaces of a run are merged, and then this token grows. Any
    other token comes before those whose left part is its right part.

    group   token -> pairs whose concatenation it is

    Raises ConfigError if no order of the tokens has this effect.
    """
    if len(group) == 1:
        return list(group)
    longest_first = sorted(group, key=len, reverse=True)
    if all(set(token) == {SPACE} for token in group) and len(longest_first[0]) == len(group) + 1:
        return longest_first
    by_left: dict[str, set[str]] = {}
    for token, pairs in group.items():
        for left, _ in pairs:
            by_left.setdefault(left, set()).add(token)
    later = {token: {other for _, right in pairs for other in by_left.get(right, ())} - {token}
             for token, pairs in group.items()}
    try:
        return list(TopologicalSorter(later).static_order())[::-1]
    except CycleError as error:
        one, other = error.args[1][:2]
        raise metadata.fault("tokenizer.ggml.scores", "different scores, which determine the order of merges",
                             f"equal for {one!r:.60} and {other!r:.60}") from None


# ---------------------------------------------------------------------- the metadata


class _Metadata:
    """Typed access to GGUF metadata. Raises ConfigErrors that name the file and the key."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.values, self.where = header, header.metadata, str(header.file)
        number = self.values.get("split.no")
        if type(number) is int and number > 0:
            raise ConfigError(f"{self.where} is shard {number + 1} of a model",
                              "expected the first shard, which has the metadata",
                              "pass the file with -00001-of- in its name, from the same folder")

    def fault(self, key: str, expected: str, found: str | None = None) -> ConfigError:
        if found is None:
            value = self.values.get(key)
            found = "missing" if value is None else "an array" if isinstance(value, GgufArray) else f"{value!r:.60}"
        return ConfigError(f"{self.where}: {key} is {printable(found)}", f"expected {expected}",
                           "pass the original tokenizer (LLM(..., tokenizer=FOLDER)), or use token ids as prompts")

    def text(self, key: str, *default: str | None) -> str | None:
        value = self.values.get(key, *default)
        if not isinstance(value, str) and (value is not None or not default):
            raise self.fault(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
            raise self.fault(key, f"a token id, 0..{num_tokens - 1}")
        return value

    def texts(self, key: str) -> list[str]:
        array = self.values.get(key)
        if not isinstance(array, GgufArray) or array.kind != "text":
            raise self.fault(key, "a list of strings")
        return read_gguf_array(self.header, key)

    def numbers(self, key: str, count: int) -> np.ndarray:
        array = self.values.get(key)
        if not isinstance(array, GgufArray) or array.kind in ("text", "bool") or array.count != count:
            raise self.fault(key, f"{counted(count, 'number')}, one per token",
                             repr(array) if isinstance(array, GgufArray) else None)
        return read_gguf_array(self.header, key)

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """Return (tokens, GGUF types of the tokens). Tokens are unique."""
        key = "tokenizer.ggml.tokens"
        array = self.values.get(key)
        if isinstance(array, GgufArray) and array.count > MOST_TOKENS:
            raise self.fault(key, f"at most {MOST_TOKENS:,} tokens", f"a list of {array.count:,}")
        tokens = self.texts(key)
        if "tokenizer.ggml.token_type" not in self.values:
            raise self.fault("tokenizer.ggml.token_type", "the type of each token")
        kinds = self.numbers("tokenizer.ggml.token_type", len(tokens)).tolist()
        if unknown := set(kinds) - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
            raise self.fault("tokenizer.ggml.token_type", f"types from {NORMAL} to {BYTE}",
                             f"a list with the entry {min(unknown)}")
        if self.text("general.architecture") == _GEMMA3:               # llama.cpp's converter wrote these as spaces
            tokens = [token.replace(" ", SPACE) if kind == USER_DEFINED else token
                      for token, kind in zip(tokens, kinds)]
        if not tokens or len(set(tokens)) != len(tokens) or not all(0 < len(token) <= LONGEST_TOKEN
                                                                      for token in tokens):
            raise self.fault(key, f"unique tokens of 1 to {LONGEST_TOKEN:,} characters",
                             "an empty list, or a list with an empty, repeated or too long token")
        return tokens, kinds

"""The tokenizer and the chat template that a GGUF file describes. Needs tokenizers: the extra `text`.

A GGUF file has no tokenizer.json. Its metadata holds the vocabulary, the merges or scores, and the name of what splits
a text into words; everything else is what the tokenizers of that name do. What is not known to be right for a file is
refused by name, because a wrong splitting gives worse texts and no error.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ConfigError, printable
from ..weights.folder import gguf_file, is_gguf_name
from ..weights.gguf_header import GgufArray, GgufHeader, read_gguf_array, read_gguf_header

LONGEST_TOKEN = 1024     # characters
MOST_TOKENS = 2**20      # the largest vocabularies have a quarter of that
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
TEMPLATE_KEY = "tokenizer.chat_template"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"    # how SentencePiece writes one

# Kinds of tokens, as GGUF numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                   "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"}

# The original tokenizers of these architectures do more than the metadata says.
_MORE_THAN_THE_FILE_SAYS = {
    "gemma": "merges that do not follow the scores", "gemma2": "merges that do not follow the scores",
    "gemma3": "merges that do not follow the scores", "phi3": "special tokens that take the spaces around them"}


@dataclass(frozen=True, slots=True)
class _Words:
    """How a text becomes words before merges.

    pattern       a regular expression whose matches are words; None: GPT-2's, which tokenizers has built in
    digits        every digit is a word, before the pattern is looked at
    normalizes    the text is put into Unicode's form NFC first
    whole_words   a word that is a token is that one, whatever the merges say
    adds_bos      a text begins with the bos token where the file does not say
    """

    pattern: str | None = None
    digits: bool = False
    normalizes: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
         r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_GPT4O = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
          rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
          r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA_3 = _Words(_GPT4, whole_words=True, adds_bos=True)

# By `tokenizer.ggml.pre`: names that stand for one tokenizer whose tokenizer.json is known.
_WORDS = {
    "gpt-2": _Words(),
    "phi-2": _Words(),
    "olmo": _Words(normalizes=True),
    "mpt": _Words(normalizes=True),
    "smollm": _Words(digits=True),
    "starcoder": _Words(digits=True),
    "refact": _Words(digits=True),
    "command-r": _Words(digits=True, normalizes=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "dbrx": _Words(_GPT4),
    "qwen2": _Words(_GPT4.replace(r"\p{N}{1,3}", r"\p{N}"), normalizes=True),
    "tekken": _Words(_TEKKEN, whole_words=True, adds_bos=True),
    "gpt-4o": _Words(_GPT4O),
}


def is_gguf_file(path: str | os.PathLike) -> bool:
    """Whether a path names a GGUF file, which need not exist, and no folder."""
    return is_gguf_name(os.fspath(path)) and not os.path.isdir(path)


def load_gguf_tokenizer(path: str | os.PathLike) -> Any:
    """The `tokenizers.Tokenizer` of a GGUF file: byte-level BPE ("gpt2") or BPE as SentencePiece has it ("llama").

    Control tokens, and tokens that the file calls user-defined, are found whole in a text; the former are special. A
    text begins with the bos token, or ends with the eos token, where the file says so.

    Raises ConfigError without the library, for a tokenizer that is not known and for a file that is broken.
    """
    try:
        from tokenizers import AddedToken, processors
    except ImportError as error:
        raise ConfigError("tokenizers is not installed", "texts need it",
                          'pip install "batch-manager[text]"') from error
    metadata = _Metadata(read_gguf_header(gguf_file(path)))
    model = metadata.text("tokenizer.ggml.model")
    if model not in (BYTE_LEVEL, SENTENCE_PIECE):
        raise metadata.fault("tokenizer.ggml.model", f"{BYTE_LEVEL!r} or {SENTENCE_PIECE!r}")
    architecture = metadata.text("general.architecture")
    if architecture in _MORE_THAN_THE_FILE_SAYS:
        raise metadata.fault("general.architecture", "an architecture whose tokenizer the file describes: this one's "
                             f"has {_MORE_THAN_THE_FILE_SAYS[architecture]}")
    tokens, kinds = metadata.vocabulary()
    try:
        if model == BYTE_LEVEL:
            tokenizer, adds_bos = _byte_level(metadata, tokens), _words(metadata).adds_bos
        else:
            tokenizer, adds_bos = _sentence_piece(metadata, tokens, kinds), True
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                      for token, kind in zip(tokens, kinds) if kind in (CONTROL, UNKNOWN)])
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)
                              for token, kind in zip(tokens, kinds) if kind == USER_DEFINED])
        template, special = ["$A"], []
        for name, default in (("bos", adds_bos), ("eos", False)):
            if metadata.flag(f"tokenizer.ggml.add_{name}_token", default):
                token_id = metadata.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens))
                if token_id is None:
                    raise metadata.fault(f"tokenizer.ggml.{name}_token_id", "the id of the token that texts "
                                         f"{'begin' if name == 'bos' else 'end'} with")
                template.insert(0 if name == "bos" else 2, name)
                special.append({"id": name, "ids": [token_id], "tokens": [tokens[token_id]]})
        if special:
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    except ConfigError:
        raise
    except Exception as error:    # the library raises a plain Exception, such as for merges of tokens that are none
        raise ConfigError(f"{metadata.where}: tokenizers cannot make its tokenizer: {printable(str(error)[:300])}",
                          "a vocabulary and merges that fit together", "download the file again") from error
    return tokenizer


def load_gguf_chat(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, str]]:
    """(chat templates by name, special tokens by the name that templates use) of a GGUF file. The template without a
    name is `default`.

    Raises ConfigError for a file that is broken.
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


# ---------------------------------------------------------------------- the two kinds


def _words(metadata: "_Metadata") -> _Words:
    name = metadata.text("tokenizer.ggml.pre", None)
    if name not in _WORDS:
        raise metadata.fault("tokenizer.ggml.pre", f"one of {', '.join(_WORDS)}")
    return _WORDS[name]


def _byte_level(metadata: "_Metadata", tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = _words(metadata)
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise metadata.fault("tokenizer.ggml.merges", "two tokens with a space between them",
                                 f"{merge!r:.60} in its list")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges,
                                     ignore_merges=words.whole_words))
    steps = []
    if words.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if words.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: "_Metadata", tokens: list[str], kinds: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if metadata.values.get(key):
            raise metadata.fault(key, "a tokenizer that changes no text before it is cut")
    begins_with_space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    special = {metadata.token_id(f"tokenizer.ggml.{key}", len(tokens)) for key in _SPECIAL_TOKENS.values()}
    within = [token for n, (token, kind) in enumerate(zip(tokens, kinds))
              if kind in (CONTROL, USER_DEFINED) and n not in special]
    if begins_with_space and within:
        # Some originals do, and some do not.
        raise metadata.fault("tokenizer.ggml.add_space_prefix", "a file that says whether a text after a special "
                             "token gets a space too", f"set or missing, and there is the token {within[0]!r:.60}")
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
    """SentencePiece joins, of all neighbours whose text is a token, those of the highest score first. As merges: every
    pair of tokens that make a token, ordered by its score."""
    scores = metadata.numbers("tokenizer.ggml.scores", len(tokens))
    if not np.isfinite(scores).all():
        raise metadata.fault("tokenizer.ggml.scores", "finite numbers", "not finite everywhere")
    joined = {token for token, kind in zip(tokens, kinds) if kind in (NORMAL, UNUSED)}
    ordered: dict[float, str] = {}
    merges = []
    for number in np.argsort(-scores, kind="stable").tolist():
        token = tokens[number]
        if kinds[number] != NORMAL:
            continue
        pairs = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in joined and token[n:] in joined]
        if pairs:
            other = ordered.setdefault(float(scores[number]), token)
            if other is not token:
                raise metadata.fault("tokenizer.ggml.scores", "scores that say which tokens are joined first",
                                     f"the same for {other!r:.60} and {token!r:.60}")
            merges += pairs
    return merges


# ---------------------------------------------------------------------- the metadata


class _Metadata:
    """Typed reading of a header's metadata; every fault is a ConfigError that names file and key."""

    def __init__(self, header: GgufHeader) -> None:
        self.header, self.values, self.where = header, header.metadata, str(header.file)
        number = self.values.get("split.no")
        if type(number) is int and number > 0:
            raise ConfigError(f"{self.where} is shard {number + 1} of a model", "the first one, which has the metadata",
                              "pass the file whose name ends in -00001-of-... beside it")

    def fault(self, key: str, expected: str, found: str | None = None) -> ConfigError:
        if found is None:
            value = self.values.get(key)
            found = "missing" if value is None else "an array" if isinstance(value, GgufArray) else f"{value!r:.60}"
        return ConfigError(f"{self.where}: {key} is {printable(found)}", expected,
                           "pass a tokenizer, or the folder of the original model's (LLM(..., tokenizer=FOLDER)), or "
                           "token ids")

    def text(self, key: str, *default: str | None) -> str | None:
        value = self.values.get(key, *default)
        if not isinstance(value, str) and (value is not None or not default):
            raise self.fault(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fault(key, "a flag")
        return value

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
            raise self.fault(key, f"the id of a token, 0..{num_tokens - 1}")
        return value

    def texts(self, key: str) -> list[str]:
        array = self.values.get(key)
        if not isinstance(array, GgufArray) or array.kind != "text":
            raise self.fault(key, "a list of texts")
        return read_gguf_array(self.header, key)

    def numbers(self, key: str, count: int) -> np.ndarray:
        array = self.values.get(key)
        if not isinstance(array, GgufArray) or array.kind in ("text", "bool") or array.count != count:
            raise self.fault(key, f"{count:,} numbers, one for each token")
        return read_gguf_array(self.header, key)

    def vocabulary(self) -> tuple[list[str], list[int]]:
        """(tokens, their kinds). All tokens are different."""
        key = "tokenizer.ggml.tokens"
        array = self.values.get(key)
        if isinstance(array, GgufArray) and array.count > MOST_TOKENS:
            raise self.fault(key, f"at most {MOST_TOKENS:,} tokens", f"a list of {array.count:,}")
        tokens = self.texts(key)
        if not tokens or len(set(tokens)) != len(tokens) or not all(0 < len(token) <= LONGEST_TOKEN
                                                                      for token in tokens):
            raise self.fault(key, f"different tokens of 1 to {LONGEST_TOKEN:,} characters", "another list")
        if "tokenizer.ggml.token_type" not in self.values:
            raise self.fault("tokenizer.ggml.token_type", "the kind of each token")
        kinds = self.numbers("tokenizer.ggml.token_type", len(tokens)).tolist()
        if not set(kinds) <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
            raise self.fault("tokenizer.ggml.token_type", f"kinds from {NORMAL} to {BYTE}", "another list")
        return tokens, kinds

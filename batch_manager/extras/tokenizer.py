"""The tokenizer of a model, and token ids of a prompt. Needs tokenizers: the extra `text`."""

import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InvalidRequestError, printable, type_name
from .gguf_tokenizer import is_gguf_file, load_gguf_tokenizer

TOKENIZER_FILE = "tokenizer.json"
LONGEST_QUOTE = 300
LONG_TEXT = 8192    # characters: some milliseconds


def load_tokenizer(folder: str | os.PathLike) -> Any:
    """The `tokenizers.Tokenizer` of a folder, without the padding and truncation that its tokenizer.json may ask for;
    or the one that a `.gguf` file describes, see `gguf_tokenizer`.

    Raises ConfigError without the library, for a folder without a tokenizer.json that it can read, and for a GGUF file
    that is broken or has a tokenizer that is not known.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("tokenizers is not installed", "texts need it",
                          'pip install "batch-manager[text]"') from error
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"the folder of the tokenizer is of type {type_name(folder)}", "a str or os.PathLike",
                          "pass the folder of a model, or a tokenizer")
    if is_gguf_file(folder):
        return load_gguf_tokenizer(folder)
    path = Path(folder) / TOKENIZER_FILE
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {os.fspath(folder)!r}", "the folder of a model on this machine",
                          "pass its path; `hf download NAME` fetches a model from the Hugging Face hub and prints it")
    if not path.is_file():
        raise ConfigError(f"there is no file {os.fspath(path)!r}", "the folder of a model with its tokenizer",
                          "pass a tokenizer, or the folder that has one")
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:    # the library raises a plain Exception
        raise ConfigError(f"{os.fspath(path)!r} cannot be read: {printable(str(error)[:LONGEST_QUOTE])}",
                          "a file as tokenizers writes it", "download or save it again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text, for a tokenizer of `tokenizers` or of transformers.

    Raises InvalidRequestError for a text that cannot be encoded.
    """
    try:
        if len(text) > LONG_TEXT and hasattr(tokenizer, "encode_batch"):    # `encode` keeps the interpreter lock
            (tokens,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:    # half a surrogate pair, a vocabulary without a token for unknown characters
        raise InvalidRequestError(f"the prompt cannot be encoded: {type_name(error)}",
                                  "a text that the tokenizer has tokens for", "correct the text") from None
    return list(getattr(tokens, "ids", tokens))

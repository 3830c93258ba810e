"""Load the tokenizer of a model, and encode prompts. Needs tokenizers: the extra `text`."""

import os
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InvalidRequestError, printable, type_name
from .gguf_tokenizer import is_gguf_file, load_gguf_tokenizer
from .tokenizer_files import complete

TOKENIZER_FILE = "tokenizer.json"
LONGEST_QUOTE = 300
LONG_TEXT = 8192    # characters; takes a few milliseconds to encode


def load_tokenizer(folder: str | os.PathLike) -> Any:
    """Return the `tokenizers.Tokenizer` of a model.

    folder   a folder with a tokenizer.json, or the path of such a file; or a `.gguf` file (see `gguf_tokenizer`).
             Padding and truncation are switched off. Added tokens and special tokens of the folder's other files are
             read too (see `tokenizer_files`)

    Raises ConfigError if the library is not installed, if tokenizer.json is missing, if a file is unreadable, or if the
    GGUF file is broken or has an unsupported tokenizer.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("tokenizers is not installed", "it is required to encode and decode text",
                          'pip install "batch-manager[text]"') from error
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"the folder of the tokenizer is of type {type_name(folder)}", 
                          "expected a str or os.PathLike", "pass the path of a model, or a tokenizer object")
    if is_gguf_file(folder):
        return load_gguf_tokenizer(folder)
    path = Path(folder)
    path = path if path.suffix == ".json" and not path.is_dir() else path / TOKENIZER_FILE
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {os.fspath(folder)!r}", "expected the folder of a model on this machine",
                          "pass its path, or fetch a model with `hf download NAME` and pass the path that it prints")
    if not path.is_file():
        raise ConfigError(f"there is no file {os.fspath(path)!r}", "expected a model folder with its tokenizer",
                          "pass a tokenizer, or a folder with that file")
    try:
        tokenizer = Tokenizer.from_file(os.fspath(path))
    except Exception as error:    # the library raises a plain Exception
        raise ConfigError(f"{os.fspath(path)!r} cannot be read: {printable(str(error)[:LONGEST_QUOTE])}",
                          "expected a tokenizer.json, as the library tokenizers writes it",
                          "download or save the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    complete(tokenizer, path.parent)
    return tokenizer


class TooManyTokens(InvalidRequestError):
    """A text has more tokens than the caller of `encode` accepts. `num_tokens` is their number."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(f"the prompt has {num_tokens:,} tokens", f"expected at most {most:,}", "shorten it")
        self.num_tokens = num_tokens


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
    """Encode a text with a tokenizer of `tokenizers` or transformers.

    most   largest number of tokens to return; None: any number

    Raises InvalidRequestError if the text cannot be encoded, and TooManyTokens.
    """
    try:
        if len(text) > LONG_TEXT and hasattr(tokenizer, "encode_batch"):    # unlike `encode`, releases the GIL
            (tokens,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
            tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except Exception as error:    # a lone surrogate, or a vocabulary without an unknown token
        raise InvalidRequestError(f"the prompt cannot be encoded: {type_name(error)}",
                                  "expected text that the tokenizer can encode",
                                  "remove invalid characters, or pass token ids") from None
    if most is not None and len(tokens) > most:
        raise TooManyTokens(len(tokens), most)
    return list(getattr(tokens, "ids", tokens))

"""Find tokens that end a turn for the tokenizer or the chat template, but do not end an output of the engine."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..contained_log import log
from ..errors import printable
from .chat_template import folder_files, folder_special_tokens, folder_template
from .template_messages import template_message

_ANSWER = "\N{WHITE SQUARE}answer\N{WHITE SQUARE}"


def log_unused_turn_ends(source: str | os.PathLike, tokenizer: Any, end_ids: Collection[int],
                         vocab_size: int | None = None) -> None:
    """Log one warning if the tokenizer's end token, or the token that ends a turn of the chat template, is no end id.

    source       folder or `.gguf` file of the tokenizer
    end_ids      the checkpoint's end ids
    vocab_size   vocabulary size of the model, which never samples a token outside; None: name such tokens too

    An output goes on after such a token. The warning names the tokens and the option that ends outputs there.
    """
    try:
        ends = _turn_ends(source, tokenizer)
    except Exception:    # no folder, no template, or objects of another library; they are refused where they are used
        return
    unused = sorted((number, token) for token, number in ends.items()
                    if number not in end_ids and (vocab_size is None or number < vocab_size))
    if unused:
        tokens = ", ".join(f"{printable(token[:64])!r} ({number})" for number, token in unused)
        log.warning("the tokenizer of %r ends a turn with %s, which is no end id of the checkpoint, so outputs go on "
                    "after it; pass stop_token_ids=%s, or add it to eos_token_id in generation_config.json",
                    os.fspath(source), tokens, [number for number, _ in unused])


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return text -> id of the special tokens of a tokenizer of `tokenizers` or transformers."""
    if hasattr(tokenizer, "get_added_tokens_decoder"):
        added = tokenizer.get_added_tokens_decoder()
    else:
        added = tokenizer.added_tokens_decoder
    return {token.content: number for number, token in added.items() if token.special}


def _turn_ends(source: str | os.PathLike, tokenizer: Any) -> dict[str, int]:
    """Return token -> id of the tokenizer's end token, and of the special token after an answer in the template."""
    ends = {}
    files = folder_files(Path(source))
    tokens = folder_special_tokens(*files)
    end = getattr(tokenizer, "eos_token", None) or tokens.get("eos_token")
    to_id = getattr(tokenizer, "token_to_id", None) or tokenizer.convert_tokens_to_ids
    if end is not None and (number := to_id(end)) is not None:
        ends[end] = number
    messages = [template_message(each, set()) for each in ({"role": "user", "content": "Hello."},
                                                    {"role": "assistant", "content": _ANSWER})]
    try:
        prompt = folder_template(*files, has_tools=False).render(
            {**tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": False})
    except Exception:    # a template can raise anything
        return ends
    rest, special = prompt.partition(_ANSWER)[2].lstrip(), _special_tokens(tokenizer)
    if found := max((token for token in special if rest.startswith(token)), key=len, default=""):
        ends[found] = special[found]
    return ends

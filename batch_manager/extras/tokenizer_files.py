"""Adds to a tokenizer what other files of its folder say: added and special tokens, and how text is cleaned up.

The tokens get the ids, and the text is decoded, as by transformers' AutoTokenizer for a class without own code. The
keys that are read are in `batch_manager/weights/file_keys.py`; any other key that may matter is logged.
"""

import json
from pathlib import Path
from typing import Any

from ..contained_log import log
from ..errors import ConfigError, printable, type_name
from ..weights.file_keys import SPECIAL_TOKENS, unread
from .token_text import CLEAN_UP
from .tokenizer_class import log_other_class

CONFIG_FILE, SPECIAL_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LONGEST_QUOTE = 300
_CLEANS_UP = "clean_up_tokenization_spaces"
_EVEN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if there is no file. Raises ConfigError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {printable(str(error)[:LONGEST_QUOTE])}",
                          "expected a JSON object", "download or save it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} contains a value of type {type_name(value)}", "expected a JSON object",
                          "download or save it again")
    return value


def complete(tokenizer: Any, folder: Path) -> None:
    """Add to a `tokenizers.Tokenizer` what the other files of its folder say. Mutates the tokenizer.

    Raises ConfigError for a file that is not a JSON object, and for a token of a wrong form.
    """
    config = read_object(folder / CONFIG_FILE)
    if keys := unread(CONFIG_FILE, config):
        log.info("%s: these keys are not read: %s", folder / CONFIG_FILE, printable(", ".join(keys)))
    model = read_object(folder / "config.json")
    log_other_class(tokenizer, config, model, folder / CONFIG_FILE)
    added, named, extra = _stated_tokens(tokenizer, folder, config)
    known = tokenizer.get_added_tokens_decoder()
    reprs = {repr(token) for token in known.values()}
    new = [token for _, token in sorted(added.items()) if repr(token) not in reprs]
    have = {token.content for token in known.values()} | {token.content for token in new}
    for token in (*named.values(), *extra):
        if token.content not in have:
            have.add(token.content)
            new.append(token)
    names = {token.content for token in named.values()}
    for token in new:
        token.special = token.special or token.content in names
    tokenizer.add_tokens(new)
    for number, token in added.items():
        if tokenizer.token_to_id(token.content) != number:
            log.warning("%s: the token %r has the id %d in %s; its place in the vocabulary gives it %d, as in "
                        "transformers; expected the files of one model", folder, token.content, number,
                        CONFIG_FILE if "added_tokens_decoder" in config else ADDED_FILE,
                        tokenizer.token_to_id(token.content))
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    if config.get(_CLEANS_UP) is True:
        _clean_up(tokenizer, folder, config.get(_EVEN_BPE) is True)


def _stated_tokens(tokenizer: Any, folder: Path, config: dict[str, Any]) -> tuple[dict, dict, list]:
    """Return (added tokens by id, special tokens by name, special tokens without a name)."""
    from tokenizers import AddedToken

    values, extra = config, config.get("extra_special_tokens") or config.get("additional_special_tokens")
    added: dict[int, Any] = {}
    has_decoder = isinstance(config.get("added_tokens_decoder"), dict)
    if has_decoder:
        for number, token in config["added_tokens_decoder"].items():
            where = f"{folder / CONFIG_FILE}: added_tokens_decoder[{number!r:.20}]"
            if not isinstance(token, dict) or not str(number).isdecimal():
                raise _fault(where, token)
            added[int(number)] = _token(token, where)
    else:
        special = read_object(folder / SPECIAL_FILE)
        more = special.pop("extra_special_tokens", None)
        values = {**config, **special}
        extra = extra or more if not (isinstance(extra, list) and isinstance(more, list)) else [*extra, *more]
    where = f"{folder / CONFIG_FILE} or {SPECIAL_FILE}"
    named = _named_tokens(values, extra, where)
    if not has_decoder:
        special_names = {named[key].content for key in SPECIAL_TOKENS if key in named}
        special_names |= {token.content for token in _unnamed_tokens(extra, where)}
        for content, number in read_object(folder / ADDED_FILE).items():
            if not content or type(number) is not int or number < 0:
                raise _fault(f"{folder / ADDED_FILE}: {content!r:.60}", number)
            is_special = content in special_names
            added[number] = AddedToken(content, normalized=not is_special, special=is_special)
        added |= tokenizer.get_added_tokens_decoder()
    by_content = {token.content: token for token in added.values()}
    named = {key: by_content.get(token.content, token) for key, token in named.items()}
    return added, named, _unnamed_tokens(extra or values.get("additional_special_tokens"), where)


def _named_tokens(values: dict[str, Any], extra: Any, where: str) -> dict[str, Any]:
    more = extra if isinstance(extra, dict) else {}
    named = {key: values.get(key) for key in SPECIAL_TOKENS}
    others = {**values, **more}
    named |= {key: value for key, value in others.items()
               if key not in named and (key.endswith("_token") or key in more) and isinstance(value, str | dict)}
    return {key: _token(value, f"{where}: {key}", special=True) for key, value in named.items() if value is not None}


def _unnamed_tokens(extra: Any, where: str) -> list[Any]:
    if not isinstance(extra or [], list | dict):
        raise _fault(f"{where}: extra_special_tokens", extra)
    return [_token(value, f"{where}: extra_special_tokens", special=True)
            for value in (extra if isinstance(extra, list) else ())]


def _token(value: Any, where: str, special: bool = False) -> Any:
    from tokenizers import AddedToken

    if isinstance(value, str) and value:
        return AddedToken(value, special=special, normalized=not special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise _fault(where, value)
    fields = {key: each for key, each in value.items() if key != "__type"}
    try:
        return AddedToken(**({**fields, "special": True} if special else fields))
    except (TypeError, ValueError):
        raise _fault(where, value) from None


def _fault(where: str, value: Any) -> ConfigError:
    return ConfigError(f"{printable(where)} is {printable(repr(value)[:LONGEST_QUOTE])}",
                       "expected a token, as transformers writes it", "download or save the file again")


def _clean_up(tokenizer: Any, folder: Path, even_bpe: bool) -> None:
    """Make the decoder clean up spaces, such as one before a full stop. As in transformers, not for BPE by default."""
    from tokenizers import decoders, models

    if isinstance(tokenizer.model, models.BPE) and not even_bpe:
        return
    if tokenizer.decoder is None:
        log.info("%s: %s is not applied, because the tokenizer has no decoder", folder / CONFIG_FILE, _CLEANS_UP)
        return
    steps = [decoders.Replace(pattern, content) for pattern, content in CLEAN_UP]
    tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Fuse(), *steps])

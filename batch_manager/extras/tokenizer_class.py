"""Finds a `tokenizer_class` with which transformers would give other token ids than tokenizer.json does."""

import json
from pathlib import Path
from typing import Any

from ..contained_log import log
from ..errors import printable

# Model type -> the class that transformers rebuilds the tokenizer with, if the folder names that class.
_CLASSES = {"llama": "LlamaTokenizer", "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
_QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def log_other_class(tokenizer: Any, class_name: Any, config: dict[str, Any], model_type: Any, where: Path) -> None:
    """Log one warning if the class named in tokenizer_config.json splits text in another way than tokenizer.json."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    name = str(class_name).removesuffix("Fast")
    if model_type is not None and name != _CLASSES.get(model_type):
        return                         # for most other types, transformers takes tokenizer.json as it is
    normalizer, prefix = None, config.get("add_prefix_space")
    if name == "LlamaTokenizer":
        scheme = "never" if prefix not in (None, True) else "always" if config.get("legacy") else "first"
        splitter = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    elif name == "GPT2Tokenizer":
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
    elif name == "Qwen2Tokenizer":
        normalizer = normalizers.NFC()
        splitter = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(_QWEN2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=False)])
    else:
        return
    ours = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if name == "LlamaTokenizer" and "ByteLevel" in json.dumps([*ours, _state(tokenizer.decoder)]):
        return                         # transformers takes tokenizer.json as it is
    if ours != (_state(normalizer), _state(splitter)):
        log.warning("%s: with tokenizer_class %s, transformers splits text in another way than tokenizer.json, which "
                    "is followed here; token ids may differ; save the tokenizer with transformers again, or name "
                    "PreTrainedTokenizerFast", where, printable(name))


def _state(part: Any) -> Any:
    """Return the settings of a part of a tokenizer that change ids."""
    if part is None:
        return None
    return json.loads(part.__getstate__(), object_hook=lambda fields: {**fields, "trim_offsets": None})

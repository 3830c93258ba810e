"""Finds a `tokenizer_class` with which transformers would give other token ids than tokenizer.json does.

For most names of a class, transformers takes tokenizer.json as it is. For others it takes only the vocabulary and the
merges, and splits text with the class's own rules. The tables are those of transformers 5.24, held by a test.
"""

import json
from pathlib import Path
from typing import Any

from ..contained_log import log
from ..errors import printable

# Model type -> the class that transformers has registered for it. For a type in neither table it has none.
_REGISTERED = {
    **dict.fromkeys(("gpt2", "gptj", "jais2", "opt", "phi", "starcoder2"), "GPT2"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe"), "GPTNeoX"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "Gemma"), **dict.fromkeys(("cohere", "cohere2"), "Cohere"),
    "biogpt": "BioGpt", "ctrl": "CTRL", "gpt-sw3": "GPTSw3",
}
_AS_IT_IS = frozenset((
    "beam", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode",
    "granite", "granitemoe", "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nemotron", "olmo2", "olmo3", "persimmon",
    "phi3", "phimoe", "stablelm"))
_OVERRULED = frozenset(("qwen2",))           # the registered class counts, whatever class the folder names
# Names, without "Tokenizer", of the other classes that do not take tokenizer.json as it is.
_OTHERS = (
    "Albert Bart Barthez Bartpho BertGeneration BertJapanese Bertweet BigBird BioGpt BlenderbotSmall Blenderbot ByT5 "
    "CLIP CTRL Camembert Canine Clvp CpmAnt Cpm DPRContextEncoder DPRQuestionEncoder DPRReader Deberta DebertaV2 Dia "
    "DistilBert Esm Esmc FSMT FastSpeech2Conformer Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert LED Lasr LayoutLMv2 "
    "LayoutLMv3 LayoutXLM Luke Lxmert M2M100 MBart50 MBart MLuke MPNet Marian MarkupLM Mgpstr MobileBert Mvp MyT5 Nllb "
    "Nougat OpenAIGPT PLBart Pegasus Perceiver Phobert ProphetNet Reformer RemBert RoCBert RoFormer SeamlessM4T "
    "Siglip2 Siglip Speech2Text SpeechT5 Splinter SqueezeBert T5 Tapas Tipsv2 Udop VideoPrism Vits Wav2Vec2CTC "
    "Wav2Vec2PhonemeCTC Whisper XGLM XLMRoberta XLM XLNet")
_NOT_COMPARED = frozenset(_OTHERS.split())
_QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN3_5 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
COMPARED = ("Llama", "CodeLlama", "GPT2", "CodeGen", "Roberta", "Qwen2", "Qwen3_5", "Gemma", "Cohere", "GPTNeoX",
            "Bert")


def log_other_class(tokenizer: Any, config: dict[str, Any], model: dict[str, Any], where: Path) -> None:
    """Log one warning if transformers would split text in another way than tokenizer.json.

    config, model   contents of tokenizer_config.json and config.json
    where           path of tokenizer_config.json, for the log
    """
    name = class_of(model.get("model_type"), config.get("tokenizer_class") or model.get("tokenizer_class"))
    if name in _NOT_COMPARED:
        log.warning("%s: transformers reads this tokenizer with its class %sTokenizer, and not tokenizer.json as it "
                    "is, which is followed here; token ids may differ; compare some with AutoTokenizer", where, name)
    elif name in COMPARED and splits_otherwise(tokenizer, name, config):
        log.warning("%s: with tokenizer_class %s, transformers splits text in another way than tokenizer.json, which "
                    "is followed here; token ids may differ; save the tokenizer with transformers again, or name "
                    "PreTrainedTokenizerFast", where, printable(f"{name}Tokenizer"))


def class_of(model_type: Any, named: Any) -> str | None:
    """Return the class that AutoTokenizer chooses, without "Tokenizer"; None: it takes tokenizer.json as it is.

    named   class that the folder names, or None
    """
    registered = _REGISTERED.get(model_type) if isinstance(model_type, str) else None
    if isinstance(model_type, str) and model_type in _AS_IT_IS:
        return None
    if named is None or model_type in _OVERRULED:
        return registered
    name = str(named).removesuffix("Fast").removesuffix("Tokenizer")
    return name if name in COMPARED or name in _NOT_COMPARED else None


def splits_otherwise(tokenizer: Any, name: str, config: dict[str, Any]) -> bool:
    """Return whether the class `name`, one of COMPARED, would give other ids than the tokenizer, for some texts."""
    ours = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if name == "Llama" and "ByteLevel" in json.dumps([ours[1], _state(tokenizer.decoder)]):
        return False                   # transformers takes tokenizer.json as it is
    model = tokenizer.model
    if type(model).__name__ != ("WordPiece" if name == "Bert" else "BPE") or ours not in _of_class(name, config):
        return True
    has_bytes = name in ("Llama", "CodeLlama", "Gemma")
    return type(model).__name__ == "BPE" and (model.ignore_merges or model.byte_fallback != has_bytes)


def _of_class(name: str, config: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return the settings of the normalizer and the pre-tokenizer of a class, and of others that give the same ids."""
    prefix = config.get("add_prefix_space")
    if name in ("Llama", "CodeLlama"):
        is_legacy = name == "Llama" and config.get("legacy")
        scheme = "never" if prefix not in (None, True) else "always" if is_legacy else "first"
        return [(None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False})]
    if name == "Gemma":
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        at_spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return [(spaces, at_spaces), (spaces, None)]       # after this normalizer, there are no spaces
    if name == "Bert":
        return [({"type": "BertNormalizer", "clean_text": True,
                  "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
                  "strip_accents": config.get("strip_accents"), "lowercase": config.get("do_lower_case", True)},
                 {"type": "BertPreTokenizer"})]
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(prefix), "trim_offsets": None, "use_regex": True}
    before: dict[str, Any] | None = None
    if name == "Cohere":
        before = {"type": "Digits", "individual_digits": True}
    elif name in ("Qwen2", "Qwen3_5"):
        before = {"type": "Split", "pattern": {"Regex": _QWEN2 if name == "Qwen2" else _QWEN3_5},
                  "behavior": "Isolated", "invert": False}
        byte_level["use_regex"] = False
    steps = byte_level if before is None else {"type": "Sequence", "pretokenizers": [before, byte_level]}
    return [({"type": "NFC"} if name in ("Cohere", "Qwen2", "Qwen3_5", "GPTNeoX") else None, steps)]


def _state(part: Any) -> Any:
    """Return the settings of a part of a tokenizer. Those of offsets, which change no ids, are None."""
    if part is None:
        return None
    return json.loads(part.__getstate__(), object_hook=lambda fields: {
        name: None if name == "trim_offsets" else value for name, value in fields.items()})

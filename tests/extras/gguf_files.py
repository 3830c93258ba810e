"""Writes GGUF files for tests of tokenizers and LLM, with ggml's own library.

Their vocabularies are trained on TEXT, an excerpt of English novels.
"""

import json
import lzma
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

AUSTEN = Path(__file__).resolve().parents[2] / "examples" / "data" / "austen.txt.xz"
with lzma.open(AUSTEN, "rt", encoding="utf-8") as _file:
    TEXT = _file.read(60_000)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPECIAL = ["<|begin|>", "<|im_start|>", "<|im_end|>"]


def trained_merges(pre_tokenizer, normalizer=None, size=700):
    """Return the (vocabulary, merges) of a byte-level BPE trained on TEXT, without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def trained_pieces(size=600):
    """Return a vocabulary in the order of SentencePiece: three special tokens, 256 bytes, then pieces of TEXT.

    Its entries are (piece, score, kind).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=80))
    vocabulary = tokenizer.get_vocab()
    joined = sorted((piece for piece in vocabulary if len(piece) > 1), key=vocabulary.get)
    single = sorted(piece for piece in vocabulary if len(piece) == 1)
    return ([("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
            + [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
            + [(piece, float(-n), NORMAL) for n, piece in enumerate(joined + single)])


def write(path, values, architecture="llama"):
    """Write a GGUF file without tensors. `values` is its metadata: key -> string, bool, unsigned integer or list."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_values(pre, vocabulary, merges, special=SPECIAL, user_defined=()):
    tokens = [*sorted(vocabulary, key=vocabulary.get), *special, *user_defined]
    kinds = [NORMAL] * len(vocabulary) + [CONTROL] * len(special) + [USER_DEFINED] * len(user_defined)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
            "tokenizer.ggml.bos_token_id": len(vocabulary), "tokenizer.ggml.eos_token_id": len(vocabulary) + 2}


def sentence_piece_values(pieces, **more):
    tokens, scores, kinds = zip(*pieces)
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": list(tokens),
            "tokenizer.ggml.scores": list(scores), "tokenizer.ggml.token_type": list(kinds),
            "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            **{f"tokenizer.ggml.{key}": value for key, value in more.items()}}


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_model(path, seed=0):
    """Write a GGUF file with a small Llama, its tokenizer and a chat template, and return its path.

    The model has random weights, 512 positions and a vocabulary of 303 tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.models.gguf_writing import write_gguf

    values = byte_level_values("smollm", *trained_merges(pre_tokenizers.ByteLevel(add_prefix_space=False), size=300))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(values["tokenizer.ggml.tokens"]), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3))
    values["tokenizer.chat_template"] = CHATML
    write_gguf(model, path, "Llama", "Q8_0", **{key.replace(".", "__"): value for key, value in values.items()})
    return path

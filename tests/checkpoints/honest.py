"""Makes tiny valid checkpoints of five model families, as `Draft` objects that can be damaged and then written."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from .config_rules import expected_tensors, read_config

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

_DECODER = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
FAMILIES = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 5, "n_embd": 4, "n_layer": 1, "n_head": 2,
             "n_positions": 16},
    "llama": {"architectures": ["LlamaForCausalLM"], **_DECODER, "attention_bias": True, "rms_norm_eps": 1e-5},
    "mistral": {"architectures": ["MistralForCausalLM"], **_DECODER, "sliding_window": 8, "dtype": "float16"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_DECODER, "tie_word_embeddings": True, "hidden_act": "silu"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_DECODER, "head_dim": 2, "torch_dtype": "bfloat16"},
}


@dataclass(slots=True)
class TensorFile:
    """The content of a safetensors file before it is written.

    entries   (name, {field: value}) of each tensor in the header, with name and value as JSON literals. A damaged file
              may have any text for a literal, and a name twice
    """

    entries: list[tuple[str, dict[str, str]]]
    data: bytes

    def header(self) -> bytes:
        texts = [f"{name}:{_object(fields.items())}" for name, fields in self.entries]
        return ("{" + ",".join(texts) + "}").encode()

    def to_bytes(self) -> bytes:
        header = self.header()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + self.data


@dataclass(slots=True)
class Draft:
    """A checkpoint before it is written.

    config       (field, value as a JSON literal) of each field of config.json
    files        {file name: tensor file}
    weight_map   (name of a tensor, file name as a JSON literal) of each entry of the index
    """

    family: str
    config: list[tuple[str, str]]
    files: dict[str, TensorFile]
    weight_map: list[tuple[str, str]] = field(default_factory=list)

    def to_files(self) -> dict[str, bytes]:
        written = {name: file.to_bytes() for name, file in self.files.items()}
        written[CONFIG] = _object(self.config).encode()
        if SINGLE not in self.files:
            text = f'{{"metadata":{{"total_size":1}},"weight_map":{_object(self.weight_map)}}}'
            written[INDEX] = text.encode("utf-8", "surrogatepass")
        return written


def _object(pairs: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join([f'"{name}":{value}' for name, value in pairs]) + "}"


def tensor_file(tensors: list[tuple[str, str, tuple[int, ...]]], source: random.Random) -> TensorFile:
    """A file of tensors (name, dtype, shape) with random bits. Every other byte is small, so most values are finite."""
    entries, data = [], b""
    for name, dtype, shape in tensors:
        size = ELEMENT_BYTES[dtype]
        for length in shape:
            size *= length
        entries.append((json.dumps(name), {"dtype": json.dumps(dtype), "shape": json.dumps(shape),
                                           "data_offsets": f"[{len(data)},{len(data) + size}]"}))
        bits = bytearray(source.randbytes(size))
        bits[1::2] = bytes(byte & 0x3F for byte in bits[1::2])
        data += bits
    return TensorFile(entries, data)


@cache
def honest(family: str, dtype: str, sharded: bool, stores_tied_head: bool, prefixed: bool) -> Draft:
    """Return the cached draft of a valid checkpoint, which callers must not change.

    dtype              dtype of the tensors in safetensors: F32, F16 or BF16
    sharded            whether the tensors are in two files with an index
    stores_tied_head   whether a tied head is stored, as a copy of the embedding
    prefixed           for GPT-2: whether names begin with "transformer."
    """
    config = FAMILIES[family]
    _, numbers = read_config(config)
    source = random.Random(f"{family} {dtype} {sharded}")
    tensors = [(name, dtype, shape) for name, shape in expected_tensors(numbers, prefixed)]
    pairs = [(name, json.dumps(value)) for name, value in config.items()]
    middle = len(tensors) // 2 if sharded else len(tensors)
    files = {SHARDS[0] if sharded else SINGLE: tensor_file(tensors[:middle], source)}
    if sharded:
        files[SHARDS[1]] = tensor_file(tensors[middle:], source)
    if numbers["tie_word_embeddings"] and stores_tied_head:
        _store_head(*files.values())
    weight_map = [(json.loads(name), json.dumps(shard)) for shard, file in files.items() for name, _ in file.entries]
    return Draft(family, pairs, files, weight_map if sharded else [])


def _store_head(first: TensorFile, *others: TensorFile) -> None:
    """Append a copy of the embedding to the last file, as lm_head.weight.

    The embedding is the first tensor of the first file.
    """
    last = (first, *others)[-1]
    fields = first.entries[0][1]
    begin, end = json.loads(fields["data_offsets"])
    place = f"[{len(last.data)},{len(last.data) + end - begin}]"
    last.entries.append(('"lm_head.weight"', {**fields, "data_offsets": place}))
    last.data += first.data[begin:end]

"""The oracle of checkpoint folders: judges files by independent rules and by the safetensors library."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import safetensors

from .config_rules import Unsure, expected_tensors, read_config
from .entries import Bytes, Entry, Link

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
MAX_JSON_BYTES, MAX_JSON_VALUES = 4 * 2**20, 200_000
SAFE_DEPTH = 400                      # some parsers fail on deeper JSON
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
HARMLESS = {"GPT2LMHeadModel": r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"}
HARMLESS_ELSEWHERE = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True)
class Good:
    """A valid checkpoint: the numbers of its configuration, and the tensors of the model in float32."""

    numbers: dict[str, Any]
    tensors: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bad:
    """The verdict on an invalid checkpoint.

    faults   (file, field) of each fault. The refusal by batch_manager must name file and field of one of them. Either
             is "" if the refusal need not name it
    """

    faults: list[tuple[str, str]]


class Broken(Exception):
    """Raised if a file is invalid.

    fields   names of the faulty fields or tensors; "" replaces a name that a message need not show unchanged
    """

    def __init__(self, *fields: str) -> None:
        self.fields = [field if field.isascii() and field.isprintable() and len(field) < 100 and '"' not in field
                       and "'" not in field and "\\" not in field else "" for field in fields] or [""]


def judge(files: Mapping[str, Entry]) -> Good | Bad | None:
    """The verdict on a folder, or None if the rules do not decide."""
    try:
        return _judge(files)
    except Unsure:
        return None


def _judge(files: Mapping[str, Entry]) -> Good | Bad:
    try:
        config = parse_json(_content(files, CONFIG)[1])
    except Broken as broken:
        return Bad([(_label(files, CONFIG), field) for field in broken.fields])
    faults, numbers = read_config(config)
    if faults:
        return Bad([(_label(files, CONFIG), name) for name in faults])

    faults = []
    places = _read_single(files, faults) if SINGLE in files else _read_shards(files, faults)
    if faults:
        return Bad(faults)
    tensors: dict[str, np.ndarray] = {}
    asked = set()
    for name, shape in expected_tensors(numbers, prefixed=True):
        # As in transformers: without the base model's prefix, and a tied embedding also under the name of the head.
        names = [name, re.sub(r"^(model|transformer)\.", "", name)]
        names += ["lm_head.weight"] if not asked and numbers["tie_word_embeddings"] else []
        stored = next((one for one in names if one in places), name)
        asked.add(stored)
        found = places.get(stored)
        if found is None or found[2] != shape or found[1] not in ELEMENT_BYTES:
            faults += [("", field) for field in Broken(*dict.fromkeys((stored, name))).fields]
        else:
            tensors[name] = in_float32(*found[1:])
    if faults:
        return Bad(faults)
    if numbers["tie_word_embeddings"] and "lm_head.weight" in places:
        _, dtype, shape, data = places["lm_head.weight"]
        embedding = next(iter(tensors.values()))
        if (dtype not in ELEMENT_BYTES or shape != embedding.shape
                or not np.array_equal(in_float32(dtype, shape, data), embedding)):
            return Bad([("", "lm_head.weight")])
        asked.add("lm_head.weight")
    harmless = HARMLESS.get(numbers["architecture"], HARMLESS_ELSEWHERE)
    left = [name for name in places if name not in asked and not re.fullmatch(harmless, name)]
    return Bad([("", field) for field in Broken(*left).fields]) if left else Good(numbers, tensors)


@lru_cache(512)
def parse_json(data: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded size without repeated keys. Raises Broken or Unsure."""
    signs = data.count(b"[") + data.count(b"{")
    if len(data) > MAX_JSON_BYTES or data.count(b",") + signs > MAX_JSON_VALUES:
        raise Broken

    def without_doubles(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key twice")
        return dict(pairs)

    def no_constant(text):
        raise ValueError(text)

    try:
        value = json.loads(data.decode(), object_pairs_hook=without_doubles, parse_constant=no_constant)
    except ValueError:
        raise Broken from None
    except RecursionError:
        raise Unsure("as deep as the stack") from None
    if type(value) is not dict:
        raise Broken
    if signs > SAFE_DEPTH and "[" * SAFE_DEPTH in re.sub(rb"[^\[{]", b"", data).decode().replace("{", "["):
        raise Unsure("perhaps as deep as the stack")
    return value


def _content(files: Mapping[str, Entry], name: str) -> tuple[str, bytes]:
    """Follow the links of a name. Returns the name of the file that they lead to, and its bytes."""
    for _ in range(10):
        entry = files.get(name)
        if isinstance(entry, Bytes):
            return name, entry.data
        name = entry.target.removeprefix("./") if isinstance(entry, Link) else "/"
        if "/" in name:
            break
    raise Broken


def _label(files: Mapping[str, Entry], name: str) -> str:
    """Return the file name that a refusal must show for the entry `name`, or "" if the entry leads to no file.

    For a link, it is the name of the link.
    """
    try:
        _content(files, name)
    except Broken:
        return ""
    return name


def _read_single(files: Mapping[str, Entry], faults: list[tuple[str, str]]) -> dict[str, tuple]:
    try:
        return {name: (SINGLE, *stored) for name, stored in read_tensors(_content(files, SINGLE)[1]).items()}
    except Broken as broken:
        faults += [(_label(files, SINGLE), field) for field in broken.fields]
        return {}


def _read_shards(files: Mapping[str, Entry], faults: list[tuple[str, str]]) -> dict[str, tuple]:
    if INDEX not in files:
        faults.append((SINGLE, INDEX))
        return {}
    places: dict[str, tuple] = {}
    try:
        weight_map = parse_json(_content(files, INDEX)[1]).get("weight_map")
        if type(weight_map) is not dict:
            raise Broken("weight_map")
    except Broken as broken:
        faults += [(_label(files, INDEX), field) for field in broken.fields]
        return {}
    for name, shard in weight_map.items():
        if type(shard) is not str:
            faults += [(_label(files, INDEX), field) for field in Broken(name).fields]
    for shard in dict.fromkeys(shard for shard in weight_map.values() if type(shard) is str):
        bare = bool(shard) and shard not in (".", "..") and shard.isprintable() and not set(shard) & set("/\\:")
        try:
            data = _content(files, shard)[1] if bare else b""
            for name, stored in read_tensors(data).items():
                if name in places:
                    faults += [(shard, field) for field in Broken(name).fields]
                places[name] = (shard, *stored)
        except Broken as broken:
            faults += [("", field) for field in broken.fields]
    for name in weight_map.keys() | places.keys():
        if name not in places or weight_map.get(name) != places[name][0]:
            faults += [(_label(files, INDEX), field) for field in Broken(name).fields]
    return places


@lru_cache(512)
def read_tensors(data: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Parse a safetensors file. Return {name: (dtype, shape, bytes)}. Raises Broken or Unsure."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Broken
    header = parse_json(data[8 : 8 + length])
    content, tensors, spans, wrong = data[8 + length :], {}, [], []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            wrong.append(name)
            continue
        sizes = [begin, end, *(shape if type(shape) is list and len(shape) <= 8 else [-1])]
        if type(dtype) is not str or type(entry["data_offsets"]) is not list or any(
                type(size) is not int or not 0 <= size <= 2**40 for size in sizes):
            wrong.append(name)
            continue
        count = ELEMENT_BYTES.get(dtype)
        for size in shape if count is not None else ():
            count *= size
        if count is not None and count != end - begin:
            wrong.append(name)
        tensors[name] = (dtype, tuple(shape), content[begin:end])
        spans.append((begin, end, name))
    reached = 0
    for begin, end, _ in sorted(spans) if not wrong else ():
        if begin != reached or end < begin:      # of tensors with the same data, a refusal may name any
            wrong += [other for *span, other in spans if span == [begin, end]]
        reached = end
    if wrong:
        raise Broken(*wrong)
    if reached != len(content):
        raise Broken
    try:
        library = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        raise Broken from None
    if {name: (said["dtype"], tuple(said["shape"]), bytes(said["data"])) for name, said in library} != tensors:
        raise AssertionError("the library reads the file in another way than the rules of the tests")
    return tensors


def in_float32(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    if dtype == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, np.float32 if dtype == "F32" else np.float16).astype(np.float32)
    return values.reshape(shape)

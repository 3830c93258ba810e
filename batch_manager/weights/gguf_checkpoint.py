"""A GGUF file, or the shards of one, as a checkpoint."""

import os
import re
from functools import partial
from pathlib import Path

import torch

from ..errors import ModelLoadError
from .folder import CheckpointFile, CheckpointFolder, gguf_file
from .gguf_config import read_config, read_end_ids
from .gguf_header import GgufHeader, read_gguf_header
from .gguf_names import places
from .gguf_source import GgufWeights, numbers_of
from .json_file import Fields, shown

SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
MAX_SHARDS = 1000


class GgufCheckpoint:
    """A .gguf file. Of a model in shards it is the first one, and the others stand beside it."""

    def __init__(self, path: str | os.PathLike) -> None:
        first = gguf_file(path)
        self.path: Path = first.path
        self._headers = _read_shards(first)
        self._tensors = {name: tensor for header in self._headers for name, tensor in header.tensors.items()}
        self._config, self._heads = read_config(self._headers[0], self._tensors, partial(numbers_of, self._headers))

    def config(self) -> Fields:
        return self._config

    def generation_config(self) -> Fields | None:
        return read_end_ids(self._headers[0])

    def weights(self, device: torch.device, dtype: torch.dtype) -> GgufWeights:
        header = self._headers[0]
        found = places(header.metadata["general.architecture"], self._tensors, self._heads, header.file)
        return GgufWeights(self._headers, found, device, dtype)


def _read_shards(first: CheckpointFile) -> list[GgufHeader]:
    """The headers of all shards, the first one's first. Raises ModelLoadError where they do not fit each other."""
    header = read_gguf_header(first)
    count = _number(header, "split.count", 1)
    if count <= 1:
        return [header]
    if count > MAX_SHARDS:
        raise ModelLoadError(f"{first}: split.count is {count:,}", f"at most {MAX_SHARDS:,} shards")
    number, name = _number(header, "split.no"), SHARD_NAME.fullmatch(first.path.name)
    if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise ModelLoadError(f"{first} is shard {number + 1} of {count}, by split.no and split.count",
                             f"a name that ends in -{number + 1:05}-of-{count:05}.gguf",
                             "rename it as it was written, with its other shards beside it")
    if number:
        raise ModelLoadError(f"{first} is shard {number + 1} of {count}", "the first one, which has the metadata",
                             f"pass {shown(f'{name[1]}-00001-of-{name[3]}{name[4]}')}")
    folder = CheckpointFolder(first.path.parent)
    headers = [header]
    for index in range(1, count):
        shard = read_gguf_header(folder.file(f"{name[1]}-{index + 1:05}-of-{name[3]}{name[4]}", named_by=str(first)))
        said = _number(shard, "split.no"), _number(shard, "split.count")
        if said != (index, count):
            raise ModelLoadError(f"{shard.file}: split.no is {said[0]} and split.count {said[1]}",
                                 f"{index} and {count}, by its name", "copy or download the shards again")
        headers.append(shard)
    seen: dict[str, CheckpointFile] = {}
    for shard in headers:
        for tensor in shard.tensors:
            if tensor in seen:
                raise ModelLoadError(f"{shown(tensor)} is in {seen[tensor]} and again in {shard.file}",
                                     "every tensor is stored once")
            seen[tensor] = shard.file
    total = _number(header, "split.tensors.count")
    if total != len(seen):
        raise ModelLoadError(f"{first}: split.tensors.count is {total:,}", f"{len(seen):,}, which the shards hold",
                             "copy or download the shards again")
    return headers


def _number(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelLoadError(f"{header.file}: {key} is {'missing' if value is None else shown(value)}",
                             "a number, as every shard has", "copy or download the file again")
    return value

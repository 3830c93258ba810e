"""Presents a GGUF file, or several shards, as a checkpoint."""

import os
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch

from ..errors import ModelLoadError
from .folder import SHARD_NAME, CheckpointFile, CheckpointFolder, gguf_file
from .gguf_config import read_config, read_end_ids
from .gguf_header import CONVERT, GgufHeader, read_gguf_header
from .gguf_names import locate
from .gguf_source import GgufWeights, numbers_of
from .json_file import Fields, shown, shown_entry

MAX_SHARDS = 1000


class GgufCheckpoint:
    """The Checkpoint of a .gguf file, or of several shards in one folder, of which `path` is the first."""

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

    def weights(self, device: torch.device, dtype: torch.dtype, kept_types: Collection[str] = ()) -> GgufWeights:
        header = self._headers[0]
        locations = locate(header.metadata["general.architecture"], self._tensors, self._heads, header.file)
        return GgufWeights(self._headers, locations, device, dtype, kept_types)


def _read_shards(first: CheckpointFile) -> list[GgufHeader]:
    """Read the headers of all shards, in order. Raises ModelLoadError if the shards do not fit together."""
    header = read_gguf_header(first)
    count = _number(header, "split.count", 1)
    if count <= 1:
        return [header]
    if count > MAX_SHARDS:
        raise ModelLoadError(f"{first}: split.count is {count:,}", f"expected at most {MAX_SHARDS:,} shards")
    number, name = _number(header, "split.no"), SHARD_NAME.fullmatch(first.path.name)
    if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise ModelLoadError(f"{first} is shard {number + 1} of {count}, by split.no and split.count",
                             f"expected a name that ends in -{number + 1:05}-of-{count:05}.gguf",
                             "restore its original name, and keep all shards in one folder")
    if number:
        raise ModelLoadError(f"{first} is shard {number + 1} of {count}",
                             "expected the first shard, which has the metadata",
                             f"pass {shown(f'{name[1]}-00001-of-{name[3]}{name[4]}')}")
    folder = CheckpointFolder(first.path.parent)
    headers = [header]
    for index in range(1, count):
        shard = read_gguf_header(folder.file(f"{name[1]}-{index + 1:05}-of-{name[3]}{name[4]}", named_by=str(first)))
        stated = _number(shard, "split.no"), _number(shard, "split.count")
        if stated != (index, count):
            raise ModelLoadError(f"{shard.file}: split.no is {stated[0]} and split.count is {stated[1]}",
                                 f"expected {index} and {count}, as in the file's name",
                                 "copy or download the shards again")
        headers.append(shard)
    seen: dict[str, CheckpointFile] = {}
    for shard in headers:
        for tensor in shard.tensors:
            if tensor in seen:
                raise ModelLoadError(f"tensor {shown(tensor)} is in {seen[tensor]} and again in {shard.file}",
                                     "expected each tensor in only one file", CONVERT)
            seen[tensor] = shard.file
    total = _number(header, "split.tensors.count")
    if total != len(seen):
        raise ModelLoadError(f"{first}: split.tensors.count is {total:,}",
                             f"expected {len(seen):,}, the number of tensors in the shards",
                             "copy or download the shards again")
    return headers


def _number(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelLoadError(f"{header.file}: {key} is {shown_entry(header.metadata, key)}",
                             "expected an integer of at least 0", "copy or download the file again")
    return value

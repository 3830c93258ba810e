"""Tensors of a checkpoint folder: model.safetensors, or the shards of model.safetensors.index.json."""

import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelLoadError
from .folder import CheckpointFolder
from .json_file import MAX_INDEX_BYTES, Fields, parse_json, read_json_file
from .source import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_HEADER_BYTES = 100_000_000       # the limit of the format itself


class SafetensorsWeights:
    """The tensors of a folder, converted to one dtype on one device as they are asked for.

    `finish` raises when tensors are left that nobody asked for: a checkpoint with more in it than the model uses is
    another model.
    """

    def __init__(self, folder: CheckpointFolder, device: torch.device, dtype: torch.dtype,
                 deterministic: bool = False) -> None:
        self.folder, self.device, self.dtype, self.deterministic = folder, device, dtype, deterministic
        self.num_bytes = 0
        self._files: dict[str, tuple[Path, object]] = {}       # tensor name -> file that holds it
        self._used: set[str] = set()
        self._open_all()

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.stacked([(name, shape)])

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        for name, shape in parts:
            self._check(name, shape)
        rows = sum(shape[0] for _, shape in parts)
        result = torch.empty((rows, *parts[0][1][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name, shape in parts:
            result[start : start + shape[0]].copy_(self._read(name))
            start += shape[0]
            self._used.add(name)
        self.num_bytes += result.nbytes
        return result

    def tied(self, name: str, to: str) -> None:
        if name not in self._files:
            return
        if to not in self._files or not torch.equal(self._read(name), self._read(to)):
            raise ModelLoadError(f"{self._files[name][0]}: {name!r} differs from {to!r}",
                                 "the two are one tensor when tie_word_embeddings is true",
                                 "set tie_word_embeddings to false, or leave the tensor out")
        self._used.add(name)

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Close the files. Raises when a tensor was not asked for and its name matches no pattern of `harmless`."""
        patterns = [re.compile(pattern) for pattern in harmless]
        left = sorted(name for name in self._files.keys() - self._used
                      if not any(pattern.fullmatch(name) for pattern in patterns))
        if left:
            path, _ = self._files[left[0]]
            more = f" and {len(left) - 1} more tensors" if left[1:] else ""
            raise ModelLoadError(f"{path} holds {left[0]!r}{more} that the model does not use",
                                 "every tensor belongs to the architecture that config.json names",
                                 "check the architecture, the sizes and the tie_word_embeddings of config.json")
        self._files.clear()

    def _open_all(self) -> None:
        if self.folder.has(SINGLE_FILE):
            self._open(self.folder.file(SINGLE_FILE))
        elif self.folder.has(INDEX_FILE):
            self._open_shards(self.folder.file(INDEX_FILE))
        else:
            raise ModelLoadError(f"{self.folder.path} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                                 "weights in safetensors files; pickled checkpoints (*.bin, *.pt) are never read",
                                 "save the model as safetensors; load_format='dummy' runs without weights")

    def _open_shards(self, index: Path) -> None:
        weight_map = Fields(read_json_file(index, MAX_INDEX_BYTES), str(index)).fields("weight_map")
        shards = dict.fromkeys(weight_map.text(name) for name in weight_map.values)
        for shard in shards:
            self._open(self.folder.file(shard, named_by=str(index)))
        for name, (path, _) in self._files.items():
            if weight_map.values.get(name) != path.name:
                raise ModelLoadError(f"{path} holds {name!r}, which {index} "
                                     + (f"places in {weight_map.values[name]!r}" if name in weight_map.values
                                        else "does not list"), "index and shards agree")
        for name in weight_map.values:
            if name not in self._files:
                raise ModelLoadError(f"{index} places {name!r} in {weight_map.values[name]!r}, which does not hold it",
                                     "index and shards agree")

    def _open(self, path: Path) -> None:
        try:
            reader = safe_open(path, framework="pt", device="cpu")
            names = list(reader.keys())
        except (SafetensorError, OSError, ValueError) as fault:
            raise ModelLoadError(f"{path} is not a complete safetensors file ({fault})",
                                 "header and data as the format describes", "copy or download the file again") from None
        self._check_header(path, names)
        for name in names:
            if name in self._files:
                raise ModelLoadError(f"{name!r} is in {self._files[name][0]} and again in {path}",
                                     "every tensor is stored once")
            self._files[name] = (path, reader)

    def _check_header(self, path: Path, names: list[str]) -> None:
        """The library keeps the last of two equal names; a name that occurs twice is refused here."""
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(min(size, MAX_HEADER_BYTES)), f"the header of {path}")
        if header.keys() - {"__metadata__"} != set(names):
            raise ModelLoadError(f"the header of {path} names other tensors than the file holds")

    def _check(self, name: str, shape: Shape) -> None:
        if name not in self._files:
            raise ModelLoadError(f"{self.folder.path} has no tensor {name!r}", f"one of shape {list(shape)}",
                                 "check that the checkpoint is complete and that config.json belongs to it")
        path, reader = self._files[name]
        view = reader.get_slice(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ModelLoadError(f"{path}: {name!r} has shape {list(view.get_shape())}",
                                 f"config.json asks for {list(shape)}")
        if view.get_dtype() not in DTYPES:
            raise ModelLoadError(f"{path}: {name!r} is of type {view.get_dtype()}", "F32, F16 or BF16",
                                 "quantised checkpoints are not supported")

    def _read(self, name: str) -> torch.Tensor:
        path, reader = self._files[name]
        try:
            return reader.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as fault:
            raise ModelLoadError(f"{path}: {name!r} cannot be read ({fault})") from None

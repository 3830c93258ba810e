"""Tensors of a checkpoint folder: model.safetensors, or the shards listed in model.safetensors.index.json."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelLoadError
from ..loading_thread import check_interruption
from .folder import CheckpointFile, CheckpointFolder
from .json_file import AGAIN, READABLE, Fields, read_json_file, shown
from .safetensors_header import ELEMENT_BYTES, StoredTensor, incomplete, read_header
from .source import Shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor and the open file that holds it. `path` is `CheckpointFile.path` of the file."""

    path: Path
    reader: Any
    stored: StoredTensor


class SafetensorsWeights:
    """The StoredWeights of a folder of safetensors files: tensors on one device in one dtype.

    A tensor is read and converted when it is requested. On the device "meta" no data is read, and tensors have only
    shapes. `finish` raises ModelLoadError if a tensor was never requested, because a checkpoint with unused tensors
    belongs to a different model.
    """

    def __init__(self, folder: CheckpointFolder, device: torch.device, dtype: torch.dtype) -> None:
        self.folder, self.device, self.dtype = folder, device, dtype
        self.num_bytes = 0
        self._tensors: dict[str, _Tensor] = {}
        self._used: set[str] = set()
        self._open_all()

    @property
    def _is_meta(self) -> bool:
        return self.device.type == "meta"

    @property
    def num_weights(self) -> int:
        """Number of elements in all tensors of the files."""
        return sum(math.prod(tensor.stored.shape) for tensor in self._tensors.values())

    @property
    def stored_types(self) -> Counter[str]:
        return Counter(tensor.stored.dtype for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        if shape:
            return self.stacked([(name, shape)])
        self._check(name, shape)                       # a single number
        self._used.add(name)
        self.num_bytes += self.dtype.itemsize
        return self._read(name).to(device=self.device, dtype=self.dtype, copy=True)

    def stacked(self, parts: Sequence[tuple[str, Shape]]) -> torch.Tensor:
        check_interruption()
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
        if name not in self._tensors:
            return
        if to in self._tensors:
            self._check(name, self._tensors[to].stored.shape)
        if to not in self._tensors or not (self._is_meta or torch.equal(self._read(name), self._read(to))):
            raise ModelLoadError(f"{self._tensors[name].path}: {name!r} differs from {to!r}",
                                 "expected equal tensors, because tie_word_embeddings is true",
                                 "set tie_word_embeddings to false, or remove the tensor")
        self._used.add(name)

    def count_copy(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Close the files, also if the method raises.

        Raises ModelLoadError if a tensor was never requested and its name matches no pattern of `harmless`.
        """
        tensors, self._tensors = self._tensors, {}
        patterns = [re.compile(pattern) for pattern in harmless]
        left = sorted(name for name in tensors.keys() - self._used
                      if not any(pattern.fullmatch(name) for pattern in patterns))
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise ModelLoadError(f"{tensors[left[0]].path} contains tensor {shown(left[0])}{more}, which the "
                                 "model does not use", "expected only tensors of the architecture in config.json",
                                 "check the architecture, the sizes and tie_word_embeddings in config.json")

    def _open_all(self) -> None:
        if self.folder.has(SINGLE_FILE):
            self._open(self.folder.file(SINGLE_FILE))
        elif self.folder.has(INDEX_FILE):
            self._open_shards(self.folder.file(INDEX_FILE))
        else:
            raise ModelLoadError(f"{self.folder.path} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                                 "expected safetensors files, because pickled checkpoints (*.bin, *.pt) are never read",
                                 "save the model as safetensors, or pass load_format='dummy' for random weights")

    def _open_shards(self, index: CheckpointFile) -> None:
        weight_map = Fields(read_json_file(index.real_path, str(index)), str(index)).fields("weight_map")
        shards = dict.fromkeys(weight_map.text(name) for name in weight_map.values)
        for shard in shards:
            self._open(self.folder.file(shard, named_by=str(index)))
        for name, tensor in self._tensors.items():
            if weight_map.values.get(name) != tensor.path.name:
                raise ModelLoadError(f"{tensor.path} contains tensor {shown(name)}, which {index} "
                                     + (f"lists in {shown(weight_map.values[name])}" if name in weight_map.values
                                        else "does not list"), "expected an index that matches its shards",
                                     AGAIN)
        for name, shard in weight_map.values.items():
            if name not in self._tensors:
                raise ModelLoadError(f"{index} lists tensor {shown(name)} in {shown(shard)}, which does not contain it",
                                     "expected an index that matches its shards",
                                     AGAIN)

    def _open(self, file: CheckpointFile) -> None:
        tensors = read_header(file)
        try:
            str(file.real_path).encode()
        except UnicodeEncodeError:
            raise ModelLoadError(f"the path {str(file.real_path)!r} is not UTF-8",
                                 "expected a UTF-8 path, which the safetensors library requires", "rename the folder"
                                 ) from None
        try:
            reader = safe_open(file.real_path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError, RuntimeError) as fault:    # RuntimeError: the file just shrank
            for name, stored in tensors.items():
                if stored.dtype not in ELEMENT_BYTES:    # the library refuses the whole file, without the tensor's name
                    raise _unsupported_type(file.path, name, stored.dtype) from None
            raise incomplete(file.path, str(fault)[:200]) from None
        for name, stored in tensors.items():
            if name in self._tensors:
                raise ModelLoadError(f"tensor {shown(name)} is in {self._tensors[name].path} and again in {file}",
                                     "expected each tensor in only one file", AGAIN)
            self._tensors[name] = _Tensor(file.path, reader, stored)

    def _check(self, name: str, shape: Shape) -> None:
        if name not in self._tensors:
            raise ModelLoadError(f"{self.folder.path} has no tensor {name!r}",
                                 f"expected a tensor of shape {list(shape)}",
                                 "check that the checkpoint is complete, and that config.json and the model class fit "
                                 "it")
        path, stored = self._tensors[name].path, self._tensors[name].stored
        if stored.shape != tuple(shape):
            raise ModelLoadError(f"{path}: tensor {name!r} has shape {shown(list(stored.shape))}",
                                 f"expected {list(shape)}, by the spec that the model class read from config.json",
                                 "check that config.json and the model class fit these weights")
        if stored.dtype not in ELEMENT_BYTES:
            raise _unsupported_type(path, name, stored.dtype)

    def _read(self, name: str) -> torch.Tensor:
        """Read a tensor from its file, and compare its shape and dtype with the checked header.

        The library opened the file after the header was checked, so the file may have been replaced in between.
        """
        tensor = self._tensors[name]
        if self._is_meta:
            return torch.empty(tensor.stored.shape, dtype=self.dtype, device=self.device)
        try:
            found = tensor.reader.get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as fault:
            raise ModelLoadError(f"{tensor.path}: tensor {name!r} cannot be read ({str(fault)[:200]})",
                                 *READABLE) from None
        stored = tensor.stored
        if tuple(found.shape) != stored.shape or found.dtype is not TORCH_DTYPES.get(stored.dtype, found.dtype):
            raise ModelLoadError(
                f"{tensor.path}: tensor {name!r} has shape {shown(list(found.shape))} and type {found.dtype}",
                f"expected {shown(list(stored.shape))} and {shown(stored.dtype)}, "
                "as in the file's header when the file was opened",
                "load the model again, and replace no file meanwhile")
        return found


def _unsupported_type(path: Path, name: str, dtype: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: the header gives tensor {shown(name)} the dtype {shown(dtype)}",
                          "expected 'F32', 'F16' or 'BF16'", "use weights in one of these dtypes, or a GGUF file")

"""Tensors of a checkpoint folder: model.safetensors, or the shards listed in model.safetensors.index.json."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelLoadError
from .folder import CheckpointFile, CheckpointFolder
from .json_file import AGAIN, READABLE, Fields, read_json_file, shown
from .matrices import DenseSource, Part, Shape
from .safetensors_header import ELEMENT_BYTES, StoredTensor, incomplete, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# As in transformers: a folder saved from the base model lacks the base model's prefix in the names of its tensors.
BASE_PREFIXES = ("model.", "transformer.", "gpt_neox.", "biogpt.")
HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor and the open file that holds it. `path` is `CheckpointFile.path` of the file."""

    path: Path
    name: str
    reader: Any
    stored: StoredTensor

    def read(self, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read the tensor, or the part at `index`, from its file. Compare shape and dtype with the checked header.

        The library opened the file after the header was checked, so the file may have been replaced in between.
        """
        try:
            if index is None:
                found = self.reader.get_tensor(self.name)
                shape = tuple(found.shape)
            else:
                view = self.reader.get_slice(self.name)
                shape, found = tuple(view.get_shape()), view[index]
        except (SafetensorError, OSError, ValueError, RuntimeError) as fault:
            raise ModelLoadError(f"{self.path}: tensor {self.name!r} cannot be read ({str(fault)[:200]})",
                                 *READABLE) from None
        if shape != self.stored.shape or found.dtype is not TORCH_DTYPES.get(self.stored.dtype, found.dtype):
            raise ModelLoadError(
                f"{self.path}: tensor {self.name!r} has shape {shown(list(shape))} and type {found.dtype}",
                f"expected {shown(list(self.stored.shape))} and {shown(self.stored.dtype)}, "
                "as in the file's header when the file was opened",
                "load it again, and replace no file meanwhile")
        return found


def open_tensors(file: CheckpointFile) -> dict[str, FileTensor]:
    """Open a safetensors file. Returns its tensors by name. Raises ModelLoadError, which names file and field."""
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
            if stored.dtype not in ELEMENT_BYTES:        # the library refuses the whole file, without the tensor's name
                raise unsupported_type(file.path, name, stored.dtype) from None
        raise incomplete(file.path, str(fault)[:200]) from None
    return {name: FileTensor(file.path, name, reader, stored) for name, stored in tensors.items()}


class SafetensorsWeights(DenseSource):
    """The StoredWeights of a folder of safetensors files: tensors on one device in one dtype.

    A tensor is read and converted when it is requested. On the device "meta" no data is read, and tensors have only
    shapes. `finish` raises ModelLoadError if a tensor was never requested, because a checkpoint with unused tensors
    belongs to a different model.

    As in transformers, two differences in names are read: the prefix of the base model can be missing, and a tied
    embedding can be stored under the name of the head.
    """

    def __init__(self, folder: CheckpointFolder, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.folder = folder
        self._tensors: dict[str, FileTensor] = {}
        self._used: set[str] = set()
        self._borrowed: dict[str, str] = {}        # stored head -> embedding that is read from it until `tied` confirms
        self._open_all()

    @property
    def _is_meta(self) -> bool:
        return self.device.type == "meta"

    @property
    def num_weights(self) -> int:
        """Number of elements in all tensors of the files."""
        return sum(math.prod(tensor.stored.shape) for tensor in self._tensors.values())

    @property
    def loaded_bytes(self) -> int:
        return self.num_weights * self.dtype.itemsize

    def keeps(self, name: str) -> bool:
        return False

    @property
    def stored_types(self) -> Counter[str]:
        return Counter(tensor.stored.dtype for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def tied(self, name: str, to: str) -> None:
        head, source = self._stored_name(name), self._stored_name(to)
        if head is None:
            return
        borrower = self._borrowed.pop(head, None)
        if borrower is not None and borrower != to:
            raise self._missing(borrower, self._tensors[head].stored.shape)
        if borrower is None:
            if source is not None:
                self._check(name, self._tensors[source].stored.shape)
            if source is None or not (self._is_meta or torch.equal(self._tensors[head].read(),
                                                                   self._tensors[source].read())):
                raise ModelLoadError(f"{self._tensors[head].path}: {head!r} differs from {source or to!r}",
                                     "expected equal tensors, because tie_word_embeddings is true",
                                     "set tie_word_embeddings to false, or remove the tensor")
        self._used.add(head)

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Close the files, also if the method raises.

        Raises ModelLoadError if a tensor was never requested and its name matches no pattern of `harmless`.
        """
        unconfirmed = [self._missing(name, self._tensors[head].stored.shape) for head, name in self._borrowed.items()]
        tensors, self._tensors = self._tensors, {}
        if unconfirmed:
            raise unconfirmed[0]
        patterns = [re.compile(pattern) for pattern in harmless]
        left = sorted(name for name in tensors.keys() - self._used
                      if not any(pattern.fullmatch(prefix + name) for pattern in patterns
                                 for prefix in ("", *BASE_PREFIXES)))
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
        for name, tensor in open_tensors(file).items():
            if name in self._tensors:
                raise ModelLoadError(f"tensor {shown(name)} is in {self._tensors[name].path} and again in {file}",
                                     "expected each tensor in only one file", AGAIN)
            self._tensors[name] = tensor

    def _stored_name(self, name: str) -> str | None:
        """Return the name under which the files have the tensor `name`; None: they do not have it."""
        return next((other for other in self._possible_names(name) if other in self._tensors), None)

    @staticmethod
    def _possible_names(name: str) -> tuple[str, ...]:
        """Return the names under which files may have the tensor `name`."""
        others = [name.removeprefix(prefix) for prefix in BASE_PREFIXES if name.startswith(prefix)]
        return (name, *others, *(HEADS if name in HEADS else ()))

    def _check(self, wanted: str, shape: Shape) -> str:
        """Return the stored name of the tensor `wanted`. Raises ModelLoadError unless it has the shape."""
        name = self._stored_name(wanted)
        if name in self._borrowed:                     # the class uses the head's tensor itself: it does not tie them
            raise self._missing(self._borrowed[name], self._tensors[name].stored.shape)
        if name is None:
            name = next((head for head in HEADS if head in self._tensors and head not in self._used
                         and self._tensors[head].stored.shape == tuple(shape)), None)
            if name is None or wanted in HEADS:
                raise self._missing(wanted, shape)
            self._borrowed[name] = wanted
        path, stored = self._tensors[name].path, self._tensors[name].stored
        if stored.shape != tuple(shape):
            raise ModelLoadError(f"{path}: tensor {name!r} has shape {shown(list(stored.shape))}",
                                 f"expected {list(shape)}, by the spec that the model class read from config.json",
                                 "check that config.json and the model class fit these weights")
        if stored.dtype not in ELEMENT_BYTES:
            raise unsupported_type(path, name, stored.dtype)
        return name

    def _missing(self, name: str, shape: Shape) -> ModelLoadError:
        """Return the error for a missing tensor. It names the stored tensor that `name` was probably saved as."""
        parts = name.split(".")
        tails = [".".join(["", *parts[-length:]]) for length in range(len(parts), 1, -1)]
        of_layer = [stored for stored in sorted(self._tensors)
                    if [*filter(str.isdecimal, stored.split("."))] == [*filter(str.isdecimal, parts)]]
        near = next((stored for tail in tails for stored in of_layer if f".{stored}".endswith(tail)), None)
        fix = "check that the checkpoint is complete, and that config.json and the model class fit it"
        if near is not None and near.endswith(name):
            fix = f"remove {shown(near.removesuffix(name))} from the names of the tensors"
        elif near is not None:
            fix = "rename the tensors, or correct config.json"
        elif name in HEADS or "embed" in name:
            near = next((stored for stored in sorted(self._tensors) if (stored in HEADS or "embed" in stored)
                         and self._tensors[stored].stored.shape == tuple(shape)), None)
            if near is not None:
                fix = "set tie_word_embeddings to true in config.json, if both have the same values"
        there = "" if near is None else f", but {shown(near)}"
        return ModelLoadError(f"{self.folder.path} has no tensor {name!r}{there}",
                              f"expected a tensor of shape {list(shape)}", fix)

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        if not self._is_meta:
            found = self._tensors[stored_name].read(None if part.is_whole else part.index)
            # Converted first: a transposing copy between two dtypes takes 1.5 times as long.
            target.copy_(found.to(self.dtype).t() if part.transposed else found)
        self._used.add(stored_name)


def unsupported_type(path: Path, name: str, dtype: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: the header gives tensor {shown(name)} the dtype {shown(dtype)}",
                          "expected 'F32', 'F16' or 'BF16'", "use weights in one of these dtypes, or a GGUF file")

"""Quantised checkpoints in safetensors files.

`quantization_config` says how to read the tensors of a quantised matrix, and the files say which matrices have them.
Both must agree: types, shapes and values of the tensors follow from the configuration, or the checkpoint is refused.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from math import inf, prod

import numpy as np
import torch

from ..errors import ModelLoadError
from .folder import CheckpointFolder
from .json_file import shown
from .matrices import (
    RANGES_ALIGNED,
    WHOLE_MATRIX,
    Blocks,
    GroupedType,
    Part,
    Shape,
    Share,
    StoredMatrix,
    changed_rows,
    grouped_rows,
)
from .quantisation_scheme import CONFIG, UNSUPPORTED, Scheme
from .quantised_tensors import QuantisedMatrixTensors
from .safetensors_source import FileTensor, SafetensorsWeights


class QuantisedFolderWeights(SafetensorsWeights):
    """The StoredWeights of a folder whose matrices are quantised. Other tensors are those of a plain folder.

    kept_types   types of levels that a layer may get as they are, see Checkpoint.weights. All others are decoded
    """

    def __init__(self, folder: CheckpointFolder, scheme: Scheme, device: torch.device, dtype: torch.dtype,
                 kept_types: Collection[str] = ()) -> None:
        self._kept_types, self._matrices, self._has_cache_scales = kept_types, {}, scheme.has_cache_scales
        super().__init__(folder, device, dtype)
        suffix = {"gptq": ".qweight", "awq": ".qweight", "packed": ".weight_packed"}.get(scheme.method, ".weight")
        types = ("I8",) if scheme.method == "int8" else ("F8_E4M3",)
        for name, tensor in self._tensors.items():
            if name.endswith(suffix) and (suffix != ".weight" or tensor.stored.dtype in types):
                prefix = name.removesuffix(suffix)
                parts = {other: self._tensors[f"{prefix}.{other}"] for other in self._suffixes(prefix)
                         if other != "bias"}
                self._matrices[prefix] = QuantisedMatrixTensors(prefix, parts, scheme, self._is_meta)
        if not self._matrices:
            raise ModelLoadError(f"{folder.path} has no tensor whose name ends in {suffix}"
                                 + ("" if suffix != ".weight" else f" with the type {types[0]}"),
                                 f"expected quantised weights, by {CONFIG} in config.json",
                                 f"remove {CONFIG} if the weights are not quantised")

    def _suffixes(self, prefix: str) -> list[str]:
        return [name[len(prefix) + 1 :] for name in self._tensors
                if name.startswith(f"{prefix}.") and "." not in name[len(prefix) + 1 :]]

    def _matrix(self, name: str) -> QuantisedMatrixTensors | None:
        """Return the quantised matrix with this stored name; None: it is not quantised."""
        return self._matrices.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    @property
    def num_weights(self) -> int:
        return sum(matrix.outputs * matrix.inputs for matrix in self._matrices.values()) + sum(
            prod(tensor.stored.shape) for tensor in self._plain())

    def _plain(self) -> list[FileTensor]:
        of_matrices = {f"{prefix}.{suffix}" for prefix, matrix in self._matrices.items() for suffix in matrix.tensors}
        return [tensor for name, tensor in self._tensors.items() if name not in of_matrices]

    @property
    def loaded_bytes(self) -> int:
        size = self.dtype.itemsize
        return sum(matrix.num_bytes if matrix.kept_as(self._kept_types) else matrix.outputs * matrix.inputs * size
                   for matrix in self._matrices.values()) + sum(
            prod(tensor.stored.shape) * size for tensor in self._plain())

    def keeps(self, name: str) -> bool:
        matrix = self._matrix(self._stored_name(name) or "")
        return matrix is not None and matrix.kept_as(self._kept_types) is not None

    @property
    def stored_types(self) -> Counter[str]:
        return Counter(tensor.stored.dtype for tensor in self._plain()) + Counter(
            matrix.scheme.name for matrix in self._matrices.values())

    def cache_scales(self, name: str) -> tuple[float, float]:
        if not self._has_cache_scales:
            return super().cache_scales(name)
        return self._cache_scale(f"{name}.k_scale"), self._cache_scale(f"{name}.v_scale")

    def _cache_scale(self, wanted: str) -> float:
        name = self._stored_name(wanted)
        if name is None:
            raise self._missing(wanted, (1,))
        tensor, scale = self._tensors[name], 1.0
        self._used.add(name)
        fits = tensor.stored.shape in ((), (1,)) and tensor.stored.dtype in ("F16", "BF16", "F32")
        if fits and not self._is_meta:
            scale = tensor.read().float().item()
        if not fits or not 0 < scale < inf:
            value = f", with the value {scale}" if fits else ""
            raise ModelLoadError(f"{tensor.path}: tensor {shown(name)} is of type {shown(tensor.stored.dtype)[1:-1]} "
                                 f"and shape {list(tensor.stored.shape)}{value}",
                                 f"expected one positive number in F16, BF16 or F32, by kv_cache_scheme in {CONFIG}",
                                 f"check that {CONFIG} in config.json describes these weights")
        return scale

    def tied(self, name: str, to: str) -> None:
        for each in (name, to):
            if self._matrix(self._stored_name(each) or "") is not None:
                raise ModelLoadError(f"{self.folder.path}: the weights of {each!r} are quantised",
                                     "expected plain weights of a head that is also the embedding",
                                     "set tie_word_embeddings to false if the head has weights of its own")
        super().tied(name, to)

    def linear(self, names: Sequence[str], in_size: int, sizes: Sequence[int], *, bias: bool = False,
               transposed: bool = False, row_order: torch.Tensor | None = None, scale: float | None = None,
               share: Share = WHOLE_MATRIX) -> StoredMatrix:
        weights, biases = self._parts(names, in_size, sizes, transposed, share)
        if transposed and any(self._matrix(self._stored_name(part.name) or "") for part in weights):
            raise ModelLoadError(f"{self.folder.path}: the weights of {names[0]!r} are quantised",
                                 "expected plain weights of a layer that stores their transpose", UNSUPPORTED)
        types: list[tuple[GroupedType, int]] = []
        for part in weights:
            matrix = self._matrix(self._check(part.name, part.shape))
            kind, rows = None if matrix is None else matrix.kept_as(self._kept_types), part.loaded_shape[0]
            if types and types[-1][0] == kind:
                rows += types.pop()[1]
            if kind is None or not part.is_whole or types and types[-1][1] % RANGES_ALIGNED:
                types.clear()
                break
            types.append((kind, rows))
        if not types or row_order is not None and types[1:]:
            return super().linear(names, in_size, sizes, bias=bias, transposed=transposed, row_order=row_order,
                                  scale=scale, share=share)
        added = changed_rows(self._joined(biases), row_order, scale) if bias else None
        output_of = None if row_order is None else np.argsort(row_order.numpy())
        return Blocks(types, in_size, partial(self._rows, weights, output_of), added, 1.0 if scale is None else scale)

    def _rows(self, parts: Sequence[Part], output_of: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        start = 0
        for part in parts:
            name = self._stored_name(part.name)
            matrix = self._matrix(name)
            self._use(name)
            self.num_bytes += matrix.num_bytes
            for first, piece in matrix.pieces(range(matrix.outputs)):
                rows = start + first + np.arange(len(piece.levels))
                yield rows if output_of is None else output_of[rows], grouped_rows(*piece)
            start += matrix.outputs

    def _use(self, name: str) -> None:
        matrix = self._matrix(name)
        self._used.update([name] if matrix is None else [f"{matrix.prefix}.{suffix}" for suffix in matrix.tensors])

    def _stored_name(self, name: str) -> str | None:
        found = super()._stored_name(name)
        if found is not None or not name.endswith(".weight"):
            return found
        return next((other for other in self._possible_names(name) if self._matrix(other) is not None), None)

    def _check(self, wanted: str, shape: Shape) -> str:
        name = self._stored_name(wanted)
        matrix = None if name is None else self._matrix(name)
        if matrix is None:
            return super()._check(wanted, shape)
        if (matrix.outputs, matrix.inputs) != tuple(shape):
            raise ModelLoadError(f"{self.folder.path}: the quantised matrix {name!r} has shape "
                                 f"{[matrix.outputs, matrix.inputs]}", f"expected {list(shape)}, by config.json",
                                 f"check that {CONFIG} in config.json describes these weights")
        return name

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        matrix = self._matrix(stored_name)
        if matrix is None:
            super()._load(target, stored_name, part)
            return
        self._use(stored_name)
        if self._is_meta:
            return
        rows, columns = part.rows or range(matrix.outputs), part.columns
        for first, found in matrix.decoded(rows):
            found = found if columns is None else found[:, columns.start : columns.stop]
            target[first - rows.start : first - rows.start + len(found)] = found.to(self.dtype)

"""The tensors of one quantised matrix in safetensors files. A weight is (level - zero point) * scale, in float32."""

from collections.abc import Collection, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ModelLoadError
from ..loading_thread import check_interruption
from .json_file import shown
from .matrices import GroupedType, Shape
from .quantisation_scheme import BLOCK, CONFIG, WHOLE_ROW, Scheme
from .safetensors_source import FileTensor

NUMBERS_AT_ONCE = 2**20              # that are unpacked
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)               # place of output i of eight in a word


class Piece(NamedTuple):
    """Some outputs of a quantised matrix.

    levels          [outputs, inputs] uint8 for 4 bits, int8 for 8 bits
    scales, zeros   [outputs, groups]
    """

    levels: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray


class QuantisedMatrixTensors:
    """The tensors of one quantised matrix in the files.

    tensors         suffix, such as "qweight" -> the tensor
    outputs, inputs   sizes of the matrix, by its levels
    order           [inputs] group of each input, if it has an order of its own; None: groups one after another

    The constructor raises ModelLoadError for tensors that do not have the types and shapes of the scheme.
    """

    def __init__(self, prefix: str, tensors: dict[str, FileTensor], scheme: Scheme, is_meta: bool) -> None:
        self.prefix, self.tensors, self.scheme, self.order = prefix, tensors, scheme, None
        method, of_word = scheme.method, 32 // scheme.bits
        main = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed"}.get(method, "weight")
        shape = self._tensor(main, ("I32",) if main != "weight" else ("I8",) if method == "int8" else ("F8_E4M3",))
        if len(shape) != 2:
            raise self._fault(main, "a matrix")
        if method == "gptq":
            self.inputs, self.outputs = shape[0] * of_word, shape[1]
        elif method == "awq":
            self.inputs, self.outputs = shape[0], shape[1] * of_word
        elif method == "packed":
            self._tensor("weight_shape", ("I64", "I32"), (2,))
            self.outputs, self.inputs = shape[0], shape[1] * of_word
            if not is_meta:
                outputs, inputs = tensors["weight_shape"].read().tolist()
                if outputs != self.outputs or not 0 < inputs <= self.inputs < inputs + of_word:
                    raise self._fault("weight_shape", f"the sizes of weight_packed, and not {[outputs, inputs]}")
                self.inputs = inputs
        else:
            self.outputs, self.inputs = shape
        self.group = min(scheme.group, max(self.inputs, 1))
        self.groups = -(-self.inputs // self.group)
        floats = ("F16", "BF16", "F32")
        if method in ("gptq", "awq"):
            self._tensor("scales", floats, (self.groups, self.outputs))
            self._tensor("qzeros", ("I32",), (self.groups, -(-self.outputs // of_word)))
        elif method == "fp8":
            scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
            if scheme.block is None:
                self._tensor(scale, floats, (), (1,), (self.outputs, 1))
            else:
                rows, columns = scheme.block
                self._tensor(scale, floats, (-(-self.outputs // rows), -(-self.inputs // columns)))
        else:
            of_tensor = ((), (1,), (1, 1)) if scheme.group == WHOLE_ROW and method == "int8" else ()
            self._tensor("weight_scale", floats, (self.outputs, self.groups), *of_tensor)
            if scheme.has_zeros and method == "packed":
                self._tensor("weight_zero_point", ("I32",), (-(-self.outputs // of_word), self.groups))
            elif scheme.has_zeros:
                self._tensor("weight_zero_point", ("I8",), (self.outputs, self.groups), *of_tensor)
        name = {"gptq": "g_idx", "packed": "weight_g_idx"}.get(method)
        if method == "packed" and name in tensors and not scheme.has_order:
            raise self._fault(name, f"no order of the inputs, by {CONFIG}")
        if name is not None and (name in tensors or scheme.has_order):
            self._tensor(name, ("I32", "I64"), (self.inputs,))
            if not is_meta:
                self.order = self._order(tensors[name].read().numpy())
        known = {"gptq": {"g_idx", "qzeros", "scales"}, "awq": {"qzeros", "scales"}}.get(method, {
            "weight_scale", "weight_shape", "weight_g_idx", "weight_zero_point", "weight_scale_inv"}) | {main}
        if extra := sorted(tensors.keys() - known):
            raise self._fault(extra[0], f"no such tensor, by {CONFIG}")
        zeros = None if scheme.has_zeros or is_meta else tensors.get("weight_zero_point")
        if zeros is not None and (method == "fp8" or bool(zeros.read().any())):
            raise self._fault("weight_zero_point", f"no zero points, because levels are symmetric by {CONFIG}")

    def _fault(self, suffix: str, expected: str) -> ModelLoadError:
        found = self.tensors.get(suffix)
        path = next(iter(self.tensors.values())).path
        said = "missing"
        if found is not None:
            said = f"of type {shown(found.stored.dtype)[1:-1]} and shape {shown(list(found.stored.shape))}"
        return ModelLoadError(f"{path}: tensor {shown(f'{self.prefix}.{suffix}')} is {said}", f"expected {expected}",
                              f"check that {CONFIG} in config.json describes these weights")

    def _tensor(self, suffix: str, types: Collection[str], *shapes: Shape) -> tuple[int, ...]:
        """Return the shape of a tensor, which must have one of the types, and one of the shapes if there are any."""
        found = self.tensors.get(suffix)
        said = " or ".join(str(list(shape)) for shape in shapes)
        expected = f"{' or '.join(types)}{f' and shape {said}' if shapes else ''}, by {CONFIG}"
        if found is None or found.stored.dtype not in types or shapes and found.stored.shape not in shapes:
            raise self._fault(suffix, expected)
        return found.stored.shape

    def _order(self, found: np.ndarray) -> np.ndarray | None:
        if not ((found >= 0) & (found < self.groups)).all():
            raise self._fault("g_idx" if self.scheme.method == "gptq" else "weight_g_idx",
                              f"groups in 0..{self.groups - 1}")
        return None if np.array_equal(found, np.arange(self.inputs) // self.group) else found

    @property
    def num_bytes(self) -> int:
        return sum(tensor.stored.end - tensor.stored.begin for tensor in self.tensors.values())

    def kept_as(self, kept_types: Collection[str]) -> GroupedType | None:
        """Return the type in which products read the matrix as it is; None: it has to be decoded."""
        if self.scheme.name not in kept_types or self.scheme.method == "fp8" or self.order is not None:
            return None
        if self.group % BLOCK and self.groups > 1:
            return None
        scales = self.tensors.get("scales") or self.tensors["weight_scale"]
        dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
        return GroupedType(self.scheme.name, self.group, dtypes[scales.stored.dtype])

    def pieces(self, outputs: range) -> Iterator[tuple[int, Piece]]:
        """Yield the outputs, some at a time, each with the number of its first one."""
        step = max(8, NUMBERS_AT_ONCE // max(self.inputs, 1) // 8 * 8)      # words of packed outputs have eight
        first = outputs.start // 8 * 8
        while first < outputs.stop:
            check_interruption()
            end = min(first + step, self.outputs)
            piece, skipped = self._piece(first, end), max(outputs.start - first, 0)
            last = min(outputs.stop, end) - first
            yield first + skipped, Piece(*(each[skipped:last] for each in piece))
            first = end

    def _piece(self, first: int, end: int) -> Piece:
        scheme, read = self.scheme, {name: tensor.read for name, tensor in self.tensors.items()}
        bits, of_word, rows = scheme.bits, 32 // scheme.bits, slice(first, end)
        words = slice(first // of_word, -(-end // of_word))
        if scheme.method in ("gptq", "awq"):
            scales = read["scales"]((slice(None), rows)).t().contiguous()
            zeros = unpacked(read["qzeros"]((slice(None), words)).numpy(), bits)
            if scheme.method == "gptq":
                levels = unpacked(read["qweight"]((slice(None), rows)).t().contiguous().numpy(), bits)
            else:
                levels = _in_order(unpacked(read["qweight"]((slice(None), words)).numpy(), bits)).T
                zeros = _in_order(zeros)
            zeros = self._zeros_of_gptq(zeros) if scheme.method == "gptq" else zeros
            zeros = zeros.T[: end - first].astype(np.int16)
        else:
            scales = self._scales_of(read["weight_scale"], rows, end - first)
            if scheme.method == "int8":
                levels = read["weight"]((rows, slice(None))).numpy()
                zeros = np.zeros(scales.shape, np.int16)
                if scheme.has_zeros:
                    zeros = self._scales_of(read["weight_zero_point"], rows, end - first).numpy().astype(np.int16)
                self._check_finite(scales, "weight_scale")
                return Piece(levels, scales, zeros)
            levels = unpacked(read["weight_packed"]((rows, slice(None))).numpy(), bits)[:, : self.inputs]
            zeros = np.full(scales.shape, 2 ** (bits - 1), np.int16)
            if scheme.has_zeros:
                found = unpacked(np.ascontiguousarray(read["weight_zero_point"]((words, slice(None))).numpy().T), bits)
                zeros = found.T[: end - first].astype(np.int16)
        self._check_finite(scales, "scales" if "scales" in read else "weight_scale")
        if bits == 8:                    # stored from 0 to 255
            levels, zeros = (levels ^ 128).view(np.int8), zeros - np.int16(128)
        return Piece(np.ascontiguousarray(levels), scales, zeros)

    def _check_finite(self, found: torch.Tensor, suffix: str) -> None:
        if not found.isfinite().all():
            raise self._fault(suffix, "finite numbers")

    def _scales_of(self, read: Any, rows: slice, count: int) -> torch.Tensor:
        """Read the scales of some outputs, [outputs, groups]. One scale of a whole matrix is repeated."""
        whole = self.tensors["weight_scale"].stored.shape
        if prod(whole) == 1 and self.outputs * self.groups > 1:
            return read().reshape(1, 1).expand(count, 1).contiguous()
        return read().reshape(1, 1) if len(whole) < 2 else read((rows, slice(None)))

    def _zeros_of_gptq(self, stored: np.ndarray) -> np.ndarray:
        """Return zero points, which "gptq" stores less one. Files say the one and hold the other: if levels are
        symmetric, the value shows it."""
        bits, middle = self.scheme.bits, 2 ** (self.scheme.bits - 1)
        adds_one = self.scheme.adds_one
        if adds_one is None:
            values = np.unique(stored[:, : self.outputs])
            if values.tolist() not in ([middle - 1], [middle]):
                raise self._fault("qzeros", f"{middle - 1} or {middle} as every zero point, because sym is true in "
                                            f"{CONFIG}, not {shown(values.tolist())}")
            adds_one = values[0] == middle - 1
        return (stored + 1) & (2**bits - 1) if adds_one else stored

    def decoded(self, outputs: range) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the weights of the outputs in float32, some at a time, each with the number of its first one."""
        if self.scheme.method == "fp8":
            yield from self._decoded_fp8(outputs)
            return
        group_of = np.arange(self.inputs) // self.group if self.order is None else self.order
        for first, piece in self.pieces(outputs):
            steps = piece.levels.astype(np.int16) - piece.zeros[:, group_of]
            yield first, torch.from_numpy(steps.astype(np.float32)) * piece.scales.float()[:, group_of]

    def _decoded_fp8(self, outputs: range) -> Iterator[tuple[int, torch.Tensor]]:
        scale = self.tensors.get("weight_scale_inv") or self.tensors["weight_scale"]
        scales = scale.read().float()
        self._check_finite(scales, "weight_scale_inv" if "weight_scale_inv" in self.tensors else "weight_scale")
        if self.scheme.block is not None:
            rows, columns = self.scheme.block
            scales = scales.repeat_interleave(rows, 0)[: self.outputs].repeat_interleave(columns, 1)[:, : self.inputs]
        elif scales.dim() < 2:
            scales = scales.reshape(1, 1)
        step = max(1, NUMBERS_AT_ONCE // max(self.inputs, 1))
        for first in range(outputs.start, outputs.stop, step):
            check_interruption()
            rows = slice(first, min(first + step, outputs.stop))
            found = self.tensors["weight"].read((rows, slice(None))).float()
            self._check_finite(found, "weight")
            yield first, found * (scales if len(scales) == 1 else scales[rows])


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of 4 or 8 bits in words [..., n] int32, lowest bits first, as uint8 [..., n * 32 / bits]."""
    found = np.ascontiguousarray(words).view(np.uint8)
    return found if bits == 8 else np.stack([found & 15, found >> 4], -1).reshape(*found.shape[:-1], -1)


def _in_order(found: np.ndarray) -> np.ndarray:
    """Return [..., outputs] in the order of outputs, from that of AWQ's words."""
    return found.reshape(*found.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(found.shape)

"""Reads the values of a user's tensors without trusting them.

`read_tensor` checks type, shape and size, and copies no values. From a list it copies the references, after a check of
the length. `ids`, `words`, `floats` and `integers` copy the values and check the copy. Only plain types are accepted,
because a subclass can return any value for its length or content.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidRequestError, counted, type_name
from ..sampling_config import FLOAT32_MAX, Range, shown
from .inference_request import Content, Shape, TensorSpec

# Tokens of a bad or stop word list, with padding.
MAX_WORD_LIST_SIZE = 65_536
MAX_FEW = 8                # values of a tensor of shape FEW

_ARRAYS = (np.ndarray, np.memmap)
_LISTS = (list, tuple)
_INTEGERS = frozenset([int, *(np.dtype(letter).type for letter in "bBhHiIlLqQ")])
_FLOATS = frozenset([float, *(np.dtype(letter).type for letter in "efdg")])
_NUMPY_SCALARS = (_INTEGERS | _FLOATS | {np.bool_}) - {int, float}
_KINDS = {Content.FLAG: "biu", Content.INTEGER: "iu", Content.NUMBER: "iuf"}
# Bytes of an element of a TABLE in the copy. A row that is a list is first copied to a tuple.
_BYTES_KEPT = {Content.INTEGER: 8, Content.NUMBER: 4}
_BYTES_OF_A_ROW = 64
_KIND_IN_WORDS = {"b": "bools", "i": "integers", "u": "unsigned integers", "f": "floats", "c": "complex numbers",
                  "O": "Python objects", "U": "text", "S": "bytes", "V": "records", "M": "dates", "m": "time spans"}


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A user's tensor with checked type, shape and size, and unchecked values.

    shape       without the leading batch dimension of 1; (words, total tokens) for a list of words
    num_bytes   bytes of an array, or of the engine's copy of a TABLE array if the copy is larger. For a list, an
                estimate of the bytes of the engine's copy
    source      an array that may be the user's memory, a tuple of plain numbers or, for 2-d values, a tuple of tuples
    is_bfloat16   the array has the bits of bfloat16 numbers, for which numpy has no type
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    num_bytes: int
    source: np.ndarray | tuple[Any, ...]
    is_bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """The size limits of a tensor.

    size        largest number of elements
    reason      text of the error for too many elements, which states the limit
    num_bytes   largest number of bytes: max_request_bytes minus the bytes of the request's tensors read so far
    """

    size: int
    reason: str
    num_bytes: int

    def check(self, name: str, size: int, num_bytes: int) -> None:
        if size > self.size:
            raise InvalidRequestError(f"the number of elements of {name} is {size:,}", self.reason, f"shorten {name}")
        if num_bytes > self.num_bytes:
            raise InvalidRequestError(
                f"{name} has {counted(num_bytes, 'byte')} and the request's other tensors leave {self.num_bytes:,} "
                "for it",
                "all tensors together must fit into max_request_bytes", "send less, or raise max_request_bytes")


def read_tensor(spec: TensorSpec, value: Any, bound: Bound) -> GivenTensor:
    """Check type, rank and size of a tensor that is a list of values (ROW), a table (TABLE) or a word list (WORDS).

    Raises InvalidRequestError.
    """
    if type(value) in _LISTS:
        return _read_list(spec, value, bound)
    array = _as_array(spec, value)
    shape, rank = array.shape, 1 if spec.shape is Shape.ROW else 2
    if array.ndim == rank + 1 and shape[0] == 1:
        array, shape = array[0], shape[1:]
    if len(shape) != rank or (spec.shape is Shape.WORDS and shape[0] != 2):
        raise _wrong_shape(spec, array.shape)
    num_bytes = array.nbytes
    if spec.shape is Shape.TABLE:
        num_bytes = max(num_bytes, _BYTES_KEPT[spec.content] * array.size)
    bound.check(spec.name, array.size, num_bytes)
    return GivenTensor(spec, shape, num_bytes, array, _is_torch_tensor(value) and _is_bfloat16(value))


def scalar(spec: TensorSpec, value: Any) -> int | float | bool:
    """Return the single number or flag in `value`, without a check of its range. Raises InvalidRequestError."""
    for _ in range(2):
        if type(value) in _LISTS:
            if len(value) != 1:
                raise _wrong_shape(spec, (len(value),))
            (value,) = value
    if type(value) not in (int, float, bool):
        if isinstance(value, int):
            value = int.__int__(value)
        else:
            array = _as_array(spec, value)
            if array.ndim > 2 or array.size != 1:
                raise _wrong_shape(spec, array.shape)
            if _is_torch_tensor(value) and _is_bfloat16(value):
                array = _widened(array)
            value = array.item() if array.itemsize <= 8 else float(array.item())
    if spec.content is Content.FLAG:
        if type(value) is float or value not in (0, 1):
            raise InvalidRequestError(f"{spec.name} is {shown(value)}", f"it must be {spec.content.value}",
                                      "use True or False")
        return bool(value)
    if type(value) is bool or (type(value) is float and spec.content is Content.INTEGER):
        raise _wrong_content(spec, "a bool" if type(value) is bool else "a float")
    number: int | float = value
    return number


def few(spec: TensorSpec, value: Any) -> tuple[int, ...]:
    """Return the integers in `value`, which must contain at least one and at most eight. Does not check their range.

    Raises InvalidRequestError.
    """
    row = value
    if type(row) in _LISTS and len(row) == 1 and type(row[0]) in _LISTS:
        (row,) = row
    if type(row) in _LISTS:
        if len(row) != 1:
            numbers = _numbers(spec, row, Bound(MAX_FEW, f"it must be at most {MAX_FEW}", 8 * MAX_FEW))
            if not numbers:
                raise _wrong_shape(spec, (0,))
            return numbers
    elif not isinstance(row, (int, float)):
        array = _as_array(spec, row)
        if array.size != 1:
            if array.ndim > 2 or not 1 <= array.size <= MAX_FEW or (array.ndim == 2 and array.shape[0] != 1):
                raise _wrong_shape(spec, array.shape)
            return tuple(np.array(array).reshape(-1).tolist())
    return (int(scalar(spec, value)),)


def ids(given: GivenTensor, vocab_size: int, num_tuning_ids: int = 0) -> list[int]:
    """Return the token ids, which must be in the vocabulary or among the `num_tuning_ids` prompt-tuning ids after it.

    The error names the position of a wrong id. It does not quote the id, which is part of a prompt.
    """
    limit = vocab_size + num_tuning_ids
    source = given.source
    if isinstance(source, np.ndarray):
        source = np.array(source)
        outside = np.flatnonzero((source < 0) | (source >= limit))
        if len(outside):
            raise _outside_vocabulary(given.spec.name, int(outside[0]), vocab_size, num_tuning_ids)
        tokens: list[int] = source.tolist()
        return tokens
    _check_ids(given.spec.name, source, vocab_size, num_tuning_ids)
    return list(source)


def words(given: GivenTensor, limit: int) -> tuple[tuple[int, ...], ...]:
    """Return the words of a word list, each a tuple of token ids 0 <= id < limit."""
    name = given.spec.name
    found: Sequence[tuple[int, ...]]
    if isinstance(given.source, np.ndarray):
        found = _unpacked(name, np.array(given.source).tolist())
    else:
        found = given.source
    for number, word in enumerate(found):
        if not word:
            raise InvalidRequestError(f"word {number} of {name} is empty", "every word must have a token",
                                      "leave the word out")
        _check_ids(f"word {number} of {name}", word, limit)
    return tuple(found)


def floats(given: GivenTensor) -> np.ndarray:
    """Return the values as a new float32 array. They must be finite."""
    name = given.spec.name
    try:
        with np.errstate(all="ignore"):
            if given.is_bfloat16 and isinstance(given.source, np.ndarray):
                copy = _widened(given.source)
            else:
                copy = np.array(given.source, np.float32).reshape(given.shape)
    except OverflowError:
        copy = np.array(np.inf)
    is_finite = np.isfinite(copy)
    if not is_finite.all():
        raise InvalidRequestError(f"{name} is not finite at position {is_finite.argmin()} of the flattened tensor",
                                  f"every value must be finite as float32 (at most {FLOAT32_MAX:.4g})")
    return copy


def _widened(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 numbers, given as 16-bit integers with the same bits, to float32."""
    return np.array(bits.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)


def integers(given: GivenTensor, allowed: Range) -> np.ndarray:
    """Return the values as a new int64 array. They must be in the range `allowed`, which must fit int64."""
    source = given.source
    copy = (np.array(source) if isinstance(source, np.ndarray)
            else _int64(given.spec, source, f"every value must be {allowed}"))
    if copy.size:
        allowed.check(given.spec.name, int(copy.min()))
        allowed.check(given.spec.name, int(copy.max()))
    return copy.astype(np.int64, copy=False).reshape(given.shape)


def _as_array(spec: TensorSpec, value: Any) -> np.ndarray:
    """Return `value` as a numpy array.

    `value` must be a numpy array, a torch CPU tensor or a numpy scalar, and its dtype of a kind that `spec` allows.
    The result shares the memory of an array or tensor. Only a negated view of a torch tensor is copied.
    """
    array: np.ndarray
    if type(value) in _ARRAYS:
        array = value
    elif type(value) in _NUMPY_SCALARS:
        array = np.asarray(value)
    elif _is_torch_tensor(value):
        array = _torch_as_array(spec, value)
    elif type(value) in (int, float, bool):
        raise _wrong_shape(spec, ())
    elif type(value) in _LISTS:
        raise InvalidRequestError(f"{spec.name} is a list with too many levels", f"it must be {spec.shape.value}",
                                  "flatten it")
    else:
        is_like_an_array = not isinstance(value, str | bytes) and (
            isinstance(value, Sequence) or hasattr(type(value), "__array__"))
        raise InvalidRequestError(
            f"{spec.name} is of type {type_name(value)}",
            "it must be a torch CPU tensor, a numpy array, a number or a list"
            + (" (objects of subclasses are refused)" if is_like_an_array else ""),
            "convert it with numpy.array(...)" if is_like_an_array else f"pass {spec.content.value}")
    if array.dtype.kind not in _KINDS[spec.content]:
        raise _wrong_content(spec, _KIND_IN_WORDS.get(array.dtype.kind, f"values of dtype {array.dtype}"[:64]))
    return array.view(np.ndarray)


def _is_torch_tensor(value: Any) -> bool:
    # This file must not import torch. A process that has a torch tensor has imported torch.
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def _is_bfloat16(tensor: Any) -> bool:
    return tensor.dtype is sys.modules["torch"].bfloat16


def _torch_as_array(spec: TensorSpec, tensor: Any) -> np.ndarray:
    """Return an array that shares memory with the tensor, or a copy if the tensor is a negated view (`is_neg`).

    The tensor may require grad.

    numpy has no bfloat16: such numbers become int16 numbers with the same bits.
    """
    if tensor.device.type != "cpu":
        raise InvalidRequestError(f"{spec.name} is a torch tensor on device {tensor.device.type}",
                                  "tensors of a request must be on the CPU", "call .cpu() first")
    if str(tensor.layout) != "torch.strided":
        raise InvalidRequestError(f"{spec.name} is a torch tensor of layout {tensor.layout}",
                                  "tensors of a request must be dense", "call .to_dense() first")
    if _is_bfloat16(tensor) and spec.content is Content.NUMBER:
        tensor = tensor.resolve_neg().view(sys.modules["torch"].int16)
    try:
        array = tensor.detach().resolve_neg().numpy()
    except (TypeError, RuntimeError):
        way_out = ".float()" if spec.content is Content.NUMBER else ".int()"
        raise InvalidRequestError(f"{spec.name} is a torch tensor of dtype {tensor.dtype}",
                                  "expected a dtype that NumPy has", f"call {way_out} first") from None
    if type(array) is not np.ndarray:
        raise _wrong_content(spec, "a tensor that numpy cannot read")
    return array


def _read_list(spec: TensorSpec, value: Sequence[Any], bound: Bound) -> GivenTensor:
    if spec.shape is Shape.ROW:
        if len(value) == 1 and type(value[0]) in _LISTS:
            (value,) = value
        numbers = _numbers(spec, value, bound)
        return GivenTensor(spec, (len(numbers),), 8 * len(numbers), numbers)

    levels = _levels(value)
    if levels == 3 and len(value) == 1:
        (value,) = value
    elif levels > 2:
        raise _wrong_shape(spec, ("...",) * levels)

    rows, size, num_bytes = [], 0, 0
    bound.check(spec.name, len(value), _BYTES_OF_A_ROW * len(value))
    for row in tuple(value):
        if type(row) in _INTEGERS | _FLOATS:
            raise _wrong_shape(spec, (len(value),))
        if type(row) not in _LISTS:
            raise InvalidRequestError(f"{spec.name} is a list that holds a value of type {type_name(row)}",
                                      f"it must be {spec.shape.value}", "pass each row as a list")
        num_bytes += _BYTES_OF_A_ROW
        rows.append(_numbers(spec, row, bound, size, num_bytes))
        size += len(rows[-1])
        num_bytes += 8 * len(rows[-1])
    ragged = any(len(row) != len(rows[0]) for row in rows)

    if spec.shape is Shape.WORDS and levels == 3:
        if len(rows) != 2 or ragged:
            raise _wrong_shape(spec, (1, len(rows), "..." if ragged else len(rows[0])))
        packed = _int64(spec, rows)
        return GivenTensor(spec, packed.shape, packed.nbytes, packed)
    if spec.shape is Shape.TABLE and ragged:
        raise InvalidRequestError(f"{spec.name} has rows of different lengths", f"it must be {spec.shape.value}")
    columns = len(rows[0]) if rows else 0
    shape = (len(rows), size if spec.shape is Shape.WORDS else columns)
    return GivenTensor(spec, shape, num_bytes, tuple(rows))


def _numbers(spec: TensorSpec, values: Sequence[Any], bound: Bound, before: int = 0,
             bytes_before: int = 0) -> tuple[Any, ...]:
    """Return the values of a flat list as plain ints and floats.

    Numpy numbers in a row of a two-dimensional tensor (TABLE) are not converted.

    before, bytes_before   elements and bytes of the tensor that were read before this list
    """
    bound.check(spec.name, before + len(values), bytes_before + 8 * len(values))
    numbers = tuple(values)             # another thread may change the list, but not the tuple
    bound.check(spec.name, before + len(numbers), bytes_before + 8 * len(numbers))
    types = set(map(type, numbers))
    if types <= {int}:
        return numbers
    strange = types - (_INTEGERS if spec.content is Content.INTEGER else _INTEGERS | _FLOATS)
    if strange & set(_LISTS):
        raise _wrong_shape(spec, (len(numbers), "..."))
    if strange:
        names = sorted(str(kind.__name__)[:64] for kind in strange)
        raise _wrong_content(spec, "values of type " + ", ".join(names[:3]))
    if spec.shape is Shape.TABLE:       # may be large, and numpy reads its own numbers
        return numbers
    return tuple(int(number) if type(number) in _INTEGERS else float(number) for number in numbers)


def _levels(value: Any) -> int:
    """The nesting depth of lists along their first elements, at most 4."""
    levels = 0
    while type(value) in _LISTS and levels < 4:
        levels += 1
        value = value[0] if len(value) else None
    return levels


def _int64(spec: TensorSpec, rows: Sequence[Any], expectation: str = "tokens and offsets must fit int32") -> np.ndarray:
    try:
        return np.array(rows, np.int64)
    except OverflowError:
        raise InvalidRequestError(f"{spec.name} holds an integer that does not fit int64", expectation) from None


def _unpacked(name: str, rows: list[list[int]]) -> list[tuple[int, ...]]:
    """Unpack the words of a packed list.

    rows   two rows. The first has the tokens of all words. The second has the end of each word (running sums of the
           lengths), padded with -1. A single end that is not positive means an empty list
    """
    tokens, ends = rows
    if len(ends) == 1 and ends[0] <= 0:
        return []
    count = ends.index(-1) if -1 in ends else len(ends)
    if any(end != -1 for end in ends[count:]):
        raise _bad_offsets(name, "an offset follows the padding")
    starts = [0, *ends[: count - 1]] if count else []
    if any(start >= end for start, end in zip(starts, ends)):
        raise _bad_offsets(name, "the offsets do not increase")
    if count and ends[count - 1] > len(tokens):
        raise _bad_offsets(name, f"the last offset is beyond the {counted(len(tokens), 'token')}")
    return [tuple(tokens[start:end]) for start, end in zip(starts, ends)]


def _check_ids(what: str, tokens: Sequence[int], vocab_size: int, num_tuning_ids: int = 0) -> None:
    limit = vocab_size + num_tuning_ids
    if tokens and (min(tokens) < 0 or max(tokens) >= limit):
        raise _outside_vocabulary(what, next(i for i, token in enumerate(tokens) if not 0 <= token < limit),
                                  vocab_size, num_tuning_ids)


def _outside_vocabulary(what: str, position: int, vocab_size: int, num_tuning_ids: int) -> InvalidRequestError:
    rows = f" or one of the {counted(num_tuning_ids, 'prompt-tuning id')} after it" if num_tuning_ids else ""
    table = ", and prompt_vocab_size to the table" if num_tuning_ids else ""
    highest = vocab_size + num_tuning_ids - 1
    return InvalidRequestError(f"{what} holds an id outside 0..{highest} at position {position}",
                               f"every id must be in the model's vocabulary of {vocab_size:,}{rows}",
                               f"check that the tokenizer belongs to this model{table}")


def _wrong_shape(spec: TensorSpec, shape: tuple[Any, ...]) -> InvalidRequestError:
    found = "[" + ", ".join(map(str, shape[:6])) + (", ..." if len(shape) > 6 else "") + "]" if shape else "0-d"
    return InvalidRequestError(f"{spec.name} has shape {found}", f"it must be {spec.shape.value}",
                               "" if 0 in shape else f"reshape {spec.name}")


def _wrong_content(spec: TensorSpec, found: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.name} holds {found}", f"it must hold {spec.content.value}",
                               f"convert {spec.name}")


def _bad_offsets(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is packed incorrectly: {what}",
                               "row 1 must hold the tokens of all words, row 2 the running sums of the words' lengths, "
                               "padded with -1: [2, 4, -1, -1] for two words of two tokens",
                               "pass a list of lists of tokens instead")

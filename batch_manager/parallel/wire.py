"""Values as bytes, for ranks of one model: numbers, texts, tuples, arrays, and the dataclasses of handover.py.

    unpack(pack(value)) equals value

A value has a byte for its kind, then its content. A dataclass has its fields in order. The kinds, the dataclasses and
the dtypes of arrays are closed lists, and each length has a limit. Nothing is pickled, so bytes cannot name code.

Of a SlotSetup, the pages of the adapter travel, and whether logits of the context are wanted: only the rank that draws
tokens reads the other fields, and the logits of a client's drafts. The place of a setup stays in any case, because it
marks the first chunk of a sequence.
"""

import struct
from collections.abc import Callable, Collection
from dataclasses import fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from ..adapter_values import AdapterContent, AdapterPart
from ..handover import (
    NO_GENERATION,
    NO_UPDATES,
    AdapterLoad,
    BlockClear,
    BlockCopy,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
)

MOST_ITEMS = 1 << 22             # of a tuple
MOST_BYTES = 1 << 30             # of a text, of bytes or of an array
MOST_DIMENSIONS = 4
DEEPEST = 8                      # tuples and dataclasses inside each other
DTYPES = tuple(map(np.dtype, ("int32", "float32", "int64", "float64", "uint8", "bool", "float16", "uint16", "int8",
                              "int16", "uint32", "uint64")))
INT32, FLOAT32 = DTYPES[0], DTYPES[1]

# Objects that are one byte, and arrive as the same object: backends compare by identity.
CONSTANTS = (None, False, True, NO_GENERATION, NO_UPDATES)
CLASSES: tuple[type, ...] = (ScheduledBatch, ContextWork, GenerationWork, BlockTableUpdates, BlockCopy, BlockClear,
                             AdapterLoad, SlotSetup, AdapterContent, AdapterPart)
ONLY_FIELDS: dict[type, tuple[str, ...]] = {                                               # others travel whole
    SlotSetup: ("adapter_pages", "return_context_logits"),
    ContextWork: tuple(field.name for field in fields(ContextWork) if field.name != "draft_logits")}
NUMBERS = tuple(map(np.dtype, ("float32", "float16", "uint16")))                           # of an adapter
ARRAY_DTYPES: dict[tuple[type, str], tuple[np.dtype, ...]] = {
    (ContextWork, "embeddings"): (FLOAT32,), (AdapterPart, "a"): NUMBERS, (AdapterPart, "b"): NUMBERS}

# The first byte of a value: its index in CONSTANTS, one of these, or FIRST_CLASS plus an index in CLASSES.
INTEGER, NATURAL, NUMBER, TEXT, BYTES, TUPLE, ARRAY, FIRST_CLASS = 8, 9, 10, 11, 12, 13, 14, 16


class WireError(Exception):
    """A value cannot travel, or bytes are not those of a value. The message has no content of the value."""


class Field:
    """One field of a dataclass: the kinds that it may have, those of the items of its tuple, and its arrays' dtypes."""

    __slots__ = ("name", "kinds", "item_kinds", "dtypes")

    def __init__(self, owner: type, name: str, annotation: Any) -> None:
        self.name, self.dtypes = name, ARRAY_DTYPES.get((owner, name), (INT32,))
        self.kinds = _kinds_of(annotation)
        self.item_kinds = frozenset[int]().union(*[
            _kinds_of(item) for part in _alternatives(annotation) if get_origin(part) is tuple
            for item in get_args(part)])


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kinds_of(annotation: Any) -> frozenset[int]:
    """The kinds of values that fit an annotation; none for a type that cannot travel."""
    kinds: set[int] = set()
    for part in _alternatives(annotation):
        part = get_origin(part) or part
        kinds.update({NoneType: (0,), bool: (1, 2), int: (INTEGER, NATURAL), float: (NUMBER,), str: (TEXT,),
                      bytes: (BYTES,), tuple: (TUPLE,), np.ndarray: (ARRAY,)}.get(part, ()))
        kinds.update(index for index, constant in enumerate(CONSTANTS) if index > 2 and type(constant) is part)
        if part in CLASSES:
            kinds.add(FIRST_CLASS + CLASSES.index(part))
    return frozenset(kinds)


FIELDS: dict[type, tuple[Field, ...]] = {
    cls: tuple(Field(cls, name, hints[name])
               for name in ONLY_FIELDS.get(cls) or [field.name for field in fields(cls)])
    for cls in CLASSES for hints in [get_type_hints(cls)]}

# ---------------------------------------------------------------------- to bytes


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


_INTEGER, _NATURAL, _NUMBER, _COUNT = map(struct.Struct, ("<Bq", "<BQ", "<Bd", "<BI"))
_ARRAYS = [struct.Struct(f"<BBB{dimensions}I") for dimensions in range(MOST_DIMENSIONS + 1)]
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_CONSTANT_BYTES = {id(constant): bytes([index]) for index, constant in enumerate(CONSTANTS)}
_CONTENT = {cls: _getter([field.name for field in its]) for cls, its in FIELDS.items()}
_CLASS_BYTES = {cls: bytes([FIRST_CLASS + index]) for index, cls in enumerate(CLASSES)}


def pack(value: Any) -> bytes:
    """Return the bytes of a value. Raises WireError for a value of any other type, and for one that is too large."""
    parts: list[bytes] = []
    _put(value, parts.append, 0)
    return b"".join(parts)


def _put(value: Any, add: Callable[[bytes], None], depth: int) -> None:
    constant, kind = _CONSTANT_BYTES.get(id(value)), type(value)
    if constant is not None:
        add(constant)
    elif kind is int:
        if -1 << 63 <= value < 1 << 63:
            add(_INTEGER.pack(INTEGER, value))
        elif 0 <= value < 1 << 64:
            add(_NATURAL.pack(NATURAL, value))
        else:
            raise WireError("an integer has more than 64 bits")
    elif kind is np.ndarray:
        code = _CODES.get(value.dtype)
        if code is None or value.ndim > MOST_DIMENSIONS or value.nbytes > MOST_BYTES:
            raise WireError(f"an array of dtype {value.dtype} and shape {value.shape} cannot travel")
        add(_ARRAYS[value.ndim].pack(ARRAY, code, value.ndim, *value.shape))
        add(value.tobytes())
    elif kind is tuple:
        if len(value) > MOST_ITEMS or depth > DEEPEST:
            raise WireError("a tuple is too long or too deep")
        add(_COUNT.pack(TUPLE, len(value)))
        for item in value:
            _put(item, add, depth + 1)
    elif kind in FIELDS:
        add(_CLASS_BYTES[kind])
        for content in _CONTENT[kind](value):
            if type(content) is int and -1 << 63 <= content < 1 << 63:    # most fields
                add(_INTEGER.pack(INTEGER, content))
            else:
                _put(content, add, depth + 1)
    elif kind is str or kind is bytes:
        content = value.encode("utf-8", "surrogatepass") if kind is str else value
        if len(content) > MOST_BYTES:
            raise WireError("a text is too long")
        add(_COUNT.pack(TEXT if kind is str else BYTES, len(content)))
        add(content)
    elif kind is float:
        add(_NUMBER.pack(NUMBER, value))
    else:
        raise WireError(f"a value of type {kind.__name__} cannot travel")


# ---------------------------------------------------------------------- from bytes


def unpack(data: bytes) -> Any:
    """Return the value of `data`. Arrays are new and writable. Raises WireError if `data` is not that of one value."""
    try:
        value, end = _get(data, 0, 0, None, None)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise WireError("a value is cut off, or a text is not UTF-8") from error
    if end != len(data):
        raise WireError("bytes are left after a value")
    return value


def _get(data: bytes, at: int, depth: int, field: Field | None, kinds: Collection[int] | None) -> tuple[Any, int]:
    """Return the value at `at`, and where the next one begins.

    field   the field that has the value, if any
    kinds   those that the value may have; None: any
    """
    kind = data[at]
    if kinds is not None and kind not in kinds:
        raise WireError(f"a field or an item has a value of kind {kind}")
    if kind < len(CONSTANTS):
        return CONSTANTS[kind], at + 1
    if kind == INTEGER:
        return _INTEGER.unpack_from(data, at)[1], at + 9
    if kind == ARRAY:
        return _get_array(data, at, field)
    if kind >= FIRST_CLASS:
        return _get_object(data, at, depth)
    if kind in (NATURAL, NUMBER):
        return (_NATURAL if kind == NATURAL else _NUMBER).unpack_from(data, at)[1], at + 9
    if kind not in (TUPLE, TEXT, BYTES):
        raise WireError(f"a value is of kind {kind}")
    count, at = _COUNT.unpack_from(data, at)[1], at + 5
    if count > len(data) - at:                           # an item has at least one byte
        raise WireError("a tuple or a text is cut off")
    if kind == TUPLE:
        if count > MOST_ITEMS or depth > DEEPEST:
            raise WireError("a tuple is too long or too deep")
        items, kinds = [], None if field is None else field.item_kinds
        for _ in range(count):
            item, at = _get(data, at, depth + 1, None, kinds)
            items.append(item)
        return tuple(items), at
    content = data[at:at + count]
    return content if kind == BYTES else content.decode("utf-8", "surrogatepass"), at + count


def _get_array(data: bytes, at: int, field: Field | None) -> tuple[np.ndarray, int]:
    code, dimensions = data[at + 1], data[at + 2]
    if code >= len(DTYPES) or dimensions > MOST_DIMENSIONS:
        raise WireError("an array has an unknown dtype or too many dimensions")
    dtype, form = DTYPES[code], _ARRAYS[dimensions]
    if field is not None and dtype not in field.dtypes:
        raise WireError(f"the field {field.name} has an array of {dtype}")
    shape = form.unpack_from(data, at)[3:]
    at += form.size
    count = 1
    for size in shape:
        count *= size
    end = at + count * dtype.itemsize
    if end > len(data) or end - at > MOST_BYTES:
        raise WireError("an array is cut off")
    array = np.empty(shape, dtype)
    if count:
        array.data.cast("B")[:] = memoryview(data)[at:end]
    return array, end


def _get_object(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    index = data[at] - FIRST_CLASS
    if index >= len(CLASSES) or depth > DEEPEST:
        raise WireError(f"an object is of class {index}, or too deep")
    cls, at = CLASSES[index], at + 1
    values, integer = [], _INTEGER.unpack_from
    for field in FIELDS[cls]:
        if data[at] == INTEGER and INTEGER in field.kinds:
            values.append(integer(data, at)[1])
            at += 9
        else:
            value, at = _get(data, at, depth + 1, field, field.kinds)
            values.append(value)
    only = ONLY_FIELDS.get(cls)
    return cls(*values) if only is None else cls(**dict(zip(only, values))), at

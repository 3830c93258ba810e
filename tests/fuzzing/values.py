"""Values for request tensors: ordinary values in every container, and objects that are not valid tensors.

A `Value` has the object that the request contains and the facts that the oracle needs: the kind of the object's
elements, and its numbers as nested Python lists. The oracle never looks at the object itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

INT, FLOAT, BOOL, PYTHON, STRANGE, LARGE = "int", "float", "bool", "python", "strange", "large"
RANGES = [(letter, int(np.iinfo(letter).min), int(np.iinfo(letter).max)) for letter in "bBhHiIlLq"]
KIND_OF = {"i": INT, "u": INT, "f": FLOAT, "b": BOOL}

INTEGERS = (-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**63 + 1, -(2**63),
            -(2**63) - 1, 2**64 - 1, 2**64, 1024, 1025, 10**400, -(10**400))
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1.0, -1.0, 0.5, 1.5, 1e39, -1e39, 3e38, 5e-324, 1e-45,
          1 + 2**-52)


@dataclass(slots=True)
class Value:
    """A value for a tensor, with the facts that the oracle needs.

    given   the object that the request contains
    kind    the kind of the elements of `given`. INT, FLOAT, BOOL: the dtype of an array; PYTHON: Python numbers, each
            with its own type; STRANGE: not a valid tensor; LARGE: see draws.py
    plain   the numbers of `given`, as a number or nested lists; None for STRANGE
    """

    given: Any
    kind: str
    plain: Any = None


# ---------------------------------------------------------------------- containers


def of_scalar(random: Random, number: Any) -> Value:
    """Return a scalar in one of its valid forms: a number, lists of one number, or an array of one element."""
    way = random.randrange(8)
    if way < 3:
        plain = (number, [number], [[number]])[way]
        return Value(plain, PYTHON, plain)
    shape = ((), (1,), (1, 1))[way % 3]
    return of_array(random, np.array(number).reshape(shape)) if fits(number) else Value(number, PYTHON, number)


def of_list(random: Random, numbers: list) -> Value:
    """Return a row of numbers in one of its valid forms: a list, tuple or array, with or without a batch dimension."""
    way = random.randrange(8)
    if way < 4:
        plain = [numbers] if way == 3 else numbers
        given = list(map(list, plain)) if way == 3 else (list, tuple)[way // 2](numbers)
        return Value(given, PYTHON, plain)
    if numbers and not all(map(fits, numbers)):
        return Value(list(numbers), PYTHON, numbers)
    array = np.array(numbers) if numbers else np.zeros(0, np.int64)
    return of_array(random, array[None] if way == 7 else array)


def of_table(random: Random, rows: list[list]) -> Value:
    """Return a table of numbers, [rows, columns], with or without a batch dimension of 1, as lists or an array."""
    plain = [rows] if random.random() < 0.4 else rows
    if random.random() < 0.3:
        return Value([list(map(list, part)) if part and isinstance(part[0], list) else list(part) for part in plain],
                     PYTHON, plain)
    return of_array(random, np.array(plain))


def of_array(random: Random, array: np.ndarray) -> Value:
    """Return an array or a torch tensor with the numbers of `array`, in a random dtype that fits and random layout."""
    array = _retyped(random, array)
    plain, kind = array.tolist(), KIND_OF.get(array.dtype.kind, STRANGE)
    if random.random() < 0.15 and array.dtype.char not in "gqQ":
        return Value(_as_torch(random, array), kind, plain)
    if array.ndim == 0 and random.random() < 0.3:
        return Value(array[()], kind, plain)
    return Value(_laid_out(random, array), kind, plain)


def fits(number: Any) -> bool:
    """Whether `number` is a float or an integer that some dtype of an array can hold."""
    return type(number) is not int or -(2**63) <= number < 2**64


def _retyped(random: Random, array: np.ndarray) -> np.ndarray:
    if array.dtype.kind == "f":
        return array.astype(random.choice("fffdde")) if np.abs(array).max(initial=0) < 6e4 else array
    if array.dtype.kind in "iu" and array.size and random.random() < 0.8:
        low, high = int(array.min()), int(array.max())
        letters = [letter for letter, least, most in RANGES if least <= low and high <= most]
        return array.astype(random.choice(letters)) if letters else array
    return array


def _laid_out(random: Random, array: np.ndarray) -> np.ndarray:
    way = random.randrange(12)
    if way == 0:
        return array.astype(array.dtype.newbyteorder())
    if way == 1:
        array = array.copy()
        array.setflags(write=False)
    elif way == 2 and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    elif way == 3 and array.ndim:
        return np.repeat(array, 2, axis=array.ndim - 1)[..., ::2]
    elif way == 4 and array.ndim:                                  # asfortranarray would turn a scalar into a row
        return np.asfortranarray(array)
    elif way == 5 and array.size and (array == array.flat[0]).all():
        return np.broadcast_to(array.flat[0], array.shape)
    return array


def _as_torch(random: Random, array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    if tensor.is_floating_point() and random.random() < 0.3 and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor):
        tensor = tensor.bfloat16()
    if tensor.is_floating_point() and random.random() < 0.2:
        return torch.nn.Parameter(tensor)
    if tensor.ndim and random.random() < 0.3:
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor


# ---------------------------------------------------------------------- what no tensor should be


def _raises(error: type[BaseException]) -> Callable:
    def member(*args: Any, **kwargs: Any) -> Any:
        raise error("hostile")
    return member


MEMBERS = ("__len__", "__array__", "__iter__", "__getitem__", "__int__", "__index__", "__float__", "__eq__", "__lt__",
           "__ge__", "__bool__", "__hash__", "__buffer__", "__array_interface__", "__torch_function__",
           "__array_ufunc__", "item", "tolist", "dtype", "shape", "ndim", "size", "nbytes")
ERRORS = (ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, RecursionError, StopIteration)


def _hostile(base: type, error: type[BaseException]) -> type:
    members = dict.fromkeys(MEMBERS, _raises(error))
    # pytest calls these methods too, when it reports a failing test.
    members |= dict.fromkeys(("__repr__", "__str__", "__format__"), _raises(ValueError))
    return type("Hostile", (base,), members)


HOSTILE = {base: [_hostile(base, error) for error in ERRORS]
           for base in (object, int, float, str, bytes, list, tuple, dict, np.float64, np.ndarray)}


class LyingList(list):
    """A list whose `len` is always 1."""

    def __len__(self) -> int:
        return 1


class LyingArray(np.ndarray):
    """An array whose shape and size are those of an array with one element of 4 bytes."""

    shape, ndim, size, nbytes = (1,), 1, 1, 4


class OfHostileType(metaclass=type("HostileType", (type,), {"__name__": property(_raises(SystemExit)),
                                                            "__hash__": _raises(SystemExit)})):
    """An object whose type has a `__name__` and a hash that raise."""


class LyingClass:
    """An object whose `__class__` is another type. If the type is None, reading `__class__` raises."""

    def __init__(self, claims: type | None) -> None:
        self.claims = claims

    @property
    def __class__(self) -> type:
        if self.claims is None:
            raise SystemExit("hostile")
        return self.claims


def _endless() -> list:
    inner: list = []
    inner.append(inner)
    return inner


HUGE_SHAPES = ((2**40,), (1, 2**40), (2**20, 2**20), (1, 2, 2**40), (2, 2**40), (1, 2**20, 2**20), (2**40, 0, 3))

STRANGE_THINGS: list[Callable[[Random], Any]] = [
    lambda random: random.choice(["1", b"1", "", "\x00\x1b[2J\ud800", {1: 2}, {1}, frozenset(), 1j, range(3), type]),
    lambda random: [random.choice([None, "1", 1j, object(), {}, b"", np.complex64(1)])],
    lambda random: [[random.choice([None, "1", object()])]],
    lambda random: HOSTILE[object][random.randrange(len(ERRORS))](),
    lambda random: HOSTILE[random.choice([list, tuple, dict, str, bytes, float])][random.randrange(len(ERRORS))](),
    lambda random: HOSTILE[random.choice([np.ndarray, np.float64])][random.randrange(len(ERRORS))](3),
    lambda random: [HOSTILE[int][random.randrange(len(ERRORS))](1)] * 2,
    lambda random: np.zeros(3, np.int32).view(LyingArray),
    lambda random: LyingList([1] * 1000),
    lambda random: random.choice([OfHostileType(), [OfHostileType()], [[OfHostileType()]]]),
    lambda random: LyingClass(random.choice([None, int, list, np.ndarray, torch.Tensor])),
    lambda random: np.ma.masked_array([1, 2], mask=[True, False]),
    lambda random: np.array([random.choice([None, 1, object()])], object),
    lambda random: random.choice([np.zeros(1, "M8[s]"), np.zeros(1, "m8[s]"), np.array(["1"]), np.array([b"1"]),
                                  np.zeros(2, [("a", "i4")]), np.array([1j]), np.zeros((1, 1, 1, 1, 1), np.int32)]),
    lambda random: _endless(),
    lambda random: [[[[[1]]]]],
    lambda random: np.broadcast_to(random.choice([np.int8(0), np.float16(0), np.True_]), random.choice(HUGE_SHAPES)),
    lambda random: torch.zeros(1, dtype=torch.int8).expand(2**40),
    lambda random: torch.zeros(1, dtype=random.choice([torch.complex64, torch.float8_e4m3fn])),
    lambda random: torch.zeros(1, device="meta"),
    lambda random: torch.ones(2, 2).to_sparse(),
    lambda random: (number for number in (1, 2)),
    lambda random: lambda: None,
]


def strange(random: Random) -> Value:
    return Value(random.choice(STRANGE_THINGS)(random), STRANGE)


def scribble(given: Any) -> None:
    """Overwrite the contents of `given`, a tensor's value, if its type allows changes."""
    if isinstance(given, list):
        if given and isinstance(given[0], list):
            for inner in given:
                scribble(inner)
        else:
            given[:] = [-1] * (len(given) + 3)
    elif type(given) is np.ndarray and given.flags.writeable:
        given[...] = 1
    elif isinstance(given, torch.Tensor) and given.dtype is not torch.bool:
        given.detach().fill_(1)

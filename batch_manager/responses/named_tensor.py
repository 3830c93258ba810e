"""Tensors of a response, created on first access."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy import empty

INT32 = np.dtype(np.int32)


class UniformArray:
    """Shape, dtype and value of an array in which all elements have this value. `make` creates the array."""

    __slots__ = ("shape", "_dtype", "_value")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, value: float = 0) -> None:
        self.shape, self._dtype, self._value = shape, dtype, value

    def make(self) -> np.ndarray:
        """Return a new array at each call."""
        array = empty(self.shape, self._dtype)    # np.full takes four times as long
        array.fill(self._value)
        return array


class NamedTensor:
    """A tensor of a response and its name.

    A response has at least seven tensors, and most receivers read one or two of them. To save time, `array` and
    `tensor` are made on first access. The constructor gets an array, a tensor or a UniformArray, and makes `array` from
    it. The function `to_tensor` makes `tensor` from `array`. Without this function, `tensor` is the object that the
    constructor got or, for a UniformArray, `array`. Array and tensor share memory. Access is thread-safe: all threads
    get the object that the first thread made.

    name     name of the tensor, such as "output_ids"
    array    the values as a NumPy array
    tensor   the values in the form that receivers get, such as a torch tensor
    """

    __slots__ = ("name", "_given", "_to_tensor", "__dict__")

    def __init__(self, name: str, tensor: Any, to_tensor: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self._given = tensor
        self._to_tensor = to_tensor

    @property
    def array(self) -> np.ndarray:
        """The values as a NumPy array. Does not import torch."""
        given = self._given
        if type(given) is np.ndarray:
            return given
        made = self.__dict__.get("array")
        if made is None:
            made = given.make() if type(given) is UniformArray else np.asarray(given)
            made = self.__dict__.setdefault("array", made)
        array: np.ndarray = made
        return array

    @property
    def tensor(self) -> Any:
        if self._to_tensor is None:
            return self.array if type(self._given) is UniformArray else self._given
        made = self.__dict__.get("tensor")
        if made is None:
            made = self.__dict__.setdefault("tensor", self._to_tensor(self.array))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy makes its tensor from its own array, so that both share memory.
        return type(self), (self.name, self.__dict__.get("array", self._given), self._to_tensor)

    def __repr__(self) -> str:
        given = self._given
        return f"NamedTensor({self.name!r}, shape={tuple(given.shape if hasattr(given, 'shape') else np.shape(given))})"


class PreparedTensor(NamedTensor):
    """A tensor whose name, value and `to_tensor` are class attributes, so that no Python code runs to create it.

    `prepared` and `prepared_token` make subclasses. Copying or unpickling an instance makes a NamedTensor.
    """

    __slots__ = ()
    __init__ = object.__init__

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedTensor, super().__reduce__()[1]


class OneTokenTensor(PreparedTensor):
    """The tensor output_ids [1, 1, 1] with one token. The caller sets `token`."""

    __slots__ = ("token",)
    token: int

    @property
    def _given(self) -> UniformArray:
        return UniformArray((1, 1, 1), INT32, self.token)

    @property
    def array(self) -> np.ndarray:
        made: np.ndarray | None = self.__dict__.get("array")
        if made is None:
            made = empty((1, 1, 1), INT32)
            made.fill(self.token)
            made = self.__dict__.setdefault("array", made)
        return made


def prepared(name: str, value: UniformArray, to_tensor: Callable[[Any], Any] | None) -> type[PreparedTensor]:
    """Return a class of tensors with this name and value. Each instance has its own array."""
    return _prepared(PreparedTensor, name, to_tensor, _given=value)


def prepared_token(name: str, to_tensor: Callable[[Any], Any] | None) -> type[OneTokenTensor]:
    """Return a class of tensors with this name and one token each."""
    return _prepared(OneTokenTensor, name, to_tensor)


def _prepared(base: type, name: str, to_tensor: Callable[[Any], Any] | None, **attributes: Any) -> type:
    if to_tensor is not None:
        to_tensor = staticmethod(to_tensor)    # otherwise it becomes a method
    return type(base.__name__, (base,), {"__slots__": (), "name": name, "_to_tensor": to_tensor, **attributes})

"""Runs a program with interpreted Triton kernels, without the work that the interpreter repeats for each operation.

    TRITON_INTERPRET=1 python -m tests.quick_interpreter MODULE [ARGUMENT ...]     as python -m MODULE [ARGUMENT ...]
    TRITON_INTERPRET=1 python -m tests.quick_interpreter -c CODE [ARGUMENT ...]    as python -c CODE [ARGUMENT ...]

Interpreted kernels spend most of their time in Triton's front end, in work whose result is the same every time: the
shape of a block type is checked and wrapped again for each tensor, the type of a result is derived again for each
operation, and the functions of triton.language are replaced again for each call of a Triton function. The functions of
this module do this work once for each shape or type. They get each result from Triton's own function the first time.

An operation whose result overflows int32 raises OverflowError.

kernels/test_quick_interpreter.py compares kernels with and without this module.
"""

import functools
import runpy
import sys

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

from batch_manager.triton_kernels.interpreter import accept_arrays_of_one_element

TYPE_FIELDS = {"element_ty", "name"}                      # fields of a block type that depend on more than its shape
TENSOR_FIELDS = {"handle", "type", "dtype"}               # fields of a tensor that depend on more than its shape
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
INT32_MIN, INT32_MAX = -2**31, 2**31 - 1


def replace_functions_once(replace_functions):
    """Replace the functions of triton.language that a kernel's function uses, unless a running kernel did so already.

    replace_functions   `_patch_lang` of Triton's interpreter
    """
    def replace(function):
        language = interpreter.tl
        modules = [value for value in function.__globals__.values() if value is language or value is language.core]
        if modules and not any(language.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        return replace_functions(function)

    return replace


def block_type_once_per_shape(initialize):
    """Set the fields of a block type. Fields that depend on the shape only are computed once for each shape.

    initialize   `block_type.__init__`, which checks the shape
    """
    known = {}

    def set_fields(self, element_ty, shape):
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in known:
            initialize(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name not in TYPE_FIELDS}
            known[key]["shape_key"] = key
        self.__dict__.update(known[key])
        self.element_ty = element_ty

    return set_fields


def block_type_name(self):
    """Return the name of a block type, which is rarely needed and takes long to write."""
    return f"<{self.shape}, {self.element_ty}>"


def tensor_once_per_shape(initialize):
    """Set the fields of a tensor. Fields that depend on the shape only are computed once for each shape.

    initialize   `tensor.__init__`
    """
    known = {}

    def set_fields(self, handle, type):
        key = getattr(type, "shape_key", ())
        if key not in known:
            initialize(self, handle, type)
            known[key] = {name: value for name, value in vars(self).items() if name not in TENSOR_FIELDS}
        self.__dict__.update(known[key])
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return set_fields


def once_per_type(numpy_type):
    """Return the NumPy type of a Triton type, found once for each name of a scalar type.

    numpy_type   `_get_np_dtype` of Triton's interpreter
    """
    known = {}

    def find(type):
        name = type.scalar.name
        if name not in known:
            known[name] = numpy_type(type)
        return known[name]

    return find


def result_type_once_per_pair(result_type):
    """Return the type in which two operands are computed, found once for each pair of types.

    result_type   `TritonSemantic.computation_type_impl`
    """
    known = {}

    def find(self, first, first_is_scalar, second, second_is_scalar, *more):
        key = (first.name, first_is_scalar, second.name, second_is_scalar, *more)
        if key not in known:
            known[key] = result_type(self, first, first_is_scalar, second, second_is_scalar, *more)
        return known[key]

    return find


def refuse_overflow(self, left, right, operation):
    """Raise OverflowError if the result of an operation on int32 overflows. Unsigned integers wrap around.

    This function takes the place of `TritonSemantic.binary_op_sanitize_overflow_impl`. Kernels compute
    addresses in int32 where the sizes allow it, and an address that overflows is wrong. Triton's check takes seven
    operations of the interpreter, and then reports nothing.
    """
    kind, name = left.type.scalar, operation.__name__
    if kind == core.int32 and name in OPERATIONS:
        exact = OPERATIONS[name](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
        if exact.min() < INT32_MIN or exact.max() > INT32_MAX:
            raise OverflowError(f"{name} of int32 gives values from {exact.min():,} to {exact.max():,}")


def equal_shapes_as_they_are(broadcast):
    """Broadcast two operands. Operands of the same shape, the usual case, are returned as they are.

    broadcast   `TritonSemantic.broadcast_impl_value`
    """
    def find(self, left, right):
        if getattr(left.type, "shape_key", ()) == getattr(right.type, "shape_key", ()):
            return left, right
        return broadcast(self, left, right)

    return find


def same_type(compare):
    """Compare two scalar types. A type that is compared with itself, the usual case, is not inspected.

    compare   `dtype.__eq__`
    """
    return lambda self, other: self is other or compare(self, other)


def install():
    """Replace functions of Triton in this process."""
    accept_arrays_of_one_element()
    of_types = semantic.TritonSemantic
    for owner, name, faster in (
            (interpreter, "_patch_lang", replace_functions_once), (interpreter, "_get_np_dtype", once_per_type),
            (core.block_type, "__init__", block_type_once_per_shape), (core.tensor, "__init__", tensor_once_per_shape),
            (core.dtype, "__eq__", same_type), (of_types, "computation_type_impl", result_type_once_per_pair),
            (of_types, "broadcast_impl_value", equal_shapes_as_they_are)):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(faster(original)))
    core.block_type.name = property(block_type_name, lambda self, name: None)
    of_types.binary_op_sanitize_overflow_impl = refuse_overflow


if __name__ == "__main__":
    install()
    del sys.argv[0]
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

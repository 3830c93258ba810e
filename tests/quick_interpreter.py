"""Runs a program with interpreted Triton kernels, without the work that the interpreter repeats for each operation.

    TRITON_INTERPRET=1 python -m tests.quick_interpreter MODULE [ARGUMENT ...]     as python -m MODULE [ARGUMENT ...]
    TRITON_INTERPRET=1 python -m tests.quick_interpreter -c CODE [ARGUMENT ...]    as python -c CODE [ARGUMENT ...]

Interpreted kernels spend most of their time in Triton's front end, in work whose result is the same every time: the
shape of a block type is checked and wrapped again for each tensor, the type of a result is derived again for each
operation, and the functions of triton.language are replaced again for each call of a Triton function. The functions of
this module and of quick_operations.py do this work once for each shape or type. They get each result from Triton's own
function the first time.

An operation whose result overflows int32 raises OverflowError.

kernels/test_quick_interpreter.py compares kernels with and without this module.
"""

import functools
import linecache
import runpy
import sys

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

from batch_manager.triton_kernels.interpreter import accept_arrays_of_one_element

from .quick_operations import (
    ARITHMETIC,
    FUNCTIONS,
    NAMES,
    Calls,
    cast_once_per_types,
    load_once_per_types,
    new_axes_once_per_type,
    operation_once_per_types,
    refuse_overflow,
)


def replace_functions_once(replace_functions):
    """Replace the functions of triton.language that a kernel's function uses, unless a running kernel did so already.

    What takes their place is found once for the modules of triton.language that the function names.

    replace_functions   `_patch_lang` of Triton's interpreter
    """
    language, modules_of, replaced = interpreter.tl, {}, {}

    def replace(function):
        modules = modules_of.get(function)
        if modules is None:
            modules = modules_of[function] = [value for value in function.__globals__.values()
                                              if value is language or value is language.core]
        if modules and not any(language.core.is_builtin(module.load) for module in modules):
            return interpreter._LangPatchScope()
        key = tuple(map(id, modules))
        if key not in replaced:
            scope = replace_functions(function)
            replaced[key] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in replaced[key]:
            scope.set_attr(*change)
        return scope

    return replace


def one_of_each_type():
    """Make each type of Triton once. Equal types are then one object, which is found by its id."""
    known = {core.dtype: {}, core.pointer_type: {}, core.block_type: {}}
    for type in vars(core).values():
        if isinstance(type, core.dtype):
            known[core.dtype][type.name] = type

    def make(cls, *args, **fields):
        args = [getattr(value, "value", value) for value in (*args, *fields.values())]
        if not args or cls not in known:
            return object.__new__(cls)
        if cls is core.block_type:
            args[1] = tuple([getattr(size, "value", size) for size in args[1]])
        key = args[0] if cls is core.dtype else (id(args[0]), *args[1:], *fields)
        if key not in known[cls]:
            known[cls][key] = object.__new__(cls)
        return known[cls][key]

    core.dtype.__new__ = make


def block_type_once(initialize):
    """Set the fields of a block type, unless they are set already.

    initialize   `block_type.__init__`, which checks the shape
    """
    def set_fields(self, element_ty, shape):
        if "name" not in self.__dict__:
            initialize(self, element_ty, shape)

    return set_fields


def tensor_once_per_type(initialize):
    """Set the fields of a tensor. All but the handle are found once for each type.

    initialize   `tensor.__init__`
    """
    known = {}

    def set_fields(self, handle, type):
        fields = known.get(id(type))
        if fields is None:
            initialize(self, handle, type)
            known[id(type)] = vars(self).copy()
        else:
            self.__dict__.update(fields)
            self.handle = handle

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


def refuse_overflow_of_operation(self, left, right, operation):
    """Raise OverflowError if the result of an operation on int32 overflows. Unsigned integers wrap around.

    This function takes the place of `TritonSemantic.binary_op_sanitize_overflow_impl`. Kernels compute
    addresses in int32 where the sizes allow it, and an address that overflows is wrong. Triton's check takes seven
    operations of the interpreter, and then reports nothing.
    """
    for function, name in ARITHMETIC.items():
        if name == operation.__name__ and left.type.scalar == core.int32:
            refuse_overflow(name, function(left.handle.data.astype(np.int64), right.handle.data.astype(np.int64)))


def equal_shapes_as_they_are(broadcast):
    """Broadcast two operands. Operands of the same shape, the usual case, are returned as they are.

    broadcast   `TritonSemantic.broadcast_impl_value`
    """
    def find(self, left, right):
        if left.type is right.type or getattr(left.type, "shape", ()) == getattr(right.type, "shape", ()):
            return left, right
        return broadcast(self, left, right)

    return find


def value_as_it_is(unwrap):
    """Return the value of a constant, and any other value as it is.

    unwrap   `_unwrap_if_constexpr`, which looks into lists and tuples
    """
    simple = {int, float, bool, str, type(None), core.tensor}

    def value_of(value):
        kind = type(value)
        return value if kind in simple else value.value if kind is core.constexpr else unwrap(value)

    return value_of


def same_type(compare):
    """Compare two scalar types. A type that is compared with itself, the usual case, is not inspected.

    compare   `dtype.__eq__`
    """
    return lambda self, other: self is other or compare(self, other)


def functions_once():
    """Return what takes the place of `_patch_attr` of Triton's interpreter, which makes a function of triton.language
    callable in a kernel. Each function is made once, and operations on two operands are those of quick_operations.py.
    """
    known, calls = {}, Calls()

    def made(owner, name, function):
        function = getattr(function, "__wrapped__", function)       # without the check that `_semantic` is given

        def call(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        if name in (NAMES if owner is core.tensor else FUNCTIONS):
            return operation_once_per_types(name, call, calls)
        if name == "load" and owner is not core.tensor:
            return load_once_per_types(call)
        if name == "to" and owner is core.tensor:
            return cast_once_per_types(call)
        return new_axes_once_per_type(call) if owner is core.tensor and name == "__getitem__" else call

    def set_function(owner, name, function, builder, scope):
        if (owner, function) not in known:
            known[owner, function] = made(owner, name, function)
        scope.set_attr(owner, name, known[owner, function])

    return set_function


def place_of_definition(rewriter):
    """Return the file of a kernel's function, and the number of the line with `def`. Triton makes a JITFunction for it.

    It takes the place of `FunctionRewriter._get_jit_fn_file_line`.
    """
    code = rewriter.fn.__code__
    lines = linecache.getlines(code.co_filename)
    return code.co_filename, next(number for number in range(code.co_firstlineno, len(lines) + 1)
                                  if lines[number - 1].strip().startswith("def "))


def install():
    """Replace functions of Triton in this process."""
    accept_arrays_of_one_element()
    one_of_each_type()
    of_types = semantic.TritonSemantic
    for owner, name, faster in (
            (interpreter, "_patch_lang", replace_functions_once), (interpreter, "_get_np_dtype", once_per_type),
            (core.block_type, "__init__", block_type_once), (core.tensor, "__init__", tensor_once_per_type),
            (core.dtype, "__eq__", same_type), (core, "_unwrap_if_constexpr", value_as_it_is),
            (of_types, "computation_type_impl", result_type_once_per_pair),
            (of_types, "broadcast_impl_value", equal_shapes_as_they_are)):
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(faster(original)))
    interpreter._patch_attr = functions_once()
    interpreter.FunctionRewriter._get_jit_fn_file_line = place_of_definition
    of_types.binary_op_sanitize_overflow_impl = refuse_overflow_of_operation


if __name__ == "__main__":
    install()
    del sys.argv[0]
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Operations of interpreted Triton kernels on two operands, without Triton's front end after the first time.

For `a + b`, Triton derives the type of the result, casts and broadcasts the operands, and calls one function of numpy.
This module notes that function and the casts when operands of these types come the first time, and calls the function
itself from then on. It does so only if it gets the bits of Triton's result that first time.
"""

import numpy as np
from triton.language import core
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NAMES = frozenset(f"__{prefix}{name}__" for prefix in ("", "r") for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "gt", "ge", "lt", "le",
    "eq", "ne"))
ARITHMETIC = {np.add: "add", np.subtract: "sub", np.multiply: "mul"}
OF_TRUTH_VALUES = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}      # numpy agrees with Triton on these
AS_BITS = ("fp8", "bf16")                                   # numbers of these types are bits for numpy
INT32_MIN, INT32_MAX = -2**31, 2**31 - 1


def refuse_overflow(name, exact):
    """Raise OverflowError if an int64 result is outside int32."""
    if exact.min() < INT32_MIN or exact.max() > INT32_MAX:
        raise OverflowError(f"{name} of int32 gives values from {exact.min():,} to {exact.max():,}")


class Calls:
    """The calls of the functions of Triton's interpreter that compute on two operands, while `noted` is a list.

    Each is noted as (function of two arrays, handle of the left operand, handle of the right operand).
    """

    def __init__(self):
        self.noted = None
        operate, divide, add_offset = (getattr(InterpreterBuilder, name)
                                       for name in ("binary_op", "create_idiv", "create_addptr"))

        def binary_op(builder, left, right, function):
            self.note(function, left, right)
            return operate(builder, left, right, function)

        def create_idiv(builder, left, right):
            self.note(lambda left, right: (left - np.fmod(left, right)) // right, left, right)
            return divide(builder, left, right)

        def create_addptr(builder, pointer, offset):
            size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            self.note(lambda pointer, offset: pointer + size * offset.astype(np.uint64), pointer, offset)
            return add_offset(builder, pointer, offset)

        for method in (binary_op, create_idiv, create_addptr):
            setattr(InterpreterBuilder, method.__name__, method)

    def note(self, *call):
        if self.noted is not None:
            self.noted.append(call)

    def of(self, operation, first, second):
        """Return the result of an operation, and the calls that it took."""
        self.noted = noted = []
        try:
            return operation(first, second), noted
        finally:
            self.noted = None


class Plan:
    """One operation on operands of given types. The first call has computed `result`.

    function, left, right   the noted call
    constant                the value of the second operand is part of the plan, as it is a number
    is_reversed             the second operand is on the left
    """

    def __init__(self, function, left, right, constant, is_reversed, result):
        self.data_type, self.handle_type, self.type = result.handle.data.dtype, result.handle.dtype, result.type
        self.left_type, self.right_type, self.is_reversed = left.data.dtype, right.data.dtype, is_reversed
        self.function = function
        self.is_exact = function in ARITHMETIC and self.left_type == np.int32 and self.handle_type is core.int32
        self.constant = (left if is_reversed else right).data.reshape(-1)[:1].copy() if constant else None

    def compute(self, first, second):
        """Return the data of the result. A constant takes the place of `second`."""
        if self.constant is not None:
            second = self.constant
        left, right = (second, first) if self.is_reversed else (first, second)
        if self.is_exact:
            exact = self.function(left.astype(np.int64), right.astype(np.int64))
            refuse_overflow(ARITHMETIC[self.function], exact)
            return exact.astype(np.int32)
        if left.dtype is not self.left_type:
            left = left.astype(self.left_type)
        if right.dtype is not self.right_type:
            right = right.astype(self.right_type)
        data = self.function(left, right)
        return data if data.dtype is self.data_type else data.astype(self.data_type)



def tensor(data, handle_type, type):
    """Return a tensor of Triton. Its handle is not checked, as the handle of an earlier tensor of these types was."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    return core.tensor(handle, type)


def plan_for(calls, first, second, is_reversed, result):
    """Return the plan of an operation, or None if it took other than one call, or numpy cannot do without Triton.

    second   the second operand, a tensor or a number
    """
    if len(calls) != 1 or type(result) is not core.tensor:
        return None
    (function, left, right), = calls
    operands = [first] if type(second) is not core.tensor else [first, second]
    if any(operand.type.scalar.name.startswith(AS_BITS) for operand in (*operands, result)):
        return None
    if left.data.dtype == right.data.dtype == np.bool_ and function not in OF_TRUTH_VALUES:
        return None
    if any(operand.type.scalar.is_ptr() for operand in operands):       # an address is on the left
        is_reversed = not first.type.scalar.is_ptr()
    plan = Plan(function, left, right, len(operands) == 1, is_reversed, result)
    data, expected = plan.compute(*(operand.handle.data for operand in operands), *[None] * (2 - len(operands))), \
        result.handle.data
    is_equal = data.dtype == expected.dtype and data.shape == expected.shape and data.tobytes() == expected.tobytes()
    return plan if is_equal else None


def operation_once_per_types(name, operation, calls):
    """Return an operation of two operands that uses Triton for operands of new types only.

    name        `__add__` or another of NAMES
    operation   Triton's: (tensor, tensor or number) -> tensor
    """
    plans, is_reversed = {}, name[2:-2] in {f"r{other[2:-2]}" for other in NAMES}

    def operate(first, second, **_):
        handle = first.handle
        if type(second) is core.tensor:
            other = second.handle
            key = (id(first.type), id(handle.dtype), handle.data.dtype, id(second.type), id(other.dtype),
                   other.data.dtype)
            other_data = other.data
        else:
            value, other_data = getattr(second, "value", second), None
            if type(value) not in (int, float, bool):
                return operation(first, second)
            key = id(first.type), id(handle.dtype), handle.data.dtype, type(value), value or repr(value)
        plan = plans.get(key, calls)
        if plan is calls:
            result, noted = calls.of(operation, first, second)
            plans[key] = plan_for(noted, first, second, is_reversed, result)
            return result
        if plan is None:
            return operation(first, second)
        return tensor(plan.compute(handle.data, other_data), plan.handle_type, plan.type)

    return operate


def new_axes_once_per_type(operation):
    """Return `tensor.__getitem__`, which uses Triton only for the first tensor of a type, or with unusual indices.

    operation   Triton's: (tensor, indices) -> tensor
    """
    types = {}

    def index(first, indices, **_):
        handle = first.handle
        if type(indices) is not tuple or not all([entry is None or entry == slice(None) for entry in indices]):
            return operation(first, indices)
        key = id(first.type), id(handle.dtype), handle.data.ndim, tuple([entry is None for entry in indices])
        data = handle.data[indices] if key in types else None
        if data is None:
            result = operation(first, indices)
            if result.handle.data.shape == handle.data[indices].shape:
                types[key] = result.handle.dtype, result.type
            return result
        return tensor(data, *types[key])

    return index

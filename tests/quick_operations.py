"""Operations of interpreted Triton kernels, without Triton's front end after the first time.

For `a + b`, Triton derives the type of the result, casts and broadcasts the operands, and calls one function of numpy.
This module notes that function and the casts when operands of these types come the first time, and calls the function
itself from then on. It does so only if it gets the bits of Triton's result that first time. Loads are made likewise.
"""

import numpy as np
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NAMES = frozenset(f"__{prefix}{name}__" for prefix in ("", "r") for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "gt", "ge", "lt", "le",
    "eq", "ne"))
FUNCTIONS = frozenset(("where", "maximum", "minimum", "fma", "exp2", "log2"))
ARITHMETIC = {np.add: "add", np.subtract: "sub", np.multiply: "mul"}
OF_TRUTH_VALUES = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}      # numpy agrees with Triton on these
AS_BITS = ("fp8", "bf16")                                   # numbers of these types are bits for numpy
INT32_MIN, INT32_MAX = -2**31, 2**31 - 1


def refuse_overflow(name, exact):
    """Raise OverflowError if an int64 result is outside int32."""
    if exact.min() < INT32_MIN or exact.max() > INT32_MAX:
        raise OverflowError(f"{name} of int32 gives values from {exact.min():,} to {exact.max():,}")


def fused_multiply_add(first, second, third):
    """Return first * second + third, rounded once, of float32 arrays."""
    if not first.shape == second.shape == third.shape:
        first, second, third = np.broadcast_arrays(first, second, third)
    return interpreter._interpreter.fma_fp32(first, second, third)


class Calls:
    """The calls of the functions of Triton's interpreter that compute each entry of a result, while `noted` is a list.

    Each is noted as (function of arrays, handle of each operand).
    """

    def __init__(self):
        self.noted = None
        unary, binary, ternary, divide, add_offset, fuse = (getattr(InterpreterBuilder, name) for name in (
            "unary_op", "binary_op", "ternary_op", "create_idiv", "create_addptr", "create_fma"))

        def unary_op(builder, operand, function):
            self.note(function, operand)
            return unary(builder, operand, function)

        def binary_op(builder, left, right, function):
            self.note(function, left, right)
            return binary(builder, left, right, function)

        def ternary_op(builder, *operands_and_function):
            *operands, function = operands_and_function
            self.note(function, *operands)
            return ternary(builder, *operands, function)

        def create_idiv(builder, left, right):
            self.note(lambda left, right: (left - np.fmod(left, right)) // right, left, right)
            return divide(builder, left, right)

        def create_addptr(builder, pointer, offset):
            size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
            self.note(lambda pointer, offset: pointer + size * offset.astype(np.uint64), pointer, offset)
            return add_offset(builder, pointer, offset)

        def create_fma(builder, first, second, third):
            if third.data.dtype == np.float32:
                self.note(fused_multiply_add, first, second, third)
            return fuse(builder, first, second, third)

        for method in (unary_op, binary_op, ternary_op, create_idiv, create_addptr, create_fma):
            setattr(InterpreterBuilder, method.__name__, method)

    def note(self, *call):
        if self.noted is not None:
            self.noted.append(call)

    def of(self, operation, operands):
        """Return the result of an operation, and the calls that it took."""
        self.noted = noted = []
        try:
            return operation(*operands), noted
        finally:
            self.noted = None


def computation(function, handles, result):
    """Return a noted call as a function of arrays, which casts them and the result as Triton did.

    Additions, subtractions and products of int32 raise OverflowError if the result overflows.
    """
    types, data_type = [handle.data.dtype for handle in handles], result.handle.data.dtype
    first_type, second_type = (*types, None)[:2]

    def compute(*arrays):
        data = function(*[array if array.dtype is type else array.astype(type) for array, type in zip(arrays, types)])
        return data if data.dtype is data_type else data.astype(data_type)

    def compute_from_two(first, second):
        if first.dtype is not first_type:
            first = first.astype(first_type)
        if second.dtype is not second_type:
            second = second.astype(second_type)
        data = function(first, second)
        return data if data.dtype is data_type else data.astype(data_type)

    def compute_int32(first, second):
        exact = function(first, second, dtype=np.int64)
        data = exact.astype(np.int32)
        if data.item() != exact.item() if data.size == 1 else np.logical_or.reduce(data != exact, axis=None):
            refuse_overflow(ARITHMETIC[function], exact)
        return data

    if function in ARITHMETIC and first_type == np.int32 and result.handle.dtype is core.int32:
        return compute_int32
    return compute_from_two if len(types) == 2 else compute


def with_constants(compute, constants, is_reversed):
    """Return a computation that takes its operands in the order of the operation.

    constants     the data of each operand that is a number, which is part of the plan; None for the others
    is_reversed   there are two operands, and the second is on the left
    """
    if all(constant is None for constant in constants):
        return (lambda first, second: compute(second, first)) if is_reversed else compute
    if constants[0] is None and len(constants) == 2:
        constant = constants[1]
        return (lambda first, _: compute(constant, first)) if is_reversed else lambda first, _: compute(first, constant)
    return lambda *arrays: compute(*[array if constant is None else constant
                                     for array, constant in zip(arrays, constants)])


def tensor(data, handle_type, fields):
    """Return a tensor of Triton. Its handle is not checked, as the handle of an earlier tensor of these types was.

    fields   the attributes of that tensor
    """
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    made = object.__new__(core.tensor)
    made.__dict__.update(fields)
    made.handle = handle
    return made


def plan_for(noted, operands, is_reversed, result):
    """Return the plan of an operation, or None if it took other than one call, or numpy cannot do without Triton.

    A plan is (function of the operands' arrays, with None for a number; type of the handle; attributes of the tensor).

    noted      the calls that the operation took
    operands   tensors and numbers
    """
    if len(noted) != 1 or type(result) is not core.tensor:
        return None
    (function, *handles), = noted
    tensors = [one for one in operands if type(one) is core.tensor]
    if len(handles) != len(operands) or any(one.type.scalar.name.startswith(AS_BITS) for one in (*tensors, result)):
        return None
    if all(handle.data.dtype == np.bool_ for handle in handles) and function not in OF_TRUTH_VALUES:
        return None
    if function not in (np.where, fused_multiply_add) and any(one.type.scalar.is_ptr() for one in tensors):
        is_reversed = not operands[0].type.scalar.is_ptr()              # an address is on the left
    places = handles[::-1] if is_reversed else handles
    constants = [None if type(one) is core.tensor else handle.data.reshape(-1)[:1].copy()
                 for one, handle in zip(operands, places)]
    compute = with_constants(computation(function, handles, result), constants, is_reversed)
    data = compute(*[one.handle.data if type(one) is core.tensor else None for one in operands])
    return (compute, result.handle.dtype, vars(result).copy()) if are_equal(data, result.handle.data) else None


def are_equal(data, expected):
    return data.dtype == expected.dtype and data.shape == expected.shape and data.tobytes() == expected.tobytes()


def operation_once_per_types(name, operation, calls):
    """Return an operation that uses Triton for operands of new types only.

    name        `__add__` or another of NAMES or FUNCTIONS
    operation   Triton's: tensors or numbers -> tensor
    """
    plans, is_reversed = {}, name[2:-2] in {f"r{other[2:-2]}" for other in NAMES}

    def operate(*operands, **options):
        if options and (len(options) > 1 or "_semantic" not in options):
            return operation(*operands, **options)
        key, arrays = [], []
        for operand in operands:
            if type(operand) is core.tensor:
                handle = operand.handle
                data = handle.data
                arrays.append(data)
                key += id(operand.type), id(handle.dtype), data.dtype.char
            else:
                value = getattr(operand, "value", operand)
                if type(value) not in (int, float, bool):
                    return operation(*operands)
                arrays.append(None)
                key += type(value), value or repr(value)
        return carried_out(operands, tuple(key), arrays)

    def operate_on_two(first, second, **_):
        handle = first.handle
        data = handle.data
        if type(second) is core.tensor:
            other = second.handle
            other_data = other.data
            key = (id(first.type), id(handle.dtype), data.dtype.char,
                   id(second.type), id(other.dtype), other_data.dtype.char)
        else:
            value, other_data = getattr(second, "value", second), None
            if type(value) not in (int, float, bool):
                return operation(first, second)
            key = id(first.type), id(handle.dtype), data.dtype.char, type(value), value or repr(value)
        return carried_out((first, second), key, (data, other_data))

    def carried_out(operands, key, arrays):
        plan = plans.get(key, calls)
        if plan is None:
            return operation(*operands)
        if plan is calls:
            result, noted = calls.of(operation, operands)
            plans[key] = plan_for(noted, operands, is_reversed, result)
            return result
        compute, handle_type, fields = plan
        return tensor(compute(*arrays), handle_type, fields)

    return operate_on_two if name in NAMES else operate


def cast_once_per_types(operation):
    """Return `tensor.to`, which uses Triton only for new types, and for casts that round or drop bits.

    operation   Triton's: (tensor, type, options) -> tensor
    """
    plans = {}

    def cast(first, to_type, **options):
        handle = first.handle
        data = handle.data
        key = id(first.type), id(handle.dtype), data.dtype.char, id(to_type)
        plan = plans.get(key, plans)
        if plan is None or options and (len(options) > 1 or "_semantic" not in options):
            return operation(first, to_type, **options)
        if plan is plans:
            result = operation(first, to_type)
            plans[key] = plan_of(first, result)
            return result
        data_type, handle_type, fields = plan
        return tensor(data.astype(data_type), handle_type, fields)

    def plan_of(first, result):
        data, cast = first.handle.data, result.handle.data
        if result is first or any(one.type.scalar.name.startswith((*AS_BITS, "int1")) or one.type.scalar.is_ptr()
                                  for one in (first, result)):
            return None
        if not np.can_cast(data.dtype, cast.dtype) or not are_equal(data.astype(cast.dtype), cast):
            return None
        return cast.dtype, result.handle.dtype, vars(result).copy()

    return cast


def load_once_per_types(operation):
    """Return `tl.load`, which uses Triton only for the first address of a type, or if it casts or broadcasts addresses.

    operation   Triton's: (addresses, mask, other, options without effect here) -> tensor
    """
    plans = {}

    def load(pointer, mask=None, other=None, **options):
        handle, inside, rest = pointer.handle, True, getattr(other, "value", other)
        addresses = handle.data
        if type(mask) is core.tensor:
            inside = mask.handle.data
        elif mask is not None:
            return operation(pointer, mask, other, **options)
        if type(rest) not in (int, float, type(None)):
            return operation(pointer, mask, other, **options)
        key = (id(pointer.type), id(handle.dtype), addresses.shape, mask is None or inside.shape, type(rest),
               rest or repr(rest))
        plan = plans.get(key, plans)
        if plan is plans or plan is None:
            result = operation(pointer, mask, other, **options)
            if plan is plans:
                plans[key] = plan_of(addresses, inside, rest, result)
            return result
        numpy_type, elsewhere, handle_type, fields = plan
        return tensor(loaded(addresses, inside, elsewhere, numpy_type), handle_type, fields)

    def loaded(addresses, inside, elsewhere, numpy_type):
        if inside is True or inside.shape != addresses.shape:
            everywhere = np.empty(addresses.shape, dtype=np.bool_)
            everywhere[...] = inside
            inside = everywhere
        return interpreter._interpreter.load(addresses, inside, elsewhere, numpy_type)

    def plan_of(addresses, inside, rest, result):
        data = result.handle.data
        if data.shape != addresses.shape or result.type.scalar.name.startswith((*AS_BITS, "int1")) \
                or result.type.scalar.is_ptr():
            return None
        elsewhere = np.full(addresses.shape, rest or 0, data.dtype)
        plan = data.dtype, elsewhere, result.handle.dtype, vars(result).copy()
        return plan if are_equal(loaded(addresses, inside, elsewhere, data.dtype), data) else None

    return load


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
                types[key] = result.handle.dtype, vars(result).copy()
            return result
        return tensor(data, *types[key])

    return index

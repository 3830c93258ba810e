"""Runs kernels in triton's interpreter, in a separate process that conftest.py starts.

Reads requests from standard input: (module of the kernel, function, args, kwargs, options). The options choose how the
interpreter runs, by functions of this file: "dots_in_one_order": True, "program_order": a seed, "replaced_settings":
{name: value} of the module with the launch settings, "noted_calls_of": a function of the module, "noted_atomics": True.
It answers each request with (result, tensor arguments after the call), or with a traceback. With an option that notes
something, the notes replace the result. A message consists of eight bytes with its length, and an object written by
torch.save.
"""

import contextlib
import importlib
import io
import math
import os
import random
import struct
import sys
import traceback

import numpy as np
import torch


def send(stream, message):
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(struct.pack("<q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def receive(stream):
    """Return the next message; None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", header)[0])), weights_only=False)


def tensors_of(args, kwargs):
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


@contextlib.contextmanager
def dots_in_one_order(module, is_on):
    """Make interpreted `tl.dot` sum the products of every element of a tile in the same order, as a matrix unit does.

    The interpreter uses numpy's product, in which the bits of a row depend on its position in the tile.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        first, second = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        terms = np.empty((1 + len(second), *d.data.shape), d.data.dtype)
        terms[0] = d.data
        np.multiply(first.T[:, :, None], second[:, None], out=terms[1:])
        return TensorHandle(np.add.reduce(terms, axis=0), d.dtype.scalar)       # one term after the other

    before, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, create_dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = before


@contextlib.contextmanager
def program_order(module, seed):
    """Make the interpreter run the programs of each launch in a random order."""
    from triton.runtime.interpreter import InterpreterBuilder

    draw, orders, set_index = random.Random(seed), [], InterpreterBuilder.set_grid_idx

    def set_random_index(self, x, y, z):
        sizes = self.grid_dim
        if x == y == z == 0:
            orders.append(draw.sample(range(math.prod(sizes)), math.prod(sizes)))
        place = orders[-1][(x * sizes[1] + y) * sizes[2] + z]
        set_index(self, place // (sizes[1] * sizes[2]), place // sizes[2] % sizes[1], place % sizes[2])

    InterpreterBuilder.set_grid_idx = set_random_index
    try:
        yield
    finally:
        InterpreterBuilder.set_grid_idx = set_index


@contextlib.contextmanager
def replaced_settings(module, values):
    """Replace constants of the module with the launch settings of the kernels of `module`."""
    settings = importlib.import_module(f"{module.__name__}_settings")
    before = {name: getattr(settings, name) for name in values}
    vars(settings).update(values)
    try:
        yield
    finally:
        vars(settings).update(before)


@contextlib.contextmanager
def noted_calls_of(module, name):
    """Yield a list to which each call of this function by the kernels of `module` appends the shapes of its tensors.

    Only tensors of several elements count.
    """
    function, calls = getattr(module, name), []

    def noted(*args, **kwargs):
        shapes = (tuple(map(int, getattr(value, "shape", ()))) for value in (*args, *kwargs.values()))
        calls.append([shape for shape in shapes if shape])
        return function(*args, **kwargs)

    setattr(module, name, noted)
    try:
        yield calls
    finally:
        setattr(module, name, function)


@contextlib.contextmanager
def noted_atomics(module, is_on):
    """Yield a list of the atomic operations: (program ids, addresses, bits of an operand)."""
    from triton.runtime.interpreter import InterpreterBuilder

    operate, noted = InterpreterBuilder.create_atomic_rmw, []

    def create_atomic_rmw(self, operation, pointer, value, mask, *more):
        noted.append((tuple(self.grid_idx), pointer.data[mask.data].tolist(), 8 * value.data.itemsize))
        return operate(self, operation, pointer, value, mask, *more)

    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw
    try:
        yield noted
    finally:
        InterpreterBuilder.create_atomic_rmw = operate


def serve(requests, answers):
    torch.set_num_threads(1)
    while (request := receive(requests)) is not None:
        module, function, args, kwargs, options = request
        try:
            found = importlib.import_module(f"batch_manager.triton_kernels.{module}")
            with contextlib.ExitStack() as changes:
                notes = [changes.enter_context(globals()[name](found, value)) for name, value in options.items()]
                result = getattr(found, function)(*args, **kwargs)
            result = next((noted for noted in notes if noted is not None), result)
            send(answers, (result, tensors_of(args, kwargs)))
        except Exception:
            send(answers, traceback.format_exc())


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                       # whatever prints, prints to standard error
    serve(sys.stdin.buffer, answers)

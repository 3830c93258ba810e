"""Runs kernels in triton's interpreter, in a separate process that conftest.py starts.

Reads requests from standard input: (module of the kernel, function, args, kwargs, whether `dots_in_one_order` applies,
name of a function whose calls are noted, or None). It answers each request with (result, tensor arguments after the
call), or with a traceback. If calls are noted, a list replaces the result: for each call, the shapes of its arguments
that are tensors of several elements. A message consists of eight bytes with its length, and an object written by
torch.save.
"""

import contextlib
import importlib
import io
import os
import struct
import sys
import traceback

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
def dots_in_one_order():
    """Make interpreted `tl.dot` sum the products of every element of a tile in the same order, as a matrix unit does.

    The interpreter uses numpy's product, in which the bits of a row depend on its position in the tile.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total = d.data.copy()
        for inner in range(a.data.shape[1]):
            total += a.data[:, inner, None].astype(total.dtype) * b.data[inner].astype(total.dtype)
        return TensorHandle(total, d.dtype.scalar)

    before, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, create_dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = before


@contextlib.contextmanager
def calls_noted(module, name):
    """Yield a list to which each call of this function by the kernels of `module` appends the shapes of its tensors."""
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


def serve(requests, answers):
    torch.set_num_threads(1)
    while (request := receive(requests)) is not None:
        module, function, args, kwargs, in_one_order, watched = request
        try:
            found = importlib.import_module(f"batch_manager.triton_kernels.{module}")
            with contextlib.ExitStack() as changes:
                if in_one_order:
                    changes.enter_context(dots_in_one_order())
                calls = changes.enter_context(calls_noted(found, watched)) if watched else None
                result = getattr(found, function)(*args, **kwargs)
            if calls is not None:
                result = calls
            send(answers, (result, tensors_of(args, kwargs)))
        except Exception:
            send(answers, traceback.format_exc())


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                       # whatever prints, prints to standard error
    serve(sys.stdin.buffer, answers)

"""Runs kernels through triton's interpreter, in a process of its own. Started by conftest.py.

Reads requests (kernel name, function name, args, kwargs) from standard input and answers with (result, tensors after
the call) or with the text of an exception. A message is eight bytes of length, then a torch.save.
"""

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
    """The next message, None at the end of the stream."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", header)[0])), weights_only=False)


def tensors_of(args, kwargs):
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def serve(requests, answers):
    torch.set_num_threads(1)
    while (request := receive(requests)) is not None:
        module, function, args, kwargs = request
        try:
            found = importlib.import_module(f"batch_manager.triton_kernels.{module}")
            result = getattr(found, function)(*args, **kwargs)
            send(answers, (result, tensors_of(args, kwargs)))
        except Exception:
            send(answers, traceback.format_exc())


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)                       # whatever prints, prints to standard error
    serve(sys.stdin.buffer, answers)

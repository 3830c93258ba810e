"""A GPU stream, imitated on a CPU, that is as late as it may be: the copies of device.py wait in a queue.

A stream runs its actions in order, at any time. An interleaving with the host is determined by the number of actions
that are done each time the host writes memory that the stream reads. `every_order` tries all interleavings.
"""

import contextlib
from collections import deque

import torch

from batch_manager.runtime import device as device_module


class LazyStream:
    """A queue of actions.

    waits   how often the host had to wait for an unfinished action
    """

    def __init__(self):
        self.queue, self.done, self.given, self.waits = deque(), 0, 0, 0

    def give(self, action):
        self.queue.append(action)
        self.given += 1

    def run(self, count):
        for _ in range(count):
            self.queue.popleft()()
            self.done += 1

    def wait_until(self, number):
        """Wait until this many actions are done."""
        if number > self.done:
            self.waits += 1
            self.run(number - self.done)


class Event:
    def __init__(self, **_):
        self._number, self._stream = 0, None

    def record(self, stream):
        self._number, self._stream = stream.given, stream

    def synchronize(self):
        self._stream.wait_until(self._number)


@contextlib.contextmanager
def lazily(monkeypatch):
    """Yield a LazyStream that gets the copies and events of device.py within the context."""
    stream, copy = LazyStream(), torch.Tensor.copy_

    def copy_(tensor, source, non_blocking=False):
        if not non_blocking:
            return copy(tensor, source)
        stream.give(lambda: copy(tensor, source))
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(device_module, "pinned", lambda shape, dtype: torch.full(shape, 0, dtype=dtype, device="cpu"))
        patch.setattr(device_module.torch.cuda, "Event", Event)
        patch.setattr(device_module.torch.cuda, "current_stream", lambda _: stream)
        yield stream


def every_order(run):
    """Call run(choose) once for each sequence of choices. Return the number of runs.

    choose(n) returns one of 0..n.
    """
    path, count = [], 0
    while True:
        taken = _run_along(run, path)
        count += 1
        while taken and taken[-1][0] == taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        chosen, most = taken.pop()
        path = [*taken, (chosen + 1, most)]


def _run_along(run, path):
    """Run with the choices of `path`, and with choice 0 after them. Return all choices as (chosen, most)."""
    taken = []

    def choose(most):
        index = len(taken)
        taken.append((path[index][0] if index < len(path) else 0, most))
        return taken[-1][0]

    run(choose)
    return taken

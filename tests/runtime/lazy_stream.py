"""Imitates an asynchronous GPU stream on a CPU: non-blocking copies and `index_copy_` wait in a queue.

A GPU stream runs its actions in order, but the host does not know when. A test therefore chooses how many queued
actions run each time before the host writes memory that the stream reads. These numbers determine the interleaving of
host and stream. `every_order` tries all interleavings.
"""

import contextlib
from collections import deque

import torch

from batch_manager.runtime.device import running as device_module


class LazyStream:
    """A queue of actions, which run in order when the test or a wait of the host demands it.

    given        number of actions that were added
    done         number of actions that have run
    waits        how often the host had to wait for an action that had not run
    is_running   whether an action runs now; operations within it are not queued
    """

    def __init__(self):
        self.queue, self.done, self.given, self.waits, self.is_running = deque(), 0, 0, 0, False

    def give(self, action):
        self.queue.append(action)
        self.given += 1

    def run(self, count):
        self.is_running = True
        for _ in range(count):
            self.queue.popleft()()
            self.done += 1
        self.is_running = False

    def wait_until(self, number):
        """Run actions until `number` of them, counted from the first one ever, have run."""
        if number > self.done:
            self.waits += 1
            self.run(number - self.done)


class Event:
    def __init__(self, **_):
        self._number, self._stream = 0, None

    def record(self, stream):
        self._number, self._stream = stream.given, stream

    def query(self):
        return self._stream is None or self._stream.done >= self._number

    def synchronize(self):
        self._stream.wait_until(self._number)


@contextlib.contextmanager
def lazily(monkeypatch):
    """Patch torch and device.py so that a LazyStream runs copies. Yield the stream.

    Non-blocking copies, `index_copy_` and CUDA events use the stream.
    """
    stream, copy, index_copy = LazyStream(), torch.Tensor.copy_, torch.Tensor.index_copy_

    def copy_(tensor, source, non_blocking=False):
        if not non_blocking:
            return copy(tensor, source)
        stream.give(lambda: copy(tensor, source))
        return tensor

    def index_copy_(tensor, *arguments):
        if stream.is_running:
            return index_copy(tensor, *arguments)
        stream.give(lambda: index_copy(tensor, *arguments))
        return tensor

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "index_copy_", index_copy_)
        patch.setattr(device_module, "pinned", lambda shape, dtype: torch.full(shape, 0, dtype=dtype, device="cpu"))
        patch.setattr(device_module.torch.cuda, "Event", Event)
        patch.setattr(device_module.torch.cuda, "current_stream", lambda _: stream)
        yield stream


def every_order(run):
    """Call run(choose) once for each possible sequence of choices. Return the number of calls.

    `run` calls choose(n) any number of times. Each call returns a number from 0 to n.
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
    """Call run(choose) so that the first choices are those of `path`, and all further choices are 0.

    Returns all choices as [(chosen number, largest possible number)], the form that `path` has too.
    """
    taken = []

    def choose(most):
        index = len(taken)
        taken.append((path[index][0] if index < len(path) else 0, most))
        return taken[-1][0]

    run(choose)
    return taken

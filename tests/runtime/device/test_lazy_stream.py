"""In every interleaving of host and stream, steps get the right uploads and the host reads the right results.

The stream is the LazyStream of lazy_stream.py.
"""

import numpy as np
import pytest
import torch

from batch_manager.runtime.device import running as device_module
from batch_manager.runtime.device.running import Readbacks, Uploads
from tests.runtime.lazy_stream import every_order, lazily

ELSEWHERE = torch.device("meta")               # the name of another device; the tensors are on the CPU
STEPS, SIZE = 5, 6


def steps_ahead(monkeypatch, choose, in_flight=2):
    """Run STEPS steps that use the same device memory, with up to `in_flight` of them launched before one is read.

    Returns (results of the steps, number of uploads that had to wait, number of pinned buffers of readbacks).

    choose   choose(n) returns how many of the n queued actions run before the host writes the next upload
    """
    results, waits_of_uploads, unread, buffers = [], 0, [], set()
    with lazily(monkeypatch) as stream:
        uploads, there, block = Uploads(ELSEWHERE), torch.zeros(SIZE, dtype=torch.uint8), torch.zeros(SIZE)
        staging, readbacks = np.zeros(SIZE, np.uint8), Readbacks(ELSEWHERE)
        for number in range(1, STEPS + 1):
            stream.run(choose(len(stream.queue)))
            staging[:] = number
            waits = stream.waits
            uploads.into(there, staging)
            waits_of_uploads += stream.waits - waits
            stream.give(lambda: torch.mul(there, 2.0, out=block))          # the step
            unread.append(readbacks.start({"block": block}, is_reused=True))
            buffers.update(map(id, readbacks._buffers))
            if len(unread) == in_flight:
                results.append(unread.pop(0).wait()["block"])
        results += [step.wait()["block"] for step in unread]
    return [result.tolist() for result in results], waits_of_uploads, len(buffers)


EXPECTED = [[2.0 * number] * SIZE for number in range(1, STEPS + 1)]


def test_every_step_reads_what_was_sent_to_it_and_no_upload_waits(monkeypatch):
    orders = every_order(lambda choose: _check(*steps_ahead(monkeypatch, choose)))
    assert orders == 4 ** (STEPS - 1)                         # of the previous step's three actions, 0 to 3 are done


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_with_few_buffers_uploads_do_not_wait_either(monkeypatch, num_buffers):
    monkeypatch.setattr(device_module, "UPLOAD_BUFFERS", num_buffers)
    every_order(lambda choose: _check(*steps_ahead(monkeypatch, choose)))


@pytest.mark.parametrize("in_flight", [1, 3])
def test_there_are_as_many_readback_buffers_as_steps_in_flight(monkeypatch, in_flight):
    for choose in (lambda queued: 0, lambda queued: queued):
        _check(*steps_ahead(monkeypatch, choose, in_flight), in_flight)


def _check(results, waits_of_uploads, num_buffers, in_flight=2):
    assert (results, waits_of_uploads, num_buffers) == (EXPECTED, 0, in_flight)


def test_a_readback_that_is_dropped_or_too_large_for_its_buffer_gets_a_new_one(monkeypatch):
    with lazily(monkeypatch):
        readbacks = Readbacks(ELSEWHERE)
        small, large = torch.arange(4.0), torch.arange(70_000.0)
        dropped = readbacks.start({"x": small})
        before = readbacks.pinned_bytes
        assert readbacks.start({"x": small}).wait()["x"].tolist() == [0, 1, 2, 3] and readbacks.pinned_bytes > before
        del dropped
        assert readbacks.start({"x": large, "y": small}).wait()["x"].sum() == large.sum()
        assert readbacks.pinned_bytes == 2 * (large.nbytes + small.nbytes)


def test_without_events_a_single_buffer_sends_what_comes_later(monkeypatch):
    monkeypatch.setattr(device_module, "UPLOAD_BUFFERS", 1)
    monkeypatch.setattr("tests.runtime.lazy_stream.Event.query", lambda event: True)
    with lazily(monkeypatch) as stream:
        uploads, there = Uploads(ELSEWHERE), [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
        for number, tensor in enumerate(there):
            uploads.into(tensor, np.full(SIZE, number + 1, np.uint8))
        stream.run(len(stream.queue))
    assert there[0].tolist() == [2] * SIZE


@pytest.mark.parametrize("num_sends", [2, 5])
def test_arrays_that_are_sent_arrive_as_they_were(monkeypatch, num_sends):
    def run(choose):
        with lazily(monkeypatch) as stream:
            uploads = Uploads(torch.device("cpu"))
            uploads._shares_memory = False
            arrays, sent = [np.zeros(3, np.int64), np.zeros(5, np.int32)], []
            for number in range(1, num_sends + 1):
                stream.run(choose(len(stream.queue)))
                for array in arrays:
                    array[:] = number
                sent.append(uploads.send(arrays))
            stream.run(len(stream.queue))
        assert [[tensor.tolist() for tensor in tensors] for tensors in sent] == [
            [[number] * 3, [number] * 5] for number in range(1, num_sends + 1)]

    assert every_order(run) > 1

"""The exchanges of ranks, over gloo between real processes."""

import socket
import threading
from unittest import mock

import pytest
import torch
from torch import distributed

from batch_manager.errors import ConfigError, DeviceLostError
from batch_manager.runtime.ranks.exchange import Exchange, Portion, open_store

from .conftest import end_here, free_port, place_among

HIDDEN = 6


class Planted(Exception):
    pass


def connected(port, rank, tensor_size, num_stages, *, timeout_s=30.0, **options):
    place = place_among(port, rank, tensor_size, num_stages)
    store = open_store("127.0.0.1", port, is_server=rank == 0, timeout_s=60)
    exchange = Exchange(place, **options)
    exchange.connect(store, "engine", collectives="gloo", address="127.0.0.1", timeout_s=timeout_s)
    exchange.reserve(8, HIDDEN, torch.float32, torch.device("cpu"))
    return exchange, store


def of_all(processes, port, work, tensor_size, num_stages=1, *more, **options):
    ranks = range(tensor_size * num_stages)
    return processes.run(work, [(port, rank, tensor_size, num_stages, *more) for rank in ranks], **options)


def sums(exchange):
    size, rank = exchange.size, exchange.rank
    with torch.inference_mode():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            x = torch.full((3, 4), rank + 1, dtype=dtype)
            assert torch.equal(exchange.sum(x), torch.full((3, 4), size * (size + 1) / 2, dtype=dtype))
            wide = torch.arange(8).view(4, 2).to(dtype).t() + 10 * rank      # not contiguous
            parts = [torch.arange(8).view(4, 2).to(dtype).t() + 10 * other for other in range(size)]
            assert torch.equal(exchange.gather(wide), torch.cat(parts, -1))
    assert exchange.wait_s > 0 and not distributed.is_initialized()


def sums_in_order(exchange):
    """A sum in rank order depends on nothing else."""
    for rows in (1, 7, 400):
        given = [torch.randn(rows, 33, generator=torch.Generator().manual_seed(other))
                 for other in range(exchange.size)]
        expected = given[0].clone()
        for other in given[1:]:
            expected += other
        assert torch.equal(exchange.sum(given[exchange.rank].clone()), expected)


def sums_and_gathers(ports, rank):
    """Sums of four ranks and of two, in rank order and not, in the same processes."""
    for port, (size, in_rank_order, check) in zip(ports, SUMS):
        if rank < size:
            exchange, _store = connected(port, rank, size, 1, in_rank_order=in_rank_order)
            check(exchange)
            exchange.close()
            exchange.close()


SUMS = [(4, False, sums), (4, True, sums_in_order), (2, False, sums), (2, True, sums_in_order)]


def test_sums_and_gathers(processes):
    ports = [free_port() for _ in SUMS]
    processes.run(sums_and_gathers, [(ports, rank) for rank in range(4)])


def model_step(exchange, rows, fails_at=None):
    """The exchanges of a step: two calls of the layers, and two of the head. Returns the last hidden states."""
    place, count = exchange.place, 0

    def point():
        nonlocal count
        count += 1
        if count - 1 == fails_at:
            raise Planted

    is_last = place.stage == place.pipeline_parallel_size - 1
    logits = [Portion("logits", 3), Portion("logits", rows)] * (is_last and place.tensor_parallel_size > 1)
    with exchange.step([Portion("layers", rows), Portion("layers", 2), *logits]):
        for num_rows in (rows, 2):
            point()
            hidden = torch.ones(num_rows, HIDDEN) if place.stage == 0 else exchange.receive(num_rows)
            for _layer in range(2):
                point()
                squares = exchange.sum(torch.ones(num_rows, 1, dtype=torch.float64))
                point()
                hidden = hidden + exchange.sum(torch.ones(num_rows, HIDDEN)) * squares.float()
            point()
            if not is_last:
                exchange.send(hidden)
            point()
            exchange.end_part()
        for index in range(2):                         # as many points on each rank
            point()
            if not logits:
                continue
            num_rows = logits[index].num_rows
            assert exchange.gather(torch.ones(num_rows, 5)).shape == (num_rows, 5 * place.tensor_parallel_size)
            exchange.end_part()
    return hidden, count


def steps_with_faults(port, rank, tensor_size, num_stages):
    exchange, _store = connected(port, rank, tensor_size, num_stages)
    expected, count = model_step(exchange, 5)
    assert expected.unique().tolist() == [1 + 2 * tensor_size**2 * (exchange.place.stage + 1)]
    for faulty in range(tensor_size * num_stages):
        for point in range(count) if tensor_size * num_stages == 2 else range(faulty, count, 7):
            try:
                model_step(exchange, 1 + point, fails_at=point if faulty == rank else None)
                assert faulty != rank
            except Planted:
                assert faulty == rank
            assert torch.equal(model_step(exchange, 3)[0], expected)
    for (work,), _hidden in exchange._sends:           # no rank ends before its hidden states have arrived
        work.wait()
    if (tensor_size, num_stages) == (2, 1):            # a rank that fails in the head, and has no memory for its part
        with (mock.patch.object(torch, "zeros", side_effect=torch.OutOfMemoryError("none left")),
              pytest.raises(DeviceLostError, match="the part of rank 1.*none left" if rank else "'gather'.*failed")):
            model_step(exchange, 20, fails_at=count - 1 if rank else None)
    exchange.close()


def test_an_exception_in_the_first_step_is_raised_as_it_is():
    with pytest.raises(Planted), Exchange(place_among(1, 0, 2)).step([Portion("layers", 1)]):
        raise Planted


@pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_a_rank_that_raises_anywhere_leaves_no_other_waiting(processes, port, sizes):
    of_all(processes, port, steps_with_faults, *sizes)


def lose_a_rank(port, rank, tensor_size, num_stages, lost):
    exchange, _store = connected(port, rank, tensor_size, num_stages)
    model_step(exchange, 2)
    if rank == lost:
        end_here()
    with pytest.raises(DeviceLostError, match="expected every rank to take part"):
        while True:
            model_step(exchange, 2)


@pytest.mark.parametrize("sizes, lost", [((2, 1), 1), ((1, 2), 0)])
def test_a_lost_rank_ends_the_waits_of_the_others(processes, port, sizes, lost):
    of_all(processes, port, lose_a_rank, *sizes, lost, may_end=(lost,))


def silent_rank(port, rank, tensor_size, num_stages):
    exchange, _store = connected(port, rank, tensor_size, num_stages, timeout_s=1.0)
    if rank == 0:
        with pytest.raises(DeviceLostError, match="exchange 'sum'"):
            exchange.sum(torch.ones(1))
    else:
        threading.Event().wait(2)


def test_a_silent_rank_ends_a_wait_after_the_time_out(processes, port):
    of_all(processes, port, silent_rank, 2)


def test_a_value_that_was_deleted_is_not_found_by_a_later_engine(port):
    first, second = (open_store("127.0.0.1", port, is_server=True, timeout_s=0.5) for _ in range(2))
    first.set("leader", b"x")
    assert second.get("leader") == b"x"
    first.delete("leader")
    with pytest.raises(TimeoutError):
        second.get("leader")


def test_a_store_that_cannot_be_reached_is_refused(port):
    with pytest.raises(ConfigError, match=rf"the ranks cannot meet at 127.0.0.1:{port}: .*listen there within 0.5 s"):
        open_store("127.0.0.1", port, is_server=False, timeout_s=0.5)
    with (socket.create_server(("127.0.0.1", port)),   # torch waits for its answer without end
          pytest.raises(ConfigError, match="expected rank 0 to listen there within 0.5 s")):
        open_store("127.0.0.1", port, is_server=False, timeout_s=0.5)


def test_the_private_names_of_torch_are_there():
    options = distributed.ProcessGroupGloo._Options()
    options._devices, options._timeout = options._devices, options._timeout
    options._threads = 1
    assert callable(distributed.ProcessGroupGloo.create_device) and distributed.TCPStore and distributed.PrefixStore

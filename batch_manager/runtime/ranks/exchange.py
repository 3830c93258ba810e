"""The ranks of an engine in torch: where they meet, their groups, and what they exchange in a step.

The groups are made directly over a store. torch's default group is neither needed nor touched, so that several engines
can live in one process, and a host program can have a default group of its own. Only this file uses names of torch that
groups need and that are private: `ProcessGroupGloo._Options` and `_devices`, `_timeout`, `_threads` of it.
"""

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed

from ...errors import ConfigError, DeviceLostError
from ...parallel.control import wait_for_listener, within
from ...parallel.mapping import Place
from ..device.running import first_line

GLOO_THREADS = 1                   # a rank waits for each of its collectives
SUM, GATHER, RECEIVE, SEND = "sum", "gather", "receive", "send"


def open_store(host: str, port: int, *, is_server: bool, timeout_s: float,
               check: Callable[[], None] = lambda: None) -> "Store":
    """Return torch's store at an address. Waits until the store can be reached.

    is_server   whether this process runs the store. It ends with the last reference to it in the process
    check       called again and again while waiting; may raise

    Raises ConfigError if no store can be reached within `timeout_s` seconds, or the port is taken.
    """
    deadline = time.monotonic() + timeout_s
    return Store(partial(_open_store, host, port, is_server, timeout_s, deadline, check), deadline)


class Store:
    """Where the ranks of an engine meet; see parallel.control.Rendezvous.

    of_torch   torch's store. A process that does not run it opens it again if it has met that of an earlier engine
    """

    def __init__(self, open_one: Callable[[], Any], deadline: float) -> None:
        self._open, self._deadline, self.of_torch = open_one, deadline, open_one()

    def set(self, name: str, value: bytes) -> None:
        self.of_torch.set(name, value)

    def get(self, name: str) -> bytes:
        """Return a value, once it is there. Raises TimeoutError if it is not there `timeout_s` seconds after the store
        was opened."""
        while (seconds := self._deadline - time.monotonic()) > 0:
            try:
                self.of_torch.wait([name], timedelta(seconds=seconds))
                return bytes(self.of_torch.get(name))
            except distributed.DistNetworkError:       # that of an engine that has just ended
                self.of_torch = self._open()
            except RuntimeError as error:
                raise TimeoutError(first_line(error)) from error
        raise TimeoutError

    def delete(self, name: str) -> None:
        """Remove a value, so that a later engine does not find it in a store that outlives this one."""
        with contextlib.suppress(RuntimeError):
            self.of_torch.delete_key(name)

    def close(self) -> None:
        """Drop torch's store."""
        self.of_torch = None


def _open_store(host: str, port: int, is_server: bool, timeout_s: float, deadline: float,
                check: Callable[[], None]) -> Any:
    if not distributed.is_available():
        raise ConfigError(f"several ranks are wanted, and torch {torch.__version__} was built without "
                          "torch.distributed", "the ranks exchange hidden states with it", "install another torch")
    try:
        if not is_server:                              # torch's own tries go on in a thread when the time is up
            wait_for_listener(host, port, deadline, check)
        seconds = max(deadline - time.monotonic(), 0.1)
        store = within(seconds, partial(distributed.TCPStore, host, port, None, is_server, timedelta(seconds=seconds),
                                        wait_for_workers=False, multi_tenant=True))
    except (RuntimeError, TimeoutError) as error:
        raise ConfigError(
            f"the ranks cannot meet at {host}:{port}: {first_line(error)}",
            "expected a free port of this machine" if is_server else
            f"expected rank 0 to listen there within {timeout_s:g} s",
            "check that each rank has the address of rank 0, that rank 0 is running, and that no two processes have "
            "one rank") from error
    return distributed.PrefixStore("batch_manager", store)


def make_group(store: Store, name: str, rank: int, size: int, *, collectives: str, address: str, timeout_s: float
               ) -> Any:
    """Return a process group. Waits until all its ranks have called this function.

    name          name of the group, the same for all its ranks
    collectives   "gloo" or "nccl"
    address       address of this machine at which the other ranks reach it; for gloo alone
    timeout_s     seconds after which a wait for another rank fails

    Raises DeviceLostError if a rank does not come.
    """
    own = distributed.PrefixStore(name, store.of_torch)
    try:
        if collectives == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=timeout_s)
            return distributed.ProcessGroupNCCL(own, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout, options._threads = timedelta(seconds=timeout_s), GLOO_THREADS
        return distributed.ProcessGroupGloo(own, rank, size, options)
    except RuntimeError as error:
        raise _lost(f"the group {name!r} of {size} ranks", error) from error


def _lost(what: str, error: BaseException) -> DeviceLostError:
    return DeviceLostError(f"{what} failed with {first_line(error)}", "expected every rank to take part",
                           "start all ranks again; the rank that failed first says why")


class Portion(NamedTuple):
    """A part of a step: "layers" or "logits", and its number of rows."""

    name: str
    num_rows: int


class Exchange:
    """What a rank exchanges with others in a step: sums and rows with the ranks of its stage, hidden states with the
    stages before and after. It is the Split of its stage's layers.

    rank, size   number of this rank in its stage, and number of ranks of the stage
    wait_s       seconds that this rank has waited for others

    Each part of a step, such as the layers or the head, has the same exchanges in the same order; only the number of
    rows differs. After a part that failed, `complete` takes part in the exchanges of the step that are left, with
    zeros, so that no other rank waits for this one.

    in_rank_order   add the terms of a sum in order of rank, so that its bits depend on nothing else. Of two terms the
                    order does not matter
    most_sends      sends that may be under way
    """

    def __init__(self, place: Place, *, in_rank_order: bool = False, most_sends: int = 2) -> None:
        self.place, self.rank, self.size = place, place.tensor_rank, place.tensor_parallel_size
        self._in_rank_order, self._most_sends = in_rank_order and self.size > 2, most_sends
        self._swaps = False                            # two ranks send to each other, in place of a collective
        self._ranks: Any = None                        # group of the ranks of the stage
        self._stages: Any = None                       # group of this rank's counterparts in all stages
        self._sends: deque[tuple[list[Any], torch.Tensor]] = deque()
        self._done: list[tuple[str, int, torch.dtype]] = []
        self._of_parts: dict[str, list[tuple[str, int, torch.dtype]]] = {}
        self._left: list[Portion] = []                # parts of the step that are not complete
        self._spare = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._hidden_size, self._dtype = 0, torch.float32
        self.wait_s = 0.0

    def connect(self, store: Store, engine: str, *, collectives: str, address: str, timeout_s: float) -> None:
        """Make the groups. Each rank must call this method. Raises DeviceLostError; see `make_group`.

        engine   the same on all ranks, and new for each engine: the store may outlive it
        """
        place, options = self.place, {"collectives": collectives, "address": address, "timeout_s": timeout_s}
        self._swaps = self.size == 2 and collectives == "gloo"       # with NCCL, both would wait in their sends
        if self.size > 1:
            self._ranks = make_group(store, f"{engine} ranks of stage {place.stage}", self.rank, self.size, **options)
        if place.pipeline_parallel_size > 1:
            self._stages = make_group(store, f"{engine} stages of rank {self.rank}", place.stage,
                                      place.pipeline_parallel_size, **options)

    def reserve(self, most_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve the memory with which `complete` takes part in the layers, for calls of up to `most_rows` rows."""
        self._hidden_size, self._dtype = hidden_size, dtype
        parts = 1 + (self.size == 2 or self._in_rank_order)
        # Norms over all heads add a float32 for each row.
        self._spare = torch.zeros(parts * most_rows * max(hidden_size * dtype.itemsize, 4), dtype=torch.uint8,
                                  device=device)

    # ------------------------------------------------------------------ the exchanges of a part

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        if self._swaps:
            other = torch.empty_like(x)
            self._wait(SUM, x, lambda: self._swap(x, other))
            return x.add_(other)
        if not self._in_rank_order:
            self._wait(SUM, x, lambda: [self._ranks.allreduce([x])])
            return x
        first, *others = parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(SUM, x, lambda: [self._ranks.allgather([parts], [x])])
        for other in others:
            first += other
        return first

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(1 if self._swaps else self.size)]
        if self._swaps:
            self._wait(GATHER, x, lambda: self._swap(x, parts[0]))
            parts.insert(self.rank, x)
        else:
            self._wait(GATHER, x, lambda: [self._ranks.allgather([parts], [x])])
        return torch.cat(parts, -1)

    def _swap(self, x: torch.Tensor, other: torch.Tensor) -> list[Any]:
        """Send `x` to the other one of two ranks, whose tensor comes into `other`. Takes half as long as a collective
        of gloo."""
        return [self._ranks.send([x], 1 - self.rank, 0), self._ranks.recv([other], 1 - self.rank, 0)]

    def receive(self, num_rows: int) -> torch.Tensor:
        """Return the hidden states [num_rows, hidden size] that the stage before has sent."""
        hidden = torch.empty((num_rows, self._hidden_size), dtype=self._dtype, device=self._spare.device)
        self._wait(RECEIVE, hidden, lambda: [self._stages.recv([hidden], self.place.stage - 1, 0)])
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Send hidden states to the stage after. Does not wait until they have arrived, which must not change them."""
        hidden = hidden.contiguous()
        works = self._launched(SEND, hidden, lambda: [self._stages.send([hidden], self.place.stage + 1, 0)])
        self._sends.append((works, hidden))
        while len(self._sends) > self._most_sends:
            self._finish(SEND, self._sends.popleft()[0])

    def _wait(self, kind: str, x: torch.Tensor, launch: Callable[[], list[Any]]) -> None:
        self._finish(kind, self._launched(kind, x, launch))

    def _launched(self, kind: str, x: torch.Tensor, launch: Callable[[], list[Any]]) -> list[Any]:
        try:
            works = launch()
        except RuntimeError as error:
            raise _lost(f"the exchange {kind!r} with other ranks", error) from error
        self._done.append((kind, x.shape[-1], x.dtype))
        return works

    def _finish(self, kind: str, works: list[Any]) -> None:
        begin = time.perf_counter()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _lost(f"the exchange {kind!r} with other ranks", error) from error
        finally:
            self.wait_s += time.perf_counter() - begin

    # ------------------------------------------------------------------ a step

    @contextlib.contextmanager
    def step(self, parts: Sequence["Portion"]) -> Iterator[None]:
        """Context manager for the parts of a step, in order. An exception leaves it after `complete`."""
        self._left = list(parts)
        self._done.clear()
        try:
            yield
        except DeviceLostError:
            raise
        except BaseException as error:
            # What the step has allocated is free for `complete`.
            traceback.clear_frames(error.__traceback__)
            self.complete()
            raise

    def end_part(self) -> None:
        """Note that a part of the step is complete."""
        self._of_parts[self._left.pop(0).name], self._done = self._done, []

    def complete(self) -> None:
        """Take part in the exchanges of the step that are left, with zeros.

        Raises DeviceLostError, also if this rank cannot take part: the others must not wait for it. In the first step,
        which is of the warm-up, nothing is known of the exchanges: the start of all ranks fails.
        """
        try:
            while self._left and (exchanges := self._of_parts.get(self._left[0].name)) is not None:
                for kind, columns, dtype in exchanges[len(self._done) :]:
                    self._take_part(kind, self._left[0].num_rows, columns, dtype)
                self._done.clear()
                self._left.pop(0)
        except DeviceLostError:
            raise
        except Exception as error:                     # no memory
            raise _lost(f"after an exception in a step, the part of rank {self.place.rank} in its exchanges", error
                        ) from error

    def _take_part(self, kind: str, num_rows: int, columns: int, dtype: torch.dtype) -> None:
        size = num_rows * columns * dtype.itemsize
        gathers = kind == GATHER or kind == SUM and (self._swaps or self._in_rank_order)
        spare = self._spare[: (1 + gathers) * size].zero_()
        if len(spare) < (1 + gathers) * size:          # logits; the head, which did not get there, needs more
            spare = torch.zeros((1 + gathers) * size, dtype=torch.uint8, device=spare.device)
        x, *others = (part.view(dtype).view(num_rows, columns) for part in spare.split(size))
        if kind == SEND:
            self.send(x.clone())                       # the memory is used again before it has arrived
        elif kind == RECEIVE:
            self._wait(kind, x, lambda: [self._stages.recv([x], self.place.stage - 1, 0)])
        elif self._swaps:
            self._wait(kind, x, lambda: self._swap(x, *others))
        elif gathers:                                  # each result in place of the one before
            self._wait(kind, x, lambda: [self._ranks.allgather([others * self.size], [x])])
        else:
            self._wait(kind, x, lambda: [self._ranks.allreduce([x])])
        self._done.pop()

    def take_wait(self) -> float:
        """Return the seconds that this rank has waited for others since the last call."""
        seconds, self.wait_s = self.wait_s, 0.0
        return seconds

    def close(self) -> None:
        """Drop the groups, which closes their sockets. Idempotent."""
        self._sends.clear()
        for group in (self._ranks, self._stages):
            if group is not None:
                with contextlib.suppress(RuntimeError, AttributeError):
                    group.shutdown()
        self._ranks = self._stages = None

"""One rank of an engine with scripted backends, in a process of its own, which does what the test tells it.

A test sends {"do": "construct", ...} through a pipe and gets the result back, then submit, finals, health, shutdown,
wait, left.
"""

import logging
import os
import pickle
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from batch_manager import (
    GptManager,
    KvCacheConfig,
    ParallelConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    build_rank,
)
from batch_manager.errors import BatchManagerError
from batch_manager.names import TrtGptModelType
from batch_manager.parallel import channel
from tests.harness.client import Client
from tests.harness.ranks import DrawingBackend, ScriptedRank
from tests.harness.requests import request


class FolderRendezvous:
    """What ranks need in order to find rank 0, in files of a folder."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds

    def set(self, name: str, value: bytes) -> None:
        (self._folder / "new").write_bytes(value)
        (self._folder / "new").rename(self._folder / name)

    def get(self, name: str) -> bytes:
        deadline = time.monotonic() + self._seconds
        while not (self._folder / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.002)
        return (self._folder / name).read_bytes()

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()

    def close(self) -> None:
        """Nothing is open."""


class ArrayClient(Client):
    """A client that reads arrays, because tensors would import torch.

    final_s      seconds of a call of send with a final response
    arrivals     number of a call of get -> the requests that it returns besides `pending`
    broadcasts   folder in which rank 0 leaves what each call of get returns; every other rank waits for it there
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: dict[int, list] = {}
        self.rank, self.broadcasts, self.calls, self.waits_until = 0, None, 0, 0.0
        self.raises: set[str] = set()
        self.final_s = 0.0

    def items(self, max_num_requests):
        call, self.calls = self.calls, self.calls + 1
        if self.broadcasts is not None:
            path = Path(self.broadcasts) / f"get {call}"
            if self.rank == 0:
                items = self.pending[:]
                self.pending.clear()
                path.with_suffix(".new").write_bytes(pickle.dumps(items))
                path.with_suffix(".new").rename(path)
            else:
                deadline = time.monotonic() + 10
                while not path.exists():
                    assert time.monotonic() < deadline, "rank 0 has not called get"
                    time.sleep(0.0005)
                items = pickle.loads(path.read_bytes())
            return [request(*each) for each in items]
        if "get" in self.raises and call in self.arrivals:
            raise RuntimeError("planted")
        return [request(*each) for each in self.arrivals.get(call, ())] + super().items(max_num_requests)

    def named_stops(self):
        if "poll" in self.raises:
            raise RuntimeError("planted")
        return super().named_stops()

    def received(self, request_id, tensors, final, error):
        for tensor in tensors:
            tensor._to_tensor = None
        response = super().received(request_id, tensors, final, error)
        if final and self.final_s:
            time.sleep(self.final_s)
        if "send" in self.raises:
            raise RuntimeError("planted")
        return response


class Rank:
    def __init__(self) -> None:
        self.client = ArrayClient()
        self.manager: GptManager | None = None
        self.threads, self.files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def construct(self, rank: int, num_ranks: int, folder: str, *, fails: str = "", version: str = "", key: bool = True,
                  step_s: float = 0.0, raises: dict | None = None, exclude_input: bool = True, frames: int = 0,
                  rank_timeout_s: float = 2.0, connect_timeout_s: float = 20.0, callbacks: bool | None = None,
                  arrivals: dict | None = None, broadcasts: str | None = None, client_raises: tuple = (),
                  has_stats: bool = False, final_s: float = 0.0,
                  idle_poll_interval_s: float = 0.0048) -> dict:
        """Construct a GptManager.

        fails     what fails in the constructor: "before" or "after" the ranks have compared their arguments
        version   version of the package, if it is another one
        key       whether this rank shows the right key
        step_s    seconds of a step
        raises    {"slot": in which slots a step raises, "error": class}
        frames    version of the frames, if it is another one
        arrivals, broadcasts, client_raises   of the client
        final_s   seconds of a call of send with a final response
        """
        self.client.arrivals, self.client.broadcasts, self.client.rank = arrivals or {}, broadcasts, rank
        self.client.raises, self.client.final_s = set(client_raises), final_s
        def on_step(batch) -> None:
            if step_s:
                time.sleep(step_s)
            if raises and raises["slot"] in batch.slots():
                raise {"RuntimeError": RuntimeError, "MemoryError": MemoryError}[raises["error"]]("planted")

        def make_local_backend(arguments, parts, meeting):
            if fails == "after":
                raise OSError("no disk")
            meeting.ranks.exchange("num_blocks", 64)
            local = DrawingBackend(num_blocks=64, tokens_per_block=8, num_slots=8, max_seq_len=128)
            if rank == 0:
                local.on_step = on_step
                return local
            return ScriptedRank(local.info, on_step)

        def open_rendezvous(place, config):
            if fails == "before":
                raise OSError("no disk")
            store = FolderRendezvous(Path(folder), connect_timeout_s)
            if not key:
                get = store.get
                store.get = lambda name: get(name)[:-16] + bytes(16)
            return store

        build_rank._local_backend, build_rank.open_rendezvous = make_local_backend, open_rendezvous
        if version:
            build_rank.__version__ = version
        if frames:
            channel.VERSION = frames
        callbacks = rank == 0 if callbacks is None else callbacks
        given = self.client.callbacks() if callbacks else {"get_inference_requests_cb": None, "send_response_cb": None}
        if has_stats:
            given["return_batch_manager_stats_cb"] = self.client.return_stats
        began = time.monotonic()
        try:
            self.manager = GptManager(
                None, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, **given,
                exclude_input_in_output=exclude_input, optional_params=TrtGptModelOptionalParams(
                    kv_cache_config=KvCacheConfig(tokens_per_block=8), max_batch_size=8, max_num_tokens=256,
                    idle_poll_interval_s=idle_poll_interval_s, parallel_config=ParallelConfig(
                        tensor_parallel_size=num_ranks, rank=rank, leader="127.0.0.1:1",
                        rank_timeout_s=rank_timeout_s, connect_timeout_s=connect_timeout_s)))
        except BatchManagerError as error:
            return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
        except OSError as error:
            return {"error": "OSError", "text": str(error), "seconds": time.monotonic() - began}
        return {"error": "", "seconds": time.monotonic() - began}

    def submit(self, requests: list) -> dict:
        self.client.pending += requests if self.client.broadcasts else [request(*each) for each in requests]
        self.manager.notify()
        return {}

    def responses(self, at_least: int = 0) -> dict:
        """Wait for this many responses. Return id -> number of tokens received so far."""
        deadline = time.monotonic() + 20
        while sum(map(len, self.client.responses.values())) < at_least and time.monotonic() < deadline:
            time.sleep(0.002)
        return {}

    def heard(self) -> dict:
        """Return all responses in order as (id, [name, array as list], final, error), the records, and the calls."""
        return {"responses": {each: [[[(name, value.tolist()) for name, value in sorted(response.tensors.items())],
                                      response.final, response.error] for response in responses]
                              for each, responses in self.client.responses.items()},
                "sends": [event for event in self.client.events if event.startswith("send")],
                "stats": self.client.stats, "asked": self.client.asked, "complaints": self.client.complaints,
                "failures": self.manager.health()["callback_failures"]}

    def finals(self, ids: list[int], seconds: float = 20.0) -> dict:
        """Wait for the final response of each id, and return [code, tokens] of every one, and how many there were."""
        began = time.monotonic()
        while not all(self.client.finals(each) for each in ids) and time.monotonic() < began + seconds:
            time.sleep(0.002)
        return {"finals": {each: [[final.code if final.error else "", [] if final.error else final.tokens()]
                                  for final in self.client.finals(each)] for each in ids},
                "seconds": time.monotonic() - began, "complaints": self.client.complaints}

    def wait_for_finals(self, count: int) -> dict:
        """Wait for this many final responses."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and count > sum(
                response.final for responses in list(self.client.responses.values()) for response in list(responses)):
            time.sleep(0.002)
        return {}

    def wait_until_alive(self, count: int) -> dict:
        deadline = time.monotonic() + 20
        while self.manager.num_active_requests < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return {}

    def health(self) -> dict:
        return self.manager.health()

    def until(self, state: str, seconds: float = 20.0) -> dict:
        """Wait until the engine is in a state, and return its health."""
        began = time.monotonic()
        while (health := self.manager.health())["state"] != state and time.monotonic() < began + seconds:
            time.sleep(0.002)
        return {**health, "seconds": time.monotonic() - began}

    def shutdown(self, drain: bool = True, timeout: float | None = 20.0) -> dict:
        began = time.monotonic()
        return {"ended": self.manager.shutdown(drain, timeout), "seconds": time.monotonic() - began}

    def wait(self, seconds: float = 20.0) -> dict:
        return {"ended": self.manager.wait_until_terminate(seconds), **self.manager.health()}

    def left(self) -> dict:
        """Return the threads and the number of descriptors that were not there at first, and whether torch is there,
        which the host side of a rank does not need, and which takes a second or two to import.
        """
        deadline = time.monotonic() + 5
        while True:
            threads = [thread.name for thread in threading.enumerate() if thread not in self.threads]
            files = len(os.listdir("/proc/self/fd")) - self.files
            if not threads and files <= 0 or time.monotonic() > deadline:
                return {"threads": threads, "files": max(files, 0), "torch": "torch" in sys.modules}
            time.sleep(0.01)


def run(pipe: Connection) -> None:
    """Do what comes through the pipe, one command at a time, until it is closed."""
    log = logging.getLogger("batch_manager")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    rank = Rank()
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            if rank.manager is not None:
                rank.manager.shutdown(drain=False, timeout=5)
            return
        pipe.send(getattr(rank, command.pop("do"))(**command))

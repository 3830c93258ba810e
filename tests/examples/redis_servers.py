"""A Redis server, workers of examples/redis_worker.py, and the check of their answers, for tests and a campaign."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import redis

from batch_manager import FinishReason, InferenceRequest
from tests.harness import forked
from tests.harness.ports import free_port
from tests.resume.random_requests import outcomes

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"
STREAM, GROUP = "requests", "workers"
ENGINE = {"num_threads": 1, "dtype": "float32", "deterministic": True}
NEEDED = "redis-server 7 or later"


def what_is_missing() -> str:
    """Return the reason why no Redis server can be started on this machine, or "" if one can be started."""
    path = shutil.which("redis-server")
    if path is None:
        return f"{NEEDED} is not installed; apt-get install redis-server"
    told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=300).stdout
    version = told.partition("v=")[2].split()[0]
    return "" if int(version.partition(".")[0]) >= 7 else f"redis-server is {version}; {NEEDED} is needed"


class Server:
    """A Redis server that can be killed and started again without losing acknowledged writes."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder, self.url = folder, f"redis://127.0.0.1:{self.port}"
        self.client = redis.Redis(port=self.port, protocol=2, socket_timeout=10)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", "",
             "--appendonly", "yes", "--appendfsync", "always"], stdout=subprocess.DEVNULL)
        wait_until(self.answers, 30)

    def answers(self) -> bool:
        try:
            return self.client.ping()
        except redis.ConnectionError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


class WorkerProcess:
    """A worker process, with its log in a file."""

    def __init__(self, server: Server, name: str, *options: str, start: type = forked.Popen) -> None:
        self.others = {each["id"] for each in server.client.client_list()}
        self.name, self.log_path = name, server.folder / f"{name}-{time.monotonic_ns()}.log"
        with self.log_path.open("w") as log:
            self.process = start(
                [sys.executable, REPOSITORY / "examples" / "redis_worker.py", "--model", MODEL, "--redis", server.url,
                 "--consumer", name, "--in-flight", "4", "--lease", "2", "--threads", "1", "--dtype", "float32",
                 "--deterministic", *options],
                stderr=log, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        self.client = server.client

    def wait_until_it_serves(self) -> "WorkerProcess":
        wait_until(lambda: self.asks_for_entries() or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log()
        return self

    def asks_for_entries(self) -> bool:
        """Whether a connection that did not exist before the worker waits for entries of the stream."""
        return any(each["cmd"] == "xreadgroup" and each["id"] not in self.others for each in self.client.client_list())

    def log(self) -> str:
        return self.log_path.read_text()

    def pending(self) -> list[str]:
        """Return the names of the entries that the worker has fetched and not yet acknowledged."""
        return [entry["message_id"].decode() for entry in
                self.client.xpending_range(STREAM, GROUP, "-", "+", 1000, consumername=self.name)]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stop the process, and return when it has stopped."""
        self.send(signal.SIGSTOP)
        assert os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED

    def freeze_in_the_middle(self, requests: list[dict], lengths: list[int], num_entries: int = 2, margin: int = 100,
                             ) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Add `requests` to the stream, until the process is frozen in the middle of `num_entries`.

        They are added again when half of them are answered.

        It is in the middle of an entry if 5 or more tokens are streamed and `margin` or more tokens are missing.
        However long the test process pauses, the worker cannot have finished these entries.

        lengths   number of tokens that each request generates
        Returns ({name of an entry: index of its request}, {name of an entry in the middle: its streamed tokens}).
        """
        names, before = {}, {}

        def is_frozen_in_the_middle() -> bool:
            if len(names.keys() - dict(answers(self.client)).keys()) <= len(requests) // 2:
                names.update((name, index) for index, name in enumerate(add(self.client, requests)))
            self.freeze()
            before.update((name, tokens) for name in self.pending()
                          if 5 <= len(tokens := streamed(self.client, name)[0]) <= lengths[names[name]] - margin)
            if len(before) >= num_entries:
                return True
            before.clear()
            self.send(signal.SIGCONT)
            return False

        wait_until(is_frozen_in_the_middle, 120)
        return names, before

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        self.send(number)
        return self.process.wait(seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"waited {seconds} s in vain"
        time.sleep(0.02)


def drawn(draw: random.Random, shortest: int = 60, longest: int = 120) -> dict:
    """Return the tensors of a random request."""
    tensors = {"input_ids": [draw.randrange(3, 4096) for _ in range(draw.choice([1, 4, 17, 40]))],
               "request_output_len": draw.randrange(shortest, longest), "random_seed": draw.getrandbits(40),
               "temperature": draw.uniform(0.3, 1.5)}
    for more in ({"runtime_top_k": 40}, {"runtime_top_p": 0.9}, {"repetition_penalty": 1.2}, {"min_length": 50},
                 {"runtime_top_p": 0.9, "runtime_top_p_decay": 0.99}, {"end_id": 15, "presence_penalty": 0.5}):
        if draw.random() < 0.3:
            tensors |= more
    return tensors


def add(client: redis.Redis, requests: list[dict]) -> list[str]:
    """Add requests to the stream and return the names of their entries."""
    return [client.xadd(STREAM, {"request": json.dumps(tensors)}).decode() for tensors in requests]


def answers(client: redis.Redis) -> list[tuple[str, dict]]:
    return [(fields[b"entry"].decode(), json.loads(fields[b"answer"]))
            for _, fields in client.xrange(f"{STREAM}:answers")]


def wait_for_answers(client: redis.Redis, names: list[str], seconds: float = 120) -> dict[str, dict]:
    wait_until(lambda: set(names) <= {name for name, _ in answers(client)}, seconds)
    return dict(answers(client))


def streamed(client: redis.Redis, name: str) -> tuple[list[int], dict | None]:
    """Return (tokens, answer or None) that a client reads from the token stream of an entry.

    Checks that the name of each piece contains the number of tokens up to the end of the piece.
    """
    tokens, answer = [], None
    for piece, fields in client.xrange(f"{STREAM}:tokens:{name}"):
        assert answer is None, f"{name}: a piece behind the answer"
        if b"answer" in fields:
            answer = json.loads(fields[b"answer"])
        else:
            tokens += map(int, fields[b"tokens"].split())
            assert piece.decode() == f"0-{len(tokens)}", f"{name}: piece {piece} ends at token {len(tokens)}"
    return tokens, answer


def wrong(client: redis.Redis, names: list[str], expected: list[tuple[list[int], str]],
          before: dict[str, list[int]]) -> list[str]:
    """Return a line for each fault of the answers to the entries `names`.

    expected   (tokens, finish reason) of each entry
    before     name of an entry -> tokens that were streamed before a worker or Redis was disturbed
    """
    found, times = dict(answers(client)), Counter(name for name, _ in answers(client))
    faults = [f"{name} has {times[name]} answers" for name in names if times[name] != 1]
    for name, (tokens, reason) in zip(names, expected, strict=True):
        answer = found.get(name)
        if answer != {"tokens": tokens, "finish_reason": reason}:
            faults.append(f"{name}: the answer is another one than undisturbed")
        if streamed(client, name) != (tokens, answer):
            faults.append(f"{name}: what was streamed is not the answer")
        if tokens[:len(before.get(name, []))] != before.get(name, []):
            faults.append(f"{name}: what was streamed before is contradicted")
    owed = client.xrange(STREAM)
    faults += [f"{name.decode()} is still in the stream" for name, _ in owed if name.decode() in names]
    faults += [f"{entry['message_id'].decode()} is still pending" for entry in
               client.xpending_range(STREAM, GROUP, "-", "+", 1000) if entry["message_id"].decode() in names]
    return faults


def undisturbed(requests: list[dict]) -> list[tuple[list[int], str]]:
    """Run requests on an engine in this process. Return the (tokens, finish reason) of each request."""
    found = outcomes(MODEL, [InferenceRequest(number, tensors) for number, tensors in enumerate(requests)], **ENGINE)
    return [(found[number][0], FinishReason(found[number][1]).name) for number in range(len(requests))]

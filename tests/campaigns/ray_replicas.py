"""Two replicas under Ray Serve. One is killed during 16 streams.

    python tests/campaigns/ray_replicas.py [--repeat 1] [--streams 16] [--tokens 300] [--tensor-parallel-size 1]

Needs ray[serve]. Each stream must have the same tokens as without a kill, two replicas must run again within 20 s
(times the number of ranks), and the request of a client that disconnects must end within a second. The program prints
a line for each kill, one for the disconnection and one for the routing: of prompts with a shared beginning, 90% must go
to the replica that has it. With several ranks, a rank other than 0 is killed as well. The exit
status is 1 if a rule was broken.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
SECONDS_TO_BE_WHOLE, SECONDS_TO_LEAVE, SECONDS_TO_START = 20.0, 1.0, 120.0
SECONDS_TO_REPORT = 3.0     # Ray asks replicas for their statistics every second


class Stream(threading.Thread):
    """A client that reads one response stream to its end."""

    def __init__(self, port: int, tensors: dict) -> None:
        super().__init__(daemon=True)
        self.tokens, self.error, self.last, self.cached_tokens = [], "", "", 0
        self.connection, self._tensors = http.client.HTTPConnection("127.0.0.1", port, timeout=90), tensors

    def run(self) -> None:
        try:
            self.connection.request("POST", "/", json.dumps(self._tensors))
            for line in self.connection.getresponse():
                delta = json.loads(line)
                self.tokens += delta["tokens"]
                self.cached_tokens = delta.get("cached_tokens", 0)
                self.error, self.last = delta.get("error", self.error), delta.get("finish_reason", "")
        except Exception as error:
            self.error = self.error or repr(error)


def asked(number: int, tokens: int) -> dict:
    return {"input_ids": [100 + number, 7, 30 + number], "request_output_len": tokens, "random_seed": number,
            "temperature": 0.9, "runtime_top_k": 50}


def started(port: int, streams: int, tokens: int) -> list[Stream]:
    made = [Stream(port, asked(number, tokens)) for number in range(streams)]
    for stream in made:
        stream.start()
    return made


def texts(streams: list[Stream]) -> list[tuple]:
    for stream in streams:
        stream.join(120)
    return [(stream.tokens, stream.last, stream.error) for stream in streams]


def parents(pid: int) -> list[int]:
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def replicas(actor: bytes = b":Engine") -> list[int]:
    """Return the process ids of the running replicas, or other actors, that this program started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            if title.startswith(b"ray::") and actor in title and os.getpid() in parents(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def running() -> int:
    from ray import serve
    states = serve.status().applications["default"].deployments["Engine"].replica_states
    return int(states.get("RUNNING", 0))


def seconds_until(condition, most: float) -> float | None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > most:
            return None
        time.sleep(0.05)
    return time.monotonic() - began


def kill_one(port: int, undisturbed: list, tokens: int, most_s: float, actor: bytes = b":Engine"
             ) -> tuple[list[str], str]:
    """Kill one replica during as many streams as `undisturbed` has results. Returns (violations, line of output).

    undisturbed   results of the same streams without a kill
    most_s        seconds within which two replicas must run again
    actor         in the title of the process to kill
    """
    wrong, before = [], replicas(actor)
    streams = started(port, len(undisturbed), tokens)
    if seconds_until(lambda: all(len(s.tokens) > tokens // 10 for s in streams), 60) is None:
        wrong.append("not every stream had begun")
    victim = before[0]
    alive = sum(s.is_alive() for s in streams)
    os.kill(victim, signal.SIGKILL)
    whole = {}
    watch = threading.Thread(target=lambda: whole.setdefault("s", seconds_until(
        lambda: running() == 2 and len(now := replicas(actor)) == 2 and victim not in now, 60)))
    watch.start()
    got = texts(streams)
    different = sum(one != other for one, other in zip(got, undisturbed, strict=True))
    if different:
        wrong.append(f"{different} texts differ: {[text[1:] for text in got]}")
    watch.join()
    if whole["s"] is None or whole["s"] > most_s:
        wrong.append(f"two replicas again only after {whole['s']} s")
    return wrong, f"{alive} streams in flight at the kill, {different} different, two replicas after " \
                  f"{whole['s'] or float('inf'):.1f} s"


def leave(port: int, engines) -> tuple[list[str], str]:
    tensors = asked(1, 1000)
    stream = Stream(port, tensors)
    stream.start()
    if seconds_until(lambda: len(stream.tokens) > 5, 30) is None:
        return ["the stream that is left had not begun"], ""
    active = lambda: engines.health.remote(tensors).result()["active_requests"]
    if active() != 1:
        return ["the request that is left was not found"], ""
    stream.connection.sock.shutdown(socket.SHUT_RDWR)
    took = seconds_until(lambda: active() == 0, 5)
    did = "a client left, and its request " + ("ran on" if took is None else f"ended after {took:.2f} s")
    return [did] if took is None or took > SECONDS_TO_LEAVE else [], did


def route(port: int, families: int = 12, prompts: int = 120) -> tuple[list[str], str]:
    """Send prompts with shared beginnings of 4 blocks, one after another."""
    def cached(prompt: list[int]) -> int:
        stream = Stream(port, {"input_ids": prompt, "request_output_len": 2, "return_perf_metrics": True})
        stream.start()
        stream.join(60)
        return stream.cached_tokens

    draw = random.Random(1)
    shared = [[draw.randrange(3, 400) for _ in range(256)] for _ in range(families)]
    for beginning in shared:
        cached(beginning)
    time.sleep(SECONDS_TO_REPORT)
    found = [cached([*draw.choice(shared), *(draw.randrange(3, 400) for _ in range(50))]) for _ in range(prompts)]
    right = sum(each >= 256 for each in found)
    did = f"{right} of {prompts} prompts went to the replica with their beginning"
    return [did] if right < 0.9 * prompts else [], did


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    given = parser.parse_args()
    if find_spec("ray") is None:
        print('Ray Serve was NOT tested: ray is not installed; pip install "ray[serve]"')
        return 0
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    from examples.ray_app import app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    wrong, did, most_s = [], [], SECONDS_TO_BE_WHOLE * given.tensor_parallel_size
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"tensor_parallel_size": str(given.tensor_parallel_size)}))
        if seconds_until(lambda: len(replicas()) == 2, SECONDS_TO_START) is None:
            raise SystemExit("there are no two replicas")
        undisturbed = texts(started(port, given.streams, given.tokens))
        if {text[1:] for text in undisturbed} != {("LENGTH", "")}:
            wrong.append("undisturbed texts are not whole")
        for _ in range(given.repeat):
            bad, line = kill_one(port, undisturbed, given.tokens, most_s)
            wrong, did = wrong + bad, [*did, line]
        if given.tensor_parallel_size > 1:
            bad, line = kill_one(port, undisturbed, given.tokens, most_s, b"::Rank")
            wrong, did = wrong + bad, [*did, f"rank 1 killed: {line}"]
        bad, line = route(port)
        wrong, did = wrong + bad, [*did, line]
        bad, line = leave(port, serve.get_deployment_handle("Engine", "default"))
        wrong, did = wrong + bad, [*did, line]
    finally:
        serve.shutdown()
        ray.shutdown()
    print("\n".join([*did, *(f"WRONG: {line}" for line in wrong)]))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())

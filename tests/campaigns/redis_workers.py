"""Runs workers of examples/redis_worker.py, and kills and freezes workers and Redis meanwhile.

    python tests/campaigns/redis_workers.py [--first-seed 0] [--seconds 300] [--workers 2] [--faults 8]

Needs redis-server 7 or later. A seed starts a Redis and workers with a lease of 2 s, and causes faults at random times
while entries keep coming:

    kill              kill -9 of a worker, which starts again with the same name or another
    freeze            SIGSTOP of a worker for up to 4 s
    SIGTERM           SIGTERM of a worker that has work left
    kill of Redis     kill -9 of Redis, which starts again
    freeze of Redis   SIGSTOP of Redis for up to 7 s, longer than a worker waits for a reply, so that commands are late

Some entries are cancelled, and some are malformed. Each entry must have one answer: the answer of an undisturbed run,
or the beginning of that answer if the entry was cancelled. Streamed tokens must agree with the answer. The program
prints a line with counts. The exit status is 1 if a rule was broken.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.examples.redis_servers import (  # noqa: E402
    STREAM,
    Server,
    WorkerProcess,
    add,
    answers,
    drawn,
    streamed,
    undisturbed,
    wait_until,
    what_is_missing,
    wrong,
)

FAULTS = ("kill", "freeze", "SIGTERM", "kill of Redis", "freeze of Redis")
MOST_UNANSWERED = 16


class Run:
    """The run of one seed: its Redis, its workers and the entries added so far."""

    def __init__(self, seed: int, num_workers: int, counts: Counter) -> None:
        self.draw, self.counts, self.faults = random.Random(seed), counts, []
        self.server = Server(Path(tempfile.mkdtemp(prefix="redis-workers-")))
        self.workers = [self.worker(f"worker-{number}") for number in range(num_workers)]
        self.ended: list[WorkerProcess] = []
        self.asked: dict[str, dict] = {}
        self.cancelled: set[str] = set()
        self.bad: set[str] = set()
        self.seen: dict[str, list[int]] = {}

    def worker(self, name: str) -> WorkerProcess:
        return WorkerProcess(self.server, name, "--drain", self.draw.choice(["0", "0.3", "20"]))

    def disturb(self, num_faults: int) -> list[str]:
        """Cause `num_faults` random faults while adding entries, and wait for all answers. Returns the violations."""
        for worker in self.workers:
            worker.wait_until_it_serves()
        for fault in self.draw.choices(FAULTS, k=num_faults):
            self.work(self.draw.uniform(0.5, 2.0))
            self.counts[fault] += 1
            self.strike(fault)
        self.work(0.5)
        for worker in self.workers:                          # a worker may still be frozen
            worker.send(signal.SIGCONT)
        wait_until(lambda: set(self.asked) | self.bad <= {name for name, _ in answers(self.server.client)}, 240)
        for worker in self.workers:
            if worker.end() != 0:
                self.faults.append(f"{worker.name} ended with {worker.process.returncode}: {worker.log()[-2000:]}")
        return self.faults + self.judged()

    def work(self, seconds: float) -> None:
        """Add and cancel entries and read the streams of tokens, for `seconds` seconds."""
        until, client = time.monotonic() + seconds, self.server.client
        while time.monotonic() < until:
            unanswered = set(self.asked) - {name for name, _ in answers(client)}
            if len(unanswered) < MOST_UNANSWERED:
                tensors = drawn(self.draw, 40, 160)
                self.asked[add(client, [tensors])[0]] = tensors
                if self.draw.random() < 0.1:
                    self.bad.add(client.xadd(STREAM, {"request": self.draw.choice(
                        ["Emma smiled, and", "[]", '{"input_ids": [-1], "request_output_len": 4}', "{}"])}).decode())
            if unanswered and self.draw.random() < 0.05:
                name = self.draw.choice(sorted(unanswered))
                client.set(f"{STREAM}:cancel:{name}", 1, ex=3600)
                self.cancelled.add(name)
            for name in unanswered:
                self.see(name)
            time.sleep(0.02)

    def see(self, name: str) -> None:
        before, (tokens, _) = self.seen.get(name, []), streamed(self.server.client, name)
        if tokens[:len(before)] != before:
            self.faults.append(f"{name}: what was streamed was contradicted")
        self.seen[name] = tokens

    def strike(self, fault: str) -> None:
        number = self.draw.randrange(len(self.workers))
        worker = self.workers[number]
        self.counts["entries in hand"] += len(worker.pending()) if "Redis" not in fault else 0
        if fault == "kill":
            worker.end(signal.SIGKILL)
        elif fault == "SIGTERM":
            if worker.end() != 0:
                self.faults.append(f"{worker.name} ended with {worker.process.returncode}: {worker.log()[-2000:]}")
        elif fault == "freeze":
            worker.send(signal.SIGSTOP)
            self.work(self.draw.uniform(0.5, 4.0))
            worker.send(signal.SIGCONT)
        elif fault == "freeze of Redis":
            self.server.process.send_signal(signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.5, 7))
            self.server.process.send_signal(signal.SIGCONT)
        else:
            self.server.kill()
            time.sleep(self.draw.uniform(0, 3))
            self.server.start()
        if worker.process.poll() is not None:
            self.ended.append(worker)
            name = worker.name if self.draw.random() < 0.5 else f"worker-{self.draw.getrandbits(30)}"
            self.workers[number] = self.worker(name).wait_until_it_serves()

    def judged(self) -> list[str]:
        client, found = self.server.client, dict(answers(self.server.client))
        expected, faults = undisturbed(list(self.asked.values())), []
        for number, name in enumerate(self.asked):
            tokens, _ = expected[number]
            if name in self.cancelled and found[name].get("finish_reason") == "CANCELLED":
                expected[number] = tokens[:len(found[name]["tokens"])], "CANCELLED"
                self.counts["cancelled"] += 1
        faults += wrong(client, list(self.asked), expected, self.seen)
        faults += [f"{name}, which is bad, has {number} answers" for name in self.bad
                   if (number := sum(answered == name for answered, _ in answers(client))) != 1]
        faults += [f"{name}, which is bad, was not refused" for name in self.bad if "error" not in found[name]]
        logs = {worker.name: worker.log() for worker in self.workers + self.ended}
        faults += [f"{name} logged a stack or a prompt" for name, log in logs.items()
                   if "Traceback" in log or "Emma" in log]
        self.counts["entries"] += len(self.asked) + len(self.bad)
        self.counts["bad entries"] += len(self.bad)
        self.counts["answers"] += len(answers(client))
        self.counts["tokens"] += sum(len(answer["tokens"]) for answer in found.values())
        self.counts["refused writes"] += sum(log.count("another worker's now") for log in logs.values())
        return faults

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        self.server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--faults", type=int, default=8, help="in one seed")
    options = parser.parse_args()
    if missing := what_is_missing():
        print(f"nothing ran: {missing}")
        return 1
    began, seed, faults, counts = time.monotonic(), options.first_seed, [], Counter()
    while time.monotonic() - began < options.seconds:
        run = Run(seed, options.workers, counts)
        try:
            faults += [f"seed {seed}: {fault}" for fault in run.disturb(options.faults)]
        finally:
            run.close()
        seed += 1
    print(*faults, sep="\n")
    print(f"seeds {options.first_seed}..{seed - 1}, {options.workers} workers: "
          + ", ".join(f"{count:,} {name}" for name, count in counts.items())
          + f"; {time.monotonic() - began:.0f} s; {len(faults)} wrong")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

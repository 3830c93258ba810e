"""Serve ten prompts with one small model, and show what in-flight batching does with them.

    python examples/quickstart.py [--policy GUARANTEED_NO_EVICT] [--max-new-tokens 64] [--device cpu] [--model FOLDER]

Most prompts arrive while earlier requests are still running, and all active requests share each step of the model. The
KV cache is deliberately too small, so that some requests are paused and resume later. At the end, the program runs each
paused request again, alone, and the text must be the same. The poll callback stops one request. On a terminal, the
texts grow in a table. In a file or pipe, they are plain lines. All printed numbers come from the callbacks.
"""

import argparse
import json
import os
import queue
import shutil
import sys
import textwrap
import time
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

try:
    from tokenizers import Tokenizer
except ImportError:
    sys.exit('quickstart: this example needs the tokenizers library; pip install -e ".[examples]"')

from batch_manager import (
    BatchManagerError,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    Trace,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from batch_manager.extras.text import TextStream
from batch_manager.tools.draw.text import render_text
from batch_manager.tools.standard_output import reported

MODEL = Path(__file__).resolve().parent / "models" / "austen-4m"
TOKENS_PER_BLOCK = 16
SHARE_OF_THE_NEED = 0.5             # blocks of the pool, as a share of what all requests need at full length
STOPPED_REQUEST = 4

GREEDY = {"runtime_top_k": 1}


def sampled(seed: int, temperature: float = 0.8) -> dict:
    return {"runtime_top_k": 40, "temperature": temperature, "random_seed": seed}


# (iteration of arrival, prompt, sampling tensors)
PROMPTS = [
    (0, "It is a truth universally acknowledged, that a single man", sampled(1)),
    (0, "Emma Woodhouse, handsome, clever, and rich,", GREEDY),
    (0, "Elinor could not be surprised at", sampled(3)),
    (3, "Mr. Darcy looked at her, and", sampled(4)),
    (6, "The evening was", GREEDY),
    (10, '"My dear Mr. Bennet," said his lady to him one day,', sampled(6)),
    (14, "Captain Wentworth had been", sampled(7)),
    (18, "Her father was", sampled(8, temperature=0.6)),
    (24, "The letter was from", sampled(9)),
    (36, "They walked towards the sea, and Anne", sampled(10)),
]


# ---------------------------------------------------------------------- the requests and the four callbacks


@dataclass(eq=False)
class Job:
    """One prompt and its progress. The worker's thread updates it, and the main thread displays it.

    stream    detokenizes the output incrementally
    text      text of the output so far
    """

    id: int
    arrives: int
    prompt: str
    prompt_ids: list[int]
    knobs: dict
    max_new_tokens: int
    end_id: int
    tokenizer: Tokenizer
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    state: str = "to come"
    pauses: int = 0
    error: str = ""
    is_over: bool = False

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer, self.prompt_ids)

    @property
    def choice(self) -> str:
        if self.knobs is GREEDY:
            return "greedy"
        return f"top-k {self.knobs['runtime_top_k']}, temperature {self.knobs['temperature']}, " \
               f"seed {self.knobs['random_seed']}"

    @property
    def blocks_at_its_longest(self) -> int:
        return -(-(len(self.prompt_ids) + self.max_new_tokens) // TOKENS_PER_BLOCK)

    def request(self) -> InferenceRequest:
        return InferenceRequest(self.id, {
            "input_ids": self.prompt_ids, "request_output_len": self.max_new_tokens, "end_id": self.end_id,
            **self.knobs}, is_streaming=True)


class Client:
    """The engine's four callbacks and its trace hook. They run on the worker's thread.

    events   (what, job) for the display: "arrived", "text", "paused", "over"
    """

    def __init__(self, jobs: list[Job], stop_id: int | None = None, stop_after: int = 0) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.to_come = sorted(jobs, key=lambda job: job.arrives)
        self.stop_id, self.stop_after = stop_id, stop_after
        self.statistics: list[dict] = []
        self.trace = Trace()
        self.events: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
        self.started = self.ended = 0.0

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        """Return the requests that are due in this iteration. A server would return the requests in its queue."""
        due: list[InferenceRequest] = []
        is_idle = all(job.is_over for job in self.jobs.values() if job not in self.to_come)
        while self.to_come and len(due) < max_num_requests:
            if self.to_come[0].arrives > len(self.trace.iterations) and not (is_idle and not due):
                break
            job = self.to_come.pop(0)
            job.state = "waiting"
            self.started = self.started or time.monotonic()
            self.events.put(("arrived", job))
            due.append(job.request())
        return due

    def send_response(self, request_id: int, tensors: list, final_response: bool, error_message: str) -> None:
        job = self.jobs[request_id]
        if tensors:
            tokens = tensors[0].array[0, 0].tolist()               # output_ids
            job.tokens += tokens
            job.text += job.stream.push(tokens)
        if not final_response:
            self.events.put(("text", job))
            return
        job.text += job.stream.finish()
        job.error = error_message
        reason = FinishReason.NOT_FINISHED if error_message else FinishReason(int(tensors[-1].array[0, 0]))
        job.state = {FinishReason.CANCELLED: "stopped", FinishReason.END_ID: "done"}.get(reason, "full length")
        job.state = "failed" if error_message else job.state
        job.is_over = True
        self.ended = time.monotonic()
        self.events.put(("over", job))

    def poll_stop_signals(self) -> set[int]:
        job = self.jobs.get(self.stop_id)
        return {job.id} if job and not job.is_over and len(job.tokens) >= self.stop_after else set()

    def return_statistics(self, record: str) -> None:
        self.statistics.append(json.loads(record))

    def trace_iteration(self, iteration) -> None:
        self.trace.append(iteration)
        for request_id in iteration.generation:
            if not self.jobs[request_id].is_over:
                self.jobs[request_id].state = "writing"
        for request_id, *_ in iteration.context:
            if not self.jobs[request_id].is_over:
                self.jobs[request_id].state = "reading"
        for request_id in iteration.paused:
            job = self.jobs[request_id]
            job.pauses += 1
            if not job.is_over:
                job.state = "PAUSED"
                self.events.put(("paused", job))


def start(client: Client, options: argparse.Namespace, parts: dict, **params) -> GptManager:
    return GptManager(
        options.model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy[options.policy],
        client.get_inference_requests, client.send_response, client.poll_stop_signals, client.return_statistics,
        TrtGptModelOptionalParams(device=options.device, dtype="float32", **params),
        parts=Parts(trace=client.trace_iteration, **parts))


# ---------------------------------------------------------------------- texts on a terminal


def on_one_line(text: str) -> str:
    """Return the text with spaces for line breaks, and U+FFFD for control characters."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)


def columns_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def tail(text: str, columns: int) -> str:
    """Return the longest end of a text that fits into the columns. If the text is cut off, the end begins with dots."""
    if sum(map(columns_of, text)) <= columns:
        return text
    kept, room = "", columns - 3
    for character in reversed(text):
        room -= columns_of(character)
        if room < 0:
            break
        kept = character + kept
    return "..." + kept if columns >= 3 else ""


# ---------------------------------------------------------------------- two displays


class PlainView:
    """Prints the output as plain lines, for files, pipes and simple terminals."""

    LINE = 72

    def __init__(self, client: Client) -> None:
        self.printed = dict.fromkeys(client.jobs, 0)

    def show(self, what: str, job: Job) -> None:
        if what == "arrived":
            print(f"[{job.id}] ({job.choice}) {job.prompt}", flush=True)
        elif what == "paused":
            self._text(job, everything=True)
            print(f"[{job.id}] (paused: no free blocks; it resumes later)", flush=True)
        else:
            self._text(job, everything=job.is_over)
        if what == "over":
            print(f"[{job.id}] ({job.state}{', ' + on_one_line(job.error) if job.error else ''})", flush=True)

    def _text(self, job: Job, everything: bool) -> None:
        text = on_one_line(job.text)
        start, room = self.printed[job.id], self.LINE - len(f"[{job.id}] ")
        while len(text) - start > room or (everything and text[start:].strip()):
            space = text.rfind(" ", start + 1, start + room + 1)
            end = len(text) if len(text) - start <= room else space if space > start else start + room
            print(f"[{job.id}] {text[start:end].strip()}", flush=True)
            start = end
        self.printed[job.id] = start

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


class LiveView:
    """A table that is redrawn in place.

    Each request has a line with the end of its text. The last line has the number of iterations, pauses and blocks.
    """

    SECONDS_BETWEEN_FRAMES = 0.07
    COLOURS = {"to come": "2", "waiting": "2", "reading": "34", "writing": "32", "PAUSED": "1;33", "done": "1",
               "full length": "1", "stopped": "35", "failed": "1;31"}

    def __init__(self, client: Client) -> None:
        self.client = client
        self.drawn_lines = 0
        self.next_frame = 0.0

    def frame(self, columns: int) -> list[str]:
        """Return the lines of the table. Each displays fewer than `columns` characters; colour codes do not count."""
        client, lines = self.client, []
        for job in client.jobs.values():
            head = f"[{job.id}]".rjust(4) + f" {job.state:<11} {len(job.tokens):>3} "
            text = on_one_line(job.prompt + job.text)
            shown = tail(text if job.state != "to come" else "", columns - 1 - len(head))
            colour = self.COLOURS[job.state]
            lines.append(f"\x1b[{colour}m{head}\x1b[0m{shown}")
        foot = f"iteration {len(client.trace.iterations)}  pauses {sum(job.pauses for job in client.jobs.values())}"
        if client.statistics:
            used, blocks = (client.statistics[-1][f"{which} KV cache blocks"] for which in ("Used", "Max"))
            filled = round(used * min(blocks, 30) / blocks)
            foot += f"  blocks {'#' * filled}{'.' * (min(blocks, 30) - filled)} {used}/{blocks}"
        return [*lines, foot[: columns - 1]]

    def draw(self) -> None:
        lines = self.frame(shutil.get_terminal_size().columns)
        up = f"\x1b[{self.drawn_lines}A" if self.drawn_lines else "\x1b[?25l"           # move up, or hide the cursor
        sys.stdout.write(up + "".join(f"\r{line}\x1b[K\n" for line in lines))
        sys.stdout.flush()
        self.drawn_lines = len(lines)
        self.next_frame = time.monotonic() + self.SECONDS_BETWEEN_FRAMES

    def show(self, what: str, job: Job) -> None:
        self.tick()

    def tick(self) -> None:
        if time.monotonic() >= self.next_frame:
            self.draw()

    def close(self) -> None:
        if self.drawn_lines:
            self.draw()
            sys.stdout.write("\x1b[?25h")
            sys.stdout.flush()


def choose_view(client: Client) -> PlainView | LiveView:
    size = shutil.get_terminal_size()
    is_live = (sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
               and size.lines > len(client.jobs) + 2 and size.columns >= 40)
    return (LiveView if is_live else PlainView)(client)


# ---------------------------------------------------------------------- results


def print_texts(jobs: list[Job]) -> None:
    for job in jobs:
        notes = [job.choice, f"{len(job.tokens)} tokens", job.state]
        if job.pauses:
            notes.append(f"paused {job.pauses} time{'s' if job.pauses > 1 else ''}")
        print(f"[{job.id}] {', '.join(notes)}")
        for paragraph in (job.prompt + job.text).splitlines():
            if paragraph.strip():
                print(textwrap.fill(on_one_line(paragraph), 76, initial_indent="    ", subsequent_indent="    "))
        if job.error:
            print(f"    {on_one_line(job.error)}")


def print_summary(client: Client) -> None:
    records = client.statistics
    if not records:
        return
    seconds = max(client.ended - client.started, 1e-9)
    generated = sum(record["Generated Tokens"] for record in records)
    last = records[-1]
    blocks = last["Max KV cache blocks"]
    rows = {
        "iterations": f"{len(records)}",
        "tokens": f"{generated} generated in {seconds:.2f} s, {generated / seconds:,.0f} a second",
        "requests": f"at most {max(record['Active Request Count'] for record in records)} active, "
                    f"at most {max(record['Scheduled Requests'] for record in records)} in one step",
        "pauses": f"{sum(record['Paused Requests'] for record in records)}, after which "
                  f"{last['Recomputed Tokens']} tokens were computed again",
        "KV cache": f"at most {max(record['Used KV cache blocks'] for record in records)} of {blocks} blocks of "
                    f"{last['Tokens per KV cache block']} tokens in use",
        "kernels": last["Kernel Dispatch"],
    }
    for name, value in rows.items():
        print(f"{name:<11}{value}")


def run_alone(jobs: list[Job], options: argparse.Namespace, parts: dict) -> list[tuple[Job, Job]]:
    """Run the jobs again, one at a time, and return pairs (job, repeated job).

    The KV cache has enough blocks for each job at its full length, so no job is paused.
    """
    again = [Job(job.id, 0, job.prompt, job.prompt_ids, job.knobs, job.max_new_tokens, job.end_id,
                 job.tokenizer) for job in jobs]
    client = Client(again)
    blocks = max(job.blocks_at_its_longest for job in jobs)
    with start(client, options, parts, max_batch_size=1,
               kv_cache_config=KvCacheConfig(max_tokens=blocks * TOKENS_PER_BLOCK, tokens_per_block=TOKENS_PER_BLOCK)):
        while not all(job.is_over for job in again):
            client.events.get(timeout=60)
    return list(zip(jobs, again, strict=True))


# ---------------------------------------------------------------------- main program


def make_jobs(tokenizer: Tokenizer, max_new_tokens: int) -> list[Job]:
    end_id = tokenizer.token_to_id("</s>")
    return [Job(number, arrives, prompt, tokenizer.encode(prompt).ids, knobs, max_new_tokens,
                -1 if end_id is None else end_id, tokenizer)
            for number, (arrives, prompt, knobs) in enumerate(PROMPTS, 1)]


def watch(client: Client, manager: GptManager, view: PlainView | LiveView) -> None:
    """Update the display until every request has its final response or the worker has ended."""
    while True:
        try:
            what, job = client.events.get(timeout=0.1)
        except queue.Empty:
            if all(job.is_over for job in client.jobs.values()) or manager.health()["state"] == "STOPPED":
                return
            view.tick()
        else:
            view.show(what, job)


def run(options: argparse.Namespace, parts: dict) -> int:
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    jobs = make_jobs(tokenizer, options.max_new_tokens)
    needed = sum(job.blocks_at_its_longest for job in jobs)
    blocks = max(round(SHARE_OF_THE_NEED * needed), max(job.blocks_at_its_longest for job in jobs))
    print(f"{len(jobs)} prompts, up to {options.max_new_tokens} new tokens each, {options.policy}.\n"
          f"At full length they need {needed} blocks of {TOKENS_PER_BLOCK} tokens; the KV cache has {blocks}.\n"
          f"Request {STOPPED_REQUEST} will be stopped while it runs.\n", flush=True)

    client = Client(jobs, STOPPED_REQUEST, stop_after=max(options.max_new_tokens // 2, 1))
    view = choose_view(client)
    interrupted = False
    try:
        with start(client, options, parts, kv_cache_config=KvCacheConfig(
                max_tokens=blocks * TOKENS_PER_BLOCK, tokens_per_block=TOKENS_PER_BLOCK)) as manager:
            watch(client, manager, view)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        view.close()

    print("\nTexts\n")
    print_texts([job for job in jobs if job.state != "to come"])
    if interrupted:
        print("\ninterrupted: all started requests were answered, and the worker has ended")
        return 130
    print("\nStatistics\n")
    print_summary(client)
    print("\nSchedule: one row per iteration, one column per request\n")
    print(render_text(client.trace.iterations))

    failed = [f"[{job.id}] {job.error or 'no final response'}" for job in jobs if job.error or not job.is_over]
    paused = [job for job in jobs if job.pauses and job.is_over and not job.error]
    print()
    if not paused:
        print("No request had to be paused.")
    for job, alone in run_alone(paused, options, parts) if paused else ():
        is_same = alone.tokens[: len(job.tokens)] == job.tokens and not alone.error
        print(f"[{job.id}] paused {job.pauses}x; run again alone, without a pause: "
              f"{'the same text' if is_same else 'A DIFFERENT TEXT'}")
        if not is_same:
            failed.append(f"[{job.id}] the text with a pause differs from the text without one")
    for problem in failed:
        print(f"quickstart: {problem}", file=sys.stderr)
    return 1 if failed else 0


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def main(argv: list[str] | None = None, parts: dict | None = None) -> int:
    """Run the program and return its exit status.

    parts   fields of Parts, for tests
    """
    parser = argparse.ArgumentParser(description="Ten prompts, one small model, and what in-flight batching does.")
    parser.add_argument("--model", default=str(MODEL), metavar="FOLDER", help="a checkpoint with a tokenizer.json")
    parser.add_argument("--policy", default="MAX_UTILIZATION", type=str.upper, choices=SchedulerPolicy.__members__)
    parser.add_argument("--max-new-tokens", type=at_least_one, default=64, metavar="N")
    parser.add_argument("--device", default=None, help="cpu or cuda; default: cuda if available")
    options = parser.parse_args(argv)
    if not (Path(options.model) / "tokenizer.json").is_file():
        parser.error(f"there is no tokenizer.json in {options.model}; expected a folder of a checkpoint; pass another "
                     "one")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        return run(options, parts or {})
    except BatchManagerError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(reported("quickstart", main))

"""A file of prompts in, a file of texts out; started again after any death it goes on where it was.

    python examples/jsonl_batch.py prompts.jsonl texts.jsonl --model examples/models/austen-4m

Each line of the input is an object with `prompt` (a text, a list of token ids, or a list of messages) and, where
wanted, `id` (a string or an integer; else the number of the line) and options of
`batch_manager.extras.sampling.Sampling`, such as `max_tokens` and `temperature`. A line without `seed` gets one that
its id decides: a second run gives the same texts, in bfloat16 up to rounding (see `--dtype`). Blank lines are skipped.

Each line of the output has the `id` and either `text`, `num_tokens` and `finish_reason`, or `error` (`code`,
`message`). Lines come in the order in which the texts end. A line is written once its text is whole: what a run that
was killed had begun is computed again, and no input line is answered twice. A request that may still be answered, as
at shutdown, is not answered, and the exit status is then 1: run the command again. One run may write an output at a
time. A file that holds anything else is not written to, and the exit status is 2.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, BinaryIO

from batch_manager import BatchManagerError, ManagerClosedError
from batch_manager.extras.llm import LLM

BEGINNING = b'{"id": '             # of each line of an output


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="JSONL of prompts")
    parser.add_argument("output", help="JSONL of texts; lines that are there already are kept")
    parser.add_argument("--model", required=True, help="folder of a checkpoint with a tokenizer")
    parser.add_argument("--in-flight", type=int, default=16, help="prompts that are generated after at a time")
    parser.add_argument("--threads", type=int, default=None, help="processor threads of the engine")
    parser.add_argument("--dtype", default="auto", help="in which the engine computes: float32, bfloat16, ...")
    options = parser.parse_args(arguments)
    must_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: must_end.set())
    signal.signal(signal.SIGINT, lambda *_: must_end.set())
    try:
        output = opened_output(options.input, options.output)
        answered = answered_ids(output)
    except (OSError, ValueError) as error:
        print(f"jsonl_batch: {error}", file=sys.stderr)
        return 2
    with output:
        try:
            llm = LLM(options.model, max_batch_size=options.in_flight, num_threads=options.threads, dtype=options.dtype)
        except BatchManagerError as error:
            print(f"jsonl_batch: {error}", file=sys.stderr)
            return 2
        with llm:
            num_written, num_unanswered = run(llm, options.input, output, answered, options.in_flight, must_end)
    print(f"{len(answered)} lines were answered before, {num_written} now; {num_unanswered} are left", file=sys.stderr)
    return 1 if num_unanswered else 0


def opened_output(input_path: str, output_path: str) -> BinaryIO:
    """The output, for this run alone. Raises OSError where a file cannot be opened, ValueError where it is not to be
    written."""
    with open(input_path, "rb"):
        pass
    output = open(output_path, "a+b")
    if os.path.samefile(input_path, output_path):
        raise ValueError(f"{output_path} is the input; texts go into a file of their own; name another output")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{output_path} is being written by another run; one run at a time may; wait for it") from None
    return output


def answered_ids(output: BinaryIO) -> set[str | int]:
    """The ids in the output. A last line that a killed run left without its end is cut off. Raises ValueError, and
    changes nothing, where the file has lines that are not of this program."""
    output.seek(0)
    ids, whole = set(), 0
    for number, line in enumerate(output, 1):
        try:
            if not line.startswith(BEGINNING[: len(line)]):
                raise ValueError
            if not line.endswith(b"\n"):
                break
            written = json.loads(line)
            if "text" not in written and "error" not in written:
                raise ValueError
            ids.add(written["id"])
        except ValueError:
            raise ValueError(f"line {number} of {output.name} is no line of this program; an output holds such lines "
                             "only; name another output") from None
        whole += len(line)
    output.truncate(whole)
    return ids


def prompts(path: str, answered: set[str | int]) -> Iterator[tuple[str | int, Any, dict[str, Any] | str]]:
    """(id, prompt, options) of each line that is not answered; the options are the text of an error in a bad line."""
    seen: set[str | int] = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            line_id: str | int = number
            prompt, options = None, {}
            try:
                options = parsed(line)
                if not isinstance(options, dict):
                    raise ValueError("it is no object")
                given_id = options.pop("id", number)
                if type(given_id) not in (str, int):
                    raise ValueError("its id is neither a string nor an integer")
                line_id = given_id
                if "prompt" not in options:
                    raise ValueError("it has no prompt")
                prompt, bias = options.pop("prompt"), options.get("logit_bias")
                if isinstance(bias, dict):     # names in JSON are texts
                    options["logit_bias"] = {int(name) if name.isdecimal() else name: bias[name] for name in bias}
                if line_id in seen:
                    print(f"line {number} has the id of an earlier line and is left out", file=sys.stderr)
                    continue
            except (ValueError, RecursionError) as error:
                options = f"line {number}: {error}"
            seen.add(line_id)
            if line_id not in answered:
                yield line_id, prompt, options


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ValueError("it is no JSON") from None


def run(llm: LLM, path: str, output: BinaryIO, answered: set[str | int], in_flight: int,
        must_end: threading.Event) -> tuple[int, int]:
    """(lines written, lines left)."""
    waiting, running, written, unanswered = prompts(path, answered), set(), 0, 0
    with ThreadPoolExecutor(in_flight) as pool:
        while True:
            while len(running) < 2 * in_flight and not must_end.is_set():
                line = next(waiting, None)
                if line is None:
                    break
                running.add(pool.submit(answer, llm, *line))
            if must_end.is_set():
                llm.close()                    # what runs ends with SHUTDOWN: it stays unanswered
            if not running:
                break
            done: set[Future] = wait(running, timeout=0.2, return_when=FIRST_COMPLETED).done
            running -= done
            for future in done:
                result = future.result()
                unanswered += result is None
                if result is not None:
                    output.write(encoded(json.dumps(result, ensure_ascii=False)) + b"\n")
                    written += 1
            output.flush()
        os.fsync(output.fileno())
    return written, unanswered + sum(1 for _ in waiting)


def encoded(text: str) -> bytes:
    """In UTF-8. What that has not, half a surrogate pair, is written as JSON escapes it."""
    return text.encode(errors="backslashreplace")


def answer(llm: LLM, line_id: str | int, prompt: Any, options: dict[str, Any] | str) -> dict[str, Any] | None:
    """A line of the output; None: the request is still unanswered."""
    if isinstance(options, str):
        return {"id": line_id, "error": {"code": "INVALID_REQUEST", "message": options}}
    try:
        completion = llm.generate([prompt], **{"seed": zlib.crc32(encoded(str(line_id))), **options})[0]
    except ManagerClosedError:
        return None
    except (TypeError, ValueError) as error:
        return {"id": line_id, "error": {"code": "INVALID_REQUEST", "message": str(error)}}
    if completion.error is not None:
        if completion.error.is_retryable:
            return None
        return {"id": line_id, "error": {"code": completion.error.code.value, "message": completion.error.message}}
    return {"id": line_id, "text": completion.text, "num_tokens": len(completion.tokens),
            "finish_reason": completion.finish_reason.name.lower()}


if __name__ == "__main__":
    raise SystemExit(main())

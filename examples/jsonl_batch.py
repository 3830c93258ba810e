"""Generate texts for a file of prompts. If a run is killed, the next run continues where it stopped.

    python examples/jsonl_batch.py prompts.jsonl texts.jsonl --model examples/models/austen-4m

Each line of the input is a JSON object with `prompt` (a string, a list of token ids, or a list of messages). Optional
keys are `id` (a string or an integer; default: the line number) and the options of
`batch_manager.extras.sampling.Sampling`, such as `max_tokens` and `temperature`. The default `seed` is derived from
the id, so that a second run gives the same texts (in bfloat16 up to rounding, see `--dtype`). Blank lines are skipped.

Each line of the output has the `id` and either `text`, `num_tokens` and `finish_reason`, or `error` (`code`,
`message`). The program writes a line as soon as its text is complete. After a kill, the next run generates unfinished
texts again. No input line is answered twice, and a line with the id of an earlier line is skipped. If a request fails
with a retryable error, for example at shutdown, the program writes no line for the request. In this case the exit
status is 1, and running the command again continues. Only one run at a time can write an output. The program refuses an
output with lines that it did not write. The exit status is 2 in this case.
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

BEGINNING = b'{"id": '             # start of each output line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="JSONL of prompts")
    parser.add_argument("output", help="JSONL of texts; existing lines are kept")
    parser.add_argument("--model", required=True, help="folder of a checkpoint with a tokenizer")
    parser.add_argument("--in-flight", type=int, default=16, help="number of prompts that run at the same time")
    parser.add_argument("--threads", type=int, default=None, help="processor threads of the engine")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and activations: float32, bfloat16, ...")
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
    """Open and lock the output file.

    Raises OSError if the input or the output cannot be opened, and ValueError if the output is the input or another run
    writes it.
    """
    with open(input_path, "rb"):
        pass
    output = open(output_path, "a+b")
    if os.path.samefile(input_path, output_path):
        raise ValueError(f"{output_path} is also the input; expected another file; name one")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{output_path} is being written by another run; one run at a time; wait for it") from None
    return output


def answered_ids(output: BinaryIO) -> set[str | int]:
    """Return the ids in the output, and cut off an incomplete last line.

    Raises ValueError, without changing the file, if the file has lines that this program did not write.
    """
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
            raise ValueError(f"line {number} of {output.name} was not written by this program; expected an "
                             "output of an earlier run, or a new file; name another output") from None
        whole += len(line)
    output.truncate(whole)
    return ids


def prompts(path: str, answered: set[str | int]) -> Iterator[tuple[str | int, Any, dict[str, Any] | str]]:
    """Yield (id, prompt, options) of each unanswered line. For an invalid line, `options` is an error message."""
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
                    raise ValueError("it is not a JSON object")
                given_id = options.pop("id", number)
                if type(given_id) not in (str, int):
                    raise ValueError("its id is neither a string nor an integer")
                line_id = given_id
                if "prompt" not in options:
                    raise ValueError("it has no prompt")
                prompt, bias = options.pop("prompt"), options.get("logit_bias")
                if isinstance(bias, dict):     # names in JSON are strings
                    options["logit_bias"] = {int(name) if name.isdecimal() else name: bias[name] for name in bias}
                if line_id in seen:
                    print(f"line {number} has the id of an earlier line and is skipped", file=sys.stderr)
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
        raise ValueError("it is not JSON") from None


def run(llm: LLM, path: str, output: BinaryIO, answered: set[str | int], in_flight: int,
        must_end: threading.Event) -> tuple[int, int]:
    """Generate the texts of the unanswered lines, and return (number of lines written, number of lines left).

    answered    ids in the output so far
    in_flight   number of texts that are generated at the same time
    must_end    when set, running requests end without an answer, and their lines are left
    """
    waiting, running, written, unanswered = prompts(path, answered), set(), 0, 0
    with ThreadPoolExecutor(in_flight) as pool:
        while True:
            while len(running) < 2 * in_flight and not must_end.is_set():
                line = next(waiting, None)
                if line is None:
                    break
                running.add(pool.submit(answer, llm, *line))
            if must_end.is_set():
                llm.close()                    # running requests end with SHUTDOWN and stay unanswered
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
    """Encode JSON text as UTF-8. Lone surrogates become JSON escapes."""
    return text.encode(errors="backslashreplace")


def answer(llm: LLM, line_id: str | int, prompt: Any, options: dict[str, Any] | str) -> dict[str, Any] | None:
    """Generate one text, and return its output line as an object, or None if the request has to be tried again."""
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

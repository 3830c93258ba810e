"""Generate texts for a file of prompts. If a run is killed, the next run continues where it stopped.

    python examples/jsonl_batch.py prompts.jsonl texts.jsonl --model examples/models/austen-4m

Each line of the input is a JSON object with `prompt` (a string, a list of token ids, or a list of messages). Optional
keys are `id` (a string or an integer; default: the line number) and the options of
`batch_manager.extras.sampling.Sampling`, such as `max_tokens` and `temperature`. The default `seed` is derived from
the id, so that a second run gives the same texts (in bfloat16 up to rounding, see `--dtype`). Blank lines are skipped.
An input is refused if the id of one line is the line number of a line without a valid id.

Each line of the output has the `id` and either `text`, `num_tokens` and `finish_reason`, or `error` (`code`,
`message`). The program writes a line as soon as its text is complete. After a kill, the next run generates unfinished
texts again. No input line is answered twice, and a line with the id of an earlier line is skipped. If a request fails
with a retryable error, for example at shutdown, the program writes no line for the request. In this case the exit
status is 1, and running the command again continues. Only one run at a time can write an output. The program refuses an
output that is not a regular file, and an output with lines that it did not write. The exit status of every refusal is
2, and a refusal makes no output file. Needs: pip install -e ".[text]"
"""

import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, BinaryIO

from batch_manager import BatchManagerError, ManagerClosedError
from batch_manager.extras.llm import LLM
from batch_manager.extras.repeated_names import unique_names
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

BEGINNING = b'{"id": '             # start of each output line
NAMES_IN_JSON = {dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean",
                 type(None): "null"}


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("input", help="JSONL of prompts")
    parser.add_argument("output", help="JSONL of texts; existing lines are kept")
    parser.add_argument("--model", required=True, help="folder of a checkpoint with a tokenizer")
    parser.add_argument("--in-flight", type=at_least(1), default=16, help="number of prompts that run at the same time")
    parser.add_argument("--threads", type=at_least(1), default=None, help="processor threads of the engine")
    parser.add_argument("--dtype", default="auto", help="dtype of weights and activations: float32, bfloat16, ...")
    options = parser.parse_args(arguments)
    must_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: must_end.set())
    signal.signal(signal.SIGINT, lambda *_: must_end.set())
    is_new = not os.path.exists(options.output)
    try:
        lines = opened_input(options.input)
        check_default_ids(lines)
        output = opened_output(options.input, options.output)
        answered = answered_ids(output)
    except (OSError, ValueError) as error:
        is_refused_by_system = isinstance(error, OSError) and error.filename is not None
        words = f"{error.filename} cannot be opened: {error.strerror}" if is_refused_by_system else error
        print(f"jsonl_batch: {words}", file=sys.stderr)
        return 2
    with lines, output:
        try:
            llm = LLM(options.model, max_batch_size=options.in_flight, num_threads=options.threads, dtype=options.dtype)
        except BatchManagerError as error:
            print(f"jsonl_batch: {error}", file=sys.stderr)
            if is_new and not output.tell():
                os.unlink(os.path.realpath(options.output))
            return 2
        with llm:
            num_written, num_errors, num_unanswered = run(llm, lines, output, answered, options.in_flight, must_end)
    with_errors = f" ({num_errors} with an error)" if num_errors else ""
    print(f"{len(answered)} lines were answered before, {num_written} now{with_errors}; {num_unanswered} are left",
          file=sys.stderr)
    return 1 if num_unanswered else 0


def opened_input(path: str) -> BinaryIO:
    """Open the input file. A pipe is first copied to a temporary file, because the input is read twice."""
    file = open(path, "rb")
    if file.seekable():
        return file
    copy = tempfile.TemporaryFile()
    with file:
        shutil.copyfileobj(file, copy)
    return copy


def opened_output(input_path: str, output_path: str) -> BinaryIO:
    """Open and lock the output file.

    Raises OSError if the output cannot be opened, and ValueError if it is not a regular file, if it is the input, or if
    another run writes it.
    """
    if os.path.exists(output_path):
        if not os.path.isfile(output_path):
            raise ValueError(f"{output_path} is not a regular file; expected a file or a new name; name another output")
        if os.path.samefile(input_path, output_path):
            raise ValueError(f"{output_path} is also the input; expected another file; name one")
    output = open(output_path, "a+b")
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(output.fileno()), os.stat(output_path)):    # removed by a run that was refused
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):
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


def check_default_ids(lines: BinaryIO) -> None:
    """Raise ValueError if the id of one line is the line number of a line without an id.

    Both lines would have the same id in the output, and one of the prompts would not be answered.
    """
    without_id: set[int] = set()
    numbers: dict[int, int] = {}           # integer id -> line that has it
    for number, line_id, _ in numbered_lines(lines):
        if line_id is None:
            without_id.add(number)
        elif isinstance(line_id, int):
            numbers.setdefault(line_id, number)
    for line_id in sorted(without_id & numbers.keys())[:1]:
        raise ValueError(f"line {numbers[line_id]} has the id {line_id}, which is the default id of line {line_id}; "
                         f"expected different ids; give line {line_id} an id")


def prompts(lines: BinaryIO, answered: set[str | int]) -> Iterator[tuple[str | int, Any, dict[str, Any] | str]]:
    """Yield (id, prompt, options) of each unanswered line. For an invalid line, `options` is an error message."""
    seen: set[str | int] = set()
    for number, given_id, options in numbered_lines(lines):
        line_id = number if given_id is None else given_id
        if line_id in seen:
            print(f"line {number} has the id of an earlier line and is skipped", file=sys.stderr)
            continue
        seen.add(line_id)
        if line_id not in answered:
            yield line_id, options.pop("prompt") if isinstance(options, dict) else None, options


def numbered_lines(lines: BinaryIO) -> Iterator[tuple[int, str | int | None, dict[str, Any] | str]]:
    """Yield (line number, id, object without the id) of each line that is not blank, from the start.

    The id is None if the line has no valid one. For an invalid line, the object is an error message.
    """
    lines.seek(0)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        line_id: str | int | None = None
        try:
            fields = parsed(line)
            if not isinstance(fields, dict):
                raise ValueError(f"it is a JSON {NAMES_IN_JSON[type(fields)]}; expected an object")
            if "id" in fields:
                if type(fields["id"]) not in (str, int):
                    raise ValueError("its id is neither a string nor an integer")
                line_id = fields.pop("id")
            if "prompt" not in fields:
                raise ValueError('it has no prompt; expected {"prompt": ...}')
            if type(fields["prompt"]) not in (str, list):
                raise ValueError(f"its prompt is a JSON {NAMES_IN_JSON[type(fields['prompt'])]}; expected a string, a "
                                 "list of token ids, or a list of messages")
            if isinstance(bias := fields.get("logit_bias"), dict):     # names in JSON are strings
                fields["logit_bias"] = {int(name) if name.isdecimal() else name: bias[name] for name in bias}
        except (ValueError, RecursionError) as error:
            fields = f"line {number}: {error}"
        yield number, line_id, fields


def parsed(line: bytes) -> Any:
    try:
        return json.loads(line, object_pairs_hook=unique_names)
    except ValueError as error:
        why = error if type(error) is ValueError else "it is not JSON; expected one JSON object per line"
        raise ValueError(why) from None


def run(llm: LLM, lines: BinaryIO, output: BinaryIO, answered: set[str | int], in_flight: int,
        must_end: threading.Event) -> tuple[int, int, int]:
    """Generate the texts of the unanswered lines.

    Returns (number of lines written, number of these with an error, number of lines left).

    answered    ids in the output so far
    in_flight   number of texts that are generated at the same time
    must_end    when set, running requests end without an answer, and their lines are left
    """
    waiting, running = prompts(lines, answered), set()
    written = errors = unanswered = 0
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
                    errors += "error" in result
            output.flush()
        os.fsync(output.fileno())
    return written, errors, unanswered + sum(1 for _ in waiting)


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
        return {"id": line_id, "error": {"code": completion.error.code.value,
                                         "message": re.sub(r"^request \d+: ", "", completion.error.message)}}
    return {"id": line_id, "text": completion.text, "num_tokens": len(completion.tokens),
            "finish_reason": completion.finish_reason.name.lower()}


if __name__ == "__main__":
    raise SystemExit(main())

"""Read a file of requests, either as lengths one by one, or as a workload with its prompts."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..traffic import Arrival
from .errors import DatasetError, quoted
from .formats import open_records
from .json_files import SESSION_KEYS
from .prompts import BlockIds, PromptMaker
from .records import Record, tokens_of
from .samples import open_source
from .selection import ReadReport, Selection, select

SAMPLING = "greedy, ignore EOS, exactly max_tokens"
BYTES_PER_TOKEN = 40       # in a list of Python integers
SHARE_OF_MEMORY = 0.5      # the rest is for the output and the engine
FILES_OWN = ("seed", "vocab", "mode", "rate", "sampling")    # fields kept from a workload file
COMPUTED = ("seed", "vocab", "mode", "rate", "n", "prompt_tokens", "output_tokens", "prompt_len", "output_len",
            "sampling", "sessions")


def read_arrivals(path: str | os.PathLike, selection: Selection | None = None, *, format: str | None = None,
                  tokenizer: Any = None, output_tokens: int | None = None,
                  report: ReadReport | None = None) -> Iterator[Arrival]:
    """Yield an `Arrival` for each request of a file, in the order of arrival. The first request arrives at 0.

    A trace (CSV, JSON lines) is read line by line, unless the selection sorts it. Other JSON files are read as a whole.
    If the file has prompts and not only their lengths, `Arrival.prefix_ids` is computed from the prompt tokens.

    selection       which requests to replay, and when; None: all, as recorded
    format          one of `FORMATS`; None: detect it
    tokenizer       for texts: a folder of a model, a .gguf file, or a tokenizer
    output_tokens   output length of texts that do not specify a length
    report          receives the counts of kept and changed requests; None: no report

    Raises DatasetError, with the position of the fault, and for a turn of a session, whose prompt has answers that are
    not known. The call itself does not raise this error, even if the file does not exist: the returned iterator raises
    it.
    """
    blocks = BlockIds()
    for record in read_records(path, selection, format=format, tokenizer=tokenizer, output_tokens=output_tokens,
                               report=report):
        if record.session is not None:
            raise DatasetError(os.fspath(path), f"request {record.number} is a turn of a session",
                               "expected requests that do not wait for answers; batch-manager bench and simulate serve "
                               "them", "pass --turns 1, which takes the first turn of each as a request")
        ids = record.prefix_ids if record.prompt is None else blocks.ids(record.prompt)
        yield Arrival(record.time_s or 0.0, record.input_tokens, record.output_tokens, ids)


def read_records(path: str | os.PathLike, selection: Selection | None = None, *, format: str | None = None,
                 tokenizer: Any = None, output_tokens: int | None = None,
                 report: ReadReport | None = None) -> Iterator[Record]:
    """Like `read_arrivals`, but yield a `Record` for each request, with the prompt tokens if the file has tokens.

    Turns of sessions are yielded too.
    """
    report = ReadReport() if report is None else report
    with open_source(path) as source:
        report.format, reader = open_records(source, format, vocab_size=None, tokenizer=tokenizer,
                                             output_tokens=output_tokens)
        yield from select(reader, selection or Selection(), report)


def read_workload(path: str | os.PathLike, selection: Selection | None = None, *, vocab_size: int,
                  format: str | None = None, tokenizer: Any = None, output_tokens: int | None = None,
                  report: ReadReport | None = None) -> dict[str, Any]:
    """Read a file as a workload in the form of `make_workload`.

    If a workload file is read with a selection that changes nothing, the requests are only sorted by arrival, and the
    workload keeps the keys of the file. Otherwise, the key `source` of the workload has the name of the file, its
    format, the counts of the report, and the selection.

    Prompts of traces are random tokens that depend on the seed of the selection. Prompts that share block ids of the
    trace share the tokens of these blocks. A request gets the same prompt if only a part of the file is read. All
    prompts are in memory at once, at about 40 bytes per token.

    vocab_size   vocabulary size of the model

    `read_arrivals` describes the other parameters. Raises DatasetError, with the position of a fault in the
    file.
    """
    if type(vocab_size) is not int or vocab_size < 1:
        raise DatasetError("", f"the size of the vocabulary is {quoted(vocab_size)}", "expected at least 1",
                           "pass the vocabulary size of the model")
    selection = selection or Selection()
    report = ReadReport() if report is None else report
    prompts = PromptMaker(selection.seed, vocab_size)
    with open_source(path) as source:
        report.format, reader = open_records(source, format, vocab_size=vocab_size, tokenizer=tokenizer,
                                             output_tokens=output_tokens)
        as_recorded = selection.keeps_all()
        requests: list[dict[str, Any]] = []
        num_tokens = 0
        for record in select(reader, selection, report):
            place, num_tokens = reader.place(record.position), num_tokens + record.input_tokens
            check_memory(num_tokens, place, "the prompts up to here")
            if report.format == "texts":    # the other readers check tokens themselves
                tokens_of(record.prompt, place, "the prompt", vocab_size)
            requests.append(_request(record, len(requests), prompts, as_recorded=as_recorded))
    workload = summarised(requests, seed=selection.seed, vocab_size=vocab_size)
    if report.format == "workload" and as_recorded:
        own = {name: value for name, value in reader.members.items() if name != "requests"}
        return {**workload, **{name: own[name] for name in FILES_OWN if name in own},
                **{name: value for name, value in own.items() if name not in COMPUTED}, "requests": requests}
    return {**workload, "source": {"file": os.path.basename(os.fspath(path)), **asdict(report),
                                   **asdict(selection)}, "requests": requests}


def summarised(requests: Sequence[dict[str, Any]], *, seed: int, vocab_size: int) -> dict[str, Any]:
    """Return the fields that describe a workload. `rate` is the mean in requests/s; 0: all requests arrive at once."""
    prompt_lengths = np.array([len(request["prompt"]) for request in requests])
    output_lengths = np.array([request["max_tokens"] for request in requests])
    duration = max(request["arrival_s"] for request in requests)
    sessions = {request["session"] for request in requests if "session" in request}
    return {
        "seed": seed,
        "vocab": vocab_size,
        "mode": "online" if duration else "offline",
        "rate": round((len(requests) - 1) / duration, 6) if duration else 0.0,
        "n": len(requests),
        "prompt_tokens": int(prompt_lengths.sum()),
        "output_tokens": int(output_lengths.sum()),
        "prompt_len": length_summary(prompt_lengths),
        "output_len": length_summary(output_lengths),
        "sampling": SAMPLING,
        **({"sessions": len(sessions)} if sessions else {}),
    }


def length_summary(lengths: np.ndarray) -> dict[str, float]:
    return {"median": float(np.median(lengths)), "mean": float(lengths.mean()), "max": int(lengths.max())}


def check_memory(num_tokens: int, place: str, prompts: str) -> None:
    """Raise DatasetError if prompts of `num_tokens` tokens need more than SHARE_OF_MEMORY of the machine's memory.

    place     position in the file, or ""
    prompts   which prompts these are, in words
    """
    needed, memory = num_tokens * BYTES_PER_TOKEN, memory_bytes()
    if needed > memory * SHARE_OF_MEMORY:
        raise DatasetError(place, f"{prompts} have {num_tokens} tokens, about {needed / 2**30:.0f} GiB",
                           f"expected at most half of the {memory / 2**30:.0f} GiB of memory of this machine",
                           "take fewer requests, or truncate their prompts")


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _request(record: Record, number: int, prompts: PromptMaker, *, as_recorded: bool) -> dict[str, Any]:
    if record.own is not None and as_recorded:
        return record.own
    own = {name: value for name, value in (record.own or {"id": number}).items() if name not in SESSION_KEYS}
    turn = {}
    if record.session is not None:
        turn = {"session": record.session} | ({"think_s": record.think_s} if record.think_s else {})
    return {**own, **turn, "arrival_s": record.time_s, "max_tokens": record.output_tokens,
            "prompt": prompts.prompt(record) if record.prompt is None else record.prompt}

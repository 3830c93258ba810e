"""Detect the format of a file and choose its reader."""

import csv
from typing import Any

import orjson

from .csv_traces import AZURE, BURSTGPT, PLAIN, CsvRecords, header_of
from .errors import DatasetError, named_members, quoted
from .json_document import JsonDocument
from .json_files import LENGTHS, TOKENS, SampleRecords, WorkloadRecords
from .json_lines import JsonLines
from .mooncake import KEYS as MOONCAKE_KEYS
from .mooncake import MooncakeRecords
from .records import RecordReader
from .source import NOT_CUT, Source
from .texts import ARRAY_NAMES, BATCH_KEYS, PROMPT_KEYS, TextRecords

FORMATS = {
    "workload": "JSON of batch-manager workload: {..., requests: [{id, arrival_s, max_tokens, prompt}]}",
    "dataset": "JSON, for gptManagerBenchmark: {metadata, samples: [{input_ids, output_len, delay}]}, an array, lines",
    "azure": "CSV of Azure's LLM inference traces: TIMESTAMP,ContextTokens,GeneratedTokens",
    "mooncake": "JSON lines of Mooncake's traces: {timestamp (ms), input_length, output_length, hash_ids}",
    "burstgpt": "CSV of BurstGPT: Timestamp (s), Request tokens, Response tokens among its columns",
    "csv": "CSV with the columns arrival_s, input_tokens, output_tokens",
    "texts": "JSON or JSON lines with prompt, text, messages, or instruction and input; ShareGPT's conversations; "
             "OpenAI's batch files: {custom_id, method, url, body}; needs a tokenizer",
}
CSV_COLUMNS = {"azure": AZURE, "burstgpt": BURSTGPT, "csv": PLAIN}
UNKNOWN = "set the format with --format"


def open_records(source: Source, format: str | None, *, vocab_size: int | None, tokenizer: Any,
                 output_tokens: int | None) -> tuple[str, RecordReader]:
    """Return the name of the format of `source`, and a reader of its records.

    format   name of the format; None: detect it

    Raises DatasetError for an unknown format, and for a fault in the part of the file that was read.
    """
    if format is not None and format not in FORMATS:
        raise DatasetError("", f"the format is {quoted(format)}", f"expected one of {', '.join(FORMATS)}",
                           "leave it out to detect the format")
    line = source.first_line
    if not line:
        raise DatasetError(source.name, "the file is empty", "expected at least one request", NOT_CUT)
    if format is None and line[:1] not in (b"{", b"[", b"/"):
        format = _csv_format(source, line)
    if format in CSV_COLUMNS:
        return format, CsvRecords(source, CSV_COLUMNS[format])
    if format == "mooncake":
        return format, MooncakeRecords(source)
    row = _object_of(line)
    if format in (None, "dataset") and row is not None and TOKENS in row:
        return "dataset", SampleRecords(JsonLines(source), vocab_size)
    if format in (None, "texts") and row is not None:
        if format is None and all(key in row for key in MOONCAKE_KEYS):
            return "mooncake", MooncakeRecords(source)
        is_text = any(key in row for key in PROMPT_KEYS) or all(key in row for key in BATCH_KEYS)
        if is_text or (format and not any(name in row for name in ARRAY_NAMES)):
            return "texts", TextRecords(JsonLines(source), tokenizer, output_tokens)
        if "timestamp" in row and "requests" not in row:    # a field is missing; the reader reports its name
            return "mooncake", MooncakeRecords(source)
    document = JsonDocument(source.name, source.text())
    format = format or _document_format(document)
    if format == "workload":
        return format, WorkloadRecords(document, vocab_size)
    if format == "dataset":
        return format, SampleRecords(document, vocab_size)
    return format, TextRecords(document, tokenizer, output_tokens)


def refuse_options_of_texts(format: str, given: dict[str, Any]) -> None:
    """Raise DatasetError if one of the options `given` (name -> value or None) was given for a file without texts."""
    for option, value in given.items() if format != "texts" else ():
        if value is not None:
            kind = "a workload with token ids" if format in ("workload", "dataset") else f"a trace ({format})"
            raise DatasetError("", f"{option} is {value}", f"it has no effect on {kind}", f"leave out {option}")


def _csv_format(source: Source, line: bytes) -> str:
    try:
        names = header_of(line.decode())
    except (UnicodeDecodeError, csv.Error):
        names = []
    for name, columns in CSV_COLUMNS.items():
        if set(columns.names) <= set(names):
            return name
    close = [name for name, columns in CSV_COLUMNS.items() if set(columns.names) & set(names)]
    if close:
        return close[0]    # the reader of this format reports which column is missing
    raise DatasetError(f"{source.name}:1", f"the first line is {quoted(line[:200].decode(errors='replace'))}",
                       f"expected the first line of one of the formats {', '.join(FORMATS)}", UNKNOWN)


def _object_of(line: bytes) -> dict[str, Any] | None:
    """Parse the line as a JSON object. Returns None if it is not a complete object."""
    if not (line.startswith(b"{") and line.endswith(b"}")):
        return None
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return row if type(row) is dict else None


def _document_format(document: JsonDocument) -> str:
    """Return the format that the first item of the document's array has. Raises DatasetError for an unknown format."""
    first = next(document.items(ARRAY_NAMES), None)
    if first is None:
        raise DatasetError(document.place(0), "the array is empty", "expected at least one request", NOT_CUT)
    item = first[1]
    keys = set(item) if type(item) is dict else set()
    document.members.clear()
    if "max_tokens" in keys and type(item.get("prompt")) is list:
        return "workload"
    if keys & {TOKENS, *LENGTHS} and not keys & set(PROMPT_KEYS):
        return "dataset"
    if keys & set(PROMPT_KEYS) or keys >= set(BATCH_KEYS):
        return "texts"
    raise DatasetError(document.place(0), f"the first item has {named_members(keys)}",
                       f"expected an item in one of the formats {', '.join(FORMATS)}", UNKNOWN)

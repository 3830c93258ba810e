"""Texts in JSON or JSON lines, encoded with a tokenizer: prompts, conversations, instructions."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...errors import BatchManagerError, ConfigError
from .errors import FIX_RECORD, DatasetError, quoted
from .json_document import JsonDocument
from .json_lines import JsonLines
from .records import Record, note_unread, seconds, tokens_of, whole_number

PROMPT_KEYS = ("prompt", "text", "messages", "instruction", "conversations")
OUTPUT_KEYS = ("output", "completion", "response")
LENGTH_KEYS = ("max_tokens", "max_completion_tokens", "output_tokens", "output_len")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
         "bard": "assistant", "assistant": "assistant", "model": "assistant", "system": "system"}
BATCH_KEYS = ("custom_id", "body")
BATCH_URLS = ("/v1/chat/completions", "/v1/completions")
ARRAY_NAMES = ("data", "requests", "samples", "records")
KNOWN = frozenset((*PROMPT_KEYS, *OUTPUT_KEYS, *LENGTH_KEYS, "input", "arrival_s", "id"))


class TextRecords:
    """Reads and encodes the prompts of a file of texts. Implements `RecordReader`.

    A record has the prompt in one of these forms:

        prompt or text          the prompt
        messages                a conversation, which the tokenizer's chat template formats. If the last of several
                                messages has the role assistant, it is the output
        instruction, input      the instruction, a line end, and the input (optional)

        conversations           ShareGPT: a list of {from, value}. Each turn of the human that is answered is a turn of
                                a session, after a system text if there is one, encoded as plain text; the answer is the
                                output. Conversations without an answered turn are left out

    A line of OpenAI's batch files has custom_id, method, url and body; the body is a record as above. `method` is POST
    and `url` that of completions or chat completions.

    The output length is max_tokens, max_completion_tokens, output_tokens or output_len. Without these keys, the output
    length is the number of tokens of the output. The output is the last message as described above, or else the value
    of output, completion or response. Without an output, the output length is the argument `output_tokens` of this
    class.

    If a record has several of these keys, the first in the order above is read, and the others are listed as unread.

    arrival_s is in seconds from the start. Either all records have arrival_s or none.

    tokenizer   the folder of a model or its tokenizer.json, a .gguf file, a `tokenizers.Tokenizer` or a tokenizer of
                transformers
    """

    def __init__(self, texts: JsonLines | JsonDocument, tokenizer: Any, output_tokens: int | None) -> None:
        self.members = texts.members
        self.place = texts.place
        self.is_whole = isinstance(texts, JsonDocument)
        self.unread: dict[str, int] = {}
        self._texts = texts
        self._output_tokens = output_tokens
        if tokenizer is None:
            raise DatasetError(texts.place(1 if not self.is_whole else 0), "the records are texts",
                               "expected a tokenizer for them", "pass a model's folder with --tokenizer")
        self._encoder = _Encoder(tokenizer)

    def __iter__(self) -> Iterator[Record]:
        has_times = None
        for number, (position, record) in enumerate(self._texts.items(ARRAY_NAMES)):
            place, name = self.place(position), f"record {number}"
            prefix = ""
            if type(record) is dict and all(key in record for key in BATCH_KEYS):
                record, name, prefix = self._body(record, place, name), f"{name}.body", "body."
            if type(record) is not dict or not any(key in record for key in PROMPT_KEYS):
                fact = f"is {quoted(record)}"
                if type(record) is dict:
                    fact = f"has the keys {quoted(', '.join(record))}" if record else "is empty"
                raise DatasetError(place, f"{name} {fact}", f"expected an object with one of {', '.join(PROMPT_KEYS)}",
                                   FIX_RECORD)
            note_unread(self.unread, record, _fields_read(record), prefix)
            if has_times is None:
                has_times = "arrival_s" in record
            elif has_times != ("arrival_s" in record):
                raise DatasetError(place, f"{name} has {'an' if 'arrival_s' in record else 'no'} arrival_s",
                                   "expected it in all records or in none")
            time_s = seconds(record["arrival_s"], place, f"{name}.arrival_s") if has_times else None
            try:
                if _first_of(PROMPT_KEYS, record) == "conversations":
                    yield from self._turns(record, place, name, Record(position, number, time_s, 0, 0, prompt=[]))
                    continue
                prompt, output = self._prompt(record, place, name)
                length = self._output_length(record, output, place, name)
            except BatchManagerError as error:
                raise DatasetError(place, f"{name}: {error.fact}", error.expectation or "expected text",
                                   error.fix or "") from None
            if not prompt:
                raise DatasetError(place, f"{name} has a prompt without tokens", "expected at least one",
                                   FIX_RECORD)
            yield Record(position, number, time_s, len(prompt), length, prompt=prompt)

    def _body(self, line: dict[str, Any], place: str, name: str) -> Any:
        """Return the body of a line of a batch file."""
        note_unread(self.unread, line, (*BATCH_KEYS, "method", "url"))
        for key, expected in (("method", ("POST",)), ("url", BATCH_URLS)):
            if line.get(key) not in expected:
                raise DatasetError(place, f"{name}.{key} is {quoted(line.get(key))}",
                                   f"expected {' or '.join(expected)}", FIX_RECORD)
        return line["body"]

    def _turns(self, record: dict[str, Any], place: str, name: str, empty: Record) -> Iterator[Record]:
        """Yield a record for each answered turn of a ShareGPT conversation, or the record `empty` without one."""
        exchanges = list(self._exchanges(record["conversations"], place, f"{name}.conversations"))
        for turn, (text, answer) in enumerate(exchanges):
            prompt = self._encoder.encode(text, add_special_tokens=not turn)
            yield replace(empty, input_tokens=len(prompt), prompt=prompt, session=empty.number,
                          output_tokens=self._output_length(record, answer, place, name))
        if not exchanges:
            yield empty

    def _exchanges(self, turns: Any, place: str, name: str) -> Iterator[tuple[str, str]]:
        """Yield the texts of each answered turn of a ShareGPT conversation and its answer."""
        if type(turns) is not list or not all(type(turn) is dict for turn in turns):
            raise DatasetError(place, f"{name} is {quoted(turns)}", "expected a list of objects with from and value",
                               FIX_RECORD)
        system, before = "", None
        for number, turn in enumerate(turns):
            place_of = f"{name}[{number}]"
            speaker, content = _first_of(("from", "role"), turn), _first_of(("value", "content"), turn)
            note_unread(self.unread, turn, (speaker, content), "conversations.")
            said_by = turn.get(speaker)
            role = ROLES.get(said_by if type(said_by) is str else "")
            if role is None:
                raise DatasetError(place, f"{place_of}.{speaker} is {quoted(said_by)}",
                                   f"expected one of {', '.join(ROLES)}", FIX_RECORD)
            text = _text(turn.get(content), place, f"{place_of}.{content}")
            if role == "system":
                system = f"{text}\n"
            elif role == "user":
                before = text
            elif before:
                yield system + before, text
                system, before = "", None

    def _prompt(self, record: dict[str, Any], place: str, name: str) -> tuple[list[int], str | None]:
        """Return the prompt tokens and the text of the output, or None for the text if the record has no output."""
        output = next((_text(record[key], place, f"{name}.{key}") for key in OUTPUT_KEYS
                       if record.get(key) is not None), None)
        for key in ("prompt", "text"):
            if key in record:
                return self._encode(record[key], place, f"{name}.{key}"), output
        if "messages" in record:
            messages = record["messages"]
            if (type(messages) is not list or not messages
                    or not all(type(one) is dict and type(one.get("role")) is str for one in messages)):
                raise DatasetError(place, f"{name}.messages is {quoted(messages)}",
                                   "expected a list of objects with role and content")
            if _is_answered(messages):
                output = _text(messages[-1].get("content"), place, f"{name}.messages[-1].content")
                messages = messages[:-1]
            return self._encoder.encode_chat(messages), output
        texts = [_text(record[key], place, f"{name}.{key}") for key in ("instruction", "input")
                 if record.get(key) is not None]
        return self._encoder.encode("\n".join(text for text in texts if text)), output

    def _encode(self, prompt: Any, place: str, name: str) -> list[int]:
        """Return the tokens of a text, or a list of tokens as it is."""
        if type(prompt) is list:
            return tokens_of(prompt, place, name, None)
        return self._encoder.encode(_text(prompt, place, name))

    def _output_length(self, record: dict[str, Any], output: str | None, place: str, name: str) -> int:
        key = _first_of(LENGTH_KEYS, record)
        if key in record:
            return whole_number(record[key], place, f"{name}.{key}", 1)
        if output is not None:
            return max(1, len(self._encoder.encode(output, add_special_tokens=False)))
        if self._output_tokens is None:
            raise DatasetError(place, f"{name} has no output length",
                               f"expected one of {', '.join((*LENGTH_KEYS, *OUTPUT_KEYS))}",
                               "pass --output-tokens as the default")
        return self._output_tokens


def _first_of(keys: tuple[str, ...], record: dict[str, Any]) -> str:
    """Return the first of `keys` that the record has, which is the one that is read; the first key if it has none."""
    return next((key for key in keys if key in record), keys[0])


def _is_answered(messages: Any) -> bool:
    return (type(messages) is list and len(messages) > 1 and type(messages[-1]) is dict
            and messages[-1].get("role") == "assistant")


def _fields_read(record: dict[str, Any]) -> set[str]:
    """Return the fields of a record that are read, and those without a value. Of competing fields, one is read."""
    prompt, length = _first_of(PROMPT_KEYS, record), _first_of(LENGTH_KEYS, record)
    read = {"arrival_s", "id", prompt, length} | {key for key in KNOWN if record.get(key) is None}
    if prompt == "instruction":
        read.add("input")
    has_answer = prompt == "conversations" or (prompt == "messages" and _is_answered(record[prompt]))
    if length not in record and not has_answer:
        read.add(next((key for key in OUTPUT_KEYS if record.get(key) is not None), OUTPUT_KEYS[0]))
    return read


def _text(value: Any, place: str, name: str) -> str:
    if type(value) is not str:
        raise DatasetError(place, f"{name} is {quoted(value)}", "expected a string",
                           FIX_RECORD)
    return value


class _Encoder:
    """A tokenizer of any kind. The constructor imports the libraries that the tokenizer needs."""

    def __init__(self, tokenizer: Any) -> None:
        from ...extras.tokenizer import encode, load_tokenizer

        self._encode = encode
        self._folder = None
        if isinstance(tokenizer, str | os.PathLike):
            path = os.fspath(tokenizer)
            self._folder = os.path.dirname(path) or "." if os.path.basename(path) == "tokenizer.json" else path
            try:
                tokenizer = load_tokenizer(self._folder)
            except BatchManagerError as error:
                raise DatasetError("", f"--tokenizer: {error.fact}", error.expectation, error.fix) from None
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        if self._folder is not None:
            from ...extras.chat_template import chat_prompt

            text = chat_prompt(self._folder, messages)
        elif hasattr(self._tokenizer, "apply_chat_template"):
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            raise ConfigError("the tokenizer has no chat template", "conversations need one",
                              "pass a model's folder instead of a tokenizer")
        return self.encode(text, add_special_tokens=False)

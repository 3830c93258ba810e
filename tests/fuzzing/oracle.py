"""Decides from the documents alone whether a request must be run, and which response it must get.

The oracle imports none of the engine's code that reads, checks or admits requests. Its rules are those of the table of
request tensors and of the promises in the README. The ranges of values are those of TensorRT-LLM.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from .engines import Engine
from .items import BROKEN, NOBODY, STRANGER, Draw, fail_later, leave_alone
from .values import BOOL, FLOAT, INT, LARGE, PYTHON, STRANGE, Value

INT32, UINT64, FLOAT32 = 2**31 - 1, 2**64 - 1, 3.4028234663852886e38
FLAGS = ("return_log_probs", "return_context_logits", "return_generation_logits", "streaming",
         "return_perf_metrics", "raw_log_probs")
# name -> (type, lowest value, highest value). 5e-324 stands for "above 0", and None for the last token id.
SCALARS: dict[str, tuple[type, float, float]] = {
    "request_output_len": (int, 1, INT32), "pad_id": (int, -1, None),
    "runtime_top_p_reset_ids": (int, -1, None), "beam_width": (int, 1, INT32), "runtime_top_k": (int, 0, 1024),
    "early_stopping": (int, -INT32 - 1, INT32), "no_repeat_ngram_size": (int, 0, INT32),
    "prompt_ignore_length": (int, 0, INT32), "min_length": (int, 0, INT32),
    "return_top_log_probs": (int, 0, 20), "random_seed": (int, -(2**63), UINT64),
    "prompt_vocab_size": (int, 1, INT32), "lora_task_id": (int, 0, UINT64),
    "temperature": (float, 0, FLOAT32), "runtime_top_p": (float, 0, 1), "runtime_top_p_decay": (float, 5e-324, 1),
    "runtime_top_p_min": (float, 5e-324, 1), "runtime_min_p": (float, 0, 1), "len_penalty": (float, 0, FLOAT32),
    "beam_search_diversity_rate": (float, 0, FLOAT32), "repetition_penalty": (float, 5e-324, FLOAT32),
    "presence_penalty": (float, -FLOAT32, FLOAT32), "frequency_penalty": (float, -FLOAT32, FLOAT32),
}
ROWS = ("input_ids", "embedding_bias", "draft_input_ids", "input_token_extra_ids")
WORDS = ("bad_words_list", "stop_words_list")
TABLES = ("prompt_embedding_table", "lora_weights", "lora_config", "draft_logits")
KNOWN = {*FLAGS, *SCALARS, *ROWS, *WORDS, *TABLES, "input_lengths", "end_id"}
WRONG = object()


@dataclass(slots=True)
class Verdict:
    """How the engine must treat a request.

    codes     error codes that its refusal may have; empty if the request must run
    faults    names of the tensors and options that are wrong
    is_clear  False if the request is so near a limit that both running and refusing it are right

    The fields from `prompt` on concern requests that run.
    """

    request_id: int | None = None
    must_not_build: bool = False
    codes: set[str] = field(default_factory=set)
    faults: set[str] = field(default_factory=set)
    is_clear: bool = True
    prompt: list[int] = field(default_factory=list)
    count: int = 0
    end_id: int | list[int] = -1
    seed: int | None = None
    beam_width: int = 1
    is_streaming: bool = False
    fails_later: bool = False
    may_expire: bool = False


def judge(draw: Draw, engine: Engine, now: float = 0.0) -> Verdict:
    """Return the verdict on an item that is alone in the engine.

    `answers.check_items` judges duplicates and full queues.
    """
    verdict = Verdict()
    if draw.kind is NOBODY:
        return verdict
    if not _is_integer(draw.request_id) or not 0 <= _plain_int(draw.request_id) <= UINT64:
        verdict.must_not_build = True
    verdict.request_id = None if verdict.must_not_build else _plain_int(draw.request_id)
    if not draw.tensors.keys() <= KNOWN:
        verdict.must_not_build = True
    if draw.kind is STRANGER or (draw.kind is BROKEN and not draw.changes_its_id):
        verdict.codes, verdict.faults = {"INVALID_REQUEST"}, {"request"}
        return verdict
    if verdict.must_not_build:
        return verdict
    _Reading(draw, engine, verdict, now).judge()
    if draw.changes_its_id:
        verdict.codes |= {"INVALID_REQUEST"}
        verdict.faults.add("request_id")
    return verdict


class _Reading:
    """Judges one request. It checks every tensor and option, and reports all faults."""

    def __init__(self, draw: Draw, engine: Engine, verdict: Verdict, now: float) -> None:
        self.engine, self.verdict, self.tensors, self.options, self.now = (
            engine, verdict, draw.tensors, draw.options, now)
        self.scalars: dict[str, Any] = {}
        self.num_bytes = 0.0

    def wrong(self, *names: str) -> None:
        self.verdict.faults.update(names)

    def judge(self) -> None:
        verdict, engine = self.verdict, self.engine
        for name in FLAGS:
            self.scalars[name] = bool(self.flag(name, self.tensors.get(name)))
        for name, (kind, low, high) in SCALARS.items():
            if name in self.tensors:
                high = engine.vocab_size - 1 if high is None else high
                self.scalars[name] = self.number(name, self.tensors[name], kind, low, high)
        streams = self.flag("is_streaming", self.options.get("is_streaming"))
        verdict.is_streaming = bool(streams) or self.scalars["streaming"]
        self.other_options()
        self.prompt()
        self.sampling()
        self.tables()
        for name in WORDS:
            if name in self.tensors and not self.are_words(self.tensors[name]):
                self.wrong(name)
        if not verdict.faults:
            self.sizes()
        if verdict.faults:
            verdict.codes = {"INVALID_REQUEST"}

    # one value

    def single(self, value: Value) -> Any:
        """Return the (kind, number) of a scalar, or WRONG if the value is no scalar."""
        if value.kind in (STRANGE, LARGE):
            return WRONG
        plain = value.plain
        for _ in range(2):
            if isinstance(plain, list):
                if len(plain) != 1:
                    return WRONG
                plain = plain[0]
        if isinstance(plain, list):
            return WRONG
        return _kind(value, plain), plain

    def flag(self, name: str, value: Value | None) -> bool:
        if value is None:
            return False
        found = self.single(value)
        if found is WRONG or found[0] is FLOAT or found[1] not in (0, 1):
            self.wrong(name)
            return False
        return bool(found[1])

    def number(self, name: str, value: Value, kind: type, low: float, high: float) -> Any:
        found = self.single(value)
        if found is WRONG or found[0] is BOOL or (kind is int and found[0] is FLOAT) or not low <= found[1] <= high:
            self.wrong(name)
            return None
        return found[1]

    def row(self, name: str, kind: type) -> list | None:
        """Return the numbers of a tensor of `ROWS`, or None if the tensor is wrong."""
        value = self.tensors[name]
        plain = value.plain
        if isinstance(plain, list) and len(plain) == 1 and isinstance(plain[0], list):
            plain = plain[0]
        if value.kind in (STRANGE, LARGE) or not isinstance(plain, list) or not self.are_numbers(value, plain, kind):
            self.wrong(name)
            return None
        return plain

    def are_numbers(self, value: Value, numbers: list, kind: type) -> bool:
        allowed = (INT,) if kind is int else (INT, FLOAT)
        if value.kind is PYTHON:
            return set(map(type, numbers)) <= ({int} if kind is int else {int, float})
        return value.kind in allowed and not (numbers and isinstance(numbers[0], list))

    def rows(self, name: str, kind: type) -> tuple[int, int, list] | None:
        """Return the (rows, columns, numbers) of a tensor of `TABLES`, or None if the tensor is wrong."""
        value = self.tensors[name]
        if value.kind is LARGE:
            return self.large(name, value, kind)
        plain = value.plain
        if isinstance(plain, list) and len(plain) == 1 and isinstance(plain[0], list) and plain[0] and isinstance(
                plain[0][0], list):
            plain = plain[0]
        good = (value.kind is not STRANGE and isinstance(plain, list)
                and all(isinstance(row, list) and len(row) == len(plain[0]) for row in plain))
        if not good or not all(self.are_numbers(value, row, kind) for row in plain):
            self.wrong(name)
            return None
        return len(plain), len(plain[0]) if plain else 0, [number for row in plain for number in row]

    def large(self, name: str, value: Value, kind: type) -> tuple[int, int, list] | None:
        rows, columns, number, is_list, letter = value.plain
        size = rows * columns
        if kind is int and letter in "efd":
            self.wrong(name)
        if is_list:
            self.num_bytes += 8 * size + 64 * rows
        else:
            self.num_bytes += size * max({"e": 2, "f": 4, "d": 8}.get(letter) or 1 << "bBhHiIqQ".index(letter) // 2,
                                         8 if kind is int else 4)
        return rows, columns, [number]

    # groups of tensors and options

    def other_options(self) -> None:
        options, verdict = self.options, self.verdict
        if "priority" in options:
            self.number("priority", options["priority"], float, 0, 1)
        if "deadline_s" in options:
            seconds = self.number("deadline_s", options["deadline_s"], float, 5e-324, FLOAT32)
            verdict.may_expire = seconds is not None and self.now + float(seconds) <= self.now
        salt = options.get("cache_salt")
        if type(salt) not in (str, bytes, type(None)) or len(salt or "") > 1024:
            self.wrong("cache_salt")
        processor = options.get("logits_post_processor")
        is_batched = type(processor) is str and processor == "batched" and self.engine.has_batched_processor
        if not (is_batched or any(processor is good for good in (None, leave_alone, fail_later))):
            self.wrong("logits_post_processor")
        verdict.fails_later = processor is fail_later

    def prompt(self) -> None:
        engine, verdict = self.engine, self.verdict
        for name in ("input_ids", "request_output_len"):
            if name not in self.tensors:
                self.wrong(name)
        if "input_ids" in self.tensors:
            virtual = self.scalars.get("prompt_vocab_size") or 0
            ids = self.row("input_ids", int)
            if ids is not None and not (0 < len(ids) < engine.max_seq_len
                                        and all(0 <= token < engine.vocab_size + virtual for token in ids)):
                self.wrong("input_ids")
            verdict.prompt = list(ids or ())
        if "input_token_extra_ids" in self.tensors:
            extra = self.row("input_token_extra_ids", int)
            if extra is not None and not (len(extra) == len(verdict.prompt) and all(0 <= one < 2**63 for one in extra)):
                self.wrong("input_token_extra_ids", "input_ids")
        if "draft_input_ids" in self.tensors:
            ids = self.row("draft_input_ids", int)
            if ids != []:                                          # draft tokens are not supported
                self.wrong("draft_input_ids")

    def sampling(self) -> None:
        engine, scalars, verdict = self.engine, self.scalars, self.verdict
        top_k, top_p = scalars.get("runtime_top_k", 0), scalars.get("runtime_top_p", 0)
        temperature, beams = scalars.get("temperature", 1), scalars.get("beam_width", 1) or 1
        if top_k and top_k > engine.vocab_size:
            self.wrong("runtime_top_k")
        if beams > engine.max_beam_width or (beams > engine.max_num_tokens and not engine.is_static):
            self.wrong("beam_width")
        if beams > 1 and verdict.is_streaming:
            self.wrong("beam_width", "Streaming", "streaming")
        for name in ("return_top_log_probs", "raw_log_probs"):
            if beams > 1 and scalars.get(name):
                self.wrong(name)
        for name in ("return_context_logits", "return_generation_logits"):
            if scalars[name] and not engine.gathers_logits:
                self.wrong(name)
        verdict.beam_width = beams
        if "end_id" in self.tensors:
            self.end_ids()
        is_greedy = temperature == 0 or top_k == 1 or (top_k == 0 and top_p == 0)
        seed = scalars.get("random_seed", 0)
        verdict.seed = None if is_greedy or seed is None else seed % 2**64

    def end_ids(self) -> None:
        """Check `end_id`: one integer, which may be -1, or a row of 1 to 8 tokens."""
        value, found = self.tensors["end_id"], self.single(self.tensors["end_id"])
        if found is not WRONG:
            number = self.number("end_id", value, int, -1, self.engine.vocab_size - 1)
            self.verdict.end_id = -1 if number is None else number
            return
        ids = self.row("end_id", int)
        if ids is None or not 1 <= len(ids) <= 8 or not all(0 <= token < self.engine.vocab_size for token in ids):
            self.wrong("end_id")
        else:
            self.verdict.end_id = ids

    def tables(self) -> None:
        engine, scalars, tensors = self.engine, self.scalars, self.tensors
        if scalars.get("lora_task_id") is not None:
            self.wrong("lora_task_id")
        if "embedding_bias" in tensors:
            bias = self.row("embedding_bias", float)
            if bias is not None and (len(bias) != engine.vocab_size or not all(map(_is_float32, bias))
                                     or (engine.is_static and any(map(_counts, bias)))):
                self.wrong("embedding_bias")
        shapes = {name: self.rows(name, int if name == "lora_config" else float) for name in TABLES if name in tensors}
        for name, shape in shapes.items():
            if shape is not None and not all(map(_is_float32, shape[2])):
                self.wrong(name)
        if ("prompt_embedding_table" in tensors) != ("prompt_vocab_size" in tensors):
            self.wrong("prompt_embedding_table", "prompt_vocab_size")
        table = shapes.get("prompt_embedding_table")
        if table is not None and (not engine.hidden_size or table[0] != scalars.get("prompt_vocab_size")
                                  or table[1] != engine.hidden_size):
            self.wrong("prompt_embedding_table", "prompt_vocab_size")
        if {"lora_weights", "lora_config"} & tensors.keys():       # known names, but LoRA is not supported
            self.wrong("lora_weights", "lora_config")
        if "draft_logits" in tensors:
            self.wrong("draft_logits", "draft_input_ids")

    def are_words(self, value: Value) -> bool:
        """Whether the value is a valid list of words.

        A list of lists has one word in each list. An array of shape [2, m] or [1, 2, m], or nested lists of shape
        [1, 2, m], is packed: tokens in the first row, ends of the words in the second.
        """
        plain, vocab = value.plain, self.engine.vocab_size
        if value.kind in (STRANGE, LARGE) or not isinstance(plain, list):
            return False
        is_packed = value.kind is not PYTHON
        if len(plain) == 1 and isinstance(plain[0], list) and plain[0] and isinstance(plain[0][0], list):
            plain, is_packed = plain[0], True
        if not all(isinstance(row, list) and self.are_numbers(value, row, int) for row in plain):
            return False
        if not is_packed:
            return all(row and all(0 <= token < vocab for token in row) for row in plain)
        if len(plain) != 2 or len(plain[0]) != len(plain[1]):
            return False
        tokens, ends = plain
        if len(ends) == 1 and ends[0] <= 0:
            return min(tokens + ends) >= -(2**63) and max(tokens + ends) < 2**63
        used = [end for end in ends if end != -1]
        last = used[-1] if used else 0
        return (ends == used + [-1] * (len(ends) - len(used))
                and all(before < after for before, after in zip([0, *used], used)) and last <= len(tokens)
                and all(0 <= token < vocab for token in tokens[:last])
                and all(-(2**63) <= token < 2**63 for token in tokens))

    def sizes(self) -> None:
        """Check that the request is small enough for the engine: prompt, bytes and KV cache blocks."""
        engine, verdict = self.engine, self.verdict
        length = len(verdict.prompt)
        verdict.count = min(self.scalars["request_output_len"], engine.max_seq_len - length)
        if not engine.enable_chunked_context and not engine.is_static and length > engine.max_num_tokens:
            self.wrong("max_num_tokens")
        if self.num_bytes > engine.max_request_bytes:
            self.wrong("bytes")
        verdict.is_clear = not 0.97 < self.num_bytes / engine.max_request_bytes <= 1
        blocks = -(-(length + verdict.count) // engine.tokens_per_block)
        if verdict.beam_width == 1 and engine.window is None and blocks > engine.num_blocks:
            verdict.codes = {"TOO_LARGE_FOR_KV_CACHE"}


def _kind(value: Value, number: Any) -> str:
    if value.kind is not PYTHON:
        return value.kind
    return {int: INT, float: FLOAT, bool: BOOL}.get(type(number), STRANGE)


def _counts(value: float) -> bool:
    """Whether `value` differs from 0 when it is rounded to float32. Half of the smallest float32 number becomes 0."""
    return abs(value) > 2.0**-150


def _is_float32(number: Any) -> bool:
    return -FLOAT32 <= number <= FLOAT32 and (type(number) is int or isfinite(number))


def _is_integer(request_id: Any) -> bool:
    return type(request_id).__name__ in ("uint64", "int8") or (
        issubclass(type(request_id), int) and type(request_id) is not bool)


def _plain_int(request_id: Any) -> int:
    return int.__int__(request_id) if issubclass(type(request_id), int) else request_id.item()

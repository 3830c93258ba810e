"""Generates a request, or an item that is not a request, from a number. Equal numbers give equal items."""

from random import Random
from typing import Any

import numpy as np

from .engines import Engine
from .items import FIRST_ID, Draw, add_options, be_someone_else, break_item, build
from .values import FLOATS, INTEGERS, LARGE, PYTHON, Value, of_list, of_scalar, of_table, strange

# Ordinary values of the scalars. Token ids are generated where they are needed.
COMMON: dict[str, tuple] = {
    "temperature": (0, 0.0, -0.0, 0.5, 1, 2.5), "runtime_top_k": (0, 1, 5, 96), "runtime_top_p": (0, 0.5, 1.0, -0.0),
    "runtime_top_p_decay": (0.5, 1), "runtime_top_p_min": (1e-6, 1), "runtime_min_p": (0, 0.25, 1.0),
    "len_penalty": (0, 1.5), "early_stopping": (-5, 0, 1, 2), "beam_search_diversity_rate": (0, 0.5),
    "repetition_penalty": (0.5, 1, 1.5), "presence_penalty": (-1.5, 0, 2), "frequency_penalty": (-1.5, 0, 2),
    "no_repeat_ngram_size": (0, 2), "prompt_ignore_length": (0, 3, 2**31 - 1),
    "min_length": (0, 3), "random_seed": (0, 7, 2**64 - 1, -1, -(2**63)),
    "beam_width": (1, 1, 2), "return_log_probs": (True, False, 1, 0), "return_context_logits": (True, False),
    "return_generation_logits": (True, False), "streaming": (True, False, 1), "input_lengths": (1, 5),
    "prompt_vocab_size": (1, 2), "lora_task_id": (0, 5), "request_output_len": (1, 2, 3, 5, 39, 1000),
}
NAMES = sorted([*COMMON, "input_ids", "end_id", "pad_id", "runtime_top_p_reset_ids", "bad_words_list",
                "stop_words_list", "embedding_bias", "prompt_embedding_table", "lora_weights", "lora_config",
                "draft_input_ids", "draft_logits"])


def draw(number: int, engine: Engine) -> Draw:
    """Generate the item with this number, for the options and limits of `engine`."""
    random = Random(number)
    drawn = Draw(number, request_id=FIRST_ID + number)
    chance = random.random()
    if chance < 0.03:
        be_someone_else(random, drawn)
        return drawn
    if engine.measures_memory and chance < 0.5:
        _large(random, drawn, engine)
    else:
        _tensors(random, drawn, engine)
        _extra_ids(Random(f"extra ids {number}"), drawn.tensors)
        _log_probs(Random(f"log probs {number}"), drawn.tensors)
        add_options(random, drawn)
    build(random, drawn)
    if drawn.item is not None and 0.03 <= chance < 0.05:
        break_item(random, drawn)
    drawn.is_rewritten = random.random() < 0.3
    return drawn


# ---------------------------------------------------------------------- tensors


def _tensors(random: Random, drawn: Draw, engine: Engine) -> None:
    vocab, tensors = engine.vocab_size, drawn.tensors
    length = random.choice((1, 2, 3, 5, 8, 9)) if random.random() < 0.95 else random.randrange(engine.max_seq_len + 2)
    tensors["input_ids"] = of_list(random, [int(random.random() * vocab) for _ in range(length)])
    tensors["request_output_len"] = of_scalar(random, random.choice(COMMON["request_output_len"][:4]))
    for _ in range(random.choice((0, 0, 1, 2, 3, 5))):
        _put(random, tensors, random.choice(NAMES), engine)
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        _spoil(random, tensors, random.choice(NAMES), engine)
    for together in (("prompt_embedding_table", "prompt_vocab_size"), ("lora_weights", "lora_config")):
        if any(name in tensors for name in together) and random.random() < 0.8:
            for name in together:
                if name not in tensors:
                    _put(random, tensors, name, engine)
    if "draft_logits" in tensors and random.random() < 0.5:
        _put(random, tensors, "draft_input_ids", engine)


def _extra_ids(random: Random, tensors: dict) -> None:
    """Give 10 % of the requests extra ids, mostly one for each token of the prompt, and sometimes a wrong value."""
    if random.random() < 0.1:
        prompt = tensors["input_ids"].plain if "input_ids" in tensors else []
        length = len(prompt) if isinstance(prompt, list) and random.random() < 0.8 else random.randrange(4)
        tensors["input_token_extra_ids"] = of_list(random, [random.choice((0, 0, 7, 2**40)) for _ in range(length)])
        if random.random() < 0.2:
            tensors["input_token_extra_ids"] = _one_changed(random, tensors["input_token_extra_ids"],
                                                            random.choice(INTEGERS))


def _log_probs(random: Random, tensors: dict) -> None:
    """Set `return_top_log_probs` in 7 % of the requests and `raw_log_probs` in 3 %, sometimes to a wrong value."""
    if random.random() < 0.07:
        tensors["return_top_log_probs"] = of_scalar(random, random.choice((0, 1, 5, 20, 20, -1, 21)))
    if random.random() < 0.03:
        tensors["raw_log_probs"] = of_scalar(random, random.choice((True, False, 1, 2)))


def _put(random: Random, tensors: dict, name: str, engine: Engine) -> None:
    """Give the tensor `name` an ordinary value."""
    vocab = engine.vocab_size
    if name in COMMON:
        tensors[name] = of_scalar(random, random.choice(COMMON[name]))
    elif name == "end_id" and random.random() < 0.4:
        tensors[name] = of_list(random, [random.randrange(vocab) for _ in range(random.randrange(1, 9))])
    elif name in ("end_id", "pad_id", "runtime_top_p_reset_ids"):
        tensors[name] = of_scalar(random, random.randrange(-1, vocab))
    elif name in ("bad_words_list", "stop_words_list"):
        tensors[name] = _word_list(random, vocab)
    elif name == "embedding_bias":
        tensors[name] = of_list(random, [random.choice((0.0, 0.5))] * vocab)
    elif name == "draft_input_ids":
        tensors[name] = of_list(random, [0] * random.randrange(3))
    elif name == "prompt_embedding_table":
        rows = random.choice((1, 2))
        tensors[name] = of_table(random, [[0.5] * (engine.hidden_size or 4)] * rows)
        tensors["prompt_vocab_size"] = of_scalar(random, rows)
        prompt = [random.randrange(vocab + rows) for _ in range(4)]
        tensors["input_ids"] = of_list(random, prompt)
    elif name in ("lora_weights", "lora_config", "draft_logits"):
        columns = {"lora_weights": 2, "lora_config": 3, "draft_logits": vocab}[name]
        tensors[name] = of_table(random, [[1] * columns] * random.choice((1, 1, 2)))
    else:
        tensors[name] = of_list(random, [random.randrange(vocab) for _ in range(3)])


def _spoil(random: Random, tensors: dict, name: str, engine: Engine) -> None:
    """Give the tensor `name` a value that is likely to be wrong. The oracle decides whether it is."""
    way = random.randrange(8)
    number = random.choice(INTEGERS) if random.random() < 0.6 else random.choice((*FLOATS, True, False))
    if random.random() < 0.2:
        number = engine.vocab_size + random.randrange(-1, 2)
    if way == 0 and name != "input_ids":
        tensors.pop(name, None)
    elif way <= 2:
        tensors[name] = strange(random)
    elif way <= 4:
        tensors[name] = of_scalar(random, number)
    elif way == 5:
        tensors[name] = of_list(random, [1, number, 1][random.randrange(2): random.choice((1, 2, 3))])
    elif way == 6:
        tensors[name] = of_table(random, [[1, number]] * random.randrange(1, 3)) if _is_plain(number) else Value(
            [[1, number]], PYTHON, [[1, number]])
    elif random.random() < 0.3:
        tensors[name] = _ragged(random, number)
    else:
        _put(random, tensors, name, engine)
        tensors[name] = _one_changed(random, tensors[name], number)


def _is_plain(number: Any) -> bool:
    return type(number) is not int or -(2**63) <= number < 2**63


def _ragged(random: Random, number: Any) -> Value:
    plain = random.choice([[[1], [1, 2]], [[1], 2], [1, [2]], [[number], []], [[], [1]], [[]], [], [[[1, 2], [2, -1]]],
                           [[[1, 2], [1]]], [[[1, 2], [number, number]]], [[[1], [2], [3]]], [[[1, 2]], [[1, 2]]]])
    return Value(plain, PYTHON, plain)


def _one_changed(random: Random, value: Value, number: Any) -> Value:
    """Return a copy of `value` as plain lists, with one of the numbers in them replaced by `number`."""
    def copied(part: Any) -> Any:
        return [copied(inner) for inner in part] if isinstance(part, list | tuple) else part

    plain = copied(value.plain)
    inner = plain
    while isinstance(inner, list) and inner and isinstance(inner[0], list):
        inner = random.choice(inner)
    if isinstance(inner, list) and inner:
        inner[random.randrange(len(inner))] = number
    elif not isinstance(inner, list):
        plain = number
    return Value(plain, PYTHON, copied(plain))


def _word_list(random: Random, vocab: int) -> Value:
    words = [[random.randrange(vocab) for _ in range(random.choice((1, 1, 2, 3)))] for _ in range(random.randrange(4))]
    if random.random() < 0.5:
        return Value([list(word) for word in words], PYTHON, words)
    tokens = [token for word in words for token in word]
    ends, end = [], 0
    for word in words:
        end += len(word)
        ends.append(end)
    packed = [tokens, ends + [-1] * (len(tokens) - len(ends))]
    if not tokens and random.random() < 0.5:
        packed = [[0], [random.choice((0, -1))]]
    value = of_table(random, packed)
    if value.kind is PYTHON and len(value.plain) == 2:             # two plain lists would be read as two words
        return Value([list(map(list, packed))], PYTHON, [packed])
    return value


def _large(random: Random, drawn: Draw, engine: Engine) -> None:
    """Give the request a tensor whose size is 0.2 to 4 times `max_request_bytes`."""
    tensors, most = drawn.tensors, engine.max_request_bytes
    tensors["input_ids"], tensors["request_output_len"] = of_list(random, [1, 2]), of_scalar(random, 2)
    name = random.choice(["prompt_embedding_table", "prompt_embedding_table", "lora_weights", "lora_config"])
    letter = random.choice("bBhHiIqQefd")
    fill = random.choice([0, 1]) if letter not in "efd" else random.choice([0.5, float("nan")])
    row = [fill] * (3 if name == "lora_config" else engine.hidden_size)
    is_list = random.random() < 0.2
    kept = max(8 if name == "lora_config" else 4, np.dtype(letter).itemsize)
    rows = int(most * random.choice((0.2, 0.5, 0.9, 1.1, 4)) / (64 + 8 * len(row) if is_list else kept * len(row)))
    if is_list:
        given = [row if random.random() < 0.9 else list(map(np.dtype(letter).type, row))] * rows
    else:
        given = np.broadcast_to(np.array(fill, letter), (rows, len(row)))
    # The tensor is too large for a list of its numbers, which are all equal. `plain` is (rows, columns, value, whether
    # the tensor is a list, dtype letter).
    tensors[name] = Value(given, LARGE, (rows, len(row), fill, is_list, letter))
    if name == "prompt_embedding_table":
        tensors["prompt_vocab_size"] = of_scalar(random, rows)
    else:
        other = "lora_config" if name == "lora_weights" else "lora_weights"
        tensors[other] = of_table(random, [[1, 1, 1]])

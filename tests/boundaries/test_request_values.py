"""T8: limits on one request, each at the limit and one beyond it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, nextafter
from typing import Any

import numpy as np
import pytest

from batch_manager import InferenceRequest, InvalidRequestError, SchedulerPolicy
from tests.fuzzing.block import TakesEmbeddings

VOCAB, POSITIONS, HIDDEN = 100, 64, 4
MOST_INT32, MOST_FLOAT32, TINY = 2**31 - 1, 3.4028234663852886e38, 5e-324
NO_EVICT = {"policy": SchedulerPolicy.GUARANTEED_NO_EVICT}
OPTIONS = ("priority", "deadline_s", "cache_salt", "is_streaming")


def tensor(name: str) -> Callable[[Any], dict]:
    return lambda value: {name: value}


def table(rows: int, columns: int = HIDDEN) -> np.ndarray:
    return np.ones((rows, columns), np.float32)


@dataclass(frozen=True)
class Row:
    """A limit on one value of a request.

    request   tensors and options of a request with the value
    says      text of the refusal, with the value as {value}
    """

    limit: str
    request: Callable[[Any], dict]
    works: tuple
    refused: tuple
    says: str
    engine: dict = field(default_factory=dict)


ROWS = [
    Row("tokens of a prompt", lambda n: {"input_ids": [1] * n}, (1, 2, POSITIONS - 2, POSITIONS - 1), (POSITIONS,),
        "the number of elements of input_ids is {value}; the maximum input length is max_seq_len - 1 = 63"),
    Row("a prompt has a token", lambda n: {"input_ids": [1] * n}, (1, 2), (0,), "input_ids is empty"),
    Row("a token of the vocabulary", lambda n: {"input_ids": [n]}, (0, 1, VOCAB - 2, VOCAB - 1), (-1, VOCAB),
        "an id outside 0..99"),
    Row("a token of the prompt table", lambda n: {"input_ids": [n], "prompt_embedding_table": table(2),
                                                  "prompt_vocab_size": 2},
        (VOCAB, VOCAB + 1), (VOCAB + 2,), "an id outside 0..101"),
    Row("rows of the prompt table", lambda n: {"prompt_embedding_table": table(n), "prompt_vocab_size": 2},
        (2,), (1, 3), "the number of rows of prompt_embedding_table is {value}; it must be 2"),
    Row("columns of the prompt table", lambda n: {"prompt_embedding_table": table(2, n), "prompt_vocab_size": 2},
        (HIDDEN,), (HIDDEN - 1, HIDDEN + 1),
        "the number of columns of prompt_embedding_table is {value}; it must be 4"),
    Row("the size of the prompt table", lambda n: {"prompt_embedding_table": table(max(n, 0)), "prompt_vocab_size": n},
        (1, 2), (0, -1), "prompt_vocab_size is {value}"),
    Row("elements of embedding_bias", lambda n: {"embedding_bias": [0.5] * n}, (VOCAB,), (VOCAB - 1, VOCAB + 1),
        "the number of elements of embedding_bias is {value}"),
    Row("a token of a word", lambda n: {"stop_words_list": [[1, n]]}, (0, VOCAB - 1), (-1, VOCAB), "0..99"),
    Row("tokens of a word", lambda n: {"bad_words_list": [[1], [2] * n]}, (1, 2), (0,),
        "word 1 of bad_words_list is empty"),
    Row("tokens of a word list", lambda n: {"stop_words_list": [[1] * n]}, (65_535, 65_536), (65_537,),
        "the number of elements of stop_words_list is {value:,}; the maximum size of a word list is 65,536"),
    Row("columns of a packed word list", lambda n: {"bad_words_list": np.array([[1] * n, [n] + [-1] * (n - 1)])},
        (1, 2, 32_767, 32_768), (32_769,), "the maximum size of a word list is 65,536"),
    Row("an offset of a packed word list", lambda n: {"bad_words_list": [[[1, 2, 3], [1, n, -1]]]}, (2, 3), (1,),
        "bad_words_list is packed incorrectly: the offsets do not increase"),
    Row("the last offset of a packed word list", lambda n: {"bad_words_list": [[[1, 2, 3], [1, n, -1]]]}, (3,), (4,),
        "bad_words_list is packed incorrectly: the last offset is beyond the 3 tokens"),
    Row("beams", tensor("beam_width"), (1, 2, 3, 4), (5,), "beam_width is {value}; max_beam_width is 4"),
    Row("a beam at least", tensor("beam_width"), (1, 2), (0, -1),
        "beam_width is {value}; it must be an integer in 1.."),
    Row("beams in a step", tensor("beam_width"), (4, 5), (6,),
        "beam_width is {value} and max_num_tokens is 5",
        {**NO_EVICT, "max_num_tokens": 5, "max_beam_width": 9}),
    Row("streaming has one beam", lambda n: {"beam_width": n, "streaming": True}, (1,), (2,),
        "the request is streaming and beam_width is {value}"),
    Row("tokens of a prompt in one step", lambda n: {"input_ids": [1] * n}, (15, 16), (17,),
        "input_ids has {value} tokens and max_num_tokens is 16", {"max_num_tokens": 16}),
    Row("new tokens", tensor("request_output_len"), (1, 2, MOST_INT32 - 1, MOST_INT32), (0, -1, MOST_INT32 + 1),
        "request_output_len is {value}"),
    *(Row(name, tensor(name), (-1, 0, VOCAB - 1), (-2, VOCAB), f"{name} is {{value}}; it must be an integer in -1..99")
      for name in ("end_id", "pad_id")),
    Row("the id that restores top-p", tensor("runtime_top_p_reset_ids"), (-1, 0, VOCAB - 1), (-2, VOCAB),
        "runtime_top_p_reset_ids is {value}"),
    Row("top-k, small vocabulary", tensor("runtime_top_k"), (0, 1, VOCAB - 1, VOCAB), (-1, VOCAB + 1),
        "runtime_top_k is {value}"),
    Row("top-k, large vocabulary", tensor("runtime_top_k"), (1023, 1024), (1025,), "runtime_top_k is {value}",
        {"vocab_size": 5000}),
    *(Row(name, tensor(name), (0, TINY, nextafter(1, 0), 1), (-TINY, nextafter(1, 2)), f"{name} is {{value}}")
      for name in ("runtime_top_p", "runtime_min_p", "priority")),
    *(Row(name, tensor(name), (TINY, nextafter(1, 0), 1), (0, -TINY, nextafter(1, 2)), f"{name} is {{value}}")
      for name in ("runtime_top_p_decay", "runtime_top_p_min")),
    *(Row(name, tensor(name), (0, -0.0, TINY, nextafter(MOST_FLOAT32, 0), MOST_FLOAT32),
          (-TINY, nextafter(MOST_FLOAT32, inf)), f"{name} is {{value}}")
      for name in ("temperature", "len_penalty", "beam_search_diversity_rate")),
    *(Row(name, tensor(name), (TINY, MOST_FLOAT32), (0, -TINY, nextafter(MOST_FLOAT32, inf)), f"{name} is {{value}}")
      for name in ("repetition_penalty", "deadline_s")),
    *(Row(name, tensor(name), (-MOST_FLOAT32, MOST_FLOAT32),
          (nextafter(-MOST_FLOAT32, -inf), nextafter(MOST_FLOAT32, inf)), f"{name} is {{value}}")
      for name in ("presence_penalty", "frequency_penalty")),
    *(Row(name, tensor(name), (0, 1, MOST_INT32 - 1, MOST_INT32), (-1, MOST_INT32 + 1), f"{name} is {{value}}")
      for name in ("no_repeat_ngram_size", "min_length", "prompt_ignore_length")),
    Row("early_stopping", tensor("early_stopping"), (-(2**31), 1 - 2**31, MOST_INT32 - 1, MOST_INT32),
        (-(2**31) - 1, MOST_INT32 + 1), "early_stopping is {value}"),
    Row("seed", tensor("random_seed"), (-(2**63), 1 - 2**63, 0, 2**64 - 2, 2**64 - 1), (-(2**63) - 1,),
        "random_seed is {value}; it must be an integer in -9223372036854775808..18446744073709551615"),
    Row("seed of more than 64 bits", tensor("random_seed"), (2**64 - 1,), (2**64,),
        "random_seed is an integer of 65 bits"),
    *(Row(name, tensor(name), (False, True, 0, 1), (-1, 2), f"{name} is {{value}}")
      for name in ("streaming", "is_streaming", "return_log_probs", "return_context_logits",
                   "return_generation_logits", "return_perf_metrics", "raw_log_probs")),
    Row("return_top_log_probs", tensor("return_top_log_probs"), (0, 1, 19, 20), (-1, 21),
        "return_top_log_probs is {value}"),
    Row("characters of a cache salt", lambda n: {"cache_salt": "x" * n}, (0, 1, 1023, 1024), (1025,), "at most 1,024"),
    Row("bytes of a cache salt", lambda n: {"cache_salt": b"x" * n}, (0, 1, 1023, 1024), (1025,), "at most 1,024"),
    Row("bytes of a request, an array", lambda n: {"input_ids": np.ones(n // 8, np.int64)}, (64, 72, 80), (88,),
        "input_ids has {value} bytes and the request's other tensors leave 80", {"max_request_bytes": 88}),
    Row("bytes of a request, a list", lambda n: {"input_ids": [1] * (n // 8)}, (72, 80), (88,),
        "input_ids has {value} bytes and the request's other tensors leave 80", {"max_request_bytes": 88}),
    Row("bytes of a request, a table", lambda n: {"prompt_vocab_size": n // 16,
                                                  "prompt_embedding_table": np.ones((n // 16, HIDDEN), np.int8)},
        (176, 192), (208,), "prompt_embedding_table has {value} bytes and the request's other tensors leave 200",
        {"max_request_bytes": 224}),
    Row("bytes of a request, a table of lists", lambda n: {"prompt_vocab_size": n,
                                                           "prompt_embedding_table": [[1] * 4] * n},
        (1, 2), (3,), "the request's other tensors leave 200", {"max_request_bytes": 224}),
    Row("bytes of a request, its numbers", lambda n: dict.fromkeys(["temperature", "min_length", "pad_id"][:n], 1),
        (1, 2), (3,), "the request's tensors have 40 bytes; max_request_bytes is 32",
        {"max_request_bytes": 32}),
]


def rows(which: str) -> list:
    return [pytest.param(row, value, id=f"{row.limit}: {value!r:.24}") for row in ROWS for value in getattr(row, which)]


def outcome(make_world, row: Row, value: Any) -> tuple[str, str]:
    """Run a request with `value`, and return its (error, code). Asserts that another request gets its right output."""
    engine = {"max_beam_width": 4, **row.engine}
    vocab_size = engine.pop("vocab_size", VOCAB)
    backend = TakesEmbeddings(vocab_size=vocab_size, max_seq_len=POSITIONS)
    backend.info = replace(backend.info, hidden_size=HIDDEN)
    world = make_world(backend=backend, **engine)
    held = {"request_output_len": 2, "input_ids": [1], **row.request(value)}
    options = {name: held.pop(name) for name in OPTIONS if name in held}
    companion = InferenceRequest(1, {"input_ids": [5, 6], "request_output_len": 4})
    world.client.pending = [companion, InferenceRequest(2, held, **options)]
    world.run()
    assert world.client.final(1).tokens() == [5, 6, *world.expected([5, 6], 4)]
    assert not world.client.final(2).error or not world.client.final(2).tensors
    return world.client.final(2).error, world.client.final(2).code


@pytest.mark.parametrize("row, value", rows("works"))
def test_at_the_limit_a_request_runs(make_world, row, value):
    assert outcome(make_world, row, value) == ("", "")


@pytest.mark.parametrize("row, value", rows("refused"))
def test_beyond_the_limit_it_is_refused_with_the_number(make_world, row, value):
    error, code = outcome(make_world, row, value)
    assert code == "INVALID_REQUEST" and row.says.format(value=value) in error, error


@pytest.mark.parametrize("request_id", [0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, np.uint64(2**64 - 1), np.int8(0)])
def test_ids_at_their_limits_are_answered(make_world, new_request, request_id):
    world = make_world()
    world.client.pending = [new_request(request_id, [1], 2)]
    world.run()
    assert world.client.final(int(request_id)).tokens() == [1, *world.expected([1], 2)]


@pytest.mark.parametrize("request_id, says", [
    (-1, "request_id is -1; it must be in 0..2^64-1"), (2**64, "request_id is an integer of 65 bits"),
    (-(2**64), "request_id is an integer of 65 bits"), (True, "request_id is of type bool; it must be an integer"),
    (1.0, "type float"), ("1", "type str"), (None, "type NoneType"), (np.float64(1), "type float64")])
def test_ids_beyond_them_are_no_ids(request_id, says):
    with pytest.raises(InvalidRequestError) as raised:
        InferenceRequest(request_id, {"input_ids": [1], "request_output_len": 1})
    assert says in str(raised.value)

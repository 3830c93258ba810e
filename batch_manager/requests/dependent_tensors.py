"""Tensors of a request that have a meaning only together, or must agree in size."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Limits
from ..errors import InvalidRequestError
from ..handover import num_beam_candidates

# Continuations that a step of one request's beam search examines. Each step sorts so many, which delays all requests.
MAX_BEAM_CANDIDATES = 16_384


def check_dependent_tensors(scalars: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
                            values: Mapping[str, Any], end_ids: Sequence[int], limits: Limits) -> None:
    """Raises InvalidRequestError if one of them is missing, or two do not agree.

    scalars   the request's numbers and flags, by name
    shapes    of its other tensors, by name; values are the checked copies of these
    end_ids   tokens that end a sequence of it, each once
    """
    vocab = limits.vocab_size
    if "embedding_bias" in shapes and shapes["embedding_bias"] != (vocab,):
        raise InvalidRequestError(f"embedding_bias has {shapes['embedding_bias'][0]:,} elements",
                                  f"there must be one for each id of the vocabulary of {vocab:,}", "pad it with zeros")

    if "input_token_extra_ids" in shapes:
        _require_equal("elements of input_token_extra_ids", shapes["input_token_extra_ids"][0],
                       "one for each token of input_ids", len(values["input_ids"]))

    _require_both("prompt_embedding_table", "prompt_vocab_size", shapes.keys() | scalars.keys())
    if "prompt_embedding_table" in shapes:
        rows, columns = shapes["prompt_embedding_table"]
        _require_equal("rows of prompt_embedding_table", rows, "prompt_vocab_size",
                       scalars["prompt_vocab_size"])
        if not limits.hidden_size:
            raise InvalidRequestError("prompt_embedding_table is given and the backend takes no embeddings",
                                      "prompt tuning needs a backend that says its hidden_size",
                                      "leave prompt_embedding_table out")
        _require_equal("columns of prompt_embedding_table", columns, "hidden_size of the model",
                       limits.hidden_size)

    _require_both("lora_weights", "lora_config", set(shapes))
    if "lora_config" in shapes:
        _require_equal("columns of lora_config", shapes["lora_config"][1], "module, layer and adapter size", 3)
        _require_equal("rows of lora_weights", shapes["lora_weights"][0], "rows of lora_config",
                       shapes["lora_config"][0])

    width, stop_words = scalars.get("beam_width", 1), values.get("stop_words_list", ())
    candidates = num_beam_candidates(width, end_ids, stop_words)
    if (stop_words or len(end_ids) > 1) and 1 < width <= limits.max_beam_width and candidates > MAX_BEAM_CANDIDATES:
        raise InvalidRequestError(
            f"stop_words_list ends in {len({word[-1] for word in stop_words}):,} different tokens and beam_width is "
            f"{width:,}, with {len(end_ids)} end ids",
            f"a step of the search then looks at {candidates:,} continuations; it may look at {MAX_BEAM_CANDIDATES:,}",
            "send fewer stop words or end ids, or ask for fewer beams")

    num_drafts = len(values.get("draft_input_ids", ()))
    if "draft_logits" in shapes:
        if not num_drafts:
            raise InvalidRequestError("draft_logits is given without draft_input_ids",
                                      "Draft tokens must be specified when draft logits are given",
                                      "set draft_input_ids, or leave draft_logits out")
        _require_equal("rows of draft_logits", shapes["draft_logits"][0], "draft tokens", num_drafts)
        _require_equal("columns of draft_logits", shapes["draft_logits"][1], "ids of the vocabulary", vocab)
    if num_drafts + len(values["input_ids"]) > limits.max_seq_len - 1:
        raise InvalidRequestError(
            f"input_ids has {len(values['input_ids']):,} tokens and draft_input_ids {num_drafts:,}",
            f"together they may have max_seq_len - 1 = {limits.max_seq_len - 1:,}", "shorten one of them")


def _require_both(first: str, second: str, given: set[str]) -> None:
    if (first in given) != (second in given):
        there, missing = (first, second) if first in given else (second, first)
        raise InvalidRequestError(f"{there} is given without {missing}", "they are given together or not at all",
                                  f"set {missing}, or leave {there} out")


def _require_equal(what: str, count: int, whose: str, expected: int) -> None:
    if count != expected:
        raise InvalidRequestError(f"there are {count:,} {what}", f"there must be {expected:,}: {whose}",
                                  "send tensors that belong together")

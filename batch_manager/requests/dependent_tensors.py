"""Checks tensors of a request that must be set together or agree in size."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import Limits
from ..errors import InvalidRequestError, counted
from ..handover import num_beam_candidates

# Limit on the continuations that a step of one beam search considers. A step sorts them, which delays all requests.
MAX_BEAM_CANDIDATES = 16_384


def check_dependent_tensors(scalars: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
                            values: Mapping[str, Any], end_ids: Sequence[int], limits: Limits) -> None:
    """Raise InvalidRequestError if tensors of a request do not fit together.

    The faults are a tensor without another tensor that it needs, two tensors whose sizes do not agree, too many prompt
    and draft tokens together, and too many candidates for a beam search.

    scalars   numbers and flags of the request, by name
    shapes    shapes of the request's other tensors, by name
    values    checked copies of the tensors in `shapes`, by name
    end_ids   end ids of the request, without duplicates
    """
    vocab = limits.vocab_size
    if "embedding_bias" in shapes:
        _require_equal("elements of embedding_bias", shapes["embedding_bias"][0], "one for each id of the vocabulary",
                       vocab)
    if "input_token_extra_ids" in shapes:
        _require_equal("elements of input_token_extra_ids", shapes["input_token_extra_ids"][0],
                       "one for each token of input_ids", len(values["input_ids"]))

    _require_both("prompt_embedding_table", "prompt_vocab_size", shapes.keys() | scalars.keys())
    if "prompt_embedding_table" in shapes:
        rows, columns = shapes["prompt_embedding_table"]
        _require_equal("rows of prompt_embedding_table", rows, "prompt_vocab_size",
                       scalars["prompt_vocab_size"])
        if not limits.hidden_size:
            raise InvalidRequestError("prompt_embedding_table is set and the backend takes no embeddings",
                                      "prompt tuning needs a backend whose BackendInfo has hidden_size",
                                      "leave prompt_embedding_table out")
        _require_equal("columns of prompt_embedding_table", columns, "hidden_size of the model",
                       limits.hidden_size)

    _require_both("lora_weights", "lora_config", set(shapes))

    width, stop_words = scalars.get("beam_width", 1), values.get("stop_words_list", ())
    candidates = num_beam_candidates(width, end_ids, stop_words)
    if (stop_words or len(end_ids) > 1) and 1 < width <= limits.max_beam_width and candidates > MAX_BEAM_CANDIDATES:
        raise InvalidRequestError(
            f"the words of stop_words_list end in {len({word[-1] for word in stop_words}):,} different tokens, "
            f"beam_width is {width:,} and the request has {counted(len(end_ids), 'end id')}",
            f"a step of the beam search would consider {candidates:,} continuations, above the limit of "
            f"{MAX_BEAM_CANDIDATES:,}",
            "send fewer stop words or end ids, or lower beam_width")

    num_drafts = len(values.get("draft_input_ids", ()))
    if "draft_logits" in shapes:
        if not num_drafts:
            raise InvalidRequestError("draft_logits is set without draft_input_ids",
                                      "draft tokens must be specified when draft logits are given",
                                      "leave draft_logits out")
        _require_equal("rows of draft_logits", shapes["draft_logits"][0], "the number of draft tokens", num_drafts)
        _require_equal("columns of draft_logits", shapes["draft_logits"][1], "the vocabulary size", vocab)
    if num_drafts + len(values["input_ids"]) > limits.max_seq_len - 1:
        raise InvalidRequestError(
            f"input_ids has {counted(len(values['input_ids']), 'token')} and draft_input_ids {num_drafts:,}",
            f"the limit for both together is max_seq_len - 1 = {limits.max_seq_len - 1:,}", "shorten one of them")


def _require_both(first: str, second: str, given: set[str], way_out: str = "set {1}, or leave {0} out") -> None:
    """Raise InvalidRequestError if only one of two tensors is in `given`, the names of the tensors that are set.

    way_out   advice for the error; {0} in it becomes the name of the tensor that is set, {1} that of the missing one
    """
    if (first in given) != (second in given):
        present, missing = (first, second) if first in given else (second, first)
        raise InvalidRequestError(f"{present} is set without {missing}", "either both or neither must be set",
                                  way_out.format(present, missing))


def _require_equal(what: str, count: int, whose: str, expected: int) -> None:
    if count != expected:
        raise InvalidRequestError(f"the number of {what} is {count:,}", f"it must be {expected:,} ({whose})",
                                  "send tensors of matching sizes")

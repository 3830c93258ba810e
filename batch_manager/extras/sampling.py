"""Sampling options with the names and defaults of OpenAI-style servers, converted to request tensors."""

import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import numpy as np

from ..engine_info import EngineInfo
from ..errors import ConfigError, InvalidRequestError, type_name
from ..option_values import exact_integer, exact_number
from ..requests.tensor_values import MAX_FEW
from .stop_strings import StopStrings, stop_strings

LARGEST_BIAS = 100.0    # OpenAI's
_seeds = random.Random()    # of this process alone; unlike `secrets`, makes no system call per seed
os.register_at_fork(after_in_child=_seeds.seed)

# Request tensor -> the option that sets it, for errors to users who pass prompts and options.
OPTION_OF_TENSOR = {
    "input_ids": "the prompt", "request_output_len": "max_tokens", "end_id": "stop_token_ids",
    "runtime_top_k": "top_k", "runtime_top_p": "top_p", "runtime_min_p": "min_p", "random_seed": "seed",
    "min_length": "min_tokens", "embedding_bias": "logit_bias", "return_log_probs": "log_probs",
    "return_top_log_probs": "top_log_probs",
}

# What to say about names of other libraries whose closest known name is another option.
_HINTS = dict.fromkeys(("max_completion_tokens", "max_new_tokens", "max_output_tokens", "n_predict", "max_length"),
                       "did you mean max_tokens?")
_HINTS |= dict.fromkeys(("length_penalty", "len_penalty", "num_beams", "beam_width", "early_stopping"),
                        "it acts on beam search only, which requests of GptManager have (beam_width, len_penalty)")
_HINTS |= dict.fromkeys(("do_sample",), "temperature=0 is greedy; any other temperature samples")
_HINTS |= dict.fromkeys(("n", "best_of", "num_return_sequences"), "pass the prompt once for each output")
_HINTS |= dict.fromkeys(("tools", "enable_thinking", "chat_template_kwargs"),
                        "chat() takes tools=..., and template_options={'enable_thinking': ...}")
_HINTS |= dict.fromkeys(("sampling_params", "generation_config"), "pass its values as options, such as temperature=0.7")
_HINTS |= dict.fromkeys(("guided_json", "json_schema", "response_format", "grammar", "structured_outputs"),
                        "AsyncEngine takes a grammar as logits_post_processor; see "
                        "batch_manager.extras.guided_decoding")
_HINTS |= dict.fromkeys(("stop_strings", "stop_sequences"), "did you mean stop?")
_TENSOR = re.compile(rf"\b(?:{'|'.join(OPTION_OF_TENSOR)})\b")


def in_names_of_options(error_text: str) -> str:
    """Replace the names of tensors in an error of the engine with the names of the options that set them."""
    return _TENSOR.sub(lambda name: OPTION_OF_TENSOR[name[0]], error_text)


def check_end_ids(info: EngineInfo) -> None:
    """Raise ConfigError if the checkpoint has more end ids than a request may have; all default requests would fail."""
    if len(info.end_ids) > MAX_FEW:
        raise ConfigError(f"the checkpoint has {len(info.end_ids)} end ids: eos_token_id of generation_config.json, or "
                          "else of config.json", f"expected at most {MAX_FEW}, which is what a request may have",
                          "remove ids from eos_token_id, or use GptManager, whose requests set their own end_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options for generating one output, with the defaults of OpenAI-style servers.

    Request tensors have other defaults.

    max_tokens           most tokens to generate; None: as many as max_seq_len leaves
    temperature          0: greedy. 1: sample from the model's own distribution
    top_p                keep the likeliest tokens that together have at least this probability; 1: keep all tokens
    top_k                number of likeliest tokens to keep; 0 or -1: keep all tokens
    min_p                keep tokens with at least this fraction of the largest probability; 0: keep all tokens
    seed                 seed of the random numbers; None: a fresh seed for every output, so that the same prompt gives
                         different outputs
    stop                 strings that end the output and are not part of the text; may contain special tokens
    stop_token_ids       tokens that end the output and are not part of it, in addition to the checkpoint's end ids
    ignore_eos           do not end at the checkpoint's end ids
    min_tokens           tokens to generate before an end token may be sampled
    repetition_penalty   applies to tokens of the prompt and the output, as in transformers
    presence_penalty, frequency_penalty   apply to tokens of the output only, as at OpenAI
    logit_bias           token id -> number from -100 to 100, added to the token's logit
    log_probs            return the log-probability of each token
    top_log_probs        number of likeliest tokens to return at each position with their log-probabilities, 0 to 20
    raw_log_probs        take log-probabilities from the model's own distribution, before penalties and temperature
    priority             0..1; higher runs first
    deadline_s           seconds after the call at which the request times out; None: never
    speculation          False: the engine drafts no tokens for the output, which has the same tokens then
    """

    max_tokens: int | None = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | StopStrings | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    log_probs: bool = False
    top_log_probs: int = 0
    raw_log_probs: bool = False
    priority: float = 0.5
    deadline_s: float | None = None
    speculation: bool = True

    @property
    def request_options(self) -> dict[str, Any]:
        """The options of InferenceRequest that are not tensors."""
        return {"priority": self.priority, "deadline_s": self.deadline_s, "speculation": self.speculation}

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Sampling":
        """Build the options from a mapping.

        Raises TypeError for an unknown name, and suggests the closest known name. Raises InvalidRequestError for an
        invalid `stop`.
        """
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                meant = [f"did you mean {each}?" for each in get_close_matches(name, names, 1)]
                hint = _HINTS.get(name) or (meant[0] if meant else "")
                raise TypeError(f"unknown option {name!r}; the options are {', '.join(names)}"
                                + (f"; {hint}" if hint else ""))
        return cls(**{**options, "stop": stop_strings(options.get("stop"))})

    def tensors(self, prompt_ids: Sequence[int], info: EngineInfo) -> dict[str, Any]:
        """Return the request tensors for one output.

        Raises InvalidRequestError if logit_bias or stop_token_ids has a wrong type, if there are more than 8 end ids,
        or if logit_bias has a token outside the vocabulary or a value out of range. `check` and the engine validate all
        other options; `in_names_of_options` puts the names of options into the engine's errors.
        """
        tensors: dict[str, Any] = {"input_ids": prompt_ids, "request_output_len": self._output_length(prompt_ids, info),
                                   "temperature": self.temperature, "random_seed": self.seed}
        if self.seed is None:
            tensors["random_seed"] = _seeds.getrandbits(64)
        if self.top_p == 0:    # the smallest non-empty set: the likeliest token
            tensors["runtime_top_k"] = 1
        else:
            tensors["runtime_top_p"] = self.top_p
            tensors["runtime_top_k"] = 0 if self.top_k == -1 else self.top_k
        ends = [*(() if self.ignore_eos else info.end_ids), *self._stop_token_ids()]
        ends = list(dict.fromkeys(ends))
        if len(ends) > MAX_FEW:
            raise InvalidRequestError(f"stop_token_ids and the checkpoint's end ids are {len(ends)} different ids",
                                      f"expected at most {MAX_FEW}", "shorten stop_token_ids, or set ignore_eos")
        if ends:
            tensors["end_id"] = ends
        given = (("runtime_min_p", self.min_p, 0), ("min_length", self.min_tokens, 0),
                 ("repetition_penalty", self.repetition_penalty, 1), ("presence_penalty", self.presence_penalty, 0),
                 ("frequency_penalty", self.frequency_penalty, 0), ("return_log_probs", self.log_probs, False),
                 ("return_top_log_probs", self.top_log_probs, 0), ("raw_log_probs", self.raw_log_probs, False))
        tensors.update((name, value) for name, value, neutral in given if value != neutral)
        if self.presence_penalty or self.frequency_penalty:
            tensors["prompt_ignore_length"] = len(prompt_ids)
        if self.logit_bias:
            tensors["embedding_bias"] = self.bias(info.vocab_size)
        return tensors

    def check(self) -> None:
        """Raise InvalidRequestError for options that the engine would take, or refuse with another name's range."""
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise InvalidRequestError(f"ignore_eos is of type {type_name(self.ignore_eos)}", "expected True or False")
        top_k = exact_integer(self.top_k)
        if top_k is not None and top_k < -1:
            raise InvalidRequestError(f"top_k is {top_k}", "expected at least 1, or 0 or -1 to keep all tokens")
        least, most = exact_integer(self.min_tokens), exact_integer(self.max_tokens)
        if least is not None and most is not None and least > most:
            raise InvalidRequestError(f"min_tokens is {least}", f"expected at most max_tokens, which is {most}")

    def _stop_token_ids(self) -> list[int]:
        given = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(given, Iterable):
            raise InvalidRequestError(f"stop_token_ids is of type {type_name(given)}",
                                      "expected a list of token ids", "put the id into a list")
        ids = []
        for token in given:
            token_id = exact_integer(token)
            if token_id is None:
                raise InvalidRequestError(f"stop_token_ids has a value of type {type_name(token)}",
                                          "expected a list of token ids", "pass strings in the option stop")
            ids.append(token_id)
        return ids

    def _output_length(self, prompt_ids: Sequence[int], info: EngineInfo) -> int:
        """Return `max_tokens`. If it is None, return how many tokens the prompt leaves of max_seq_len, but at least 1.

        The engine refuses a prompt that leaves no room for an output.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        return max(info.max_seq_len - len(prompt_ids), 1)

    def bias(self, vocab_size: int) -> np.ndarray:
        """Return logit_bias as the tensor `embedding_bias` [vocab]. Raises InvalidRequestError as `tensors` does."""
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(f"logit_bias is of type {type_name(self.logit_bias)}",
                                      "expected a mapping of token ids to numbers", "pass a dict")
        bias = np.zeros(vocab_size, np.float32)
        for token, value in ((exact_integer(key), exact_number(bias)) for key, bias in self.logit_bias.items()):
            if token is None or not 0 <= token < vocab_size:
                raise InvalidRequestError("logit_bias has a key that is not a token id of the model",
                                          f"expected integers in 0..{vocab_size - 1}",
                                          "use ids of the model's tokenizer")
            if value is None or not -LARGEST_BIAS <= value <= LARGEST_BIAS:
                raise InvalidRequestError(f"logit_bias of token {token} is not a number in the valid range",
                                          f"expected numbers from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g}",
                                          "clip the value")
            bias[token] = value
        return bias

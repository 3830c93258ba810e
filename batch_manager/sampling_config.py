"""The sampling parameters of a request, each declared once: tensor, field, neutral value, range, type on the device."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .errors import InvalidRequestError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
FLOAT32_MAX = 3.4028234663852886e38
MAX_TOP_K = 1024
_SIGN_BIT = 1 << 63
_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers a scalar may be: low..high, both allowed unless `above_low`.

    whole   integers only; otherwise integers and finite floats. A bool is neither.
    """

    low: float
    high: float
    whole: bool = False
    above_low: bool = False

    def __contains__(self, value: object) -> bool:
        if type(value) is not int and (self.whole or type(value) is not float):
            return False
        # Comparisons, not arithmetic: exact for integers of any size, and false for NaN.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def check(self, name: str, value: object) -> None:
        """Raises InvalidRequestError naming the tensor, its value and the range."""
        if value not in self:
            raise InvalidRequestError(f"{name} is {shown(value)}", f"it must be {self}", f"correct {name}")

    def __str__(self) -> str:
        if self.whole:
            return f"an integer in {self.low}..{self.high}"
        if self.low == -FLOAT32_MAX:
            return "a finite float32"
        if self.high == FLOAT32_MAX:
            return f"a finite float32 {'above' if self.above_low else 'of at least'} {self.low}"
        return f"a number in {'(' if self.above_low else '['}{self.low}, {self.high}]"


ANY_FLOAT = Range(-FLOAT32_MAX, FLOAT32_MAX)
NOT_NEGATIVE = Range(0, FLOAT32_MAX)
COUNT = Range(0, INT32_MAX, whole=True)
SHARE = Range(0, 1)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is declared of one sampling parameter.

    tensor    the request tensor that sets it
    neutral   its value where no tensor sets it
    range     the numbers it may be
    """

    tensor: str
    neutral: int | float
    range: Range

    @property
    def dtype(self) -> type[np.generic]:
        """How the device holds it: float32, or an integer that is wide enough. Seeds keep their 64 bits, signed."""
        if not self.range.whole:
            return np.float32
        return np.int32 if self.range.high <= INT32_MAX else np.int64

    @property
    def other(self) -> int | float:
        """A small value in the range that is not the neutral one, for warming up and for tests."""
        return next(value for value in ((2, 3) if self.range.whole else (0.5, 0.25))
                    if value in self.range and value != self.neutral)

    def stored(self, value: int | float) -> int | float:
        """The value as the device holds it: what is above 0 stays above 0 in float32."""
        if self.dtype is np.int64:
            return (int(value) ^ _SIGN_BIT) - _SIGN_BIT
        return max(value, _SMALLEST) if self.range.above_low and self.range.low == 0 else value


def _parameter(tensor: str, neutral: int | float, allowed: Range) -> Any:
    return field(default=neutral, metadata={"parameter": Parameter(tensor, neutral, allowed)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the tokens of one request are sampled. The defaults are neutral: greedy, no penalty, one beam.

    beam_width                   sequences kept; 1: no beam search. With several, only the temperature, what changes
                                 logits and what says how beams compete have an effect
    temperature                  above 0: divides the logits; 0: greedy
    top_k, top_p                 0 and 0.0: greedy. top_k above 0 keeps the k best tokens; top_p between 0 and 1 keeps
                                 the smallest set that holds p of the probability, of what top_k keeps; 1 keeps all
    top_p_decay, top_p_min, top_p_reset_ids   after each token top_p = max(top_p * decay, min), or the first top_p
                                 again after the token with the reset id (-1: none). Without effect where top_p is 0
    min_p                        of what these keep, drops tokens below this share of the best one's probability
    len_penalty, early_stopping, beam_search_diversity_rate   how beams compete, see decoding/beam_search.py; without
                                 effect at beam width 1
    repetition_penalty           divides a positive logit of a token that the sequence holds, multiplies a negative
                                 one; 1: off
    presence_penalty, frequency_penalty   subtracted from such a logit once, and once per occurrence; 0: off
    prompt_ignore_length         so many leading tokens of the prompt do not count for presence and frequency penalty;
                                 as many as the prompt has, or more: only generated tokens count
    no_repeat_ngram_size         no n-gram of this length twice; 0: off
    min_length                   tokens generated before the end id may be sampled
    random_seed                  the sampled token is a function of the logits, the seed and the position. The default
                                 is fixed, not random

    Each row names the request tensor, the neutral value and the range. Integers may be given for floats and are
    converted; a negative zero becomes a zero.

    Raises InvalidRequestError, naming the tensor, for a value that is no number of its kind, not finite or out of
    range. What depends on a model (its vocabulary, its beam width) is checked at admission.
    """

    beam_width: int = _parameter("beam_width", 1, Range(1, INT32_MAX, whole=True))
    temperature: float = _parameter("temperature", 1.0, NOT_NEGATIVE)
    top_k: int = _parameter("runtime_top_k", 0, Range(0, MAX_TOP_K, whole=True))
    top_p: float = _parameter("runtime_top_p", 0.0, SHARE)
    top_p_decay: float = _parameter("runtime_top_p_decay", 1.0, Range(0, 1, above_low=True))
    top_p_min: float = _parameter("runtime_top_p_min", 1e-6, Range(0, 1, above_low=True))
    top_p_reset_ids: int = _parameter("runtime_top_p_reset_ids", -1, Range(-1, INT32_MAX, whole=True))
    min_p: float = _parameter("runtime_min_p", 0.0, SHARE)
    len_penalty: float = _parameter("len_penalty", 0.0, NOT_NEGATIVE)
    early_stopping: int = _parameter("early_stopping", 1, Range(-INT32_MAX - 1, INT32_MAX, whole=True))
    beam_search_diversity_rate: float = _parameter("beam_search_diversity_rate", 0.0, NOT_NEGATIVE)
    repetition_penalty: float = _parameter("repetition_penalty", 1.0, Range(0, FLOAT32_MAX, above_low=True))
    presence_penalty: float = _parameter("presence_penalty", 0.0, ANY_FLOAT)
    frequency_penalty: float = _parameter("frequency_penalty", 0.0, ANY_FLOAT)
    prompt_ignore_length: int = _parameter("prompt_ignore_length", 0, COUNT)
    no_repeat_ngram_size: int = _parameter("no_repeat_ngram_size", 0, COUNT)
    min_length: int = _parameter("min_length", 0, COUNT)
    random_seed: int = _parameter("random_seed", 0, Range(0, UINT64_MAX, whole=True))

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            parameter.range.check(parameter.tensor, value)
            if not parameter.range.whole:
                object.__setattr__(self, name, float(value) + 0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, and none is sampled."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    def sets(self, names: Iterable[str]) -> bool:
        """Whether any of these parameters is not neutral."""
        return any(getattr(self, name) != PARAMETERS[name].neutral for name in names)


PARAMETERS: dict[str, Parameter] = {row.name: row.metadata["parameter"] for row in fields(SamplingConfig)}
NEUTRAL = SamplingConfig()


def shown(value: object) -> str:
    """A scalar as a message may show it: short, and never raising."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length():,} bits"
    if type(value) in (bool, float):
        return str(value)
    return "no number"


def top_p_behind(generated: np.ndarray, first: float, decay: float, floor: float, reset_id: int) -> np.float32:
    """The top-p that the token after `generated` [n] is sampled with, in the float32 steps in which it is reached.

    first, decay, floor, reset_id   top_p, top_p_decay, top_p_min and top_p_reset_ids of a SamplingConfig
    """
    resets = np.nonzero(generated == reset_id)[0]
    steps = len(generated) - (resets[-1] + 1 if len(resets) else 0)
    top_p, factor, least = np.float32(first), np.float32(decay), np.float32(floor)
    for _ in range(steps):
        before, top_p = top_p, max(top_p * factor, least)
        if top_p == before:
            break
    return top_p

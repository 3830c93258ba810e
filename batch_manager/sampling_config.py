"""The sampling parameters of a request.

Each parameter is declared once: the request tensor that sets it, the field of SamplingConfig, the neutral value, the
range, and the dtype on the device.
"""

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
    """The allowed values of a scalar, low..high. `high` is included, and `low` unless `above_low` is set.

    whole   allow integers only; otherwise integers and finite floats. A bool is never allowed
    """

    low: float
    high: float
    whole: bool = False
    above_low: bool = False

    def __contains__(self, value: object) -> bool:
        if type(value) is not int and (self.whole or type(value) is not float):
            return False
        # Comparisons are exact for integers of any size, and false for NaN.
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def check(self, name: str, value: object) -> None:
        """Raise InvalidRequestError if the value is outside the range. The error names the tensor, its value and the
        range."""
        if value not in self:
            raise InvalidRequestError(f"{name} is {shown(value)}", f"it must be {self}")

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
BITS_64 = Range(-(2**63), UINT64_MAX, whole=True)    # an unsigned number, which a client may store in an int64 tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declaration of one sampling parameter.

    tensor    the request tensor that sets the parameter
    neutral   value of the parameter if no tensor sets it
    range     allowed values of the parameter
    """

    tensor: str
    neutral: int | float
    range: Range

    @property
    def dtype(self) -> type[np.generic]:
        """The type on the device: float32, int32, or int64 for seeds, whose 64 bits are stored as a signed number."""
        if not self.range.whole:
            return np.float32
        return np.int32 if self.range.high <= INT32_MAX else np.int64

    @property
    def other(self) -> int | float:
        """A small allowed value other than the neutral one, for warm-up and tests."""
        return next(value for value in ((2, 3) if self.range.whole else (0.5, 0.25))
                    if value in self.range and value != self.neutral)

    def stored(self, value: int | float) -> int | float:
        """Convert a value to its form on the device. A value above 0 stays above 0 in float32."""
        if self.dtype is np.int64:
            return (int(value) ^ _SIGN_BIT) - _SIGN_BIT
        return max(value, _SMALLEST) if value > 0 else value


def _parameter(tensor: str, neutral: int | float, allowed: Range) -> Any:
    return field(default=neutral, metadata={"parameter": Parameter(tensor, neutral, allowed)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the tokens of one request are sampled. The defaults are neutral: greedy, no penalty, one beam.

    beam_width                   number of beams; 1: no beam search. With several beams, the parameters that only choose
                                 a token at random (top_k, top_p, min_p, random_seed) have no effect
    temperature                  above 0: divides the logits; 0: greedy
    top_k, top_p                 both 0, or top_k 1: greedy. Otherwise top_k filters the tokens, and top_p then
                                 filters the tokens that top_k keeps. top_k above 0 keeps the top_k likeliest
                                 tokens; 0 keeps all. top_p between 0 and 1 keeps the smallest set of likeliest
                                 tokens whose renormalized probabilities sum to at least top_p; 0 and 1 keep all.
                                 Each filter also keeps all tokens as likely as the last token that it keeps
    top_p_decay, top_p_min, top_p_reset_ids   after each token, top_p becomes max(top_p * decay, min). After the token
                                 with the reset id (-1: no reset), top_p returns to its first value. No effect if top_p
                                 is 0
    min_p                        of the tokens that top_k and top_p keep, drops the tokens with less than this share of
                                 the largest probability
    len_penalty, early_stopping, beam_search_diversity_rate   how beams compete, see decoding/beam_search.py; no effect
                                 at beam width 1
    repetition_penalty           for each token that the sequence contains: divides a positive logit, multiplies a
                                 negative one; 1: off
    presence_penalty, frequency_penalty   subtracted from the logit of a token that the sequence contains: once, or once
                                 per occurrence; 0: off
    prompt_ignore_length         number of leading prompt tokens that presence and frequency penalty ignore. If it is at
                                 least the prompt's length, only generated tokens count
    no_repeat_ngram_size         n-grams of this length do not repeat; 0: off
    min_length                   tokens that must be generated before the end id may be sampled
    random_seed                  the sampled token is a function of the logits, the seed and the position. The default
                                 seed is fixed, not random

    Each field declares its request tensor, neutral value and range. Integers are converted where floats are expected.
    A negative zero becomes zero.

    Raises InvalidRequestError for a value of another type, not finite or out of range. The error names the tensor.
    Admission checks values against the model (vocabulary, beam width).
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
        """Whether the sampled token is always the likeliest token."""
        return self.temperature == 0 or self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)

    def sets(self, names: Iterable[str]) -> bool:
        """Whether any of the parameters in `names` is not neutral."""
        return any(getattr(self, name) != PARAMETERS[name].neutral for name in names)


PARAMETERS: dict[str, Parameter] = {row.name: row.metadata["parameter"] for row in fields(SamplingConfig)}
NEUTRAL = SamplingConfig()


def shown(value: object) -> str:
    """Format a scalar for a message, briefly and without raising."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length():,} bits"
    if type(value) in (bool, float):
        return str(value)
    return "no number"


def top_p_after(generated: np.ndarray, first: float, decay: float, floor: float, reset_id: int) -> np.float32:
    """The top-p of the token that follows `generated` [n], computed in the same float32 steps as on the device.

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

"""One request's sampling knobs: their neutral values and their ranges, each written once."""

from dataclasses import dataclass

from ..errors import InvalidRequestError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
FLOAT32_MAX = 3.4028234663852886e38
MAX_TOP_K = 1024


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

# field of SamplingConfig -> (name of the tensor that sets it, range)
KNOBS: dict[str, tuple[str, Range]] = {
    "beam_width": ("beam_width", Range(1, INT32_MAX, whole=True)),
    "temperature": ("temperature", NOT_NEGATIVE),
    "top_k": ("runtime_top_k", Range(0, MAX_TOP_K, whole=True)),
    "top_p": ("runtime_top_p", SHARE),
    "top_p_decay": ("runtime_top_p_decay", Range(0, 1, above_low=True)),
    "top_p_min": ("runtime_top_p_min", Range(0, 1, above_low=True)),
    "top_p_reset_ids": ("runtime_top_p_reset_ids", Range(-1, INT32_MAX, whole=True)),
    "min_p": ("runtime_min_p", SHARE),
    "len_penalty": ("len_penalty", NOT_NEGATIVE),
    "early_stopping": ("early_stopping", Range(-INT32_MAX - 1, INT32_MAX, whole=True)),
    "beam_search_diversity_rate": ("beam_search_diversity_rate", NOT_NEGATIVE),
    "repetition_penalty": ("repetition_penalty", Range(0, FLOAT32_MAX, above_low=True)),
    "presence_penalty": ("presence_penalty", ANY_FLOAT),
    "frequency_penalty": ("frequency_penalty", ANY_FLOAT),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", COUNT),
    "min_length": ("min_length", COUNT),
    "random_seed": ("random_seed", Range(0, UINT64_MAX, whole=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How one request's tokens are drawn. The defaults are neutral: greedy, no penalty, one beam.

    beam_width                   sequences kept; 1: no beam search. With several, of what follows up to min_p only the
                                 temperature counts, and the seed does not
    temperature                  > 0 divides the logits; 0: greedy
    top_k, top_p                 0 and 0.0: greedy; k best, smallest set that holds p; p = 1 keeps everything
    top_p_decay, top_p_min, top_p_reset_ids   top_p shrinks by the factor at each token, down to the floor, and starts
                                 anew when the id was drawn (-1: never)
    min_p                        of what these leave, drops tokens below this share of the best one's probability
    len_penalty, early_stopping, beam_search_diversity_rate   how beams compete, see decoding/beam_search.py; without
                                 effect at beam width 1
    repetition_penalty           divides the logits of tokens seen before; 1: off
    presence_penalty, frequency_penalty   subtracted once, and per occurrence; 0: off
    no_repeat_ngram_size         no n-gram of this length twice; 0: off
    min_length                   generated tokens before the end id may be drawn
    random_seed                  the default is fixed, not random

    Raises InvalidRequestError, naming the tensor that sets the knob, for a value that is no number of its kind, not
    finite or out of range. What depends on a model (its vocabulary, its beam width) is checked at admission.
    """

    beam_width: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 1.0
    top_p_min: float = 1e-6
    top_p_reset_ids: int = -1
    min_p: float = 0.0
    len_penalty: float = 0.0
    early_stopping: int = 1
    beam_search_diversity_rate: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    random_seed: int = 0

    def __post_init__(self) -> None:
        for field, (tensor, allowed) in KNOBS.items():
            allowed.check(tensor, getattr(self, field))


NEUTRAL = SamplingConfig()


def shown(value: object) -> str:
    """A scalar as a message may show it: short, and never raising."""
    if type(value) is int:
        return str(value) if value.bit_length() <= 64 else f"an integer of {value.bit_length():,} bits"
    if type(value) in (bool, float):
        return str(value)
    return "no number"

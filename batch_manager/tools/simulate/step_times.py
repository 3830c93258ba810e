"""The arithmetic of a cost model, prepared for many steps.

Leaps and single steps use the same operations in the same order, so that their times are equal to the last bit.
"""

from collections.abc import Mapping
from typing import Any

from .cost_model import DISTINCT, CostModel, amount
from .step_shape import StepShape

# Terms that do not only depend on the number of generating sequences, in the order in which they are added.
SEPARATE = ("context_requests", "context_tokens", "context_attention", "cached_tokens", DISTINCT)


class StepTimes:
    """Predicts the seconds of the device and of the host for steps, as `CostModel` says, apart from rounding.

    Each amount is an integer, or an int64 array with an entry per step. A result is a number if all amounts are.
    """

    def __init__(self, cost: CostModel) -> None:
        self._generation, self._mixed, self._host = map(_Terms, (cost.generation_s, cost.mixed_s, cost.host_s))

    def step_s(self, shape: StepShape) -> Any:
        """Return the seconds of the device for a step of this shape."""
        return (self._mixed if shape.context_requests else self._generation).seconds(shape)

    def host_s(self, shape: StepShape) -> Any:
        """Return the seconds of the host's part of the iteration."""
        return self._host.seconds(shape)


class _Terms:
    """The terms of one kind of steps. Sums of the terms that depend on the number of generating sequences are kept."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._by_number = {term: each for term, each in seconds.items() if term not in SEPARATE}
        self._separate = [(term, seconds[term]) for term in SEPARATE if seconds.get(term)]
        self._sums: dict[int, float] = {}

    def seconds(self, shape: StepShape) -> Any:
        number = shape.generation_requests
        total: Any = self._sums.get(number)
        if total is None:
            total = self._sums[number] = sum(each * amount(term, shape) for term, each in self._by_number.items())
        for term, each in self._separate:
            total = total + each * (shape.cached_tokens - shape.shared_tokens if term == DISTINCT
                                    else getattr(shape, term))
        return total

"""The choice of a form for each step: the forms in order, what can keep a batch out of one, and the protocol of a form.

`Forms.start` takes the first form without an obstacle. An obstacle is a set of bits, and each bit has a word in WORDS.
A form lists the bits that it serves. So a form refuses a bit that it has never heard of.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ...decoding import slots as features
from ...decoding.slots import CONTEXT_LOGITS, STAGES, SlotState
from ...handover import ScheduledBatch
from ...seams import PendingStep

if TYPE_CHECKING:
    from ..parts import DeviceParts

ORDER = ("graph", "fused", "fixed", "compiled", "packed", "padded")

# Bits of a batch. The bits below 48 are those of its sequences, see decoding/slots.py.
CONTEXTS, DRAFTS, EMBEDDINGS, PADDING, CONTEXT_DRAFTS = (1 << bit for bit in range(48, 53))
# Bits of `StepForm.misfit`.
ROWS, CONTEXT_TOKENS, CONTEXTS_AT_ONCE, LENGTH, SLOTS, NOT_READY = (1 << bit for bit in range(56, 62))

# Bit, or the bits of all stages -> the word for it in statistics, traces, logs and tests.
WORDS: Mapping[int, str] = MappingProxyType({
    STAGES: "stages",
    features.SAMPLES: "sampled", features.LOG_PROBS: "log-probs", CONTEXT_LOGITS: "context logits",
    features.GENERATION_LOGITS: "generation logits", features.HISTORY: "history", features.STOP_WORDS: "stop words",
    features.BEAMS: "beams", features.POST_PROCESSED: "post-processor", features.MORE_END_IDS: "more end ids",
    features.TOP_LOG_PROBS: "top log-probs", features.RAW_LOG_PROBS: "raw log-probs",
    features.ADAPTER: "adapter",
    CONTEXTS: "contexts", DRAFTS: "drafts", EMBEDDINGS: "embeddings", PADDING: "padding",
    CONTEXT_DRAFTS: "context drafts",
    ROWS: "rows", CONTEXT_TOKENS: "context tokens", CONTEXTS_AT_ONCE: "contexts at once", LENGTH: "length",
    SLOTS: "slots", NOT_READY: "not ready"})


def words_of(bits: int) -> list[str]:
    """Return the words for the bits, in the order of WORDS. A bit without a word is called by its number."""
    words = [word for known, word in WORDS.items() if bits & known]
    return [*words, *(f"bit {bit}" for bit in range(bits.bit_length()) if bits >> bit & 1 and not 1 << bit & KNOWN)]


KNOWN = sum(WORDS)


def traits_of(batch: ScheduledBatch, slots: SlotState) -> int:
    """Return the bits of a batch: the features of all its sequences, and what the batch itself has.

    Context logits of a generating sequence do not count, because its context has run.
    """
    generation, traits = batch.generation, 0
    if len(generation.slots):
        traits = int(np.bitwise_or.reduce(slots.features[generation.slots])) & ~CONTEXT_LOGITS
        if generation.num_drafts is not None:
            traits |= DRAFTS
    if batch.context:
        traits |= CONTEXTS
        for work in batch.context:
            traits |= int(slots.features[work.slot])
            if work.embeddings is not None:
                traits |= EMBEDDINGS
            if work.num_drafts:
                traits |= CONTEXT_DRAFTS
    return traits | PADDING if batch.num_padded_rows else traits


class Choice(NamedTuple):
    """The form of a step, and why not an earlier one.

    passed   (name, obstacle) of each form that was passed over, in order
    """

    form: str
    passed: Sequence[tuple[str, int]]

    @property
    def obstacles(self) -> dict[str, str]:
        """Name of each form that was passed over -> the first word of its obstacle."""
        return {name: words_of(obstacle)[0] for name, obstacle in self.passed}


class UnservedBatchError(NotImplementedError):
    """No form of the engine serves the batch. Admission refuses such requests, so this is an error of the engine."""

    def __init__(self, passed: Sequence[tuple[str, int]]) -> None:
        reasons = "; ".join(f"{name}: {', '.join(words_of(obstacle))}" for name, obstacle in passed)
        super().__init__(f"no form of a step serves this batch ({reasons})")


def by_reason(absent: Mapping[str, str]) -> list[str]:
    """Return a line for each reason: the forms that an engine lacks for it, and the reason."""
    return [f"{', '.join(name for name in absent if absent[name] == reason)}: {reason}"
            for reason in dict.fromkeys(absent.values())]


class NoForm(Exception):
    """A form cannot be made. The text is the reason, which `Forms.absent` keeps.

    is_wrong   whether the form was made but computes something else, or a capture failed: more than a fact about the
               model, and a warning in the log
    """

    def __init__(self, reason: str, *, is_wrong: bool = False) -> None:
        super().__init__(reason)
        self.is_wrong = is_wrong


class StepForm(Protocol):
    """One way to run a step. It is complete when constructed: then only counters and contents of buffers change.

    name       one of ORDER
    dispatch   what computes: "triton", "compiled" or "torch"
    serves     the bits that a batch may have
    threads    threads of torch in a step on a CPU; None: the engine's number
    """

    name: str
    dispatch: str
    serves: int
    threads: int | None

    def misfit(self, batch: ScheduledBatch) -> int:
        """Return the bits of size that keep the batch out; 0: it fits. Changes nothing."""
        ...

    def start(self, batch: ScheduledBatch, traits: int) -> PendingStep:
        """Launch a step, see seams.ModelBackend. `traits` is the result of `traits_of` for the batch.

        Writes only the KV cache entries of the step's tokens, values by position, and the form's own buffers. An
        exception leaves the step to the caller: a form never hands it to another form.
        """
        ...

    def figures(self) -> Mapping[str, int]:
        """Return the form's own statistics."""
        ...

    def close(self) -> None:
        """Free the form's memory. Called in ORDER, so that graphs are freed before what they point to."""
        ...


class Forms:
    """The forms of an engine, and the choice of one for each step.

    forms    in ORDER; at least one
    absent   name of a form that this engine lacks -> the reason

    steps   name of a form -> number of steps that it has launched
    """

    def __init__(self, forms: Sequence[StepForm], parts: "DeviceParts", absent: Mapping[str, str]) -> None:
        assert [form.name for form in forms] == [name for name in ORDER if name in {form.name for form in forms}]
        self._forms, self._slots, self.absent = tuple(forms), parts.slots, MappingProxyType(dict(absent))
        self._threads = [parts.threads(form.threads) for form in forms]
        self.steps = dict.fromkeys((form.name for form in forms), 0)

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch a step in the first form without an obstacle.

        Block tables, operations and new slots of the batch have been carried out. The result has `choice`, a Choice.

        Raises   UnservedBatchError
        """
        traits, passed = traits_of(batch, self._slots), []
        for form, threads in zip(self._forms, self._threads):
            obstacle = traits & ~form.serves or form.misfit(batch)
            if not obstacle:
                with threads():
                    pending = form.start(batch, traits)
                self.steps[form.name] += 1
                pending.choice = Choice(form.name, passed)
                return pending
            passed.append((form.name, obstacle))
        raise UnservedBatchError(passed)

    @property
    def dispatch(self) -> str:
        """What computes in the first form."""
        return self._forms[0].dispatch

    def figures(self) -> dict[str, int]:
        """Return the number of steps by form, and the statistics of the forms."""
        figures: dict[str, int] = {}
        for form in reversed(self._forms):                 # of equal names, the first form's is told
            figures |= form.figures()
        for name, count in self.steps.items():
            figures[f"{name.capitalize()} Steps"] = count
        return figures

    def close(self) -> None:
        for form in self._forms:
            form.close()

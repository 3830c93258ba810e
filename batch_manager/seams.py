"""The protocols of the parts that can be replaced. Structural: implement the methods, inherit nothing."""

from dataclasses import dataclass
from typing import Protocol

from .errors import ConfigError
from .handover import ScheduledBatch, StepOutput


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the host tower needs to know of a model and its device; fixed for the life of the backend.

    vocab_size            token ids are 0 <= id < vocab_size, of the model (not of a tokenizer)
    max_seq_len           positions the backend can run: prompt plus generated tokens of one sequence
    num_blocks            KV cache blocks in the pool
    tokens_per_block      tokens one block holds
    num_slots             sequences the backend can hold state for
    dispatch              which implementation of the kernels runs: "triton", "torch" or "scripted"
    hidden_size           entries of a token's embedding; 0: embeddings of prompt-tuning tokens are not taken
    device, dtype         in words, for logs and stats
    attention_window      tokens a token sees, itself included, besides the first `sink_tokens`: blocks that no later
                          one sees are given to others. None: tokens see all before them
    sink_tokens           first tokens of a sequence that stay visible outside the window
    host_blocks           blocks of a second pool in host memory, for what is evicted from the first
    is_asynchronous       `start` returns before the step is done, so that the next one can be planned meanwhile
    copies_blocks         carries out `handover.BlockCopy`; block reuse and beams need it
    architecture          of the model, for people to read
    end_ids               tokens that end a text, as the checkpoint says. A request has those of its own tensor `end_id`
    model_implementation  whose class computes: "native", "transformers", or "" where a backend does not say

    Raises ConfigError for a number that cannot be one.
    """

    vocab_size: int
    max_seq_len: int
    num_blocks: int
    tokens_per_block: int
    num_slots: int
    dispatch: str
    hidden_size: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    attention_window: int | None = None
    sink_tokens: int = 0
    host_blocks: int = 0
    is_asynchronous: bool = False
    copies_blocks: bool = False
    architecture: str = ""
    end_ids: tuple[int, ...] = ()
    model_implementation: str = ""

    def __post_init__(self) -> None:
        for lowest, names in ((1, ("vocab_size", "max_seq_len", "num_blocks", "tokens_per_block", "num_slots")),
                              (0, ("hidden_size", "sink_tokens", "host_blocks"))):
            for name in names:
                self._check(name, lowest)
        if self.attention_window is not None:
            self._check("attention_window", 1)
        if not isinstance(self.end_ids, tuple) or not all(type(token) is int for token in self.end_ids):
            raise ConfigError(f"BackendInfo.end_ids is {self.end_ids!r}", "a tuple of integers",
                              "correct what the backend says of itself")

    def _check(self, name: str, lowest: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < lowest:
            raise ConfigError(f"BackendInfo.{name} is {value!r}", f"an integer of at least {lowest}",
                              "correct what the backend says of itself")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes held for weights, KV cache and buffers, by kind of memory."""

    gpu: int = 0
    cpu: int = 0
    pinned: int = 0


class PendingStep(Protocol):
    """A step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for the step and return its output. Called once."""
        ...


class ModelBackend(Protocol):
    """Everything that computes. Used by one thread only, after construction."""

    info: BackendInfo

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step and return at once where the device allows it. The step before it may not be finished yet:
        steps run in the order of their launches, and read what the ones before them left on the device.

        Before the step, the batch's block table updates are applied and those of its operations are carried out, in
        order, that were not carried out for a batch before (`ScheduledBatch.new_operations`). Where `start` returns,
        that will have happened even if the step fails: it is not said again. Where `start` raises, it is.

        Raises whatever the step raises (torch's out-of-memory errors and MemoryError are told apart from others), and
        DeviceLostError when nothing can run any more. So does `finish`. After a raise, running the batch or a part of
        it again must give what a first run would have given, also when the one step that was launched after it has run
        in between.
        """
        ...

    def memory_usage(self) -> MemoryUsage:
        ...

    def close(self) -> None:
        """Give back memory and handles. Idempotent."""
        ...

    # A backend may have one method more. Its numbers, by names of its own, are in the statistics of each iteration:
    #     def figures(self) -> Mapping[str, int]


class Clock(Protocol):
    """Time, injected so that a simulation can make its own."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def timestamp(self) -> str:
        """Local wall time as `%m-%d-%Y %H:%M:%S`."""
        ...

"""The protocols of replaceable parts. They are structural: a part implements the methods and need not inherit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Protocol

from .adapter_values import AdapterModules
from .errors import ConfigError
from .handover import ScheduledBatch, StepOutput
from .option_values import exact_integer, exact_number, is_text, put_count, shown_option


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Facts about a model and its device, for the host side of the engine. They are fixed for the life of the backend.

    vocab_size            token ids of the model (not of a tokenizer) are 0 <= id < vocab_size
    max_seq_len           maximum number of positions of a sequence: prompt plus generated tokens
    num_blocks            KV cache blocks in the pool
    tokens_per_block      tokens per block
    num_slots             sequences for which the backend can hold state
    dispatch              what computes a step: "triton", "compiled", "torch", or a name that a custom backend chooses
    hidden_size           entries of a token's embedding; 0: no prompt-tuning embeddings
    device, dtype         by name, for logs and statistics
    kv_cache_dtype        of keys and values in the pool, by name: "bfloat16", "fp8_e4m3"; "auto": that of `dtype`
    attention_window      tokens that a token attends to, itself included, besides the first `sink_tokens`. Blocks
                          before the window are freed, except those of sink tokens. None: a token attends to all
                          tokens up to itself
    sink_tokens           first tokens of a sequence that stay visible outside the window
    host_blocks           blocks of a second pool in host memory, for content evicted from the first pool
    is_asynchronous       `start` returns before the step is done, so that the next step can be planned meanwhile
    copies_blocks         the backend implements `handover.BlockCopy`; block reuse and beams need it
    architecture          architecture of the model, for people to read
    end_ids               the checkpoint's end ids, for information. A request's end ids come from its tensor `end_id`
    model_implementation  origin of the model class: "native", "transformers", or "" if unknown
    not_compiled          why steps on a CPU do not run as compiled code; "" if they do, and on other devices
    not_captured          why steps are not captured as CUDA graphs and replayed; "" if they are
    absent                name of a form of a step -> why the backend lacks it, see docs/steps.md
    max_draft_tokens      most draft tokens of a sequence that a step verifies; 0: none
    draft_cost            what a draft adds to the time of a step of one sequence, of its time without drafts; 0 to 1.
                          The engine proposes drafts where they pay
    max_adapter_size      largest rank of a LoRA adapter; 0: the backend has no adapters
    adapter_pages         pages on the device for adapters, each for one rank of all `adapter_modules`
    adapter_modules       the projections that adapters may change; None: the backend has no adapters
    quantized_activations   "int8" if quantised weights are multiplied with rounded numbers; "" if not

    Raises ConfigError for a value of the wrong type or out of range.
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
    not_compiled: str = ""
    not_captured: str = ""
    absent: Mapping[str, str] = field(default_factory=dict, hash=False)
    max_draft_tokens: int = 0
    draft_cost: float = 0.08
    max_adapter_size: int = 0
    adapter_pages: int = 0
    adapter_modules: AdapterModules | None = field(default=None, hash=False)
    kv_cache_dtype: str = "auto"
    quantized_activations: str = ""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "num_blocks", "tokens_per_block", "num_slots"):
            put_count(self, name, owner="BackendInfo.")
        for name in ("hidden_size", "sink_tokens", "host_blocks", "max_draft_tokens", "max_adapter_size",
                     "adapter_pages"):
            put_count(self, name, minimum=0, owner="BackendInfo.")
        put_count(self, "attention_window", optional=True, owner="BackendInfo.")
        if not is_text(self.dispatch):                       # every statistics record has it
            raise ConfigError(f"BackendInfo.dispatch is {self.dispatch!r:.200}", "expected a text that has UTF-8",
                              "pass for instance 'torch'")
        cost = exact_number(self.draft_cost)
        if cost is None or not 0 <= cost <= 1:
            raise ConfigError(f"BackendInfo.draft_cost is {shown_option(self.draft_cost)}", "expected a number in 0..1",
                              "leave it out, or measure it")
        end_ids = [exact_integer(token) for token in self.end_ids] if isinstance(self.end_ids, tuple) else [None]
        if None in end_ids:
            raise ConfigError(f"BackendInfo.end_ids is {self.end_ids!r}", "expected a tuple of integers")
        object.__setattr__(self, "end_ids", tuple(end_ids))
        if len({bool(self.max_adapter_size), bool(self.adapter_pages), self.adapter_modules is not None}) > 1:
            raise ConfigError(f"BackendInfo.max_adapter_size is {self.max_adapter_size}, adapter_pages is "
                              f"{self.adapter_pages} and adapter_modules is "
                              f"{'None' if self.adapter_modules is None else 'set'}",
                              "a backend has all three or none", "set them together")


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes that weights, KV cache and buffers take together, in each kind of memory."""

    gpu: int = 0
    cpu: int = 0
    pinned: int = 0


class PendingStep(Protocol):
    """A launched step."""

    def finish(self) -> StepOutput:
        """Wait for the step and return its output. The loop calls the method once."""
        ...


class ModelBackend(Protocol):
    """Runs the model. After construction, a single thread uses the backend."""

    info: BackendInfo

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch one step, and return at once if the device allows it. The previous step may still be running. Steps
        run in launch order and read the state that earlier steps left on the device.

        Before the step, apply the block table updates of the batch. Then run its operations in order, except operations
        that ran for an earlier batch (`ScheduledBatch.new_operations`). Table updates take effect once `start` has
        returned, and are not repeated even if the step fails. If `start` raises, the next launch repeats them.
        Later batches contain the same operations again, until a step that contains them is read.

        `start` and `finish` may raise any exception. The loop reports MemoryError and torch's out-of-memory errors as
        such. DeviceLostError means that no step can run any more. After an exception, running the batch or a part of it
        again must give the result of a first run, even if the next step, already launched, has run in between.
        """
        ...

    def memory_usage(self) -> MemoryUsage:
        """Return the number of bytes that the backend holds now, in each kind of memory."""
        ...

    def close(self) -> None:
        """Free memory and handles. Idempotent."""
        ...

    # Optional, both for a store of blocks: the memory of a host block, which other threads read and write, and at most
    # 64 bytes that name everything that the content of a block depends on besides its tokens, adapter and cache_salt.
    # `fingerprint` is called once, on another thread. Such a backend also gets batches without sequences, which only
    # have operations:
    #     def host_block(self, host_id: int) -> memoryview
    #     def fingerprint(self) -> bytes
    # Optional. The loop adds the returned numbers to the statistics of each iteration, under the returned names:
    #     def figures(self) -> Mapping[str, int]
    # Optional. An idle engine calls it a few hundred times a second. It raises DeviceLostError if no step can run:
    #     def check(self) -> None


class Clock(Protocol):
    """A source of time that can be replaced, for instance by a simulation."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start. The value never decreases."""
        ...

    def timestamp(self) -> str:
        """Local wall time as `%m-%d-%Y %H:%M:%S`."""
        ...


def integers(figures: Mapping[str, int]) -> dict[str, int]:
    """Return the figures of a part, checked: JSON can hold them.

    Raises TypeError for a name that is no str and a value that is no integer, and ValueError for a name without UTF-8
    and a value that needs more than 64 bits.
    """
    checked = {str.__str__(name): index(value) for name, value in figures.items()}
    "".join(checked).encode()                              # UnicodeEncodeError, a ValueError, names the character
    for name, value in checked.items():
        if not -2**63 <= value < 2**64:
            raise ValueError(f"the figure {name[:200]!r} has {value.bit_length()} bits; expected at most 64")
    return checked

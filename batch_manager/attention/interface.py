"""What a step's attention is planned from, and the protocol of an implementation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch

from ..errors import ConfigError


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Where the tokens of one packed step belong, on the host. Contexts first, then generation rows.

    T tokens, n sequences of which the first c are contexts, r rows that need logits.

    token_ids      [T] int32   a generation row holds 0: its token is known to who draws the tokens, by its slot
    positions      [T] int32   position of each token in its sequence
    pool_slots     [T] int64   where its key and value go: block id * tokens_per_block + offset
    slots          [n] int32   sequence slots in batch order; a slot with beams once for each, as a sequence of its own
    query_starts   [n + 1] int32   offsets of the sequences in the packed tokens
    kv_lengths     [n] int32   tokens in the KV cache once this step's are written
    block_tables   [n, m] int32   block ids in order, m the longest table of the step. Entries past a sequence's own,
                   and of blocks it gave back because they left its window, are -1 or name any block: not to be read
    num_contexts   c
    logits_rows    [r] int64   packed indices of the tokens after which one is sampled, in batch order: the last one of
                   each sequence that yields a token; where it has draft tokens, these and the one before them
    num_verifying  the last so many of the contexts are sequences that generate and have draft tokens, or stand among
                   such: their first token is 0 as a generation row's is, the others are the drafts. An attention need
                   not know
    """

    token_ids: np.ndarray
    positions: np.ndarray
    pool_slots: np.ndarray
    slots: np.ndarray
    query_starts: np.ndarray
    kv_lengths: np.ndarray
    block_tables: np.ndarray
    num_contexts: int
    logits_rows: np.ndarray
    num_verifying: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        return int(self.query_starts[self.num_contexts])


@dataclass(frozen=True, slots=True)
class GenerationInputs:
    """What attention of a step's generation rows reads on the device.

    R rows of one token each; some of them may be padding, of length 0. A row's token is the newest of its sequence: its
    position is one less than the length, and its key and value go to that place of the last block.

    kv_lengths     [R] int32   tokens in the KV cache once this step's are written; 0: padding
    table_rows     [R] int32   the row of `block_tables` of each sequence; None: they are in order
    block_tables   [rows, m] int32
    work           window -> (work list [W, 4] int32, part starts [R + 1] int32), as of `decode_work_list`; None instead
                   of part starts: no sequence is cut into parts
    """

    kv_lengths: torch.Tensor
    table_rows: torch.Tensor | None
    block_tables: torch.Tensor
    work: dict[int | None, tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class ContextInputs:
    """The same of a step's contexts: T tokens of C sequences. The last tokens and sequences may be padding.

    positions      [T] int32 or int64
    pool_slots     [T] int64   where the key and the value of each token go, as in PackedStep; -1: padding
    query_starts   [C + 1] int32   offsets of the sequences in these tokens; padding has no tokens
    kv_lengths     [C] int32   tokens in the KV cache once this step's are written
    table_rows     [C] int32   the row of `block_tables` of each sequence; None: they are in order
    block_tables   [rows, m] int32
    work           [W, k] int32   as of `context_work_list`
    """

    positions: torch.Tensor
    pool_slots: torch.Tensor
    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    table_rows: torch.Tensor | None
    block_tables: torch.Tensor
    work: torch.Tensor


class RotaryTable(Protocol):
    """Cosines and sines of the rotary position embedding; a layers.Rotary is one.

    cos, sin   [max positions, rotary dimensions / 2] float32 on the device; the half-split ("NeoX") rotation, any
               scaling of the amplitude (yarn) already multiplied in
    """

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """How one layer attends. What a layer may have beside these is a field here, with the value that means "without".

    scale     factor on the products of queries and keys, before all else; usually head_size ** -0.5
    window    tokens a query sees, itself included; None: all before it
    softcap   scores become softcap * tanh(scores / softcap), before the softmax; None: they stay as they are
    alibi_slopes     of each query head: slope * (key position - query position) is added to a score, after the cap and
                     before the mask (ALiBi, Press et al. 2022); None: nothing
    alibi_bfloat16_factor   None, or the slopes are numbers of bfloat16 and what is added is, as Falcon computes it,
                     factor * (f(key position) - f(query position)) with f(p) = bfloat16(slope * bfloat16(p))
    has_sink_logits  `run` is given a logit of each head that counts in the softmax as one more key does whose value is
                     zeros. It has nothing to do with the sink of windows.py
    Raises    ConfigError for a value that is out of range.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    alibi_bfloat16_factor: float | None = None
    has_sink_logits: bool = False

    def __post_init__(self) -> None:
        for name, value, expectation, fits in (
                ("scale", self.scale, "a finite number above 0", _is_positive(self.scale)),
                ("window", self.window, "None or an integer above 0",
                 self.window is None or _is_positive(self.window) and isinstance(self.window, int)),
                ("softcap", self.softcap, "None or a finite number above 0",
                 self.softcap is None or _is_positive(self.softcap)),
                ("alibi_slopes", self.alibi_slopes, "None or a tuple of finite numbers, one for each query head",
                 self.alibi_slopes is None or isinstance(self.alibi_slopes, tuple) and len(self.alibi_slopes) > 0
                 and all(_is_finite(slope) for slope in self.alibi_slopes)),
                ("alibi_bfloat16_factor", self.alibi_bfloat16_factor,
                 "None, or a finite number above 0 beside alibi_slopes", self.alibi_bfloat16_factor is None
                 or self.alibi_slopes is not None and _is_positive(self.alibi_bfloat16_factor)),
                ("has_sink_logits", self.has_sink_logits, "True or False", isinstance(self.has_sink_logits, bool))):
            if not fits:
                raise ConfigError(f"LayerAttention.{name} is {value!r}", expectation, "correct the model's class")


def refuse_wrong_sink_logits(layer: int, how: LayerAttention, sink_logits: object) -> NoReturn:
    """Raise ConfigError: `run` was given sink logits where the layer has none, or none where it has some."""
    given = "no" if sink_logits is None else "a tensor of"
    raise ConfigError(f"attention of layer {layer} was given {given} sink_logits",
                      f"what LayerAttention.has_sink_logits says, which is {how.has_sink_logits}",
                      "correct the model's class")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


class Attention(Protocol):
    """Built once per model and pool; used by one thread."""

    dispatch: str   # "triton" or "torch"

    def plan(self, step: PackedStep) -> Sequence[np.ndarray] | None:
        """Prepare for one step, on the host: choose kernels, cut the work up.

        Returns  the arrays that `run` needs on the device, or None. The caller sends them together with its own, in one
                 copy that the host does not wait for: a copy made here would wait for the step before.
        """
        ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take the arrays that `plan` returned, on the device. After `plan`, before the first `run` of the step. An
        attention whose `plan` returns None needs no such method."""
        ...

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            rotary: RotaryTable | None, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate query and key, write key and value into the pool, attend.

        Shapes   query [T, heads, head_size]; key, value [T, kv_heads, head_size]; result [T, heads * head_size];
                 sink_logits [heads] float32, contiguous, of layers that have them. A model of other layers calls `run`
                 without this argument: an attention that takes none serves it
        Mutates  the pool's pages of this layer; may overwrite query and key
        Raises   ConfigError for sink_logits where LayerAttention has none, and for none where it has some
        """
        ...


class BindableAttention(Attention, Protocol):
    """An attention that also serves steps whose inputs stay where they are, so that graphs can replay them.

    windows    the different windows of the layers, in any order
    can_bind   whether it does, as it was made; an attention without this member does not
    """

    windows: tuple[int | None, ...]
    can_bind: bool

    def plan_generation(self, kv_lengths: np.ndarray) -> dict[int | None, tuple[np.ndarray, np.ndarray]]:
        """On the host, by window: work list [W, 4] and part starts [s + 1] of sequences of these lengths [s]."""
        ...

    def most_parts(self, num_rows: int, max_blocks: int) -> int:
        """Rows that such a work list has at most, for so many sequences of up to so many blocks."""
        ...

    def plan_contexts(self, query_lengths: np.ndarray, kv_lengths: np.ndarray) -> np.ndarray:
        """On the host: the work list [W, k] int32 of contexts, from their new tokens and their keys after the step."""
        ...

    def most_context_work(self, num_tokens: int, num_contexts: int) -> tuple[int, int]:
        """(rows that such a list has at most for so many tokens of so many contexts, k). A row of -1 is no work."""
        ...

    def bind(self, generation: GenerationInputs, contexts: ContextInputs | None) -> None:
        """Let `run` serve the step that reads these, in place of `plan` and `receive`. Its rows are those of
        `generation`, then those of `contexts`. What `run` launches follows from their shapes and addresses alone."""
        ...


class HeadLayout(Protocol):
    """What an implementation needs to know of a model; a ModelSpec is one."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    attention: tuple[LayerAttention, ...]   # one for each layer

"""The inputs of attention, and the protocol that every implementation satisfies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch

from ..errors import ConfigError
from ..triton_kernels.context_work_list import ContextTileWork, MostContextTileWork


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Host arrays that describe the tokens of one packed step. Contexts come first, then generation rows.

    The step has T tokens of n sequences, of which the first c are contexts. It samples from the logits of r tokens.

    token_ids      [T] int32   0 for a generation row, whose token is in the sampler's state of the slot
    positions      [T] int32   position of each token in its sequence
    pool_slots     [T] int64   where the key and value of each token go: block id * tokens_per_block + offset
    slots          [n] int32   slot of each sequence, in batch order; each beam is a sequence and repeats the slot
    query_starts   [n + 1] int32   offset of each sequence in the packed tokens, then T
    kv_lengths     [n] int32   tokens of each sequence in the KV cache, including the tokens of this step
    block_tables   [n, m] int32   block ids in order; m is the length of the longest table of the step. Entries past the
                   end of a sequence, and entries of freed blocks outside its window, are arbitrary: do not read them
    num_contexts   c; in a step with draft tokens, generating sequences count as contexts
    logits_rows    [r] int64   indices of the packed tokens whose logits are sampled, in batch order: the last token of
                   each sequence that yields a token; with drafts, also each draft and the token before the first draft
    num_verifying  in a step with draft tokens, the number of generating sequences. They are the last contexts of the
                   step. The token ids of such a sequence are 0, followed by its drafts, if any. Attention can ignore
                   this field
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
    """Device tensors that attention reads for the generation rows of a step.

    The step has R generation rows of one token each; padding rows have length 0. The token of a row is the newest of
    its sequence: the position of the token is the length minus one, and its key and value are stored at this position.

    kv_lengths     [R] int32   tokens of each sequence in the KV cache, including the token of this step; 0: padding
    table_rows     [R] int32   row of `block_tables` for each sequence; None: row i belongs to sequence i
    block_tables   [rows, m] int32   block ids in order, as in PackedStep
    work           window -> (work list [W, 4] int32, part starts [R + 1] int32) of `plan_generation`. Part starts are
                   None when no sequence is split into parts
    """

    kv_lengths: torch.Tensor
    table_rows: torch.Tensor | None
    block_tables: torch.Tensor
    work: dict[int | None, tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class ContextInputs:
    """Device tensors that attention reads for the contexts of a step: T tokens of C sequences.

    The last tokens and sequences can be padding.

    positions      [T] int32 or int64   position of each token in its sequence
    pool_slots     [T] int64   where the key and value of each token go, as in PackedStep; -1: padding
    query_starts   [C + 1] int32   offset of each sequence in the T tokens; padding sequences are empty
    kv_lengths     [C] int32   tokens of each sequence in the KV cache, including the tokens of this step
    table_rows     [C] int32   row of `block_tables` for each sequence; None: row i belongs to sequence i
    block_tables   [rows, m] int32   block ids in order, as in PackedStep
    work           window -> (work list [W, 5] int32, part starts [S + 1] int32, merged rows [S] int32), the fields
                   of ContextTileWork for S split tokens. The last two are None when no tile is split into parts
    """

    positions: torch.Tensor
    pool_slots: torch.Tensor
    query_starts: torch.Tensor
    kv_lengths: torch.Tensor
    table_rows: torch.Tensor | None
    block_tables: torch.Tensor
    work: dict[int | None, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


class RotaryTable(Protocol):
    """Cosines and sines of the rotary position embedding. `layers.Rotary` satisfies this protocol.

    cos, sin   [max positions, rotary dimensions / 2] float32 on the device, for the half-split ("NeoX") rotation. They
               include the amplitude factor of scaled variants (yarn, longrope)
    """

    cos: torch.Tensor
    sin: torch.Tensor


class HeadNormWeights(Protocol):
    """RMS norms of each query head and key head, before rotation. `layers.HeadNorms` satisfies this protocol.

    x becomes x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), rounded to the dtype of x.

    query_weight, key_weight   [head_size] on the device
    """

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    epsilon: float
    weight_offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The options of attention in one layer. Every option but `scale` is off by default.

    scale     factor on the dot products of queries and keys, applied first; usually head_size ** -0.5
    window    number of tokens that a query sees, itself included; None: no limit
    softcap   replace scores by softcap * tanh(scores / softcap), before the softmax; None: no cap
    alibi_slopes     one slope per query head: add slope * (key position - query position) to each score, after the cap
                     and before the mask (ALiBi, Press et al. 2022); None: no bias
    alibi_bfloat16_factor   compute the bias in bfloat16, as Falcon does: factor * (f(key position) - f(query position))
                     with f(p) = bfloat16(slope * bfloat16(p)); None: compute it in float32
    has_sink_logits  `run` gets one extra logit per head, which counts in the softmax like a key whose value is zero.
                     Sink logits are unrelated to the sink tokens of windows.py
    key_scale, value_scale   an FP8 KV cache has keys and values divided by these, see fp8.py
    Raises    ConfigError for a value out of range
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    alibi_bfloat16_factor: float | None = None
    has_sink_logits: bool = False
    key_scale: float = 1.0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, value, expectation, fits in (
                ("scale", self.scale, "a finite number above 0", _is_positive(self.scale)),
                ("key_scale", self.key_scale, "a finite number above 0", _is_positive(self.key_scale)),
                ("value_scale", self.value_scale, "a finite number above 0", _is_positive(self.value_scale)),
                ("window", self.window, "None or an integer above 0",
                 self.window is None or _is_positive(self.window) and isinstance(self.window, int)),
                ("softcap", self.softcap, "None or a finite number above 0",
                 self.softcap is None or _is_positive(self.softcap)),
                ("alibi_slopes", self.alibi_slopes, "None or a tuple of finite numbers, one for each query head",
                 self.alibi_slopes is None or isinstance(self.alibi_slopes, tuple) and len(self.alibi_slopes) > 0
                 and all(_is_finite(slope) for slope in self.alibi_slopes)),
                ("alibi_bfloat16_factor", self.alibi_bfloat16_factor,
                 "None, or a finite number above 0 with alibi_slopes set", self.alibi_bfloat16_factor is None
                 or self.alibi_slopes is not None and _is_positive(self.alibi_bfloat16_factor)),
                ("has_sink_logits", self.has_sink_logits, "True or False", isinstance(self.has_sink_logits, bool))):
            if not fits:
                raise ConfigError(f"LayerAttention.{name} is {value!r}", f"expected {expectation}", "")


def refuse_wrong_sink_logits(layer: int, how: LayerAttention, sink_logits: object) -> NoReturn:
    """Raise ConfigError, because the sink logits passed to `run` contradict has_sink_logits of the layer.

    how           the LayerAttention of the layer
    sink_logits   the argument of `run`; None: no sink logits
    """
    passed = "without" if sink_logits is None else "with"
    raise ConfigError(f"the attention of layer {layer} was called {passed} sink_logits",
                      f"its LayerAttention.has_sink_logits is {how.has_sink_logits}",
                      "change has_sink_logits or the call in the model's class")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


class Attention(Protocol):
    """Paged attention of all layers of a model over one KV cache pool. One thread at a time runs the methods.

    A step calls `plan` once, then `receive` once, and then `run` for each layer.

    Optional: `norms_heads = True`. `run` then has a parameter `norms`: HeadNormWeights that it applies to query and key
    before it rotates them; None: no norms. Without this attribute, the layers launch norms of their own.
    """

    dispatch: str   # "triton" or "torch"

    def plan(self, step: PackedStep) -> Sequence[np.ndarray] | None:
        """Prepare one step on the host: select kernels and partition the work.

        Returns  the arrays that `run` needs on the device; None: it needs none. The caller uploads them with its
                 own arrays in one asynchronous copy. `plan` must not copy anything to the device, because the copy
                 would wait for the previous step
        """
        ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Receive the device copies of the arrays that `plan` returned.

        The caller calls `receive` after `plan` and before the first `run` of the step. If `plan` returned None, the
        caller may leave out the call.
        """
        ...

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            rotary: RotaryTable | None, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate query and key, write key and value to the pool, and return the attention of the queries.

        rotary   None: query and key are not rotated

        Shapes   query [T, heads, head_size]; key, value [T, kv_heads, head_size]; result [T, heads * head_size];
                 sink_logits [heads] float32, contiguous, only for layers with has_sink_logits. Models without such
                 layers omit the argument. An attention that serves only such models may lack the parameter
        Mutates  this layer's keys and values in the pool; may overwrite query and key
        Raises   ConfigError if sink_logits contradicts LayerAttention.has_sink_logits
        """
        ...


class BindableAttention(Attention, Protocol):
    """An attention that can read its inputs from fixed device buffers, so that graphs can replay its steps.

    windows    the distinct windows of the layers, in any order
    can_bind   whether this instance supports `bind`. An attention without this attribute does not support it
    """

    windows: tuple[int | None, ...]
    can_bind: bool

    def plan_generation(self, kv_lengths: np.ndarray) -> dict[int | None, tuple[np.ndarray, np.ndarray]]:
        """Plan the work of s generation rows, on the host.

        Returns, for each window of the layers, (work list [W, 4], part starts [s + 1]), as of `decode_work_list`. Rows
        of -1 in a work list are padding. If no sequence is split, the last of the part starts is 0.

        kv_lengths   [s] tokens of each sequence in the KV cache, including the new token
        """
        ...

    def most_parts(self, num_rows: int, max_blocks: int) -> int:
        """Return the maximum number of rows W of the work list of `plan_generation`, for `num_rows` sequences of at
        most `max_blocks` blocks."""
        ...

    def plan_contexts(self, query_lengths: np.ndarray, kv_lengths: np.ndarray) -> dict[int | None, ContextTileWork]:
        """Plan the work of contexts, on the host. Returns the ContextTileWork for each window of the layers.

        query_lengths   new tokens of each context
        kv_lengths      tokens of each context in the KV cache, including the new tokens
        """
        ...

    def most_context_work(self, num_tokens: int, num_contexts: int, max_blocks: int, may_split: bool
                          ) -> MostContextTileWork:
        """Return two maximum numbers for a work list of `plan_contexts`: of its rows, and of split tokens.

        There are at most `num_contexts` contexts of at most `max_blocks` blocks each, with at most `num_tokens` new
        tokens in all. A token is split if the keys of its tile are split into parts; see ContextTileWork. If no
        tile can be split, the number of split tokens is 0. Rows of -1 in a work list are padding.

        may_split   False: the numbers are for steps in which no tile is split into parts
        """
        ...

    def bind(self, generation: GenerationInputs, contexts: ContextInputs | None) -> None:
        """Make `run` read the tensors of `generation` and `contexts` (None: the step has no contexts).

        A step calls `bind` in place of `plan` and `receive`.

        The rows of the step are those of `generation`, then those of `contexts`. The launches of `run` depend only on
        the shapes and addresses of the tensors.
        """
        ...


class HeadLayout(Protocol):
    """The sizes and options of a model that an attention is built from. `ModelSpec` satisfies this protocol."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    attention: tuple[LayerAttention, ...]   # one for each layer

"""Build the native backend around a model that computes nothing, to measure the host's part of a step."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from ..attention.interface import ContextInputs, GenerationInputs
from ..models.loading import LoadedModel
from ..runtime import packing
from ..runtime.build_backend import held_bytes, make_info, make_parts
from ..runtime.forms.fixed.inputs import FixedInputs
from ..runtime.forms.fixed.shapes import NO_SIZES, Shape, captured_shapes, largest_shapes
from ..runtime.forms.form import Forms
from ..runtime.forms.graph.form import GraphForm
from ..runtime.forms.packed.form import CallsForm, LayersForward, LayersHead
from ..runtime.native_backend import NativeBackend
from ..runtime.operations import Operations
from ..triton_kernels.context_work_list import (
    ContextTileWork,
    MostContextTileWork,
    context_work_list,
    most_context_work,
)
from ..triton_kernels.decode_work_list import ROUNDS, decode_work_list

NUM_LOGITS = 8    # per row; few, because sampling from a whole vocabulary is the work of a device
# Sizes of the work lists of BindableStubAttention: a model with 8 kv heads on a GPU that runs 264 programs at once.
KV_HEADS, RESIDENT_PROGRAMS, TILE_ROWS = 8, 264, 128


class StubModel:
    """A model that computes nothing: hidden states are [tokens, 1], and token 0 has the largest logit in each row."""

    def __init__(self) -> None:
        self._logits = torch.empty(0, NUM_LOGITS, dtype=torch.float32, device="cpu")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1, dtype=torch.float32, device="cpu")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: "StubAttention") -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > len(self._logits):
            self._logits = torch.zeros(len(hidden), NUM_LOGITS, dtype=torch.float32, device="cpu")
            self._logits[:, 0] = 1
        return self._logits[: len(hidden)]


class StubAttention:
    """The attention of a StubModel. The backend calls `plan`, which does nothing, and the model runs no attention."""

    dispatch = "torch"

    def plan(self, step: object) -> None:
        return None


class BindableStubAttention(StubAttention):
    """A BindableAttention for a StubModel. It plans the work lists of TritonPagedAttention and runs no attention."""

    windows, can_bind = (None,), True

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block

    def plan_generation(self, kv_lengths: np.ndarray) -> dict[int | None, tuple[np.ndarray, np.ndarray]]:
        return {None: decode_work_list(kv_lengths, self._tokens_per_block, KV_HEADS, RESIDENT_PROGRAMS)}

    def most_parts(self, num_rows: int, max_blocks: int) -> int:
        return num_rows + ROUNDS * RESIDENT_PROGRAMS // KV_HEADS

    def plan_contexts(self, query_lengths: np.ndarray, kv_lengths: np.ndarray) -> dict[int | None, ContextTileWork]:
        return {None: context_work_list(query_lengths, kv_lengths, TILE_ROWS)}

    def most_context_work(self, num_tokens: int, num_contexts: int, max_blocks: int, may_split: bool
                          ) -> MostContextTileWork:
        return most_context_work(num_tokens, num_contexts, TILE_ROWS)

    def bind(self, generation: GenerationInputs, contexts: ContextInputs | None) -> None:
        pass


class StubGraphs:
    """Stands in for the graphs of a GraphForm. Replaying a step computes nothing: each row samples token 0."""

    def __init__(self, inputs: FixedInputs) -> None:
        self._inputs, self._newest = inputs, None

    def replay(self, shape: Shape) -> None:
        if shape != self._newest:           # all shapes share the memory of the results
            self._newest, results = shape, self._inputs.of(shape)
            results.read_back.zero_()
            results.results[2] = 1          # the logits of each row are finite


def native_backend_without_a_model(*, vocab_size: int, max_seq_len: int, num_blocks: int, tokens_per_block: int,
                                   num_slots: int, replays: bool = False,
                                   watch: Callable[[str, Callable], Callable] = lambda name, function: function
                                   ) -> NativeBackend:
    """Return a CPU backend that packs, uploads, samples, stores and reads back, without computing a model.

    vocab_size   prompts may have token ids below this number; the model has only a few logits
    replays      whether generation steps replay stubs of CUDA graphs; such a step neither samples nor stores tokens
    watch        (name, function) -> the same function, timed: of "write", "send" and "replay" of a step that replays
    """
    spec = SimpleNamespace(vocab_size=vocab_size, hidden_size=1, architecture="StubModel")
    pool = torch.zeros(num_blocks, 1, 2, 1, tokens_per_block, 1, dtype=torch.float32, device="cpu")
    loaded = LoadedModel(spec, StubModel(), 0, pool.device, torch.float32)
    attention = BindableStubAttention(tokens_per_block) if replays else StubAttention()
    parts, made = make_parts(loaded, attention, pool, num_slots=num_slots, max_seq_len=max_seq_len), []
    if replays:
        inputs = FixedInputs(parts, largest_shapes(num_slots, NO_SIZES))
        graphs, shapes = StubGraphs(inputs), captured_shapes(num_slots, NO_SIZES, inputs.may_split)
        inputs.write, inputs.send = watch("write", inputs.write), watch("send", inputs.send)
        made = [GraphForm(parts, inputs, {shape: partial(watch("replay", graphs.replay), shape) for shape in shapes})]
    calls = LayersForward(loaded.model, attention), LayersHead(loaded.model), packing.packed
    forms = Forms([*made, CallsForm("packed", parts, loaded.model, *calls)], parts, {})
    return NativeBackend(parts, Operations({}), forms, make_info(parts, loaded, forms.dispatch, {}),
                         held_bytes(parts, loaded))

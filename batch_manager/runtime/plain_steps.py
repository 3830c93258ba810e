"""Runs plain steps by one function, which uses device memory at fixed addresses.

inputs.py defines plain steps. The function is `PlainSteps.run_step`. The shape of the step is its only
argument and determines all launches. A step calls the function or, if a call for the same shape was captured as a
graph, replays the graph.

A step with contexts runs as a plain step only if there is a graph for its size. The number of shapes of such steps
is a hundred times the number of graphs that could be captured. Without a graph, such a step gains nothing from
running as a plain step.
"""

from collections.abc import Callable

import numpy as np
import torch

from ..attention.interface import Attention, BindableAttention
from ..decoding.decoder import GptDecoder
from ..decoding.sampled_step import UNUSABLE
from ..decoding.slots import CONTEXT_LOGITS, LOG_PROBS, SAMPLES
from ..handover import ScheduledBatch, StepOutput
from ..triton_kernels import dispatch
from .block_tables import BlockTables
from .device.running import Readback, Readbacks, Uploads
from .forms.fixed.inputs import FixedInputs
from .forms.fixed.shapes import MOST_CONTEXTS, Shape, graph_rows, padded, padded_mixed
from .forms.graph.form import Graphs
from .model_runner import ModelRunner
from .packing import slots_not_finite

PLAIN = SAMPLES | LOG_PROBS                         # features that sequences of a plain step may have
NO_SIZES: frozenset[tuple[int, int]] = frozenset()


def can_bind(attention: Attention) -> bool:
    """Whether an attention can read its inputs at fixed addresses; see BindableAttention."""
    return getattr(attention, "can_bind", False) is True


class PlainSteps:
    """Runs plain steps of one engine; inputs.py defines them.

    attention        an attention for which `can_bind` is true
    decoder          a decoder for num_slots + 1 sequences; padding rows use the last slot
    tables           the host's block tables, which note their changes for the copy on the device
    num_slots        number of sequences in the largest step
    mixed_sizes      sizes of the steps with contexts for which graphs will be captured, see shapes.py

    graphs   the captured graphs; None: all launches are made one by one

    After a sequence is set up in a slot >= num_slots, `serves` is false for all later steps. Padding rows use slot
    num_slots, and slots from num_slots on have no row in the block tables on the device.
    """

    def __init__(self, runner: ModelRunner, attention: BindableAttention, decoder: GptDecoder, tables: BlockTables,
                 uploads: Uploads, readbacks: Readbacks, device: torch.device, *, num_slots: int, tokens_per_block: int,
                 mixed_sizes: frozenset[tuple[int, int]] = NO_SIZES) -> None:
        self._runner, self._attention, self._decoder = runner, attention, decoder
        self._readbacks, self._device = readbacks, device
        self._num_slots, self.graphs = num_slots, None
        self._graph_rows: tuple[int, ...] = ()
        self._graph_sizes = NO_SIZES
        self._prepare_step = dispatch.kernel("prepare_step", device)
        self._mixed_sizes = mixed_sizes
        largest = Shape(max(num_slots, graph_rows(num_slots)[-1]), True, True)
        largest_mixed = [_mixed_shape(*size, is_split=True) for size in mixed_sizes]
        self.inputs = FixedInputs([largest, *largest_mixed], attention, tables, uploads, device, num_slots=num_slots,
                                  tokens_per_block=tokens_per_block)

    def serves(self, batch: ScheduledBatch) -> bool:
        """Whether the step of `batch` is plain, and its slots and blocks fit into the block tables on the device."""
        generation, state = batch.generation, self._decoder.state
        if generation.beam_width > 1 or generation.num_drafts is not None or state.num_taken > self._num_slots:
            return False
        if batch.context and not self._serves_contexts(batch):
            return False
        if not len(generation):
            return bool(batch.context)
        # Context logits do not matter here: the context has run.
        return (int(generation.kv_lengths.max()) < self.inputs.max_tokens
                and int(np.bitwise_or.reduce(state.features[generation.slots])) & ~(PLAIN | CONTEXT_LOGITS) == 0)

    def _serves_contexts(self, batch: ScheduledBatch) -> bool:
        if not self._graph_sizes or len(batch.context) > MOST_CONTEXTS or _mixed_size(batch, self._graph_sizes) is None:
            return False
        features = self._decoder.state.features
        return all(work.embeddings is None and not work.num_drafts and int(features[work.slot]) & ~PLAIN == 0
                   and work.start + len(work.token_ids) <= self.inputs.max_tokens for work in batch.context)

    def start(self, batch: ScheduledBatch, is_replayed: bool = True) -> "PlainStep":
        """Launch a step for which `serves` is true.

        is_replayed   replay a graph if there is one for the step; False: launch each kernel
        """
        shape = self.write(batch)
        self.inputs.send(shape)
        if self.graphs is None or not is_replayed:
            self.run_step(shape)
        else:
            self.graphs.run(shape)
        self.inputs.are_sent()
        readback = self._readbacks.start({"results": self.inputs.of(shape).read_back}, is_reused=True)
        return PlainStep(batch, shape, self._decoder.state.active, readback)

    def write(self, batch: ScheduledBatch) -> Shape:
        """Write the arrays of a step to the host memory from which `start` sends them. Returns the step's shape."""
        if batch.context:
            return self.inputs.write(batch, _mixed_shape(*_mixed_size(batch, self._graph_sizes), is_split=False))
        slots = batch.generation.slots
        rows = padded(len(slots), self._graph_rows) or len(slots)
        return self.inputs.write(batch, Shape(rows, False, bool(self._decoder.state.active(SAMPLES, slots).any())))

    def run_step(self, shape: Shape) -> None:
        """Launch everything that a step computes on the device, from its inputs to its results."""
        given, decoder = self.inputs.of(shape), self._decoder
        tensors, positions = given.tensors, given.tensors["positions"]
        counts = decoder.plain_counts(shape.num_sampled) if shape.samples else None
        prepared = self._prepare_step(
            self.inputs.block_tables, tensors["table_entries"], tensors["table_blocks"],
            decoder.state.last_tokens.values, tensors["slots"][: shape.rows], positions, tensors["token_ids"],
            embedding=self._runner.table, cleared=counts)
        self._attention.bind(given.generation, given.contexts)
        if given.contexts is None:
            logits = self._runner.generate(prepared, positions)
        else:
            hidden = self._runner.forward(prepared, positions)
            # The sum of a row is not finite if any of its values is not.
            torch.sum(hidden[shape.rows :], 1, dtype=torch.float32, out=given.context_sums)
            logits = self._runner.logits(hidden.index_select(0, tensors["logits_rows"]))
        decoder.sample_plain(logits, tensors["slots"], tensors["kv_lengths"], counts, given.results)

    def capture_graphs(self) -> str:
        """Capture graphs and replay them in later steps.

        Return "". If a capture fails, there are no graphs, and the reason is returned.
        """
        rows = graph_rows(self._num_slots)
        shapes = [Shape(count, is_split, samples) for count in rows for samples in (False, True)
                  for is_split in (False, True)[: 1 + self.inputs.may_split(count)]]
        graphs = Graphs(self._device, self.run_step)
        obstacle = graphs.capture([*shapes, *self._mixed_shapes()], self._send_padding)
        if not obstacle:
            self.graphs = graphs
            self.pad_to(rows)
        return obstacle

    def drop_graphs(self) -> None:
        """Launch the kernels of all later steps one by one, without padding."""
        self.graphs, self._graph_rows, self._graph_sizes = None, (), NO_SIZES

    def pad_to(self, rows: tuple[int, ...]) -> None:
        """Pad all later generation steps to the row counts in `rows`.

        From then on, `serves` can also be true for steps with contexts.
        """
        self._graph_rows, self._graph_sizes = rows, self._mixed_sizes

    def _mixed_shapes(self) -> list[Shape]:
        """Return the shapes of steps with contexts for which graphs are captured."""
        return [_mixed_shape(rows, tokens, is_split) for rows, tokens in self._mixed_sizes
                for is_split in (False, True)[: 1 + self.inputs.may_split(rows, tokens)]]

    def _send_padding(self, shape: Shape) -> None:
        self.inputs.write_padding(shape)
        self.inputs.send(shape)


def _mixed_shape(rows: int, context_tokens: int, is_split: bool) -> Shape:
    """Return the shape of a step with contexts. (rows, context_tokens) is its size, one of `mixed_sizes`."""
    return Shape(rows, is_split, True, context_tokens, MOST_CONTEXTS)


def _mixed_size(batch: ScheduledBatch, sizes: frozenset[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the size to which a step with contexts is padded; None if no size of `sizes` holds the step."""
    return padded_mixed(len(batch.generation), sum(len(work.token_ids) for work in batch.context), sizes)


class PlainStep:
    """A launched plain step. The docstring of inputs.py defines plain steps.

    active   (feature, slots [n]) -> [n] bool: whether the sequence in each slot has the feature
    """

    def __init__(self, batch: ScheduledBatch, shape: Shape, active: Callable[[int, np.ndarray], np.ndarray],
                 readback: Readback) -> None:
        self._micro_batch_id, self._shape, self._readback = batch.micro_batch_id, shape, readback
        self._contexts, self._slots, self._rows = batch.context, batch.generation.slots, slice(len(batch.generation))
        if batch.context:                              # contexts with their last chunk come first in the output
            last = [index for index, work in enumerate(batch.context) if work.is_last_chunk]
            self._rows = np.array([*(shape.rows + index for index in last), *range(len(batch.generation))], np.int64)
            self._slots = np.array([*(batch.context[index].slot for index in last), *self._slots], np.int32)
        self._asked = active(LOG_PROBS, self._slots)

    def finish(self) -> StepOutput:
        found, num_results = self._readback.wait()["results"], 4 * self._shape.num_sampled
        tokens, finish, finite, log_prob_bits = found[:num_results].reshape(4, -1)[:, self._rows]
        failures = {}
        if self._contexts:
            finite_contexts = np.isfinite(found[num_results:].view(np.float32))
            failures = dict.fromkeys(slots_not_finite(self._contexts, finite_contexts), UNUSABLE)
        if not finite.all():
            failures |= dict.fromkeys(self._slots[finite == 0].tolist(), UNUSABLE)
        log_probs = None
        if self._asked.any():
            log_probs = np.where(self._asked, log_prob_bits.view(np.float32), np.float32(0))
        return StepOutput(self._micro_batch_id, self._slots, tokens, finish.astype(np.uint8), log_probs=log_probs,
                          failures=failures)

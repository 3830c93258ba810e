"""Plain generation steps on a device: one function that reads and writes what stays where it is. See step_inputs.py.

`GenerationSteps.run_step` is that function. It has no argument but the shape of the step, so what it launches follows
from the shape. It is called for each step, or once while a graph records what it launches, and the graph is replayed.
"""

from functools import partial

import numpy as np
import torch

from ..attention.interface import Attention, BindableAttention
from ..decoding.decoder import GptDecoder
from ..decoding.drawn import NOT_FINITE
from ..decoding.slots import CONTEXT_LOGITS, LOG_PROBS, SAMPLES
from ..handover import RowFailure, ScheduledBatch, StepOutput
from ..names import ErrorCode
from ..triton_kernels import dispatch
from .block_tables import BlockTables
from .device import Readback, Uploads
from .graph_shapes import graph_rows, padded_rows
from .graphs import Graphs
from .model_runner import ModelRunner
from .packing import GenerationPlaces, generation_places
from .resident_tables import ResidentTables
from .step_inputs import SPARE_CHANGES, StepInputs, StepShape

PLAIN = SAMPLES | LOG_PROBS | CONTEXT_LOGITS        # features that a row of a plain step may have


def can_bind(attention: Attention) -> bool:
    """Whether an attention serves steps whose inputs stay where they are."""
    return getattr(attention, "can_bind", False) is True


class GenerationSteps:
    """Runs plain generation steps of one engine.

    attention   one that `can_bind`
    decoder     made for num_slots + 1 sequences: the last slot is that of padding rows
    tables      the host's block tables
    num_slots   sequences of the largest step
    max_beam_width   rows of the block tables that belong to a slot
    max_seq_len   tokens of the longest sequence

    graphs   replay steps of some shapes; None: each launch is made by itself

    A backend that has taken a sequence in a slot beyond num_slots runs none of these steps any more: the slot of
    padding rows may be a sequence's then.
    """

    def __init__(self, runner: ModelRunner, attention: BindableAttention, decoder: GptDecoder, tables: BlockTables,
                 uploads: Uploads, device: torch.device, *, num_slots: int, max_beam_width: int, max_seq_len: int,
                 tokens_per_block: int) -> None:
        self._runner, self._attention, self._decoder, self._tables = runner, attention, decoder, tables
        self._uploads, self._device, self._tokens_per_block = uploads, device, tokens_per_block
        self._num_slots, self.graphs, self._graph_rows = num_slots, None, ()
        self._prepare_step = dispatch.kernel("prepare_step", device)
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=device)
        max_blocks = -(-max_seq_len // tokens_per_block)
        self._max_tokens = max_blocks * tokens_per_block
        self.resident = ResidentTables(num_slots * max_beam_width, max_blocks, device)
        self._most_parts = partial(attention.most_parts, max_blocks=max_blocks)
        self.inputs = StepInputs(max(num_slots, graph_rows(num_slots)[-1]), attention.windows, self._most_parts,
                                 self.resident.there, uploads)

    def serves(self, batch: ScheduledBatch) -> bool:
        """Whether a step is plain, and of sequences that there is room for."""
        generation, state = batch.generation, self._decoder.state
        if batch.context or generation.beam_width > 1 or generation.num_drafts is not None or not len(generation):
            return False
        if state.capacity != self._num_slots + 1 or int(generation.kv_lengths.max()) >= self._max_tokens:
            return False
        return int(np.bitwise_or.reduce(state.features[generation.slots])) & ~PLAIN == 0

    def start(self, batch: ScheduledBatch) -> "PlainStep":
        """Launch a step that `serves` says yes to."""
        shape = self._write(batch)
        self.inputs.send(shape)
        if self.graphs is None:
            self.run_step(shape)
        else:
            self.graphs.run(shape)
        self.resident.are_sent()
        slots = batch.generation.slots
        asked = self._decoder.state.having(LOG_PROBS, slots)
        return PlainStep(batch.micro_batch_id, slots, asked if asked.any() else None,
                         Readback(self._device, {"results": self.inputs.tensors(shape).results}, is_reused=True))

    def run_step(self, shape: StepShape) -> None:
        """Everything that a step does on the device, from its inputs to its results."""
        given, decoder = self.inputs.tensors(shape), self._decoder
        counts = decoder.plain_counts(shape.rows) if shape.samples else None
        prepared = self._prepare_step(
            self.resident.there, given.table_entries, given.table_blocks, decoder.state.last_tokens.values, given.slots,
            given.positions, self._no_tokens, embedding=self._runner.table, cleared=counts)
        self._attention.bind_generation(given.attention)
        logits = self._runner.generate(prepared, given.positions)
        decoder.draw_plainly(logits, given.slots, given.attention.kv_lengths, counts, given.results)

    def capture_graphs(self) -> None:
        """Replay graphs from here on, for steps of the shapes that have one. Where that fails the log says why."""
        rows = graph_rows(self._num_slots)
        shapes = [StepShape(count, is_split, samples) for count in rows for samples in (False, True)
                  for is_split in (False, True)[: 1 + (self._most_parts(count) > count)]]
        graphs = Graphs(self._device, self.run_step)
        if graphs.capture(shapes, self._prepare_nothing):
            self.graphs, self._graph_rows = graphs, rows

    def _prepare_nothing(self, shape: StepShape) -> None:
        """The inputs of a step all of whose rows are padding."""
        none = np.empty(0, np.int32)
        work = list(self._attention.plan_generation(np.zeros(shape.rows, np.int32)).values())
        self._fill(shape, GenerationPlaces(none, none, none, none, none, 0), work, none, none)
        self.inputs.send(shape)

    def _write(self, batch: ScheduledBatch) -> StepShape:
        """The arrays of the step, in the memory that is sent to the device."""
        places = generation_places(batch, self._tables, self._tokens_per_block)
        count = len(places.slots)
        num_rows = padded_rows(count, self._graph_rows) or count
        kv_lengths = np.zeros(num_rows, np.int32)
        kv_lengths[:count] = places.kv_lengths
        work = list(self._attention.plan_generation(kv_lengths).values())
        samples = bool(self._decoder.state.having(SAMPLES, places.slots).any())
        shape = StepShape(num_rows, any(part_starts[-1] for _, part_starts in work), samples)

        entries, blocks = self.resident.changes(self._tables)
        room = num_rows + SPARE_CHANGES
        if len(entries) > room:                         # prompts that came bring more blocks than steps do
            self._change_tables(entries[room:], blocks[room:])
        self._fill(shape, places, work, entries[:room], blocks[:room])
        return shape

    def _fill(self, shape: StepShape, places: GenerationPlaces, work: list[tuple[np.ndarray, np.ndarray]],
              entries: np.ndarray, blocks: np.ndarray) -> None:
        arrays = self.inputs.arrays(shape)
        for name, values, padding in (
                ("slots", places.slots, self._num_slots), ("positions", places.positions, 0),
                ("kv_lengths", places.kv_lengths, 0),
                ("table_rows", places.table_rows, 0),
                ("table_entries", entries, self.resident.spare_entry), ("table_blocks", blocks, 0)):
            array = arrays[name]
            array[: len(values)], array[len(values) :] = values, padding
        for index, (work_list, part_starts) in enumerate(work):
            array = arrays[f"work_{index}"]
            array[: len(work_list)], array[len(work_list) :] = work_list, -1
            arrays[f"starts_{index}"][:] = part_starts

    def _change_tables(self, entries: np.ndarray, blocks: np.ndarray) -> None:
        self.resident.there.view(-1).index_copy_(0, *self._uploads.send([entries, blocks]))


class PlainStep:
    """A plain step that was launched.

    slots   [n] int32: the sequences of its first rows
    asked   [n] bool: which of them want log-probabilities; None: none does
    """

    def __init__(self, micro_batch_id: int, slots: np.ndarray, asked: np.ndarray | None, readback: Readback) -> None:
        self._micro_batch_id, self._slots, self._asked, self._readback = micro_batch_id, slots, asked, readback

    def finish(self) -> StepOutput:
        tokens, finish, finite, log_prob_bits = self._readback.wait()["results"][:, : len(self._slots)]
        failures = {}
        if not finite.all():
            failures = dict.fromkeys(self._slots[finite == 0].tolist(),
                                     RowFailure(ErrorCode.NON_FINITE_LOGITS, NOT_FINITE))
        log_probs = None if self._asked is None else np.where(
            self._asked, log_prob_bits.view(np.float32), np.float32(0))
        return StepOutput(self._micro_batch_id, self._slots, tokens, finish.astype(np.uint8), log_probs=log_probs,
                          failures=failures)

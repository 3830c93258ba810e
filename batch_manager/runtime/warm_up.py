"""Runs steps of each kind before the first request, so that no kernel is compiled while requests wait."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import process_time

import numpy as np
import torch

from ..decoding.acceptance import SpoiltDraftsError
from ..decoding.logits_stage import LogitsStage
from ..errors import ConfigError, type_name
from ..handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from ..sampling_config import PARAMETERS, SamplingConfig
from ..seams import PendingStep
from ..triton_kernels.context_work_list import MIN_KEYS_PER_PART
from ..triton_kernels.decode_work_list import MIN_PAGES_PER_PART
from .device.running import first_line, is_out_of_memory, on_device
from .forms.form import Forms
from .kv_pool import clear_block
from .parts import DeviceParts

LONG_SEQUENCE_BLOCKS = MIN_PAGES_PER_PART + 2      # long enough for attention to split it into parts
LONG_CONTEXT_TOKENS = 2 * MIN_KEYS_PER_PART        # likewise, for a context of one token
TIMED_DRAFTS, TIMED_STEPS = 7, 4                   # of the measurement of `measured_draft_cost`
LEAST_COST, MOST_COST = 0.01, 0.5                  # noise makes no more of it


def launch(parts: DeviceParts, forms: Forms, batch: ScheduledBatch) -> PendingStep:
    """Start a step without device operations, as NativeBackend.start does."""
    with on_device(parts.device, parts.stream), torch.inference_mode():
        parts.tables.update(batch)
        parts.decoder.set_up((work.slot, work.setup) for work in batch.context if work.setup is not None)
        return forms.start(batch)


def warm_up(parts: DeviceParts, forms: Forms, own_stages: Sequence[LogitsStage] = (),
            start_on_ranks: Callable[[ScheduledBatch], PendingStep] | None = None) -> None:
    """Run a context step and a generation step for each of several sequences, all in block 0, then zero the block.

    The sequences are:
        one with all features
        one that is sampled, without other features
        with adapters: one that has a made-up adapter
        one without features, whose context and generation steps are long enough for attention to split them
        if max_beam_width > 1: one with 2 beams, one with 4, one with 8 and so on, and one with max_beam_width beams

    The steps compile the kernels of all variants of a step, so that no kernel is compiled while requests wait.

    own_stages   the user's stages, which are named if they raise
    start_on_ranks   launches a step in which other ranks take part, which call this function too; None: there are none
    Raises       ConfigError
    """
    zero = np.zeros(1, np.int32)
    every_parameter = {name: parameter.other for name, parameter in PARAMETERS.items() if name != "beam_width"}
    every_feature = SlotSetup(SamplingConfig(**every_parameter), return_log_probs=True, top_log_probs=1, end_id=0,
                              bad_words=((0, 0),), stop_words=((0, 0),), prompt_length=1)
    sampled = SlotSetup(SamplingConfig(top_k=2, top_p=0.5, random_seed=0), prompt_length=1)
    # (beams, setup, tokens in the KV cache before the context step and before the generation step)
    sequences = [(1, every_feature, 0, 1), (1, sampled, 0, 1),
                 (1, SlotSetup(prompt_length=1), min(LONG_CONTEXT_TOKENS, parts.max_seq_len) - 1,
                  cached_by_a_long_sequence(parts))]
    max_beam_width = parts.max_beam_width
    # Kernels are compiled for the number of beams rounded up to a power of two.
    for width in [1 << bits for bits in range(1, (max_beam_width - 1).bit_length())] + [max_beam_width]:
        if width > 1:
            beams = SlotSetup(SamplingConfig(beam_width=width), max_new_tokens=2, prompt_length=1)
            sequences.append((width, beams, 0, 1))
    run = start_on_ranks or partial(launch, parts, forms)
    with _naming_stages(parts, own_stages), ExitStack() as adapters:
        if parts.adapters is not None:
            pages = adapters.enter_context(parts.adapters.pool.made_up())
            # The first, because the slot keeps the bit until the next sequence.
            sequences.insert(0, (1, SlotSetup(prompt_length=1, adapter_pages=pages), 0, 1))
        for width, setup, start, num_cached in sequences:
            # All pages of a long sequence are block 0: its values only have to be finite.
            num_pages = max(start, num_cached) // parts.tokens_per_block + 1
            rows, pages = np.divmod(np.arange(width * num_pages, dtype=np.int32), np.int32(num_pages))
            first = run(ScheduledBatch(
                iteration=0, context=(ContextWork(0, zero, start, True, setup.continuing([0])),),
                max_beam_width=max_beam_width,
                block_table_updates=BlockTableUpdates(rows, pages, 0 * rows))).finish()
            has_no_beams = width > 1 and bool(first.failures)      # the model gives no finite logit
            if has_no_beams and start_on_ranks is None:
                continue
            with suppress(*[Exception] * has_no_beams):            # the other ranks run the step all the same
                generation = GenerationWork(zero, zero + np.int32(num_cached), width)
                run(ScheduledBatch(
                    iteration=1, generation=generation, max_beam_width=max_beam_width,
                    num_padded_rows=2 * ("padded" in forms.steps))).finish()
    with on_device(parts.device, parts.stream), torch.inference_mode():
        clear_block(parts.pool, 0)


def measured_draft_cost(parts: DeviceParts, forms: Forms, most_drafts: int) -> float:
    """Return BackendInfo.draft_cost of these forms on a CPU, from the times of steps with one sequence, in turn with
    TIMED_DRAFTS drafts, or `most_drafts`, and without drafts. They are processor times of this process, of which the
    shortest of each kind count: other programs may use the processor.

    The steps run in block 0, which is zeroed again, and are not counted. A pool block must hold the sequence.
    """
    zero, steps, num_drafts = np.zeros(1, np.int32), dict(forms.steps), min(TIMED_DRAFTS, most_drafts)
    launch(parts, forms, ScheduledBatch(
        iteration=0, context=(ContextWork(0, zero, 0, True, SlotSetup(prompt_length=1).continuing([0])),),
        block_table_updates=BlockTableUpdates(zero, zero, zero))).finish()
    seconds: dict[int, list[float]] = {0: [], num_drafts: []}
    for _ in range(1 + TIMED_STEPS):                               # the first ones warm up
        for count, taken in seconds.items():
            drafts = {"num_drafts": zero + np.int32(count), "draft_tokens": np.zeros(count, np.int32)} if count else {}
            batch = ScheduledBatch(iteration=1, generation=GenerationWork(zero, zero + np.int32(1), **drafts))
            began = process_time()
            with suppress(SpoiltDraftsError):                      # of a model that gives no finite logit
                launch(parts, forms, batch).finish()
            taken.append(process_time() - began)
    forms.steps.update(steps)
    with on_device(parts.device, parts.stream), torch.inference_mode():
        clear_block(parts.pool, 0)
    without, with_drafts = (min(taken[1:]) for taken in seconds.values())
    return min(max((with_drafts / without - 1) / num_drafts, LEAST_COST), MOST_COST)


def cached_by_a_long_sequence(parts: DeviceParts) -> int:
    """Return the number of cached tokens of the long sequence in the warm-up.

    If max_seq_len is large enough, attention splits a sequence of this length into parts. If max_seq_len is
    larger than one block, the number is a multiple of tokens_per_block. The next token is then the first token
    of a block. The window of such a token spans the largest possible number of blocks.
    """
    tokens_per_block = parts.tokens_per_block
    num_blocks = min(LONG_SEQUENCE_BLOCKS, -(-parts.max_seq_len // tokens_per_block))
    return max((num_blocks - 1) * tokens_per_block, 1)


@contextmanager
def _naming_stages(parts: DeviceParts, own_stages: Sequence[LogitsStage]) -> Iterator[None]:
    """Context manager: turn an exception of a custom stage into a ConfigError that names the stage.

    Out-of-memory exceptions stay unchanged.
    """
    try:
        yield
    except Exception as error:
        stage = parts.decoder.stages.raised_last
        if not any(stage is own for own in own_stages) or is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the stage {type_name(stage)} of Parts.stages raised {first_line(error)} in the warm-up",
            "a stage must accept the warm-up's dummy sequence, of request id 0 and prompt [0]",
            "let the stage accept unknown request ids, and see the exception above") from error

"""Bugs of beams, stop words and bad words, reintroduced as in bugs.py."""

from dataclasses import replace

from batch_manager.handover import GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.steps.device_work import DeviceWork
from batch_manager.steps.output_check import StepOutputCheck
from batch_manager.steps.runner import StepRunner

from .bugs import BUSY, TIGHT, Bug

BEAMS = {**TIGHT, "max_beam_width": 3, "num_blocks": 60, "vocab_size": 17}
SEARCHING = {**BUSY, "streams": 0.0, "beams": 0.6}
OVERLAPPING = {**BEAMS, "overlap": True}
ENDING = {**SEARCHING, "stops": 0.2}
MANY_BEAMS = {**SEARCHING, "beams": 0.9}
WORDY = {**BUSY, "words": 1.0}


def a_part_without_generation_keeps_its_beams(patch) -> None:
    take = ScheduledBatch.take

    def with_width(self, indices):
        batch = take(self, indices)
        slots, lengths = batch.generation.slots, batch.generation.kv_lengths
        return replace(batch, generation=GenerationWork(slots, lengths, self.generation.beam_width))
    patch.setattr(ScheduledBatch, "take", with_width)


def nobody_looks_at_the_tokens_of_beams(patch) -> None:
    without_invalid_tokens = StepOutputCheck._without_invalid_tokens
    patch.setattr(StepOutputCheck, "_without_invalid_tokens", lambda self, output: (
        without_invalid_tokens(self, output) if output.row_starts is None else output))


def the_copies_of_parting_beams_are_lost(patch) -> None:
    reorder = KvCacheManager.reorder

    def without_copies(self, request, parents):
        reorder(self, request, parents)
        return []
    patch.setattr(KvCacheManager, "reorder", without_copies)


def the_history_ends_with_the_prompt(patch) -> None:
    def continuing(self, tokens):
        return continues(self, list(tokens)[:self.prompt_length])
    continues = SlotSetup.continuing
    patch.setattr(SlotSetup, "continuing", continuing)


def a_step_that_is_run_again_repeats_what_it_said_of_the_tables(patch) -> None:
    attached_to = DeviceWork.attached_to

    def with_all(self, batch):
        updates = batch.block_table_updates.then(self._updates)
        return replace(attached_to(self, batch), block_table_updates=updates)
    patch.setattr(DeviceWork, "attached_to", with_all)


def what_a_step_that_could_not_be_launched_said_of_the_tables_is_lost(patch) -> None:
    def said_once(self, batch):
        batch = self._device_work.attached_to(batch)
        self._device_work.launched()
        return self._backend.start(batch)
    patch.setattr(StepRunner, "_launch", said_once)


BEAM_BUGS = [
    Bug("a part without generation keeps its beams", "found here", a_part_without_generation_keeps_its_beams, BEAMS,
        SEARCHING, ("model.raises_once",)),
    Bug("nobody looks at the tokens of beams", "found here", nobody_looks_at_the_tokens_of_beams, BEAMS, SEARCHING,
        ("model.wrong_token",)),
    Bug("the copies of parting beams are lost", "of its kind", the_copies_of_parting_beams_are_lost, BEAMS, SEARCHING),
    Bug("after a pause the device is told the prompt only", "F19", the_history_ends_with_the_prompt,
        traffic=WORDY),
    Bug("a step that is run again repeats what it said of the tables", "found by T1",
        a_step_that_is_run_again_repeats_what_it_said_of_the_tables, OVERLAPPING, ENDING, ("model.raises_once",),
        first_seed=34),
    Bug("what a step that could not be launched said of the tables is lost", "of its kind",
        what_a_step_that_could_not_be_launched_said_of_the_tables_is_lost, OVERLAPPING, MANY_BEAMS,
        ("model.raises_for_all", "model.raises_once")),
    Bug("also where none of its parts could be launched", "found by T1",
        what_a_step_that_could_not_be_launched_said_of_the_tables_is_lost, BEAMS, MANY_BEAMS,
        ("model.raises_for_all",)),
]

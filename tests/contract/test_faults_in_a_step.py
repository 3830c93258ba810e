"""C21: what a fault in the model step costs, and whom."""

import numpy as np
import pytest

from batch_manager.clock import SystemClock
from batch_manager.errors import DeviceLostError
from batch_manager.handover import BlockTableUpdates, GenerationWork, RowFailure, ScheduledBatch, StepOutput
from batch_manager.loop.step_runner import StepRunner
from batch_manager.names import ErrorCode
from batch_manager.runtime.scripted_backend import ScriptedBackend

PROMPTS = {i: [10 + i] * (2 + i) for i in range(7)}


def submit_all(world, new_request, **options):
    world.client.pending = [new_request(i, prompt, 6, **options) for i, prompt in PROMPTS.items()]


def holds_token(batch, backend, token):
    """Whether a sequence of the batch starts with this token: how the tests recognise a request on the device."""
    lengths = [(work.slot, work.start + len(work.token_ids)) for work in batch.context]
    lengths += list(zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist()))
    return [slot for slot, length in lengths if backend.history(slot, length)[0] == token]


def world_with_hook(make_world, hook, where="on_step", **params):
    backend = ScriptedBackend(**{where: lambda batch: hook(batch, backend)})
    return make_world(backend=backend, **params)


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize(("error", "code"), [(RuntimeError("x"), "MODEL_ERROR"), (MemoryError(), "OUT_OF_MEMORY"),
                                             (SystemExit(), "MODEL_ERROR")], ids=["error", "memory", "exit"])
def test_c21_only_the_request_that_fails_alone_is_lost(make_world, new_request, where, error, code):
    def fails_for_number_three(batch, backend):
        if holds_token(batch, backend, 13):
            raise error

    world = world_with_hook(make_world, fails_for_number_three, where)
    submit_all(world, new_request)
    world.run()
    for i, prompt in PROMPTS.items():
        final = world.client.final(i)
        if i == 3:
            assert final.code == code and not final.tensors
        else:
            assert final.tokens() == prompt + world.expected(prompt, 6)


def test_c21_an_exception_that_does_not_come_again_costs_nobody_anything(make_world, new_request):
    calls = []

    def fails_in_the_third_call(batch, backend):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError

    world = world_with_hook(make_world, fails_in_the_third_call)
    submit_all(world, new_request, streaming=True)
    world.run()
    assert all(world.client.streamed(i) == world.expected(prompt, 6) for i, prompt in PROMPTS.items())


def test_c21_out_of_memory_above_a_batch_size_costs_nobody_anything(make_world, new_request):
    def fits_two(batch, backend):
        if batch.num_sequences > 2:
            raise MemoryError

    world = world_with_hook(make_world, fits_two)
    submit_all(world, new_request)
    world.run()
    assert all(world.client.final(i).tokens() == prompt + world.expected(prompt, 6) for i, prompt in PROMPTS.items())


def test_c21_a_model_that_always_fails_answers_everybody_and_the_next_ones_too(make_world, new_request):
    def fails(batch, backend):
        raise RuntimeError

    world = world_with_hook(make_world, fails)
    submit_all(world, new_request)
    world.run()
    world.client.pending = [new_request(50, [1], 2)]
    world.run()
    assert all(world.client.final(i).code == "MODEL_ERROR" for i in (*PROMPTS, 50))
    assert world.loop.failure is None


def test_c21_a_row_with_non_finite_logits_ends_that_request_only_and_its_blocks_are_cleared(make_world, new_request):
    def poisons_number_two(batch, backend):
        slots = holds_token(batch, backend, 12) if batch.iteration == 3 else []
        return {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "logits are not finite") for slot in slots}

    world = world_with_hook(make_world, poisons_number_two, kv_cache_config=None)
    submit_all(world, new_request)
    world.run()
    # Poisoned blocks that came back uncleared would fail their next owner.
    world.client.pending = [new_request(100 + i, [i + 1] * 40, 6) for i in range(40)]
    world.run()
    assert world.client.final(2).code == "NON_FINITE_LOGITS"
    for i, prompt in PROMPTS.items():
        if i != 2:
            assert world.client.final(i).tokens() == prompt + world.expected(prompt, 6)
    assert all(world.client.final(100 + i).error == "" for i in range(40))


class BrokenOutput(ScriptedBackend):
    """Changes the output of a step after the fact."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def start(self, batch):
        step, change = super().start(batch), self.change

        class Changed:
            def finish(self):
                return change(step.finish())

        return Changed()


@pytest.mark.parametrize("token", [-1, 1000, 2**31 - 1])
def test_c21_a_token_outside_the_vocabulary_ends_that_request_only(make_world, new_request, token):
    def change(output):
        tokens = output.tokens.copy()
        tokens[output.slots == 4] = token
        return StepOutput(output.micro_batch_id, output.slots, tokens, output.finish)

    world = make_world(backend=BrokenOutput(change))
    submit_all(world, new_request)
    world.run()
    assert world.client.final(4).code == "INVALID_TOKEN"
    assert all(world.client.final(i).error == "" for i in PROMPTS if i != 4)


@pytest.mark.parametrize("change", [
    lambda o: StepOutput(0, o.slots[:-1], o.tokens[:-1], o.finish[:-1]),
    lambda o: StepOutput(0, o.slots[::-1].copy(), o.tokens, o.finish) if len(o.slots) > 1 else
    StepOutput(0, o.slots + 1, o.tokens, o.finish),
    lambda o: StepOutput(0, o.slots, o.tokens[:-1], o.finish),
    lambda o: None,
], ids=["too few rows", "another order", "too few tokens", "nothing"])
def test_c21_a_backend_that_returns_the_wrong_rows_is_answered_with_model_error(make_world, new_request, change):
    world = make_world(backend=BrokenOutput(change))
    submit_all(world, new_request)
    world.run()
    assert all(world.client.final(i).code == "MODEL_ERROR" for i in PROMPTS)


def test_c21_a_lost_device_fails_the_engine_and_answers_everybody_until_shutdown(make_manager, new_client, new_request):
    def lost(batch):
        if batch.iteration == 2:
            raise DeviceLostError("the device's context is lost")

    client = new_client()
    client.pending = [new_request(i, prompt, 6) for i, prompt in PROMPTS.items()]
    manager = make_manager(client, backend={"on_step": lost})
    client.wait_for_finals(*PROMPTS)
    client.pending.append(new_request(70, [1], 1))
    client.wait_for_finals(70)
    assert {client.final(i).code for i in (*PROMPTS, 70)} == {"ENGINE_FAILED"}
    assert manager.health()["state"] == "FAILED" and "context is lost" in manager.health()["failure"]
    assert manager.shutdown(timeout=10)
    assert manager.health()["state"] == "STOPPED"


def test_c2_who_was_refused_in_the_iteration_that_loses_the_device_is_told_why(make_world, new_request):
    def lost(batch):
        raise DeviceLostError("gone")

    world = make_world(backend=ScriptedBackend(on_step=lost))
    world.client.pending = [new_request(1, [1], 4), new_request(2, [], 4), new_request(1, [1], 4)]
    with pytest.raises(DeviceLostError):
        world.step()
    world.loop.fail(DeviceLostError("gone"))
    assert world.client.final(2).code == "INVALID_REQUEST"
    assert [final.code for final in world.client.finals(1)] == ["DUPLICATE_REQUEST_ID", "ENGINE_FAILED"]


def test_a_bug_in_the_loop_fails_the_engine_and_answers_everybody(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(i, prompt, 600) for i, prompt in PROMPTS.items()]
    manager = make_manager(client)
    manager._loop._poll_stops = lambda: 1 / 0
    client.wait_for_finals(*PROMPTS)
    assert {client.final(i).code for i in PROMPTS} == {"ENGINE_FAILED"}
    assert "ZeroDivisionError" in manager.health()["failure"]


def test_the_scripted_oracle_agrees_with_itself():
    backend = ScriptedBackend()
    assert np.array_equal(backend.expected([1, 2], 5), backend.expected([1, 2], 3) + backend.expected(
        [1, 2, *backend.expected([1, 2], 3)], 2))


class Launches:
    """A device that cannot launch anything until it is mended, and notes what it was told of the tables."""

    def __init__(self):
        self.told, self.is_mended = [], False

    def start(self, batch):
        updates = batch.block_table_updates
        self.told.append(sorted(zip(updates.slots.tolist(), updates.indices.tolist(), updates.block_ids.tolist())))
        if not self.is_mended:
            raise RuntimeError
        return self

    def finish(self):
        slots = np.array([0, 1], np.int32)
        return StepOutput(0, slots, slots, slots)


def batch_that_says(*entries):
    slots, indices, block_ids = np.array(entries, np.int32).T
    both = np.array([0, 1], np.int32)
    return ScheduledBatch(1, generation=GenerationWork(both, both + 5),
                          block_table_updates=BlockTableUpdates(slots, indices, block_ids))


def test_c21_the_next_launch_says_what_those_that_raised_had_to_say_of_the_block_tables():
    """They may concern a sequence of neither batch: slot 2 waits."""
    device = Launches()
    runner = StepRunner(device, 100, SystemClock())
    for said in [(2, 0, 10), (0, 1, 11)], [(2, 0, 12)]:
        assert set(runner.start(batch_that_says(*said)).finish().failures) == {0, 1}
    assert len(device.told) == 2 * 3                              # whole, and each half
    assert device.told[-1] == [(0, 1, 11), (2, 0, 12)], "each entry once, as it was said last"

    device.is_mended = True
    for said, expected in [([(1, 0, 13)], [(0, 1, 11), (1, 0, 13), (2, 0, 12)]), ([(1, 1, 14)], [(1, 1, 14)])]:
        runner.start(batch_that_says(*said)).finish()
        assert device.told[-1] == expected

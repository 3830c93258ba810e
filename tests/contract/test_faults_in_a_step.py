"""C21: which requests a fault in the model step ends, and with which error."""

import numpy as np
import pytest

from batch_manager.errors import DeviceLostError, InternalError
from batch_manager.guard import Guard
from batch_manager.handover import (
    AdapterLoad,
    BlockClear,
    BlockCopy,
    BlockTableUpdates,
    GenerationWork,
    RowFailure,
    ScheduledBatch,
    StepOutput,
)
from batch_manager.names import ErrorCode
from batch_manager.steps.device_work import MOST_PENDING_OPERATIONS, DeviceWork
from batch_manager.steps.runner import StepRunner
from batch_manager.testing.scripted_backend import ScriptedBackend

PROMPTS = {i: [10 + i] * (2 + i) for i in range(7)}


def submit_all(world, new_request, **options):
    world.client.pending = [new_request(i, prompt, 6, **options) for i, prompt in PROMPTS.items()]


def holds_token(batch, backend, token):
    """Return the slots of the batch whose sequences start with this token, by which tests recognise a request."""
    lengths = [(work.slot, work.start + len(work.token_ids)) for work in batch.context]
    lengths += list(zip(batch.generation.slots.tolist(), (batch.generation.kv_lengths + 1).tolist()))
    return [slot for slot, length in lengths if backend.history(slot, length)[0] == token]


def world_with_hook(make_world, hook, where="on_step", **params):
    backend = ScriptedBackend(**{where: lambda batch: hook(batch, backend)})
    return make_world(backend=backend, **params)


@pytest.mark.parametrize("where", ["on_step", "on_finish"])
@pytest.mark.parametrize(("error", "code"), [(RuntimeError("x"), "MODEL_ERROR"), (MemoryError(), "OUT_OF_MEMORY"),
                                             (SystemExit(), "MODEL_ERROR")], ids=["error", "memory", "exit"])
def test_c21_only_the_request_that_fails_alone_is_lost(make_world, new_request, caplog, where, error, code):
    def fails_for_number_three(batch, backend):
        if holds_token(batch, backend, 13):
            raise error

    world = world_with_hook(make_world, fails_for_number_three, where)
    submit_all(world, new_request)
    world.run()
    assert f"sequences raised {type(error).__name__}; it is bisected, to find the sequences that" in caplog.text
    for i, prompt in PROMPTS.items():
        final = world.client.final(i)
        if i == 3:
            assert final.code == code and not final.tensors
        else:
            assert final.tokens() == prompt + world.expected(prompt, 6)


@pytest.mark.parametrize("returned", [None, 5, [1]], ids=str)
def test_c21_a_start_that_returns_no_step_is_answered_with_model_error(make_world, new_request, caplog, returned):
    class ReturnsNoStep(ScriptedBackend):
        def start(self, batch):
            super().start(batch)
            return returned

    world = make_world(backend=ReturnsNoStep())
    submit_all(world, new_request)
    world.run()
    assert {world.client.final(i).code for i in PROMPTS} == {"MODEL_ERROR"} and world.loop.failure is None
    assert (f"`start` of the backend returned a value of type {type(returned).__name__}; expected a step with the "
            "method `finish`") in caplog.text


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
    # A block that was released without being cleared would make the next request that holds it fail.
    world.client.pending = [new_request(100 + i, [i + 1] * 40, 6) for i in range(40)]
    world.run()
    assert world.client.final(2).code == "NON_FINITE_LOGITS"
    for i, prompt in PROMPTS.items():
        if i != 2:
            assert world.client.final(i).tokens() == prompt + world.expected(prompt, 6)
    assert all(world.client.final(100 + i).error == "" for i in range(40))


class BrokenOutput(ScriptedBackend):
    """A backend that replaces the output of each step by change(output)."""

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
    """A request that is refused in the iteration in which the device is lost gets the reason of its refusal."""
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
    """A backend whose launches raise until `is_mended` is set.

    It records the block table updates and the operations of each batch.
    """

    def __init__(self):
        self.told, self.operations, self.is_mended = [], [], False

    def start(self, batch):
        updates = batch.block_table_updates
        self.told.append(sorted(zip(updates.slots.tolist(), updates.indices.tolist(), updates.block_ids.tolist())))
        self.operations.append((batch.first_operation, *batch.operations))
        if not self.is_mended:
            raise RuntimeError
        return self

    def finish(self):
        slots = np.array([0, 1], np.int32)
        return StepOutput(0, slots, slots, slots.astype(np.uint8))


def table_updates(*entries):
    return BlockTableUpdates(*np.array(entries, np.int32).T)


def launched(runner):
    """Launch and read a batch of slots 0 and 1 on a StepRunner, and return its output.

    The runner adds all pending device work to the batch. A failed batch is bisected.
    """
    both = np.array([0, 1], np.int32)
    batch = ScheduledBatch(1, generation=GenerationWork(both, both + 5))
    step = runner.start(batch)
    output = runner.read(step)
    return runner.bisect(step.batch, step.requested, step.error) if output is None else output


def test_c21_the_next_launch_says_what_those_that_raised_had_to_say():
    """A launch repeats block table updates and operations of failed launches, also of slot 2, which is in no batch."""
    device, device_work = Launches(), DeviceWork()
    runner = StepRunner(device, device_work, 100, Guard())
    copy, clear, load, last = BlockCopy(3, 4, 2), BlockClear(5, 1), AdapterLoad(7, (1, 2)), BlockClear(6)
    for said, operation in ([(2, 0, 10), (0, 1, 11)], copy), ([(2, 0, 12)], clear):
        device_work.update_tables(table_updates(*said), [])
        device_work.add([operation])
        assert set(launched(runner).failures) == {0, 1}
    assert len(device.told) == 2 * 3                              # the whole batch, then each half
    assert device.told[:3] == [[(0, 1, 11), (2, 0, 10)]] * 3
    assert device.told[3:] == [[(0, 1, 11), (2, 0, 12)]] * 3, "each entry once, as it was said last"
    assert device.operations == [(0, copy)] * 3 + [(0, copy, clear)] * 3, "under the same numbers"

    device.is_mended = True
    for said, operation, expected, numbered in [
            ([(1, 0, 13)], load, [(0, 1, 11), (1, 0, 13), (2, 0, 12)], (0, copy, clear, load)),
            ([(1, 1, 14)], last, [(1, 1, 14)], (3, last))]:
        device_work.update_tables(table_updates(*said), [])
        device_work.add([operation])
        assert not launched(runner).failures
        assert device.told[-1] == expected and device.operations[-1] == numbered
    launched(runner)
    assert device.told[-1] == [] and device.operations[-1][1:] == ()


def test_what_is_pending_for_rows_in_which_a_sequence_starts_was_of_another():
    """When a sequence starts in a slot, the pending table updates of the slot's previous sequence are dropped."""
    device, device_work = Launches(), DeviceWork()
    runner = StepRunner(device, device_work, 100, Guard())
    device_work.update_tables(table_updates((2, 0, 10), (2, 1, 11), (3, 0, 12)), [2, 3])
    launched(runner)
    device_work.update_tables(table_updates((2, 0, 13)), [2])
    device.is_mended = True
    launched(runner)
    assert device.told[-1] == [(2, 0, 13), (3, 0, 12)]


def test_operations_are_repeated_until_a_step_that_had_them_was_read():
    """Each launch repeats an operation until a step that had the operation was read.

    An asynchronous device may fail in the operation after the next step was launched.
    """
    device, device_work = Launches(), DeviceWork()
    device.is_mended = True
    runner = StepRunner(device, device_work, 100, Guard())
    copy, clear, last = BlockCopy(3, 4, 2), BlockClear(5, 1), BlockClear(6)
    both, steps = np.array([0, 1], np.int32), []
    for operation in copy, clear, None:
        device_work.add([operation] if operation else [])
        steps.append(runner.start(ScheduledBatch(1, generation=GenerationWork(both, both + 5))))
    assert device.operations == [(0, copy), (0, copy, clear), (0, copy, clear)]
    runner.read(steps[0])
    steps.append(runner.start(ScheduledBatch(1, generation=GenerationWork(both, both + 5))))
    assert device.operations[-1] == (1, clear)
    for step in steps[2:0:-1]:                                    # operations that are done are not repeated
        runner.read(step)
    device_work.add([last])
    runner.start(ScheduledBatch(1, generation=GenerationWork(both, both + 5)))
    assert device.operations[-1] == (2, last)


def test_operations_that_no_launch_takes_are_bounded():
    device_work = DeviceWork()
    with pytest.raises(InternalError, match="operations on KV cache blocks are pending"):
        for _ in range(MOST_PENDING_OPERATIONS // 1000 + 1):
            device_work.add([BlockClear(0)] * 1000)


@pytest.mark.parametrize("num_done", range(8))
def test_a_device_does_each_operation_once(num_done):
    operations = tuple(BlockClear(i) for i in range(3))
    batch = ScheduledBatch(0, operations=operations, first_operation=4)
    assert batch.new_operations(num_done) == operations[max(num_done - 4, 0):]

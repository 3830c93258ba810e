"""The harness with which users test their callbacks and schedulers works, and tests need only public names."""

import json

import pytest

from batch_manager import (
    CapacityScheduler,
    ConfigError,
    InferenceRequest,
    SchedulerContractError,
    SchedulerPolicy,
)
from batch_manager.testing import EngineHarness, ManualClock, ScriptedBackend


class Server:
    """Callbacks like those of a user."""

    def __init__(self, *requests):
        self.waiting, self.answers, self.finals, self.records = list(requests), {}, [], []

    def get(self, count):
        taken, self.waiting[:count] = self.waiting[:count], []
        return taken

    def send(self, request_id, tensors, final_response, error_message):
        self.answers.setdefault(request_id, []).append({tensor.name: tensor.tensor for tensor in tensors})
        if final_response:
            self.finals.append((request_id, error_message))


def ask(request_id, prompt, count, **options):
    return InferenceRequest(request_id, {"input_ids": prompt, "request_output_len": count}, **options)


@pytest.mark.parametrize("options", [{}, {"run_ahead": True}, {"policy": SchedulerPolicy.GUARANTEED_NO_EVICT}])
def test_requests_run_to_their_ends_with_the_tokens_that_the_script_says(options):
    server = Server(ask(1, [5, 6], 4), ask(2, [7], 3, is_streaming=True))
    backend = ScriptedBackend(is_asynchronous="run_ahead" in options)
    with EngineHarness(server.get, server.send, stats=server.records.append, backend=backend, max_batch_size=4,
                       **options) as engine:
        assert 4 <= engine.run() <= 6
        engine.check()
        assert engine.active_requests == []
    assert sorted(server.finals) == [(1, ""), (2, "")]
    assert server.answers[1][0]["output_ids"][0, 0].tolist() == [5, 6, *backend.expected([5, 6], 4)]
    streamed = [token for part in server.answers[2] for token in part["output_ids"][0, 0].tolist()]
    assert streamed == backend.expected([7], 3)
    assert json.loads(server.records[0])["Context Requests"] == 2


def test_a_scheduler_is_tested_iteration_by_iteration():
    class LastInFirstOut(CapacityScheduler):
        def schedule_request(self, active_requests):
            return active_requests[::-1][:1], []

    server = Server(*(ask(i, [i], 3) for i in range(3)))
    with EngineHarness(server.get, server.send, scheduler=LastInFirstOut()) as engine:
        engine.step()
        assert [request.request_id for request in engine.active_requests] == [0, 1, 2]
        engine.run()
    assert [request_id for request_id, _ in server.finals] == [2, 1, 0]


def test_a_scheduler_that_breaks_a_rule_is_named():
    class Twice(CapacityScheduler):
        def schedule_request(self, active_requests):
            return [*active_requests, *active_requests], []

    server = Server(ask(1, [1], 3))
    with EngineHarness(server.get, server.send, scheduler=Twice()) as engine:
        engine.run()
    ((_, error),) = server.finals
    assert "Twice" in error and SchedulerContractError.code.value in error


def test_time_passes_when_the_test_says_so():
    server = Server(ask(1, [1], 500, deadline_s=5.0))
    with EngineHarness(server.get, server.send) as engine:
        engine.step(3)
        assert server.finals == []
        engine.clock.now += 6
        engine.step()
    assert server.answers[1][0]["finish_reason"].tolist() == [[4]]


def test_what_is_open_is_answered_when_it_is_closed():
    server = Server(ask(1, [1], 500))
    with EngineHarness(server.get, server.send) as engine:
        engine.step(2)
    ((_, error),) = server.finals
    assert error.startswith("[SHUTDOWN]")
    engine.close()
    assert len(server.finals) == 1


def test_a_run_without_an_end_is_told():
    server = Server(ask(1, [1], 500))
    with (EngineHarness(server.get, server.send) as engine,
          pytest.raises(RuntimeError, match="1 active request after 5 iterations")):
        engine.run(most_iterations=5)


def test_options_are_checked_as_the_manager_checks_them():
    with pytest.raises(ConfigError, match="max_batch_size"):
        EngineHarness(Server().get, Server().send, max_batch_size=0)
    assert ManualClock(3.0).monotonic() == 3.0


@pytest.mark.parametrize(("wrong", "text"), [
    ({"max_beam_width": 0}, "max_beam_width is 0; expected an integer in 1..1,024"),
    ({"policy": 3}, "scheduler_policy is 3; expected a member of SchedulerPolicy"),
    ({"model_type": 2}, "model_type is 2; expected a member of TrtGptModelType"),
    ({"poll": 5}, "poll_stop_signal_cb is of type int; expected a callable or None"),
    ({"parts": 5}, "parts is of type int; expected a Parts"),
])
def test_wrong_arguments_are_refused_as_the_manager_refuses_them(wrong, text):
    server = Server()
    with pytest.raises(ConfigError, match=text):
        EngineHarness(server.get, server.send, **wrong)
    with pytest.raises(ConfigError, match="send_response_cb is of type NoneType; expected a callable"):
        EngineHarness(server.get, None)


@pytest.mark.parametrize("what", ["step", "run", "close"])
@pytest.mark.parametrize("callback", ["get", "send"])
def test_a_callback_that_turns_the_harness_is_told_not_to_and_harms_nobody(what, callback):
    server, told = Server(ask(1, [1], 3), ask(2, [2], 4)), []
    call = getattr(server, callback)

    def turning(*arguments):
        result = call(*arguments)
        with pytest.raises(RuntimeError, match="tried to (run|close) the harness during an iteration") as error:
            getattr(harness, what)()
        told.append(error.value)
        return result

    setattr(server, callback, turning)
    with EngineHarness(server.get, server.send) as harness:
        harness.run()
    assert told and sorted(server.finals) == [(1, ""), (2, "")]


def test_a_class_makes_the_backend():
    server = Server(ask(1, [1], 3))
    with EngineHarness(server.get, server.send, backend=ScriptedBackend) as harness:
        assert isinstance(harness.backend, ScriptedBackend)
        harness.run()
    assert server.finals == [(1, "")]


def test_a_script_and_a_window_are_refused_together():
    with pytest.raises(ConfigError, match="a script and a window; a script gets the whole history"):
        ScriptedBackend(script=lambda history: 1, window=8)

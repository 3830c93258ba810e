"""Parts.after_responses and Parts.at_end: when the worker calls them, and that their faults lose no response."""

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from batch_manager import (
    ErrorCode,
    InvalidRequestError,
    KvCacheConfig,
    ManagerClosedError,
    ModelLoadError,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    config,
)
from batch_manager.config.other_engines import OPTIONS_OF_OTHER_ENGINES
from batch_manager.errors import QueueFullError
from batch_manager.testing.scripted_backend import ScriptedBackend


@pytest.fixture
def hooked(make_world):
    """make(**options) returns a world whose client's events have an "after" for each call of after_responses."""
    def make(**options):
        parts = {"after_responses": lambda: world.client.events.append("after"), **options.pop("parts", {})}
        world = make_world(parts=parts, **options)
        return world
    return make


def test_after_responses_is_called_once_behind_all_responses_of_an_iteration(hooked, new_request):
    world = hooked()
    world.client.pending = [new_request(1, [1], 3, streaming=True), new_request(2, [1], 1), new_request(3, [-1], 1)]
    world.step()
    assert world.client.events == ["get", "send 3", "send 2", "send 1", "poll", "after", "stats"]


def test_an_iteration_without_a_response_has_no_call(hooked, new_request):
    world = hooked()
    world.client.pending = [new_request(1, [1], 3)]
    world.step(2)
    assert "after" not in world.client.events
    world.step(3)
    assert world.client.events.count("after") == 1 and world.client.final(1).error == ""


def test_finals_of_stopped_requests_which_come_after_poll_have_the_call_behind_them(hooked, new_request):
    """after_responses is called after the final responses of stopped requests."""
    world = hooked()
    world.client.pending = [new_request(1, [1], 30)]
    world.step(2)
    world.client.events.clear()
    world.client.stops = {1}
    world.step()
    assert world.client.events == ["get", "poll", "send 1", "after", "stats"]


def test_refusals_of_an_engine_that_is_idle_have_the_call_behind_them(hooked, new_request):
    """after_responses is called after the refusals of an idle engine."""
    world = hooked()
    world.client.pending = [new_request(1, [-1], 3)]
    world.step()
    assert world.client.events == ["get", "send 1", "poll", "after", "stats"]


@pytest.mark.parametrize("policy", list(SchedulerPolicy))
def test_finals_of_a_shutdown_have_one_call_behind_them_then_the_end_is_told_once(
        make_manager, new_client, new_request, policy):
    """A shutdown calls after_responses once after its final responses, and then calls at_end once."""
    client, told, started = new_client(), [], threading.Event()
    client.pending = [new_request(number, [1], 50_000 if number else 2, streaming=True) for number in range(3)]
    client.on_send = lambda *_: started.set()
    backend = {"max_seq_len": 60_000, "num_blocks": 50_000}
    manager = make_manager(client, policy=policy, backend=backend, parts={
        "after_responses": lambda: client.events.append("after"),
        "at_end": lambda health: (client.events.append("end"), told.append(health))})
    assert started.wait(10)
    assert manager.shutdown(drain=False)
    events = [event for event in client.events if event not in ("get", "poll", "stats")]
    assert events[-4:-2] == ["send 1", "send 2"] and events[-2:] == ["after", "end"] and events.count("end") == 1
    (health,) = told
    assert health["state"] == "STOPPED" and health["activity"] == "at_end" and health["failure"] == ""
    assert health["final_responses"] == 3 and health["active_requests"] == 0
    assert health.keys() == manager.health().keys()
    assert {client.final(number).code for number in (1, 2)} == {"SHUTDOWN"}


def test_the_finals_of_an_engine_that_failed_have_a_call_behind_them_and_the_end_says_why(
        make_manager, new_client, new_request):
    """A failed engine calls after_responses after its final responses, and at_end with the failure at the shutdown."""
    client, told = new_client(), []

    class Lost(Exception):
        pass

    client.pending = [new_request(1, [1], 50)]
    manager = make_manager(client, parts={
        "after_responses": lambda: client.events.append("after"), "at_end": told.append,
        "clock": None})
    client.wait_for_finals(1)
    manager._loop._claim = lambda *_: (_ for _ in ()).throw(Lost)         # no guard contains this exception
    client.pending = [new_request(2, [1], 50)]
    manager.notify()
    client.wait_for_finals(2)
    deadline = time.monotonic() + 20
    while "after" not in client.events[client.events.index("send 2"):] and time.monotonic() < deadline:
        time.sleep(0.005)
    events = [event for event in client.events if event not in ("get", "poll")]
    assert events[-2:] == ["send 2", "after"] and client.final(2).code == "ENGINE_FAILED"
    assert told == []
    manager.shutdown()
    assert len(told) == 1 and told[0]["failure"].startswith("[ENGINE_FAILED] the engine raised Lost")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_c15_hooks_that_raise_are_counted_and_cost_nothing(make_manager, new_client, new_request, error):
    def raises(*_):
        raise error

    client = new_client()
    client.pending = [new_request(number, [1], 4, streaming=True) for number in range(3)]
    manager = make_manager(client, parts={"after_responses": raises, "at_end": raises})
    client.wait_for_finals(0, 1, 2)
    assert manager.shutdown()
    failures = manager.health()["callback_failures"]
    assert 4 <= failures["after_responses"] <= 12 and failures["at_end"] == 1
    assert [len(client.responses[number]) for number in range(3)] == [4, 4, 4]


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)], ids=["error", "exit"])
def test_at_end_is_called_after_a_backend_that_cannot_be_closed(make_manager, new_client, new_request, caplog, drain,
                                                                error):
    """C15: an exception of the backend's `close` is counted and logged once. The worker ends as usual."""
    told, closed = [], []

    class Stays(ScriptedBackend):
        def close(self):
            closed.append(1)
            raise error

    client = new_client()
    client.pending = [new_request(1, [5, 6], 3)]
    manager = make_manager(client, model_path="", parts={"backend": Stays(), "at_end": told.append})
    client.wait_for_finals(1)
    assert manager.shutdown(drain=drain, timeout=10)
    assert closed == [1] and [health["state"] for health in told] == ["STOPPED"]
    assert manager.health()["failure"] == "" and manager.health()["callback_failures"]["close"] == 1
    assert [record.getMessage().split("\n")[0] for record in caplog.records if record.levelname == "ERROR"] == [
        f"the close method of the backend raised {type(error).__name__} (1 so far); the worker goes on"]


def test_shutdown_returns_behind_at_end(make_manager, new_client):
    ended = []
    manager = make_manager(new_client(), parts={"at_end": lambda health: (time.sleep(0.1), ended.append(1))})
    assert manager.shutdown() and ended == [1]


def test_the_heartbeat_names_the_hooks(make_manager, new_client, new_request):
    client, seen = new_client(), []
    manager = make_manager(client, parts={
        "after_responses": lambda: seen.append(control.heartbeat.activity),
        "at_end": lambda health: seen.append(control.heartbeat.activity)})
    control = manager._control
    client.pending = [new_request(1, [1], 1)]
    manager.notify()
    client.wait_for_finals(1)
    manager.shutdown()
    assert seen == ["after_responses", "at_end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_c18_a_process_that_is_forked_in_a_hook_ends_there(make_manager, new_client, new_request):
    client, children = new_client(), []
    client.pending = [new_request(1, [1], 3)]

    def forks():
        child = os.fork()
        if child:
            children.append(child)

    manager = make_manager(client, parts={"after_responses": forks})
    client.wait_for_finals(1)
    assert manager.shutdown()
    (child,) = children
    assert os.waitpid(child, 0)[0] == child
    assert len(client.responses[1]) == 1


async def wakes_nobody():
    """An async function, which is refused as a hook."""


@pytest.mark.parametrize("parts, named", [
    ({"after_responses": lambda health: None}, r"Parts\.after_responses .* after_responses\(\)"),
    ({"at_end": lambda: None}, r"Parts\.at_end .* at_end\(health\)"),
    ({"after_responses": wakes_nobody}, r"Parts\.after_responses is an async or a generator function"),
    ({"logits_post_processor_batched": lambda request_ids, logits: None},
     r"Parts\.logits_post_processor_batched cannot be called with 3 .*batched\(request_ids, logits, token_ids\)"),
    ({"logits_post_processor_batched": wakes_nobody}, r"Parts\.logits_post_processor_batched is an async or"),
    ({"at_end": 3}, r"Parts\.at_end is of type int; expected a callable with the arguments \(health\)")])
def test_hooks_of_another_form_are_refused(make_manager, new_client, parts, named):
    with pytest.raises(ValueError, match=named):
        make_manager(new_client(), parts=parts)


def test_the_text_of_an_error_response_is_taken_apart():
    for code in ErrorCode:
        assert ErrorCode.of(f"[{code.value}] a ] b; c") == (code, "a ] b; c")
        assert 400 <= code.http_status < 600
    for error in (InvalidRequestError("a", "b"), QueueFullError("a"), ManagerClosedError("[SHUTDOWN or so")):
        assert ErrorCode.of(str(error)) == (type(error).code, str(error))
        assert ErrorCode.of(error.response_text()) == (type(error).code, str(error))
        with pytest.raises(ValueError, match="is not the text of an error response"):
            ErrorCode.of(f"{error}.")                       # only the untouched text has the code
    for text in ("", "[", "INVALID_REQUEST: x", "[NONSENSE] x", "[INVALID_REQUEST]"):
        with pytest.raises(ValueError, match="is not the text of an error response"):
            ErrorCode.of(text)
    for no_text in (None, 5, b"[SHUTDOWN] x"):
        with pytest.raises(TypeError, match="the text is of type .*; expected a str; "):
            ErrorCode.of(no_text)
    assert {code for code in ErrorCode if code.is_retryable} == {
        ErrorCode.QUEUE_FULL, ErrorCode.SHUTDOWN, ErrorCode.ENGINE_FAILED, ErrorCode.KV_TRANSFER_FAILED}
    assert (ErrorCode.QUEUE_FULL.http_status, ErrorCode.SHUTDOWN.http_status, ErrorCode.INVALID_REQUEST.http_status
            ) == (429, 503, 400)


def test_info_says_what_the_engine_is(make_manager, new_client):
    manager = make_manager(new_client(), max_batch_size=3)
    info = manager.info
    assert info is manager.info and (info.max_batch_size, info.max_beam_width) == (3, 1)
    assert (info.architecture, info.end_ids, info.dispatch, info.device) == ("", (), "scripted", "none")
    assert info.num_blocks > 0 < info.tokens_per_block and info.vocab_size > 1 and info.max_seq_len > 1
    manager.shutdown()
    assert manager.info is info


@pytest.mark.parametrize("value, named", [(5, "int"), (True, "bool"), ("12", "str"), (b"1", "bytes"), (1.5, "float")])
def test_c15_a_poll_that_returns_what_holds_no_ids_is_told_so(make_world, new_request, value, named, caplog):
    world = make_world()
    world.loop.callbacks._poll = lambda: value
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    assert world.loop.callbacks.failures["poll"] >= 2 and world.client.final(1).error == ""
    assert f"the poll callback returned a value of type {named}; expected a set of request ids" in caplog.text


def test_c15_a_get_that_returns_a_request_is_told_so(make_world, new_request, caplog):
    world = make_world()
    fetched = world.loop.callbacks.fetched
    alone = [new_request(1, [1], 2)]
    before, fetched._get = fetched._get, lambda most: alone.pop() if alone else []
    world.step(3)
    assert world.loop.callbacks.failures["get"] == 1
    assert ("the get callback returned a value of type InferenceRequest; expected an iterable of InferenceRequests; "
            "the request is read all the same") in caplog.text
    assert "Traceback" not in caplog.text and "File " not in caplog.text
    assert world.client.final(1).error == "" and world.client.final(1).tokens() == [1, *world.expected([1], 2)]
    fetched._get = before
    world.client.pending = [new_request(2, [1], 2)]
    world.run()
    assert world.client.final(2).error == ""


@pytest.mark.parametrize("logs_texts", [False, True])
def test_what_a_callback_says_is_logged_where_that_was_asked_for_alone(make_world, new_request, caplog, logs_texts):
    """The text of a callback's exception is logged if log_callback_errors is set, and otherwise only its type."""
    world = make_world(log_callback_errors=logs_texts)


    prompt = "a prompt\nof somebody"

    def send(*_):
        raise KeyError(prompt)

    world.loop.callbacks._send = send
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    assert (r"a prompt\nof somebody" in caplog.text) == logs_texts
    assert "the send callback raised KeyError" in caplog.text


def test_an_exception_that_cannot_say_what_it_says_is_logged_all_the_same(make_world, new_request, caplog):
    class Silent(Exception):
        def __str__(self):
            raise SystemExit

    def send(*_):
        raise Silent

    world = make_world(log_callback_errors=True)
    world.loop.callbacks._send = send
    world.client.pending = [new_request(1, [1], 2)]
    world.run()
    assert "the send callback raised Silent: its text cannot be read (1 so far)" in caplog.text


def test_info_of_a_checkpoint_names_its_architecture_and_end_ids(make_manager, new_client):
    pytest.importorskip("torch")
    model = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
    config = json.loads((model / "config.json").read_text())
    info = make_manager(new_client(), model_path=model, device="cpu", cpu_compile=False, num_threads=1,
                        kv_cache_config=KvCacheConfig(max_tokens=1024)).info
    assert info.architecture == config["architectures"][0] and info.vocab_size == config["vocab_size"]
    assert info.end_ids == ((config["eos_token_id"],) if config.get("eos_token_id") is not None else ())
    assert info.device.startswith("cpu") and info.dtype == "float32" and info.dispatch == "torch"


def test_a_field_of_another_configuration_and_a_name_on_a_hub_are_told_as_such(make_manager, new_client):
    with pytest.raises(TypeError, match=r"enable_block_reuse is a field of KvCacheConfig: pass kv_cache_config="):
        TrtGptModelOptionalParams(enable_block_reuse=True)
    for name, way_out in OPTIONS_OF_OTHER_ENGINES.items():
        with pytest.raises(TypeError) as raised:
            TrtGptModelOptionalParams(**{name: 0.5})
        assert str(raised.value) == f"{name} is an option of another engine: pass {way_out}"
        for used in re.findall(r"(\w+)=", way_out):       # the way out exists
            assert any(used in owner.__dataclass_fields__ for owner in (
                TrtGptModelOptionalParams, KvCacheConfig, config.ParallelConfig, config.SpeculativeConfig))
    with pytest.raises(TypeError, match=r"pass parallel_config=ParallelConfig\(tensor_parallel_size=\.\.\.\)"):
        TrtGptModelOptionalParams(tensor_parallel_size=2)
    for name, told in (("world_size", "one device"), ("enable_thinking", "template_options={'enable_"),
                       ("temperature", "LLM.generate(prompts, temperature=...)"), ("revision", "hf download")):
        with pytest.raises(TypeError, match=f"{name} is no option of the engine: .*{re.escape(told)}"):
            TrtGptModelOptionalParams(**{name: 1})
    with pytest.raises(TypeError, match="unknown option 'max_batch_sise'; did you mean max_batch_size"):
        TrtGptModelOptionalParams(max_batch_sise=3)
    with pytest.raises(TypeError, match="unknown option 'nonsense'; the options are kv_cache_config, "):
        TrtGptModelOptionalParams(nonsense=True)
    with pytest.raises(ModelLoadError,
                       match=r"Hugging Face hub.*`hf download Qwen/Qwen2\.5-0\.5B` and pass the folder"):
        make_manager(new_client(), model_path="Qwen/Qwen2.5-0.5B")
    with pytest.raises(ModelLoadError, match="pass an existing path"):
        make_manager(new_client(), model_path="/nowhere/at/all")


@pytest.mark.parametrize("name, said", [
    ("stop", "stop_words_list"), ("eos_token_id", "called end_id"), ("n", "one request for each output"),
    ("user", "map ids to users yourself"), ("seed", "called random_seed"), ("messages", "chat template")])
def test_words_of_other_engines_are_answered_with_ours(new_request, name, said):
    """A parameter name of another engine is refused. The error names this engine's parameter or says what to do."""
    with pytest.raises(InvalidRequestError, match=f"Invalid tensor name: '{name}'.*{said}"):
        new_request(1, [1], 2, **{name: 3})

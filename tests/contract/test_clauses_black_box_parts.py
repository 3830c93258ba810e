"""C1, C21, C26: users' parts, log handlers and traces that fail."""

import logging
from types import SimpleNamespace

import pytest

from batch_manager import ConfigError, Parts, RequestScheduler, SchedulerOutput
from batch_manager.seams import BackendInfo

CANARY = 31337
PROMPT = [CANARY] * 5


@pytest.fixture
def everything_logged(caplog):
    with caplog.at_level(logging.DEBUG, "batch_manager"):
        yield lambda: [record.getMessage() for record in caplog.records]


class LogHandler(logging.Handler):
    def __init__(self, error):
        super().__init__()
        self.error, self.calls = error, 0

    def emit(self, record):
        self.calls += 1
        raise self.error


class LogFilter(logging.Filter):
    calls = 0

    def filter(self, record):
        self.calls += 1
        raise KeyError(record.getMessage())


@pytest.mark.parametrize("broken", [LogHandler(ValueError()), LogHandler(SystemExit(3)), LogFilter()],
                         ids=["a handler", "one that exits", "a filter"])
def test_c1_c15_logging_of_the_host_that_raises_costs_no_response(make_manager, new_client, new_request, broken,
                                                                  caplog):
    log = logging.getLogger("batch_manager")
    add, remove = ((log.addHandler, log.removeHandler) if isinstance(broken, logging.Handler)
                   else (log.addFilter, log.removeFilter))
    client = new_client()
    client.pending = [new_request(1, [1], 3), new_request(1, [1], 3), new_request(3, [-1], 3), object(),
                      new_request(4, [1], 5000), new_request(5, [1], 3, deadline_s=1e-9)]
    client.on_send = lambda request_id, response: 1 / 0
    with caplog.at_level(logging.DEBUG, "batch_manager"):
        add(broken)
        try:
            manager = make_manager(client)
            client.wait_for_finals(1, 3, 4, 5)
            assert manager.health()["state"] == "RUNNING"
            assert manager.shutdown()
        finally:
            remove(broken)
    assert broken.calls > 4
    assert {response.code for response in client.responses[1]} == {"", "DUPLICATE_REQUEST_ID"}


def test_the_record_of_a_contained_log_names_the_line_that_wrote_it(make_manager, new_client, new_request, caplog):
    client = new_client()
    client.pending = [new_request(1, [-1], 3)]
    with caplog.at_level(logging.INFO, "batch_manager"):
        make_manager(client)
        client.wait_for_finals(1)
    assert {record.filename for record in caplog.records} == {"build.py", "finals.py"}


def test_c15_a_trace_that_raises_is_counted_and_changes_nothing(make_manager, new_client, new_request):
    client = new_client()
    client.pending = [new_request(1, [1], 5)]
    manager = make_manager(client, parts={"trace": lambda trace: 1 / 0})
    client.wait_for_finals(1)
    assert client.final(1).error == ""
    assert manager.shutdown()
    assert manager.health()["callback_failures"]["trace"] == 5
    assert '"Failed trace Callbacks":4' in client.stats[-1]     # a trace comes after the statistics


class Broken(RequestScheduler):
    """A scheduler that returns plan(active requests), or raises what `plan` raises."""

    def __init__(self, plan):
        self.plan = plan

    def schedule_request(self, active_requests, inflight_request_ids):
        return self.plan(active_requests)


def raising(error):
    def plan(active_requests):
        raise error
    return plan


class Odd:
    def __init__(self, *raises):
        self.raises = raises

    def __hash__(self):
        if "hash" in self.raises:
            raise ValueError
        return 1

    def __repr__(self):
        raise ValueError


PLANS = {
    "raises with a prompt": lambda active: raising(KeyError(*active[0].tokens[0]))(active),
    "raises SystemExit": raising(SystemExit(3)),
    "raises KeyboardInterrupt": raising(KeyboardInterrupt()),
    "raises GeneratorExit": raising(GeneratorExit()),
    "returns nothing": lambda active: None,
    "returns a tuple": lambda active: (active, [], []),
    "plans generators": lambda active: SchedulerOutput((request for request in active), iter(()), iter(())),
    "plans objects without a repr": lambda active: SchedulerOutput([Odd()], [], []),
    "plans objects without a hash": lambda active: SchedulerOutput([Odd("hash")], [], []),
    "plans the tokens of a prompt": lambda active: SchedulerOutput(list(active[0].tokens[0]), [], []),
    "plans one token": lambda active: SchedulerOutput([active[0].tokens[0][0]], [], []),
    "plans tokens as a chunk": lambda active: SchedulerOutput(list(active), [], [], [active[0].tokens[0]]),
    "plans None": lambda active: SchedulerOutput(None, None, None),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_c26_a_scheduler_that_breaks_is_named_to_the_active_requests_and_the_process_lives(
        make_manager, new_client, new_request, everything_logged, plan):
    client = new_client()
    client.pending = [new_request(1, PROMPT, 3), new_request(2, PROMPT, 3)]
    manager = make_manager(client, backend={"vocab_size": 40_000}, parts={"scheduler": Broken(plan)})
    client.wait_for_finals(1, 2)
    client.pending = [new_request(1, PROMPT, 3)]
    manager.notify()
    while len(client.finals(1)) < 2:
        assert manager.health()["state"] == "RUNNING"
    for response in client.finals(1) + client.finals(2):
        assert response.code == "ENGINE_FAILED"
        assert "Broken broke the scheduler contract" in response.error
    said = [response.error for response in client.finals(1)] + client.stats + everything_logged()
    assert not [text for text in said if str(CANARY) in text]


FAULTS = {
    "a step": {"on_step": lambda batch: raising(ValueError(batch.context and batch.context[0].token_ids))(batch)},
    "an invalid token": {"script": lambda history: 10**9 if len(history) > 6 else CANARY},
    "a slow step": {"on_step": lambda batch: None},
}


@pytest.mark.parametrize("backend", FAULTS.values(), ids=FAULTS)
def test_c26_no_text_log_or_record_holds_a_token_whatever_fails(make_manager, new_client, new_request,
                                                                everything_logged, backend):
    client = new_client()
    bad = [{"stop_words_list": [PROMPT, [CANARY, 10**6]]}, {"bad_words_list": [[PROMPT, [CANARY, -1, -1, -1, -1]]]},
           {"input_ids": [*PROMPT, -CANARY]}, {"input_ids": [*PROMPT, 1.5]}, {"input_ids": [*PROMPT, str(CANARY)]},
           {"input_ids": [PROMPT, PROMPT]}, {"input_ids": str(CANARY)}, {"draft_input_ids": PROMPT},
           {"embedding_bias": [float(CANARY)] * 5}, {"cache_salt": str(CANARY) * 1000}]
    client.pending = [new_request(i, **{"prompt": PROMPT, "new_tokens": 9, **row}) if "input_ids" not in row
                      else new_request(i, row["input_ids"], 9) for i, row in enumerate(bad)]
    client.pending += [new_request(100, PROMPT, 9, streaming=True), new_request(101, PROMPT * 2, 2000),
                       new_request(102, PROMPT * 200, 9), new_request(100, PROMPT, 9),
                       new_request(103, PROMPT, 9, deadline_s=1e-9)]
    client.stops = {101}
    client.on_send = lambda request_id, response: raising(ValueError(str(PROMPT)))(None)
    manager = make_manager(client, backend={"vocab_size": 40_000, "max_seq_len": 600, **backend}, max_batch_size=32,
                           max_num_sequences=32)
    client.wait_for_finals(*range(len(bad)), 100, 101, 102, 103)
    assert all(client.final(i).code == "INVALID_REQUEST" for i in range(len(bad)))
    manager.shutdown()
    texts = [response.error for responses in client.responses.values() for response in responses]
    assert all(text.isprintable() for text in texts)
    said = texts + client.stats + everything_logged() + [str(manager.health())]
    assert not [text for text in said if str(CANARY) in text]


def test_c7_c26_control_characters_of_a_user_come_escaped(make_manager, new_client, new_request, everything_logged):
    odd_list = type("x\r\n\x1b[2J\u2028", (list,), {})
    client = new_client()
    client.pending = [new_request(1, odd_list([1]), 3)]
    make_manager(client)
    client.wait_for_finals(1)
    assert client.final(1).code == "INVALID_REQUEST" and client.final(1).error.isprintable()
    assert all(text.isprintable() for text in everything_logged())


@pytest.mark.parametrize("parts", [{"backend": object()}, {"backend": "cpu"}, {"trace": "x"}, {"clock": object()},
                                   {"attention": 3}], ids=["object", "backend", "trace", "clock", "attention"])
def test_a_part_that_cannot_be_one_is_refused_where_it_is_given(parts):
    with pytest.raises(ConfigError, match=f"Parts.{next(iter(parts))} is of type"):
        Parts(**parts)


@pytest.mark.parametrize("change", [
    {"vocab_size": 0}, {"num_blocks": -1}, {"tokens_per_block": 4.0}, {"num_slots": True}, {"max_seq_len": None},
    {"attention_window": 0}, {"sink_tokens": -1}, {"host_blocks": "1"}, {"draft_cost": -0.1},
    {"draft_cost": 1.1}, {"draft_cost": True}, {"draft_cost": float("nan")}, {"draft_cost": None},
    {"dispatch": "\udcff"}, {"dispatch": None}], ids=ascii)
def test_a_value_that_a_backend_cannot_have_is_refused_by_name(change):
    numbers = ("vocab_size", "max_seq_len", "num_blocks", "tokens_per_block", "num_slots")
    good = {"dispatch": "mine", **dict.fromkeys(numbers, 9)}
    assert BackendInfo(**good).host_blocks == 0
    with pytest.raises(ConfigError, match=f"BackendInfo.{next(iter(change))} is "):
        BackendInfo(**good | change)


@pytest.mark.parametrize("info", [None, 5, {"vocab_size": 9}], ids=str)
def test_a_backend_that_does_not_say_what_it_is_is_refused_and_closed(make_manager, new_client, info):
    closed = []
    backend = SimpleNamespace(start=print, memory_usage=print, info=info,
                              close=lambda: closed.append(1))
    with pytest.raises(ConfigError, match="the info of Parts.backend is of type"):
        make_manager(new_client(), model_path="", parts={"backend": backend})
    assert closed == [1]


def test_a_backend_whose_close_raises_does_not_hide_why_the_constructor_failed(make_manager, new_client, caplog):
    def close():
        raise ValueError("stuck")

    backend = SimpleNamespace(start=print, memory_usage=print, info=None, close=close)
    with pytest.raises(ConfigError, match="the info of Parts.backend is of type"):
        make_manager(new_client(), model_path="", parts={"backend": backend})
    with pytest.raises(ConfigError, match="in Parts.backend lacks memory_usage, info"):
        make_manager(new_client(), model_path="", parts={"backend": SimpleNamespace(start=print, close=close)})
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert all(text.startswith("the close method of the backend raised ValueError; the engine") for text in errors)


def test_a_factory_that_returns_no_backend_is_refused_in_the_caller(make_manager, new_client):
    with pytest.raises(ConfigError, match="the factory in Parts.backend returned a value of type NoneType"):
        make_manager(new_client(), model_path="", parts={"backend": lambda: None})

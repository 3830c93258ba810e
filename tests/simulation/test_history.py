"""T15: the history checker finds no anomaly in a good history, and an anomaly in each of 38 bad histories."""

from copy import deepcopy

import pytest

from tests.simulation.history import (
    Closed,
    Handed,
    Other,
    Polled,
    Sent,
    from_line,
    judge,
    main,
    scripted_oracle,
    to_line,
)
from tests.simulation.replay import main as replay

MODEL = {"vocab_size": 50, "key": 3, "window": None, "sink": 0, "max_seq_len": 20}
DUPLICATE, INVALID = "[DUPLICATE_REQUEST_ID] x", "[INVALID_REQUEST] x"
PROMPT = [1, 2, 3]


def drawn(count: int, end_id: int = -1, prompt: list[int] = PROMPT) -> list[tuple[int, float]]:
    text = scripted_oracle(MODEL).text(Handed(0, 0, prompt=prompt, end_id=end_id), count, count)
    return list(zip(text.tokens, text.log_probs))


def tokens(count: int) -> list[int]:
    return [token for token, _ in drawn(count)]


THIRD = tokens(3)[2]            # as an end id it ends the output after two tokens
assert THIRD not in tokens(2)


def good() -> list:
    """Return a history with requests of each kind: whole, streamed, end id, refused, duplicate, stopped, timed out."""
    log_probs = [log_prob for _, log_prob in drawn(4)]
    return [
        Other(1.0),
        Handed(1.0, 1, prompt=PROMPT, max_new_tokens=4),
        Handed(1.0, 2, prompt=PROMPT, max_new_tokens=3, streams=True, excludes=True),
        Handed(1.0, 3, prompt=PROMPT, max_new_tokens=9, end_id=THIRD),
        Handed(1.0, 4, prompt=[], must="INVALID_REQUEST"),
        Handed(1.0, None),
        Handed(1.0, 1, prompt=PROMPT, max_new_tokens=4),
        Handed(1.0, 5, prompt=PROMPT, max_new_tokens=9, deadline_s=0.5),
        Handed(1.0, 6, prompt=PROMPT, max_new_tokens=4, log_probs=True),
        Sent(1.1, 4, True, INVALID),
        Sent(1.1, 1, True, DUPLICATE),
        Sent(1.1, 2, False, "", tokens(1)),
        Polled(1.1, []),
        Other(1.1),
        Other(1.2),
        Handed(1.2, 7, prompt=PROMPT, max_new_tokens=9),
        Handed(1.2, 8, prompt=PROMPT, max_new_tokens=9),
        Sent(1.3, 2, False, "", tokens(2)[1:]),
        Sent(1.3, 3, True, "", PROMPT + tokens(2), 1),
        Polled(1.3, [7, 99]),
        Sent(1.3, 7, True, "", PROMPT + tokens(1), 5),
        Other(1.3),
        Sent(1.6, 2, True, "", tokens(3)[2:], 3),
        Sent(1.6, 1, True, "", PROMPT + tokens(4), 3),
        Sent(1.6, 6, True, "", PROMPT + tokens(4), 3, log_probs),
        Sent(1.6, 5, True, "", PROMPT + tokens(3), 4),
        Polled(1.6, []),
        Other(1.6),
        Handed(1.7, 1, prompt=PROMPT, max_new_tokens=1),
        Sent(1.8, 1, True, "", PROMPT + tokens(1), 3),
        Sent(1.8, 8, True, "[MODEL_ERROR] x"),
        Closed(2.0, accepted=8, refused=2, unaddressable=1),
    ]


def find(history: list, kind: type, request_id: int, nth: int = 0):
    """Return the event of the class `kind` with this request id and the index `nth` among such events."""
    return [event for event in history if type(event) is kind and event.request_id == request_id][nth]


def drop(history: list, event) -> None:
    history[:] = [other for other in history if other is not event]


def insert_after(history: list, event, new) -> None:
    history.insert(next(i for i, other in enumerate(history) if other is event) + 1, new)


def change(**fields):
    """Return a function (history, request_id, nth) that sets `fields` of the response with index `nth` to a request."""
    def spoil(history: list, request_id: int, nth: int) -> None:
        event = find(history, Sent, request_id, nth)
        for name, value in fields.items():
            setattr(event, name, value)
    return spoil


def spoiled(request_id: int, nth: int, **fields):
    return lambda history: change(**fields)(history, request_id, nth)


def final_twice(history):
    event = find(history, Sent, 3)
    insert_after(history, event, deepcopy(event))


def piece_after_the_final(history):
    insert_after(history, find(history, Sent, 2, 2), Sent(1.6, 2, False, "", [1]))


def error_after_the_final(history):
    insert_after(history, find(history, Sent, 3), Sent(1.5, 3, True, "[MODEL_ERROR] x"))


def final_is_missing(history):
    drop(history, find(history, Sent, 8))


def refusal_is_missing(history):
    drop(history, find(history, Sent, 4))


def double_is_not_answered(history):
    drop(history, find(history, Sent, 1))


def stranger_is_answered(history):
    insert_after(history, history[0], Sent(1.0, 77, True, "[SHUTDOWN] x"))


def answered_before_it_came(history):
    event = find(history, Sent, 7)
    drop(history, event)
    history.insert(1, event)


def piece_is_repeated(history):
    event = find(history, Sent, 2, 1)
    insert_after(history, event, deepcopy(event))


def piece_is_lost(history):
    drop(history, find(history, Sent, 2, 1))


def pieces_in_another_order(history):
    first, second = find(history, Sent, 2, 0), find(history, Sent, 2, 1)
    first.tokens, second.tokens = second.tokens, first.tokens


def refused_without_a_double(history):
    drop(history, find(history, Handed, 1, 1))
    history[-1].refused = 1


def refused_twice(history):
    event = find(history, Sent, 4)
    insert_after(history, event, deepcopy(event))


def stopped_one_is_not_told(history):
    drop(history, find(history, Sent, 7))
    history.insert(-1, Sent(1.9, 7, True, "", PROMPT + tokens(1), 5))


def stop_is_remembered(history):
    """Cancel request 8 after a poll that named it before get returned it, although such a poll must have no effect."""
    history.insert(1, Polled(1.0, [8]))
    spoiled(8, 0, error="", tokens=list(PROMPT), reason=5)(history)


def counted_one_short(history):
    history[-1].accepted -= 1


def nobody_counted_the_nameless(history):
    history[-1].unaddressable = 0


def other_log_probs(history):
    find(history, Sent, 6).log_probs[2] -= 1


BAD = {
    "I1": [final_is_missing, refusal_is_missing, double_is_not_answered],
    "I2": [final_twice, piece_after_the_final, error_after_the_final, refused_twice],
    "I3": [stranger_is_answered, answered_before_it_came],
    "I4": [spoiled(8, 0, final=False), spoiled(8, 0, tokens=[1, 2, 3]), spoiled(8, 0, error="something went wrong"),
           spoiled(8, 0, error="[WHATEVER] x"), spoiled(1, 1, tokens=None)],
    "I5": [piece_is_repeated, piece_is_lost, pieces_in_another_order, spoiled(2, 0, tokens=[]),
           spoiled(2, 0, reason=3), spoiled(2, 2, tokens=[])],
    "I6": [refused_without_a_double, counted_one_short, nobody_counted_the_nameless,
           spoiled(4, 0, error="", tokens=[], reason=3), spoiled(3, 0, error=INVALID, tokens=None, reason=0)],
    "I7": [stopped_one_is_not_told, stop_is_remembered, spoiled(7, 0, error="[SHUTDOWN] x", tokens=None, reason=0),
           spoiled(5, 0, time=1.4), spoiled(7, 0, reason=3, tokens=PROMPT + tokens(9))],
    "I8": [other_log_probs, spoiled(1, 1, tokens=PROMPT + [0] + tokens(4)[1:]), spoiled(1, 1, tokens=tokens(4)),
           spoiled(1, 1, tokens=PROMPT + tokens(3)), spoiled(3, 0, tokens=PROMPT + tokens(3)),
           spoiled(3, 0, tokens=PROMPT + tokens(1)), spoiled(7, 0, tokens=[*PROMPT, 0]), spoiled(1, 1, reason=0)],
}
ROWS = [(rule, spoil) for rule, spoils in BAD.items() for spoil in spoils]


def test_nothing_is_wrong_with_a_good_history():
    assert judge(MODEL, good()) == []


def test_there_are_thirty_bad_ones():
    assert len(ROWS) >= 30


@pytest.mark.parametrize(("rule", "spoil"), ROWS,
                         ids=[f"{rule}-{number}-{spoil.__name__}" for number, (rule, spoil) in enumerate(ROWS)])
def test_a_bad_history_is_flagged_by_the_rule_it_breaks(rule, spoil):
    history = good()
    spoil(history)
    anomalies = judge(MODEL, history)
    assert any(anomaly.startswith(rule) for anomaly in anomalies), anomalies


def test_a_history_survives_being_written_and_read():
    assert list(map(from_line, map(to_line, good()))) == good()


@pytest.mark.parametrize("seed", ["3", "30"])    # with beams, in flight and in static batches
def test_a_history_of_the_simulator_is_judged_from_its_file(tmp_path, capsys, seed):
    file = tmp_path / "history"
    assert replay([seed, "--iterations", "40", "--history", str(file)]) == 0
    assert main([str(file)]) == 0
    assert '"beams": [[[' in file.read_text()
    lines = file.read_text().splitlines()
    last_final = max(i for i, line in enumerate(lines) if '"final": true' in line)
    file.write_text("\n".join(lines[:last_final] + lines[last_final + 1:]))
    assert main([str(file)]) == 1
    assert "I1" in capsys.readouterr().out

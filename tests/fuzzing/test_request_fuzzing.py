"""T5, quick: all engines treat fuzzed requests as the oracle says, and the oracle is right on requests written by hand.

The tests also check the report of a failure.
"""

import functools

import numpy as np
import pytest

from tests.campaigns.registry import Options, suite
from tests.campaigns.request_fuzzing import run_blocks
from tests.fuzzing.block import BLOCK, run_block
from tests.fuzzing.draws import draw
from tests.fuzzing.engines import CYCLE, ENGINES, PLAIN, ROOMY, engine_of
from tests.fuzzing.items import REQUEST, Draw
from tests.fuzzing.oracle import judge
from tests.fuzzing.replay import main, report
from tests.fuzzing.values import FLOAT, INT, PYTHON, STRANGE_THINGS, Value
from tests.harness.world import quiet_log
from tests.revived.request_bugs import REQUEST_BUGS

# Twice each engine, and once the one that reads large tensors.
FIRST_BLOCK, NUM_BLOCKS = CYCLE.index(ROOMY) - 21, 22


@pytest.fixture(scope="module")
def counts():
    return run_blocks(FIRST_BLOCK, NUM_BLOCKS)


def test_every_item_is_refused_or_run_as_the_oracle_says_and_nobody_else_notices(counts):
    assert not counts.failed, "\n".join(text for _, text in counts.failed[:3])
    assert counts.requests == NUM_BLOCKS * BLOCK


def test_there_was_something_of_everything(counts):
    assert counts.run > counts.requests // 4 and counts.tokens > counts.run
    assert counts.refused.keys() == {"INVALID_REQUEST", "DUPLICATE_REQUEST_ID", "TOO_LARGE_FOR_KV_CACHE", "QUEUE_FULL"}
    assert min(counts.refused.values()) > 5 and counts.not_built > 400 and counts.nobody > 100
    assert 1 < counts.largest < 2.2, "some were as large as a request may be"


def test_a_number_is_one_request():
    for number in range(300):
        first, second = (draw(number, engine_of(number // BLOCK)) for _ in range(2))
        assert (first.kind, first.tensors.keys(), type(first.item).__mro__[-2:]) == (
            second.kind, second.tensors.keys(), type(second.item).__mro__[-2:])
        assert all(str(first.tensors[name].plain) == str(second.tensors[name].plain) for name in first.tensors)
    assert {engine.name for engine in CYCLE} >= {engine.name for engine in (*ENGINES, ROOMY)}
    assert len(STRANGE_THINGS) > 20


@functools.cache
def is_wrong(block: int) -> bool:
    return bool(run_block(block).wrong)


@pytest.mark.parametrize("bug", REQUEST_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_and_its_report_shows_the_request_and_the_command(bug, monkeypatch, capsys):
    with quiet_log():
        with monkeypatch.context() as patch:
            bug.plant(patch)
            block, wrong = next((block, outcome.wrong) for block in bug.blocks if (outcome := run_block(block)).wrong)
            text = report(block, wrong)
        assert not is_wrong(block), "the same block is clean without it"
    number = next((number for number, _ in wrong if number is not None), block * BLOCK)
    assert f"python -m tests.fuzzing.replay {number}" in text and f"block {block}" in text
    assert wrong[0][0] is None or f"request {number}: a " in text


def test_a_replay_shows_the_request_and_its_exit_status_says_whether_anything_is_wrong(capsys, monkeypatch):
    assert main(["1601"]) == 0
    said = capsys.readouterr().out
    assert "request 1601: a request" in said and "the oracle: Verdict(" in said and "nothing is wrong" in said
    REQUEST_BUGS[0].plant(monkeypatch)
    wrong = run_block(0).wrong
    assert main([str(wrong[0][0] or 0)]) == 1 and "wrong: " in capsys.readouterr().out


def test_the_campaign_runs_it_and_says_what_it_is_short_of():
    summary = suite("T5")(Options("F", first_seed=5, seconds=0.0, jobs=1))
    assert summary.ran.startswith("T5: blocks 5..") and not summary.failures
    assert summary.short == ["0 of 1,000,000 requests"]


NAN = float("nan")
GOOD = {"input_ids": Value([1, 2], PYTHON, [1, 2]), "request_output_len": Value(3, PYTHON, 3)}
BY_HAND = [
    ({}, set()),
    ({"input_ids": None}, {"input_ids"}),
    ({"input_ids": Value([], PYTHON, [])}, {"input_ids"}),
    ({"input_ids": Value([[1], [2]], PYTHON, [[1], [2]])}, {"input_ids"}),
    ({"input_ids": Value([96], PYTHON, [96])}, {"input_ids"}),
    ({"request_output_len": Value(True, PYTHON, True)}, {"request_output_len"}),
    ({"request_output_len": Value(2**31, PYTHON, 2**31)}, {"request_output_len"}),
    ({"temperature": Value(np.float32(NAN), FLOAT, NAN)}, {"temperature"}),
    ({"temperature": Value(-0.0, PYTHON, -0.0)}, set()),
    ({"random_seed": Value(2**64 - 1, PYTHON, 2**64 - 1)}, set()),
    ({"random_seed": Value(2**64, PYTHON, 2**64)}, {"random_seed"}),
    ({"runtime_top_p": Value([[1]], PYTHON, [[1]])}, set()),
    ({"runtime_top_p": Value([[[1]]], PYTHON, [[[1]]])}, {"runtime_top_p"}),
    ({"streaming": Value(2, PYTHON, 2)}, {"streaming"}),
    ({"stop_words_list": Value([[5, 7], [9]], PYTHON, [[5, 7], [9]])}, set()),
    ({"stop_words_list": Value(np.zeros((2, 3)), INT, [[5, 7, 9], [2, 3, -1]])}, set()),
    ({"stop_words_list": Value(np.zeros((2, 3)), INT, [[5, 7, 9], [2, 2, -1]])}, {"stop_words_list"}),
    ({"stop_words_list": Value(np.zeros((2, 3)), INT, [[5, 7, 9], [2, -1, 3]])}, {"stop_words_list"}),
    ({"prompt_vocab_size": Value(2, PYTHON, 2)}, {"prompt_embedding_table", "prompt_vocab_size"}),
    ({"lora_task_id": Value(0, PYTHON, 0)}, {"lora_task_id"}),
    ({"lora_weights": Value([[0.0]], PYTHON, [[0.0]]), "lora_config": Value([[0, 0, 0]], PYTHON, [[0, 0, 0]])},
     {"lora_weights", "lora_config"}),
    ({"draft_input_ids": Value([3], PYTHON, [3])}, {"draft_input_ids"}),
]


@pytest.mark.parametrize("change, faults", BY_HAND, ids=lambda part: ", ".join(sorted(part)))
def test_the_oracle_agrees_with_what_anyone_would_say(change, faults):
    tensors = {name: value for name, value in (GOOD | change).items() if value is not None}
    verdict = judge(Draw(0, REQUEST, 7, tensors=tensors), PLAIN)
    assert verdict.faults == faults and verdict.codes == ({"INVALID_REQUEST"} if faults else set())

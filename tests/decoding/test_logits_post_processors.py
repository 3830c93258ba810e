import gc
import logging
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.logits_post_processors import LogitsPostProcessors
from batch_manager.decoding.slots import SamplingRows, SlotState
from batch_manager.errors import InvalidRequestError
from batch_manager.guard import ForeignCodeError
from batch_manager.handover import LogitsPostProcessor, SlotSetup
from batch_manager.names import ErrorCode

VOCAB = 12


def logits_of(rows):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


def rows_of(slots):
    slots = np.array(slots, np.int32)
    device_slots = torch.from_numpy(slots).long()
    return SamplingRows(slots, np.full(len(slots), 3, np.int32), device_slots, torch.full((len(slots),), 3))


def processor(function, request_id=5, tokens=((1, 2),), is_batched=False):
    return LogitsPostProcessor(request_id, function, lambda: [list(beam) for beam in tokens], is_batched)


@pytest.fixture
def post_processors():
    """post_processors({slot: LogitsPostProcessor or None}) returns LogitsPostProcessors with these slots set up.

    The fixture keeps the values of the dict alive.
    """
    held = []

    def make(of_slot):
        held.append(of_slot)
        made = LogitsPostProcessors()
        for slot, given in of_slot.items():
            made.set_up(slot, SlotSetup(logits_post_processor=given))
        return made

    return make


def add_one_in_place(request_id, logits, token_ids):
    logits += 1
    return logits


def add_one_in_a_copy(request_id, logits, token_ids):
    return logits + 1


@pytest.mark.parametrize("function", [add_one_in_place, add_one_in_a_copy])
def test_a_function_changes_the_rows_of_its_slot_and_no_others(post_processors, function):
    logits = logits_of(3)
    before = logits.clone()
    processed = post_processors({4: processor(function)}).apply(logits, np.array([7, 4, 2]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]]) and torch.equal(logits[1], before[1] + 1)
    assert processed.slots.tolist() == [4] and processed.model_finite.tolist() == [True] and processed.failures == {}


def test_a_function_is_called_with_the_id_its_beams_and_their_tokens(post_processors):
    calls = []

    def note(request_id, logits, token_ids):
        calls.append((request_id, tuple(logits.shape), logits.dtype, token_ids))
        return logits

    made = post_processors({0: processor(note, 2**64 - 1, [[1, 2], [1, 3]]), 3: processor(note, 9)})
    made.apply(logits_of(4), np.array([0, 0, 1, 3]))
    assert calls == [(2**64 - 1, (1, 2, VOCAB), torch.float32, [[1, 2], [1, 3]]),
                     (9, (1, 1, VOCAB), torch.float32, [[1, 2]])]


def test_the_batched_function_is_called_once_with_all_rows_that_want_it(post_processors):
    calls = []

    def add_ten(request_ids, logits, token_ids):
        calls.append((request_ids, tuple(logits.shape), token_ids))
        for one in logits:
            assert one.shape == (1, 1, VOCAB)
            one += 10

    made = post_processors({slot: processor(add_ten, 100 + slot, [[slot]], True) for slot in (1, 3, 5)})
    logits = logits_of(5)
    before = logits.clone()
    assert made.apply(logits, np.array([5, 0, 1, 2, 3])).failures == {}
    assert calls == [([105, 101, 103], (3, 1, 1, VOCAB), [[[5]], [[1]], [[3]]])]
    assert torch.equal(logits[[0, 2, 4]], before[[0, 2, 4]] + 10) and torch.equal(logits[[1, 3]], before[[1, 3]])
    made.apply(logits[:1], np.array([5]))
    torch.testing.assert_close(logits[0], before[0] + 20)


def raises(request_id, logits, token_ids):
    raise ValueError(" ".join(["secret", *map(str, token_ids[0])]))


def exits(request_id, logits, token_ids):
    raise SystemExit


WRONG = {
    "raises": (raises, "raised ValueError"),
    "exits": (exits, "raised SystemExit"),
    "returns None": (lambda i, x, t: None, "returned None"),
    "returns a bool": (lambda i, x, t: True, "returned a value of type bool"),
    "returns an array": (lambda i, x, t: x.numpy(), "returned a value of type ndarray"),
    "another shape": (lambda i, x, t: x[0],
                      f"of shape [1, {VOCAB}], torch.float32, on cpu; it must be [1, 1, {VOCAB}]"),
    "fewer tokens": (lambda i, x, t: x[..., 1:], f"of shape [1, 1, {VOCAB - 1}]"),
    "another dtype": (lambda i, x, t: x.double(), "torch.float64"),
    "another device": (lambda i, x, t: x.to("meta"), "on meta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_function_that_does_something_wrong_fails_its_own_slot(post_processors, case, caplog):
    function, says = WRONG[case]
    logits = logits_of(3)
    before = logits.clone()
    made = post_processors({0: processor(add_one_in_place), 1: processor(function), 2: processor(add_one_in_place)})
    with caplog.at_level(logging.ERROR):
        failures = made.apply(logits, np.array([0, 1, 2])).failures
    assert list(failures) == [1] and failures[1].code is ErrorCode.MODEL_ERROR
    assert says in failures[1].message and "secret 1" not in failures[1].message + caplog.text
    assert torch.equal(logits[[0, 2]], before[[0, 2]] + 1)


def test_a_batched_function_that_raises_for_one_request_fails_it_and_for_several_is_asked_again(post_processors):
    made = post_processors({slot: processor(raises, slot, is_batched=True) for slot in (0, 1)})
    with pytest.raises(ForeignCodeError, match="logits post-processor raised ValueError"):
        made.apply(logits_of(2), np.array([0, 1]))
    assert list(made.apply(logits_of(1), np.array([1])).failures) == [1]


def test_a_batched_function_that_returns_something_fails_all_that_asked(post_processors):
    made = post_processors({slot: processor(lambda ids, x, t: x + 1, slot, is_batched=True) for slot in (0, 1)})
    for slots in ([0], [1]):
        failures = made.apply(logits_of(1), np.array(slots)).failures
        assert "in place and return None" in failures[slots[0]].message


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_the_model_spoilt_is_told_apart_from_one_the_function_spoilt(post_processors, bad):
    def spoil(request_id, logits, token_ids):
        return logits.fill_(bad)

    logits = logits_of(3)
    logits[2] = bad
    processed = post_processors({0: processor(spoil), 1: processor(add_one_in_place), 2: processor(spoil)}).apply(
        logits, np.array([0, 1, 2]))
    assert processed.model_finite.tolist() == [True, True, False]


def test_a_slot_forgets_the_function_of_the_sequence_before(post_processors):
    made = post_processors({0: processor(add_one_in_place), 1: processor(add_one_in_place)})
    made.set_up(0, SlotSetup())
    assert len(made) == 1
    assert made.apply(logits_of(1), np.array([0])) is None


def test_a_function_does_not_outlive_what_the_host_holds():
    made, held = LogitsPostProcessors(), processor(add_one_in_place)
    made.set_up(0, SlotSetup(logits_post_processor=held))
    assert len(made) == 1
    del held
    gc.collect()
    assert len(made) == 0


def test_the_token_and_its_log_prob_are_of_the_changed_logits_and_what_is_returned_are_the_models():
    def allow_two_and_three(request_id, logits, token_ids):
        allowed = torch.full_like(logits, -torch.inf)
        allowed[..., 2:4] = logits[..., 2:4]
        return allowed

    held = processor(allow_two_and_three)
    decoder = GptDecoder(SlotState(2, torch.device("cpu")))
    asked = dict(return_log_probs=True, return_generation_logits=True)
    decoder.set_up([(0, SlotSetup(logits_post_processor=held, **asked)), (1, SlotSetup(**asked))])
    logits = logits_of(2)
    sampled = decoder.sample(logits.clone(), rows_of([0, 1]))
    best = int(logits[0, 2:4].argmax())
    assert sampled.tokens.tolist() == [2 + best, int(logits[1].argmax())]
    torch.testing.assert_close(sampled.log_probs, torch.stack([logits[0, 2:4].log_softmax(0)[best],
                                                              logits[1].log_softmax(0).max()]))
    assert torch.equal(sampled.logits, logits) and sampled.logits_slots == [0, 1]
    assert decoder.sample(logits[1:].clone(), rows_of([1])).post_processed is None


def test_a_child_that_is_forked_in_a_function_ends_where_it_leaves_it():
    """A child process that is forked inside a post-processor ends when it returns from or raises in the post-processor.

    It could not complete the step, because the threads that compute the rest do not exist in the child.
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import os, sys
        import numpy as np, torch
        from batch_manager.decoding.logits_post_processors import LogitsPostProcessors
        from batch_manager.handover import LogitsPostProcessor, SlotSetup

        def raises():
            raise ValueError

        def step(is_batched, end):
            def function(ids, logits, token_ids):
                child = os.fork()
                if child == 0:
                    end()
                    return logits
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
                return None if is_batched else logits

            processor = LogitsPostProcessor(1, function, lambda: [[1]], is_batched)
            processors = LogitsPostProcessors()
            processors.set_up(0, SlotSetup(logits_post_processor=processor))
            processors.apply(torch.zeros((1, 4)), np.array([0]))
            print("came back", flush=True)

        for is_batched in (False, True):
            for end in (lambda: None, lambda: sys.exit(5), raises):
                step(is_batched, end)
        """)], capture_output=True, text=True, timeout=60)
    expected = [line for status in (0, 5, 1) for line in (f"child {status}", "came back")]
    assert result.stdout.splitlines() == expected * 2, result.stderr


def test_an_error_of_a_class_of_the_users_that_cannot_be_told_ends_its_request_alone(post_processors):
    class Odd(InvalidRequestError):
        def __str__(self):
            raise RuntimeError

    def function(request_id, logits, token_ids):
        raise Odd("secret")

    processed = post_processors({4: processor(function)}).apply(logits_of(2), np.array([7, 4]))
    assert list(processed.failures) == [4] and processed.failures[4].code is ErrorCode.MODEL_ERROR
    assert "secret" not in processed.failures[4].message

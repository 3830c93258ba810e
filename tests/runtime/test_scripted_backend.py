import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from batch_manager.errors import InternalError
from batch_manager.handover import (
    END_ID,
    BlockClear,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    RowFailure,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.names import ErrorCode
from batch_manager.sampling_config import SamplingConfig
from batch_manager.testing.scripted_backend import ScriptedBackend
from batch_manager.testing.scripted_tokens import expected_samples

GREEDY = SlotSetup()


def updates(entries):
    """Return the BlockTableUpdates that write these block tables, {slot: [block ids]}."""
    rows = [(slot, index, block) for slot, blocks in entries.items() for index, block in enumerate(blocks)]
    return BlockTableUpdates(*np.array(rows, np.int32).reshape(-1, 3).T)


def context(slot, tokens, start=0, last=True, setup=GREEDY):
    return ContextWork(slot, np.array(tokens, np.int32), start, last, setup)


def generation(*pairs):
    slots, lengths = zip(*pairs)
    return GenerationWork(np.array(slots, np.int32), np.array(lengths, np.int32))


def batch(contexts=(), rows=None, tables=None, iteration=0):
    parts = {"block_table_updates": updates(tables)} if tables else {}
    if rows:
        parts["generation"] = generation(*rows)
    return ScheduledBatch(iteration=iteration, context=tuple(contexts), **parts)


def run(backend, *args, **kwargs):
    return backend.start(batch(*args, **kwargs)).finish()


@pytest.mark.parametrize("count", [1, 3, 7, 63])
def test_a_step_whose_drafts_were_accepted_can_run_again_without_them(count):
    backend = ScriptedBackend(num_blocks=16, num_slots=1, max_seq_len=128)
    first, *others = backend.expected([1, 2, 3, 4, 5], count + 2)
    assert run(backend, [context(0, [1, 2, 3, 4, 5])], tables={0: list(range(16))}).tokens.tolist() == [first]
    drafts = np.array(others[:count], np.int32)
    with_drafts = replace(generation((0, 5)), num_drafts=np.array([count], np.int32), draft_tokens=drafts)
    again = ScheduledBatch(iteration=1, generation=with_drafts)
    assert backend.start(again).finish().tokens.tolist() == others
    assert run(backend, rows=[(0, 5)]).tokens.tolist() == others[:1]


@pytest.mark.parametrize("verify", [True, False])
def test_sequences_in_shuffled_blocks_generate_what_the_oracle_says(verify):
    backend = ScriptedBackend(num_blocks=64, tokens_per_block=4, num_slots=2, max_seq_len=64, key=7, verify=verify)
    random = np.random.default_rng(0)
    blocks = random.permutation(64)
    prompts = {slot: random.integers(0, 1000, size).tolist() for slot, size in enumerate([5, 1, 8, 13])}
    tables = {slot: blocks[16 * slot: 16 * slot + 16].tolist() for slot in prompts}

    output = run(backend, [context(slot, prompt) for slot, prompt in prompts.items()], tables=tables)
    texts = {slot: [token] for slot, token in zip(output.slots.tolist(), output.tokens.tolist())}
    for step in range(11):
        order = random.permutation(4)
        rows = [(slot, len(prompts[slot]) + step) for slot in order]
        output = run(backend, rows=rows)
        assert output.slots.tolist() == order.tolist()
        for slot, token in zip(output.slots.tolist(), output.tokens.tolist()):
            texts[slot].append(token)
    assert texts == {slot: backend.expected(prompt, 12) for slot, prompt in prompts.items()}


@pytest.mark.parametrize("verify", [True, False])
def test_chunks_and_a_prefix_computed_by_somebody_else_change_nothing(verify):
    backend = ScriptedBackend(tokens_per_block=4, verify=verify)
    prompt = list(range(10, 21))
    first = run(backend, [context(0, prompt[:4], last=False)], tables={0: [3, 9, 1]})
    assert len(first.slots) == 0
    run(backend, [context(0, prompt[4:8], 4, last=False, setup=None)])
    whole = run(backend, [context(0, prompt[8:], 8, setup=None)])
    shared = run(backend, [context(1, prompt[8:], 8)], tables={1: [3, 9, 5]})
    assert whole.tokens.tolist() == shared.tokens.tolist() == backend.expected(prompt, 1)


def test_a_wrong_block_table_changes_the_text():
    backend = ScriptedBackend(tokens_per_block=4)
    prompt = [1, 2, 3, 4, 5]
    run(backend, [context(0, prompt)], tables={0: [0, 1]})
    run(backend, [context(1, [9, 9, 9, 9, 9])], tables={1: [0, 2]})           # slot 0 still needs block 0
    output = run(backend, rows=[(0, 5)])
    assert output.tokens.tolist() != backend.expected(prompt, 2)[1:]


def test_each_of_several_end_ids_is_recognised():
    prompt, backend = [1, 2, 3], ScriptedBackend(vocab_size=9)
    drawn = backend.expected(prompt, 30)
    ends = {drawn[12], drawn[4]}
    expected = backend.expected(prompt, 30, end_id=tuple(ends))
    assert expected == drawn[:next(i for i, token in enumerate(drawn) if token in ends)]
    for first, other in (ends, reversed(sorted(ends))):
        backend = ScriptedBackend(vocab_size=9, script=lambda history: drawn[4])
        output = run(backend, [context(0, prompt, setup=SlotSetup(end_id=first, more_end_ids=(other, 77)))],
                     tables={0: [0]})
        assert output.finish.tolist() == [END_ID]


def test_the_end_id_is_recognised():
    prompt = [5, 6, 7]
    second = ScriptedBackend.expected_tokens(prompt, 2)[1]
    backend = ScriptedBackend()
    run(backend, [context(0, prompt, setup=SlotSetup(end_id=second))], tables={0: [0]})
    output = run(backend, rows=[(0, 3)])
    assert output.finish.tolist() == [END_ID]
    assert len(backend.expected(prompt, 9, end_id=second)) == 1


def test_a_script_chooses_the_tokens_it_wants_and_leaves_the_others_to_the_hash():
    backend = ScriptedBackend(script=lambda history: 42 if len(history) == 3 else None)
    output = run(backend, [context(0, [1, 2, 3]), context(1, [1, 2])], tables={0: [0], 1: [1]})
    assert output.tokens.tolist() == [42, *backend.expected([1, 2], 1)]


def test_a_script_that_leaves_the_vocabulary_fails_its_row():
    backend = ScriptedBackend(vocab_size=50, script=lambda history: 50 if history[0] == 1 else 49)
    output = run(backend, [context(0, [1]), context(1, [2])], tables={0: [0], 1: [1]})
    assert {slot: failure.code for slot, failure in output.failures.items()} == {0: ErrorCode.INVALID_TOKEN}
    assert output.tokens[1] == 49


def test_a_sampling_sequence_depends_on_its_seed_and_a_greedy_one_does_not():
    backend = ScriptedBackend()
    setups = [SlotSetup(SamplingConfig(random_seed=1)), SlotSetup(SamplingConfig(random_seed=2)),
              SlotSetup(SamplingConfig(top_k=5, random_seed=1)),
              SlotSetup(SamplingConfig(top_p=0.5, random_seed=2**64 - 1))]
    tables = {slot: [slot] for slot in range(4)}
    output = run(backend, [context(slot, [7], setup=setup) for slot, setup in enumerate(setups)], tables=tables)
    assert output.tokens.tolist() == [token for seed in (None, None, 1, 2**64 - 1)
                                      for token in backend.expected([7], 1, random_seed=seed)]
    assert len(set(output.tokens.tolist())) == 3


def test_log_probs_and_logits_come_for_those_who_asked():
    backend = ScriptedBackend(vocab_size=30)
    asked = SlotSetup(return_log_probs=True, return_context_logits=True, return_generation_logits=True)
    output = run(backend, [context(0, [1, 2, 3], setup=asked), context(1, [1, 2, 3])], tables={0: [0], 1: [1]})
    [(token, log_prob)] = expected_samples([1, 2, 3], 1, vocab_size=30)
    assert output.log_probs.tolist() == [log_prob, 0]
    assert list(output.generation_logits) == list(output.context_logits) == [0]
    assert output.generation_logits[0].shape == (1, 30) and output.generation_logits[0].argmax() == token
    assert output.context_logits[0].argmax(1).tolist() == [
        ScriptedBackend.expected_tokens([1, 2, 3][:n], 1, vocab_size=30)[0] for n in (1, 2, 3)]
    assert run(backend, [context(2, [1])], tables={2: [2]}).log_probs is None


def test_under_a_window_a_token_depends_on_what_it_sees_and_on_nothing_else():
    backend = ScriptedBackend(vocab_size=30, tokens_per_block=4, window=5, sink=2)
    prompt, other = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 0, 0, 0, 6, 7, 8, 9, 10]
    assert backend.expected(prompt, 9) == backend.expected(other, 9) != ScriptedBackend.expected_tokens(
        prompt, 9, vocab_size=30)
    assert backend.expected(prompt, 9) != backend.expected([1, 0, *prompt[2:]], 9)

    asked = SlotSetup(return_context_logits=True)
    output = run(backend, [context(0, prompt, setup=asked)], tables={0: [5, 6, 7]})
    assert output.context_logits[0].argmax(1).tolist() == [backend.expected(prompt[:n], 1)[0] for n in range(1, 11)]

    backend.poison_blocks([6])                                    # the query at 12 sees 0, 1 and 8 to 12
    texts = [run(backend, rows=[(0, length)]) for length in (10, 11)]
    assert all(output.failures for output in texts)
    output = run(backend, rows=[(0, 12)], tables={0: [5, -1, 7, 8]})
    assert not output.failures and output.tokens.tolist() == backend.expected(prompt, 4)[3:]


@pytest.mark.parametrize("hook", ["on_step", "on_finish"])
def test_after_a_raise_the_halves_give_what_the_whole_would_have_given(hook):
    prompts = {0: [1, 2, 3], 1: [4, 5], 2: [6]}
    tables = {slot: [slot] for slot in prompts}
    backend = ScriptedBackend()
    run(backend, [context(0, prompts[0]), context(1, prompts[1])], tables=tables)

    def fail(_):
        setattr(backend, hook, None)
        raise MemoryError("once")

    setattr(backend, hook, fail)
    whole = batch([context(2, prompts[2])], [(0, 3), (1, 2)], tables)
    with pytest.raises(MemoryError):
        backend.start(whole).finish()
    outputs = [backend.start(whole.take(part)).finish() for part in ([2], range(2))]
    tokens = {slot: token for output in outputs for slot, token in zip(output.slots.tolist(), output.tokens.tolist())}
    assert tokens == {0: backend.expected(prompts[0], 2)[1], 1: backend.expected(prompts[1], 2)[1],
                      2: backend.expected(prompts[2], 1)[0]}


def test_a_step_that_succeeded_can_run_again():
    prompts = {0: [1, 2, 3], 1: [4, 5]}
    tables = {slot: [slot] for slot in prompts}
    backend = ScriptedBackend()
    run(backend, [context(0, prompts[0])], tables=tables)
    mixed = batch([context(1, prompts[1])], [(0, 3)], tables)
    first, second = (backend.start(mixed).finish() for _ in range(2))
    assert first.tokens.tolist() == second.tokens.tolist()
    assert run(backend, rows=[(0, 4)]).tokens[0] == backend.expected(prompts[0], 3)[2]


def test_a_planted_non_finite_row_poisons_its_blocks_until_they_are_cleared():
    failure = RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")
    backend = ScriptedBackend(on_step=lambda step: {0: failure} if step.iteration == 0 else None)
    output = run(backend, [context(0, [1, 2]), context(1, [3])], tables={0: [4], 1: [5]})
    assert output.failures == {0: failure}
    assert list(run(backend, [context(2, [9])], tables={2: [4]}, iteration=1).failures) == [2]
    clear = ScheduledBatch(1, operations=(BlockClear(4, 2), BlockClear(4)))
    backend.start(replace(clear, operations=clear.operations[:1])).finish()
    output = run(backend, [context(2, [9])], tables={2: [4]}, iteration=1)
    assert list(output.failures) == [2], "its first token is left"
    backend.start(clear).finish()
    assert run(backend, [context(2, [9])], tables={2: [4]}, iteration=1).failures == {}


@pytest.mark.parametrize("wrong, rule", [
    (lambda: batch(rows=[(0, 4)]), "a start exceeds the cached length"),
    (lambda: batch([context(0, [5], 4, setup=None)]), "a start exceeds the cached length"),
    (lambda: batch(rows=[(1, 3)]), "never set up"),
    (lambda: batch(rows=[(0, 3), (0, 3)]), "a slot occurs twice"),
    (lambda: batch([context(1, [1] * 9)], tables={1: [7]}), "exceed the mapped blocks"),
    (lambda: batch([context(1, [1] * 9, last=False)], tables={1: [7, 8]}), "block boundary"),
    (lambda: batch([context(1, [1]), context(2, [2])], tables={1: [7], 2: [7]}), "write to one pool slot"),
    (lambda: batch([context(1, [1000])], tables={1: [7]}), "out of range"),
])
def test_a_batch_that_breaks_a_rule_of_the_handover_is_refused(wrong, rule):
    backend = ScriptedBackend()
    run(backend, [context(0, [1, 2, 3])], tables={0: [0]})
    with pytest.raises(InternalError, match=rule):
        backend.start(wrong())


def test_slots_and_tables_grow_when_larger_ones_arrive():
    backend = ScriptedBackend(num_slots=1, max_seq_len=8, tokens_per_block=8)
    output = run(backend, [context(900, [1, 2])], tables={900: [3]})
    assert output.slots.tolist() == [900] and output.tokens.tolist() == backend.expected([1, 2], 1)


def test_it_is_imported_and_runs_without_torch():
    code = ("import sys; from batch_manager.testing.scripted_backend import ScriptedBackend; "
            "ScriptedBackend(); assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def fast_backend(rows):
    backend = ScriptedBackend(num_blocks=8 * rows, tokens_per_block=64, num_slots=rows, max_seq_len=512, verify=False)
    tables = {slot: list(range(8 * slot, 8 * slot + 8)) for slot in range(rows)}
    run(backend, [context(slot, [slot] * 100) for slot in range(rows)], tables=tables)
    return backend


def test_a_fast_step_of_256_rows_is_cheap():
    backend, slots = fast_backend(256), np.arange(256, dtype=np.int32)
    best = 1.0
    for step in range(300):
        work = ScheduledBatch(iteration=step, generation=GenerationWork(slots, np.full(256, 100 + step, np.int32)))
        begin = time.perf_counter()
        backend.start(work).finish()
        best = min(best, time.perf_counter() - begin)
    print(f"{best * 1e6:.1f} us")
    assert best < 600e-6                                          # 60 us alone; up to ten times that on a busy machine

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_manager.decoding.decoder import GptDecoder
from batch_manager.decoding.history import TokenHistory
from batch_manager.decoding.logits_rows import LogitsRows
from batch_manager.decoding.slots import SlotState
from batch_manager.handover import END_ID, NOT_FINISHED, LogitsPostProcessor, SlotSetup
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels.reference.sample_token import sample_token


def logits_of(rows, vocab=40):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3


def test_greedy_and_sampling_rows_in_one_batch_get_what_the_oracle_says(decoder_with, rows_of):
    configs = [SamplingConfig(), SamplingConfig(temperature=0.0, top_k=9),
               SamplingConfig(top_k=8, random_seed=2**64 - 3), SamplingConfig(top_p=0.7, random_seed=5),
               SamplingConfig(top_k=1, top_p=0.5), SamplingConfig(top_k=30, top_p=0.6)]
    logits = logits_of(6)
    rows = rows_of([3, 0, 5, 1, 4, 2], [10, 20, 30, 40, 50, 60])
    sampled = decoder_with(*map(SlotSetup, configs)).sample(logits.clone(), rows)
    order = [configs[slot] for slot in (3, 0, 5, 1, 4, 2)]
    expected, _, _ = sample_token(
        logits, torch.tensor([s.temperature for s in order]), torch.tensor([s.top_k for s in order]),
        torch.tensor([s.top_p for s in order]),
        torch.tensor([s.random_seed if s.random_seed < 2**63 else s.random_seed - 2**64 for s in order]),
        torch.tensor([10, 20, 30, 40, 50, 60]))
    assert sampled.tokens.tolist() == expected.tolist()
    assert sampled.finite.all() and sampled.log_probs is None and sampled.logits is None


@pytest.mark.parametrize("setup, dtype", [
    (SlotSetup(), torch.bfloat16),
    (SlotSetup(SamplingConfig(top_p=0.7, temperature=0.5), return_log_probs=True, return_context_logits=True),
     torch.bfloat16),
    (SlotSetup(return_generation_logits=True), torch.float32),
    (SlotSetup(SamplingConfig(presence_penalty=0.5)).continuing([3]), torch.float32),
    (SlotSetup(embedding_bias=np.ones(40, np.float32)), torch.float32),
    (SlotSetup(logits_post_processor=LogitsPostProcessor(5, lambda *given: given[1], lambda: [[1, 2]], False)),
     torch.float32),
])
def test_logits_are_sampled_in_the_models_dtype_unless_something_else_looks_at_them(
        decoder_with, rows_of, setup, dtype):
    """On a GPU, tokens are sampled from logits in the model's dtype if no stage and no response needs them in float32.

    A CPU always samples from float32 logits.
    """
    logits, given, results = logits_of(2).bfloat16(), [], []
    for reads_any_dtype in (False, True):
        decoder = decoder_with(SlotSetup(), setup)
        sample = decoder._sample_token
        decoder._samples_any_dtype = reads_any_dtype
        decoder._sample_token = lambda logits, sample=sample, **more: given.append(logits.dtype) or sample(
            logits.float(), **more)
        results.append(decoder.sample(logits.clone(), rows_of([0, 1], [1, 1])))
    assert given == [torch.float32, dtype]
    assert torch.equal(results[0].tokens, results[1].tokens)


def test_log_probs_are_filled_for_those_who_asked(decoder_with, rows_of):
    logits = logits_of(2)
    decoder = decoder_with(SlotSetup(SamplingConfig(temperature=0.5), return_log_probs=True), SlotSetup())
    sampled = decoder.sample(logits.clone(), rows_of([1, 0], [3, 3]))
    best = (logits[1] / 0.5).log_softmax(-1).max()
    torch.testing.assert_close(sampled.log_probs, torch.stack([torch.tensor(0.0), best]))
    everyone = decoder.sample(logits[1:].clone(), rows_of([0], [3]))
    torch.testing.assert_close(everyone.log_probs, best[None])


def test_a_temperature_of_zero_reports_the_log_prob_of_temperature_one(decoder_with, rows_of):
    logits = logits_of(1)
    setup = SlotSetup(SamplingConfig(temperature=0.0), return_log_probs=True)
    sampled = decoder_with(setup).sample(logits.clone(), rows_of([0], [1]))
    torch.testing.assert_close(sampled.log_probs, logits.log_softmax(-1).amax(1))


def test_the_end_id_finishes_a_sequence_and_minus_one_never_does(decoder_with, rows_of):
    logits = torch.zeros(3, 10)
    logits[:, 4] = 1
    decoder = decoder_with(SlotSetup(end_id=4), SlotSetup(end_id=5), SlotSetup())
    sampled = decoder.sample(logits, rows_of([0, 1, 2], [1] * 3))
    assert sampled.finish.tolist() == [END_ID, NOT_FINISHED, NOT_FINISHED]
    assert sampled.finish.dtype == torch.uint8


@pytest.mark.parametrize("largest", [True, False])
def test_each_of_several_end_ids_finishes_a_sequence_and_no_other_one(decoder_with, rows_of, largest):
    ends = (4, 7, 1, 9, 0, 8, 2, 3)
    decoder = decoder_with(SlotSetup(end_id=4, more_end_ids=ends[1:]), SlotSetup(end_id=5),
                           SlotSetup(end_id=5, more_end_ids=(6,)))
    rows = rows_of([0, 1, 2], [1] * 3)

    def finish(token):
        tokens = torch.full((3,), token)
        logits = torch.nn.functional.one_hot(tokens, 10).float()
        sampled = decoder.sample_largest(tokens, logits.amax(1), rows) if largest else decoder.sample(logits, rows)
        return [reason == END_ID for reason in sampled.finish.tolist()]

    for token in range(10):
        assert finish(token) == [token in ends, token == 5, token in (5, 6)]
    decoder.set_up([(0, SlotSetup(end_id=5)), (1, SlotSetup(end_id=9, more_end_ids=(7,)))])
    assert finish(7) == [False, True, False], "what the sequences before had is gone"
    decoder.set_up([(70, SlotSetup(end_id=5, more_end_ids=(7,)))])
    assert finish(7) == [False, True, False], "more slots change nothing"


def test_logits_are_returned_for_those_who_asked(decoder_with, rows_of):
    logits = logits_of(3)
    sampled = decoder_with(SlotSetup(), SlotSetup(return_generation_logits=True), SlotSetup()).sample(
        logits.clone(), rows_of([2, 1, 0], [1] * 3))
    assert sampled.logits_slots == [1] and torch.equal(sampled.logits, logits[1:2])


@pytest.mark.parametrize("setup", [SlotSetup(), SlotSetup(SamplingConfig(top_p=0.9)),
                                   SlotSetup(SamplingConfig(top_k=3), return_log_probs=True)])
def test_a_row_that_is_not_finite_is_flagged_and_disturbs_nobody(decoder_with, rows_of, setup):
    logits = logits_of(3)
    decoder = decoder_with(setup, setup, setup)
    clean = decoder.sample(logits.clone(), rows_of([0, 1, 2], [1] * 3))
    logits[1, 7] = torch.nan
    broken = decoder.sample(logits, rows_of([0, 1, 2], [1] * 3))
    assert broken.finite.tolist() == [True, False, True]
    assert broken.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()


def test_a_step_is_fed_the_same_tokens_when_it_runs_again(decoder_with, rows_of):
    state_of = decoder_with(SlotSetup(), SlotSetup())
    rows = rows_of([1, 0], [4, 9])
    first = state_of.sample(torch.eye(10)[[5, 6]], rows)
    state_of.keep(first)
    for _ in range(2):
        fed = state_of.state.last_tokens.at(rows.device_slots, rows.device_positions)
        assert fed.tolist() == [5, 6]
        following = rows_of([1, 0], [5, 10])
        state_of.keep(state_of.sample(torch.eye(10)[[7, 8]], following))
    assert state_of.state.last_tokens.at(following.device_slots, following.device_positions).tolist() == [7, 8]


def test_slots_grow_by_doubling_and_keep_what_they_hold(decoder_with, rows_of):
    decoder = decoder_with(SlotSetup(end_id=3), SlotSetup(end_id=4))
    rows = rows_of([0, 1], [1, 1])
    decoder.keep(decoder.sample(torch.eye(10)[[3, 4]], rows))
    decoder.set_up([(2, SlotSetup(end_id=5))])
    assert decoder.state.capacity == 4
    of = LogitsRows(rows_of([0, 1, 2], [0] * 3), decoder.state, decoder.history)
    assert of.column("end_id").tolist() == [3, 4, 5]
    assert decoder.state.last_tokens.at(rows.device_slots, rows.device_positions).tolist() == [3, 4]


class BanOneToken:
    """A user's stage without a base class. It bans token 0 in slots with an end id."""

    reads = ()

    def __init__(self):
        self.calls = 0

    def is_active(self, setup):
        return setup.end_id >= 0

    def needs_history(self, setup):
        return False

    def set_up(self, slot, setup):
        pass

    def apply(self, logits, rows, active):
        self.calls += 1
        logits[torch.from_numpy(active), 0] = -torch.inf


def test_a_stage_changes_the_rows_it_is_for_and_is_skipped_when_nobody_needs_it(rows_of):
    stage = BanOneToken()
    decoder = GptDecoder(SlotState(2, torch.device("cpu")), [stage])
    decoder.set_up([(0, SlotSetup()), (1, SlotSetup(end_id=9))])
    logits = torch.tensor([[5.0, 4.0, 3.0]] * 2)
    assert decoder.sample(logits.clone(), rows_of([0, 1], [1, 1])).tokens.tolist() == [0, 1]
    assert decoder.sample(logits[:1].clone(), rows_of([0], [1])).tokens.tolist() == [0]
    assert stage.calls == 1


def test_what_is_set_up_reaches_a_device_of_its_own_in_one_copy_however_many_columns_and_slots(rows_of):
    """All columns of all slots that were set up are copied to the device in one transfer.

    The test takes the code path of a GPU, with tensors on the CPU.
    """
    sent = []

    def send(arrays):
        sent.append([array.shape for array in arrays])
        return [torch.from_numpy(array.copy()) for array in arrays]

    state = SlotState(4, torch.device("cpu"), send)
    state.add_columns(["min_p", "random_seed", "repetition_penalty"])
    state.add_columns(["own"], neutral=7)
    planes = [state.locate(name)[0] for name in ("min_p", "random_seed")]
    for plane in planes:
        plane.tensor = plane.tensor.clone()
    history, state.device = TokenHistory(state), SimpleNamespace(type="cuda")
    configs = [SamplingConfig(min_p=0.25 * slot, random_seed=2**64 - 1 - slot) for slot in range(3)]
    for slot, config in enumerate(configs):
        state.set_up(slot, SlotSetup(config, end_id=slot))
    state.put(1, own=8)
    rows = LogitsRows(rows_of([2, 0, 1], [1] * 3), state, history)
    assert rows.column("end_id").tolist() == [0, 0, 0]
    state.upload()
    state.upload()
    assert sent == [[(3,), (len(planes[0].host), 3), (1, 3)]] and len(planes[0].host) == 10
    rows = LogitsRows(rows_of([2, 0, 1], [1] * 3), state, history)
    assert rows.column("end_id").tolist() == [2, 0, 1] and rows.column("own").tolist() == [7, 7, 8]
    assert rows.column("min_p").tolist() == [0.5, 0.0, 0.25] and rows.column("random_seed").tolist() == [-3, -1, -2]
    assert rows.column("repetition_penalty").tolist() == [1.0] * 3
    rows.replace("min_p", torch.tensor([0.125] * 3))
    assert rows.column("min_p").tolist() == [0.125] * 3 and rows.column_as_set_up("min_p").tolist() == [0.5, 0.0, 0.25]

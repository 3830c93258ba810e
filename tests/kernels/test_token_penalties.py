import pytest
import torch


@pytest.fixture
def case(random, integers):
    """case(vocabulary, lengths, repetition, presence, frequency, ids, ignored) -> the arguments of token_penalties

    Sequences of these lengths have random ids below `ids` (None: below `vocabulary`). `ignored` has each row's number
    of ignored prompt tokens.
    """

    def make(vocabulary, lengths, repetition, presence, frequency, ids=None, ignored=None):
        rows, capacity = len(lengths), max(lengths) + 3
        generator = torch.Generator().manual_seed(3)
        history = torch.randint(0, ids or vocabulary, (rows + 2, capacity), generator=generator, dtype=torch.int32)
        history = history.to(integers([0]).device)
        history_row = integers(list(range(rows + 1, 1, -1)), torch.int64)
        for row, length in zip(history_row.tolist(), lengths):
            history[row, length:] = -7                     # these entries are not read
        penalties = (integers(values, torch.float32) for values in (repetition, presence, frequency))
        return 3 * random(rows, vocabulary), history, history_row, integers(lengths, torch.int64), *penalties, integers(
            ignored or [0] * rows)

    return make


NEUTRAL = [1.0], [0.0], [0.0]


@pytest.mark.parametrize("vocabulary, ids", [(7, None), (300, 20), (2048, None), (5000, 40), (5000, None)])
def test_mixed_rows_equal_the_oracle(assert_equals_oracle, case, vocabulary, ids):
    assert_equals_oracle(
        "token_penalties",
        *case(vocabulary, [1, 600, 511, 512, 513, 40, 90], [1.0, 1.3, 0.5, 1.0, 1.0, 1.2, 1.0],
              [0.0, 0.0, 0.0, 0.7, 0.0, -0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.25, 0.125, -0.5], ids),
        reduction=4, dtype=torch.float32)


@pytest.mark.parametrize("vocabulary, ids", [(300, 20), (5000, 40), (40, 90)])
def test_leading_tokens_that_are_ignored_count_for_repetition_alone(assert_equals_oracle, case, vocabulary, ids):
    assert_equals_oracle(
        "token_penalties",
        *case(vocabulary, [1, 600, 511, 512, 700, 40, 90], [1.0, 1.3, 0.5, 1.0, 1.0, 1.2, 1.0],
              [0.5, 0.2, 0.0, 0.7, 0.0, -0.5, 0.0], [0.0, 0.1, 0.3, 0.0, 0.25, 0.125, -0.5], ids,
              ignored=[1, 590, 500, 511, 513, 40, 0]),
        reduction=4, dtype=torch.float32)


def test_the_oracle_of_ignored_tokens_by_hand(run_oracle, run_twin, integers):
    for run in (run_oracle, run_twin):
        logits = integers([[2.0, 2.0, 2.0, 2.0]], torch.float32)
        run("token_penalties", logits, integers([[0, 1, 1, 2, 2]]), integers([0], torch.int64),
            integers([5], torch.int64), *(integers([value], torch.float32) for value in (2.0, 0.25, 0.5)),
            integers([2]))
        assert logits.tolist() == [[1.0, 1 - 0.25 - 0.5, 1 - 0.25 - 1.0, 2.0]]


def test_a_row_without_penalties_does_not_look_at_its_history(run_kernel, run_twin, run_oracle, case):
    for run in (run_kernel, run_twin, run_oracle):
        logits, history, history_row, length, *penalties = case(100, [5], *NEUTRAL)
        history_row[0], length[0] = 2**40, 2**40
        before = logits.clone()
        run("token_penalties", logits, history, history_row, length, *penalties)
        assert torch.equal(logits, before)


def test_ids_that_have_no_logit_are_passed_over(run_kernel, run_oracle, case):
    logits, history, *rest = case(50, [20, 20], [1.5, 2.0], [0.1, 0.0], [0.0, 0.2], ids=90)
    assert (history[:, :20] >= 50).any()
    expected = logits.clone()
    run_oracle("token_penalties", expected, history, *rest)
    wide = torch.full((2, 100), torch.nan, device=logits.device)
    wide[:, :50] = logits
    run_kernel("token_penalties", wide[:, :50], history, *rest)
    torch.testing.assert_close(wide[:, :50], expected)
    assert wide[:, 50:].isnan().all()


def test_what_was_finite_stays_finite_and_what_was_not_stays_as_it_is(run_kernel, run_twin, run_oracle, integers):
    largest = torch.finfo(torch.float32).max
    for run in (run_kernel, run_twin, run_oracle):
        logits = torch.tensor([[3.0, -3.0, 0.0, torch.inf, -torch.inf, torch.nan]] * 3, device=integers([0]).device)
        history = integers([[0, 1, 2, 3, 4, 5]])
        run("token_penalties", logits, history, integers([0] * 3, torch.int64), integers([6] * 3, torch.int64),
            integers([1e-38, 1e38, 1.0], torch.float32), integers([0.0, largest, -largest], torch.float32),
            integers([0.0, largest, -largest], torch.float32), integers([0] * 3))
        assert logits[:, :3].isfinite().all()
        assert logits[:, 3].tolist() == [torch.inf] * 3 and logits[:, 4].tolist() == [-torch.inf] * 3
        assert logits[:, 5].isnan().all()
        assert logits[2, 0] == largest and logits[1, 0] == -largest

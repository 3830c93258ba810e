import pytest
import torch


@pytest.fixture
def assert_same_bans(run_kernel, run_twin, run_oracle, random, integers):
    """assert_same_bans(histories, sizes): runs kernel, CPU form and oracle with an n-gram size for each row.

    The results must be equal. Returns the banned ids of each row.
    """

    def check(histories, sizes, vocabulary=50):
        rows, capacity = len(histories), max(map(len, histories)) + 2
        history = integers([[*tokens, *[3] * (capacity - len(tokens))] for tokens in reversed(histories)])
        rest = (history, integers(list(range(rows))[::-1], torch.int64),
                integers([len(tokens) for tokens in histories], torch.int64), integers(sizes))
        logits = random(rows, vocabulary)
        expected = logits.clone()
        run_oracle("ban_ngrams", expected, *rest)
        of_twin = logits.clone()
        run_kernel("ban_ngrams", logits, *rest)
        run_twin("ban_ngrams", of_twin, *rest)
        assert torch.equal(logits, expected) and torch.equal(of_twin, expected)
        return [row.isneginf().nonzero()[:, 0].tolist() for row in logits]

    return check


def test_known_bans(assert_same_bans):
    tokens = [1, 2, 3, 1, 2, 4, 1, 2]
    assert assert_same_bans([tokens] * 5, [0, 1, 2, 3, 4]) == [[], [1, 2, 3, 4], [3, 4], [3, 4], []]
    assert assert_same_bans([[5], [5], [5, 5], [5, 5]], [1, 2, 2, 3]) == [[5], [], [5], []]


def test_sizes_beyond_the_sequence_ban_nothing(assert_same_bans):
    assert assert_same_bans([[1, 1, 1]] * 4, [3, 4, 5, 2**31 - 1]) == [[1], [], [], []]


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_random_histories_equal_the_oracle(assert_same_bans, length):
    generator = torch.Generator().manual_seed(length)
    histories = [torch.randint(0, 4, (length,), generator=generator).tolist() for _ in range(6)]
    bans = assert_same_bans(histories, [1, 2, 3, 4, 6, 0])
    assert bans[-1] == [] and (length < 9 or bans[1] == [0, 1, 2, 3])


def test_ids_that_have_no_logit_are_passed_over(assert_same_bans):
    assert assert_same_bans([[60, 7, 60, 8, 60], [7, 60, 7]], [2, 2]) == [[7, 8], []]


def test_a_row_of_size_0_does_not_look_at_its_history(run_kernel, run_twin, run_oracle, random, integers):
    for run in (run_kernel, run_twin, run_oracle):
        logits = random(1, 20)
        before = logits.clone()
        run("ban_ngrams", logits, integers([[1, 1, 1]]), integers([2**40], torch.int64),
            integers([2**40], torch.int64), integers([0]))
        assert torch.equal(logits, before)


def test_a_banned_logit_that_is_not_finite_becomes_nan(run_kernel, run_twin, run_oracle, integers):
    for run in (run_kernel, run_twin, run_oracle):
        logits = torch.zeros(1, 20)
        logits[0, 4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        run("ban_ngrams", logits, integers([[4, 5, 6]]), integers([0], torch.int64), integers([3], torch.int64),
            integers([1]))
        assert logits.isnan().nonzero().tolist() == [[0, 4], [0, 5]]
        assert logits.isneginf().nonzero().tolist() == [[0, 6]]

import pytest
import torch


@pytest.fixture
def packed(integers):
    """packed(lists) -> the arguments lists [L], list_start [R], count [R] and largest count of `ban_words`.

    `lists` has a list of words for each row. Unrelated numbers surround each packed list.
    """

    def make(lists):
        numbers, starts = [-9, -9], []
        for words in lists:
            starts.append(len(numbers))
            ends = [sum(map(len, words[: word + 1])) for word in range(len(words))]
            numbers += [*ends, *(token for word in words for token in word), -9]
        counts = [len(words) for words in lists]
        return integers(numbers), integers(starts), integers(counts), max(counts)

    return make


@pytest.fixture
def assert_same_bans(run_kernel, run_twin, run_oracle, random, integers, packed):
    """assert_same_bans(histories, lists): runs kernel, CPU form and oracle with a list of words for each row.

    The results must be equal. Returns the banned ids of each row.
    """

    def check(histories, lists, vocabulary=50):
        rows, capacity = len(histories), max(map(len, histories)) + 2
        history = integers([[*tokens, *[3] * (capacity - len(tokens))] for tokens in reversed(histories)])
        rest = (history, integers(list(range(rows))[::-1], torch.int64),
                integers([len(tokens) for tokens in histories], torch.int64), *packed(lists))
        logits = random(rows, vocabulary)
        expected = logits.clone()
        run_oracle("ban_words", expected, *rest)
        of_twin = logits.clone()
        run_kernel("ban_words", logits, *rest)
        run_twin("ban_words", of_twin, *rest)
        assert torch.equal(logits, expected) and torch.equal(of_twin, expected)
        return [row.isneginf().nonzero()[:, 0].tolist() for row in logits]

    return check


def test_known_bans(assert_same_bans):
    words = [[9], [1, 2], [1, 3], [4, 1, 5], [3, 4, 1, 6], [8, 1, 7], [0]]
    assert assert_same_bans(
        [[4, 1], [3, 4, 1], [1], [2], [1, 4]], [words, words, words, words, []]
    ) == [[0, 2, 3, 5, 9], [0, 2, 3, 5, 6, 9], [0, 2, 3, 9], [0, 9], []]


def test_a_word_longer_than_the_sequence_is_not_begun(assert_same_bans):
    assert assert_same_bans([[5], [5, 5]], [[[5, 5, 6]], [[5, 5, 6]]]) == [[], [6]]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_random_lists_equal_the_oracle(assert_same_bans, count):
    generator = torch.Generator().manual_seed(count)

    def tokens(least, most):
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(0, 3, (length,), generator=generator).tolist()

    bans = assert_same_bans([tokens(1, 12) for _ in range(4)],
                            [[tokens(1, 5) for _ in range(size)] for size in (count, 0, 3, count)], vocabulary=5)
    assert bans[1] == [] and bans[0]


def test_without_longer_words_the_history_is_not_looked_at(run_kernel, run_twin, run_oracle, random, integers, packed):
    for run in (run_kernel, run_twin, run_oracle):
        logits = random(2, 20)
        run("ban_words", logits, integers([[0] * 64])[:0], integers([2**40] * 2, torch.int64),
            integers([9, 9], torch.int64), *packed([[[4], [5]], []]))
        assert logits.isneginf().nonzero().tolist() == [[0, 4], [0, 5]]


def test_a_banned_logit_that_is_not_finite_becomes_nan(run_kernel, run_twin, run_oracle, integers, packed):
    for run in (run_kernel, run_twin, run_oracle):
        logits = torch.zeros(1, 20)
        logits[0, 4:7] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        run("ban_words", logits, integers([[4, 5, 6]]), integers([0], torch.int64), integers([3], torch.int64),
            *packed([[[4], [5], [6]]]))
        assert logits.isnan().nonzero().tolist() == [[0, 4], [0, 5]]
        assert logits.isneginf().nonzero().tolist() == [[0, 6]]

import pytest
import torch


@pytest.fixture
def ends(run_kernel, run_twin, run_oracle, integers):
    """ends(histories, tokens, lists) -> for each row, whether its next token ends a stop word of its list.

    Kernel, CPU form and oracle must agree.
    """

    def run(histories, tokens, lists):
        rows, capacity = len(histories), max(map(len, histories)) + 2
        history = integers([[*row, *[3] * (capacity - len(row))] for row in reversed(histories)])
        numbers, starts = [-9], []
        for words in lists:
            starts.append(len(numbers))
            word_ends = [sum(map(len, words[: word + 1])) for word in range(len(words))]
            numbers += [*word_ends, *(token for word in words for token in word)]
        arguments = (integers(tokens), history, integers(list(range(rows))[::-1], torch.int64),
                     integers([len(row) for row in histories], torch.int64), integers(numbers), integers(starts),
                     integers([len(words) for words in lists]))
        expected = run_oracle("match_stop_words", *arguments)
        got = run_kernel("match_stop_words", *arguments)
        assert torch.equal(run_twin("match_stop_words", *arguments), expected)
        assert got.dtype == expected.dtype == torch.bool and torch.equal(got, expected)
        return got.tolist()

    return run


def test_known_ends(ends):
    words = [[5], [1, 2], [1, 2, 3]]
    assert ends([[1], [1], [1, 2], [2, 1], [0, 2], [9]], [5, 2, 3, 2, 3, 1], [words] * 6) == [
        True, True, True, True, False, False]
    assert ends([[1, 2]] * 3, [3] * 3, [[], words, [[9, 1, 2, 3]]]) == [False, True, False]


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_random_lists_equal_the_oracle(ends, count):
    generator = torch.Generator().manual_seed(count)

    def tokens(least, most):
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        return torch.randint(0, 3, (length,), generator=generator).tolist()

    found = ends([tokens(1, 12) for _ in range(8)], tokens(8, 8),
                 [[tokens(2, 4) for _ in range(count if row % 3 else 0)] for row in range(8)])
    assert not any(found[::3])
    assert count < 64 or any(found)


def test_no_rows(run_kernel, integers):
    nothing = integers([])
    assert run_kernel("match_stop_words", nothing, integers([[0]]), nothing.long(), nothing.long(), integers([0]),
                      nothing, nothing).tolist() == []

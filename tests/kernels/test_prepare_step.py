import pytest
import torch

SLOTS, COLUMNS, VOCABULARY = 7, 4, 50


@pytest.fixture
def arguments(random, integers):
    """arguments(num_slots, num_fed, num_changes) -> random positional arguments of prepare_step up to the input tokens

    num_slots     number of generating rows
    num_fed       number of context tokens
    num_changes   number of changed entries of the block tables
    """

    def make(num_slots, num_fed, num_changes):
        draw = torch.Generator().manual_seed(num_slots + 10 * num_fed)

        def numbers(most, *shape):
            return torch.randint(most, shape, generator=draw).tolist()

        return (integers(numbers(1000, 9, 11)), integers(torch.randperm(99, generator=draw)[:num_changes].tolist(),
                                                         torch.int64),
                integers(numbers(1000, num_changes)), integers(numbers(VOCABULARY, SLOTS, COLUMNS), torch.int64),
                integers(numbers(SLOTS, num_slots), torch.int64), integers(numbers(100, num_slots), torch.int64),
                integers(numbers(VOCABULARY, num_fed), torch.int64))

    return make


@pytest.mark.parametrize("num_slots, num_fed, num_changes, num_cleared, hidden_size", [
    (1, 0, 33, None, 32), (5, 0, 0, 5, 1500), (3, 6, 99, 4, 48), (0, 4, 3, 9, 64), (2, 1, 7, 8, 1)])
def test_rows_tables_and_memory_equal_the_oracle(
        assert_equals_oracle, arguments, random, integers, dtype, num_slots, num_fed, num_changes, num_cleared,
        hidden_size):
    embedding = random(VOCABULARY, hidden_size + 3, dtype=dtype)[:, :hidden_size]       # rows with a stride
    cleared = None if num_cleared is None else integers([[3] * 11] * num_cleared)
    given = arguments(num_slots, num_fed, num_changes)
    rows = assert_equals_oracle("prepare_step", *given, embedding=embedding, cleared=cleared, roundings=0, reduction=0,
                                dtype=dtype)
    assert rows.shape == (num_slots + num_fed, hidden_size)


@pytest.mark.parametrize("num_slots, num_fed", [(3, 0), (2, 5), (0, 1)])
def test_without_a_table_the_tokens_are_wanted(run_kernel, run_oracle, arguments, integers, num_slots, num_fed):
    given = arguments(num_slots, num_fed, 40)
    copies = [tensor.clone() for tensor in given]
    cleared, out = integers([[1] * 8] * 2), integers([-1] * (num_slots + num_fed), torch.int64)
    assert run_kernel("prepare_step", *given, cleared=cleared, out=out) is not None
    assert torch.equal(out, run_oracle("prepare_step", *copies))
    assert torch.equal(given[0], copies[0]) and not cleared.any()


def test_positions_may_be_longer_than_the_rows_that_generate(run_kernel, arguments, integers):
    table, entries, blocks, last_tokens, slots, positions, fed = arguments(2, 3, 5)
    longer = integers([*positions.tolist(), 70, 71, 72], torch.int64)
    tokens = run_kernel("prepare_step", table, entries, blocks, last_tokens, slots, longer, fed)
    newest = [last_tokens[slot, position % COLUMNS].item() for slot, position in zip(slots, positions)]
    assert tokens.tolist() == [*newest, *fed.tolist()]

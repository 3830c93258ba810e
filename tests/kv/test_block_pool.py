"""The pool hands out free blocks in the right order, and refuses wrong releases."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batch_manager.errors import InternalError
from batch_manager.kv.block_pool import BlockPool, OutOfBlocksError


def test_a_fresh_pool_hands_out_consecutive_blocks():
    pool = BlockPool(8)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(2) == [3, 4]


def test_blocks_given_back_together_are_handed_out_together_after_all_others():
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(3)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.take(6) == [5, *second, *first]


def test_more_than_there_is_takes_nothing():
    pool = BlockPool(4)
    pool.take(3)
    with pytest.raises(OutOfBlocksError, match="2 free KV cache blocks are needed, and the pool has 1"):
        pool.take(2)
    assert (len(pool.free), pool.num_live) == (1, 3)


def test_taking_none_is_possible_on_an_empty_pool():
    pool = BlockPool(1)
    pool.take(1)
    assert pool.take(0) == []


@pytest.mark.parametrize("twice", [[0, 0], [0, 3], [3]])
def test_a_second_give_back_is_found_and_changes_nothing(twice):
    pool = BlockPool(4)
    pool.take(2)
    order = pool.free_order()
    with pytest.raises(InternalError, match="one has no owner or occurs twice"):
        pool.give_back(twice)
    assert (pool.free_order(), pool.num_live) == (order, 2)


def test_out_of_blocks_is_a_bug_of_ours_unless_the_loop_knows_better():
    assert issubclass(OutOfBlocksError, InternalError)


class PoolAgainstAList(RuleBasedStateMachine):
    """Runs operations on the pool and on a model, which has a list of the free blocks in order and the taken blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.free = list(range(12))
        self.taken: list[list[int]] = []

    @rule(count=st.integers(0, 14))
    def take(self, count):
        if count > len(self.free):
            with pytest.raises(OutOfBlocksError):
                self.pool.take(count)
            return
        assert self.pool.take(count) == self.free[:count]
        self.taken.append(self.free[:count])
        del self.free[:count]

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data):
        blocks = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.pool.give_back(blocks)
        self.free += blocks

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_back_a_free_block(self, data):
        with pytest.raises(InternalError):
            self.pool.give_back([data.draw(st.sampled_from(self.free))])

    @invariant()
    def the_books_agree(self):
        assert list(self.pool.faults()) == []
        assert self.pool.free_order() == self.free
        assert len(self.pool.free) + self.pool.num_live == 12


TestPoolAgainstAList = PoolAgainstAList.TestCase
TestPoolAgainstAList.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

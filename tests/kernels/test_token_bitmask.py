import pytest
import torch


@pytest.fixture
def bits(random):
    """bits(rows, words) -> a tensor [rows, words] of random int32 numbers; each bit is set with probability 1/2"""

    def make(rows, words):
        return (random(rows, words, 32) > 0).long().mul(2 ** torch.arange(32, device=random(1).device)).sum(-1).int()

    return make


@pytest.mark.parametrize("vocabulary, spare_words", [(1, 0), (31, 0), (32, 1), (33, 0), (1000, 2), (2500, 0)])
def test_exactly_the_tokens_without_a_bit_are_forbidden(run_kernel, run_oracle, random, bits, dtype, vocabulary,
                                                        spare_words):
    rows = 3
    bitmask, logits = bits(rows, -(-vocabulary // 32) + spare_words), random(rows, vocabulary).to(dtype)
    by_kernel, by_oracle = logits.clone(), logits.clone()
    run_kernel("token_bitmask", by_kernel, bitmask)
    run_oracle("token_bitmask", by_oracle, bitmask)
    assert torch.equal(by_kernel, by_oracle)
    for row in range(rows):
        for token in range(vocabulary):
            allowed = int(bitmask[row, token // 32]) >> token % 32 & 1
            assert by_kernel[row, token] == (logits[row, token] if allowed else -torch.inf)


def test_rows_may_be_part_of_longer_ones(run_kernel, random, integers):
    logits, bitmask = random(2, 200), integers([[0] * 9, [-1] * 9])[:, 1:7]
    before = logits.clone()
    run_kernel("token_bitmask", logits[:, :150], bitmask)
    assert (logits[0, :150] == -torch.inf).all() and torch.equal(logits[:, 150:], before[:, 150:])
    assert torch.equal(logits[1], before[1])


def test_what_is_allowed_keeps_its_value_whatever_it_is(run_kernel, integers):
    logits = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]], device=integers([0]).device)
    run_kernel("token_bitmask", logits, integers([[0b0111]]))
    assert logits[0, 0].isnan() and logits[0, 1:].tolist() == [torch.inf, -torch.inf, -torch.inf]

import pytest
import torch

# Published with the algorithm: (key, counter, words).
KNOWN_ANSWERS = [
    ("00000000 00000000", "00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("side", ["run_oracle", "run_kernel"])
def test_known_answers(request, integers, side):
    keys, counters, answers = (
        integers([words(text) for text in column], torch.int64) for column in zip(*KNOWN_ANSWERS)
    )
    assert torch.equal(request.getfixturevalue(side)("philox", keys, counters), answers)


@pytest.mark.parametrize("purpose", [1, 2])
def test_kernel_and_oracle_draw_the_same_bits(run_kernel, run_oracle, integers, purpose):
    seeds = integers([0, 1, -1, 2**32, -(2**63), 2**63 - 1, 0x123456789ABCDEF, 9], torch.int64)
    positions, numbers = integers([0, 1, 2**31 - 1, 7, 4096, 5, 5, 9]), integers([0, 1, 2, 3, 4, 63, 2**20 + 1, 2047])
    kernel = run_kernel("philox", seeds, positions, purpose, numbers, function="uniform")
    assert torch.equal(kernel, run_oracle("philox", seeds, positions, purpose, numbers, function="uniform"))


def test_uniform_numbers_are_uniform_along_each_argument(run_oracle):
    many = torch.arange(20_000)
    same = torch.full_like(many, 3)
    for arguments in ((same, many, 1, same), (many, same, 2, same), (same, same, 1, many), (same, same, 2, many)):
        drawn = run_oracle("philox", *arguments, function="uniform").double()
        counts = torch.histc(drawn, bins=50, min=0, max=1)
        chi_square = ((counts - 400) ** 2 / 400).sum()
        assert drawn.min() > 0 and drawn.max() < 1
        assert chi_square < 100                            # 49 degrees of freedom: the probability of more is 2e-5

import pytest
import torch


@pytest.mark.parametrize("counts", [[1], [3, 8], [16, 17], [2, 0, 40, 0]])
@pytest.mark.parametrize("head_size", [32, 80])
def test_merging(assert_equals_oracle, random, integers, counts, head_size):
    starts = integers([sum(counts[:sequence]) for sequence in range(len(counts) + 1)])
    out = torch.full_like(random(len(counts), 2, head_size), torch.nan)
    assert_equals_oracle(
        "paged_attention_merge", random(sum(counts), 2, head_size), 3 * random(sum(counts), 2), starts, out,
        reduction=max(counts) + 8, dtype=torch.float32,
    )


def test_a_sequence_without_parts_stays_as_it_is_and_other_rows_are_not_looked_at(
    assert_equals_oracle, random, integers
):
    parts, lse = random(6, 2, 32), random(6, 2)
    parts[4:], lse[4:] = torch.nan, torch.nan
    out = random(3, 2, 32)
    before = out.clone()
    got = assert_equals_oracle(
        "paged_attention_merge", parts, lse, integers([0, 2, 2, 4]), out, reduction=8, dtype=torch.float32
    )
    assert torch.equal(got[1], before[1]) and got.isfinite().all()


def test_parts_without_a_key_do_not_count_and_results_go_to_the_given_rows(assert_equals_oracle, random, integers):
    """More than 16 parts come before the first with a key, so that the kernel reads a whole group without a key."""
    parts, lse = random(41, 2, 32), random(41, 2)
    lse[:20], lse[22, 0], lse[40, 1] = -torch.inf, -torch.inf, -torch.inf
    out = torch.full_like(random(5, 2, 32), torch.nan)
    got = assert_equals_oracle(
        "paged_attention_merge", parts, lse, integers([0, 22, 41, 41, 41]), out, integers([3, 1, 0, 0]), reduction=48,
        dtype=torch.float32)
    assert got[:, 0, 0].isnan().tolist() == [True, False, True, False, True]


def test_merging_parts_equals_attention_in_one_piece(run_kernel, random, integers):
    scores, values = 5 * random(12), random(12, 32)
    parts, lse = [], []
    for piece in (slice(0, 5), slice(5, 12)):
        weights = torch.exp2(scores[piece])
        lse.append(weights.sum().log2())
        parts.append((weights / weights.sum()) @ values[piece])
    merged = run_kernel(
        "paged_attention_merge", torch.stack(parts)[:, None], torch.stack(lse)[:, None], integers([0, 2]),
        torch.empty_like(values[None, :1]),
    )
    weights = torch.exp2(scores - scores.max())
    whole = (weights / weights.sum()) @ values
    torch.testing.assert_close(merged[0, 0], whole, rtol=0, atol=40 * torch.finfo(torch.float32).eps * 4)

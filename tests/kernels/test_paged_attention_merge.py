import pytest
import torch


@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("head_size", [32, 80])
def test_merging(assert_equals_oracle, random, parts, head_size):
    assert_equals_oracle(
        "paged_attention_merge", random(3, 2, parts, head_size), 3 * random(3, 2, parts),
        torch.full_like(random(3, 2, head_size), torch.nan), reduction=parts + 8, dtype=torch.float32,
    )


def test_empty_parts_are_never_looked_at(assert_equals_oracle, random):
    parts, lse = random(2, 2, 4, 32), random(2, 2, 4)
    parts[0, :, 1:], lse[0, :, 1:] = torch.nan, -torch.inf
    parts[1], lse[1] = torch.nan, -torch.inf                # a padding row: all its parts are empty
    out = torch.full_like(random(2, 2, 32), torch.nan)
    # The comparison sees the NaN of `parts` as NaN on both sides; the result holds none.
    got = assert_equals_oracle("paged_attention_merge", parts, lse, out, reduction=8, dtype=torch.float32)
    assert torch.equal(got[1], torch.zeros_like(got[1])) and got.isfinite().all()


def test_merging_parts_equals_attention_in_one_piece(run_kernel, random):
    scores, values = 5 * random(1, 1, 12), random(1, 1, 12, 32)
    parts, lse = [], []
    for piece in (slice(0, 5), slice(5, 12)):
        weights = torch.exp2(scores[..., piece])
        lse.append(weights.sum(-1).log2())
        parts.append((weights / weights.sum(-1, keepdim=True)) @ values[0, :, piece])
    merged = run_kernel(
        "paged_attention_merge", torch.stack(parts, 2).reshape(1, 1, 2, 32).contiguous(), torch.stack(lse, 2),
        torch.empty_like(values[:, :, 0]),
    )
    weights = torch.exp2(scores - scores.max())
    whole = (weights / weights.sum()) @ values[0, 0]
    torch.testing.assert_close(merged[0], whole[0], rtol=0, atol=40 * torch.finfo(torch.float32).eps * 4)

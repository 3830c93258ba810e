import pytest
import torch


@pytest.fixture
def check(assert_equals_oracle, random, integers):
    """check(...): asserts that kernel and oracle agree on one packed QKV tensor.

    Returns the packed tensor after the call, a copy of it from before the call, and the kernel's result.
    """

    def run(num_heads=4, num_kv_heads=2, head_size=32, rotary_size=None, slots=(5, 70, -1, 0), dtype=torch.float32,
            positions=(3, 11, 0, 40), in_place=True, has_norms=False):
        num_tokens = len(slots)
        packed = random(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
        before = packed.clone()
        query, key, value = packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        pool = torch.full((6, 3, 2, num_kv_heads, 16, head_size), torch.nan, dtype=dtype, device=packed.device)
        tables = {}
        if rotary_size:
            angle = random(64, rotary_size // 2)
            tables = dict(positions=integers(positions), cos_table=angle.cos(), sin_table=angle.sin())
        if not in_place:
            tables["query_out"] = torch.full_like(before[:, :num_heads], torch.nan)
        if has_norms:
            query[0], key[0] = 0, 0
            tables |= dict(query_norm=random(head_size, dtype=dtype), key_norm=random(head_size, dtype=dtype),
                           epsilon=1e-3, weight_offset=0.5)
        before = packed.clone()
        result = assert_equals_oracle(
            "rope_kv_append", query, key, value, pool[:, 1], integers(slots, torch.int64), **tables,
            reduction=2 + has_norms * head_size, roundings=1 + has_norms, dtype=dtype,
        )
        assert pool[:, 0].isnan().all() and pool[:, 2].isnan().all()     # other layers
        assert int((~pool.isnan()).sum()) == sum(slot >= 0 for slot in slots) * 2 * num_kv_heads * head_size
        assert torch.equal(packed[:, num_heads:], before[:, num_heads:])
        return packed, before, result

    return run


@pytest.mark.parametrize("head_size", [32, 64, 80, 128])
def test_rotating_and_writing(check, dtype, head_size):
    check(head_size=head_size, rotary_size=head_size, dtype=dtype)


@pytest.mark.parametrize("num_heads", [1, 3, 12])
def test_query_groups(check, num_heads):
    check(num_heads=num_heads, num_kv_heads=1, rotary_size=32)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rotary_size", [8, 20])
def test_only_the_leading_entries_rotate(check, rotary_size, in_place):
    packed, before, result = check(rotary_size=rotary_size, in_place=in_place)
    assert torch.equal(result[..., rotary_size:], before[:, :4, rotary_size:])


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_with_learned_positions_does_not_rotate(check, in_place):
    packed, before, result = check(in_place=in_place)
    assert torch.equal(packed, before) and torch.equal(result, before[:, :4])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("head_size, rotary_size", [(32, 32), (80, 80), (80, 20), (64, None)])
def test_norms_of_heads(check, dtype, head_size, rotary_size, in_place):
    packed, before, result = check(head_size=head_size, rotary_size=rotary_size, dtype=dtype, in_place=in_place,
                                   has_norms=True)
    assert (result[0] == 0).all() and not torch.equal(result, before[:, :4])


def test_padding_rows_write_nothing(check):
    check(rotary_size=32, slots=(-1, -1, -1), positions=(0, 0, 0))


def test_a_query_written_elsewhere_leaves_its_source_alone(check):
    packed, before, _ = check(rotary_size=32, in_place=False)
    assert torch.equal(packed, before)


def test_no_rows_is_no_work(check):
    check(rotary_size=32, slots=(), positions=())

"""T8, C8: a request runs in a pool of exactly the blocks it needs, and is refused at once with one block less."""

from dataclasses import dataclass, field

import pytest

from batch_manager import KvCacheConfig, SchedulerPolicy

MAX_UTILIZATION, NO_EVICT = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
BOTH = (MAX_UTILIZATION, NO_EVICT)
REUSE = {"enable_block_reuse": True}


@dataclass(frozen=True)
class Row:
    """A request, and the number of blocks of 8 tokens that its prompt and new tokens need.

    The last new token counts, although it is never stored.
    """

    what: str
    prompt: int
    new: int
    blocks: int
    beams: int = 1
    policies: tuple = BOTH
    kv: dict = field(default_factory=dict)
    backend: dict = field(default_factory=dict)
    engine: dict = field(default_factory=dict)


WINDOW = {"backend": {"window": 16}}
SINKS = {"backend": {"window": 16, "sink": 8}}
ROWS = [
    Row("one block less a token", 4, 3, 1),
    Row("one block", 4, 4, 1),
    Row("one block and a token", 4, 5, 2),
    Row("a prompt of whole blocks", 16, 1, 3),
    Row("four blocks", 20, 12, 4),
    Row("four blocks, in chunks", 20, 12, 4, engine={"enable_chunked_context": True, "max_num_tokens": 8}),
    Row("four blocks, cut to max_seq_len", 20, 500, 8),
    Row("four blocks, reused", 20, 12, 4, kv=REUSE),
    # Beams share the full blocks of their prompt. Every other block belongs to one beam.
    Row("three beams", 20, 12, 2 + 3 * 2, beams=3),
    Row("three beams behind whole blocks", 16, 16, 2 + 3 * 2, beams=3),
    Row("three beams, reused", 20, 12, 2 + 3 * 2, beams=3, kv=REUSE),
    Row("three beams behind whole blocks, reused: the last one is copied", 16, 16, 1 + 3 * 3, beams=3, kv=REUSE),
    # A sliding window of two blocks holds three. A paused request stores its whole sequence when it goes on.
    Row("a window", 10, 40, 3, policies=(NO_EVICT,), **WINDOW),
    Row("a prompt longer than the window", 40, 10, 6, policies=(NO_EVICT,), **WINDOW),
    Row("a window, and it may be paused", 10, 40, 7, policies=(MAX_UTILIZATION,), **WINDOW),
    Row("a window that does not slide", 8, 8, 2, **WINDOW),
    Row("a window and a block of sinks", 10, 40, 4, policies=(NO_EVICT,), **SINKS),
    Row("a window, reused", 10, 40, 3, policies=(NO_EVICT,), kv=REUSE, **WINDOW),
]


@pytest.mark.parametrize("row, policy, beside", [
    pytest.param(row, policy, beside, id=f"{row.what}, {policy.name}, {beside:+}")
    for row in ROWS for policy in row.policies for beside in (-1, 0, 1) if row.blocks + beside])
def test_c8_a_pool_of_just_enough_blocks(make_world, new_request, row, policy, beside):
    pool = row.blocks + beside
    world = make_world(policy=policy, max_beam_width=max(row.beams, 1), kv_cache_config=KvCacheConfig(**row.kv),
                       backend={"max_seq_len": 64, "tokens_per_block": 8, "num_blocks": pool, **row.backend},
                       **row.engine)
    prompt = list(range(1, row.prompt + 1))
    extra = {"beam_width": row.beams} if row.beams > 1 else {}
    world.client.pending = [new_request(1, prompt, row.new, **extra)]
    if beside < 0:
        world.step()
        final = world.client.final(1)
        assert final.code == "TOO_LARGE_FOR_KV_CACHE" and not final.tensors
        assert f"{row.blocks} blocks of 8 tokens" in final.error and f"the pool has {pool};" in final.error
        return
    world.run()
    new = min(row.new, 64 - row.prompt)
    assert world.client.final(1).error == ""
    if row.beams == 1:
        assert world.client.final(1).tokens() == [*prompt, *world.expected(prompt, new)]
    else:
        assert len(world.client.final(1).tokens()) == row.prompt + new


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("pool", [7, 8, 9])
def test_two_that_fit_together_run_together_and_others_one_after_the_other(make_world, new_request, policy, pool):
    together = 0

    def count(batch):
        nonlocal together
        together = max(together, batch.num_sequences)

    world = make_world(policy=policy, backend={"tokens_per_block": 8, "num_blocks": pool, "on_step": count})
    world.client.pending = [new_request(i, [i] * 20, 12) for i in (1, 2)]
    world.run()
    for i in (1, 2):
        assert world.client.final(i).tokens() == [i] * 20 + world.expected([i] * 20, 12)
    if policy is NO_EVICT:
        assert together == (2 if pool >= 8 else 1)

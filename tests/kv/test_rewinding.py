"""What cannot be gone on with is refused, and nothing has changed then."""

import pytest

from batch_manager.errors import InternalError
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager


def test_who_holds_no_blocks_is_not_rewound(make_request):
    kv = KvCacheManager(4, 4, 100)
    with pytest.raises(InternalError, match="is to be rewound and holds no blocks"):
        kv.rewind(make_request(0, 3), 1)
    assert kv.free_blocks == 4


@pytest.mark.parametrize(("options", "prompt_len", "steps", "rewound"), [
    ({}, 3, 2, 5),                                                      # nothing would be left
    ({"enable_block_reuse": True}, 6, 2, 3),                            # others may have the prompt's blocks
    ({"window": 4}, 10, 3, 4),                                          # what it would look at has left the window
])
def test_too_much_is_not_taken_back(make_request, start, options, prompt_len, steps, rewound):
    kv = KvCacheManager(8, 2, 100, **options)
    request = start(kv, make_request(0, prompt_len))
    for _ in range(steps):
        kv.claim([], [request])
    before = kv.block_ids(request), kv.kv_length(request), kv.pool.free_order()
    with pytest.raises(InternalError, match=f"cannot be rewound by {rewound} tokens"):
        kv.rewind(request, rewound)
    assert (kv.block_ids(request), kv.kv_length(request), kv.pool.free_order()) == before
    audit(kv)
    kv.rewind(request, 1)
    audit(kv)


def test_a_last_block_that_beams_share_is_not_written_to_again(make_request, start):
    kv = KvCacheManager(8, 4, 100, max_beam_width=2)
    request = start(kv, make_request(0, 8, beam_width=2))
    kv.claim([], [request])
    with pytest.raises(InternalError, match="cannot be rewound by 2 tokens"):
        kv.rewind(request, 2)
    kv.rewind(request, 1)
    assert kv.kv_length(request) == 8 and kv.used_blocks == 2
    audit(kv)

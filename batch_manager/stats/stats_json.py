"""The JSON form of a statistics record: a flat object with sorted keys. STATISTICS describes each key."""

from functools import partial

import orjson

# {name: value} -> bytes. It is C code throughout, because a record is written in every iteration.
to_json = partial(orjson.dumps, option=orjson.OPT_SORT_KEYS)

"""examples/block_store.py: a second engine finds what a first one has saved in a dictionary of another process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from batch_manager import StoredBlock  # noqa: E402
from examples.block_store import Blocks, SharedStore  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "block_store.py"


def test_the_second_engine_begins_after_what_the_first_has_saved():
    result = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    found = re.findall(r"(\d+) tokens, of which (\d+) came from the store. It has (\d+) blocks now. Output: (.*)",
                       result.stdout)
    assert [row[:3] for row in found] == [("506", "0", "16"), ("506", "480", "16")], result.stdout
    assert found[0][3] == found[1][3]


def test_a_block_that_has_gone_or_is_another_is_not_loaded():
    blocks = Blocks(2)
    chain = [StoredBlock(bytes([number]) * 32, bytes(32), (number,), None) for number in range(4)]
    store, buffers = SharedStore(blocks), [memoryview(bytearray(4)) for _ in range(3)]
    for block in chain[:3]:
        store.save(block, memoryview(bytes(4)))
    assert store.count(chain) == 3 and store.load(chain[:3], buffers) == 0, "the first has made room for the third"
    assert store.count(chain) == 0 and store.load(chain[1:3], buffers[:2]) == 2 and store.figures() == {
        "Shared Blocks": 2}
    assert store.load([chain[1]._replace(token_ids=(7,))], buffers[:1]) == 0
    assert store.load([chain[2]], [memoryview(bytearray(5))]) == 0
    store.refresh()
    assert store.count(chain[1:]) == 2

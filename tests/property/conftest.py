import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import schema_compare  # noqa: E402


@pytest.fixture(scope="session")
def adapter():
    return schema_compare.load_adapter()

"""Fixture `bench`: a Bench, which tries checkpoints in a folder on /dev/shm if it exists, otherwise on disk."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .trial import Bench

IN_MEMORY = Path("/dev/shm")


def make_bench() -> Iterator[Bench]:
    folder = tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
    yield Bench(Path(folder).resolve() / "m")
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def bench():
    yield from make_bench()

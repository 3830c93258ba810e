"""Fixtures: the module differential.py, and its `Laboratory` objects, which are kept until the pytest session ends.

A `Laboratory` runs requests on one checkpoint, in different circumstances, and keeps their outcomes when run alone.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def differential():
    """The module differential.py. Its folder is not a package and is not on sys.path."""
    spec = importlib.util.spec_from_file_location("deterministic_differential", HERE / "differential.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def laboratory(differential, tmp_path_factory):
    """laboratory(family, **options) returns a Laboratory with these options and a checkpoint of the model family.

    It is built once for each set of arguments.
    """
    parent, made = tmp_path_factory.mktemp("checkpoints"), {}

    def get(family, **options):
        key = repr((family, sorted(options.items())))
        if key not in made:
            made[key] = differential.Laboratory(differential.make_checkpoint(family, parent), **options)
        return made[key]

    yield get
    for laboratory in made.values():
        laboratory.close()

"""The list of changes that no test notices is in order, and the campaign that reads it says what it changed."""

from pathlib import Path

import pytest

from tests.campaign.mutants import Mutant, change_of, mutants, mutated, selection_for

from .branches import CORE
from .survivors import SURVIVORS

ROOT = Path(__file__).parents[2]


def test_a_listed_change_has_its_lines_and_a_reason():
    for one in SURVIVORS:
        text = " ".join((ROOT / one.file).read_text().split())
        assert any(Path(one.file).is_relative_to(path) for path in CORE), one
        assert " ".join(one.source.split()) in text and one.source != one.mutant, one
        assert len(one.reason.split()) > 3, one


def test_a_change_is_told_by_its_lines():
    file = "batch_manager/kv/window.py"
    lines = (ROOT / file).read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.strip().startswith("return "))
    lines[place] += " + 1"
    change = change_of(Mutant(file, "core/AddNot", 0), "\n".join(lines))
    assert change.mutant == f"{change.source} + 1" == lines[place].strip()


def test_every_place_of_the_core_has_tests_and_changes_that_parse():
    pytest.importorskip("cosmic_ray")
    places = list(mutants())
    assert len(places) > 1000 and {selection_for(place[0].file) for place in places} == set(CORE.values())
    for mutant in [mutant for place in places[::150] for mutant in place]:
        compile(mutated(mutant), mutant.file, "exec")
        assert change_of(mutant, mutated(mutant)).source

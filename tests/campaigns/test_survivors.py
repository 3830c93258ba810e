"""The list of surviving mutants is valid, and the campaign that uses it identifies a mutant by the changed lines."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaigns.mutants import Mutant, change_of, mutants, mutated, selection_for

from .branches import CORE
from .survivors import SURVIVORS, Survivor

ROOT = Path(__file__).parents[2]


def is_in_order(one: Survivor) -> bool:
    """Whether an entry changes lines of a file of the core, and gives a reason of at least four words."""
    return (any(Path(one.file).is_relative_to(path) for path in CORE) and one.source != one.mutant
            and " ".join(one.source.split()) in " ".join((ROOT / one.file).read_text().split())
            and len(one.reason.split()) > 3)


def test_a_listed_change_has_its_lines_and_a_reason():
    assert [one for one in SURVIVORS if not is_in_order(one)] == []
    right = Survivor("batch_manager/kv/window.py", "outside *= outside > 0", "outside *= outside >= 0",
                     "zero times anything is zero")
    assert is_in_order(right)
    for wrong in ({"file": "batch_manager/clock.py"}, {"source": "return nothing"}, {"mutant": right.source},
                  {"reason": "it is fine"}):
        assert not is_in_order(replace(right, **wrong)), wrong


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
    for mutant in [place[number % len(place)] for number, place in enumerate(places[::300])]:
        compile(mutated(mutant), mutant.file, "exec")
        assert change_of(mutant, mutated(mutant)).source

"""T14: if one comparison, number or truth value in the core is changed, a test fails. Exceptions are listed.

    python -m tests.campaigns --suite T14-mutants [--first-seed 7]

The package `cosmic-ray` makes the mutants. The seed chooses positions in the core's files and the change at each
position. Each mutant is tested alone, in a copy of the working tree, with the tests that CORE in
tests/campaigns/branches.py names for the mutant's file. tests/campaigns/survivors.py lists equivalent mutants, which no
test can detect.
"""

import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

from .branches import CORE, LEFT_OUT
from .registry import Options, Summary
from .survivors import SURVIVORS, Survivor

ROOT = Path(__file__).parents[2]
ENOUGH = {"Q": 4, "F": 100, "C": None}                      # mutants; None: all
LEAST_NOTICED = 0.95
ORDERINGS = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE")
OPERATORS = (*(f"core/ReplaceComparisonOperator_{one}_{other}" for one in ORDERINGS for other in ORDERINGS
               if one != other),
             "core/ReplaceComparisonOperator_Is_IsNot", "core/ReplaceComparisonOperator_IsNot_Is",
             "core/NumberReplacer", "core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue",
             "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/AddNot")
CHANGED_NODES = {"comparison", "number", "factor", "keyword", "if_stmt", "while_stmt", "assert_stmt", "test"}
ONE_TEST_SECONDS, ALL_TESTS_SECONDS = 60, 1200              # a change may make a loop endless


@dataclass(frozen=True, slots=True)
class Mutant:
    """The change with index `occurrence` that a mutation operator of cosmic-ray can make to a file of the core."""

    file: str
    operator: str
    occurrence: int


def mutants() -> Iterator[list[Mutant]]:
    """Yield the mutants of each position in the core's files that a mutation operator can change, as one list.

    The order is the same on all machines.
    """
    import parso  # noqa: F401  before cosmic_ray, which cannot be imported first
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator
    operators = {name: get_operator(name)() for name in OPERATORS}
    for path in CORE:
        for file in sorted((ROOT / path).rglob("*.py")) if (ROOT / path).is_dir() else [ROOT / path]:
            places: dict[tuple, list[Mutant]] = {}
            nodes = [node for node in ast_nodes(get_ast(file.read_text())) if node.type in CHANGED_NODES]
            for name, operator in operators.items():
                found = (place for node in nodes for place in operator.mutation_positions(node))
                for occurrence, place in enumerate(found):
                    places.setdefault(place, []).append(Mutant(str(file.relative_to(ROOT)), name, occurrence))
            yield from (places[place] for place in sorted(places))


def mutated(mutant: Mutant) -> str:
    """Return the content of the mutant's file after the change."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    return mutate_code((ROOT / mutant.file).read_text(), get_operator(mutant.operator)(), mutant.occurrence)


def change_of(mutant: Mutant, text: str) -> Survivor:
    """Return the lines that the mutant changes, before and after, as a Survivor with an empty reason.

    text   the content of the file after the change
    """
    before, after = (ROOT / mutant.file).read_text().splitlines(), text.splitlines()
    for tag, start, stop, new_start, new_stop in difflib.SequenceMatcher(None, before, after).get_opcodes():
        if tag != "equal":
            return Survivor(mutant.file, " ".join(line.strip() for line in before[start:stop]),
                            " ".join(line.strip() for line in after[new_start:new_stop]), "")
    raise AssertionError(f"{mutant} changes nothing")


def selection_for(file: str) -> tuple[str, ...]:
    return next(tests for path, tests in CORE.items() if Path(file).is_relative_to(path))


class Copies:
    """Copies of the working tree, in which mutants are tested in parallel. Each copy has at most one changed file."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for number in range(count):
            copy = folder / str(number)
            for file in filter(None, files.split("\0")):
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, copy / file)
            self._free.put(copy)

    def passes(self, tests: tuple[str, ...], file: str | None = None, text: str = "") -> bool:
        """Whether `tests` pass in a free copy in which `file` has the content `text`. `file` may be None: no change."""
        copy = self._free.get()
        try:
            if file is not None:
                (copy / file).write_text(text)
            selection = [f"--deselect={test}" for test in LEFT_OUT]
            environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            return subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                 "-o", f"faulthandler_timeout={ONE_TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true",
                 *selection, *tests],
                cwd=copy, env=environment, capture_output=True, timeout=ALL_TESTS_SECONDS).returncode == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if file is not None:
                shutil.copy2(ROOT / file, copy / file)
            self._free.put(copy)


def run(options: Options) -> Summary:
    if find_spec("cosmic_ray") is None:
        return Summary("T14-mutants: skipped", short=["the package `cosmic-ray` is not installed"])
    places, count = list(mutants()), ENOUGH[options.tier]
    draw = random.Random(options.first_seed)
    drawn = ([draw.choice(place) for place in draw.sample(places, count)] if count is not None else
             [mutant for place in places for mutant in place])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies = Copies(Path(folder), options.jobs)
        selections = sorted({selection_for(mutant.file) for mutant in drawn})
        for tests, passed in zip(selections, pool.map(copies.passes, selections)):
            if not passed:
                return Summary("T14-mutants: nothing was tested", [f"{' '.join(tests)}: fails without any change"])
        texts = [mutated(mutant) for mutant in drawn]
        passed = list(pool.map(copies.passes, [selection_for(mutant.file) for mutant in drawn],
                               [mutant.file for mutant in drawn], texts))

    survivors = [change_of(mutant, text) for mutant, text, unnoticed in zip(drawn, texts, passed) if unnoticed]
    known = {one.change: one for one in SURVIVORS}
    again = f"python -m tests.campaigns --suite T14-mutants --first-seed {options.first_seed}"
    wrong = [f"{one.file}: nobody notices {one.mutant!r} where {one.source!r} is ({again})"
             for one in survivors if one.change not in known]
    noticed = 1 - len(survivors) / len(drawn)
    if noticed < LEAST_NOTICED:
        wrong.append(f"{noticed:.1%} are noticed, and {LEAST_NOTICED:.0%} should be ({again})")
    kinds = Counter(mutant.operator.removeprefix("core/").split("_")[0] for mutant in drawn)
    return Summary(
        f"T14-mutants: seed {options.first_seed}: {len(drawn):,} of the mutants of {len(places):,} places of the core, "
        f"{len(drawn) - len(survivors):,} noticed, {len(survivors)} not, "
        f"{sum(one.change in known for one in survivors)} of these listed with a reason",
        wrong, ran_on=[", ".join(f"{kind} {count}" for kind, count in kinds.most_common())])

"""Equivalent mutants of the core: changes that no test can notice, with the reason.

`python -m tests.campaigns --suite T14-mutants` makes mutants, and names each surviving mutant that SURVIVORS lacks.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Survivor:
    """A change that no test notices.

    file     path of the file
    source   the lines that are changed, without indentation
    mutant   the lines after the change
    reason   why the change does not affect documented behaviour
    """

    file: str
    source: str
    mutant: str
    reason: str

    @property
    def change(self) -> tuple[str, str, str]:
        return self.file, self.source, self.mutant


SURVIVORS: tuple[Survivor, ...] = (
)

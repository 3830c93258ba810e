"""Changes to the core that no test notices, and why none could.

`python -m tests.campaigns --suite T14-mutants` draws changes and names those that are missing here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Survivor:
    """A change nobody notices.

    file     of the package
    source   the lines that are changed, without indentation
    mutant   what to
    reason   why that changes nothing that is promised
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

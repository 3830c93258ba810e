"""The parser of the tools' command lines."""

import argparse
from typing import Any, NoReturn

WRONG = 2


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a wrong command line in one line on stderr, without the usage.

    After the report, the program exits with status 2.

    Line breaks of a description and an epilog are kept, unless `formatter_class` is given.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}; {self.prog} --help describes the options\n")

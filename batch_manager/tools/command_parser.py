"""The parser of the tools' command lines, and the types of their values."""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

WRONG = 2
LEAST_RATE = 1e-6           # requests/s: one in 11 days
# Former names of options -> what to use now. A command that still has an option of this name accepts it.
RETIRED = {
    "--count": "--num-requests", "--n": "--num-requests", "--max-num-samples": "--num-requests",
    "--rate": "--request-rate", "--enable-exp-delays": "--delays exponential", "--seed": "--random-seed",
    "--first": "--skip", "--max-prompt-len": "--max-input-tokens", "--dataset-format": "--format",
    "--prompt": "--input-min N --input-max N", "--output": "--output-min N --output-max N",
    "--output-len": "--output-tokens", "--max-batch": "--max-batch-size", "--max-tokens-per-step": "--max-num-tokens",
    "--threads": "--num-threads", "--json": "--report json", "--trace": "the name of the trace without an option",
    "--save": "--trace", "--chunking": "--chunked-context, and --context-chunking-policy NAME",
}


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that reports a wrong command line in one line on stderr, without the usage.

    After the report, the program exits with status 2. Options cannot be abbreviated, so that each has one name.

    Line breaks of a description and an epilog are kept, unless `formatter_class` is given.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False,
                                        **options})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        for argument in args or ():
            if argument == "--":
                break
            name = argument.partition("=")[0].replace("_", "-")
            if name in RETIRED and name not in self._option_string_actions and self._subparsers is None:
                self.error(f"the option {name} was renamed; use {RETIRED[name]}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message}; {self.prog} --help describes the options\n")


# ---------------------------------------------------------------------- types for argparse


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def at_least(minimum: int, *, at_most: int | None = None) -> Callable[[str], int]:
    """Return a type for argparse: a whole number of at least `minimum`. `at_most`, if given, is the largest."""
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value} is too small; expected at least {minimum}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"{value} is too large; expected at most {at_most}")
        return value

    return read


def within(least: float, most: float) -> Callable[[str], float]:
    """Return a type for argparse: a number from `least` to `most`."""
    def read(text: str) -> float:
        value = number(text)
        if not least <= value <= most:     # refuses NaN too
            raise argparse.ArgumentTypeError(f"{text} is out of range; expected {least:g} to {most:g}")
        return value

    return read


def positive(text: str) -> float:
    value = number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected a finite number above 0")
    return value


def share(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; expected more than 0 and at most 1")
    return value


def rate(text: str) -> float:
    """Return the rate in requests/s; 0: all requests arrive at once."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a rate; expected requests/s, or 0 for all at once")
    if 0 < value < LEAST_RATE:
        raise argparse.ArgumentTypeError(f"{text} is too low; expected at least {LEAST_RATE:f} requests/s, or 0 for "
                                         "all at once")
    return value

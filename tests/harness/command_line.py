"""Checks of the command lines of programs that measure: folders, and options that have no effect."""

import argparse
import tempfile
from collections.abc import Iterable
from pathlib import Path

from batch_manager.tools.command_parser import CommandParser


class OptionError(Exception):
    """An option cannot be used. The text names it."""


def some_text(given: str) -> str:
    """Type for argparse: any text but an empty one."""
    if not given:
        raise argparse.ArgumentTypeError("the value is empty; expected a text; leave the option out for none")
    return given


def some_path(given: str) -> Path:
    """Type for argparse: the name of a file or folder. An empty one, which pathlib takes for ".", is refused."""
    if not given:
        raise argparse.ArgumentTypeError("the name is empty; expected a file or folder; name one")
    return Path(given)


def make_folder(option: str, folder: Path) -> None:
    """Make the folder, unless it is there. Raises OptionError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if file.write(bytes(4096)) < 4096:
                raise OSError(0, "the disk is full")
    except OSError as error:
        raise OptionError(f"{option} is {folder}, where no file can be written: {error.strerror}; expected a folder "
                          "that can be written, with room on its disk; name another one") from None


def refuse_without_effect(parser: CommandParser, options: argparse.Namespace, mode: str, names: Iterable[str]) -> None:
    """End with an error if one of these options was given.

    mode    what makes them have no effect, such as "with --dry-run"
    names   names in `options`, whose default is None
    """
    for name in names:
        if getattr(options, name) is not None:
            parser.error(f"--{name.replace('_', '-')} has no effect {mode}; leave it out")

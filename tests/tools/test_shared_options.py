"""Over all commands, one quantity has one option name, and one option name has one meaning and one kind of value."""

import argparse
import importlib
import re

import pytest

from batch_manager.tools import workload
from batch_manager.tools.__main__ import COMMANDS, main
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.shared_options import SHARED

SUBCOMMANDS = {"workload": ("", *workload.KINDS), "trace": ("why", "slowest", "perfetto", "csv")}


class Caught(Exception):
    pass


def parser_of(command: str, subcommand: str) -> argparse.ArgumentParser:
    with pytest.MonkeyPatch.context() as patch:
        def catch(parser, args=None, namespace=None):
            if subcommand and command == "trace":
                (commands,) = (action for action in parser._actions if action.nargs == argparse.PARSER)
                parser = commands.choices[subcommand]
            raise Caught(parser)
        patch.setattr(CommandParser, "parse_known_args", catch)
        with pytest.raises(Caught) as caught:
            importlib.import_module(f"batch_manager.tools.{COMMANDS[command][0]}").main(
                [subcommand] if subcommand else [])
    return caught.value.args[0]


@pytest.fixture(scope="module")
def table():
    """Return option -> [(command, action)] over all commands."""
    found: dict[str, list] = {}
    for command in COMMANDS:
        for subcommand in SUBCOMMANDS.get(command, ("",)):
            for action in parser_of(command, subcommand)._actions:
                for name in action.option_strings:
                    if name.startswith("--") and name != "--help":
                        found.setdefault(name, []).append((f"{command} {subcommand}".strip(), action))
    return found


def meaning(text: str | None) -> str:
    return re.split(r"; | \(", text or "")[0]


def test_an_option_of_several_commands_has_one_meaning_and_one_kind_of_value(table):
    for name, uses in table.items():
        shared = SHARED.get(name.replace("--no-", "--"))
        if len({command.split()[0] for command, _ in uses}) > 1:
            assert shared, f"{name} is an option of {', '.join(command for command, _ in uses)}; expected it in SHARED"
        if shared:
            assert {meaning(action.help) for _, action in uses} == {meaning(shared[0])}, name
            assert len({(action.metavar, action.nargs) for _, action in uses}) == 1, name


def test_no_two_options_have_one_meaning(table):
    names: dict[str, set] = {}
    for name, uses in table.items():
        for _, action in uses:
            if meaning(action.help) and action.dest != "positional":
                names.setdefault(meaning(action.help), set()).add(name.replace("--no-", "--"))
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


@pytest.mark.parametrize("argv, new", [
    (["workload", "--n", "3", "--out", "w.json"], "--num-requests"),
    (["workload", "--rate", "2", "--out", "w.json"], "--request-rate"),
    (["workload", "--seed", "2", "--out", "w.json"], "--random-seed"),
    (["workload", "--prompt=8", "--out", "w.json"], "--input-min N --input-max N"),
    (["workload", "trace", "sample:azure", "--count", "3", "--out", "w.json"], "--num-requests"),
    (["workload", "trace", "sample:azure", "--first", "3", "--out", "w.json"], "--skip"),
    (["simulate", "--cost", "c", "--workload", "w", "--max-batch", "3"], "--max-batch-size"),
    (["bench", "--model", "m", "--workload", "w", "--max_tokens_per_step", "3"], "--max-num-tokens"),
    (["bench", "--model", "m", "--workload", "w", "--dataset-format", "csv"], "--format"),
    (["trace", "slowest", "--count", "2", "t"], "--num-requests"),
    (["draw", "--demo", "--save", "t"], "--trace"),
    (["draw", "--demo", "--chunking", "equal_progress"], "--chunked-context, and --context-chunking-policy NAME"),
    (["inspect", "m", "--json"], "--report json"),
    (["host-bench", "--output-len", "4"], "--output-tokens"),
])
def test_a_former_name_is_refused_with_the_new_one(argv, new, capsys):
    with pytest.raises(SystemExit) as exit:
        main(argv)
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and " was renamed; use " in line
    assert new in line


@pytest.mark.parametrize("argv", [
    ["workload", "--delays", "constant", "--out", "w.json"],
    ["workload", "trace", "sample:azure", "--longer", "drop", "--out", "w.json"],
    ["simulate", "--cost", "c", "--workload", "w", "--delays", "constant"],
    ["bench", "--model", "m", "--workload", "w", "--enable_exp_delays"],
    ["bench", "--model", "m", "--workload", "w", "--slo-share", "0.5"],
    ["bench", "--model", "m", "--workload", "w", "--max-probes", "3"],
    ["draw", "--demo", "--context-chunking-policy", "equal_progress"],
    ["bench", "--model", "m", "--workload", "w", "--static-emulated-timeout", "3"],
])
def test_an_option_without_an_effect_is_refused(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        main(argv)
    assert exit.value.code == 2 and " was given without " in capsys.readouterr().err

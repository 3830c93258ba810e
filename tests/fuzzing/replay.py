"""Repeats one request of the fuzzer, alone and then with its whole block: python -m tests.fuzzing.replay NUMBER"""

import argparse
import sys
from typing import Any

from tests.harness.world import quiet_log

from .block import BLOCK, run_block
from .draws import draw
from .engines import engine_of
from .items import Draw
from .oracle import judge
from .values import Value

LONGEST = 160


def command(number: int) -> str:
    """Return the command that repeats a request."""
    return f"python -m tests.fuzzing.replay {number}"


def describe(number: int) -> str:
    """Describe a request, with the verdict of the oracle."""
    engine = engine_of(number // BLOCK)
    drawn = draw(number, engine)
    lines = [f"request {number}: a {drawn.kind} with the id {_shown(drawn.request_id)}, for the engine '{engine.name}'"]
    if drawn.build_error is not None:
        lines.append(f"  building it raised {drawn.build_error!r:.{LONGEST}}")
    lines += [f"  {name!r:.40} = {_of(value)}" for name, value in (drawn.tensors | drawn.options).items()]
    lines.append(f"  the oracle: {judge(drawn, engine)}")
    return "\n".join(lines + _item(drawn))


def report(block: int, wrong: list[tuple[int | None, str]]) -> str:
    """Describe the first five faults of a block of requests, each with the command that repeats it."""
    lines = [f"block {block} (engine '{engine_of(block).name}'):"]
    for number, text in wrong[:5]:
        if number is None:
            lines += [f"  {text:.400}", f"  again: {command(block * BLOCK)}"]
        else:
            lines += [f"  {number}: {text:.400}", f"  again: {command(number)}", describe(number)]
    return "\n".join(lines + ([f"  and {len(wrong) - 5} more"] if len(wrong) > 5 else []))


def _item(drawn: Draw) -> list[str]:
    return [f"  handed over: {_shown(drawn.item)} of type {type(drawn.item)!r:.60}"] if not drawn.tensors else []


def _of(value: Any) -> str:
    if not isinstance(value, Value):
        return _shown(value)
    what = str(value.plain) if value.plain is not None else _shown(value.given)
    dtype = getattr(value.given, "dtype", "") if value.plain is not None else ""
    return f"{what:.{LONGEST}} as {type(value.given).__mro__[0]!r:.60} {dtype}"


def _shown(value: Any) -> str:
    """Return the repr of a value, cut to LONGEST characters, or a description of its type if its repr raises."""
    try:
        return repr(value)[:LONGEST]
    except BaseException as error:  # noqa: B036
        return f"something of {object.__repr__(type(value))} whose repr raises {type(error).__name__}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    number = parser.parse_args(arguments).number
    print(describe(number))
    with quiet_log():
        found = {"alone": run_block(number // BLOCK, number), "with its block": run_block(number // BLOCK)}
    for how, outcome in found.items():
        print(f"{how}: {outcome.run} run, {dict(outcome.refused)} refused")
        for other, text in outcome.wrong:
            print(f"  wrong: {'' if other is None else f'{other}: '}{text}")
    is_wrong = any(outcome.wrong for outcome in found.values())
    print("" if is_wrong else "nothing is wrong")
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

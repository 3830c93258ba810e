"""Finds waits in source code that may last for ever: for threads, processes and futures, and loops that only sleep."""

import ast
from collections.abc import Iterator

WAITS = {"join", "wait", "result", "communicate"}              # of threads, processes, events, barriers and futures
RUNS = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}


def unbounded_waits(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, source) of each wait without a limit. A wait that is awaited counts for the limit of its task."""
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in awaited:
            is_run = ast.unparse(node.func) in RUNS and not {"timeout", None} & {each.arg for each in node.keywords}
            is_wait = isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and not (
                node.args or node.keywords)
            if is_run or is_wait:
                yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.While) and any(map(_is_sleep, node.body)) and all(
                map(_is_sleep_or_check, node.body)) and not _looks_at_the_time(node):
            yield node.lineno, f"while {ast.unparse(node.test)}: sleep"


def _is_sleep(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).split(".")[-1] == "sleep"


def _is_sleep_or_check(statement: ast.stmt) -> bool:
    return _is_sleep(statement) or isinstance(statement, ast.Assert)


def _looks_at_the_time(node: ast.While) -> bool:
    return any(word in ast.unparse(node) for word in ("monotonic", "perf_counter", "deadline"))

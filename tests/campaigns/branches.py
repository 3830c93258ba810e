"""The uncovered branches of the core, each with a reason. Tests cover all others.

`python -m tests.campaigns --suite T14` checks the list.

A core module is a folder or a file of the package, with the tests that must cover its branches. To add one, put it into
CORE and run the suite. For each branch that the suite names, write a test of its behaviour, remove dead code, or list
the branch with the reason why no test can cover it.
"""

from dataclasses import dataclass

THROUGH_THE_LOOP = ("tests/contract", "tests/loop", "tests/steps", "tests/stats")
WORKER = (*THROUGH_THE_LOOP, "tests/interleaving", "tests/sweep", "tests/simulation")

# folder or file of the package -> tests that cover its branches
CORE: dict[str, tuple[str, ...]] = {
    "batch_manager/gpt_manager.py": WORKER,
    "batch_manager/worker.py": WORKER,
    "batch_manager/interpreter_exit.py": WORKER,
    "batch_manager/forked_child.py": WORKER,
    "batch_manager/guard.py": WORKER,
    "batch_manager/loading_thread.py": WORKER,
    "batch_manager/loop": (*THROUGH_THE_LOOP, "tests/simulation", "tests/sweep", "tests/property"),
    "batch_manager/arguments.py": WORKER,
    "batch_manager/steps": (*THROUGH_THE_LOOP, "tests/simulation", "tests/sweep", "tests/property", "tests/runtime"),
    "batch_manager/responses": (*THROUGH_THE_LOOP, "tests/simulation", "tests/boundaries"),
    "batch_manager/requests": ("tests/requests", "tests/boundaries", "tests/fuzzing", *THROUGH_THE_LOOP),
    "batch_manager/kv": ("tests/kv", "tests/scheduling", "tests/property", *THROUGH_THE_LOOP),
    "batch_manager/scheduling": ("tests/scheduling", "tests/property", *THROUGH_THE_LOOP, "tests/conformance"),
}

# Tests that compare times, or end a process after a time. Coverage slows them down too much.
LEFT_OUT: tuple[str, ...] = (
    "tests/contract/test_life_cycle.py::test_c22_an_idle_manager_uses_at_most_2_percent_of_a_core",
    "tests/sweep/test_sweep.py::test_every_way_a_process_can_end",
)


@dataclass(frozen=True, slots=True)
class Untaken:
    """A branch that no test covers.

    file     path of the file
    source   the line that branches, without indentation
    target   the line that the branch goes to; "" for the end of the function
    reason   why no test covers it
    """

    file: str
    source: str
    target: str
    reason: str


UNTAKEN: tuple[Untaken, ...] = (
    *(Untaken("batch_manager/guard.py", "if guard.process_id != forked_child.current_process_id:",
              f"forked_child.end_this_process({error})",
              "the forked child ends there without writing what was measured; tests/contract/test_process_level.py "
              "looks at its exit status")
      for error in ("None", "error")),
)

"""Count the calls of Python functions of this package in one plain generation step, by file, or list them in order.

    python -m tests.benchmarks.call_trace --model examples/models/austen-4m
    python -m tests.benchmarks.call_trace --model FOLDER --list       every call, indented by depth
    python -m tests.benchmarks.call_trace --model FOLDER --cpu-compile    all layers in one call of compiled code

The loop runs on a CPU without a worker thread. Layers run one by one, as on a GPU, unless --cpu-compile is given. The
requests are greedy and do not stream. When all requests generate, the program traces one iteration with sys.setprofile.
This iteration needs no new KV cache block and ends no request. The counts include comprehensions, generator
expressions, lambdas, properties, and every resumption of a generator. Only code in the package or in the folder
triton_kernels of the checkout counts.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from batch_manager.arguments import Callbacks, EngineArguments
from batch_manager.build import build_loop
from batch_manager.config import Parts, TrtGptModelOptionalParams
from batch_manager.names import SchedulerPolicy
from batch_manager.requests.inference_request import InferenceRequest
from batch_manager.tools.command_parser import CommandParser
from batch_manager.tools.workload import at_least

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE, KERNELS = REPOSITORY / "batch_manager", REPOSITORY / "triton_kernels"


@dataclass(slots=True)
class Calls:
    """The calls of one iteration.

    calls      (depth, file, function), in order. A file is a path in this package, or `triton_kernels/...`
    entries    number of these calls whose caller is in a different file. The caller of a call is the innermost
               function on the call stack whose own call is in `calls`. A call without such a caller does not count
    """

    calls: list[tuple[int, str, str]] = field(default_factory=list)
    entries: int = 0

    @property
    def files(self) -> Counter[str]:
        """File -> number of calls of its functions."""
        return Counter(file for _, file, _ in self.calls)


class Profile:
    """Context manager that records the calls within it."""

    def __init__(self) -> None:
        self.found = Calls()
        self._stack: list[str | None] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self.found

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            file = _file_of(frame.f_code.co_filename)
            if file is not None:
                callers = [caller for caller in self._stack if caller is not None]
                self.found.entries += bool(callers) and callers[-1] != file
                self.found.calls.append((len(callers), file, frame.f_code.co_qualname))
            self._stack.append(file)
        elif event == "return" and self._stack:
            self._stack.pop()


def _file_of(name: str) -> str | None:
    """Return the path relative to the package, or `triton_kernels/...` for a file of that folder.

    Returns None for any other file, and for this file.
    """
    path = Path(name)
    if name == __file__:
        return None
    for parent, prefix in ((PACKAGE, ""), (KERNELS, "triton_kernels/")):
        if parent in path.parents:
            return prefix + path.relative_to(parent).as_posix()
    return None


def trace_one_step(model: str, batch: int, policy: SchedulerPolicy, *, cpu_compile: bool = False) -> Calls:
    """Return the calls of one iteration in which `batch` requests generate."""
    requests = [InferenceRequest(number, {"input_ids": [1 + number, 2, 3], "request_output_len": 40})
                for number in range(batch)]
    records: list[str] = []
    params = TrtGptModelOptionalParams(device="cpu", max_batch_size=batch, cpu_compile=cpu_compile)
    loop = build_loop(
        EngineArguments(model_path=model, scheduler_policy=policy, optional_params=params,
                        exclude_input_in_output=True),
        Callbacks(lambda count: [requests.pop(0) for _ in range(min(count, len(requests)))],
                  lambda *response: None, set, records.append), Parts())
    for _ in range(4):
        loop.step(accept_new=True)
    with Profile() as calls:
        loop.step(accept_new=True)
    assert len(loop.active) == batch and all(request.is_generating for request in loop.active)
    loop.backend.close()
    return calls


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tests.benchmarks.call_trace", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="folder of a checkpoint")
    add("--batch", type=at_least(1), default=4, help="requests (4)")
    add("--list", action="store_true", help="print every call")
    add("--cpu-compile", action="store_true", help="use compiled steps")
    options = parser.parse_args(argv)
    calls = trace_one_step(options.model, options.batch, SchedulerPolicy.GUARANTEED_NO_EVICT,
                           cpu_compile=options.cpu_compile)
    if options.list:
        for depth, file, function in calls.calls:
            print(f"{'  ' * depth}{file}: {function}")
    for file, count in calls.files.most_common():
        print(f"{count:>5}  {file}")
    print(f"{len(calls.calls)} calls through {len(calls.files)} files, {calls.entries} of them from another file")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The former name of `batch_manager.tools.bench`, kept for scripts.

The program prints its result as one line of JSON.
"""

from collections.abc import Sequence

from .bench import __main__ as _program
from .bench.errors import BenchmarkError
from .bench.options import parse_options
from .bench.run import benchmark

__all__ = ["BenchmarkError", "benchmark", "main", "parse_options"]


def main(argv: Sequence[str] | None = None) -> int:
    return _program.main(argv, program="benchmark", report="json")


if __name__ == "__main__":
    raise SystemExit(main())

"""What can go wrong in a benchmark."""


class BenchmarkError(Exception):
    """The benchmark ran and has no result that is worth anything. Exit status 1."""


class InputError(BenchmarkError):
    """An argument or a file is wrong: nothing was measured. Exit status 2."""

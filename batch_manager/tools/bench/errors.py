"""Errors of a benchmark."""


class BenchmarkError(Exception):
    """The benchmark ran but has no valid result. Exit status 1."""


class InputError(BenchmarkError):
    """An argument or a file is wrong; nothing was measured. Exit status 2."""

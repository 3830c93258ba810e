"""The part of a Markdown file that a program writes, between two lines that mark it."""


def written_between(text: str, begin: str, part: str, end: str, *, what: str, belongs: str) -> str:
    """`text` with `part` between the lines `begin` and `end`, which stay.

    what, belongs   for the error: what the text is, and what belongs where the lines are
    Raises          ValueError where it has no such lines
    """
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{what} has no lines {begin!r} and {end!r}; put them where {belongs}")
    return f"{before}{begin}{part}{end}{after}"

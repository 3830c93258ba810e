"""Replace the generated part of a Markdown file, between two marker lines."""


def written_between(text: str, begin: str, part: str, end: str, *, what: str, belongs: str) -> str:
    """Return `text` with everything between the lines `begin` and `end` replaced by `part`.

    what      name of the text, for the error
    belongs   end of the sentence "add them where ..." in the error, such as "the table belongs"

    Raises ValueError if a marker line is missing.
    """
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{what} has no lines {begin!r} and {end!r}; add them where {belongs}")
    return f"{before}{begin}{part}{end}{after}"

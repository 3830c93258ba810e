"""Docstrings on the site stand as they stand in the source: their columns line up in a font of one width."""

from typing import Any

from griffe import Extension, Object


class AsTheyStand(Extension):
    """An extension of griffe."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = f"```text\n{obj.docstring.value}\n```"

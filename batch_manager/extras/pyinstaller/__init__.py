"""For programs frozen with PyInstaller: what it cannot find in the source, through the entry point `pyinstaller40`.

Owns     the names of modules that are imported by name, and the files that are not Python, in hook-*.py
Not      what a program imports itself, such as transformers; its own models and data
Yours    a module that is imported in a new way by its name belongs into `hiddenimports` of a hook

PyInstaller runs the hooks by their path. They import nothing of the package.
"""

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """Return the folder of the hooks, for PyInstaller."""
    return [str(Path(__file__).parent)]

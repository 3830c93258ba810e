"""PyInstaller runs this file for a program that imports the command batch-manager, which imports commands by name."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2]

hiddenimports = sorted({".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts])
                        for path in (PACKAGE / "tools").rglob("*.py") if path.name != "__init__.py"})

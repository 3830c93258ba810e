"""Hooks of the site: what files outside of docs/ that pages link to become, and the reference.

README.md is the start page. Other Markdown files that pages link to are pages; other files are copied as they stand.
Links are written anew for their places, so that the same text works in the repository and on the site.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]*)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Add all that the pages lead to."""
    seen, waiting = {REPOSITORY / "README.md"}, [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
    while waiting:
        for target in linked_files(waiting.pop()):
            if target not in seen and not target.is_relative_to(DOCS):
                seen.add(target)
                if target.suffix == ".md":
                    waiting.append(target)
    for path in sorted(seen):
        files.append(File.generated(config, place_of(path), abs_src_path=str(path)))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links for the place of the page on the site."""
    source = source_of(page.file)
    if source is None:
        return markdown
    if source.is_relative_to(REPOSITORY / "tests") or source.name == "CHANGELOG.md":
        page.meta["search"] = {"boost": 0.05}      # logs name everything; what explains a term comes first

    def rewritten(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (source.parent / target).resolve()
        place = os.path.relpath(place_of(path), os.path.dirname(page.file.src_uri) or ".")
        return f"{before}{place}{anchor or ''}{after}"

    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in FENCE.split(markdown))


def linked_files(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    text = "".join(part for part in FENCE.split(page.read_text(encoding="utf-8")) if not part.startswith("```"))
    for _, target, _, _ in LINK.findall(text):
        if target and "://" not in target and not target.startswith("mailto:"):
            path = (page.parent / target).resolve()
            if path.is_file():
                yield path


def place_of(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path == REPOSITORY / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(REPOSITORY).as_posix()}"


def source_of(file: File) -> Path | None:
    """The file of the repository that a page is made of; None for a page that is generated."""
    if file.src_uri == "index.md":
        return REPOSITORY / "README.md"
    if file.src_uri.startswith("repository/"):
        return REPOSITORY / file.src_uri.removeprefix("repository/")
    path = DOCS / file.src_uri
    return path if path.exists() else None


def reference() -> str:
    """The page of all public names: those of batch_manager, and of batch_manager.aio."""
    parts = ["# Reference\n\nFrom the docstrings. Import each name from the module of its section.\n"]
    for module in ("batch_manager", "batch_manager.aio"):
        parts.append(f"## `{module}`\n")
        parts += [f"::: {identifier}\n" for identifier in public_names(module)]
    parts.append(f"## Keys of `STATISTICS`\n\n{statistics()}\n")
    return "\n".join(parts)


def statistics() -> str:
    """The table of all statistics."""
    from batch_manager.stats.statistics_table import STATISTICS

    rows = [f"| {row.name} | {row.unit} | {row.time} | {row.schemes} | {row.meaning} |" for row in STATISTICS]
    return "\n".join(["| key | unit | time | batching schemes | meaning |", "|---|---|---|---|---|", *rows])


def public_names(module: str) -> list[str]:
    """Where its public names are defined, or are imported from, without importing it."""
    path = REPOSITORY / Path(*module.split(".")) / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = {target.id for target in node.targets if isinstance(target, ast.Name)} if isinstance(
            node, ast.Assign) else set()
        if "_PUBLIC" in targets:
            return [f"{module}.{home}.{name}" for name, home in ast.literal_eval(node.value).items()]
        if "__all__" in targets and isinstance(node.value, ast.List):
            return [f"{module}.{name}" for name in ast.literal_eval(node.value)]
    raise LookupError(f"{path} has no public names")

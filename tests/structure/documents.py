"""Reads docs/contract.md, the clause numbers that tests cite, and the links of Markdown files."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CONTRACT = REPOSITORY / "docs" / "contract.md"
TESTS = REPOSITORY / "tests"

# Folders whose strings name invariants. In other folders, I8 and similar strings are types of tensors.
JUDGES = ("campaigns", "harness", "interleaving", "revived", "simulation", "soak", "sweep")

RANGE = re.compile(r"\b([CIT])(\d{1,2})(?:\.\.| to )\1(\d{1,2})\b")
# A text picture of a schedule may also contain C5, before a space or the end of the line.
CLAUSE = re.compile(r"\b(C\d{1,2})(?=[:,;.)]| and\b|\Z)")
INVARIANT_OR_SUITE = re.compile(r"\b([IT]\d{1,2})\b")
BEGINNING = re.compile(r"\s*([CIT]\d{1,2}):")
IN_A_NAME = re.compile(r"_c(\d{1,2})(?=_)")


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a Markdown file.

    target    path as written; "" for a link within the file
    anchor    "" if the link has none
    """

    source: Path
    line: int
    text: str
    target: str
    anchor: str

    @property
    def path(self) -> Path:
        return (self.source.parent / self.target).resolve() if self.target else self.source

    @property
    def where(self) -> str:
        return f"{self.source.relative_to(REPOSITORY)}:{self.line}"


# ---------------------------------------------------------------------- the contract


def clauses() -> dict[int, str]:
    """Return {number: title} of the clauses C1, C2, ... of the contract."""
    return {int(number): title for number, title in
            re.findall(r"^### C(\d+): (.+)$", CONTRACT.read_text(encoding="utf-8"), re.M)}


def numbers_of_the_contract() -> dict[str, list[Link]]:
    """Return {"C1", "I1", "T1", ...: links in the contract's entry of this clause, invariant or suite}."""
    found: dict[str, list[Link]] = {}
    number = None
    by_line: dict[int, list[Link]] = {}
    for link in links(CONTRACT):
        by_line.setdefault(link.line, []).append(link)
    for line, text in enumerate(CONTRACT.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.match(r"### (C\d+):|\| ([IT]\d+) \|", text):
            number = match[1] or match[2]
            assert number not in found, f"docs/contract.md has {number} twice"
            found[number] = []
        elif text.startswith(("## ", "Not promised")):
            number = None
        if number is not None:
            found[number] += by_line.get(line, [])
    return found


# ---------------------------------------------------------------------- what tests cite


@cache
def cited_by(path: Path) -> set[str]:
    """Return the numbers of clauses, invariants and suites that a Python file cites.

    It cites them in docstrings, at the beginning of other strings (`"I9: ..."`), and in names (`test_c7_...`).
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return cited_in_text(text)
    if not re.search(r"[CIT]\d|_c\d", text):          # most files, which need not be parsed
        return set()
    found: set[str] = set()
    tree = ast.parse(text, str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found |= cited_in_text(ast.get_docstring(node) or "")
            if isinstance(node, ast.FunctionDef):
                found |= {f"C{number}" for number in IN_A_NAME.findall(node.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := BEGINNING.match(node.value):
                found.add(match[1])
            elif re.fullmatch(r"[I]\d{1,2}", node.value):
                found.add(node.value)
    if path.relative_to(TESTS).parts[0] not in JUDGES:
        found = {number for number in found if number[0] != "I"}
    return found


def cited_in_text(text: str) -> set[str]:
    found = set(CLAUSE.findall(text)) | set(INVARIANT_OR_SUITE.findall(text))
    for kind, first, last in RANGE.findall(text):
        found |= {f"{kind}{number}" for number in range(int(first), int(last) + 1)}
    return found


# ---------------------------------------------------------------------- Markdown


def links(path: Path) -> Iterator[Link]:
    """Return the relative links and images of a file, outside of code blocks."""
    text = re.sub(r"^(```.*?^```)", lambda code: re.sub(r"[^\n]", " ", code[0]), path.read_text(encoding="utf-8"),
                  flags=re.M | re.S)
    for match in re.finditer(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)", text):
        if not re.match(r"[a-z]+:", match[2]):
            target, _, anchor = match[2].partition("#")
            yield Link(path, text.count("\n", 0, match.start()) + 1, match[1], target, anchor)


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a file: those that GitHub gives to headings, and those written as HTML."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


@cache
def defined_in(path: Path) -> set[str]:
    """Return the names of a Python file: functions, classes, assigned names, and methods and fields of the classes."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    collect(ast.parse(path.read_text(encoding="utf-8"), str(path)).body, "")
    return found

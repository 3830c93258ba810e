"""The picture of docs/architecture.md, drawn from the imports of the source.

    python docs/draw_architecture.py            write docs/architecture.svg
    python docs/draw_architecture.py --check    write nothing; exit status 1 if the file differs

Every box is a folder of the package, with the first sentence of its docstring and the folders of its tower that it
imports. Its floor is computed: one above the highest folder that it imports. A file at the top of the package belongs
to the roof if it imports a tower, and to the ground if a tower imports it. An import from one tower into the other, or
two folders that import each other, is an error, so no picture is drawn that hides one.
"""

import argparse
import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "batch_manager"
PICTURE = Path(__file__).with_name("architecture.svg")

HOST = ("requests", "kv", "scheduling", "responses", "stats", "steps", "stores", "loop")
DEVICE = ("parallel", "triton_kernels", "weights", "layers", "attention", "decoding", "models", "runtime")
FRONTS = {
    "aio": "asyncio: requests as async iterators",
    "extras": "LLM, text, OpenAI's HTTP, Prometheus",
    "tools": "batch-manager bench, inspect, trace, watch",
    "testing": "an engine without a model or a thread",
}
GROUND = ("config",)             # folders that both towers import
PORTS = ("handover", "seams")    # what both towers know of each other

# Units: pixels.
WIDTH, MARGIN, GAP, PAD = 1240, 24, 10, 12
TOWER = 508
CHANNEL = WIDTH - 2 * MARGIN - 2 * TOWER
LINE, NAME_SIZE, TEXT_SIZE = 15, 15, 12
CHARACTER = 6.4                  # width of one at TEXT_SIZE, at most on average

INK, FAINT, PAPER = "#1f2933", "#64707d", "#ffffff"
HOST_FILL, HOST_EDGE, HOST_BOX = "#eef4fb", "#2f6db5", "#ffffff"
DEVICE_FILL, DEVICE_EDGE, DEVICE_BOX = "#fdf3ea", "#c8682a", "#ffffff"
PLAIN_FILL, PLAIN_EDGE = "#f4f5f7", "#9aa5b1"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the imports say.

    imports        folder or top-level file -> those of the package that it imports
    host, device   the floors of each tower, the lowest first
    roof           top-level files that no tower imports
    ground         top-level files and folders that the host tower imports, and what they import; the device tower may
                   as well
    loading        those that only the device tower imports, and what they import
    """

    imports: dict[str, set[str]]
    host: list[list[str]]
    device: list[list[str]]
    roof: list[str]
    ground: list[str]
    loading: list[str]


# ---------------------------------------------------------------------- reading


def python_files(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def docstring(name: str) -> str:
    """The first sentence of a folder's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"batch_manager/{name}/__init__.py has no docstring; the picture takes its first sentence; "
                         "write one")
    return text.splitlines()[0].rstrip(".")


def imported_by(path: Path) -> Iterator[str]:
    """The first name under `batch_manager` of each relative import in the file, type checkers' imports included."""
    depth = len(path.relative_to(PACKAGE).parts) - 1    # folders between the package and the file
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]


def read_imports() -> dict[str, set[str]]:
    names = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    names += [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    return {name: {imported for path in python_files(name) for imported in imported_by(path)
                   if imported in names and imported != name} for name in sorted(names)}


def floors(tower: Iterable[str], imports: dict[str, set[str]]) -> list[list[str]]:
    """The folders of a tower by floor: each one above the highest that it imports."""
    tower, done = list(tower), []
    while remaining := [name for name in tower if not any(name in floor for floor in done)]:
        free = [name for name in remaining if not imports[name].intersection(remaining)]
        if not free:
            raise ValueError(f"{', '.join(remaining)} import each other in a circle; floors are stacked; "
                             "break the circle")
        done.append(free)
    return done


def read_shape() -> Shape:
    imports = read_imports()
    for tower, other in ((HOST, DEVICE), (DEVICE, HOST)):
        for name in tower:
            if across := imports[name].intersection(other):
                raise ValueError(f"{name} imports {', '.join(sorted(across))} of the other tower; the towers share "
                                 "the ground only; hand the value over in handover.py")
    towers, files = {*HOST, *DEVICE}, [name for name in imports if not (PACKAGE / name).is_dir()]
    unknown = set(imports) - towers - set(FRONTS) - set(GROUND) - set(files)
    if unknown:
        raise ValueError(f"the folder {', '.join(sorted(unknown))} has no place in the picture; every folder has one; "
                         "add it to HOST, DEVICE, FRONTS or GROUND")
    ground, of_device = below(HOST, imports), below(DEVICE, imports)
    for name in sorted(towers | ground | of_device):
        if upward := imports[name] & (set(FRONTS) if name in towers else towers | set(FRONTS)):
            raise ValueError(f"{name} imports {', '.join(sorted(upward))}, which stands above it; imports point down; "
                             "move the code")
    roof = [name for name in files if name not in ground | of_device and not name.startswith("_")]
    return Shape(imports, floors(HOST, imports), floors(DEVICE, imports), roof, sorted(ground),
                 sorted(of_device - ground))


def below(tower: Iterable[str], imports: dict[str, set[str]]) -> set[str]:
    """The files that a tower imports, and what these import."""
    folders = {*HOST, *DEVICE, *FRONTS}
    found = {name for folder in tower for name in imports[folder]} - folders
    while more := {name for file in found for name in imports[file]} - found - folders:
        found |= more
    return found


# ---------------------------------------------------------------------- drawing


def rectangle(x: float, y: float, width: float, height: float, fill: str, edge: str, *, radius: int = 8,
              weight: float = 1.2) -> str:
    return (f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
            f'stroke="{edge}" stroke-width="{weight}"/>')


def words(x: float, y: float, text: str, *, size: int = TEXT_SIZE, fill: str = INK, bold: bool = False,
          middle: bool = False) -> str:
    weight = ' font-weight="700"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}{anchor}>{escape(text)}</text>'


def lines_of(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, int((width - 2 * PAD) / CHARACTER), break_long_words=False)


def arrow(x1: float, x2: float, y: float, colour: str) -> str:
    tip = 9 if x2 > x1 else -9
    return (f'<path d="M{x1:g} {y:g}H{x2 - tip:g}" stroke="{colour}" stroke-width="2.4" fill="none"/>'
            f'<path d="M{x2:g} {y:g}l{-tip} -6v12z" fill="{colour}"/>')


@dataclass(frozen=True, slots=True)
class Tower:
    title: str
    names: tuple[str, ...]
    floors: list[list[str]]
    x: float
    fill: str
    edge: str

    def box_width(self, floor: int) -> float:
        count = len(self.floors[floor])
        return (TOWER - 2 * PAD - (count - 1) * GAP) / count

    def text(self, floor: int, imports: dict[str, set[str]]) -> list[tuple[str, list[str], list[str]]]:
        """(folder, lines of what it is for, lines of what it imports) of each box of a floor."""
        width, texts = self.box_width(floor), []
        for name in self.floors[floor]:
            below = [other for other in self.names if other in imports[name]]
            texts.append((name, lines_of(docstring(name), width),
                          lines_of("imports " + ", ".join(below), width) if below else []))
        return texts


def draw(shape: Shape) -> str:
    """The picture as an SVG document."""
    host = Tower("Host tower: decides. Never imports torch", HOST, shape.host, MARGIN, HOST_FILL, HOST_EDGE)
    device = Tower("Device tower: computes. Never sees a request", DEVICE, shape.device, WIDTH - MARGIN - TOWER,
                   DEVICE_FILL, DEVICE_EDGE)
    parts: list[str] = []
    y = MARGIN

    # fronts
    front_width = (WIDTH - 2 * MARGIN - (len(FRONTS) - 1) * GAP) / len(FRONTS)
    for number, (name, purpose) in enumerate(FRONTS.items()):
        x = MARGIN + number * (front_width + GAP)
        parts += [rectangle(x, y, front_width, 48, PLAIN_FILL, PLAIN_EDGE),
                  words(x + PAD, y + 20, f"{name}/", size=NAME_SIZE, bold=True),
                  words(x + PAD, y + 38, purpose, fill=FAINT)]
    y += 48 + GAP

    # roof
    roof_height = 74
    parts += [rectangle(MARGIN, y, WIDTH - 2 * MARGIN, roof_height, PLAIN_FILL, INK),
              words(MARGIN + PAD, y + 22, "Roof: the manager, its wiring and its worker", bold=True, size=NAME_SIZE),
              words(MARGIN + PAD, y + 42, "GptManager checks its arguments, wires both towers (build.py) and starts "
                    "the worker thread, which calls GenerationLoop.step and, in it, your four callbacks.", fill=FAINT)]
    parts += chips(shape.roof, MARGIN + PAD, y + 51, WIDTH - 2 * MARGIN - 2 * PAD, set())[0]
    y += roof_height + GAP

    # towers: floors of equal number are at equal height
    count = max(len(shape.host), len(shape.device))
    heights = []
    for floor in range(count):
        rows = [len(purpose) + len(below) for tower in (host, device) if floor < len(tower.floors)
                for _, purpose, below in tower.text(floor, shape.imports)]
        heights.append(PAD + NAME_SIZE + 6 + LINE * max(rows) + 4)
    title = 34
    tower_height = title + sum(heights) + GAP * (count - 1) + PAD
    tops, at = {}, y + tower_height - PAD
    for floor in range(count):
        at -= heights[floor]
        tops[floor] = at
        at -= GAP
    for tower in (host, device):
        top = tops[len(tower.floors) - 1] - title
        parts += [rectangle(tower.x, top, TOWER, y + tower_height - top, tower.fill, tower.edge, weight=1.8),
                  words(tower.x + PAD, top + 23, tower.title, bold=True, size=NAME_SIZE, fill=tower.edge)]
        for floor in range(len(tower.floors)):
            width = tower.box_width(floor)
            for number, (name, purpose, below) in enumerate(tower.text(floor, shape.imports)):
                x, line = tower.x + PAD + number * (width + GAP), tops[floor] + PAD + NAME_SIZE - 3
                parts += [rectangle(x, tops[floor], width, heights[floor], PAPER, tower.edge),
                          words(x + PAD, line, f"{name}/", bold=True, size=NAME_SIZE)]
                for number_of_line, text in enumerate(purpose):
                    parts.append(words(x + PAD, line + 18 + LINE * number_of_line, text))
                foot = tops[floor] + heights[floor] - 9
                for number_of_line, text in enumerate(reversed(below)):
                    parts.append(words(x + PAD, foot - LINE * number_of_line, text, fill=FAINT, size=TEXT_SIZE - 1))

    # what crosses, between the folders that launch and run a step
    steps = next(floor for floor, names in enumerate(shape.host) if "steps" in names)
    runtime = next(floor for floor, names in enumerate(shape.device) if "runtime" in names)
    left, right = MARGIN + TOWER, WIDTH - MARGIN - TOWER
    centre, level = (left + right) / 2, (tops[steps] + heights[steps] / 2 + tops[runtime] + heights[runtime] / 2) / 2
    parts += [words(centre, level - 28, "ScheduledBatch", bold=True, size=NAME_SIZE, middle=True, fill=HOST_EDGE),
              arrow(left + 6, right - 6, level - 17, HOST_EDGE),
              arrow(right - 6, left + 6, level + 17, DEVICE_EDGE),
              words(centre, level + 38, "StepOutput", bold=True, size=NAME_SIZE, middle=True, fill=DEVICE_EDGE)]
    for number, text in enumerate(("Two plain values cross", "between the towers", "(handover.py), through",
                                   "the protocol", "ModelBackend (seams.py).", "No file of a tower",
                                   "imports the other one.")):
        parts.append(words(centre, level + 78 + 17 * number, text, fill=FAINT, middle=True))
    y += tower_height + GAP

    # ground
    room = WIDTH - 2 * MARGIN - 2 * PAD
    drawn, height = chips(shape.ground, MARGIN + PAD, y + 51, room, set(PORTS))
    label = "and, to load a model, the device tower alone:"
    indent = len(label) * CHARACTER
    more, more_height = chips(shape.loading, MARGIN + PAD + indent, y + 56 + height, room - indent, set())
    drawn += [words(MARGIN + PAD, y + 56 + height + 13.5, label, fill=FAINT), *more]
    height += 5 + more_height
    parts += [rectangle(MARGIN, y, WIDTH - 2 * MARGIN, 51 + height + PAD, PLAIN_FILL, INK),
              words(MARGIN + PAD, y + 22, "Ground: what both towers import", bold=True, size=NAME_SIZE),
              words(MARGIN + PAD, y + 42, "Values, protocols, options, errors and the guard around foreign code: "
                    "Python and NumPy. It imports neither tower.", fill=FAINT), *drawn]
    y += 51 + height + PAD + MARGIN

    body = "\n".join(parts)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" width="{WIDTH}" height="{y:g}" '
            'font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif">\n'
            "<title>The folders of batch_manager: two towers, their floors, and what crosses between them</title>\n"
            f'<rect width="{WIDTH}" height="{y:g}" fill="{PAPER}"/>\n{body}\n</svg>\n')


def chips(names: Iterable[str], x: float, y: float, width: float, marked: set[str]) -> tuple[list[str], float]:
    """Names of files, and of folders of the ground, side by side in as many rows as they take, and the height of these
    rows."""
    drawn, at, row = [], x, 0
    for name in names:
        text = f"{name}/" if name in GROUND else f"{name}.py"
        needed = len(text) * 6.7 + 14
        if at + needed > x + width:
            at, row = x, row + 1
        edge = HOST_EDGE if name in marked else PLAIN_EDGE
        drawn += [rectangle(at, y + row * 24, needed, 19, PAPER, edge, radius=9, weight=1.8 if name in marked else 1),
                  words(at + needed / 2, y + row * 24 + 13.5, text, middle=True, size=TEXT_SIZE - 1)]
        at += needed + 6
    return drawn, row * 24 + 19


# ---------------------------------------------------------------------- the program


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python docs/draw_architecture.py",
                                     description="Draws docs/architecture.svg from the imports of the source.",
                                     epilog="Exit status 0: done, or the file is right; 1: with --check, it differs; "
                                            "2: the arguments are wrong, or the imports make no picture.")
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the file differs")
    arguments = parser.parse_args(argv)
    try:
        picture = draw(read_shape())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.check:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
            print(f"{PICTURE.name} differs from the imports of the source; draw it again with "
                  "`python docs/draw_architecture.py`", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

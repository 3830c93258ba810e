"""The documents are right: the picture of the imports, the names, the links, and the numbers that tests cite."""

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from batch_manager import ErrorCode, FinishReason, GptManager, TrtGptModelOptionalParams
from tests.campaigns.registry import SUITES
from tests.matrix.pairs import page

from .documents import (
    CONTRACT,
    REPOSITORY,
    TESTS,
    Link,
    anchors,
    cited_by,
    cited_in_text,
    clauses,
    defined_in,
    links,
    numbers_of_the_contract,
)

DOCUMENTS = sorted({*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *TESTS.rglob("*.md"),
                    *(path for folder in ("batch_manager", "examples", "triton_kernels")
                      for path in (REPOSITORY / folder).rglob("*.md"))})
NUMBERS = numbers_of_the_contract()


@pytest.fixture(scope="module")
def program():
    """Yield (docs/draw_architecture.py as a module, the imports that it reads)."""
    path = REPOSITORY / "docs" / "draw_architecture.py"
    spec = importlib.util.spec_from_file_location("draw_architecture", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)    # its dataclasses need the entry
    spec.loader.exec_module(module)
    yield module, module.read_imports()
    del sys.modules[spec.name]


@pytest.fixture
def drawing(program, monkeypatch):
    """Return docs/draw_architecture.py as a module that reads a copy of the imports, which a test may change."""
    module, imports = program
    imports = {name: set(imported) for name, imported in imports.items()}
    monkeypatch.setattr(module, "read_imports", lambda: imports)
    return module


# ---------------------------------------------------------------------- the picture


def test_the_picture_is_that_of_the_imports(drawing, capsys):
    assert drawing.main(["--check"]) == 0, capsys.readouterr().err


def test_a_picture_that_differs_is_told(drawing, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drawing, "PICTURE", tmp_path / "architecture.svg")
    assert drawing.main(["--check"]) == 1 and "python docs/draw_architecture.py" in capsys.readouterr().err
    assert not drawing.PICTURE.exists()
    assert drawing.main([]) == 0 and drawing.main(["--check"]) == 0


@pytest.mark.parametrize("importer, imported, says", [
    ("kv", "runtime", "kv imports runtime of the other tower"),
    ("models", "requests", "models imports requests of the other tower"),
    ("requests", "loop", "in a circle"),
    ("handover", "kv", "handover imports kv, which stands above it"),
    ("weights", "tools", "weights imports tools, which stands above it"),
])
def test_no_picture_hides_an_import_that_points_up_or_across(importer, imported, says, drawing, capsys):
    drawing.read_imports()[importer].add(imported)
    assert drawing.main(["--check"]) == 2
    assert says in capsys.readouterr().err


def test_a_folder_without_a_place_in_the_picture_is_told(drawing, monkeypatch, capsys):
    monkeypatch.setattr(drawing, "FRONTS", {"aio": "asyncio"})
    assert drawing.main([]) == 2
    assert "the folder extras, testing, tools has no place in the picture" in capsys.readouterr().err


def test_the_page_of_combinations_is_that_of_the_table():
    """If it fails: python -m tests.matrix.pairs > docs/combinations.md"""
    assert (REPOSITORY / "docs" / "combinations.md").read_text(encoding="utf-8") == page()


# ---------------------------------------------------------------------- links and names


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(path):
    assert wrong_links(links(path)) == []


def wrong_links(found) -> list[str]:
    wrong = []
    for link in found:
        if not link.path.exists():
            wrong.append(f"{link.where} links to {link.target}, which is not there")
        elif link.anchor and link.path.suffix == ".md" and link.anchor not in anchors(link.path):
            wrong.append(f"{link.where} links to #{link.anchor} of {link.path.name}, which has no such heading")
        elif (name := re.fullmatch(r"`([A-Za-z_][\w.]*)`", link.text)) and link.path.suffix == ".py":
            is_a_name = not name[1].endswith(".py") and link.path.name != "__init__.py"
            if is_a_name and name[1] not in defined_in(link.path):
                wrong.append(f"{link.where} says that {link.target} has {name[1]}; it has not")
    return wrong


def test_the_page_about_the_tests_has_each_folder():
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    folders = sorted(path.name for path in TESTS.iterdir() if any(path.glob("*.py")))
    assert len(folders) > 30 and [folder for folder in folders if f"`{folder}`" not in text] == []


def test_the_documents_name_functions_where_they_are():
    """docs/architecture.md links the names of more than 60 functions, so that the check of links has cases."""
    named = [link for link in links(REPOSITORY / "docs" / "architecture.md") if re.fullmatch(r"`[\w.]+`", link.text)]
    assert len(named) > 60


@pytest.mark.parametrize("text, says", [
    ("[a](nowhere.py)", "which is not there"),
    ("[a](../README.md#no-such-heading)", "no such heading"),
    ("[`GenerationLoop.fly`](../batch_manager/loop/generation_loop.py)", "has GenerationLoop.fly; it has not"),
    ("![a picture](missing.svg)", "which is not there"),
    ("[`GenerationLoop.step`](../batch_manager/loop/generation_loop.py) [b](../README.md#what-it-promises)", None),
])
def test_wrong_links_are_seen(text, says):
    page = REPOSITORY / "docs" / "page-of-a-test.md"
    wrong = wrong_links(Link(page, 1, name, *target.partition("#")[::2])
                        for name, target in re.findall(r"\[([^\]]*)\]\(([^)]+)\)", text))
    assert (wrong == []) if says is None else (len(wrong) == 1 and says in wrong[0])


def test_links_in_code_are_no_links(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[a](x.md)\n```python\n[b](y.md)\n```\n![c](z.svg#d)\n[e](https://example.org)\n", encoding="utf-8")
    assert [(link.line, link.text, link.target, link.anchor) for link in links(page)] == [
        (1, "a", "x.md", ""), (5, "c", "z.svg", "d")]


def test_anchors_are_githubs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One `two`: three\n## A, B\n## A, B\n### C7: [x](y.md) and_z\n", encoding="utf-8")
    assert anchors(page) == {"one-two-three", "a-b", "a-b-1", "c7-x-and_z"}


# ---------------------------------------------------------------------- the numbers of the contract


def files_of_tests() -> list[Path]:
    return [path for path in sorted(TESTS.rglob("*.py")) if path.parent != Path(__file__).parent
            or path.name == "test_structure.py"]


def test_every_number_that_a_test_or_a_record_cites_is_in_the_contract():
    unknown = [f"{path.relative_to(REPOSITORY)} cites {number}, which docs/contract.md does not have"
               for path in [*files_of_tests(), TESTS / "CAMPAIGNS.md"] for number in sorted(cited_by(path))
               if number not in NUMBERS]
    assert unknown == []


@pytest.mark.parametrize("number", NUMBERS)
def test_files_that_the_contract_names_cite_it(number):
    named = [link.path for link in NUMBERS[number] if link.path.suffix == ".py" and TESTS in link.path.parents]
    assert named, f"docs/contract.md names no test for {number}"
    silent = [path.name for path in named if path.exists() and number not in cited_by(path)]
    if number.startswith("T"):              # one file must cite the suite; the others are its parts
        assert len(silent) < len(named), f"none of {silent} cites {number}"
    else:
        assert silent == [], f"{silent} do not cite {number}"


def test_numbers_follow_one_another():
    for kind in "CIT":
        numbers = [int(number[1:]) for number in NUMBERS if number[0] == kind]
        assert numbers == list(range(1, len(numbers) + 1)), kind
    assert list(clauses()) == [int(number[1:]) for number in NUMBERS if number[0] == "C"]


def test_suites_that_run_as_campaigns_are_marked():
    marked = {line.split("|")[1].strip() for line in CONTRACT.read_text(encoding="utf-8").splitlines()
              if re.match(r"\| T\d+ \|", line) and "campaign |" in line}
    assert marked == {name.partition("-")[0] for name in SUITES}


@pytest.mark.parametrize("text, numbers", [
    ("C24, C25", {"C24", "C25"}),
    ("C14, C16 to C18, C22: the worker", {"C14", "C16", "C17", "C18", "C22"}),
    ("I1..I3 hold (T7)", {"I1", "I2", "I3", "T7"}),
    ("a picture:\nC5  C3\n.   G", set()),
    ("C5 computed five context tokens", set()),
])
def test_citations_are_found(text, numbers):
    assert cited_in_text(text) == numbers


def section(title):
    """The text of a section of docs/embedding.md, the page for hosts."""
    page = (REPOSITORY / "docs" / "embedding.md").read_text(encoding="utf-8")
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_for_hosts_has_every_argument_and_method_of_the_manager():
    arguments, methods = section("The manager").split("| method or property |")
    parameters = inspect.signature(GptManager).parameters
    assert re.findall(r"^\| `(\w+)` \|", arguments, re.M) == [name for name in parameters if name != "trt_engine_path"]
    public = {name for name in vars(GptManager) if not name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+)[^`]*` \|", methods, re.M)) == public


def test_the_page_for_hosts_has_every_finish_reason_and_error_code():
    responses = section("Responses")
    assert re.findall(r"^\| (\d) \| `(\w+)` \|", responses, re.M) == [
        (str(int(reason)), reason.name) for reason in FinishReason]
    assert re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", responses, re.M) == [
        (code.name, str(code.http_status), "yes" if code.is_retryable else "no") for code in ErrorCode]


def test_the_limits_of_the_page_for_hosts_are_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.,]+) \|", section("Limits"), re.M)
    params = TrtGptModelOptionalParams()
    assert len(rows) >= 7 and {name: float(value.replace(",", "")) for name, value in rows} == {
        name: getattr(params, name) for name, _ in rows}

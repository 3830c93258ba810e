"""The site of the documents is built without warnings, and the targets of its links exist."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


class Page(html.parser.HTMLParser):
    """A parser of an HTML page that collects the targets of links and pictures, and the anchors."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors.add(given.get("id"))
        if target := given.get("href" if tag == "a" else "src" if tag == "img" else ""):
            self.targets.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason='mkdocs-material is not installed: the site was NOT built; ".[docs]" has it')
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return {path.relative_to(folder).as_posix(): Page(path.read_text(encoding="utf-8"))
            for path in folder.rglob("*.html")}, folder


def test_all_pages_are_there(site):
    pages, _ = site
    assert {"index.html", "reference.html", *(f"{path.stem}.html" for path in (REPOSITORY / "docs").glob("*.md"))
            } <= pages.keys()


# Writes "CUT n OF m" into the title of a page: code blocks that are wider than what is shown of them.
MEASURE = """<script>addEventListener("load", () => {
    const blocks = [...document.querySelectorAll("pre > code")]
    const cut = blocks.filter(block => block.scrollWidth > block.clientWidth)
    document.title = `CUT ${cut.length} OF ${blocks.length}`
})</script>"""


def test_no_code_of_the_reference_is_cut_on_a_laptop(site):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("chromium is not installed: code blocks of the site were NOT measured; apt-get install chromium")
    _, folder = site
    page = folder / "measured.html"
    page.write_text((folder / "reference.html").read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"),
                    encoding="utf-8")
    shown = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1366,768",
                            "--virtual-time-budget=10000", "--dump-dom", page.as_uri()], capture_output=True, text=True,
                           timeout=120)
    page.unlink()
    cut, total = map(int, re.search(r"<title>CUT (\d+) OF (\d+)</title>", shown.stdout).groups())
    assert total > 300 and cut == 0


def test_logs_of_tests_do_not_come_first_in_a_search(site):
    _, folder = site
    entries = json.loads((folder / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = [entry for entry in entries if "QUEUE_FULL" in entry["text"] + entry["title"]]
    is_log = [entry["location"].startswith(("repository/tests/", "repository/CHANGELOG")) for entry in found]
    assert any(is_log) and not all(is_log)
    assert all(entry.get("boost", 1) == (0.05 if log else 1) for entry, log in zip(found, is_log, strict=True))


def test_links_of_the_site_lead_somewhere(site):
    pages, folder = site
    wrong, seen = [], 0
    for name, page in pages.items():
        if name == "404.html":
            continue
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or target.startswith("//"):
                continue
            seen += 1
            path = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            place = os.path.relpath(path, folder)
            if not path.is_file() or parts.fragment and place in pages and unquote(
                    parts.fragment) not in pages[place].anchors:
                wrong.append(f"{name}: {target}")
    assert seen > 500 and wrong == []


def test_the_reference_has_every_public_name(site):
    import batch_manager

    pages, _ = site
    anchors = {anchor.rsplit(".", 1)[-1] for anchor in pages["reference.html"].anchors if anchor and "." in anchor}
    assert set(batch_manager.__all__) - anchors <= {"__version__"}

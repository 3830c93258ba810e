"""Turn Debian's r-cran-janeaustenr package into examples/data/austen.txt.xz.

The package carries the Project Gutenberg texts of Jane Austen's six novels as
R data, one string per printed line.  The output is clean plain text: one
paragraph per line, and an empty line after each chapter.  Needs the `rdata` package:

    apt-get download r-cran-janeaustenr
    dpkg -x r-cran-janeaustenr_*.deb unpacked
    pip install rdata
    python prepare_austen.py unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata austen.txt.xz
"""

import gzip
import lzma
import re
import sys
import zlib
from itertools import groupby
from pathlib import Path

import rdata

# Lines about the printed edition, not part of the story.
CHAPTER_HEADING = re.compile(r"(chapter|volume)\s+([ivxlc]+|\d+)", re.IGNORECASE)
EDITION_LINE = re.compile(
    r"\s*(\* \* \* \* \*|\*\*\*|finis|the end|\*Vide a letter.*|\[At this point in.*)", re.IGNORECASE
)
EDITION_BLOCK = re.compile(r"\s*\[End volume one of this edition")
CLOSING_NOTE = "A NOTE ON THE TEXT"


def read_novels(stem):
    """Yield (name, list of printed lines) from an R lazy-load database, which has an index file and a data file."""
    index_bytes = gzip.decompress(Path(stem + ".rdx").read_bytes())
    index = rdata.conversion.convert(rdata.parser.parse_data(index_bytes))
    database = Path(stem + ".rdb").read_bytes()
    for name, (offset, length) in index["variables"].items():
        # Each entry starts with its unpacked size in four bytes, before the zlib stream.
        entry = zlib.decompress(database[offset + 4 : offset + length])
        lines = rdata.conversion.convert(rdata.parser.parse_data(entry))
        yield str(name), [str(line) for line in lines]


def join_lines(lines):
    """Return a paragraph on one line, without marks of italics and footnotes, and with full stops after Mr, Mrs, Dr."""
    text = "\n".join(line.strip() for line in lines)
    text = re.sub(r"-\n|\n(?=--)", lambda match: match[0].strip("\n"), text)  # no space beside a dash
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"[_*]", "", text)  # markers of italics and of footnotes
    return re.sub(r"\b(Mr|Mrs|Dr)\b(?!\.)", r"\1.", text)  # the novels disagree about the full stop


def chapters(lines):
    """Yield every chapter as a list of paragraphs, without title pages and edition notes."""
    paragraphs, in_story = [], False
    for is_blank, block in groupby(lines, key=lambda line: not line.strip()):
        block = list(block)
        if is_blank or EDITION_BLOCK.match(block[0]):
            continue
        if block[0].strip() == CLOSING_NOTE:
            break
        if CHAPTER_HEADING.fullmatch(block[0].strip()):
            if paragraphs:
                yield paragraphs
            paragraphs, in_story = [], True
            block = block[1:]
        block = [line for line in block if not EDITION_LINE.fullmatch(line)]
        if in_story and block:
            paragraphs.append(join_lines(block))
    yield paragraphs


if __name__ == "__main__":
    stem, target = sys.argv[1:]
    novels = [
        "\n\n".join("\n".join(paragraphs) for paragraphs in chapters(lines)) for _, lines in sorted(read_novels(stem))
    ]
    Path(target).write_bytes(
        lzma.compress(("\n\n".join(novels) + "\n").encode("utf-8"), preset=9 | lzma.PRESET_EXTREME)
    )

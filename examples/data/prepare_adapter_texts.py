"""Turn two texts of the public domain into examples/data/plays.txt.xz and definitions.txt.xz.

Reads the plays of Shakespeare as github.com/karpathy/char-rnn has them, and Project Gutenberg's text of Ambrose
Bierce's "The Devil's Dictionary" as github.com/GITenberg/The-Devil-s-Dictionary_972 has it:

    python prepare_adapter_texts.py input.txt 972.txt FOLDER

A file has passages of a few speeches or a few entries, with two empty lines between passages.
"""

import lzma
import re
import sys
from pathlib import Path

LEAST_CHARACTERS = 900
MOST_CHARACTERS = 400_000            # of the plays: a part is enough
ENTRY = re.compile(r"[A-Z][A-Z' -]+, (n|adj|v\.t|v\.i|v|adv|pp|interj|n\.pl)\.")


def speeches(text):
    """Yield each speech: the speaker on a line, and the lines of the speech."""
    for speech in text.strip().split("\n\n"):
        if ":\n" in speech:
            yield speech.strip()


def entries(text):
    """Yield the first paragraph of each entry on one line, without the verses that follow it."""
    body = text.split("\nABASEMENT", 1)[1].split("End of Project Gutenberg", 1)[0]
    for paragraph in ("ABASEMENT" + body).split("\n\n"):
        if ENTRY.match(paragraph.strip("\n")):
            yield re.sub(r"\s+", " ", paragraph.replace("_", "")).strip()


def passages(parts):
    """Join parts to passages of at least LEAST_CHARACTERS characters."""
    passage = ""
    for part in parts:
        passage += ("\n\n" if passage else "") + part
        if len(passage) >= LEAST_CHARACTERS:
            yield passage
            passage = ""


if __name__ == "__main__":
    plays, dictionary, folder = map(Path, sys.argv[1:])
    for name, parts in (("plays", speeches(plays.read_text()[:MOST_CHARACTERS])),
                        ("definitions", entries(dictionary.read_text(encoding="ascii", errors="ignore")))):
        text = "\n\n\n".join(passages(parts)) + "\n"
        (folder / f"{name}.txt.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

"""The code and its documents use no retired word. docs/glossary.md lists the words to use."""

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Pattern of a retired word -> what to use instead.
RETIRED = {
    r"somebody|somebody's|anybody|anybody's": "the request, thread or owner that is meant",
    r"nobody|nobody's": "no request, no thread, none",
    r"everybody|everybody's": "all requests, all threads",
    r"whoever": "the caller, the reader, the request that",
    r"behind": "after",
    r"virtual tokens?": "prompt-tuning token",
    r"heats?": "inverse temperature, divisor",
    r"owed": "unanswered",
    r"overlooked": "starved",
    r"books": "accounting",
    r"door": "admission gate",
    r"(?:run|runs|running|ran) (?:it )?(?:again )?in halves|narrow_down": "bisect",
    r"fed|fed_tokens|having|is_wanted": "input tokens, active",
    r"(?:a|the|its|another) doubles?": "duplicate",
    r"unread_texts|min_p_reach|top_p_behind|num_owed|is_worthless": "sequences, min_p_margin, top_p_after, unanswered",
    r"plain steps?": "step at fixed addresses, or the name of its form",
    r"HandedOver|companions": "the tensors, requests or items that are meant",
}
ANY_WORD = re.compile(rf"(?<![\w-])(?:{'|'.join(RETIRED)})(?![\w-])", re.I)
WORDS = [(re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.I), instead) for pattern, instead in RETIRED.items()]
# Phrase in which a retired word is right -> its meaning there.
ALLOWED = {
    "left behind": "of things that stay when they should not",
    "takes over and is behind": "of a replica that is late",
    "tensor behind block ids": "of what stands for an id",
}
# Product code and documents. The glossary is left out, because it lists the words.
FOLDERS = ("batch_manager", "triton_kernels", "examples", "docs", "README.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = (".py", ".md", ".c", ".h", ".js", ".toml", ".lua")
NOT_READ = ("docs/glossary.md",)


def paths():
    tracked = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=REPOSITORY, capture_output=True, text=True,
                             timeout=300)
    found = [path for path in tracked.stdout.split("\0") if path.endswith(SUFFIXES)]
    if not found:       # no checkout, but a source distribution
        found = [path.relative_to(REPOSITORY).as_posix() for folder in FOLDERS
                 for path in [REPOSITORY / folder, *(REPOSITORY / folder).rglob("*")] if path.name.endswith(SUFFIXES)]
    return [path for path in found if path not in NOT_READ]


# An underscore between the words of an identifier, or the beginning of a word in camel case.
SEAM = re.compile(r"(?<=[A-Za-z0-9])_+(?=[A-Za-z])|(?<=[a-z0-9])(?=[A-Z])")


def retired_words(text):
    """Return (line, word, word to use instead) of each retired word in `text`, also within identifiers."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    return sorted({*_matches(text), *_matches(SEAM.sub(" ", text))})


def _matches(text):
    """Return the matches in a text. Most texts have none, which one search finds."""
    return [(text.count("\n", 0, match.start()) + 1, match[0], instead)
            for word, instead in (WORDS if ANY_WORD.search(text) else ()) for match in word.finditer(text)]


def test_no_retired_word_is_used():
    found = [f"{path}:{line}: {word!r}; write: {instead}" for path in paths()
             for line, word, instead in retired_words((REPOSITORY / path).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("text", [
    "Nobody waits.", "a block of\nsomebody else", "the tokens behind it", "VIRTUAL TOKENS", "rows.having(STAGES)",
    "heat = 1", "a double of it", "unread_texts()",
    "virtual_token_scale", "setVirtualTokens()", "num_owed_finals", "TokensBehind"])
def test_they_are_found(text):
    assert retired_words(text)


@pytest.mark.parametrize("text", [
    "nothing is left behind", "wheat", "beheaded", "the doorbell", "outdoors", "wheat_and_heated"])
def test_other_words_are_not(text):
    assert not retired_words(text)

"""examples/chat.py answers in a terminal, where Ctrl-C stops an answer, and in a pipe."""

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.harness import forked

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

REPOSITORY = Path(__file__).resolve().parents[2]
CHAT = [sys.executable, str(REPOSITORY / "examples" / "chat.py")]
AUSTEN = REPOSITORY / "examples" / "models" / "austen-4m"
FIGURES = (r"\[(\d+) tokens, first after [\d.]+ s, then (\d+) tokens/s"
           r"(?:, (\d+) of (\d+) tokens of the conversation were)?")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy of the repository's model with a chat template and without end ids, so that answers have full length."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(AUSTEN, folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").unlink()      # names an end id, which the log would miss in config.json
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
                                                "{% if add_generation_prompt %}assistant:{% endif %}")
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A GGUF file of a model with random weights."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from tests.extras.gguf_files import write_model

    return write_model(tmp_path_factory.mktemp("chat") / "model.gguf")


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "dumb", **more}


class Terminal:
    """A process of the example in a pseudo-terminal."""

    def __init__(self, *arguments):
        self._here, there = os.openpty()
        self.seen = ""

        def take_the_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen([*CHAT, *map(str, arguments)], stdin=there, stdout=there, stderr=there,
                                        env=environment(), preexec_fn=take_the_terminal)
        os.close(there)

    def type(self, text):
        os.write(self._here, text.encode())

    def until(self, pattern, seconds=60):
        """Wait until the pattern is in the new output. Returns the match and drops the output up to the match's end."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.seen!r}"
            if select.select([self._here], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self._here, 4096).decode(errors="replace").replace("\r\n", "\n")
                except OSError as error:    # the other side is closed
                    raise AssertionError(f"it ended before {pattern!r}: {self.seen!r}") from error
        self.seen = self.seen[match.end():]
        return match

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        os.close(self._here)


@pytest.fixture
def terminal():
    opened = []
    yield lambda *arguments: opened.append(Terminal(*arguments)) or opened[-1]
    for each in opened:
        each.close()


def test_turns_find_what_was_computed_and_ctrl_c_stops_an_answer_only(terminal, model):
    chat = terminal(model, "--max-tokens", "40", "--seed", "3", "--system", "Be brief.")
    chat.until("model, float32 on cpu. /help lists the commands.\n> ")
    chat.type("/regenerate\n")
    chat.until("there is no question yet\n> ")
    chat.type("/stats\n")
    chat.until("no iteration has run yet\n> ")
    before, answers = 0, []
    for question in ("Who is Emma?", "And Miss Bates?", "Where is Highbury?"):
        chat.type(question + "\n")
        match = chat.until(rf"{re.escape(question)}\n((?:.|\n)*?){FIGURES}")
        answers.append(match[1])
        tokens, _, cached, prompt = map(int, match.groups()[1:])
        assert tokens == 40 and before - 1 <= cached < prompt, "the turns before are found, but for the last token"
        before = prompt + tokens
        chat.until(", cut off by length\\]\n> ")
    chat.type("/regenerate\n")
    match = chat.until(rf"/regenerate\n((?:.|\n)*?){FIGURES}")
    assert match[1] != answers[-1] and int(match[4]) == int(match[5]) - 1, "all of the prompt but its last token"
    chat.until("> ")
    chat.type("/stats\n")
    chat.until(r"Final Responses +4 responses, since the start\n(.|\n)*> ")
    chat.type("/help\n")
    chat.until("Ctrl-C stops an answer(.|\n)*> ")
    chat.type("/reset\n")
    chat.until("> ")
    chat.type("Who is Emma?\n")
    match = chat.until(rf"Emma\?\n((?:.|\n)*?){FIGURES}")
    assert int(match[5]) < 40 and match[1] != answers[0], "a new conversation, with the seed that /regenerate left"
    chat.until("> ")
    chat.type("\x03")
    deadline = time.monotonic() + 60
    while chat.process.poll() is None:              # readline notices a Ctrl-C before it waits at the end of the line
        assert time.monotonic() < deadline
        time.sleep(0.5)
        with contextlib.suppress(OSError):          # it has ended meanwhile
            chat.type("\n")
    assert chat.process.returncode == 0


def test_ctrl_c_in_an_answer(terminal, model):
    chat = terminal(model, "--max-tokens", "1900")
    chat.until("> ")
    for _ in range(2):
        chat.type("Tell me all\n")
        chat.until("all\n(.|\n)+")
        chat.type("\x03")
        match = chat.until(r"\[stopped\]\n\[(\d+) tokens")
        assert int(match[1]) < 1500
        chat.until("> ")
    chat.type("x" * 4000 + "\n")                    # more than the context has room for
    chat.until("chat: .*maximum input length(.|\n)*> ")
    chat.type("\x04")
    assert chat.process.wait(60) == 0


@pytest.mark.parametrize("kind", ["model", "gguf_file"])
def test_one_question_in_a_pipe_prints_the_answer_and_nothing_else(kind, request):
    model = request.getfixturevalue(kind)

    def answer(prompt, stdin=None):
        done = forked.run([*CHAT, model, "--prompt", prompt, "--max-tokens", "20", "--temperature", "0"],
                              env=environment(), input=stdin, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    said = answer("-", "Who is Emma?")
    assert len(said) > 1 and said.endswith("\n") and (kind == "gguf_file" or answer("Who is Emma?") == said)


def test_what_stdin_may_hold(model):
    """A final line end of a prompt from stdin is dropped, invalid bytes are replaced, an empty prompt is refused."""
    def answer(stdin, *arguments, closed=False):
        return forked.run([*CHAT, model, "--max-tokens", "20", "--temperature", "0", *arguments], timeout=120,
                              **{"input": stdin} if not closed else {"preexec_fn": lambda: os.close(0)},
                              env=environment(PYTHONIOENCODING="utf-8:strict"), capture_output=True)

    said = [answer(stdin, "--prompt", "-") for stdin in (b"Who is Emma?", b"Who is Emma?\r\n")]
    assert {(done.returncode, done.stdout, done.stderr) for done in said} == {(0, said[0].stdout, b"")}
    for arguments in (("--prompt", "-"), ()):
        done = answer(b"Who\xff is Emma?\n", *arguments)
        assert (done.returncode, done.stderr) == (0, b"") and len(done.stdout) > 1
    for done in (answer(b"\n", "--prompt", "-"), answer(b"", "--prompt", "")):
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"chat: the prompt is empty; ") and done.stderr.count(b"\n") == 1
    assert answer(b"", closed=True).returncode == 0


def test_a_full_disk_is_told_in_one_line(model):
    with open("/dev/full", "w") as full:
        done = forked.run([*CHAT, model, "--prompt", "Hello", "--max-tokens", "4"], env=environment(), stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and re.fullmatch("chat: .*No space left on device; direct it elsewhere\n", done.stderr)


def test_a_long_prompt_is_computed_in_steps(model):
    """A step computes at most 512 tokens of a prompt, because Ctrl-C waits for the running step."""
    questions = "Who is Emma? " * 150 + "\n/stats\n"
    done = forked.run([*CHAT, model, "--max-tokens", "2"], env=environment(), input=questions, text=True,
                          capture_output=True, timeout=120)
    iterations = re.search(r"Iteration Counter +(\d+)", done.stdout)
    tokens = re.search(r"of (\d+) tokens of the conversation", done.stdout)
    assert done.returncode == 0 and int(tokens[1]) > 512
    assert int(iterations[1]) >= int(tokens[1]) // 512 + 1


def test_a_reader_that_goes_ends_it_quietly(model):
    process = forked.Popen([*CHAT, model, "--prompt", "Tell me all", "--max-tokens", "1900"], env=environment(),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process.stderr.close()


@pytest.mark.parametrize(("library", "extra"), [("tokenizers", "text"), ("jinja2", "text"), ("gguf", "gguf")])
def test_a_library_that_is_missing_is_named_with_its_extra(gguf_file, library, extra):
    without = ("import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.modules[sys.argv.pop(2)] = None; "
               "runpy.run_path(f'{sys.argv.pop(1)}/chat.py', run_name='__main__')")
    done = forked.run([sys.executable, "-c", without, REPOSITORY / "examples", library, gguf_file], text=True,
                          env=environment(), capture_output=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("chat: ") and f'pip install "batch-manager[{extra}]"' in done.stderr


def test_without_a_model_or_a_template_it_says_what_to_do(tmp_path):
    for arguments, told, more in (
            ([], "there is no model; expected a folder", {"XDG_CACHE_HOME": str(tmp_path)}),
            ([AUSTEN], "has no chat template", {}), ([tmp_path / "a.gguf"], "a.gguf", {})):
        done = forked.run([*CHAT, *arguments], env=environment(**more), capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.startswith("chat: ") and told in done.stderr and done.stderr.count("\n") == 1

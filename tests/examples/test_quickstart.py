"""examples/quickstart.py runs as a whole. On a terminal, its parts show the texts of requests and a table."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")

from batch_manager.testing.scripted_backend import ScriptedBackend  # noqa: E402
from tests.harness import forked  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart.py"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def quickstart():
    specification = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(specification)
    sys.modules["quickstart"] = module              # dataclasses look their module up
    specification.loader.exec_module(module)
    yield module
    del sys.modules["quickstart"]


@pytest.fixture(scope="module")
def tokenizer(quickstart):
    return tokenizers.Tokenizer.from_file(str(quickstart.MODEL / "tokenizer.json"))


@pytest.fixture
def client(quickstart, tokenizer):
    return quickstart.Client(quickstart.make_jobs(tokenizer, 64))


@pytest.fixture
def job(client):
    return client.jobs[1]


# the whole program


def test_a_reader_that_has_seen_enough_is_no_error():
    process = forked.Popen([sys.executable, QUICKSTART, "--max-new-tokens", "4"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert (process.wait(timeout=120), process.stderr.read()) == (0, "")


def test_a_closed_standard_output_is_told_in_one_line():
    run = subprocess.run(["sh", "-c", f"{sys.executable} examples/quickstart.py --max-new-tokens 2 >&-"], text=True,
                         stderr=subprocess.PIPE, timeout=120, cwd=QUICKSTART.parents[1])
    assert run.returncode == 2 and run.stderr.endswith("direct it elsewhere\n") and "Traceback" not in run.stderr


def test_piped_it_prints_plain_lines_texts_statistics_and_the_schedule():
    result = subprocess.run([sys.executable, QUICKSTART], capture_output=True, text=True, encoding="utf-8", timeout=120)
    out = result.stdout
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert not CONTROL.search(out)
    assert max(map(len, out.splitlines())) <= 100

    streamed, texts, numbers, schedule = re.split(r"\n(?:Texts|Statistics|Schedule.*)\n", out)
    for request_id in range(1, 11):
        assert len(re.findall(rf"^\[{request_id}\] ", streamed, re.M)) >= 2, f"request {request_id} was not streamed"
        assert re.search(rf"^\[{request_id}\] .*tokens", texts, re.M)
    assert "[4] (stopped)" in streamed and re.search(r"^\[4\] .*stopped", texts, re.M)
    assert "(greedy)" in streamed and re.search(r"\(top-k \d+, temperature [\d.]+, seed \d+\)", streamed)
    assert all(re.search(rf"^{name} .*\d", numbers, re.M) for name in ("iterations", "tokens", "requests", "KV cache"))

    assert " P " in schedule, "nobody was paused"
    same = re.findall(r"^\[\d+\] paused \dx; run again alone, without a pause: the same text$", schedule, re.M)
    pauses = int(re.search(r"^pauses +(\d+)", numbers, re.M)[1])
    assert 1 <= len(same) <= pauses == len(re.findall(r"\(paused: ", streamed))


def test_an_interrupt_answers_everybody_and_ends_with_130():
    process = forked.Popen([sys.executable, QUICKSTART, "--max-new-tokens", "1500"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        for line in process.stdout:
            if re.match(r"\[\d+\] [^(]", line):             # some text has come
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(60)
    assert process.returncode == 130, err
    assert err == ""
    assert "[SHUTDOWN]" in out and "interrupted" in out.splitlines()[-1]
    assert "It is a truth universally acknowledged" in out.split("Texts\n")[1]


def test_a_model_that_says_something_else_after_a_pause_is_found_out(quickstart, capsys):
    keys = iter(range(100))

    def backend():
        return ScriptedBackend(vocab_size=4096, num_blocks=14, tokens_per_block=16, num_slots=256, key=next(keys))

    assert quickstart.main(["--max-new-tokens", "40"], {"backend": backend}) == 1
    captured = capsys.readouterr()
    assert "A DIFFERENT TEXT" in captured.out
    assert "the text with a pause differs" in captured.err


def test_a_request_that_fails_makes_the_program_fail(quickstart, capsys):
    def fault(batch):
        if any(len(work.token_ids) == 15 for work in batch.context):
            raise RuntimeError("planted")

    assert quickstart.main(["--max-new-tokens", "4"], {"backend": lambda: ScriptedBackend(
        vocab_size=4096, tokens_per_block=16, num_slots=256, on_step=fault)}) == 1
    captured = capsys.readouterr()
    assert re.search(r"^quickstart: \[1\] \[MODEL_ERROR\]", captured.err, re.M)
    assert "[2] (full length)" in captured.out


def test_a_folder_without_a_model_is_one_clear_line(quickstart, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        quickstart.main(["--model", str(tmp_path)])
    assert exit_.value.code == 2
    assert f"there is no tokenizer.json in {tmp_path}" in capsys.readouterr().err


# texts


def test_the_text_of_a_request_grows_with_its_tokens(client, job, tokenizer):
    text = " and then, Caf\u00e9: \u65e5\u672c\u8a9e \N{SLIGHTLY SMILING FACE} and   spaces\n"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for n, token in enumerate(tokens, 1):
        named = [SimpleNamespace(array=np.array(values)) for values in ([[[token]]], [[2]])]     # ids, ..., the reason
        before = job.text
        client.send_response(job.id, named, n == len(tokens), "")
        assert job.text.startswith(before) and "\N{REPLACEMENT CHARACTER}" not in job.text
    assert job.text == text and job.tokens == tokens and job.is_over


def test_the_lines_of_a_request_together_are_its_text(quickstart, tokenizer, client, job, capsys):
    text = " It was a fine evening; and nobody, not even Lady Catherine, could say that it had not been so." * 3
    view = quickstart.PlainView(client)
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        job.text += job.stream.push([token])
        view.show("text", job)
    job.is_over, job.state = True, "done"
    view.show("over", job)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == "[1] (done)"
    assert all(line.startswith("[1] ") and len(line) <= view.LINE for line in lines)
    assert " ".join(line.removeprefix("[1] ") for line in lines) == text.strip()


def test_what_a_terminal_would_obey_is_shown_instead(quickstart):
    assert not CONTROL.search(quickstart.on_one_line("a\x1b[31mred\r\nb\tc\x07\x9b0m"))


# the table on a terminal


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_the_table_never_reaches_the_last_column(quickstart, tokenizer, client, columns):
    for job in client.jobs.values():
        job.text = "日本語 and 🙂, " * job.id
        job.state = ["writing", "PAUSED", "full length", "stopped"][job.id % 4]
    client.statistics.append({"Used KV cache blocks": 111, "Max KV cache blocks": 222})
    lines = quickstart.LiveView(client).frame(columns)
    assert len(lines) == len(client.jobs) + 1
    for line in lines:
        shown = COLOUR.sub("", line)
        assert sum(map(quickstart.columns_of, shown)) < columns
        assert not CONTROL.search(shown)


def test_a_long_text_shows_its_end(quickstart):
    assert quickstart.tail("short", 10) == "short"
    assert quickstart.tail("a rather long text", 10) == "...ng text"
    assert quickstart.tail("日本語日本語", 8) == "...本語"


def test_a_frame_is_drawn_over_the_one_before(quickstart, tokenizer, client, capsys):
    view = quickstart.LiveView(client)
    view.close()
    assert capsys.readouterr().out == "", "nothing was drawn, so nothing needs putting back"
    view.tick()
    view.close()
    out = capsys.readouterr().out
    assert out.startswith("\x1b[?25l") and out.endswith("\x1b[?25h")
    assert out.count(f"\x1b[{len(client.jobs) + 1}A") == 1


@pytest.mark.parametrize("environment, is_terminal, kind", [
    ({"TERM": "xterm"}, True, "LiveView"),
    ({"TERM": "xterm", "NO_COLOR": "1"}, True, "PlainView"),
    ({"TERM": "dumb"}, True, "PlainView"),
    ({"TERM": "xterm"}, False, "PlainView"),
    ({"TERM": "xterm", "LINES": "8"}, True, "PlainView"),
])
def test_control_characters_are_for_terminals_that_want_them(quickstart, tokenizer, client, monkeypatch, environment,
                                                             is_terminal, kind):
    for name, value in ({"LINES": "40", "COLUMNS": "80", "NO_COLOR": ""} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert type(quickstart.choose_view(client)).__name__ == kind


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs pseudo-terminals")
def test_on_a_terminal_the_cursor_comes_back_and_the_screen_is_not_cleared(quickstart):
    code = ("import sys; sys.path.insert(0, sys.argv.pop(1)); import quickstart\n"
            "from batch_manager.testing.scripted_backend import ScriptedBackend\n"
            "sys.exit(quickstart.main(['--max-new-tokens', '5'], {'backend': lambda: ScriptedBackend(\n"
            "    vocab_size=4096, tokens_per_block=16, num_slots=256)}))")
    main_end, program_end = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "LINES": "40", "COLUMNS": "80", "NO_COLOR": ""}
    process = subprocess.Popen([sys.executable, "-c", code, QUICKSTART.parent], stdout=program_end, env=environment)
    os.close(program_end)
    shown = b""
    try:
        while block := os.read(main_end, 65536):
            shown += block
    except OSError:                                         # on Linux: the other end was closed
        pass
    finally:
        os.close(main_end)
    assert process.wait(timeout=60) == 0
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert b"\x1b[2J" not in shown and b"\x1b[?1049h" not in shown
    assert b"full length" in shown

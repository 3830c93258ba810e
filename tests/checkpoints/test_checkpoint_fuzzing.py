"""Campaign T6 with few seeds: a damaged checkpoint is read correctly, or refused with one ModelLoadError.

Reading has no side effects, and takes little time and memory.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from batch_manager.weights.folder import CheckpointFile
from batch_manager.weights.gguf_header import read_gguf_header

from .cases import ADAPTER, CUT, GGUF, case, cuts_of, num_cuts
from .damage_bytes import LARGE_TEXTS
from .entries import Bytes, Place
from .gguf_cases import ARCHITECTURE_AND_KIND, FILE, honest
from .gguf_rules import wrong
from .honest import FAMILIES
from .replay import command
from .rules import Good, judge
from .trial import outcome_of
from .watch import audited

SEEDS = range(2_500)               # the campaign tries a million


def try_all(bench, keys):
    counts = bench.run(keys)
    assert not counts.failed, "\n".join(f"{key} ({command(key)}): {'; '.join(wrong)}"
                                        for key, wrong in counts.failed[:5])
    return counts


def test_damaged_checkpoints_are_read_rightly_or_refused(bench):
    counts = try_all(bench, [str(seed) for seed in SEEDS])
    assert counts.ends["good"] > len(SEEDS) // 20 and counts.ends["bad"] > len(SEEDS) // 2
    assert counts.ends["undecided"] < len(SEEDS) // 50, "the rules of the tests decide nearly all"


def test_a_checkpoint_cut_off_anywhere_in_json_or_header_is_refused(bench):
    counts = try_all(bench, [f"{CUT}{number}" for number in cuts_of("llama")])
    assert counts.ends["bad"] == counts.files > 4000


@pytest.mark.parametrize("file, kind", [*(("header", kind) for kind in LARGE_TEXTS), ("config", "the-last-key-twice"),
                                        ("config", "as-deep-as-the-stack"), ("index", "keys")])
def test_megabytes_of_json_cost_neither_time_nor_memory(file, kind, bench):
    try_all(bench, [f"large-{file}-{kind}"])


def test_the_rules_find_every_family_right():
    assert all(isinstance(judge(case(f"honest-{family}")), Good) for family in FAMILIES)


def test_the_watch_sees_what_reading_must_not_do(bench, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(__file__)
    (tmp_path / "config.json").write_text("{}")
    forbidden = {
        "open": [lambda: open(__file__).close(), lambda: open(tmp_path / "model.safetensors").close(),
                 lambda: open(tmp_path / "config.json", "a").close()],
        "os.listdir": [lambda: os.listdir(tmp_path.parent)],
        "import": [lambda: __import__("this_module_does_not_exist")],
        "subprocess.Popen": [lambda: subprocess.run([sys.executable, "-c", ""], check=True, timeout=300)],
        "exec": [lambda: exec("")],
    }
    for event, deeds in forbidden.items():
        for deed in deeds:
            with audited(tmp_path) as seen, contextlib.suppress(ImportError):
                deed()
            assert any(found.startswith(event) for found in seen), (event, seen)
    with audited(tmp_path) as seen:
        open(tmp_path / "config.json").close()
    assert seen == []


def test_a_failure_names_the_command_that_writes_the_folder_and_shows_it_again(tmp_path):
    from .replay import main

    assert main(["17", "--folder", str(tmp_path / "m")]) == 0
    files = case("17")
    assert {path.name for path in (tmp_path / "m").iterdir()} == set(files)
    assert all((tmp_path / "m" / name).read_bytes() == entry.data for name, entry in files.items()
               if isinstance(entry, Bytes))
    assert command("17") == "python -m tests.checkpoints.replay 17"


def test_a_key_always_means_the_same_files(tmp_path):
    assert [case(str(seed)) for seed in range(200)] == [case(str(seed)) for seed in range(200)]
    last = case(f"{CUT}{num_cuts() - 1}")
    Place(tmp_path / "m").become(last)
    assert {path.name for path in (tmp_path / "m").iterdir()} == set(last)


def test_damaged_adapter_folders_are_read_rightly_or_refused(bench):
    counts = try_all(bench, [f"{ADAPTER}{seed}" for seed in range(300)])
    assert counts.ends["good"] > 40 and counts.ends["bad"] > 200 and counts.ends["undecided"] < 10


def test_damaged_gguf_files_are_read_rightly_or_refused(bench):
    counts = try_all(bench, [f"{GGUF}{seed}" for seed in range(1000)])
    assert counts.ends["good"] > 100 and counts.ends["bad"] > 500


@pytest.mark.parametrize("architecture, kind", ARCHITECTURE_AND_KIND)
def test_gguf_files_that_nothing_is_wrong_with(architecture, kind, tmp_path):
    for untied in (False, True):
        data = honest(architecture, kind, untied).to_bytes()
        (tmp_path / FILE).write_bytes(data)
        assert wrong(data, [data], outcome_of(tmp_path / FILE)) == ("good", [])


def test_a_gguf_file_cut_off_anywhere_is_refused(tmp_path):
    data = honest("llama", "Q8_0", False).to_bytes()
    header = read_gguf_header(CheckpointFile(tmp_path / FILE, place(tmp_path, data)))
    end = max(tensor.end for tensor in header.tensors.values())
    for length in [*range(min(tensor.begin for tensor in header.tensors.values())), end - 1]:
        place(tmp_path, data[:length])
        assert wrong(data[:length], [], outcome_of(tmp_path / FILE)) == ("bad", [])


def place(folder, data):
    (folder / FILE).write_bytes(data)
    return folder / FILE

"""The sections that measure engines give valid records outside of a dry run. A CPU and tiny sizes replace the GPU."""

import dataclasses
import json

import pytest
import torch

from batch_manager.tools.workload import Lengths
from tests.benchmarks.gpu_report import (
    decode_steps,
    engines,
    facts,
    headline,
    idle,
    latency,
    published_workloads,
    shapes,
    step_profile,
)
from tests.benchmarks.gpu_report.bench import Bench
from tests.benchmarks.gpu_report.decode_steps import Case, Size
from tests.benchmarks.gpu_report.device_clock import DryClock
from tests.benchmarks.gpu_report.records import check

TINY = dataclasses.replace(shapes.TINY, positions=1024)
DRY = headline.dry_workload()
HEADER = {"device": "a CPU", "versions": {}, "commit": "abc", "date": "2026-12-01"}
# section -> (module, its sizes, its goals)
SECTIONS = {
    "large": (decode_steps, {"STEPS": 4, "LARGE": Case("G3", TINY, 1, (Size(2, 20, 1), Size(3, 20, 1)), runs=1)},
              ["G3", "G3"]),
    "idle": (idle, {"BATCH": 2, "CONTEXT": 20, "STEPS": 6, "WATCHED_STEPS": 3, "KV_TOKENS": 512, "LLAMA_135M": TINY},
             ["G4", "G4-share", "fact", "fact", *["profile"] * 3, "G8", "G8-overlap"]),
    "profile": (step_profile, {"BATCH": 2, "CONTEXT": 20, "STEPS": 6, "WATCHED_STEPS": 3, "KV_TOKENS": 512,
                               "QWEN3_600M": TINY}, ["profile"] * 3),
    "headline": (headline, {"COUNT": 2, "headline_workload": lambda: DRY, "QWEN3_600M": TINY},
                 ["G6", "G6-share", "G6-peer"]),
    "latency": (latency, {"COUNT": 4, "RATE": 100.0, "PROMPTS": Lengths(8, 0.3, 4, 12), "LLAMA_1B": TINY,
                          "OUTPUTS": Lengths(6, 0.3, 4, 8)}, ["G7"]),
    "published": (published_workloads, {"BATCH": 2, "CELLS": ((4, 3, 9.0, 1.0), (8, 3, 9.0, 1.0)), "LLAMA_8B": TINY},
                  ["G9"]),
    "facts": (facts, {"BATCH": 2, "CONTEXT": 20, "STEPS": 3, "LLAMA_135M": TINY}, ["fact"] * 4),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_gives_records_that_the_report_can_hold(name, tmp_path, monkeypatch):
    module, sizes, goals = SECTIONS[name]
    for constant, value in sizes.items():
        monkeypatch.setattr(module, constant, value)
    make = engines.TrtGptModelOptionalParams
    monkeypatch.setattr(engines, "TrtGptModelOptionalParams", lambda kv_cache_config, **options: make(
        kv_cache_config=dataclasses.replace(kv_cache_config, max_tokens=512), cpu_compile=False, **options))
    clock = DryClock(torch.device("cpu"))
    clock.is_dry = False
    (tmp_path / "peer.json").write_text(json.dumps(
        {"peer": "another", "workload": "headline.json", "output_tok_s": 7.0} | DRY))
    bench = Bench(clock, torch.float32, tmp_path, tmp_path,
                  rates={"copy_bytes_s": 1e10, "read_bytes_s": 1e10, "matmul_flop_s": 1e11})
    run = decode_steps.run_large if name == "large" else module.run
    lines = [record.line(HEADER, dry=False) for record in run(bench)]
    for line in lines:
        check(line)
        assert line["status"] == "measured" and "graphs" not in line["case"].partition(",")[0].partition(":")[0]
    assert [line["goal"] for line in lines] == goals

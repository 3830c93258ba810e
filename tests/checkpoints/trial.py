"""Reads checkpoints with batch_manager, and checks the outcomes against the verdicts of the `rules` modules."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batch_manager import GptManager, KvCacheConfig, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType
from batch_manager.adapters import _folder, _read_peft_folder, projections_of
from batch_manager.errors import ModelLoadError
from batch_manager.models import loading, registry
from batch_manager.models.end_ids import read_end_ids
from batch_manager.models.spec import ModelSpec
from batch_manager.weights.checkpoint import open_checkpoint

from . import adapter_cases, adapter_rules, gguf_rules
from .cases import ADAPTER, GGUF, case
from .config_rules import expected_tensors
from .entries import Bytes, Entry, Place
from .gguf_cases import ARCHITECTURE_AND_KIND, FILE, honest
from .rules import Bad, Good, judge
from .watch import Resources, Stopwatch, audited, differences, forget_peak

WHOLE_EVERY = 400                     # every 400th seed is also loaded by the whole constructor
LARGEST_SHOWN = 4000                  # characters of a message; a path alone may have 4,096
LARGE = 2**19                         # bytes; larger checkpoints may take the memory of their files
SMALL_POSITIONS = 4096                # with more positions, the tables of the model need much memory
PORTION = 50
SECONDS_TO_LEAVE = 5.0
HONEST_GGUF = frozenset(honest(architecture, kind, untied).to_bytes() for architecture, kind in ARCHITECTURE_AND_KIND
                        for untied in (False, True))
WARMING = ("cut-5", *map(str, range(20)), *(f"gguf-{seed}" for seed in range(60)),
           *(f"adapter-{seed}" for seed in range(20)))


@dataclass(slots=True)
class Counts:
    """Results of trying many checkpoints.

    files    number of checkpoints
    whole    number of checkpoints that were also passed to the constructor of GptManager
    ends     number of checkpoints by verdict of the rules: "good", "bad" or "undecided"
    failed   (key, descriptions of the errors of batch_manager) of each checkpoint with errors
    """

    files: int = 0
    whole: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        self.files += other.files
        self.whole += other.whole
        self.ends += other.ends
        self.failed += other.failed


class Bench:
    """Tries checkpoints one after another in one folder: writes them, reads them and checks the outcomes."""

    def __init__(self, path: Path) -> None:
        self.place = Place(path)
        for architecture in registry.known_architectures():        # imports and allocations that happen once
            registry.find_model(architecture)
        self.projections = {}                                      # of the models that adapters are for
        for name, config in adapter_cases.MODELS.items():
            self.place.become({"config.json": Bytes(json.dumps(config).encode())})
            self.projections[name] = projections_of(path)
        for seed in WARMING:
            self.place.become(case(seed))
            self._try(seed, whole=True)

    def run(self, keys: list[str]) -> Counts:
        """Try the checkpoints with these keys, and measure threads, open files and memory after every PORTION of them.

        A portion that exceeds the limits is measured again, one checkpoint at a time. If a portion has large
        checkpoints, only these are measured.
        """
        counts = Counts()
        for start in range(0, len(keys), PORTION):
            self._portion(keys[start : start + PORTION], counts)
        return counts

    def _portion(self, keys: list[str], counts: Counts) -> None:
        wrong, large = {}, []
        forget_peak()
        before = Resources.now()
        for key in keys:
            files = case(key)
            self.place.become(files)
            seed = key.removeprefix(GGUF).removeprefix(ADAPTER)
            whole = seed.isdigit() and int(seed) % WHOLE_EVERY == 0
            end, wrong[key] = self._try(key, whole, files)
            large += [key] if num_bytes(files) > LARGE else []
            counts.ends[end] += 1
            counts.whole += whole
        for key in keys if not large and differences(before, Resources.now(), 0) else large:
            wrong[key] += self.resources(key)
        counts.files += len(keys)
        counts.failed += [(key, found) for key, found in wrong.items() if found]

    def resources(self, key: str) -> list[str]:
        """Describe the threads and open files that reading this checkpoint leaves, and the excess memory it takes."""
        files = case(key)
        self.place.become(files)
        forget_peak()
        before = Resources.now()
        outcome = self.outcome_of(key)
        text = str(outcome) if isinstance(outcome, Exception) else ""
        del outcome
        return [f"{found}; {text}" for found in differences(before, Resources.now(), num_bytes(files))]

    def _try(self, key: str, whole: bool, files: Mapping[str, Entry] | None = None) -> tuple[str, list[str]]:
        files = case(key) if files is None else files
        path = self.path_of(key)
        with audited(self.place.path) as deeds:
            watch = Stopwatch()
            outcome = self.outcome_of(key)
            slow = watch.too_long()
        if key.startswith(ADAPTER):
            verdict = adapter_rules.judge(adapter_cases.damaged(int(key.removeprefix(ADAPTER)))[0], files)
            return named(verdict), [*deeds, *slow, *compare_adapter(path, verdict, outcome)]
        if path.name == FILE:
            end, wrong = self._of_gguf(path, outcome)
            return end, [*deeds, *slow, *wrong, *(whole_way(path, outcome) if whole else [])]
        verdict = judge(files)
        wrong = [*deeds, *slow, *compare(self.place.path, verdict, outcome)]
        if whole:
            wrong += whole_way(self.place.path, outcome)
        return named(verdict), wrong

    def outcome_of(self, key: str) -> Any:
        """Read what the files of `key` are. Returns what was read, or the exception that reading raised."""
        if not key.startswith(ADAPTER):
            return outcome_of(self.path_of(key))
        try:
            model = adapter_cases.damaged(int(key.removeprefix(ADAPTER)))[0]
            return _read_peft_folder(_folder(self.place.path), self.projections[model])
        except BaseException as fault:
            return fault.with_traceback(None)

    def path_of(self, key: str) -> Path:
        """Return the path that is passed to batch_manager as the model: the folder, or the GGUF file in it."""
        return self.place.path / FILE if key.startswith(GGUF) else self.place.path

    @staticmethod
    def _of_gguf(path: Path, outcome: Any) -> tuple[str, list[str]]:
        end, wrong = gguf_rules.wrong(path.read_bytes(), HONEST_GGUF, outcome)
        if isinstance(outcome, ModelLoadError):
            wrong += compare_refusal(path, None, outcome)
        return end, wrong


def named(verdict: Good | Bad | None) -> str:
    return "undecided" if verdict is None else type(verdict).__name__.lower()


def num_bytes(files: Mapping[str, Entry]) -> int:
    return sum(len(entry.data) for entry in files.values() if isinstance(entry, Bytes))


def outcome_of(folder: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]] | BaseException:
    """Read a checkpoint with batch_manager, without building layers.

    Returns (ModelSpec, {name: tensor}), or the exception that reading raised.
    """
    try:
        opened = open_checkpoint(folder)
        _, spec, _ = loading.class_and_spec(opened)
        if folder.name == FILE:
            read_end_ids(opened, spec.vocab_size)
        weights = opened.weights(torch.device("cpu"), torch.float32)
        numbers = {name: getattr(spec, name) for name in ModelSpec.__slots__}
        tensors = {name: weights.tensor(name, shape)
                   for name, shape in expected_tensors(numbers, prefixed=True)}
        if spec.tie_word_embeddings:
            weights.tied("lm_head.weight", next(iter(tensors)))
        weights.finish(registry.find_model(spec.architecture).harmless_tensors)
        return spec, tensors
    except BaseException as fault:
        return fault.with_traceback(None)


def compare(folder: Path, verdict: Good | Bad | None, outcome: Any) -> list[str]:
    """Describe what is wrong with the outcome, given the verdict of the rules."""
    if not isinstance(outcome, tuple):
        return compare_refusal(folder, verdict, outcome)
    if isinstance(verdict, Bad):
        return [f"was read, although {verdict.faults[:5]} is wrong"]
    if verdict is None:
        return []
    spec, tensors = outcome
    found = {name: tuple(layer.window for layer in spec.attention) if name == "windows" else getattr(spec, name)
             for name in verdict.numbers if name != "theta"}
    wrong = [f"{name} is {value!r:.100}, should be {verdict.numbers[name]!r:.100}" for name, value in found.items()
             if (value, type(value)) != (verdict.numbers[name], type(verdict.numbers[name]))]
    if any((layer.scale, layer.softcap) != (spec.head_size**-0.5, None) for layer in spec.attention):
        wrong.append(f"attention is {spec.attention!r:.100}, should be scaled by the head size alone")
    theta = verdict.numbers.get("theta")
    if theta is not None and spec.rotary.theta != theta:
        wrong.append(f"the base of the frequencies is {spec.rotary.theta}, should be {theta}")
    if tensors.keys() != verdict.tensors.keys():
        return [*wrong, "other tensors than the file has"]
    return wrong + [f"{name} has other values than the file" for name, tensor in tensors.items()
                    if not np.array_equal(tensor.numpy(), verdict.tensors[name], equal_nan=True)]


def compare_adapter(folder: Path, verdict: Good | Bad | None, outcome: Any) -> list[str]:
    if isinstance(outcome, BaseException):
        return compare_refusal(folder, verdict, outcome)
    if isinstance(verdict, Bad):
        return [f"was read, although {verdict.faults[:5]} is wrong"]
    if verdict is None:
        return []
    rows = {f"{module} {layer}": row.float().numpy() for row, (module, layer, _) in zip(
        outcome.lora_weights, outcome.lora_config.tolist())}
    if rows.keys() != verdict.tensors.keys() or len(rows) != len(outcome.lora_config):
        return ["other modules than the file has"]
    return [f"{name} has other values than the file" for name, row in verdict.tensors.items()
            if not np.array_equal(rows[name][: len(row)], row) or rows[name][len(row) :].any()]


def compare_refusal(folder: Path, verdict: Good | Bad | None, refusal: BaseException) -> list[str]:
    text = str(refusal)
    if not isinstance(refusal, ModelLoadError):
        return [f"raised {refusal!r:.300} instead of a ModelLoadError"]
    wrong = []
    if isinstance(verdict, Good):
        wrong.append(f"nothing is wrong with it, and it was refused: {text:.500}")
    if not text.isprintable() or len(text) > LARGEST_SHOWN:
        wrong.append(f"the message has {len(text):,} characters: {text!r:.300}")
    if str(folder) not in text:
        wrong.append(f"the message does not say which file: {text:.300}")
    elif isinstance(verdict, Bad) and not any(file in text and name in text for file, name in verdict.faults):
        wrong.append(f"the message names none of {verdict.faults[:5]}: {text:.300}")
    return wrong


def whole_way(folder: Path, outcome: Any) -> list[str]:
    """Load a checkpoint with the constructor of GptManager, and describe how this differs from `outcome`.

    It must raise an exception of the same class, or make an engine that shuts down in time and leaves no threads.
    """
    if isinstance(outcome, tuple) and not 2 <= outcome[0].max_position_embeddings <= SMALL_POSITIONS:
        return []
    before = Resources.now().threads
    try:
        manager = GptManager(
            folder, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION, lambda _: [],
            lambda *_: None, optional_params=TrtGptModelOptionalParams(
                kv_cache_config=KvCacheConfig(max_tokens=64, tokens_per_block=16), max_batch_size=2, max_num_tokens=16,
                max_seq_len=2, device="cpu", dtype="float32"))
    except BaseException as fault:
        if isinstance(outcome, tuple):
            return [f"the reader took it, the constructor raised {fault!r:.300}"]
        if type(fault) is not type(outcome):
            return [f"the reader said {outcome!r:.300}, the constructor {fault!r:.300}"]
        return _threads_beyond(before)
    ended = manager.shutdown(drain=True, timeout=20)
    if ended and isinstance(outcome, tuple):
        return _threads_beyond(before)
    return [f"the constructor took it, the reader said {outcome!r:.300}"]


def _threads_beyond(before: int) -> list[str]:
    """Wait until the process has `before` threads again. Describe the leftover threads if it takes too long.

    A joined thread may need a moment to leave the process.
    """
    deadline = time.monotonic() + SECONDS_TO_LEAVE
    while (now := Resources.now().threads) != before and time.monotonic() < deadline:
        time.sleep(0.001)
    return [] if now == before else [f"the constructor left {now - before} threads"]

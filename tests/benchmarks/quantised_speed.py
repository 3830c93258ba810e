"""Measure steps of quantised GGUF files beside llama.cpp and OpenVINO: the same files, threads and hour.

    python -m tests.benchmarks.quantised_speed FILE.gguf ... --llama-cpp PYTHON --openvino PYTHON --out result.json

PYTHON is an interpreter that has llama-cpp-python, or openvino-genai. tests.benchmarks.random_gguf writes files of any
size. This engine runs with each of --quantized-activations. For each file, the engines run in turn in new processes,
--rounds times. In a process, 1, 8 and 32 requests (--requests) of random tokens start at once, each group
after the one before it ended, and each twice, of which the second counts. All outputs are greedy, without an end id.

Prints a table in Markdown. The time of a step is the median time between tokens while all requests generate, or the
processor time with --processor-time: of one thread, it counts no waiting on a busy machine. A cell has the median of
the rounds, the lowest and the highest. A ratio is the other engine's time / the time of this one in the same round:
above 1, this one is faster. The last column is the time of reading the file's bytes, at the rate at which the same
threads add up 256 MiB of floats in that process, / the time of a step. An engine that cannot load a file has empty
cells.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

OWN, OTHERS = ("none", "int8"), ("llama.cpp", "openvino")      # this engine, by its quantized_activations
VOCABULARY = 30_000                  # random tokens of prompts, below the vocabulary of every file
Stamps = list[list[float]]           # times of the tokens of each request


def prompts_of(count: int, length: int) -> list[list[int]]:
    return np.random.default_rng(count).integers(100, VOCABULARY, (count, length)).tolist()


def batch_manager(path: str, options: argparse.Namespace) -> Iterator[Stamps]:
    import torch

    from batch_manager import (
        GptManager,
        InferenceRequest,
        KvCacheConfig,
        SchedulerPolicy,
        TrtGptModelOptionalParams,
        TrtGptModelType,
    )
    from tests.harness.client import Client

    torch.set_num_threads(options.threads)
    summed = torch.ones(64 << 20)
    read_rate = summed.nbytes / min(measured(summed.sum) for _ in range(6))
    del summed
    most = max(options.requests)

    client, stamps = Client(), {}
    client.on_send = lambda request_id, response: stamps[request_id].append(options.clock())
    blocks = most * -(-(options.input + options.output + 1) // 64)
    params = TrtGptModelOptionalParams(
        device="cpu", num_threads=options.threads, max_batch_size=most, dtype=options.dtype,
        quantized_activations=None if options.run == "none" else options.run,
        kv_cache_config=KvCacheConfig(max_tokens=64 * blocks, enable_block_reuse=False))
    with GptManager(path, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.GUARANTEED_NO_EVICT, client.get,
                    client.send, optional_params=params):
        yield [[read_rate]]
        for group in options.requests:
            for _ in range(2):
                first = len(stamps)
                prompts = prompts_of(group, options.input)
                stamps |= {first + number: [] for number in range(group)}
                client.pending += [InferenceRequest(first + number, {
                    "input_ids": np.array([prompt], np.int32), "streaming": np.array([[True]]),
                    "request_output_len": np.array([[options.output]], np.int32)}, is_streaming=True)
                    for number, prompt in enumerate(prompts)]
                client.wait_for_finals(*range(first, first + group))
            yield [stamps[number] for number in range(first, first + group)]


def llama_cpp(path: str, options: argparse.Namespace) -> Iterator[Stamps]:
    import ctypes

    import llama_cpp.llama_cpp as llama

    silent = llama.llama_log_callback(lambda level, text, user: None)
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    how = llama.llama_model_default_params()
    how.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(path.encode(), how)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    yield []
    for group in options.requests:
        how = llama.llama_context_default_params()
        how.n_seq_max, how.n_ctx = group, group * 256 * -(-(options.input + options.output) // 256)
        how.n_batch = how.n_ubatch = 512
        how.n_threads = how.n_threads_batch = options.threads
        how.flash_attn_type, how.no_perf = 1, True
        context = llama.llama_init_from_model(model, how)
        batch = llama.llama_batch_init(512, 0, 1)

        def decode(entries: Sequence[tuple[int, int, int, bool]], context: object = context,
                   batch: object = batch) -> np.ndarray:
            """Run (token, position, sequence, whether its logits count) and return the most probable next tokens."""
            for at, (token, position, sequence, counts) in enumerate(entries):
                batch.token[at], batch.pos[at], batch.logits[at] = token, position, counts
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.n_tokens, outputs = len(entries), sum(entry[3] for entry in entries)
            assert llama.llama_decode(context, batch) == 0
            return np.ctypeslib.as_array(llama.llama_get_logits(context), (outputs, vocabulary)).argmax(1)

        for _ in range(2):
            stamps, last = [[] for _ in range(group)], [0] * group
            for sequence, prompt in enumerate(prompts_of(group, options.input)):
                entries = [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
                last[sequence] = int(decode(entries)[0])
                stamps[sequence].append(options.clock())
            for at in range(options.input, options.input + options.output - 1):
                last = decode([(token, at, sequence, True) for sequence, token in enumerate(last)]).tolist()
                for times in stamps:
                    times.append(options.clock())
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
        yield stamps
        llama.llama_batch_free(batch)
        llama.llama_free(context)


def openvino(path: str, options: argparse.Namespace) -> Iterator[Stamps]:
    import openvino
    import openvino_genai

    how = openvino_genai.SchedulerConfig()
    how.cache_size, how.max_num_seqs, how.max_num_batched_tokens = 1, max(options.requests), 512
    how.enable_prefix_caching = False
    engine = openvino_genai.ContinuousBatchingPipeline(
        path, how, "CPU", {"INFERENCE_NUM_THREADS": options.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"})
    wanted = openvino_genai.GenerationConfig()
    wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = options.output, True, False
    yield []
    for group in options.requests:
        for _ in range(2):
            handles = [engine.add_request(number, openvino.Tensor(np.array([prompt])), wanted)
                       for number, prompt in enumerate(prompts_of(group, options.input))]
            stamps: Stamps = [[] for _ in range(group)]
            while engine.has_non_finished_requests():
                engine.step()
                now = options.clock()
                for handle, times in zip(handles, stamps):
                    while handle.can_read():
                        times += [now for found in handle.read().values() for _ in found.generated_ids]
        yield stamps


def measured(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run(path: str, options: argparse.Namespace) -> dict[str, object]:
    """Return the load time in seconds, the memory of this process, and ms a step and tokens a second of each group."""
    options.clock = time.process_time if options.processor_time else time.perf_counter
    began = time.perf_counter()
    groups = {"llama.cpp": llama_cpp, "openvino": openvino}.get(options.run, batch_manager)(path, options)
    found = {"read_rate": sum(map(sum, next(groups))), "load_s": time.perf_counter() - began, "step_ms": {},
             "tokens_s": {}}
    status = Path("/proc/self/status").read_text()
    found["loaded_mb"] = int(status.split("VmRSS:")[1].split()[0]) / 1024
    for group, stamps in zip(options.requests, groups):
        assert [len(times) for times in stamps] == [options.output] * group
        starts, end = max(times[0] for times in stamps), max(times[-1] for times in stamps)
        gaps = [after - before for times in stamps for before, after in zip(times, times[1:]) if before >= starts]
        found["step_ms"][str(group)] = median(gaps) * 1e3
        found["tokens_s"][str(group)] = group * (options.output - 1) / (end - starts) if group == 1 else len(gaps) / (
            end - starts)
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{median(values):.{digits}g} ({min(values):.{digits}g}-{max(values):.{digits}g})"


def table(results: dict[str, dict[str, list[dict]]], requests: Sequence[int]) -> Iterator[str]:
    yield "| file | activations | requests | ms a step | llama.cpp | ratio | OpenVINO | ratio | reading / step |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for path, of_engine in results.items():
        for own, group in ((own, group) for own in OWN if own in of_engine for group in map(str, requests)):
            runs = of_engine[own]
            cells = [Path(path).name, "exact" if own == "none" else own, group,
                     spread([each["step_ms"][group] for each in runs])]
            for engine in OTHERS:
                other = [each for each in of_engine.get(engine, ()) if group in each["step_ms"]]
                cells += [spread([each["step_ms"][group] for each in other]),
                          spread([there["step_ms"][group] / here["step_ms"][group] for here, there in zip(runs, other)])
                          ] if other else ["", ""]
            shares = [os.path.getsize(path) / each["step_ms"][group] * 1e3 / each["read_rate"] for each in runs]
            cells.append(spread(shares, 2) if group == "1" else "")
            yield f"| {' | '.join(cells)} |"
        for engine, runs in of_engine.items():
            rate = median(each["read_rate"] for each in runs) / 1e9
            yield (f"<!-- {Path(path).name} {engine}: {median(each['loaded_mb'] for each in runs):.0f} MB after "
                   f"loading, {median(each['load_s'] for each in runs):.1f} s to load"
                   + (f", read at {rate:.1f} GB/s" if rate else "") + " -->")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of each output")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto", help="of this engine")
    parser.add_argument("--quantized-activations", nargs="+", choices=OWN, default=["none"], help="of this engine")
    parser.add_argument("--processor-time", action="store_true", help="instead of elapsed time")
    parser.add_argument("--out", help="file for the figures of all runs")
    parser.add_argument("--run", choices=OWN + OTHERS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(run(options.files[0], options)), flush=True)
        os._exit(0)                                        # engines of others can crash while Python ends
    pythons = dict.fromkeys(options.quantized_activations, sys.executable) | {
        engine: python for engine, python in zip(OTHERS, (options.llama_cpp, options.openvino)) if python}
    results: dict[str, dict[str, list[dict]]] = {path: {} for path in options.files}
    names = ("rounds", "input", "output", "threads", "dtype")
    rest = [each for name in names for each in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    rest += ["--requests", *map(str, options.requests), *["--processor-time"] * options.processor_time]
    for number in range(options.rounds):
        for path in options.files:
            for engine in list(pythons)[:: 1 if number % 2 == 0 else -1]:
                command = [pythons[engine], str(Path(__file__)), path, "--run", engine, *rest]
                here = {"PYTHONPATH": str(Path(__file__).parents[2])} if engine in OWN else {}
                found = subprocess.run(command, capture_output=True, text=True, env=os.environ | here)
                if found.returncode and engine in OWN:
                    raise SystemExit(f"{' '.join(command)} failed:\n{found.stderr[-2000:]}")
                if found.returncode:                       # it cannot load the file; its cells are empty
                    print(f"{Path(path).name} {engine} failed:\n{found.stderr[-500:]}", file=sys.stderr, flush=True)
                    continue
                result = json.loads(found.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]}
                results[path].setdefault(engine, []).append(result)
                steps = ", ".join(f"{group}: {value:.2f}" for group, value in result["step_ms"].items())
                print(f"round {number} {Path(path).name} {engine}: {steps} ms; load {result['load']:.1f}",
                      file=sys.stderr, flush=True)
                if options.out:
                    Path(options.out).write_text(json.dumps({
                        "machine": platform.processor() or platform.machine(), "results": results}, indent=1))
    print("\n".join(table(results, options.requests)))


if __name__ == "__main__":
    main()

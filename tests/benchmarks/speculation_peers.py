"""Measure prompt look-up of this engine, llama.cpp and OpenVINO GenAI: the same file, prompts, threads and hour.

    python examples/get_smollm2.py && python -m tests.benchmarks.speculation_peers FILE.gguf --threads 1 \\
        --llama-cpp PYTHON --openvino PYTHON

PYTHON is an interpreter that has llama-cpp-python, or openvino-genai. The prompts are those of speculation.py, with the
file's chat template; all outputs are greedy, of up to --tokens tokens. The engines run in turn in new processes,
--rounds times. In a process each prompt is answered without drafts and with up to 7, in turn, and twice, of which the
second counts. llama.cpp is driven by llama-cpp-python (LlamaPromptLookupDecoding), OpenVINO by its LLMPipeline
(prompt_lookup), and this engine by `LLM`. With --threads 1, times are processor times of the process.

Prints a table in Markdown: medians of the rounds, the lowest and the highest. `ratio` is tokens per second with drafts
relative to without. `this / other` compares tokens per second with drafts in a round: above 1, this one is faster.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

ENGINES, KINDS, DRAFTS, LONGEST = ("batch_manager", "llama.cpp", "openvino"), ("repeats", "held_out", "open"), 7, 4
Answer = Callable[[list[int]], int]          # answers a prompt, and returns the number of tokens of its output


def batch_manager(path: str, options: argparse.Namespace) -> Iterator[Answer]:
    from batch_manager import SpeculativeConfig
    from batch_manager.extras.llm import LLM

    for config in (None, SpeculativeConfig()):
        engine = LLM(path, dtype=options.dtype, num_threads=options.threads, device="cpu", max_batch_size=4,
                     speculative_config=config)
        yield lambda prompt, engine=engine: len(
            engine.generate([prompt], max_tokens=options.tokens, temperature=0)[0].tokens)


def llama_cpp(path: str, options: argparse.Namespace) -> Iterator[Answer]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    for drafts in (None, LlamaPromptLookupDecoding(max_ngram_size=LONGEST, num_pred_tokens=DRAFTS)):
        engine = Llama(path, n_ctx=2048, n_threads=options.threads, n_threads_batch=options.threads, n_gpu_layers=0,
                       flash_attn=True, draft_model=drafts, verbose=False)

        def answer(prompt: list[int], engine: Llama = engine) -> int:
            engine.reset()
            count = 0
            for token in engine.generate(prompt, temp=0.0, reset=False):
                if token == engine.token_eos() or count == options.tokens:
                    break
                count += 1
            return count
        yield answer


def openvino(path: str, options: argparse.Namespace) -> Iterator[Answer]:
    import numpy as np
    import openvino
    import openvino_genai

    how = openvino_genai.SchedulerConfig()
    how.cache_size, how.enable_prefix_caching = 1, False         # a prompt comes twice, and is computed twice
    for looks_up in (False, True):
        engine = openvino_genai.LLMPipeline(path, "CPU", scheduler_config=how, prompt_lookup=looks_up,
                                            INFERENCE_NUM_THREADS=options.threads, PERFORMANCE_HINT="LATENCY")
        wanted = engine.get_generation_config()
        wanted.max_new_tokens, wanted.do_sample = options.tokens, False
        if looks_up:
            wanted.num_assistant_tokens, wanted.max_ngram_size = DRAFTS, LONGEST
        yield lambda prompt, engine=engine, wanted=wanted: len(
            engine.generate(openvino.Tensor(np.array([prompt], np.int64)), wanted).tokens[0])


def run(engine: str, path: str, options: argparse.Namespace, prompts: dict[str, list[list[int]]]) -> dict[str, object]:
    """Return the tokens and the seconds of each kind of prompts, without drafts and with them."""
    both = [*{"batch_manager": batch_manager, "llama.cpp": llama_cpp, "openvino": openvino}[engine](path, options)]
    clock, found = process_time if options.threads == 1 else perf_counter, {}
    for kind, texts in prompts.items():
        found[kind] = [[0, 0.0], [0, 0.0]]
        for prompt in texts:
            for is_second in (False, True):
                for answer, sums in zip(both, found[kind]):
                    began = clock()
                    count = answer(prompt)
                    if is_second:
                        sums[0] += count
                        sums[1] += clock() - began
    return found


def prompts_of(path: str, plain: bool, most: int | None) -> dict[str, list[list[int]]]:
    """Return the prompts of each kind as token ids, which all engines get."""
    from batch_manager.extras.text_requests import Prompts
    from tests.benchmarks.speculation import PROMPTS

    ids = Prompts(path).ids
    return {kind: [ids(text if plain else [{"role": "user", "content": text}]) for text in PROMPTS[kind][:most]]
            for kind in KINDS}


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def table(results: dict[str, list[dict]]) -> Iterator[str]:
    yield "| prompts | engine | tokens/s without drafts | with | ratio | this / other |"
    yield "|---|---|---|---|---|---|"
    for kind in KINDS:
        own = [tokens / seconds for tokens, seconds in (each[kind][1] for each in results["batch_manager"])]
        for engine, runs in results.items():
            rates = [[tokens / seconds for tokens, seconds in each[kind]] for each in runs]
            cells = [kind, engine, spread([rate[0] for rate in rates]), spread([rate[1] for rate in rates]),
                     spread([after / before for before, after in rates]),
                     "" if engine == "batch_manager" else spread([here / there[1] for here, there in zip(own, rates)])]
            yield f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help=".gguf file with a chat template")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an output")
    parser.add_argument("--prompts", type=int, help="of each kind (all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="of this engine")
    parser.add_argument("--plain", action="store_true", help="prompts as text, for a file without a chat template")
    parser.add_argument("--run", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(run(options.run, options.file, options, json.load(sys.stdin))), flush=True)
        os._exit(0)                                        # engines of others can crash while Python ends
    pythons = {"batch_manager": sys.executable, "llama.cpp": options.llama_cpp, "openvino": options.openvino}
    prompts = json.dumps(prompts_of(options.file, options.plain, options.prompts))
    rest = ["--threads", str(options.threads), "--tokens", str(options.tokens), "--dtype", options.dtype]
    results: dict[str, list[dict]] = {engine: [] for engine in ENGINES if pythons[engine]}
    for number in range(options.rounds):
        for engine in [*results][:: 1 if number % 2 == 0 else -1]:
            here = {"PYTHONPATH": str(Path(__file__).parents[2])} if engine == "batch_manager" else {}
            found = subprocess.run([pythons[engine], str(Path(__file__)), options.file, "--run", engine, *rest],
                                   input=prompts, capture_output=True, text=True, env=os.environ | here)
            if found.returncode:
                raise SystemExit(f"{engine} failed:\n{found.stderr[-2000:]}")
            results[engine].append(json.loads(found.stdout.splitlines()[-1]))
            print(f"round {number} {engine}: {results[engine][-1]}; load {os.getloadavg()[0]:.1f}", file=sys.stderr,
                  flush=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()

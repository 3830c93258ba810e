"""Chats go on in an engine that starts on the prompt cache of one that was killed by SIGKILL.

    python -m tests.campaigns.restarted_chats [--chats 200] [--turns 6] [--quantization int8]

The first engine, in a process of its own, serves all turns of all chats, several at once, and is killed when the last
answer has arrived, so while it saves. A second engine starts on the directory and serves one further turn of each
chat. All are deterministic. Tokens and log-probabilities must be, bit by bit, those of an engine without a directory.
Prints how many tokens of the prompts came from the directory. Exit status 1: some differ, or nothing was loaded.
"""

import argparse
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
MODEL = Path(__file__).parents[2] / "examples/models/austen-4m"
VOCABULARY, SAID, ANSWERED = 4096, 24, 16       # tokens of a turn
Chats = list[list[int]]


def engine(folder: str | None, quantization: str | None) -> Any:
    from tests.integration.test_contexts_from_another_engine import Engine

    kv = {"tokens_per_block": 16, "max_tokens": 32768}
    if folder is not None:
        kv |= {"disk_cache_path": folder, "disk_cache_size": 1 << 30, "disk_min_tokens": 16}
    return Engine(MODEL, kv=kv, max_batch_size=16, deterministic=True, quantization=quantization)


def turn(made: Any, chats: Chats, number: int) -> list[Any]:
    """Add what is said in a turn and the answers to the chats. Returns the final responses."""
    from tests.harness.requests import request

    for index, chat in enumerate(chats):
        draw = Random(f"{index} {number}")
        chat += [draw.randrange(VOCABULARY) for _ in range(SAID)]
    finals = made.answer([request(number * len(chats) + index, chat, ANSWERED, return_log_probs=True)
                          for index, chat in enumerate(chats)])
    for chat, final in zip(chats, finals, strict=True):
        chat[:] = final.tokens()
    return finals


def serve(pipe: Any, folder: str, options: argparse.Namespace) -> None:
    made, chats = engine(folder, options.quantization), [[] for _ in range(options.chats)]
    for number in range(options.turns):
        turn(made, chats, number)
    pipe.send(chats)
    pipe.recv()                                  # until it is killed


def main() -> int:
    from tests.integration.test_contexts_from_another_engine import differences

    parser = argparse.ArgumentParser()
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--quantization")
    options, began = parser.parse_args(), perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = get_context("spawn").Pipe()
        process = get_context("spawn").Process(target=serve, args=(theirs, folder, options))
        process.start()
        theirs.close()
        chats = ours.recv()
        process.kill()
        process.join()
        finals, figures = [], []
        for directory in (None, folder):
            made = engine(directory, options.quantization)
            finals.append(turn(made, [list(chat) for chat in chats], options.turns))
            figures.append(made.end())
    wrong = len({number for number, _ in differences(*finals, is_exact=True)})
    num_tokens = sum(map(len, chats)) + SAID * len(chats)
    loaded = figures[1]["External Hit Tokens"]
    print(f"{len(chats)} chats of {options.turns} turns, then SIGKILL; in the next turn {loaded:,} of {num_tokens:,} "
          f"tokens of prompts came from the directory; {wrong} chats differ; {perf_counter() - began:.0f} s")
    return int(bool(wrong) or not loaded)


if __name__ == "__main__":
    sys.exit(main())

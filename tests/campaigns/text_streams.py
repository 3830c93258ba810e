"""Random texts through TextStream: tests/extras/test_text.py with more seeds.

    python tests/campaigns/text_streams.py --first-seed 0 --texts 10000
    python tests/campaigns/text_streams.py --time

Consecutive seeds use the tokenizers in turn. The program prints counts of events and each seed that failed. Results are
recorded in tests/CAMPAIGNS.md. With --time, it prints only the microseconds per pushed token, after few tokens and
after many.
"""

import argparse
import logging
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tokenizers.decoders import DecodeStream

from batch_manager.extras.text import TextStream
from tests.extras.text_streams import DECODED_AT_THE_END, TOKENIZERS, corpus, run, tokenizer_named


def microseconds() -> None:
    """Print the microseconds per pushed token, after 1,000 and after 100,000 tokens, for each tokenizer.

    Each figure is the median of seven runs of 2,000 tokens.
    """
    ways = {
        "TextStream": lambda tokenizer: TextStream(tokenizer).push,
        "with two stop strings": lambda tokenizer: TextStream(tokenizer, stop=["the dog", "</answer>"]).push,
        "DecodeStream": lambda tokenizer: partial(DecodeStream(skip_special_tokens=True).step, tokenizer),
    }
    for name in TOKENIZERS:
        tokenizer = tokenizer_named(name)
        some = tokenizer.encode(" ".join(corpus()), add_special_tokens=False).ids
        tokens = (some * (103_000 // len(some) + 1))[:103_000]
        for way, make in ways.items() if name not in DECODED_AT_THE_END else ():
            taken = {1000: [], 100_000: []}
            for _ in range(7):
                for before, seconds in taken.items():
                    push = make(tokenizer)
                    for start in range(0, before, 100):
                        push(tokens[start: start + 100])
                    began = time.perf_counter()
                    for token in tokens[before: before + 2000]:
                        push([token])
                    seconds.append((time.perf_counter() - began) / 2000 * 1e6)
            print(f"{name:12} {way:22}", *(f"{before:>8,}: {statistics.median(seconds):.2f} us"
                                           for before, seconds in taken.items()), flush=True)
        tokens = tokens[:3000]
        began = time.perf_counter()
        for end in range(2900, 3000):
            tokenizer.decode(tokens[:end])
        print(f"{name:12} decoding all of 2,900 tokens again: {(time.perf_counter() - began) / 100 * 1e6:.0f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=10_000, help="in all, of all tokenizers")
    parser.add_argument("--time", action="store_true", help="print microseconds a token, and run no random texts")
    options = parser.parse_args()
    if options.time:
        microseconds()
        return 0
    logging.getLogger("batch_manager").setLevel(logging.CRITICAL)    # warnings about tokenizers that cannot be cut

    seen, wrong, names = Counter(), 0, list(TOKENIZERS)
    last = options.first_seed + options.texts
    for number in range(options.first_seed, last):
        seed, name = number, names[number % len(names)]
        try:
            run(seed, name, seen)
        except Exception as error:
            wrong += 1
            print(f"seed {seed}, {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
    print(f"seeds {options.first_seed}..{last - 1} of {len(names)} tokenizers, {wrong} wrong")
    print(", ".join(f"{count:,} {what}" for what, count in sorted(seen.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

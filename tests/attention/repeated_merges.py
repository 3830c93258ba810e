"""Repeats decode attention that combines the parts of split sequences in one launch, and compares the bits.

    python -m tests.attention.repeated_merges [--repetitions 10000]

The programs of a launch hand their parts over to the last one; see triton_kernels/paged_attention_decode.py. A mistake
in the order of memory operations would show in some launches. Two inputs alternate in the same memory, so that a part
that comes too late is one of the other input. On a GPU, half of the launches are replays of a captured graph. Each
result must have the bits of the first launch with its input, and agree with a launch whose parts a second kernel
combines; the counters must be zero. Without a GPU: TRITON_INTERPRET=1 python -m tests.quick_interpreter
tests.attention.repeated_merges --repetitions 4. Exit status 0: all results are right; 1: one is not.
"""

import argparse
import json
import sys

import numpy as np
import torch

from batch_manager.triton_kernels.decode_work_list import decode_work_list
from batch_manager.triton_kernels.paged_attention_decode import paged_attention_decode

# Name, sequences, tokens of the longest, kv heads, query heads of each, head size, tokens of a block, pages of a part
CASES = [("one sequence", 1, 1024, 8, 4, 64, 64, 1), ("one long sequence", 1, 16_384, 8, 4, 128, 64, 4),
         ("ragged", 24, 3000, 8, 2, 128, 64, 2), ("many parts", 8, 8192, 2, 1, 128, 32, 1)]
DRY_CASES = [("one sequence", 1, 90, 2, 2, 16, 16, 1), ("ragged", 3, 70, 1, 3, 32, 16, 2)]
LAUNCHES = 50                              # of one graph
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


class Repeated:
    """One case: inputs, and functions that launch them.

    wrong   [] int64 on the device: number of launches whose results had other bits than the first
    """

    def __init__(self, device, sequences, longest, kv_heads, group, size, block, pages):
        draw = np.random.default_rng(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        lengths = draw.integers(longest // 2, longest, sequences)
        tables = -(-lengths // block)
        work_list, part_starts = decode_work_list(lengths, block, kv_heads, 1, pages_per_part=pages)
        assert part_starts[-1] > 0

        def send(array, dtype=torch.int32):
            return torch.from_numpy(np.asarray(array)).to(device, dtype)

        def normal(*shape):
            return send(draw.standard_normal(shape, np.float32), dtype)

        table = np.zeros((sequences, tables.max()), np.int32)
        blocks = draw.permutation(int(tables.sum()))
        for row, (count, end) in enumerate(zip(tables, tables.cumsum())):
            table[row, :count] = blocks[end - count : end]
        self.pool = normal(len(blocks), 2, kv_heads, block, size)
        self.heads = [[normal(sequences, count * kv_heads, size) for count in (group, 1, 1)] for _ in range(2)]
        self.steps = [send(table), send(lengths), send(work_list), send(part_starts), size**-0.5]
        self.counters = torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        separate = [self.launch(which, counters=None) for which in (0, 1)]
        self.first = [self.launch(which) for which in (0, 1)]
        self.difference = max(float((one - other).abs().max()) for one, other in zip(separate, self.first))
        self.is_right = self.difference <= TOLERANCE[dtype]

    def launch(self, which, **more):
        return paged_attention_decode(*self.heads[which], self.pool, *self.steps,
                                      **{"counters": self.counters, **more}).clone()

    def repeat(self, launches):
        for number in range(launches):
            found = self.launch(number % 2)
            self.wrong += (found != self.first[number % 2]).any() | self.counters.any()


def run(repetitions, device):
    """Run all cases, with `repetitions` launches in all, and return whether all results are right.

    Prints a line for each case.
    """
    results = []
    cases = CASES if device.type == "cuda" else DRY_CASES
    for name, *sizes in cases:
        case, left = Repeated(device, *sizes), -(-repetitions // len(cases))
        if device.type == "cuda":
            case.repeat(left // 2)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                case.repeat(LAUNCHES)
            for _ in range(-(-(left - left // 2) // LAUNCHES)):
                graph.replay()
        else:
            case.repeat(left)
        results.append(case.is_right and int(case.wrong) == 0)
        print(json.dumps({"case": name, "launches": left, "other_bits": int(case.wrong), "is_right": results[-1],
                          "difference_from_separate_merge": case.difference}), flush=True)
    return all(results)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10_000)
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():
        return 0 if run(options.repetitions, device) else 1


if __name__ == "__main__":
    sys.exit(main())

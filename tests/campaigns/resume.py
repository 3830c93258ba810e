"""Random requests with all sampling options, interrupted at a random token and resumed in another process.

    python tests/campaigns/resume.py --requests 500 [--seed 0]

Prints the number of compared requests and the ids of requests whose output differs. The exit status is 1 if any does.
"""

import argparse
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from batch_manager import InferenceRequest
from tests.resume.random_requests import cut, differences, drawn_tensors, outcomes, small_engine

MODEL = Path(__file__).parents[2] / "examples/models/austen-4m"


def elsewhere(requests: list[InferenceRequest]) -> dict:
    return outcomes(MODEL, requests, **small_engine())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    requests = [InferenceRequest(number, drawn_tensors(draw)) for number in range(options.requests)]
    whole = outcomes(MODEL, requests)
    refused = [text for *_, text in whole.values() if text]
    resumed = cut(requests, whole, draw)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        after = pool.submit(elsewhere, [request for request, _ in resumed.values()]).result()
    different = differences(whole, resumed, after)
    print(f"{len(requests)} requests, {len(refused)} refused, {len(resumed)} cut and resumed, "
          f"{len(different)} different")
    print(*(f"request {request_id}: {requests[request_id].input_tensors.keys()}" for request_id in different), sep="\n")
    return 1 if different or refused else 0


if __name__ == "__main__":
    raise SystemExit(main())

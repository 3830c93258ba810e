"""Compares all beams, in order, with those of transformers, for random models, requests and engine options.

    python tests/campaigns/same_beams_as_transformers.py --first-seed 0 --seconds 400

The program works like same_tokens_as_transformers.py. Beam searches of random width, length penalty and early stopping
run beside requests with one beam. The program counts three kinds of differences:

    ties    sequences differ and scores agree within 1e-5 at each index: two summation orders broke a tie differently
    apart   sequences are equal and scores differ by 1e-4 to 1e-3: random models may be that sensitive to rounding; the
            program prints the errors of both scores against float64
    wrong   any other difference

Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from batch_manager import FinishReason, KvCacheConfig
from tests.campaigns.same_tokens_as_transformers import random_config, random_engine
from tests.harness.client import StaggeredClient
from tests.harness.requests import request
from tests.harness.world import make_manager

TIE, APART, WRONG = 1e-5, 1e-4, 1e-3
EARLY_STOPPING = {1: True, 0: False, 2: "never"}


def run_seed(seed: int) -> Counter:
    """Run the random model and requests of one seed. Prints each difference and returns the counts."""
    draw, counts = random.Random(seed), Counter(models=1)
    torch.manual_seed(seed)
    config = random_config(draw)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    prompts = {i: [draw.randrange(config.vocab_size) for _ in range(draw.randrange(1, 50))]
               for i in range(draw.choice([3, 6, 10]))}
    lengths = {i: draw.randrange(1, 16) for i in prompts}
    options = {i: {"beam_width": draw.choice([1, 2, 3, 4, 8]), "end_id": likely_token(model, prompts[i], draw),
                   "len_penalty": draw.choice([0.0, 0.5, 1.0, 2.0]), "early_stopping": draw.choice([0, 1, 2])}
               for i in prompts}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        items = [request(i, prompts[i], lengths[i], return_log_probs=True, **options[i]) for i in prompts]
        client = StaggeredClient(items, draw, [0, 1, 3, 8])
        model_type, policy, params = random_engine(draw, prompts, lengths)
        size = params.kv_cache_config.tokens_per_block
        needed = max(most_blocks(len(prompts[i]), lengths[i], options[i]["beam_width"], size) for i in prompts)
        blocks = needed + draw.choice([0, 1, 2, 400])
        params = replace(params, kv_cache_config=KvCacheConfig(
            tokens_per_block=size, max_tokens=blocks * size))
        manager = make_manager(client, model_path=folder, params=params, policy=policy, model_type=model_type,
                               max_beam_width=8)
        client.wait_for_finals(*prompts)
        assert manager.shutdown()

    counts["pauses"] = sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)
    for i, prompt in prompts.items():
        final, width, end_id = client.final(i), options[i]["beam_width"], options[i]["end_id"]
        if final.error:
            counts["wrong"] += 1
            print(f"seed {seed}, request {i}: {final.error}", flush=True)
            continue
        expected = expected_beams(model, prompt, lengths[i], **options[i])
        finishes = final.tensors["finish_reason"][0].tolist()
        counts.update(requests=1, beams=width, ended=finishes.count(FinishReason.END_ID))
        texts = [final.tokens(beam)[len(prompt):] for beam in range(width)]
        sums = final.tensors["cum_log_probs"][0].tolist()
        scores = [total / (len(text) + (finish == FinishReason.END_ID))**options[i]["len_penalty"]
                  if width > 1 else score for total, text, finish, (_, score) in zip(sums, texts, finishes, expected)]
        gap = max(abs(score - theirs) for score, (_, theirs) in zip(scores, expected))
        if texts != [text for text, _ in expected]:
            verdict = "ties" if gap <= TIE else "wrong"
        elif gap > APART:
            verdict = "apart" if gap <= WRONG else "wrong"
            print_errors(model, prompt, texts, finishes, scores, expected, **options[i])
        else:
            verdict = None
        if verdict:
            counts[verdict] += 1
            print(f"seed {seed}, {type(config).__name__}, request {i} {options[i]} end {end_id}: {verdict}, {gap:.1e}",
                  flush=True)
    return counts


def print_errors(model: torch.nn.Module, prompt: list[int], texts: list[list[int]], finishes: list[int],
                 scores: list[float], expected: list[tuple[list[int], float]], *, end_id: int, len_penalty: float,
                 **_: int) -> None:
    """Print the largest errors of `scores` and of the scores in `expected`, against scores computed in float64."""
    def score(text: list[int], finish: int) -> float:
        whole = text + [end_id] * (finish == FinishReason.END_ID)
        with torch.inference_mode():
            log_probs = model(torch.tensor([prompt + whole])).logits[0, len(prompt) - 1:-1].log_softmax(1)
        return float(log_probs[range(len(whole)), whole].sum()) / len(whole)**len_penalty

    model.double()
    exact = [score(text, finish) for text, finish in zip(texts, finishes)]
    model.float()
    ours, theirs = (max(abs(one - other) for one, other in zip(found, exact)) for found in (
        scores, [score for _, score in expected]))
    print(f"in float64, our scores are off by {ours:.1e} at most, theirs by {theirs:.1e}", flush=True)


def most_blocks(prompt_len: int, count: int, beam_width: int, tokens_per_block: int) -> int:
    """Return the largest number of blocks that a request holds with `count` output tokens.

    Beams share the blocks before the block with the prompt's last token.
    """
    shared = (prompt_len - 1) // tokens_per_block
    return shared + (-(-(prompt_len + count) // tokens_per_block) - shared) * beam_width


def likely_token(model: torch.nn.Module, prompt: list[int], draw: random.Random) -> int:
    """Return a random token of the prompt's greedy continuation. As an end id, this token is likely to occur."""
    with torch.inference_mode():
        text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, pad_token_id=0)
    return draw.choice(text[0, len(prompt):].tolist())


def expected_beams(model: torch.nn.Module, prompt: list[int], count: int, *, beam_width: int, end_id: int,
                   len_penalty: float, early_stopping: int) -> list[tuple[list[int], float]]:
    """Return transformers' beams as [(output without the end id, score)], best first; a single beam has the score 0."""
    beams = {} if beam_width == 1 else {
        "num_beams": beam_width, "num_return_sequences": beam_width, "length_penalty": len_penalty,
        "early_stopping": EARLY_STOPPING[early_stopping]}
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=count, eos_token_id=end_id, pad_token_id=end_id, return_dict_in_generate=True,
            output_scores=True, **beams)
    texts = [sequence[len(prompt):] for sequence in found.sequences.tolist()]
    scores = found.sequences_scores.tolist() if beams else [0.0]
    return [(text[:text.index(end_id)] if end_id in text else text, score) for text, score in zip(texts, scores)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    total, seed, started = Counter(), options.first_seed, time.monotonic()
    while time.monotonic() - started < options.seconds:
        total += run_seed(seed)
        seed += 1
    names = ("models", "requests", "beams", "ended", "pauses", "ties", "apart", "wrong")
    print(f"seeds {options.first_seed}..{seed - 1}, {time.monotonic() - started:.0f} s: " +
          ", ".join(f"{total[name]:,} {name}" for name in names))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

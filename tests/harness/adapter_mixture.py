"""Requests of many adapters and of none, in caches for a few of them; and whether each has the tokens that it should.

Each request is compared with itself alone, and some with a model that peft adapts. A token whose logit is within TIE of
another's, by peft, is a tie: two orders of summation may break it differently.
"""

import json
from random import Random

import numpy as np
import torch

from batch_manager import KvCacheConfig, PeftCacheConfig

from .adapters import tensors_of, with_adapter, with_adapter_of_size
from .client import Client
from .requests import request
from .world import make_manager

TIE, LARGEST_RANK, PAGES, NEW_TOKENS, BLOCK = 2e-5, 4, 20, 8, 16
SAMPLED = {"runtime_top_k": 5, "temperature": 0.8}


class Mixture:
    """Requests for a model of transformers. Prompts begin alike, so that only blocks of the same content may be reused.

    model, folder   the model and its checkpoint
    count           number of requests
    by_peft         number of adapters that peft makes, out of `adapters`; they change some projections, the others all

    asks            (prompt, task id; 0: no adapter, seed of sampling; None: greedy) of each request
    models          task id -> the model with the adapter by peft; 0: without
    """

    def __init__(self, model, folder, seed: int, count: int = 200, adapters: int = 40, by_peft: int = 40) -> None:
        draw, self.folder, self.models, self._tensors = Random(seed), folder, {0: model}, {0: {}}
        for task in range(1, adapters + 1):
            if task <= by_peft:
                self.models[task], parts = with_adapter(model, 1000 * seed + task, ranks=range(1, LARGEST_RANK + 1))
            else:
                parts = with_adapter_of_size(model, 1000 * seed + task, draw.randint(1, LARGEST_RANK))
            self._tensors[task] = {"lora_task_id": task, **tensors_of(parts)}
        self._projections = len(with_adapter_of_size(model, 0, 1))
        vocabulary = model.config.get_text_config().vocab_size
        trunk = [draw.randrange(vocabulary) for _ in range(40)]
        self.asks = [(trunk[: draw.choice([3, 18, 33, 40])] + [draw.randrange(vocabulary)],
                      number + 1 if number < adapters else draw.randint(0, adapters),
                      draw.getrandbits(40) if draw.random() < 0.25 else None) for number in range(count)]

    def run(self, *, arrivals: Random | None = None, **options) -> tuple[list[list[int]], list[dict]]:
        """Return (tokens of each request, records of statistics) of a manager with these options.

        arrivals   the requests come a few at a time, in a random order; None: all at once
        """
        order, client = list(enumerate(self.asks)), Client()
        if arrivals is not None:
            arrivals.shuffle(order)
        items = [request(number, prompt, NEW_TOKENS, **self._tensors[task],
                         **({} if seed is None else {**SAMPLED, "random_seed": seed}))
                 for number, (prompt, task, seed) in order]

        def arrive():
            count = len(items) if arrivals is None else arrivals.randint(0, 12)
            client.pending += items[:count]
            del items[:count]

        arrive()
        client.on_get = arrive
        manager = make_manager(client, model_path=self.folder, **{
            "num_threads": 1, "peft_cache_config": PeftCacheConfig(
                max_adapter_size=LARGEST_RANK, num_device_module_layer=PAGES * self._projections), **options})
        try:
            for number in range(len(self.asks)):               # each gets a deadline: the machine may be busy
                client.wait_for_finals(number)
        finally:
            assert manager.shutdown(drain=False, timeout=60)
        finals = [client.final(number) for number in range(len(self.asks))]
        assert not any(final.error for final in finals), [final.error for final in finals if final.error][:3]
        return [final.tokens() for final in finals], [json.loads(record) for record in client.stats]

    def run_alone(self, **options) -> list[list[int]]:
        """Return the tokens of each request, computed alone and without reuse."""
        return self.run(max_batch_size=1, kv_cache_config=KvCacheConfig(
            tokens_per_block=BLOCK, max_tokens=4 * BLOCK), **options)[0]

    def different(self, found: list[list[int]], alone: list[list[int]]) -> tuple[list[int], int]:
        """Return (requests whose tokens differ for another reason than a tie, number of ties)."""
        wrong, ties = [], 0
        for number, (ours, own) in enumerate(zip(found, alone)):
            if ours == own:
                continue
            place = next((place for place, pair in enumerate(zip(ours, own)) if pair[0] != pair[1]), None)
            prompt, task, seed = self.asks[number]
            if place is None or seed is not None or task not in self.models:
                wrong.append(number)
            else:
                logits = self._logits(task, ours[:place])[-1]
                is_tie = abs(logits[ours[place]] - logits[own[place]]) < TIE
                ties, wrong = ties + bool(is_tie), wrong + [number] * (not is_tie)
        return wrong, ties

    def different_from_peft(self, found: list[list[int]]) -> tuple[list[int], int, int]:
        """Compare greedy requests whose model is known: (wrong ones, number of ties, number of compared requests)."""
        wrong, ties, compared = [], 0, 0
        for number, (tokens, (prompt, task, seed)) in enumerate(zip(found, self.asks)):
            if seed is not None or task not in self.models:
                continue
            compared += 1
            logits = self._logits(task, tokens)[len(prompt) - 1 : -1]
            chosen = logits[range(len(logits)), tokens[len(prompt):]]
            behind = float((logits.max(1).values - chosen).max())
            ties += 0 < behind < TIE
            wrong += [number] * (behind >= TIE)
        return wrong, ties, compared

    @torch.inference_mode()
    def _logits(self, task: int, tokens: list[int]) -> torch.Tensor:
        return self.models[task](torch.from_numpy(np.array([tokens]))).logits[0].float()

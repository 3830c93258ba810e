"""Tiny checkpoints made by transformers, and a driver that packs steps as the runtime does."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from batch_manager.attention.interface import PackedStep
from batch_manager.attention.torch_fixed_tiles import FixedTileAttention
from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.layers.context import ONE_PROCESS
from batch_manager.layers.recording import RecordedAttention, record
from batch_manager.models import load_model
from batch_manager.runtime.forms.compiled.forward import CompiledForward
from batch_manager.runtime.forms.compiled.thread_governor import ThreadGovernor
from batch_manager.runtime.packing import ModelCall
from tests.harness.compiled import library_or_skip

TINY = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
TINY_GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "bos_token_id": 0,
             "eos_token_id": 0}
TINY_BLOOM = {"vocab_size": 97, "hidden_size": 64, "n_layer": 3, "n_head": 4}


def make_reference(family: str, **options):
    """Return a small transformers model of the family, with random weights. Options are fields of its configuration.

    Weights of norms differ from 1 and biases from 0, so that every part of the model affects the logits.
    """
    import transformers

    base = TINY_GPT2 if family in ("GPT2", "GPTJ") else TINY_BLOOM if family == "Bloom" else TINY
    config_name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    # Falcon's eager attention adds ALiBi twice: in the mask and in the scores. sdpa, transformers' default, adds it
    # once.
    attention = "sdpa" if family == "Falcon" else "eager"
    config = getattr(transformers, config_name)(**{**base, **options}, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                is_added_to_one = family.startswith("Gemma")
                parameter.normal_(0.0 if name.endswith("bias") or is_added_to_one else 1.0, 0.2)
            else:
                fan_in = parameter.shape[0 if family == "GPT2" and ".h." in name else 1]
                parameter.normal_(0.0, 1.5 / fan_in**0.5)
    return model


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """reference(family, shard=None, **config) -> (transformers model, folder of its checkpoint); each is made once."""
    made = {}

    def get(family, shard=None, **options):
        key = repr((family, shard, sorted(options.items())))
        if key not in made:
            model, folder = make_reference(family, **options), tmp_path_factory.mktemp(family.lower())
            model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
            made[key] = model, folder
        return made[key]

    return get


@dataclass
class Driver:
    """Runs steps of a loaded model with a paged KV cache, and allocates blocks as sequences grow.

    A sequence is a number that the caller chooses.

    shuffled   sequences get blocks in random order
    compiled   run the layers as a compiled step; otherwise, in torch
    split      the processes that share the model
    """

    loaded: object
    tokens_per_block: int = 16
    shuffled: bool = False
    num_blocks: int = 160
    attention_class: type = TorchPagedAttention
    compiled: bool = False
    split: object = ONE_PROCESS
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        spec = self.loaded.spec
        self.pool = torch.zeros(self.num_blocks, spec.num_layers, 2, spec.num_kv_heads, self.tokens_per_block,
                                spec.head_size, dtype=self.loaded.dtype)
        self.attention = self.attention_class(spec, self.pool)
        if self.compiled:
            recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, sink=0)
            with torch.inference_mode():
                recording = record(self.loaded.model.forward, spec.hidden_size, self.loaded.dtype, recorded)
            self.step = CompiledForward(recording, self.pool, spec.num_heads, ThreadGovernor(2),
                                        getattr(self, "port", None), self.loaded.deterministic, self.split)
        order = np.random.default_rng(0).permutation(self.num_blocks) if self.shuffled else range(self.num_blocks)
        self.free = [int(block) for block in order]

    def run(self, contexts=(), generation=()):
        """Run one step. Return the logits [rows, vocab] of the last chunks and of the generating sequences, in order.

        contexts     (sequence, tokens of its next chunk, whether the chunk is the last of the prompt)
        generation   (sequence, its input token)
        """
        work = [*contexts, *((sequence, [token], True) for sequence, token in generation)]
        token_ids, positions, pool_slots, starts, lengths, rows = [], [], [], [0], [], []
        for sequence, tokens, is_last in work:
            start, table = self.lengths.get(sequence, 0), self.tables.setdefault(sequence, [])
            self.lengths[sequence] = start + len(tokens)
            while len(table) * self.tokens_per_block < self.lengths[sequence]:
                table.append(self.free.pop(0))
            for position, token in enumerate(tokens, start):
                token_ids.append(token)
                positions.append(position)
                block, offset = divmod(position, self.tokens_per_block)
                pool_slots.append(table[block] * self.tokens_per_block + offset)
            starts.append(len(token_ids))
            lengths.append(self.lengths[sequence])
            if is_last:
                rows.append(len(token_ids) - 1)
        columns = max(len(self.tables[sequence]) for sequence, _, _ in work)
        stale = self.tables[work[0][0]][0]
        step = PackedStep(
            token_ids=np.array(token_ids, np.int32), positions=np.array(positions, np.int32),
            pool_slots=np.array(pool_slots, np.int64), slots=np.array([sequence for sequence, _, _ in work], np.int32),
            query_starts=np.array(starts, np.int32), kv_lengths=np.array(lengths, np.int32),
            block_tables=np.array([self.tables[s] + [stale] * (columns - len(self.tables[s])) for s, _, _ in work],
                                  np.int32),
            num_contexts=len(contexts), logits_rows=np.array(rows, np.int64))
        with torch.inference_mode():
            model = self.loaded.model
            hidden = self.forward(step, model.embed(torch.from_numpy(step.token_ids).long()))
            return model.logits(hidden[torch.from_numpy(step.logits_rows)])

    def forward(self, step, hidden):
        if self.compiled:
            return self.step.run(ModelCall(step), hidden, None, ())
        planned = self.attention.plan(step)
        if planned is not None:
            self.attention.receive([torch.from_numpy(array) for array in planned])
        return self.loaded.model.forward(hidden, torch.from_numpy(step.positions).long(), self.attention)

    def prefill(self, prompts, chunk=None):
        """Run all prompts together, whole or in chunks. Return the logits [prompts, vocab] of their last tokens."""
        if chunk is None:
            return self.run([(i, prompt, True) for i, prompt in enumerate(prompts)])
        logits = {}
        for start in range(0, max(map(len, prompts)), chunk):
            work = [(i, prompt[start : start + chunk], start + chunk >= len(prompt))
                    for i, prompt in enumerate(prompts) if start < len(prompt)]
            rows = iter(self.run(work))
            logits.update({i: next(rows) for i, _, is_last in work if is_last})
        return torch.stack([logits[i] for i in range(len(prompts))])

    def generate(self, prompts, steps, chunk=None):
        """Generate `steps` tokens after each prompt, greedily. Return (sequences, logits [steps, prompts, vocab]).

        A sequence is the prompt and its generated tokens.
        """
        sequences, logits = [list(prompt) for prompt in prompts], [self.prefill(prompts, chunk)]
        for step in range(steps):
            for sequence, row in zip(sequences, logits[-1]):
                sequence.append(int(row.argmax()))
            if step < steps - 1:
                logits.append(self.run(generation=[(i, s[-1]) for i, s in enumerate(sequences)]))
        return sequences, torch.stack(logits)


def random_prompts(lengths, vocab_size=97, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def expected_logits(model, sequences, steps):
    """Return transformers' logits of the last `steps` tokens of each sequence: [steps, sequences, vocab].

    They correspond to the logits that `Driver.generate` returns.
    """
    with torch.inference_mode():
        rows = [model(torch.tensor([sequence[:-1]])).logits[0, -steps:] for sequence in sequences]
    return torch.stack(rows, dim=1)


@pytest.fixture(params=["torch", "compiled"])
def driver(request):
    """driver(folder, dtype, deterministic, **options) -> Driver of a model in torch, or compiled."""
    compiled = request.param == "compiled"
    if compiled:
        library_or_skip()

    def make(folder, dtype="float32", deterministic=False, **options):
        if deterministic:
            options["attention_class"] = FixedTileAttention
        return Driver(load_model(folder, device="cpu", dtype=dtype, deterministic=deterministic,
                                 compiled_step=compiled), compiled=compiled, **options)

    return make


@pytest.fixture
def prompts():
    return random_prompts


@pytest.fixture
def check_against():
    """check_against(model, driver, prompts, ...): generate with the driver and compare all logits with transformers."""

    def check(model, run, prompts, steps=10, chunk=None, tolerance=1e-4):
        sequences, logits = run.generate(prompts, steps, chunk)
        expected = expected_logits(model, sequences, steps)
        assert expected.abs().max() > 1.0                              # the comparison means something
        assert (logits - expected).abs().max() < tolerance
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))

    return check

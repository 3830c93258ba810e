"""Train the small language model in examples/models/austen-4m from scratch.

Reads Jane Austen's six novels from examples/data/austen.txt.xz, trains a
byte-level BPE tokenizer on them, trains a four-million-parameter model of the
Llama architecture in plain PyTorch, and writes a folder in the Hugging Face
format: config.json, one model.safetensors (bfloat16, tied embeddings) and the
tokenizer files.  transformers can load the folder.

    python examples/train_tiny_model.py --output /tmp/my-model --cpu-minutes 40

The model in the repository took one hour, 2178 seconds of it processor time, on
one thread of a busy machine (two virtual cores of an AMD EPYC, Zen 5): 4846
steps, 9.9 million tokens, 1.32 bits per byte on held-out text.

A quick check that everything works:

    python examples/train_tiny_model.py --output /tmp/smoke --max-steps 3
"""

import argparse
import json
import lzma
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

EXAMPLES = Path(__file__).resolve().parent
BEGIN, END = "<s>", "</s>"

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


# ---------------------------------------------------------------- the text


def read_passages(path, least_characters=900):
    """Split the novels into passages of a few paragraphs. The model learns to stop at the end of a passage.

    A passage has at least `least_characters` characters, except at the end of a chapter. The file has one paragraph per
    line and an empty line after each chapter.
    """
    passages = []
    for chapter in lzma.decompress(Path(path).read_bytes()).decode("utf-8").strip().split("\n\n"):
        passage = ""
        for paragraph in chapter.split("\n"):
            passage += ("\n\n" if passage else "") + paragraph
            if len(passage) >= least_characters:
                passages.append(passage)
                passage = ""
        if passage:
            passages.append(passage)
    return passages


def split_passages(passages):
    """Hold out one passage in a hundred, and return (training passages, held-out passages)."""
    training = [passage for index, passage in enumerate(passages) if index % 100 != 50]
    return training, passages[50::100]


def train_tokenizer(passages, vocabulary_size):
    """Train a byte-level BPE tokenizer, which can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[BEGIN, END],  # in the order of the ids in CONFIG
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(passages, trainer)
    # Every prompt starts with <s>, like the passages in training.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def encode_passages(tokenizer, passages):
    """Return a list with one tensor per passage: the tokens of `<s> text </s>`."""
    end = tokenizer.token_to_id(END)
    return [torch.tensor(encoding.ids + [end]) for encoding in tokenizer.encode_batch(passages)]


class WindowSampler:
    """Samples windows of consecutive tokens from the training text.

    The text is a sequence of passages. Half of the windows begin at the first token of a passage.
    """

    def __init__(self, encoded_passages, seed):
        self.stream = torch.cat(encoded_passages)
        lengths = torch.tensor([len(passage) for passage in encoded_passages])
        self.passage_starts = lengths.cumsum(0) - lengths
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows, length):
        """Return (inputs, targets), each [rows, length]. The target of an input token is the next token of the text."""
        last = len(self.stream) - length - 1
        starts = torch.randint(last, (rows,), generator=self.generator)
        # Half of the windows start at a passage, as prompts do.
        aligned = torch.searchsorted(self.passage_starts, starts[: rows // 2], right=True) - 1
        starts[: rows // 2] = self.passage_starts[aligned]
        windows = self.stream[starts[:, None] + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]


# --------------------------------------------------------------- the model
# The attribute names match the Hugging Face checkpoint, so that state_dict()
# can be saved unchanged.


def rotate(vectors, cosines, sines):
    """Apply rotary position embeddings. Entry i of a head's first half is rotated with entry i of its second half."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a KV head."""

    def __init__(self, config):
        super().__init__()
        hidden, self.head_size = config["hidden_size"], config["head_dim"]
        self.heads, self.shared_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, self.heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(hidden, self.shared_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(hidden, self.shared_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_size, hidden, bias=False)

    def forward(self, states, cosines, sines):
        rows, length, _ = states.shape

        def split_heads(projected, heads):
            return projected.view(rows, length, heads, self.head_size).transpose(1, 2)

        queries = rotate(split_heads(self.q_proj(states), self.heads), cosines, sines)
        keys = rotate(split_heads(self.k_proj(states), self.shared_heads), cosines, sines)
        values = split_heads(self.v_proj(states), self.shared_heads)
        group = self.heads // self.shared_heads
        mixed = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(group, dim=1),
            values.repeat_interleave(group, dim=1),
            is_causal=True,
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class GatedPerceptron(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, states):
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """Attention and feed-forward, each with its own normalization and residual connection."""

    def __init__(self, config, dropout):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = GatedPerceptron(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states, cosines, sines):
        states = states + self.dropout(self.self_attn(self.input_layernorm(states), cosines, sines))
        return states + self.dropout(self.mlp(self.post_attention_layernorm(states)))


class LanguageModel(nn.Module):
    """A Llama-style decoder. Its input embeddings are also its output layer."""

    def __init__(self, config, dropout=0.0):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config["vocab_size"], config["hidden_size"]),
                "layers": nn.ModuleList(Layer(config, dropout) for _ in range(config["num_hidden_layers"])),
                "norm": nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"]),
            }
        )
        self.dropout = nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that add to the residual stream start smaller, to keep its scale.
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                shrink = (2 * config["num_hidden_layers"]) ** -0.5 if writes else 1.0
                nn.init.normal_(parameter, std=config["initializer_range"] * shrink)
        # The rotary embedding tables are computed from the config and not saved.
        exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
        positions = torch.arange(config["max_position_embeddings"])
        angles = positions[:, None] / config["rope_theta"] ** exponents
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, tokens):
        """Return the logits of the next token at each position of `tokens` [rows, length]."""
        length = tokens.shape[1]
        states = self.dropout(self.model["embed_tokens"](tokens))
        for layer in self.model["layers"]:
            states = layer(states, self.cosines[:length], self.sines[:length])
        return F.linear(self.model["norm"](states), self.model["embed_tokens"].weight)


# ------------------------------------------------------------ the training


@torch.no_grad()
def held_out_bits_per_byte(model, encoded_passages, byte_count):
    """Return the loss on the held-out passages in bits per byte of text. Each passage is evaluated from its start."""
    model.eval()
    nats = 0.0
    for passage in encoded_passages:
        # Passages longer than the position table are evaluated in pieces.
        for piece in passage.unfold(0, 2, 1).split(1024):
            nats += F.cross_entropy(model(piece[None, :, 0])[0].float(), piece[:, 1], reduction="sum").item()
    model.train()
    return nats / math.log(2) / byte_count


def save_model(model, tokenizer, folder):
    """Write the configuration, the tokenizer and the weights, rounded to bfloat16, to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    special_tokens = {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    documents = {
        "config.json": CONFIG,
        "generation_config.json": {
            "bos_token_id": CONFIG["bos_token_id"],
            "eos_token_id": CONFIG["eos_token_id"],
            "pad_token_id": CONFIG["eos_token_id"],
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 40,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **special_tokens,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    # Renamed at the end, so that a concurrent reader never sees a partial file.
    save_file(weights, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")


def make_optimizer(model, weight_decay):
    """Return an AdamW optimizer with weight decay for matrices only, and not for normalization scales."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    scales = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def train(arguments):
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    training_passages, held_out_passages = split_passages(read_passages(arguments.data))
    tokenizer = train_tokenizer(training_passages, CONFIG["vocab_size"])
    sampler = WindowSampler(encode_passages(tokenizer, training_passages), arguments.seed)
    held_out = encode_passages(tokenizer, held_out_passages)
    held_out_bytes = sum(len(passage.encode("utf-8")) for passage in held_out_passages)

    model = LanguageModel(CONFIG, arguments.dropout)
    optimizer = make_optimizer(model, arguments.weight_decay)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameter_count:,} parameters, {len(sampler.stream):,} training tokens, {held_out_bytes:,} held-out bytes")

    # The schedule follows the elapsed time, so that the run ends on time on any machine.
    cpu_start, wall_start = time.process_time(), time.monotonic()
    next_save = 60 * arguments.first_save_minutes
    step = seen_tokens = 0
    running_loss = None
    while True:
        cpu_seconds, wall_seconds = time.process_time() - cpu_start, time.monotonic() - wall_start
        progress = max(
            cpu_seconds / (60 * arguments.cpu_minutes),
            wall_seconds / (60 * arguments.wall_minutes),
            step / arguments.max_steps,
        )
        if progress >= 1:
            break
        if cpu_seconds >= next_save:
            next_save += 60 * arguments.save_every_minutes
            bits = held_out_bits_per_byte(model, held_out, held_out_bytes)
            save_model(model, tokenizer, arguments.output)
            print(f"saved: held-out bits per byte {bits:.4f}", flush=True)

        # A short warm-up, followed by half a cosine to zero.
        rate = arguments.learning_rate * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # Short windows are the cheapest way to learn the language. Longer windows come
        # last, to train the later positions.
        length = arguments.final_length if progress > arguments.final_length_from else arguments.length
        inputs, targets = sampler.batch(max(1, arguments.batch_tokens // length), length)
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.autocast):
            logits = model(inputs)
        # Row by row, because the logits of one window fit into the processor's cache, and the logits of the batch do
        # not.
        loss = torch.stack([F.cross_entropy(row.float(), target) for row, target in zip(logits, targets)]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        step += 1
        seen_tokens += inputs.numel()
        running_loss = loss.item() if running_loss is None else 0.98 * running_loss + 0.02 * loss.item()
        if step % 100 == 0:
            print(
                f"step {step}  {progress:.0%}  loss {running_loss:.3f}  rate {rate:.2e}  "
                f"{seen_tokens:,} tokens  {cpu_seconds:.0f} s CPU  {wall_seconds:.0f} s wall",
                flush=True,
            )

    cpu_seconds, wall_seconds = time.process_time() - cpu_start, time.monotonic() - wall_start
    save_model(model, tokenizer, arguments.output)
    bits = held_out_bits_per_byte(model, held_out, held_out_bytes)
    print(
        f"done: {step} steps, {seen_tokens:,} tokens, {cpu_seconds:.0f} s CPU, {wall_seconds:.0f} s wall, "
        f"held-out bits per byte {bits:.4f}, torch {torch.__version__}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data" / "austen.txt.xz")
    parser.add_argument("--cpu-minutes", type=float, default=40, help="stop after this much processor time")
    parser.add_argument("--wall-minutes", type=float, default=math.inf, help="stop after this much real time")
    parser.add_argument("--max-steps", type=float, default=math.inf, help="stop after this many steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256, help="tokens in a training window")
    parser.add_argument("--final-length", type=int, default=1024, help="tokens in a window of the final phase")
    parser.add_argument("--final-length-from", type=float, default=0.85, help="progress at which it begins")
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="compute in bfloat16")
    parser.add_argument("--first-save-minutes", type=float, default=5)
    parser.add_argument("--save-every-minutes", type=float, default=10)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

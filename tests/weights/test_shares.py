"""The shares of a matrix, which several ranks read, together are the matrix, and a rank reads only its share."""

import pytest
import torch

from batch_manager.errors import ModelLoadError
from batch_manager.weights import gguf_source, safetensors_source
from batch_manager.weights.checkpoint import open_checkpoint
from batch_manager.weights.matrices import Share
from batch_manager.weights.source import DummyWeights

from ..models.conftest import make_reference
from ..models.gguf_writing import write_gguf

CPU = torch.device("cpu")
SIZES = {"intermediate_size": 96, "num_key_value_heads": 4}


def by_head(heads, size):
    """The row_order from heads with a query, a key and a value each to all queries, all keys, all values."""
    return torch.arange(3 * heads * size).view(heads, 3, size).transpose(0, 1).reshape(-1)


# Case -> family, options of its configuration, and the arguments of `linear` for the whole matrix. `heads`: row_order
# goes by head. Sizes are divided by the number of ranks, and so are heads.
CASES = {
    "outputs, apart": ("Llama", {"attention_bias": True}, "outputs", {
        "names": [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"], "sizes": [64, 64, 64], "bias": True}),
    "outputs, one after another": ("Phi3", {"pad_token_id": 0, "num_key_value_heads": 2}, "outputs", {
        "names": ["model.layers.1.self_attn.qkv_proj"], "sizes": [64, 32, 32]}),
    "outputs, by head": ("Bloom", None, "outputs", {
        "names": ["transformer.h.1.self_attention.query_key_value"], "sizes": [64, 64, 64], "bias": True, "heads": 4}),
    "outputs, transposed": ("GPT2", None, "outputs", {
        "names": ["transformer.h.1.attn.c_attn"], "sizes": [64, 64, 64], "bias": True, "transposed": True}),
    "inputs": ("Llama", {"attention_bias": True}, "inputs", {
        "names": ["model.layers.1.self_attn.o_proj"], "sizes": [64], "bias": True, "scale": 0.37}),
    "inputs, transposed": ("GPT2", None, "inputs", {
        "names": ["transformer.h.1.attn.c_proj"], "sizes": [64], "bias": True, "transposed": True}),
}


class CountingReader:
    """A safetensors reader that counts the bytes of the tensors and slices it gives."""

    def __init__(self, reader, counts):
        self.reader, self.counts = reader, counts

    def counted(self, tensor):
        self.counts.append(tensor.nbytes)
        return tensor

    def get_tensor(self, name):
        return self.counted(self.reader.get_tensor(name))

    def get_slice(self, name):
        view, counted = self.reader.get_slice(name), self.counted
        return type("Slice", (), {"get_shape": lambda self: view.get_shape(),
                                  "__getitem__": lambda self, index: counted(view[index])})()


@pytest.fixture
def counts(monkeypatch):
    """Numbers of bytes that sources read from files, in order."""
    counts, open_file, read = [], safetensors_source.safe_open, gguf_source._read

    def counting(header, file, begin, offset, num_bytes):
        counts.append(num_bytes)
        return read(header, file, begin, offset, num_bytes)

    monkeypatch.setattr(safetensors_source, "safe_open", lambda *a, **k: CountingReader(open_file(*a, **k), counts))
    monkeypatch.setattr(gguf_source, "_read", counting)
    return counts


def part_of(source, of, ranks, rank, names, sizes, heads=None, bias=False, **options):
    """Read the share of one of `ranks` ranks of a matrix with 64 inputs."""
    outputs, inputs = (ranks if of == which else 1 for which in ("outputs", "inputs"))
    order = {} if heads is None else {"row_order": by_head(heads // outputs, 16)}
    return source.linear(names, 64 // inputs, [size // outputs for size in sizes], bias=bias, **order, **options,
                         share=Share(rank, ranks, of, by_head=heads is not None))


@pytest.mark.parametrize("kind", ["dummy", "safetensors", "F32", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_the_shares_together_are_the_matrix(case, kind, tmp_path, counts):
    family, options, of, arguments = CASES[case]
    source, path = DummyWeights(3, CPU, torch.float32), tmp_path if kind == "safetensors" else tmp_path / "model.gguf"
    if kind != "dummy":
        model = make_reference(family, **({} if options is None else {**SIZES, **options}))
        if kind == "safetensors":
            model.save_pretrained(path)
        else:
            write_gguf(model, path, family, kind)
        source = open_checkpoint(path).weights(CPU, torch.float32)
    counts.clear()
    without_bias = {**arguments, "bias": False}
    whole = part_of(source, of, 1, 0, **without_bias).weight
    bytes_of_whole = sum(counts)
    bias = part_of(source, of, 1, 0, **arguments).bias
    for ranks in (2, 4):
        counts.clear()
        weights = [part_of(source, of, ranks, rank, **without_bias).weight for rank in range(ranks)]
        # Blocks of a quantised row cannot be read apart from each other: a share of the inputs reads whole rows.
        assert sum(counts) == bytes_of_whole * (ranks if of == "inputs" and path.suffix else 1)
        assert torch.equal(joined(weights, of, ranks, arguments["sizes"]), whole)
        assert all(weight.is_contiguous() for weight in weights)
        if bias is not None:
            biases = [part_of(source, of, ranks, rank, **arguments).bias for rank in range(ranks)]
            together = biases[0] if of == "inputs" else joined(biases, of, ranks, arguments["sizes"])
            assert torch.equal(together, bias)


def joined(parts, of, ranks, sizes):
    """Return the whole of the ranks' parts. Each part has a share of every projection, or of the inputs."""
    if of == "inputs":
        return torch.cat(parts, 1)
    of_projections = zip(*(part.split([size // ranks for size in sizes]) for part in parts))
    return torch.cat([rows for of_ranks in of_projections for rows in of_ranks])


def test_a_shares_shape_is_checked_against_the_whole_in_the_file(tmp_path):
    make_reference("Llama").save_pretrained(tmp_path)
    source = open_checkpoint(tmp_path).weights(CPU, torch.float32)
    with pytest.raises(ModelLoadError, match=r"has shape \[64, 64\]; expected \[192, 64\]"):
        source.linear(["model.layers.0.self_attn.q_proj"], 64, [64], share=Share(1, 3, "outputs"))

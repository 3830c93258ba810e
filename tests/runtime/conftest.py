import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread, because more threads only delay each other on small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Return (folder of the checkpoint, transformers model) of a tiny Llama with random weights.

    The model has a vocabulary of 160 tokens and 64 positions.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2)
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder, model

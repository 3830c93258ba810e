"""Log-probabilities of chosen tokens, under the distribution they were drawn from before top-k and top-p cut it.

That is log_softmax(x / temperature) with x the logits after all stages: a post-processor, biases, penalties and bans
show in it. A greedy token has one as well, at its temperature (1 unless another is given; 0 counts as 1). The logits
that go back to a user are the model's own, without any of that.
"""

import torch

LARGEST_HEAT = 1e38        # 1 / temperature stays finite, so that zero times it is zero


def heat_of(temperature: torch.Tensor) -> torch.Tensor:
    """1 / temperature, with temperature 0 taken for 1."""
    return torch.where(temperature == 0, 1.0, temperature).reciprocal().clamp_(max=LARGEST_HEAT)


def chosen_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits / temperature) at the chosen tokens, [r] float32.

    Shapes   logits [r, vocab] float32; tokens [r]; temperature [r] float32
    """
    top = logits.amax(1, keepdim=True)
    heated = (logits - top).mul_(heat_of(temperature)[:, None])
    chosen = heated.gather(1, tokens.long()[:, None])[:, 0]
    return chosen - heated.exp_().sum(1).log_()

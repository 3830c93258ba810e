"""Greedy outputs of a reference model."""


class GreedyModel:
    """Base of reference models. It keeps the outputs of each prompt.

    A subclass defines `likeliest`. It may override `generate` with a faster implementation.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def likeliest(self, tokens: list[int]) -> list[int]:
        """Return the likeliest next token after each token of a sequence, from one forward pass."""
        raise NotImplementedError

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Return the output of `count` tokens, generated one token at a time."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.likeliest(tokens)[-1])
        return tokens[len(prompt):]

    def greedy(self, prompt: list[int], count: int, guess: list[int] | None = None) -> list[int]:
        """Return the `count` tokens of greedy generation of one request alone.

        guess   expected tokens, which one forward pass over the whole sequence can confirm: they are right if every
                token is the likeliest after the tokens before it. Without a guess, or with a wrong guess, the model
                generates one token at a time, which takes many times as long
        """
        output = self._outputs.setdefault(tuple(prompt), [])
        if len(output) < count:
            is_right = (guess is not None and len(guess) == count
                        and guess == self.likeliest([*prompt, *guess])[len(prompt) - 1:-1])
            output[:] = guess if is_right else self.generate(prompt, count)
        return output[:count]

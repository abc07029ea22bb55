"""Prompts with a verifiable reward: sums of two numbers, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rampup.errors import DataError

# The end of an answer. A byte model has no other special token; padding is never read.
END_TOKEN = ord("\n")
VOCAB_SIZE = 256


def encode(text: str) -> list[int]:
    """Return the tokens of a text: its bytes."""
    return list(text.encode())


def decode(tokens: Sequence[int]) -> str:
    """Return the text of tokens; what is not UTF-8 is replaced."""
    return bytes(token for token in tokens if 0 <= token < VOCAB_SIZE).decode(
        errors="replace"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Prompts such as `12+34=`, whose right answer is `46`, in an order that is the
    same on every machine.

    Every pair of numbers is one prompt. The first `num_held_out` of them in a fixed
    random order are for evaluation only.

    Example:
        >>> task = Arithmetic(max_operand=9, num_held_out=20)
        >>> (
        ...     len(task.prompts(0, 100)),
        ...     task.answer("7+8="),
        ...     task.reward(["7+8=", "7+8="], ["15", "16"]),
        ... )
        (100, '15', [1.0, 0.0])
    """

    max_operand: int  # the largest number in a prompt
    num_held_out: int = 0
    num_prompts: int | None = None  # prompts for training; None = all others
    seed: int = (
        0  # of the order of the training prompts, which is another one in every epoch
    )

    def __post_init__(self) -> None:
        total = (self.max_operand + 1) ** 2
        if self.num_held_out * 2 > total:
            raise DataError(
                f"an evaluation of {self.num_held_out:,} prompts needs at least twice"
                f" as many pairs of numbers, but max_operand={self.max_operand} gives"
                f" {total:,}",
                fix="set fewer num_test_batches or a larger max_operand",
                key="num_test_batches",
            )
        most = total - self.num_held_out
        if self.num_prompts is not None and self.num_prompts > most:
            raise DataError(
                f"num_prompts={self.num_prompts:,} must be at most {most:,}:"
                f" max_operand={self.max_operand} gives {total:,} pairs of numbers, of"
                f" which {self.num_held_out:,} are held out",
                key="num_prompts",
                nearest=(most,),
            )

    @property
    def max_prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return 2 * len(str(self.max_operand)) + 2

    @property
    def max_response_length(self) -> int:
        """Tokens of the longest right answer, with the end token."""
        return len(str(2 * self.max_operand)) + 1

    def prompts(self, start: int, stop: int) -> list[str]:
        """Return training prompts by their numbers, counted over all epochs."""
        number = (
            (self.max_operand + 1) ** 2 - self.num_held_out
            if self.num_prompts is None
            else self.num_prompts
        )
        found: list[str] = []
        while start < stop:
            epoch, place = divmod(start, number)
            order = stable_permutation((self.seed, epoch), number)
            end = min(place + stop - start, number)
            found += self._prompts(self.num_held_out + order[place:end])
            start += end - place
        return found

    def held_out(self, start: int, stop: int) -> list[str]:
        """Return evaluation prompts."""
        return self._prompts(slice(start, stop))

    def answer(self, prompt: str) -> str:
        """Return the right answer to a prompt."""
        return str(sum(int(number) for number in prompt.rstrip("=").split("+")))

    def demonstrations(
        self, prompts: Sequence[str], *, accuracy: float, seed: tuple[int, ...]
    ) -> list[str]:
        """Return answers, a share of them right, each drawn by itself. A wrong one is
        the sum of another pair of numbers.
        """
        bits = (
            np.random.Philox(np.random.SeedSequence(list(seed)))
            .random_raw((len(prompts), 2))
            .tolist()
        )
        sums = 2 * self.max_operand + 1
        answers = []
        for prompt, (draw, other) in zip(prompts, bits, strict=True):
            right = int(self.answer(prompt))
            answers.append(
                str(
                    right
                    if draw / 2**64 < accuracy
                    else (right + 1 + other % (sums - 1)) % sums
                )
            )
        return answers

    def reward(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        """Return 1 for every right response and 0 for the others."""
        return [
            float(response == self.answer(prompt))
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def _prompts(self, places: slice | np.ndarray) -> list[str]:
        # One order for all seeds, so that runs with different seeds are evaluated on
        # the same prompts.
        pairs = stable_permutation((0,), (self.max_operand + 1) ** 2)[places]
        return [
            "{}+{}=".format(*divmod(pair, self.max_operand + 1))
            for pair in pairs.tolist()
        ]


def stable_permutation(identity: tuple[int, ...], number: int) -> np.ndarray:
    """Return a permutation. NumPy guarantees the stream of a bit generator, and not
    that of `Generator.permutation`.
    """
    bits = np.random.Philox(np.random.SeedSequence(list(identity)))
    return np.argsort(bits.random_raw(number), kind="stable")

"""The task: sort four digits. Prompts are drawn by step, and answers can be checked.

A row has the digits, a separator, the answer, and padding behind its end: `4 2 7 0 | 0 2 4 7 .`.
"""

import numpy as np

DIGITS = 4
SEPARATOR, END, PAD, VOCABULARY = 10, 11, 12, 16
PROMPT, ANSWER = DIGITS + 1, DIGITS + 1
LENGTH = PROMPT + ANSWER


def prompts(step: int, count: int) -> np.ndarray:
    """int32[count, PROMPT], the same ones for a step in every run."""
    digits = np.random.default_rng(step).integers(0, 10, (count, DIGITS))
    return np.concatenate([digits, np.full((count, 1), SEPARATOR)], 1).astype(np.int32)


def grade(tokens: np.ndarray) -> np.ndarray:
    """The reward of each row of int32[rows, LENGTH]: the share of the answer that is right; 1.0 is all of it."""
    ends = np.full((len(tokens), 1), END)
    wanted = np.concatenate([np.sort(tokens[:, :DIGITS], 1), ends], 1)
    return (tokens[:, PROMPT:] == wanted).mean(1).astype(np.float32)

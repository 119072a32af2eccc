"""Tokenizers: bytes, or a file of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_ptdp.errors import TokenFileError


class Tokens(Protocol):
    """A tokenizer. All tokens of `encode` are below `vocabulary`; `name` identifies it."""

    name: str
    vocabulary: int

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of a text in UTF-8, (n,)."""


class ByteTokens:
    """Each byte is a token: 256 of them, no file is needed, and any text can be had back."""

    name = "bytes"
    vocabulary = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)


class TokenizerFile:
    """A JSON file as `tokenizers` writes it.

    Raises:
        TokenFileError: the library is not installed, or cannot read the file.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise TokenFileError(
                "a tokenizer file needs the package `tokenizers`: pip install '.[tokenizers]'"
            ) from error
        try:
            data = Path(path).read_bytes()
            self._tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises `Exception` itself
            raise TokenFileError(f"{path} is no tokenizer file: {error}") from error
        # A file may say how inputs of its own model are cut and filled up; here all of a text is wanted, and no more.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = f"{Path(path).name[:200]} sha256:{hashlib.sha256(data).hexdigest()[:16]}"
        # Ids may have holes, so that they reach further than they count.
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(ids, default=-1) + 1
        if not self.vocabulary:
            raise TokenFileError(f"tokenizer file {path} has no tokens")

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._tokenizer.encode(text.decode("utf-8", "replace")).ids, np.int64)


def tokens_named(tokenizer: str | Path | None) -> Tokens:
    """The tokenizer of a file; without one, bytes."""
    return TokenizerFile(tokenizer) if tokenizer else ByteTokens()

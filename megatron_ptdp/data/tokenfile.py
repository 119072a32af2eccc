"""A file of tokens that is mapped into memory: a header of 4096 bytes, then the tokens and nothing else.

    PTDP-TOKENS 1 <CRC-32 of the next line, 8 hexadecimal digits>\\n
    {"dtype":"uint8","count":14077513,"vocabulary":256,"crc32":3735928559,"tokenizer":"bytes","documents":870}\\n
    spaces up to byte 4095, and a newline

`head -2 FILE` shows it. Tokens are little-endian, of the smallest dtype that holds the vocabulary; the CRC-32 in the
header is theirs. A file is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from megatron_ptdp.errors import TokenFileError

MAGIC = "PTDP-TOKENS"
VERSION = 1
HEADER_BYTES = 4096
_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_PART = 1 << 24
"""Bytes of the data that are checked at a time."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header of a token file.

    Attributes:
        dtype: of a token: uint8, uint16 or uint32
        count: tokens
        vocabulary: all tokens are below it
        crc32: of the bytes of the tokens
        tokenizer: "bytes", or name and SHA-256 of the tokenizer's file
        documents: number of texts
    """

    dtype: str
    count: int
    vocabulary: int
    crc32: int
    tokenizer: str
    documents: int = 0

    def as_bytes(self) -> bytes:
        """The first 4096 bytes of a file."""
        about = msgspec.json.encode(self)
        start = b"%s %d %08x\n%s\n" % (MAGIC.encode(), VERSION, zlib.crc32(about), about)
        return start.ljust(HEADER_BYTES - 1) + b"\n"

    @property
    def data_bytes(self) -> int:
        return self.count * _DTYPES[self.dtype].itemsize

    @classmethod
    def read(cls, path: Path) -> Header:
        """The header of a file whose size is what the header says.

        Raises:
            TokenFileError: the file cannot be read, its header is damaged or of another version, or it has another
                size.
        """
        try:
            with path.open("rb") as file:
                start = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise TokenFileError(
                f"token file {path} cannot be read: {error.strerror}; make one: pathways-train prepare --output {path}"
            ) from error
        header = cls._parse(path, start)
        if size != HEADER_BYTES + header.data_bytes:
            what = "truncated" if size < HEADER_BYTES + header.data_bytes else "longer than it should be"
            raise TokenFileError(
                f"token file {path} is {what}: it has {size:,} bytes, and {header.count:,} tokens of {header.dtype} "
                f"need {HEADER_BYTES + header.data_bytes:,}; prepare it again"
            )
        return header

    @classmethod
    def _parse(cls, path: Path, start: bytes) -> Header:
        words = start.split(b"\n", 2)[0].split()
        if len(words) != 3 or words[0] != MAGIC.encode():
            raise TokenFileError(
                f"{path} is no token file: it begins with {start[:12]!r}, not with {MAGIC}; "
                "`pathways-train prepare` makes one from text"
            )
        if words[1] != str(VERSION).encode():
            raise TokenFileError(
                f"token file {path} has version {words[1].decode(errors='replace')}, this program reads {VERSION}; "
                "prepare it again"
            )
        lines = start.split(b"\n", 2)
        try:
            if len(start) < HEADER_BYTES or zlib.crc32(lines[1]) != int(words[2], 16):
                raise ValueError("its check sum is another one")
            header = msgspec.json.decode(lines[1], type=cls)
            if header.dtype not in _DTYPES or header.count < 0 or header.vocabulary < 1:
                raise ValueError(f"it says {header}")
        except (ValueError, IndexError) as error:
            raise TokenFileError(f"the header of token file {path} is damaged: {error}; prepare it again") from error
        return header


def dtype_for(vocabulary: int) -> str:
    """The smallest dtype that holds tokens below `vocabulary`.

    Raises:
        TokenFileError: none does.
    """
    for name, dtype in _DTYPES.items():
        if 1 <= vocabulary <= 1 << (8 * dtype.itemsize):
            return name
    raise TokenFileError(f"a vocabulary of {vocabulary:,} tokens is empty, or does not fit into 32 bits")


@dataclass(frozen=True)
class TokenFile:
    """A token file that was looked at: `tokens` is a read-only array (count,) on the file's own memory."""

    path: Path
    header: Header
    tokens: np.ndarray

    @classmethod
    def open(
        cls,
        path: str | Path,
        vocabulary: int | None = None,
        check: bool = True,
        report: Callable[[int], None] = lambda read: None,
    ) -> TokenFile:
        """Maps a file.

        Args:
            vocabulary: of the model that is to read it.
            check: read all tokens once and compare their check sum; a gigabyte takes about a second.
            report: called with the bytes that were checked since it was called before.

        Raises:
            TokenFileError: it is missing, truncated, damaged, or of another vocabulary.
        """
        path = Path(path)
        header = Header.read(path)
        if vocabulary is not None and header.vocabulary != vocabulary:
            raise TokenFileError(
                f"token file {path} has a vocabulary of {header.vocabulary:,} (tokenizer {header.tokenizer}), the "
                f"model one of {vocabulary:,}; prepare it with the model's tokenizer, or set "
                f"vocabulary={header.vocabulary}"
            )
        dtype = _DTYPES[header.dtype]
        if not header.count:
            raise TokenFileError(f"token file {path} has no tokens; prepare it from texts that are not empty")
        tokens = np.memmap(path, dtype, "r", HEADER_BYTES, (header.count,))
        if check:
            _check(path, header, tokens, report)
        return cls(path, header, tokens)


def _check(path: Path, header: Header, tokens: np.ndarray, report: Callable[[int], None]) -> None:
    """Raises `TokenFileError` if the data has changed since it was written."""
    data = tokens.view(np.uint8)
    found = 0
    for start in range(0, data.size, _PART):
        part = data[start : start + _PART]
        found = zlib.crc32(part.data, found)
        report(part.size)
    if found != header.crc32:
        raise TokenFileError(
            f"token file {path} is damaged: its tokens have CRC-32 {found:08x}, its header says {header.crc32:08x}; "
            "prepare it again"
        )


class TokenWriter:
    """Writes a token file; a context manager that renames it when it is whole, and removes it after an error.

    Raises:
        TokenFileError: the file cannot be written.
    """

    def __init__(self, path: str | Path, vocabulary: int, tokenizer: str) -> None:
        self.path = Path(path)
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer
        self.dtype = dtype_for(vocabulary)
        self.count = self.documents = self.crc32 = 0
        self._partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")

    def __enter__(self) -> TokenWriter:
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise TokenFileError(f"token file {self.path} cannot be written: {error.strerror}") from error
        self._file.write(b"\0" * HEADER_BYTES)  # no header yet: a reader does not take this for a whole file
        return self

    def add(self, tokens: np.ndarray) -> None:
        """Appends the tokens (n,) of one text.

        Raises:
            TokenFileError: a token is not below the vocabulary, or the file cannot be written.
        """
        if tokens.size and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.vocabulary):
            raise TokenFileError(
                f"the tokenizer gave token {int(tokens.max()):,} of a vocabulary of {self.vocabulary:,}"
            )
        data = tokens.astype(_DTYPES[self.dtype]).tobytes()
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            self._file.write(data)
        except OSError as error:
            raise TokenFileError(f"token file {self.path} cannot be written: {error.strerror}") from error
        self.count += tokens.size
        self.documents += 1

    def header(self) -> Header:
        """The header for the tokens written so far."""
        return Header(self.dtype, self.count, self.vocabulary, self.crc32, self.tokenizer, self.documents)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._file.seek(0)
                self._file.write(self.header().as_bytes())
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._partial.rename(self.path)
        except OSError as failed:
            raise TokenFileError(f"token file {self.path} cannot be written: {failed.strerror}") from failed
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            self._partial.unlink(missing_ok=True)

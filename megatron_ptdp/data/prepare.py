"""`prepare`: one token file from text files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ptdp.data.tokenfile import Header, TokenWriter
from megatron_ptdp.data.tokens import Tokens
from megatron_ptdp.errors import TokenFileError


def prepare(
    output: str | Path, files: Sequence[Path], tokens: Tokens, report: Callable[[int], None] = lambda read: None
) -> Header:
    """Writes the tokens of all files one after another, with a newline between two texts.

    Args:
        output: the token file; one that is there is replaced when the new one is whole.
        report: called with the bytes of each file that was read.

    Raises:
        TokenFileError: a file cannot be read, or the output not be written, or is one of the files; or there is no text
            in all of them.
    """
    if any(Path(output).resolve() == path.resolve() for path in files):
        raise TokenFileError(f"{output} is one of the texts, which it would replace; name another output")
    with TokenWriter(output, tokens.vocabulary, tokens.name) as writer:
        for path in files:
            try:
                text = path.read_bytes()
            except OSError as error:
                raise TokenFileError(f"{path} cannot be read: {error.strerror}") from error
            if text:
                writer.add(tokens.encode(text if text.endswith(b"\n") else text + b"\n"))
            report(len(text))
        if not writer.count:
            raise TokenFileError(f"there is no text in {len(files)} files; name files that are not empty")
        return writer.header()

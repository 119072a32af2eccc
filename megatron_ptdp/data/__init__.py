"""Text to tokens on disk, and tokens to batches in an order that depends on a seed and a step alone.

`prepare` writes a token file, `TokenFile.open` checks and maps it, `Batches` gives the batch of any step.
"""

from megatron_ptdp.data.batches import Batches
from megatron_ptdp.data.corpus import default_corpus, files_in
from megatron_ptdp.data.host_rows import HostRows
from megatron_ptdp.data.prepare import prepare
from megatron_ptdp.data.tokenfile import Header, TokenFile, TokenWriter
from megatron_ptdp.data.tokens import ByteTokens, TokenizerFile, Tokens, tokens_named

__all__ = [
    "Batches",
    "ByteTokens",
    "Header",
    "HostRows",
    "TokenFile",
    "TokenWriter",
    "TokenizerFile",
    "Tokens",
    "default_corpus",
    "files_in",
    "prepare",
    "tokens_named",
]

"""Token files: what is written is what is read, and nothing damaged is read at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.data import ByteTokens, TokenFile, TokenizerFile, TokenWriter, default_corpus, files_in, prepare
from megatron_ptdp.data.tokenfile import HEADER_BYTES, Header
from megatron_ptdp.errors import TokenFileError

TEXT = b"In the beginning was the byte.\n" * 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.tokens"
    with TokenWriter(path, 256, "bytes") as writer:
        writer.add(ByteTokens().encode(TEXT))
    return path


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_tokens_come_back_in_the_smallest_dtype(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    tokens = np.random.default_rng(0).integers(0, vocabulary, 1000)
    tokens[0] = vocabulary - 1
    with TokenWriter(tmp_path / "a", vocabulary, "mine") as writer:
        writer.add(tokens[:300])
        writer.add(tokens[300:])
    opened = TokenFile.open(tmp_path / "a", vocabulary)
    assert opened.header == Header(dtype, 1000, vocabulary, opened.header.crc32, "mine", 2)
    assert opened.tokens.dtype == dtype
    np.testing.assert_array_equal(opened.tokens, tokens)


def test_the_header_can_be_read_by_people(file: Path) -> None:
    first, second = file.read_bytes()[:HEADER_BYTES].split(b"\n")[:2]
    assert first.startswith(b"PTDP-TOKENS 1 ")
    assert b'"count":3100' in second
    assert b'"tokenizer":"bytes"' in second


def test_a_token_beyond_the_vocabulary_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(TokenFileError, match="gave token 300 of a vocabulary of 256"),
        TokenWriter(tmp_path / "a", 256, "x") as writer,
    ):
        writer.add(np.array([300]))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_being_written_does_not_disturb_the_one_that_is_there(file: Path) -> None:
    before = file.read_bytes()
    with contextlib.suppress(KeyboardInterrupt), TokenWriter(file, 256, "bytes") as writer:
        writer.add(ByteTokens().encode(b"half"))
        assert file.read_bytes() == before
        raise KeyboardInterrupt
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "is truncated: it has 7,195 bytes, and 3,100 tokens of uint8 need 7,196"),
        (lambda data: data + b"x", "is longer than it should be"),
        (lambda data: data[:100], "the header of token file .* is damaged"),
        (lambda data: b"", "is no token file: it begins with b''"),
        (lambda data: b"hello world\n" + data, "is no token file: it begins with b'hello world"),
        (lambda data: data.replace(b"TOKENS 1", b"TOKENS 9", 1), "has version 9, this program reads 1"),
        (lambda data: data.replace(b'"vocabulary":256', b'"vocabulary":257', 1), "header .* is damaged: its check sum"),
        (lambda data: data[:-5] + b"#" + data[-4:], "is damaged: its tokens have CRC-32"),
    ],
)
def test_damaged_files_are_refused(file: Path, change: object, message: str) -> None:
    file.write_bytes(change(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(TokenFileError, match=message):
        TokenFile.open(file)


@given(at=st.integers(0, 7_195), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "a.tokens"
    with TokenWriter(path, 256, "bytes") as writer:
        writer.add(ByteTokens().encode(TEXT))
    before = TokenFile.open(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    try:
        after = TokenFile.open(path)
    except TokenFileError:
        return
    assert after.header == before.header  # it was in the padding, or turned a digit of the sum to upper case
    np.testing.assert_array_equal(after.tokens, np.frombuffer(TEXT, np.uint8))


def test_another_vocabulary_is_refused(file: Path) -> None:
    with pytest.raises(TokenFileError, match=r"vocabulary of 256 \(tokenizer bytes\), the model one of 50,257"):
        TokenFile.open(file, vocabulary=50_257)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match=r"No such file.*pathways-train prepare --output"):
        TokenFile.open(tmp_path / "none")


def test_prepare_puts_texts_behind_one_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n")
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "c.txt").write_bytes(b"")
    read: list[int] = []
    header = prepare(tmp_path / "out", files_in([tmp_path]), ByteTokens(), read.append)
    assert bytes(TokenFile.open(tmp_path / "out").tokens) == b"one\ntwo\n"
    assert (header.count, header.documents, read) == (8, 2, [4, 3, 0])


def test_prepare_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(TokenFileError, match="there is no text in 1 files"):
        prepare(tmp_path / "out", files_in([tmp_path]), ByteTokens())
    with pytest.raises(TokenFileError, match=r"there is no file .*b\.txt"):
        files_in([tmp_path / "b.txt"])
    assert not (tmp_path / "out").exists()


def test_prepare_says_that_a_disk_is_full_and_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with TokenWriter(tmp_path / "out", 256, "bytes") as writer:
            writer._file.close()
            writer._file = Path("/dev/full").open("wb", buffering=0)  # type: ignore[assignment]  # noqa: SIM115
            writer.add(np.zeros(3, np.uint8))

    with pytest.raises(TokenFileError, match=r"out cannot be written: No space left"):
        write()
    assert not list(tmp_path.iterdir())


def test_prepare_does_not_write_over_its_own_text(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(TEXT)
    with pytest.raises(TokenFileError, match=r"a.txt is one of the texts, which it would replace"):
        prepare(tmp_path / "." / "a.txt", [text], ByteTokens())
    assert text.read_bytes() == TEXT


def test_the_default_corpus_begins_with_the_topics_and_has_no_tests_or_packages() -> None:
    files = default_corpus()
    assert files[0].parts[-2:] == ("pydoc_data", "topics.py")
    assert len(files) > 400
    assert not [file for file in files if {"site-packages", "test", "tests"} & set(file.parts[-3:-1])]
    assert files[1:] == sorted(files[1:], key=lambda path: path.as_posix())


def test_a_tokenizer_file_says_its_vocabulary(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "byte": 1, "?": 7}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "words.json"))
    tokens = TokenizerFile(tmp_path / "words.json")
    assert tokens.vocabulary == 8
    assert tokens.name.startswith("words.json sha256:")
    assert tokens.encode(b"the byte was the").tolist() == [0, 1, 7, 0]
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TokenFileError, match=r"bad.json is no tokenizer file"):
        TokenizerFile(tmp_path / "bad.json")


def test_a_tokenizer_that_cuts_and_fills_up_inputs_of_its_model_gives_all_of_a_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "byte": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_truncation(3)
    made.enable_padding(length=8, pad_id=2, pad_token="?")
    made.save(str(tmp_path / "words.json"))
    assert TokenizerFile(tmp_path / "words.json").encode(b"the byte the byte the").tolist() == [0, 1, 0, 1, 0]

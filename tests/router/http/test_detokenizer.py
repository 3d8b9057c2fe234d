from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.http.detokenizer import Detokenizer
from router.http.text_codec import TextCodec


def byte_codec() -> TextCodec:
    """All 256 bytes, a token that ends inside a character, one that ends it and begins another, added tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aÃ", "©Ã", "Ġthe"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("two words")])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return TextCodec(tokenizer)


def fallback_codec() -> TextCodec:
    """A SentencePiece-like vocabulary with byte fallback, whose decoder drops the first space."""
    pieces = ["▁the", "▁cat", "s", "é", "▁", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return TextCodec(tokenizer)


BYTES = byte_codec()
FALLBACK = fallback_codec()
FALLBACK_PIECES = st.lists(st.sampled_from(["▁the", "▁cat", "s", "é", "▁", "</s>", "😀", "€"]), max_size=20)


def joined(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def fallback_ids(pieces: list[str]) -> list[int]:
    """Token ids of the pieces; a character that the vocabulary lacks becomes its bytes."""
    token_of = FALLBACK._tokenizer.token_to_id
    names = [[p] if token_of(p) is not None else [f"<0x{byte:02X}>" for byte in p.encode()] for p in pieces]
    return [token_of(name) for group in names for name in group]


@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30), st.booleans())
def test_pieces_of_any_byte_tokens_join_to_the_text_of_all(token_ids: list[int], skip: bool) -> None:
    assert joined(BYTES.detokenizer(skip), token_ids) == BYTES.decode(token_ids, skip)


@given(st.text(max_size=30))
def test_no_piece_of_valid_text_holds_half_a_character(text: str) -> None:
    detokenizer = BYTES.detokenizer()
    token_ids = [BYTES._tokenizer.token_to_id(char) for char in pre_tokenizers_chars(text)]
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def pre_tokenizers_chars(text: str) -> str:
    """The text's bytes in the byte-level alphabet."""
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(part for part, _ in parts)


@given(FALLBACK_PIECES, st.booleans())
def test_pieces_of_byte_fallback_tokens_join_to_the_text_of_all(pieces: list[str], skip: bool) -> None:
    token_ids = fallback_ids(pieces)
    assert joined(FALLBACK.detokenizer(skip), token_ids) == FALLBACK.decode(token_ids, skip)


def test_a_character_of_several_byte_tokens_comes_with_its_last_byte() -> None:
    detokenizer = FALLBACK.detokenizer()
    pieces = [detokenizer.push(token_id) for token_id in fallback_ids(["▁the", "😀", "s"])]
    assert pieces == ["the", "", "", "", "😀", "s"]


def test_a_run_of_broken_bytes_is_shown_after_a_bounded_wait() -> None:
    detokenizer = FALLBACK.detokenizer()
    broken = FALLBACK._tokenizer.token_to_id("<0xFF>")
    pieces = [detokenizer.push(broken) for _ in range(100)]
    assert "".join(pieces).count("�") >= 80
    assert sum(map(len, pieces)) + len(detokenizer.flush()) == 100


def test_special_tokens_are_hidden_only_when_asked() -> None:
    end = BYTES._tokenizer.token_to_id("<|end|>")
    assert joined(BYTES.detokenizer(True), [end]) == ""
    assert joined(BYTES.detokenizer(False), [end]) == "<|end|>"

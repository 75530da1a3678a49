import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.detokenizer import Detokenizer
from quire_engine.text.tokenizer import Tokenizer

unicode_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\ufffd"), max_size=40)


def ids_of_bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token per byte: the worst possible split."""
    assert tokenizer.pieces is not None
    of_byte = {tokenizer.pieces[token_id]: token_id for token_id in range(256)}
    return [of_byte[bytes([byte])] for byte in text.encode()]


def in_parts(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in zip(borders, borders[1:], strict=False)]


@given(text=unicode_text, cuts=st.lists(st.integers(0, 200)))
def test_any_split_of_any_text_gives_the_same_text(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    detokenizer = Detokenizer(byte_level)
    parts = [detokenizer.feed(part).text for part in in_parts(ids_of_bytes(byte_level, text), cuts)]
    assert "".join(parts) + detokenizer.flush() == text
    assert not any("\ufffd" in part for part in parts)


@given(text=unicode_text)
def test_encoded_text_round_trips(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assert Detokenizer(byte_level).feed(ids).text == text
    ids = byte_fallback.encode(text, add_special_tokens=False)
    # This kind puts a space before every text; an answer continues its prompt, so the space stays.
    assert Detokenizer(byte_fallback).feed(ids).text == ("" if not text else " " + text)


@given(ids=st.lists(st.integers(0, 255), max_size=30))
def test_invalid_utf8_decodes_as_in_the_library(byte_level: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(byte_level)
    streamed = "".join(detokenizer.feed([token_id]).text for token_id in ids)
    whole = byte_level.decode(ids)
    # What is still incomplete at the end is omitted, where the library shows U+FFFD.
    assert whole in (streamed, streamed + "\ufffd")


@pytest.mark.parametrize("text", ["hello world", "hello hello!", "world"])
def test_non_additive_decoder_is_decoded_in_windows(metaspace: Tokenizer, text: str) -> None:
    assert metaspace.pieces is None
    prompt = metaspace.encode("hello", add_special_tokens=False)
    detokenizer = Detokenizer(metaspace, prompt=prompt)
    ids = metaspace.encode(text, add_special_tokens=False)
    assert "".join(detokenizer.feed([token_id]).text for token_id in ids) == " " + text


@pytest.fixture
def windowed(byte_level: Tokenizer) -> Detokenizer:
    bare = Tokenizer(byte_level._backend, {})
    bare.pieces = None
    return Detokenizer(bare)


def test_windows_do_not_wait_for_ever_for_a_character(byte_level: Tokenizer, windowed: Detokenizer) -> None:
    invalid = ids_of_bytes(byte_level, "é")[:1] * 20
    text = "".join(windowed.feed([token_id]).text for token_id in invalid)
    assert text.count("\ufffd") >= 8


def test_windows_hold_back_half_a_character(byte_level: Tokenizer, windowed: Detokenizer) -> None:
    shown = [windowed.feed([token_id]).text for token_id in ids_of_bytes(byte_level, "a😀b")]
    assert shown == ["a", "", "", "", "😀", "b"]


def test_special_tokens_are_skipped_by_default(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|eos|>b<think>", add_special_tokens=False)
    assert Detokenizer(byte_level).feed(ids).text == "ab<think>"
    assert Detokenizer(byte_level, skip_special_tokens=False).feed(ids).text == "a<|eos|>b<think>"


def test_an_answer_completes_the_character_its_prompt_ends_in(byte_level: Tokenizer) -> None:
    ids = ids_of_bytes(byte_level, "x😀y")
    detokenizer = Detokenizer(byte_level, prompt=ids[:3])
    assert detokenizer.feed(ids[3:]).text == "😀y"


def test_incomplete_character_at_the_end_is_dropped(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    assert detokenizer.feed(ids_of_bytes(byte_level, "ok é")[:-1]).text + detokenizer.flush() == "ok "


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    assert Detokenizer(byte_level).feed([byte_level.vocab_size + 5]).text == ""


def test_stop_string_match_counts_the_output_tokens(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stops=["END"])
    piece = detokenizer.feed(ids_of_bytes(byte_level, "ab ENDxyz"))
    assert (piece.text, piece.num_tokens, piece.stop) == ("ab ", 6, "END")


def test_stop_strings_do_not_count_in_the_first_tokens(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, stops=["b"], min_tokens=2)
    piece = detokenizer.feed(ids_of_bytes(byte_level, "abcbd"))
    assert (piece.text, piece.num_tokens, piece.stop) == ("abc", 4, "b")


@given(text=unicode_text, stops=st.lists(st.text("ab\n ", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_equally_in_any_tokenization(byte_level: Tokenizer, text: str, stops: list[str]) -> None:
    ids = ids_of_bytes(byte_level, text + "ab a\nb")
    whole = Detokenizer(byte_level, stops=stops).feed(ids)
    single = Detokenizer(byte_level, stops=stops)
    shown, stop = "", None
    for token_id in ids:
        piece = single.feed([token_id])
        shown += piece.text
        if piece.stop is not None:
            stop = piece.stop
            break
    assert (whole.text, whole.stop) == (shown, stop)

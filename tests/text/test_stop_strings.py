"""Stop strings as a criterion: over bytes, incremental, state follows the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit.errors import GenerationError, InputError
from decodekit.settings import build
from decodekit.text import as_tokenizer
from decodekit_plugins.stopping.strings import StopStringCriteria
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAKES = ["byte_level", "llama", "metaspace", "wordpiece", "suffix"]
quick = settings(max_examples=100, deadline=None)


def text_pieces(tokenizer: Any, stop: Any = ()) -> Any:
    return as_tokenizer(tokenizer).pieces(stop)


def byte_vocabulary(*more: str) -> tuple[Tokenizer, Any]:
    """256 single bytes, and tokens of the bytes of `more`. Returns it with a function from bytes to the id."""
    table = pre_tokenizers.ByteLevel
    chars = sorted(table.alphabet(), key=lambda c: table_byte(c))
    vocab = {char: n for n, char in enumerate(chars)}

    def written(data: bytes) -> str:
        return "".join(chars[byte] for byte in data)

    for text in more:
        vocab[written(text.encode("latin-1"))] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, lambda data: vocab[written(data)]


def table_byte(char: str) -> int:
    code = ord(char)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return code if code in plain else [b for b in range(256) if b not in plain][code - 256]


def feed(criterion: Any, ids: list[int]) -> int | None:
    """Accept one token after another; the number of tokens after which row 0 ends."""
    for count, token in enumerate(ids, 1):
        criterion.accept(torch.tensor([token]), None)
        if bool(criterion(torch.zeros(1, 1, dtype=torch.long), None)[0]):
            return count
    return None


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [
        ("。", [b"\xe3", b"\x80", b"\x82"]),
        ("。", [b"\xe3\x80", b"\x82"]),
        ("。", [b"\xe3", b"\x80\x82"]),
        ("。", [b"xy\xe3", b"\x80\x82"]),
        ("🤗", [b"\xf0", b"\x9f", b"\xa4", b"\x97"]),
        ("🤗", [b"a\xf0\x9f", b"\xa4\x97"]),
        ("🤗", [b"\xf0\x9f\xa4", b"\x97!"]),
    ],
)
def test_b13_stop_made_of_cut_characters(stop: str, tokens: list[bytes], context: Any) -> None:
    tokenizer, token = byte_vocabulary(*(t.decode("latin-1") for t in tokens if len(t) > 1))
    ids = [token(b"o"), token(b"k"), *map(token, tokens)]
    criterion = StopStringCriteria(tokenizer, stop).bind(context())
    assert feed(criterion, [*ids, token(b"z")]) == len(ids)
    assert criterion.why(0) == stop
    pieces = text_pieces(tokenizer, stop)
    shown = [pieces.push([i]) for i in ids]
    assert "".join(shown) == "ok" + b"".join(tokens).decode().partition(stop)[0]
    assert pieces.stopped == stop
    # As the reference's class, with nothing but the ids.
    alone = StopStringCriteria(tokenizer, [stop])
    assert [bool(alone(torch.tensor([ids[:k]]), None)) for k in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [
        True
    ]


def test_b13_byte_fallback_tokens(made: Any, context: Any) -> None:
    tokenizer = made["llama"]
    ids = [tokenizer.token_to_id(t) for t in ("<0xE3>", "<0x80>", "<0x82>", "<0x0A>")]
    assert feed(StopStringCriteria(tokenizer, "。").bind(context()), ids) == 3
    assert feed(StopStringCriteria(tokenizer, "\n").bind(context()), ids) == 4


@pytest.mark.parametrize("stops", [["cc", "b"], ["b", "cc"]])
@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1], [2, 2], [1, 3]])
def test_b15_first_in_the_text_wins(stops: list[str], sizes: list[int], context: Any) -> None:
    tokenizer, token = byte_vocabulary("a ", " c")
    ids = [token(b"a "), token(b"b"), token(b" c"), token(b"c")]
    criterion = StopStringCriteria(tokenizer, stops).bind(context())
    pieces = text_pieces(tokenizer, stops)
    text, at = "", 0
    for size in sizes:
        criterion.accept(torch.tensor([ids[at : at + size]]), None)
        text += pieces.push(ids[at : at + size])
        at += size
    assert criterion.why(0) == pieces.stopped == "b"
    assert at - criterion.past(0) == 2  # ids up to the token that completes the stop
    assert text + pieces.finish() == "a "


@pytest.mark.parametrize("stops", [["ab", "b"], ["b", "ab"]])
@pytest.mark.parametrize("cuts", [["x", "a", "b"], ["xab"], ["xa", "b"]])
def test_b15_of_stops_that_end_together_the_longest_wins(stops: list[str], cuts: list[str], context: Any) -> None:
    tokenizer, token = byte_vocabulary(*(c for c in cuts if len(c) > 1))
    criterion = StopStringCriteria(tokenizer, stops).bind(context())
    assert feed(criterion, [token(c.encode()) for c in cuts]) == len(cuts)
    pieces = text_pieces(tokenizer, stops)
    assert pieces.push([token(c.encode()) for c in cuts]) == "x"
    assert criterion.why(0) == pieces.stopped == "ab"


def test_b17_half_a_stop_never_leaks(context: Any) -> None:
    tokenizer, token = byte_vocabulary("He", "llo", "END", ">tail", "Paris", "EN")
    ids = [token(p) for p in (b"He", b"llo", b"<", b"END", b">tail")]
    pieces = text_pieces(tokenizer, "<END>")
    assert [pieces.push([i]) for i in ids] == ["He", "llo", "", "", ""]
    assert (pieces.finish(), pieces.stopped) == ("", "<END>")
    assert feed(StopStringCriteria(tokenizer, "<END>").bind(context()), ids) == 5


def test_b17_held_text_is_delivered_when_the_length_ends_it() -> None:
    tokenizer, token = byte_vocabulary("He", "llo", "EN")
    pieces = text_pieces(tokenizer, "<END>")
    assert "".join(pieces.push([token(p)]) for p in (b"He", b"llo", b"<", b"EN")) == "Hello"
    assert (pieces.finish(), pieces.stopped) == ("<EN", None)


def test_b17_a_stop_may_end_inside_a_token(context: Any) -> None:
    tokenizer, token = byte_vocabulary("in ", "Paris")
    ids = [token(b"in "), token(b"Paris")]
    assert feed(StopStringCriteria(tokenizer, "Pari").bind(context()), ids) == 2
    pieces = text_pieces(tokenizer, "Pari")
    assert pieces.push(ids) + pieces.finish() == "in "


@pytest.mark.parametrize("name", MAKES)
def test_ends_where_the_text_holds_a_stop(name: str, made: Any, sentences: Any, context: Any) -> None:
    tokenizer = made[name]
    start = tokenizer.encode("a").ids

    @given(
        st.data(), st.lists(st.sampled_from(["a", " b", "。", "ab", "है", "s", "<END>", "n't"]), min_size=1, max_size=3)
    )
    @quick
    def law(data: Any, stops: Any) -> None:
        ids = [i for s in data.draw(st.lists(st.sampled_from(sentences), max_size=2)) for i in tokenizer.encode(s).ids]
        head = len(tokenizer.decode(start))
        texts = [tokenizer.decode(start + ids[:k])[head:] for k in range(1, len(ids) + 1)]
        want = next((k for k, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
        assert feed(StopStringCriteria(tokenizer, stops).bind(context([start])), ids) == want

    law()


@pytest.mark.parametrize("name", MAKES)
def test_rollback_reorder_and_chunks_change_nothing(name: str, made: Any, sentences: Any, context: Any) -> None:
    tokenizer = made[name]
    blank = torch.zeros(3, 1, dtype=torch.long)

    @given(st.data())
    @settings(max_examples=30, deadline=None)
    def law(data: Any) -> None:
        stops = data.draw(st.lists(st.sampled_from(["a", "ab", "。", "s i", "है", "🙂"]), min_size=1, max_size=2))
        pick = st.sampled_from([i for s in sentences for i in tokenizer.encode(s).ids])
        criterion = StopStringCriteria(tokenizer, stops).bind(context(blank.tolist()))
        history: list[list[int]] = [[], [], []]
        older: list[list[list[int]]] = []
        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["accept", "accept", "chunk", "some", "reorder", "rollback"]))
            if action in ("accept", "chunk", "some"):
                n = 1 if action != "chunk" else 3
                rows = [0, 1, 2] if action != "some" else [2, 0]
                new = data.draw(
                    st.lists(st.lists(pick, min_size=n, max_size=n), min_size=len(rows), max_size=len(rows))
                )
                tokens = torch.tensor(new)
                criterion.accept(
                    tokens if action == "chunk" else tokens[:, 0], None if action != "some" else torch.tensor(rows)
                )
                older.append(list(history))
                for row, ids in zip(rows, new, strict=True):
                    history[row] = history[row] + ids
            elif action == "reorder":
                order = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
                criterion.reorder(torch.tensor(order))
                history = [history[i] for i in order]
                older = [[past[i] for i in order] for past in older]
            elif older:
                criterion.rollback(1)
                history = older.pop()
        fresh = StopStringCriteria(tokenizer, stops).bind(context(blank.tolist()))
        for row, ids in enumerate(history):
            for token in ids:
                fresh.accept(torch.tensor([token]), torch.tensor([row]))
        assert criterion(blank, None).tolist() == fresh(blank, None).tolist()
        assert [criterion.why(row) for row in range(3)] == [fresh.why(row) for row in range(3)]

    law()


def test_rollback_after_reorder(made: Any, context: Any) -> None:
    a, b, c = (made["byte_level"].encode(char).ids[0] for char in "abc")
    criterion = StopStringCriteria(made["byte_level"], "abb").bind(context([[0], [0]]))
    for tokens in ([a, c], [b, c], [b, c]):
        criterion.accept(torch.tensor(tokens), None)
    criterion.reorder(torch.tensor([1, 0]))
    assert [criterion.why(row) for row in range(2)] == [None, "abb"]
    criterion.rollback(1)
    criterion.accept(torch.tensor([b, b]), None)
    assert [criterion.why(row) for row in range(2)] == [None, "abb"]


def test_state_advances_only_in_accept(made: Any, context: Any) -> None:
    tokenizer = made["byte_level"]
    criterion = StopStringCriteria(tokenizer, "aab").bind(context())
    ids = torch.tensor([tokenizer.encode("aab").ids])
    assert [criterion(ids, None).tolist() for _ in range(3)] == [[False]] * 3
    with pytest.raises(GenerationError, match="take back 1"):
        criterion.rollback(1)


def test_the_prompt_is_no_part_of_the_text(made: Any, context: Any) -> None:
    for name in MAKES:
        prompt = made[name].encode("ab a").ids
        criterion = StopStringCriteria(made[name], ["ab", "a "]).bind(context([prompt]))
        assert not criterion(torch.tensor([prompt]), None).any()
        assert feed(criterion, made[name].encode("b").ids) is None


def test_negative_tokens_are_no_tokens(made: Any, context: Any) -> None:
    a, b = (made["byte_level"].encode(c).ids[0] for c in "ab")
    criterion = StopStringCriteria(made["byte_level"], "ab").bind(context([[0], [0]]))
    criterion.accept(torch.tensor([[a, b, a], [a, -1, -1]]), None)
    criterion.accept(torch.tensor([[a, a], [b, -1]]), None)
    assert criterion(torch.zeros(2, 1), None).tolist() == [True, True]
    assert [criterion.past(row) for row in range(2)] == [3, 0]


@pytest.mark.parametrize("plain", [False, True])
def test_alone_it_looks_at_the_end_of_the_ids(plain: bool, made: Any, foreign: Any, sentences: Any) -> None:
    tokenizer = foreign(made["byte_level"]) if plain else made["byte_level"]
    alone = StopStringCriteria(tokenizer, ["test", "。", "ok?"])
    for sentence in sentences:
        ids = made["byte_level"].encode(sentence).ids
        texts = [made["byte_level"].decode(ids[:k]) for k in range(len(ids) + 1)]
        for k in range(1, len(ids) + 1):
            want = any(texts[k].count(stop) > texts[k - 1].count(stop) for stop in ("test", "。", "ok?"))
            assert alone(torch.tensor([ids[:k]]), None).tolist() == [want]


def test_a_special_token_can_be_a_stop(made: Any, context: Any) -> None:
    end = made["llama"].token_to_id("</s>")
    assert feed(StopStringCriteria(made["llama"], "</s>").bind(context()), [5, end]) == 2


def test_options(made: Any, context: Any) -> None:
    assert StopStringCriteria(None, ["a", "b"]) == StopStringCriteria(stop_strings=("a", "b"))
    assert hash(StopStringCriteria(made["llama"], "a")) == hash(StopStringCriteria(None, "a"))
    for bad in ([], [""], "", ["a", 3], 3, None):
        with pytest.raises(ValueError, match="none of them empty"):
            StopStringCriteria(None, bad)  # type: ignore[arg-type]
    problems: list[Any] = []
    assert build(StopStringCriteria, {"stop_strings": ["a", "b"]}, "x", problems).stop_strings == ("a", "b")
    assert build(StopStringCriteria, {"stop_strings": "a"}, "x", problems).stop_strings == "a"
    assert not problems
    assert build(StopStringCriteria, {"stop_strings": [""]}, "x", problems) is None
    with pytest.raises(InputError, match="tokenizer="):
        StopStringCriteria(None, "a").bind(context())
    assert StopStringCriteria(None, "a").bind(context(tokenizer=made["llama"])) is not None
    with pytest.raises(InputError, match="tokenizer="):
        StopStringCriteria(None, "a")(torch.zeros(1, 1), None)


def test_cost_does_not_grow_with_the_text(made: Any, context: Any) -> None:
    """Counted in look-ups, not seconds: each accepted token is looked up once at most, whatever came before."""
    seen: list[int] = []

    class Counting:
        def encode(self, text: str) -> list[int]:
            return []

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            raise AssertionError("not needed")

        def token_bytes(self, token: int) -> bytes:
            seen.append(token)
            return bytes([token])

        def is_special(self, token: int) -> bool:
            return False

        def chat(self, messages: Any) -> list[int]:
            return []

    criterion = StopStringCriteria(Counting(), ["zzz"]).bind(context())
    seen.clear()
    feed(criterion, [97 + n % 26 for n in range(500)])
    assert 26 <= len(seen) <= 500

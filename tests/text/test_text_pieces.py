"""Law 3: text in pieces is the whole text, for every way of splitting it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from decodekit.errors import InputError
from decodekit.registry import registry
from decodekit.text import as_tokenizer
from decodekit_plugins.tokenizers.stops import StopMatcher
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, CLIPTokenizer, PreTrainedTokenizerFast

EXACT = ["byte_level", "llama", "gemma", "metaspace", "wordpiece", "bare"]
ALL = [*EXACT, "suffix"]
STOPS = ["。", "a", " ", "ab", "b", "\n", "<END>", "🤗", "है", "s ", " a", "it's", "ok?", "世界。", "</s>", "\n\nUser:"]

quick = settings(max_examples=100, deadline=None)


def text_pieces(tokenizer: Any, stop: Any = (), **options: Any) -> Any:
    return as_tokenizer(tokenizer).pieces(stop, **options)


def load_tokenizer(folder: Any) -> Any:
    return registry.load("tokenizers", "huggingface")().open(folder)


def cut(text: str, stops: Any) -> tuple[str, str | None]:
    """The text before the stop that ends first, the longest of those that end together."""
    ends = [(end, -len(s), s) for s in stops for end in [text.find(s) + len(s)] if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def expected(decode: Any, ids: list[int], stops: Any) -> tuple[str, str | None]:
    """By decoding everything again with every token."""
    for k in range(1, len(ids) + 1 if stops else 0):
        text, stop = cut(decode(ids[:k]), stops)
        if stop is not None:
            return text, stop
    return decode(ids), None


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in pairwise(places)]


def draw_ids(data: Any, tokenizer: Tokenizer, sentences: Any) -> list[int]:
    token = st.integers(0, tokenizer.get_vocab_size() - 1)
    parts = data.draw(
        st.lists(st.one_of(st.lists(token, max_size=6), st.sampled_from(sentences), st.text(max_size=4)), max_size=5)
    )
    return [i for part in parts for i in (tokenizer.encode(part).ids if isinstance(part, str) else part)]


cuts = st.lists(st.integers(0, 200), max_size=8)


@pytest.mark.parametrize("name", ALL)
def test_pieces_joined_are_the_whole_text(name: str, made: Any, sentences: Any) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=made[name], clean_up_tokenization_spaces=False)
    wrapped = [as_tokenizer(made[name]), as_tokenizer(oracle)]

    @given(st.data(), cuts, st.booleans(), st.lists(st.sampled_from(STOPS), max_size=3))
    @quick
    def law(data: Any, places: Any, skip: bool, stops: Any) -> None:
        ids = draw_ids(data, made[name], sentences)

        def decode(tokens: list[int]) -> str:
            return oracle.decode(tokens, skip_special_tokens=skip)

        text, stop = expected(decode, ids, stops)
        for tokenizer in wrapped:
            assert tokenizer.decode(ids, skip_special_tokens=skip) == decode(ids)
            pieces = text_pieces(tokenizer, stops, skip_special_tokens=skip)
            got = "".join([pieces.push(part) for part in split(ids, places)]) + pieces.finish()
            assert (got, pieces.stopped) == (text, stop)

    law()


@pytest.mark.parametrize("name", ALL)
def test_pieces_by_decoding_again(name: str, made: Any, sentences: Any, foreign: Any) -> None:
    """A tokenizer that says nothing about itself. Texts, not random ids: a cut character is never decided late."""
    tokenizer = foreign(made[name])

    @given(st.data(), cuts, st.lists(st.sampled_from(STOPS), max_size=3))
    @quick
    def law(data: Any, places: Any, stops: Any) -> None:
        ids = [i for s in data.draw(st.lists(st.sampled_from(sentences), max_size=3)) for i in made[name].encode(s).ids]
        text, stop = expected(lambda tokens: made[name].decode(tokens), ids, stops)
        pieces = text_pieces(tokenizer, stops)
        got = "".join([pieces.push(part) for part in split(ids, places)]) + pieces.finish()
        assert (got, pieces.stopped) == (text, stop)

    law()


def test_decoding_again_stays_short_and_right() -> None:
    """Characters of three tokens: the window is cut only between characters, and its cost does not grow."""
    longest = 0

    class Bytes:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            try:
                return bytes(ids).decode()
            except UnicodeDecodeError:  # as byte fallback does it
                return "\ufffd" * len(ids)

    text = "猫である" * 40
    pieces = text_pieces(Bytes())
    assert "".join([pieces.push([i]) for i in text.encode()]) + pieces.finish() == text
    assert longest < 24


def test_pieces_of_a_python_tokenizer(sentences: Any) -> None:
    tokenizer = ByT5Tokenizer()

    @given(st.text(max_size=60), cuts)
    @quick
    def law(text: str, places: Any) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = text_pieces(tokenizer)
        assert "".join([pieces.push(part) for part in split(ids, places)]) + pieces.finish() == tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    law()
    assert as_tokenizer(tokenizer).token_bytes(70) is None
    assert as_tokenizer(tokenizer).encode("ab") == tokenizer.encode("ab")[:-1]


def test_clean_up_is_right_although_it_looks_ahead(made: Any, sentences: Any) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_object=made["wordpiece"])
    ids = oracle.encode(" ".join(sentences) + " I do not know . it ' s ok , isn ' t it ?" * 4)
    pieces = text_pieces(oracle, clean_up_tokenization_spaces=True)
    got = "".join([pieces.push([i]) for i in ids]) + pieces.finish()
    assert got == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True)
    assert got != oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", EXACT)
def test_token_bytes_joined_are_the_text(name: str, made: Any, sentences: Any) -> None:
    tokenizer = as_tokenizer(made[name])
    start = made[name].encode("a").ids
    for sentence in sentences:
        ids = made[name].encode(sentence).ids
        inside = b"".join(tokenizer.token_bytes(i) or b"" for i in ids).decode()
        assert tokenizer.decode([*start, *ids]) == tokenizer.decode(start) + inside
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_token_bytes_where_nothing_is_known(made: Any, foreign: Any) -> None:
    assert as_tokenizer(made["suffix"]).token_bytes(5) is None
    assert as_tokenizer(foreign(made["llama"])).token_bytes(5) is None


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("plain", [False, True])
def test_a_prompt_is_continued(name: str, plain: bool, made: Any, sentences: Any, foreign: Any) -> None:
    tokenizer = foreign(made[name]) if plain else made[name]
    for sentence in sentences:
        ids = made[name].encode(sentence).ids
        for k in range(len(ids) + 1):
            # Between tokens; where that is inside a character, byte-fallback text is only known when it is whole.
            if k and made[name].decode(ids[:k]).endswith("\ufffd"):
                continue
            known = text_pieces(tokenizer, prompt_ids=ids[:k])
            whole = text_pieces(tokenizer)
            new = "".join([known.push([i]) for i in ids[k:]]) + known.finish()
            assert whole.prompt(ids[:k]) + whole.push(ids[k:]) + whole.finish() == made[name].decode(ids)
            assert made[name].decode(ids[:k]) + new == made[name].decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "gemma"])
def test_a_prompt_may_end_inside_a_character(name: str, made: Any) -> None:
    names = ("ã", "Ģ", "Ĥ") if name == "byte_level" else ("<0xE3>", "<0x80>", "<0x82>")
    ids = [made[name].token_to_id(c) for c in names]
    for k in (1, 2, 3):
        pieces = text_pieces(made[name], prompt_ids=[*ids * 9, *ids[:k]])
        assert pieces.push(ids[k:]) + pieces.finish() == "。"[k == 3 :]


def test_leading_space_after_a_prompt(made: Any) -> None:
    ids = made["llama"].encode("ab ba").ids
    assert text_pieces(made["llama"]).push(ids) == "ab ba"
    bos = made["llama"].token_to_id("<s>")
    assert text_pieces(made["llama"], prompt_ids=[bos]).push(ids) == "ab ba"
    assert text_pieces(made["llama"], prompt_ids=[bos, *ids]).push(ids) == " ab ba"


def test_text_comes_at_once(made: Any) -> None:
    """One character a token, no spaces: nothing is held back longer than its own bytes."""
    tokenizer = made["byte_level"]
    ids = tokenizer.encode("吾輩は猫である").ids
    pieces = text_pieces(tokenizer)
    seen = ""
    for k, token in enumerate(ids):
        seen += pieces.push([token])
        assert seen == tokenizer.decode(ids[: k + 1]).rstrip("\ufffd")


def test_only_a_possible_stop_is_held_back(made: Any) -> None:
    tokenizer = made["byte_level"]
    pieces = text_pieces(tokenizer, ["aab"])
    shown = [pieces.push(tokenizer.encode(c).ids) for c in "xaaacaab"]
    assert shown == ["x", "", "", "a", "aac", "", "", ""]
    assert pieces.stopped == "aab"
    assert pieces.push([5, 6]) + pieces.finish() == ""


def test_a_stop_in_byte_tokens_is_seen_with_its_last_byte(made: Any) -> None:
    tokenizer = made["llama"]
    line = tokenizer.token_to_id("<0x0A>")
    pieces = text_pieces(tokenizer, "\n")
    pieces.push(tokenizer.encode("ab").ids)
    pieces.push([line])
    assert pieces.stopped == "\n"


def test_copy_is_independent(made: Any) -> None:
    ids = made["byte_level"].encode("猫です aab").ids
    pieces = text_pieces(made["byte_level"], "aab")
    pieces.push(ids[:2])
    twin = pieces.copy()
    twin.push(made["byte_level"].encode("xx").ids)
    assert pieces.push(ids[2:]) is not None
    assert (pieces.stopped, twin.stopped) == ("aab", None)


# -- stop strings in bytes -------------------------------------------------------------------------


@given(st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=5), st.text("abé", max_size=30), cuts)
@settings(max_examples=250, deadline=None)
def test_matcher_finds_what_a_search_finds(stops: Any, text: str, places: Any) -> None:
    before, stop = cut(text, stops)
    want = None if stop is None else (stop, len(before.encode()))
    for order in (stops, stops[::-1]):
        matcher = StopMatcher(order)
        data = list(text.encode())
        got = None
        for part in split(data, places):
            got = matcher.push(bytes(part))
        assert got == want
        assert matcher.pushed == len(data)
        if want is None:
            prefixes = {s.encode()[:k] for s in stops for k in range(len(s.encode()))}
            assert matcher.held == max(len(p) for p in prefixes if bytes(data).endswith(p))


def test_matcher_refuses_empty_stops() -> None:
    for bad in ([""], ["a", 3], [None]):
        with pytest.raises(InputError, match="not empty"):
            StopMatcher(bad)  # type: ignore[arg-type]


# -- wrapping --------------------------------------------------------------------------------------


def test_as_tokenizer_takes_what_it_should(made: Any, foreign: Any) -> None:
    raw = made["llama"]
    shell = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    for given_ in (raw, shell, foreign(raw)):
        tokenizer = as_tokenizer(given_)
        assert tokenizer.wrapped is given_  # type: ignore[attr-defined]
        assert as_tokenizer(tokenizer) is tokenizer
        assert tokenizer.decode(tokenizer.encode("ab <END>")) == "ab <END>"
    assert as_tokenizer(shell).is_special(raw.token_to_id("</s>"))
    assert not as_tokenizer(raw).is_special(raw.token_to_id("<0x0A>"))
    for bad in (None, "gpt2", 3, object()):
        with pytest.raises(InputError, match=r"encode\(text\)"):
            as_tokenizer(bad)


def test_encode_opens_but_never_ends() -> None:
    raw = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    shell = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    assert as_tokenizer(raw).encode("a b") == as_tokenizer(shell).encode("a b") == [0, 2, 3]
    # An end token that is part of the text stays.
    assert as_tokenizer(raw).encode("a </s>") == as_tokenizer(shell).encode("a </s>") == [0, 2, 1]
    assert as_tokenizer(shell).encode("") == [0]


def test_a_class_that_changes_the_text_in_python_is_decoded_by_itself(made: Any, sentences: Any) -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    tokenizer = Loud(tokenizer_object=made["byte_level"])
    assert as_tokenizer(tokenizer).token_bytes(70) is None
    pieces = text_pieces(tokenizer)
    ids = made["byte_level"].encode(sentences[0]).ids
    assert "".join([pieces.push([i]) for i in ids]) + pieces.finish() == sentences[0].upper()


def test_a_shell_that_changes_the_text_of_its_core_is_decoded_by_itself(made: Any) -> None:
    model = json.loads(made["suffix"].to_str())["model"]
    vocab = {**model["vocab"], "<|startoftext|>": 900, "<|endoftext|>": 901}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]])
    assert as_tokenizer(tokenizer).token_bytes(70) is None
    ids = tokenizer.encode("ab aab", add_special_tokens=False)
    pieces = text_pieces(tokenizer)
    assert "".join([pieces.push([i]) for i in ids]) + pieces.finish() == tokenizer.decode(ids, skip_special_tokens=True)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "{% generation %}<{{ m.role }}>{{ m.content | trim }}\n{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_chat(made: Any, tmp_path: Any) -> None:
    raw = made["byte_level"]
    messages = [{"role": "user", "content": "Hello 猫 "}]
    raw.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "wrong", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    tokenizer = load_tokenizer(tmp_path)
    want = raw.encode("<s><user>Hello 猫\n<assistant>").ids
    assert tokenizer.chat(messages) == want
    shell = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", chat_template=TEMPLATE)
    assert as_tokenizer(shell).chat(messages) == want
    assert tokenizer.encode("a") == [0, *raw.encode("a").ids]  # add_bos_token
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no such role"):
        tokenizer.chat([{"role": "bad", "content": ""}])


def test_chat_without_a_template_says_what_to_do(made: Any) -> None:
    for tokenizer in (made["llama"], PreTrainedTokenizerFast(tokenizer_object=made["llama"])):
        with pytest.raises(InputError, match="chat_template"):
            as_tokenizer(tokenizer).chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
    ],
)
def test_chat_templates_run_in_a_sandbox(template: str, made: Any) -> None:
    tokenizer = registry.load("tokenizers", "huggingface")().adapt(made["byte_level"], template)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InputError, match="refuses"):
        tokenizer.chat(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_add_bos_token_false_leaves_it_out(made: Any, tmp_path: Any) -> None:
    raw = Tokenizer.from_str(made["byte_level"].to_str())
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    raw.enable_truncation(2)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("Hello world")[0] == 0
    config = {"bos_token": "<s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    ids = load_tokenizer(tmp_path).encode("Hello world")
    assert ids == made["byte_level"].encode("Hello world").ids
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "nowhere")


def test_other_decoders_stay_unknown(made: Any) -> None:
    raw = Tokenizer.from_str(made["llama"].to_str())
    for odd in (
        decoders.Sequence([decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]),
        decoders.CTC(),
    ):
        raw.decoder = odd
        assert as_tokenizer(raw).token_bytes(5) is None

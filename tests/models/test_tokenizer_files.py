"""Files of a tokenizer that are broken, text that is none, and messages that no template can render."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decodekit import InputError, load
from decodekit.text import as_tokenizer
from decodekit_plugins.tokenizers.plugin import HuggingFace
from tokenizers import Tokenizer, models

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ' ' }}{% endfor %}a"


def words() -> Any:
    return Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, "?"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "a"}')
    return tmp_path


def test_byte_order_marks_are_no_part_of_the_text(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("b")
    for file in folder.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    tokenizer = HuggingFace().open(folder)
    assert tokenizer.encode("b") == [1]
    assert tokenizer.bos_token_id == 0
    assert tokenizer.chat([{"role": "user", "content": "a"}]) == [1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", "", "cannot be read as a tokenizer"),
        ("tokenizer.json", '{"version": "1.0", ', "cannot be read as a tokenizer"),
        ("tokenizer.json", "[]", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[" * 100000, "cannot be read"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, not list"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token must be the text of a token, not 3"),
        ("tokenizer_config.json", '{"eos_token": {"id": 3}}', "eos_token must be the text of a token"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be text, not int"),
        ("tokenizer_config.json", '{"chat_template": [3]}', "must hold name and template in every entry"),
        ("chat_template.jinja", b"\xff\xfe", "cannot be read"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, text: str | bytes, message: str) -> None:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InputError, match=message) as caught:
        HuggingFace().open(folder)
    assert str(folder / name) in str(caught.value)


class Letters:
    """A tokenizer of unknown make."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


def test_half_a_surrogate_pair_is_no_text() -> None:
    transformers = pytest.importorskip("transformers")
    for made in (words(), Letters(), transformers.PreTrainedTokenizerFast(tokenizer_object=words())):
        with pytest.raises(InputError, match=r"holds '\\ud800' at place 2, half of a surrogate pair"):
            as_tokenizer(made).encode("a \ud800")
    with pytest.raises(InputError, match=r"'\\ud800' at place 0"):
        as_tokenizer(words()).matcher(["\ud800"])
    with pytest.raises(InputError, match=r"'\\ud800' at place 3"):
        load("bundled").generate("One\ud800")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "a"}], "chat message 0 has no role"),
        ([{"role": 3, "content": "a"}], "chat message 0 has no role"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"chat message 1 \(user\) has no content"),
        ([{"role": "user", "content": None}], r"chat message 0 \(user\) has no content"),
        ([{"role": "user", "content": 3}], r"content of chat message 0 \(user\) must be text, not int"),
        ([{"role": "user", "content": {"text": "a"}}], "must be text, not dict"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], "template refuses these messages: .*str"),
    ],
)
def test_messages_that_cannot_be_rendered(messages: Any, message: str) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words())
    for made in (words(), fast, Letters()):
        tokenizer = HuggingFace().adapt(made, PLAIN)
        with pytest.raises(InputError, match=message):
            tokenizer.chat(messages)


def test_calls_of_tools_need_say_nothing() -> None:
    template = "{% for m in messages %}{{ m['tool_calls'][0] }}{% endfor %}"
    for content in ({}, {"content": None}):
        message = {"role": "assistant", "tool_calls": ["b"], **content}
        assert HuggingFace().adapt(words(), template).chat([message]) == [1]

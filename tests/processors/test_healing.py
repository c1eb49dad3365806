"""Token healing: the prompt loses its last token, the first new one says it again, and the text reads on."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import pytest
import torch
from decodekit import InputError, generate, load, plan
from decodekit.run import Run
from decodekit.text import as_tokenizer
from decodekit_plugins.streamers.iterator import TextIteratorStreamer
from decodekit_plugins.streamers.text import TextStreamer
from decodekit_processors.healing import TokenHealing, Vocabulary

VOCAB = 420
"""Of the model: wider than any tokenizer here, as logits often are."""


# -- the text reads on -------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [False, True])
def test_prompt_and_text_read_on_wherever_the_prompt_is_cut(lm: Any, sample: bool, cuts: Any) -> None:
    healed = 0
    for prompt in cuts(60):
        keys = {"token_healing": True, "max_new_tokens": 6, "do_sample": sample, "seed": 3, "eos_token_id": None}
        (text,), output = lm.details(prompt, **keys)
        assert prompt + text == lm.tokenizer.decode(output.sequences[0].tolist())
        assert "".join(lm.stream(prompt, **keys)) == text
        healed += output.prompt_width < len(lm.tokens(prompt))
    assert healed > 20


def test_streamers_show_nothing_twice(lm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for prompt in ["the lin", "She was a very am", "the ", "caf", "T"]:
        keys = {"token_healing": True, "max_new_tokens": 5, "eos_token_id": None}
        want = lm.generate(prompt, **keys)
        lm.generate(prompt, streamer=TextStreamer(skip_prompt=True, skip_special_tokens=True), **keys)
        assert capsys.readouterr().out == want + "\n"
        shown = TextStreamer(skip_special_tokens=True)
        for _ in range(2):
            lm.generate(prompt, streamer=shown, **keys)
            assert capsys.readouterr().out == prompt + want + "\n"
        iterator = TextIteratorStreamer(skip_prompt=True, skip_special_tokens=True)
        lm.generate(prompt, streamer=iterator, **keys)
        assert "".join(iterator) == want
        lm.generate(prompt, streamer=shown, max_new_tokens=5, eos_token_id=None)
        plain = lm.generate(prompt, max_new_tokens=5, eos_token_id=None)
        assert capsys.readouterr().out == prompt + plain + "\n", "what one call dropped reached the next"


def test_a_prompt_that_ends_inside_a_character(model: Any, tokenizer: Any) -> None:
    """Its last token is the first of a character's bytes, or the last of them."""
    lm = load(model, tokenizer=tokenizer)
    last = tokenizer.encode("naï").ids
    first = [*tokenizer.encode("na").ids, tokenizer.token_to_id("Ã")]
    assert tokenizer.decode(last[:-1]) == tokenizer.decode(first) == "na\ufffd"
    for ids in (first, last):
        (text,), output = lm.details(ids, token_healing=True, max_new_tokens=5, eos_token_id=None)
        assert output.prompt_width == len(ids) - 1
        whole = tokenizer.decode(output.sequences[0].tolist())
        start = tokenizer.decode(ids).rstrip("\ufffd")
        assert whole == start + text


def test_stop_strings_do_not_match_what_only_repeats_the_prompt(lm: Any) -> None:
    for prompt, stop in (("the link is http", "http"), ("the lin", "in"), ("She was a very am", "am")):
        keys = {"max_new_tokens": 5, "eos_token_id": None, "token_healing": True}
        text, output = lm.details(prompt, stop_strings=stop, **keys)
        free, _ = lm.details(prompt, **keys)
        assert output.prompt_width < len(lm.tokens(prompt))
        assert stop not in free[0], "chosen so that only the prompt has it"
        assert (text, output.stop_reasons) == (free, ("max_length",))
        # A stop behind the repeated part is met.
        late = next(pair for pair in map("".join, itertools.pairwise(free[0])) if pair.isascii())
        text, output = lm.details(prompt, stop_strings=late, **keys)
        assert text[0] == free[0][: free[0].index(late)]
        assert output.stop_reasons == ("stop_strings",)


def test_stop_strings_with_a_tokenizer_that_does_not_say_bytes(model: Any, tokenizer: Any) -> None:
    class Opaque:
        def encode(self, text: str) -> list[int]:
            return list(tokenizer.encode(text).ids)

        def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    opaque, clear = load(model, tokenizer=Opaque()), load(model, tokenizer=tokenizer)
    for prompt, stop in (("the link is http", "http"), ("She was a very am", "am"), ("the lin", "zzz")):
        keys = {"max_new_tokens": 5, "eos_token_id": None, "token_healing": True, "stop_strings": stop}
        assert opaque.generate(prompt, **keys) == clear.generate(prompt, **keys)


# -- what is chosen ----------------------------------------------------------------------------------


def test_the_first_token_is_the_likeliest_that_extends_the_dropped_one(
    model: Any, tokenizer: Any, heal: Any, cuts: Any
) -> None:
    wrapped = as_tokenizer(tokenizer)
    data = [wrapped.token_bytes(i) or b"" for i in range(VOCAB)]
    grown = 0
    for prompt in cuts(40, 1):
        ids = tokenizer.encode(prompt).ids
        piece = data[ids[-1]]
        longer = [i for i in range(VOCAB) if data[i].startswith(piece) and not wrapped.is_special(i)]
        if len(longer) == 1:
            continue
        rest = ids[:-1] or [0]
        with torch.no_grad():
            logits = model(torch.tensor([rest])).logits[0, -1]
        want = longer[int(logits[longer].argmax())]
        assert heal([ids], tokenizer, 1)[0].tolist() == [*rest, want]
        grown += want != ids[-1]
    assert grown > 10


def test_the_bundled_model_goes_on_with_the_word() -> None:
    lm = load("bundled")
    wrapped = lm.tokenizer
    for prompt in ("It is a truth univer", "Mr. Darcy sa", "She was a very am", "http", "He said, "):
        ids = lm.tokens(prompt)
        output = lm.details(prompt, token_healing=True, max_new_tokens=4)[1]
        first = int(output.sequences[0, output.prompt_width])
        assert wrapped.token_bytes(first).startswith(wrapped.token_bytes(ids[-1]))
    assert lm.generate("Mr. Darcy sa", token_healing=True, max_new_tokens=1) in ("id", "w", "t", "ys")


@pytest.mark.parametrize("ends", [["<s>"], ["</s>"], ["<pad>", "</s>"]])
def test_a_prompt_that_ends_in_a_special_token_stays(
    model: Any, tokenizer: Any, ends: list[str], heal: Any, train: Any
) -> None:
    ids = tokenizer.encode("the lin").ids + [tokenizer.token_to_id(name) for name in ends]
    assert torch.equal(heal([ids], tokenizer), heal([ids], tokenizer, token_healing=False))
    # bos and eos of the configuration are special even where the tokenizer does not know.
    bare = train([])
    told = {"bos_token_id": 40, "eos_token_id": (41, 42)}
    for last in (40, 41, 42):
        made = plan(model, [[70, 71, last]], tokenizer=bare, token_healing=True, **told)
        assert made.context.dropped is None
        assert "token_healing" in made.left_out
    (letter,) = bare.encode("l").ids
    assert plan(model, [[70, 71, letter]], tokenizer=bare, token_healing=True, **told).context.dropped.tolist() == [
        letter
    ]


def test_a_token_that_nothing_extends_stays(tokenizer: Any, heal: Any) -> None:
    wrapped = as_tokenizer(tokenizer)
    known = Vocabulary(wrapped, VOCAB)
    alone = [i for i in range(3, tokenizer.get_vocab_size()) if known.extensions(i) == [i]]
    assert len(alone) > 20
    unknown = VOCAB - 1
    assert tokenizer.id_to_token(unknown) is None
    for last in (*alone[:5], unknown):
        ids = [*tokenizer.encode("the").ids, last]
        assert torch.equal(heal([ids], tokenizer), heal([ids], tokenizer, token_healing=False))


def test_one_token_begins_with_bos_where_there_is_one(tokenizer: Any, heal: Any) -> None:
    (am,) = tokenizer.encode("am").ids
    assert heal([[am]], tokenizer)[0, 0] == 0
    without = heal([[am]], tokenizer, bos_token_id=None)
    assert torch.equal(without, heal([[am]], tokenizer, bos_token_id=None, token_healing=False))
    # In a batch with longer ones each row gets what it gets alone.
    long = tokenizer.encode("the lin").ids
    both = heal([[am], long], tokenizer)
    assert both.tolist() == [heal([row], tokenizer)[0].tolist() for row in ([am], long)]


def test_empty_prompts(tokenizer: Any, lm: Any, heal: Any) -> None:
    for inputs in ([[]], "", None):
        assert torch.equal(heal(inputs, tokenizer), heal(inputs, tokenizer, token_healing=False))
        with pytest.raises(InputError, match="an empty prompt needs bos_token_id"):
            heal(inputs, tokenizer, bos_token_id=None)
    assert lm.generate("", token_healing=True) == lm.generate("")


def test_without_a_tokenizer_it_says_so(model: Any) -> None:
    with pytest.raises(InputError, match="token_healing reads the text of tokens: pass tokenizer"):
        generate(model, [[5, 6]], token_healing=True)
    assert generate(model, [[5, 6]], token_healing=False, max_new_tokens=1).shape == (1, 3)


def test_other_ways_to_ask_for_it(tokenizer: Any, heal: Any) -> None:
    ids = tokenizer.encode("the lin").ids
    want = heal([ids], tokenizer)
    for keys in ({"processors": {"token_healing": {}}}, {"logits_processor": [TokenHealing()]}):
        assert torch.equal(heal([ids], tokenizer, token_healing=None, **keys), want)
    off = heal([ids], tokenizer, token_healing=False)
    assert torch.equal(heal([ids], tokenizer, token_healing=None), off)
    assert torch.equal(heal([ids], tokenizer, None, max_new_tokens=4, token_healing=False), off)
    assert not torch.equal(want, off)


def test_the_plan_names_the_constraint(model: Any, tokenizer: Any) -> None:
    made = plan(model, "the lin", tokenizer=tokenizer, token_healing=True, max_new_tokens=1)
    (part,) = [part for part in made.describe()["processors"] if part["name"] == "token_healing"]
    assert part["options"] == "TokenHealing(token_healing=True)"
    assert attrs.has(type(made.chain.parts[0].runtime._options))
    run = Run(made)
    assert [step.index for step in run] == [0]
    assert run.output().prompt_width == 1

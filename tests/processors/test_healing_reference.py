"""Token healing next to transformers: the same token where it heals, and where it goes wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decodekit import generate, load


@pytest.fixture(scope="module")
def theirs(tokenizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left"
    )


def reference(model: Any, tokenizer: Any, ids: list[int]) -> list[int]:
    """The prompt as transformers heals it."""
    healed: list[int] = model.heal_tokens(torch.tensor([ids]), tokenizer)[0].tolist()
    return healed


def test_the_same_token_where_transformers_heals(model: Any, tokenizer: Any, theirs: Any, heal: Any, cuts: Any) -> None:
    """Prompts that end inside a word, in a token without a space: whatever it grows the token into, we do, too."""
    agreed = 0
    for prompt in cuts(150, 2):
        ids = tokenizer.encode(prompt).ids
        if prompt != prompt.strip() or len(ids) < 2 or " " in tokenizer.decode(ids[-1:]):
            continue
        healed = reference(model, theirs, ids)
        grown = tokenizer.id_to_token(healed[-1]) or ""
        if healed[-1] == ids[-1] or not grown.startswith(tokenizer.id_to_token(ids[-1])):
            continue  # it favours the token itself by a bias, and the bias holds nothing back: both below
        assert heal([ids], tokenizer, 1)[0].tolist() == healed, prompt
        agreed += 1
    assert agreed > 15


def test_transformers_heals_nothing_behind_a_space(model: Any, tokenizer: Any, theirs: Any, heal: Any) -> None:
    """It looks for the space itself among the tokens, which byte-level vocabularies write differently."""
    for prompt in ("the lin", "She was a very am"):
        ids = tokenizer.encode(prompt).ids
        assert reference(model, theirs, ids) == ids
        ours = heal([ids], tokenizer, 1)[0].tolist()
        assert len(ours) == len(ids)
        assert tokenizer.decode(ours).startswith(prompt)
        assert ours != ids


def test_transformers_strips_the_prompt(model: Any, tokenizer: Any, theirs: Any, heal: Any) -> None:
    ids = tokenizer.encode("the linen was ").ids
    assert tokenizer.decode(reference(model, theirs, ids)) in ("the linen was", "the linen wasn")
    assert tokenizer.decode(heal([ids], tokenizer, 1)[0].tolist()).startswith("the linen was ")


def test_transformers_loses_special_tokens(model: Any, tokenizer: Any, theirs: Any, heal: Any) -> None:
    ids = [0, *tokenizer.encode("https://linked.ex").ids, 1]
    assert 1 not in reference(model, theirs, ids)
    assert heal([ids], tokenizer, 1)[0, : len(ids)].tolist() == ids
    assert heal([ids[:-1]], tokenizer, 1)[0, 0] == 0


def test_transformers_text_loses_what_the_token_grew_by(model: Any, tokenizer: Any, theirs: Any, cuts: Any) -> None:
    """The grown token stands in the place of the prompt's own, so that what follows the prompt misses its end."""
    prompt = next(
        text for text in cuts(150, 2)
        if reference(model, theirs, ids := tokenizer.encode(text).ids)[-1] != ids[-1] and text == text.strip()
    )  # fmt: skip
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    keys: dict[str, Any] = {"tokenizer": theirs, "token_healing": True, "max_new_tokens": 3, "do_sample": False}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **keys)[0].tolist()
    whole = tokenizer.decode(made)
    assert prompt + tokenizer.decode(made[ids.shape[1] :]) != whole
    lm = load(model, tokenizer=tokenizer)
    (text,), output = lm.details(prompt, token_healing=True, max_new_tokens=4, eos_token_id=None)
    assert prompt + text == tokenizer.decode(output.sequences[0].tolist())


def test_without_bos_transformers_fails(model: Any, heal: Any, train: Any) -> None:
    transformers = pytest.importorskip("transformers")
    bare = train(["</s>"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", pad_token="</s>")
    ids = bare.encode("https://linked.ex").ids
    with pytest.raises(TypeError):
        reference(model, theirs, ids)
    told = {"bos_token_id": None, "pad_token_id": 0}
    assert bare.decode(heal([ids], bare, 1, **told)[0].tolist()).startswith("https://linked.ex")


def test_transformers_lets_a_likelier_token_break_the_prompt(
    model: Any, tokenizer: Any, theirs: Any, cuts: Any
) -> None:
    """Its bias of 10 is little for a model that is sure of itself: the prompt's own text is lost."""
    sure = copy.deepcopy(model)
    with torch.no_grad():
        sure.lm_head.weight.mul_(40)
    lost = 0
    for prompt in cuts(40, 5):
        ids = tokenizer.encode(prompt).ids
        if prompt != prompt.strip() or len(ids) < 2:
            continue
        lost += not tokenizer.decode(reference(sure, theirs, ids)).startswith(prompt)
        made = generate(sure, [ids], tokenizer=tokenizer, token_healing=True, max_new_tokens=1, eos_token_id=None)
        assert tokenizer.decode(made[0].tolist()).startswith(prompt.rstrip("\ufffd"))
    assert lost > 3

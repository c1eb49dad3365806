"""Guidance: the tokens of transformers, positions and padding of the second text, and state that moves with the run."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from decodekit import ConfigError, generate, plan
from decodekit.models import adapter_for
from decodekit.testing import TinyLM, context
from decodekit_processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor as Guidance
from torch import Tensor

transformers = pytest.importorskip("transformers")
VOCAB = 83
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@functools.cache
def llama(**more: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **more)).double().eval()


@functools.cache
def gpt2() -> Any:
    """Learned positions: what stands where matters by itself."""
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.25,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return transformers.GPT2LMHeadModel(config).double().eval()


def tokens(rows: int, width: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def padded(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    ids = tokens(rows, width, seed)
    pads = torch.randint(0, width, (rows, 1), generator=torch.Generator().manual_seed(seed))
    pads[0] = 0
    mask = torch.arange(width) >= pads
    return ids * mask, mask.long()


@pytest.mark.filterwarnings("ignore")
def test_the_same_tokens_as_transformers() -> None:
    model, different = llama(), 0
    for number in range(24):
        draw = random.Random(number)
        rows = draw.randint(1, 3)
        ids, mask = padded(rows, draw.randint(1, 7), number)
        keys: dict[str, Any] = {
            "max_new_tokens": draw.randint(2, 12),
            "guidance_scale": draw.choice([0.3, 1.5, 2, 7.5]),
        }
        if number % 2:
            keys["negative_prompt_ids"], marks = padded(rows, draw.randint(1, 9), number + 50)
            if draw.random() < 0.7:
                keys["negative_prompt_attention_mask"] = marks
            else:
                keys["negative_prompt_ids"] = tokens(rows, 5, number)
        if draw.random() < 0.3:
            keys["use_cache"] = False
        if draw.random() < 0.3:
            keys["repetition_penalty"] = 1.3
        want = model.generate(ids, attention_mask=mask, do_sample=False, **keys)
        got = generate(model, ids, attention_mask=mask, **keys)
        assert torch.equal(got, want), (number, keys)
        plainly = generate(model, ids, attention_mask=mask, max_new_tokens=keys["max_new_tokens"])
        different += not torch.equal(got, plainly)
    assert different > 12


def by_hand(model: Any, prompt: list[int], negative: list[int], scale: float, count: int) -> list[int]:
    """Greedy guidance of one row without any cache."""
    new: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            c, u = (
                model(torch.tensor([text + new])).logits[0, -1].float().log_softmax(-1) for text in (prompt, negative)
            )
        new.append(int((scale * (c - u) + u).argmax()))
        if new[-1] == 2:
            break
    return new


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("cache", ["dynamic", "model", False])
@pytest.mark.parametrize("side", ["left", "right", "lists"])
def test_a_padded_row_gets_what_it_gets_alone(make: Any, cache: Any, side: str) -> None:
    """With learned positions transformers counts the padding of the negative prompt."""
    prompts, negatives = [[5, 6, 7, 8], [9, 10]], [[11], [12, 13, 14]]
    chosen = {"use_cache": False} if cache is False else {"cache_implementation": cache}
    given: dict[str, Any] = {"negative_prompt_ids": negatives}
    if side != "lists":
        rows, marks = [[11, 0, 0], [12, 13, 14]], [[1, 0, 0], [1, 1, 1]]
        if side == "left":
            rows[0].reverse()
            marks[0].reverse()
        given = {"negative_prompt_ids": torch.tensor(rows), "negative_prompt_attention_mask": torch.tensor(marks)}
    got = generate(make(), prompts, guidance_scale=2.5, max_new_tokens=8, **given, **chosen)[:, 4:]
    for row in range(2):
        want = by_hand(make(), prompts[row], negatives[row], 2.5, 8)
        assert got[row, : len(want)].tolist() == want


def test_one_negative_prompt_serves_all_and_copies_share_their_prompts() -> None:
    model = llama()
    prompts, negatives = tokens(2, 4, 1), tokens(2, 3, 2)
    keys: dict[str, Any] = {"max_new_tokens": 6, "guidance_scale": 3.0}
    one = generate(model, prompts, negative_prompt_ids=negatives[0], **keys)
    assert torch.equal(one, generate(model, prompts, negative_prompt_ids=negatives[[0, 0]], **keys))
    drawn = {**keys, "do_sample": True, "num_return_sequences": 2, "seed": 3, "negative_prompt_ids": negatives}
    copies = generate(model, prompts, **drawn)
    assert copies.shape[0] == 4
    alone = generate(model, prompts[:1], **{**drawn, "negative_prompt_ids": negatives[:1], "seed": (3,)})
    again = generate(model, prompts, **{**drawn, "seed": (3, 9)})
    assert torch.equal(again[:2, : alone.shape[1]], alone)


def test_a_scale_for_each_prompt_is_that_rows_own() -> None:
    model, prompts = llama(), tokens(3, 5, 7)
    both = generate(model, prompts, guidance_scale=(4.0, 1.0, 0.5), max_new_tokens=7)
    for row, scale in enumerate((4.0, 1.0, 0.5)):
        alone = generate(model, prompts[row : row + 1], guidance_scale=scale, max_new_tokens=7)
        assert torch.equal(both[row : row + 1, : alone.shape[1]], alone)


def test_at_one_there_is_nothing_to_do() -> None:
    assert "guidance_scale" in plan(llama(), [[5]], guidance_scale=1.0).left_out
    assert "guidance_scale" in plan(llama(), [[5], [6]], guidance_scale=(1.0, 1)).left_out
    with pytest.warns(UserWarning, match=r"negative_prompt_ids: \(\(5,\),\) has no effect without guidance_scale"):
        plan(llama(), [[5]], negative_prompt_ids=[[5]])


def test_it_runs_first_and_sees_raw_logits() -> None:
    names = [
        part.name
        for part in plan(llama(), [[5]], guidance_scale=2, repetition_penalty=1.2, suppress_tokens=[4]).chain.parts
    ]
    assert names == ["guidance_scale", "repetition_penalty", "suppress_tokens"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"negative_prompt_ids": [[1], [2], [3]]}, "3 negative prompts for 2 prompts"),
        ({"negative_prompt_ids": [[1], []]}, "at least one in each row"),
        ({"negative_prompt_ids": [[1], [2]], "negative_prompt_attention_mask": [[1]]}, "shape of negative_prompt_ids"),
        ({"negative_prompt_ids": [[1], [2]], "negative_prompt_attention_mask": [[1], [0]]}, "hides a whole row"),
        ({"negative_prompt_ids": "no"}, "must be token ids"),
        ({"guidance_scale": (1.0, 2.0, 3.0)}, "3 values for 2 prompts"),
        ({"guidance_scale": float("inf")}, "must be"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_runs(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(llama(), tokens(2, 3, 1), **{"guidance_scale": 2.0, **keys})
    with pytest.raises(ValueError, match="needs a model"):
        Guidance(2.0).bind(context())


def test_infinite_scores_keep_the_prompts_own_word() -> None:
    """At scale 0, or with a token that both rule out, infinity times nothing would be NaN."""
    ids = torch.tensor([[4, 5]])
    scores = torch.zeros(1, 37)
    scores[0, 3] = -torch.inf
    for scale in (0.0, 0.5, 3.0):
        bound = Guidance(scale).bind(context(ids, model=adapter_for(TinyLM())))
        got = bound(ids, scores)
        assert not got.isnan().any()
        assert got.isneginf().nonzero().tolist() == [[0, 3]]


# -- state -----------------------------------------------------------------------------------------------


class Narrow:
    """A cache that only grows: neither rows nor lengths can change."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("crop", "reorder_cache"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def offers(self) -> frozenset[str]:
        return frozenset()


class Counting:
    """A model adapter that counts the tokens it is fed, and may make caches that only grow."""

    def __init__(self, inner: Any, narrow: bool = False) -> None:
        self.inner, self.narrow, self.fed = inner, narrow, 0
        self.spec, self.defaults, self.tokenizer, self.default_cache = inner.spec, {}, None, "model"

    def offers(self) -> Any:
        return self.inner.offers()

    def make_cache(self, name: str, /, **options: Any) -> Any:
        from decodekit_caches.dynamic import DynamicCache

        return Narrow(DynamicCache()) if self.narrow else DynamicCache()

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.fed += ids.shape[1]
        return self.inner.forward(ids, *args, **kwargs)


def fresh(history: Tensor, negative: Any, width: int) -> Tensor:
    """What a processor says that begins with this history."""
    ctx = context(history, prompt_width=width, model=adapter_for(TinyLM().double()))
    return Guidance(2.0, None, negative, use_cache=False).bind(ctx)(history, torch.zeros(history.shape[0], 37))


@pytest.mark.parametrize("narrow", [False, True], ids=["crops", "only grows"])
@pytest.mark.parametrize("negative", [None, ((4, 5, 6), (7,), (8, 9))], ids=["last token", "negative"])
def test_accept_rollback_and_reorder_in_any_order(narrow: bool, negative: Any) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        ids = torch.randint(3, 37, (3, 4), generator=torch.Generator().manual_seed(seed))
        order = [0, 1, 2]
        ctx = context(ids, model=Counting(adapter_for(TinyLM().double()), narrow))
        bound = Guidance(2.0, None, negative).bind(ctx)
        sizes: list[int] = []
        for _ in range(14):
            action = draw.choice(["ask", "ask", "accept", "accept", "many", "rollback", "reorder", "draft"])
            if action in ("accept", "many"):
                count = 1 if action == "accept" else draw.randint(1, 3)
                new = torch.tensor([[draw.randrange(3, 37) for _ in range(count)] for _ in range(3)])
                ids = torch.cat([ids, new], 1)
                bound.accept(new if count > 1 else new[:, 0], None)
                sizes.append(count)
            elif action == "rollback" and sizes:
                steps = draw.randint(1, len(sizes))
                gone = sum(sizes[-steps:])
                del sizes[-steps:]
                ids = ids[:, :-gone]
                bound.rollback(steps)
            elif action == "reorder":
                rows = [draw.randrange(3) for _ in range(3)]
                order = [order[i] for i in rows]
                ids = ids[rows]
                bound.reorder(torch.tensor(rows))
            asked = ids
            if action == "draft":  # tokens that nobody has accepted
                asked = torch.cat([ids, torch.tensor([[draw.randrange(3, 37)] for _ in range(3)])], 1)
            own = None if negative is None else tuple(negative[i] for i in order)
            got = bound(asked, torch.zeros(3, 37))
            torch.testing.assert_close(got, fresh(asked, own, 4), rtol=1e-5, atol=1e-5)
            assert torch.equal(bound(asked, torch.zeros(3, 37)), got) or action == "draft"


def test_a_step_feeds_only_the_new_token() -> None:
    ids = torch.randint(3, 37, (2, 4))
    model = Counting(adapter_for(TinyLM()))
    ctx = context(ids, model=model)
    bound = Guidance(2.0, None, (4, 5, 6)).bind(ctx)
    for step in range(6):
        bound(ids, torch.zeros(2, 37))
        bound(ids, torch.zeros(2, 37))
        assert model.fed == 3 + step
        ids = torch.cat([ids, torch.full((2, 1), 7)], 1)
        bound.accept(ids[:, -1], None)
    with pytest.raises(ValueError, match="cannot take back 99"):
        bound.rollback(99)


# -- outside of a run --------------------------------------------------------------------------------------


def test_it_works_inside_transformers_own_generate() -> None:
    model, ids, negative = llama(), tokens(2, 5, 3), tokens(2, 4, 4)
    theirs = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, model, unconditional_ids=negative)
    want = model.generate(ids, do_sample=False, max_new_tokens=6, logits_processor=[theirs])
    ours = Guidance(2.0, model, unconditional_ids=negative)
    for _ in range(2):  # theirs serves one call only
        assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=6, logits_processor=[ours]), want)
    assert torch.equal(generate(model, ids, max_new_tokens=6, logits_processor=[ours]), want)
    # Theirs, in turn, works inside ours, and keeps nothing for the next call.
    theirs = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, model, unconditional_ids=negative)
    for _ in range(2):
        assert torch.equal(generate(model, ids, max_new_tokens=6, logits_processor=[theirs]), want)


def test_alone_it_notices_another_text() -> None:
    options = Guidance(2.0, TinyLM().double())
    scores = torch.zeros(1, 37)
    short, other = torch.tensor([[4, 5]]), torch.tensor([[6, 7, 8]])
    grown, turned = torch.tensor([[4, 5, 9, 10]]), torch.tensor([[4, 5, 11, 10]])
    for asked, width in ((short, 2), (grown, 2), (turned, 2), (short, 2), (other, 3), (grown, 4)):
        torch.testing.assert_close(options(asked, scores), fresh(asked, None, width), rtol=1e-5, atol=1e-5)
    assert torch.equal(Guidance(1.0)(short, scores), scores.log_softmax(-1))
    with pytest.raises(ValueError, match="model is needed"):
        Guidance(2.0)(short, scores)
    with pytest.raises(ValueError, match="2 values for 1 row"):
        Guidance((2.0, 3.0), TinyLM())(short, scores)

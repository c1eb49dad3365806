"""Contrastive search against the paper's formula computed anew for every candidate, and its own laws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import decodekit
import pytest
import torch
import torch.nn.functional as F
from decodekit import ConfigError, InputError, generate
from decodekit_caches.dynamic import DynamicCache
from torch import Tensor

KINDS = ("native", "native, tied", "gpt2", "llama")
KEYS: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def search(model: Any, prompts: Any, **keys: Any) -> Any:
    return generate(model, prompts, return_dict_in_generate=True, **{**KEYS, "eos_token_id": None, **keys})


@torch.no_grad()
def contrastive(
    small: Any, prompt: list[int], alpha: float, count: int, new: int, shape: Callable[[list[int], Tensor], Tensor]
) -> tuple[list[int], float]:
    """Tokens by equation 5 of Su et al., and the smallest lead by which one was taken."""
    tokens, lead = list(prompt), float("inf")
    for _ in range(new):
        logits, states = small.whole(tokens)
        chances = shape(tokens, logits).softmax(-1)
        scores = []
        for token in chances.topk(count).indices.tolist():
            if chances[token] == 0:
                continue
            candidate = small.whole([*tokens, token])[1][-1][-1]
            likeness = max(float(F.cosine_similarity(candidate, state, dim=0)) for state in states[-1])
            scores.append(((1 - alpha) * float(chances[token]) - alpha * likeness, token))
        scores.sort(reverse=True)
        lead = min(lead, scores[0][0] - scores[1][0] if len(scores) > 1 else lead)
        tokens.append(scores[0][1])
    return tokens[len(prompt) :], lead


def case(kind: str, number: int) -> tuple[list[list[int]], dict[str, Any]]:
    draw = random.Random(f"contrastive/{kind}/{number}")
    prompts = [[draw.randrange(3, 43) for _ in range(draw.randint(1, 7))] for _ in range(draw.randint(1, 4))]
    keys: dict[str, Any] = {
        "penalty_alpha": draw.choice([0.1, 0.4, 0.6, 0.9, 1.0]),
        "top_k": draw.randint(2, 8),
        "max_new_tokens": draw.randint(1, 8),
        "use_cache": draw.random() < 0.8,
    }
    if draw.random() < 0.4:
        keys["low_memory"] = True
    if draw.random() < 0.3:
        keys["bad_words_ids"] = [[token] for token in draw.sample(range(43), 39)]  # fewer than there are candidates
    return prompts, keys


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_of_the_paper(kind: str, part: int, small: Callable[[str], Any]) -> None:
    one, compared = small(kind), 0
    for number in range(part * 20, (part + 1) * 20):
        prompts, keys = case(kind, number)
        found = search(one.model, prompts, **keys)
        banned = [word[0] for word in keys.get("bad_words_ids", [])]

        def shape(tokens: list[int], logits: Tensor, banned: list[int] = banned) -> Tensor:
            return logits.index_fill(0, torch.tensor(banned, dtype=torch.long), -torch.inf)

        for row, prompt in enumerate(prompts):
            alpha, count, new = keys["penalty_alpha"], keys["top_k"], keys["max_new_tokens"]
            want, lead = contrastive(one, prompt, alpha, count, new, shape)
            if lead > 1e-4:  # rounding decides nothing
                compared += 1
                assert found.sequences[row, found.prompt_width :].tolist() == want, (number, row, keys)
    assert compared > 20


def test_forbidden_tokens_are_no_candidates(small: Callable[[str], Any]) -> None:
    """Only one token is allowed, and it repeats itself; the others have probability 0 and would repeat nothing.

    transformers takes one of them.
    """
    banned = [[token] for token in range(43) if token != 7]
    found = search(small("native").model, [[5, 9, 4]], bad_words_ids=banned, penalty_alpha=0.9)
    assert found.sequences[0, 3:].tolist() == [7] * 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "use_cache": False}])
def test_a_row_gets_what_it_gets_alone(kind: str, more: dict[str, Any], small: Callable[[str], Any]) -> None:
    prompts, model = [[5, 9, 4, 7, 8], [11], [30, 31, 6]], small(kind).model
    batch = search(model, prompts, top_k=(3, 5, 2), eos_token_id=[1, 2, 3, 4], **more)
    for row, prompt in enumerate(prompts):
        alone = search(model, [prompt], top_k=(3, 5, 2)[row], eos_token_id=[1, 2, 3, 4], **more)
        new = alone.sequences[0, len(prompt) :].tolist()
        assert batch.lengths[row] == alone.lengths[0]
        assert batch.sequences[row, 5:].tolist() == new + [0] * (batch.sequences.shape[1] - 5 - len(new))


def test_native_and_transformers_agree(small: Callable[[str], Any]) -> None:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    theirs = small("llama").model
    ours = NativeLM(NativeConfig.from_hf(theirs.config.to_dict())).eval()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if "rotary" not in k})
    for prompt in ([5, 9, 4, 7], [11], [30, 31, 6]):
        assert torch.equal(search(ours, [prompt]).sequences, search(theirs, [prompt]).sequences)


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize("kind", ["native", "gpt2"])
def test_caches_give_what_no_cache_gives(
    kind: str, low_memory: bool, small: Callable[[str], Any], exact_caches: list[str]
) -> None:
    model, prompts = small(kind).model, [[5, 9, 4], [7], [6, 6, 6, 6]]
    want = search(model, prompts, max_new_tokens=70, use_cache=False).sequences
    for cache in [*exact_caches, *(["model"] if kind == "gpt2" and not low_memory else [])]:
        keys = {"max_new_tokens": 70, "cache_implementation": cache, "low_memory": low_memory}
        assert torch.equal(search(model, prompts, **keys).sequences, want)


@pytest.mark.parametrize("cached", [True, False])
def test_low_memory_never_holds_a_row_twice(cached: bool, small: Callable[[str], Any]) -> None:
    model, seen = small("native").model, list[int]()
    noted = model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    try:
        found = search(model, [[5, 9, 4], [7, 8, 9]], low_memory=True, use_cache=cached)
        # One for the prompt, one for each candidate, and one to keep what was taken, but for the last.
        assert seen == [2] * (1 + 8 * 4 + (7 if cached else 0))
        seen.clear()
        assert torch.equal(search(model, [[5, 9, 4], [7, 8, 9]], use_cache=cached).sequences, found.sequences)
        assert seen == [2] + [8] * 8
    finally:
        noted.remove()


def test_low_memory_needs_a_cache_that_can_be_cropped(small: Callable[[str], Any]) -> None:
    class Short(DynamicCache):
        def offers(self) -> frozenset[str]:
            return super().offers() - {"crop"}

    model = small("native").model
    with pytest.raises(ConfigError, match=r"cache:crop.*\n?.*these do: .*dynamic"):
        search(model, [[5, 9, 4]], low_memory=True, cache=Short())
    with pytest.warns(UserWarning, match="low_memory: True has no effect with strategy 'greedy'"):
        generate(model, [[5]], low_memory=True, max_new_tokens=1)


@pytest.mark.parametrize("low_memory", [False, True])
def test_the_cache_is_left_as_other_strategies_leave_it(low_memory: bool, small: Callable[[str], Any]) -> None:
    model, prompts = small("native").model, torch.tensor([[5, 9, 4], [7, 8, 9]])
    found = search(model, prompts, low_memory=low_memory)
    assert found.cache.batch_size == 2
    assert found.cache.get_seq_length() == found.sequences.shape[1] - 1
    more = generate(model, found.sequences, cache=found.cache, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(more, generate(model, found.sequences, max_new_tokens=5, do_sample=False, eos_token_id=None))


def test_a_filled_cache_is_refused(small: Callable[[str], Any]) -> None:
    model = small("native").model
    found = search(model, [[5, 9, 4]])
    with pytest.raises(InputError, match="hidden states of all tokens"):
        search(model, found.sequences, cache=found.cache)


def test_alpha_0_and_a_single_candidate_are_greedy(small: Callable[[str], Any]) -> None:
    model, prompts = small("native").model, [[5, 9, 4], [7]]
    greedy = generate(model, prompts, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    for keys in ({"penalty_alpha": 0.0}, {"top_k": 1}):
        assert torch.equal(search(model, prompts, strategy="contrastive", **keys).sequences, greedy)


@pytest.mark.parametrize("low_memory", [False, True])
def test_what_is_recorded_is_what_was_chosen(low_memory: bool, small: Callable[[str], Any]) -> None:
    one, prompts = small("native"), [[5, 9, 4], [7, 8, 9]]
    outputs = {"output_hidden_states": True, "output_scores": True, "output_logits": True}
    found = search(one.model, prompts, low_memory=low_memory, **outputs)
    assert torch.equal(found.sequences, search(one.model, prompts).sequences)
    assert [len(found.scores), len(found.logits), len(found.hidden_states)] == [8, 8, 8]
    for row in range(2):
        for step in range(8):
            with torch.no_grad():
                logits, states = one.whole(found.sequences[row, : 3 + step].tolist())
            torch.testing.assert_close(found.logits[step][row], logits, rtol=1e-4, atol=1e-4)
            for layer in range(5):
                mine = found.hidden_states[step][layer][row, -1]
                torch.testing.assert_close(mine, states[layer][-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("low_memory", [False, True])
def test_attentions_are_recorded(low_memory: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=43, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    found = search(model, [[5, 9, 4], [7, 8, 9]], output_attentions=True, low_memory=low_memory)
    assert [weights[0].shape for weights in found.attentions] == [
        (2, 2, 3 if step == 0 else 1, 3 + step) for step in range(8)
    ]


def test_stop_strings_and_streamers() -> None:
    lm = decodekit.load("bundled")

    class Ear:
        heard = ""

        def put(self, value: Tensor, /) -> None:
            Ear.heard += "".join(lm.tokenizer.decode(row.tolist()) for row in value.reshape(1, -1))

        def end(self) -> None:
            pass

        def bind(self, ctx: Any, /) -> Any:
            return self

    keys: dict[str, Any] = {**KEYS, "max_new_tokens": 40, "stop_strings": ["."], "streamer": Ear()}
    texts, found = lm.details(["It was a fine day, and"], **keys)
    assert found.stop_reasons == ("stop_strings",)
    assert Ear.heard == "It was a fine day, and" + texts[0] + "."


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"penalty_alpha": 1.5}, r"in \[0, 1\]"),
        ({"penalty_alpha": -0.1}, r"in \[0, 1\]"),
        ({"penalty_alpha": float("nan")}, r"in \[0, 1\]"),
        ({"penalty_alpha": "much"}, "a number"),
        ({"strategy": "contrastive", "top_k": 0}, "needs top_k"),
        ({"strategy": "contrastive", "top_k": (4, 0)}, "needs top_k"),
        ({"strategy": "contrastive", "top_k": (4, 3, 2)}, "has 3 values for 2 prompts"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys: dict[str, Any], words: str, small: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        decodekit.plan(small("native").model, [[5], [6]], **{**KEYS, **keys})


def test_models_that_hide_their_states_are_refused() -> None:
    from decodekit.testing import TinyLM

    with pytest.raises(ConfigError, match="model:hidden"):
        decodekit.plan(TinyLM().eval(), [[5]], **KEYS)


def test_nan_is_an_error_that_names_the_part(small: Callable[[str], Any]) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 5 else scores * torch.nan

    with pytest.raises(decodekit.GenerationError, match="broken"):
        search(small("native").model, [[5, 9, 4]], logits_processor=[broken])


def test_the_name_of_the_mode(small: Callable[[str], Any]) -> None:
    assert decodekit.plan(small("native").model, [[5]], **KEYS).strategy_name == "contrastive"


@pytest.mark.parametrize("low_memory", [False, True])
def test_encoders_and_decoders(low_memory: bool) -> None:
    """The encoder's output is read by every candidate of its row."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=43, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.T5ForConditionalGeneration(config).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.4) if weight.dim() > 1 else None
    sources = [[5, 9, 4, 8, 8], [7, 11, 3]]
    for cached in (True, False):
        found = search(model, sources, use_cache=cached, low_memory=low_memory)
        for row, source in enumerate(sources):

            class Whole:
                @staticmethod
                def whole(tokens: list[int], source: list[int] = source) -> tuple[Tensor, list[Tensor]]:
                    given = torch.tensor([source]), None, torch.tensor([tokens])
                    out = model(*given, output_hidden_states=True, use_cache=False)
                    return out.logits[0, -1], [state[0] for state in out.decoder_hidden_states]

            want, lead = contrastive(Whole, [0], 0.6, 4, 8, lambda tokens, logits: logits)
            assert lead > 1e-4
            assert found.sequences[row, 1:].tolist() == want


@pytest.mark.parametrize("cached", [True, False])
def test_embeddings_in_place_of_tokens(cached: bool, small: Callable[[str], Any]) -> None:
    model, prompts = small("llama").model, torch.tensor([[5, 9, 4], [7, 8, 9]])
    with torch.no_grad():
        embeds = model.get_input_embeddings()(prompts)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    want = search(model, prompts, attention_mask=mask, use_cache=cached).sequences[:, 3:]
    found = search(model, None, inputs_embeds=embeds, attention_mask=mask, use_cache=cached)
    assert torch.equal(found.sequences[:, -8:], want)

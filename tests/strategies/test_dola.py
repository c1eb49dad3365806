"""DoLa against the paper's formulas computed anew at every step, and its own laws."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import decodekit
import pytest
import torch
from decodekit import ConfigError, generate
from decodekit_strategies.dola import DoLa, contrast, divergence
from torch import Tensor

KINDS = ("native", "native, tied", "gpt2", "llama")
KEYS: dict[str, Any] = {"dola_layers": "low", "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def search(model: Any, prompts: Any, **keys: Any) -> Any:
    return generate(model, prompts, return_dict_in_generate=True, **{**KEYS, "eos_token_id": None, **keys})


def jensen_shannon(one: list[float], other: list[float]) -> float:
    """The definition, in plain numbers."""
    mean = [(a + b) / 2 for a, b in zip(one, other, strict=True)]

    def from_mean(chances: list[float]) -> float:
        return sum(p * math.log(p / m) for p, m in zip(chances, mean, strict=True) if p > 0)

    return (from_mean(one) + from_mean(other)) / 2


@torch.no_grad()
def scores_of(small: Any, tokens: list[int], layers: list[int]) -> tuple[list[float], float]:
    """Equations 2 to 5 of Chuang et al. for one text, and by how much the layer was chosen."""
    logits, states = small.whole(tokens)
    last = logits.double().softmax(-1).tolist()
    early = [small.head(states[layer][-1]).double().softmax(-1).tolist() for layer in layers]
    apart = sorted((jensen_shannon(last, chances), -place) for place, chances in enumerate(early))
    lead = apart[-1][0] - apart[-2][0] if len(apart) > 1 else math.inf
    other = early[-apart[-1][1]]
    least = 0.1 * max(last)
    return [math.log(p / q) if p >= least else -math.inf for p, q in zip(last, other, strict=True)], lead


def case(kind: str, number: int) -> tuple[list[list[int]], Any, list[int], dict[str, Any]]:
    draw = random.Random(f"dola/{kind}/{number}")
    prompts = [[draw.randrange(3, 43) for _ in range(draw.randint(1, 7))] for _ in range(draw.randint(1, 4))]
    tied = kind in ("native, tied", "gpt2")
    some = draw.sample(range(5), draw.randint(1, 5))
    layers, meant = draw.choice([("low", [2] if tied else [0]), ("high", [2, 4]), (some, sorted(some))])
    keys = {"max_new_tokens": draw.randint(1, 10), "use_cache": draw.random() < 0.8}
    return prompts, layers, meant, keys


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_formulas_of_the_paper(kind: str, part: int, small: Callable[[str], Any]) -> None:
    one, compared = small(kind), 0
    for number in range(part * 25, (part + 1) * 25):
        prompts, layers, meant, keys = case(kind, number)
        found = search(one.model, prompts, dola_layers=layers, output_scores=True, **keys)
        for row, prompt in enumerate(prompts):
            tokens = list(prompt)
            for step, token in enumerate(found.sequences[row, found.prompt_width :].tolist()):
                want, lead = scores_of(one, tokens, meant)
                if lead > 1e-5:  # rounding chooses no layer
                    compared += 1
                    mine = found.scores[step][row]
                    torch.testing.assert_close(mine, torch.tensor(want), rtol=1e-3, atol=1e-3)
                    assert want[token] > max(want) - 1e-3, (number, row, step)
                tokens.append(token)
    assert compared > 100


def test_divergence_is_that_of_jensen_and_shannon() -> None:
    """0 for equals, log 2 for what has nothing in common; transformers takes the distance of the mean from each."""
    one, other = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.0, 0.0, 1.0]).log()
    assert float(divergence(one, one)) == 0.0
    assert float(divergence(one, other)) == pytest.approx(math.log(2))
    random_ = torch.Generator().manual_seed(1)
    for _ in range(50):
        a, b = torch.rand(2, 9, generator=random_).softmax(-1)
        assert float(divergence(a.log(), b.log())) == pytest.approx(jensen_shannon(a.tolist(), b.tolist()), abs=1e-6)


def test_each_row_has_its_own_layer() -> None:
    """transformers takes one layer for the whole batch, by the mean of the rows."""
    likely = torch.eye(4) * 4
    last = torch.stack([likely[0], likely[1]])
    early = torch.stack([torch.stack([likely[0], likely[3]]), torch.stack([likely[3], likely[1]])])
    both = contrast(last, early)
    for row in range(2):
        assert torch.equal(both[row : row + 1], contrast(last[row : row + 1], early[row : row + 1]))
        best = int(last[row].argmax())
        assert both[row].tolist()[best] == pytest.approx(4.0)
        assert (both[row] > -torch.inf).sum() == 1


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_what_it_gets_alone(kind: str, sample: bool, small: Callable[[str], Any]) -> None:
    prompts, model = [[5, 9, 4, 7, 8], [11], [30, 31, 6]], small(kind).model
    keys = {"do_sample": sample, "repetition_penalty": 1.2, "eos_token_id": [1, 2, 3, 4], "dola_layers": "high"}
    seeds = (1, 2, 3)
    batch = search(model, prompts, **keys, **({"seed": seeds} if sample else {}))
    for row, prompt in enumerate(prompts):
        alone = search(model, [prompt], **keys, **({"seed": seeds[row]} if sample else {}))
        new = alone.sequences[0, len(prompt) :].tolist()
        assert batch.lengths[row] == alone.lengths[0]
        assert batch.sequences[row, 5:].tolist() == new + [0] * (batch.sequences.shape[1] - 5 - len(new))


def test_native_and_transformers_agree(small: Callable[[str], Any]) -> None:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    theirs = small("llama").model
    ours = NativeLM(NativeConfig.from_hf(theirs.config.to_dict())).eval()
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if "rotary" not in k})
    for layers in ("low", "high", [1, 4]):
        mine, yours = (search(model, [[5, 9, 4, 7]], dola_layers=layers) for model in (ours, theirs))
        assert torch.equal(mine.sequences, yours.sequences)


@pytest.mark.parametrize("kind", ["native", "gpt2"])
def test_caches_give_what_no_cache_gives(kind: str, small: Callable[[str], Any], exact_caches: list[str]) -> None:
    model, prompts = small(kind).model, [[5, 9, 4], [7], [6, 6, 6, 6]]
    want = search(model, prompts, max_new_tokens=40, use_cache=False)
    for cache in exact_caches:
        found = search(model, prompts, max_new_tokens=40, cache_implementation=cache)
        assert torch.equal(found.sequences, want.sequences)


def test_draws_follow_the_contrast(small: Callable[[str], Any]) -> None:
    one, prompt = small("native"), [5, 9, 4]
    want = torch.tensor(scores_of(one, prompt, [0])[0]).softmax(-1)
    count = 600
    found = search(one.model, [prompt], do_sample=True, num_return_sequences=count, max_new_tokens=1, top_k=0, seed=1)
    seen = torch.bincount(found.sequences[:, 3], minlength=43) / count
    assert (seen - want).abs().max() < 4 * math.sqrt(0.25 / count)
    assert not seen[want == 0].any()


def test_what_is_recorded(small: Callable[[str], Any]) -> None:
    """Raw logits stay raw, and asking for hidden states gives those of all layers and changes nothing."""
    one = small("native")
    found = search(one.model, [[5, 9, 4]], output_logits=True, output_hidden_states=True)
    assert torch.equal(found.sequences, search(one.model, [[5, 9, 4]]).sequences)
    assert [len(states) for states in found.hidden_states] == [6] * 8
    for step in range(8):
        with torch.no_grad():
            logits, _ = one.whole(found.sequences[0, : 3 + step].tolist())
        torch.testing.assert_close(found.logits[step][0], logits, rtol=1e-4, atol=1e-4)
    assert search(one.model, [[5, 9, 4]], output_scores=True).hidden_states is None


@pytest.mark.parametrize(
    ("depth", "tied", "low", "high"),
    [
        (1, False, [0], [0]),
        (1, True, [0], [0]),
        (2, True, [1], [1]),
        (4, True, [2], [2]),
        (12, False, [0, 2, 4], [6, 8, 10]),
        (12, True, [2, 4], [6, 8, 10]),
        (32, False, [*range(0, 16, 2)], [*range(16, 32, 2)]),
        (48, False, [*range(0, 20, 2)], [*range(28, 48, 2)]),
        (48, True, [*range(2, 20, 2)], [*range(28, 48, 2)]),
    ],
)
def test_low_and_high(depth: int, tied: bool, low: list[int], high: list[int]) -> None:
    assert list(DoLa(dola_layers="low").chosen(depth, tied)) == low
    assert list(DoLa(dola_layers="high").chosen(depth, tied)) == high


def test_stop_strings_and_streamers() -> None:
    lm = decodekit.load("bundled")
    keys: dict[str, Any] = {**KEYS, "repetition_penalty": 1.2, "max_new_tokens": 40, "stop_strings": [","]}
    pieces = list(lm.stream("It was a fine day and", **keys))
    text = lm.generate("It was a fine day and", **keys)
    assert "".join(pieces) == text
    assert "," not in text


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([5], "has layer 5; before the last one this model has 0 to 4"),
        ([0, -1], "has layer -1"),
        ([], "is empty"),
        ("middle", "'low', 'high'"),
        (3, "'low', 'high'"),
        ([1.5], "'low', 'high'"),
        ([True], "'low', 'high'"),
    ],
)
def test_layers_that_make_no_sense_are_refused(layers: Any, words: str, small: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        decodekit.plan(small("native").model, [[5]], **{**KEYS, "dola_layers": layers})


def test_models_that_hide_their_states_are_refused() -> None:
    from decodekit.testing import TinyLM

    with pytest.raises(ConfigError, match=r"model:early_logits[\s\S]*model:hidden"):
        decodekit.plan(TinyLM().eval(), [[5]], **KEYS)


def test_nan_is_an_error_that_names_the_part(small: Callable[[str], Any]) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 5 else scores * torch.nan

    with pytest.raises(decodekit.GenerationError, match="broken"):
        search(small("native").model, [[5, 9, 4]], logits_processor=[broken])
    assert contrast(torch.full((1, 4), torch.nan), torch.zeros(1, 2, 4)).isnan().all()


def test_the_name_of_the_mode(small: Callable[[str], Any]) -> None:
    for sample in (False, True):
        assert decodekit.plan(small("native").model, [[5]], **{**KEYS, "do_sample": sample}).strategy_name == "dola"

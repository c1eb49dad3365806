"""The conformance suite of decoding strategies: the algorithm is theirs, the laws are everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.api import generate, plan, stream
from decodekit.errors import DecodekitError
from decodekit.models import adapter_for
from decodekit.outputs import GenerateDecoderOnlyOutput

from .caches import METHODS
from .models import TinyLM


class StrategyContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestMine(StrategyContract):
            def make(self):
                return Mine(width=3)

    It runs on `model()`, a tiny random decoder with cache, mask and positions; override it where the strategy needs
    another. `keys` are passed to every call.
    """

    rows, width, new = 3, 5, 12
    streams = True
    """Whether tokens are final when a step yields them; false for those that may still change their mind (beams)."""
    ahead = 0
    """Passes of the model beyond one for each step, all before the first: of those that look at what they may take."""
    keys: Mapping[str, Any] = MappingProxyType({})

    def make(self) -> Any:
        """Return a fresh options object. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def model(self) -> Any:
        """The model to run; the same weights every time."""
        return TinyLM().eval()

    # -- helpers -----------------------------------------------------------------------------------

    def prompts(self, rows: int | None = None) -> Tensor:
        """int64 [rows, width]."""
        random = torch.Generator().manual_seed(4)
        return torch.randint(3, 37, (self.rows, self.width), generator=random)[: rows or self.rows]

    def call(self, inputs: Any = None, **keys: Any) -> GenerateDecoderOnlyOutput:
        """Run to the end and return the output object."""
        keys = self._plain(**keys)
        model = keys.pop("model", None)
        output = generate(
            self.model() if model is None else model,
            self.prompts() if inputs is None else inputs,
            strategy=keys.pop("made", None) or self.make(),
            return_dict_in_generate=True,
            **keys,
        )
        assert isinstance(output, GenerateDecoderOnlyOutput)
        return output

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- what it says ------------------------------------------------------------------------------

    def test_declares_itself(self) -> None:
        """`needs` is a frozenset of capabilities; `samples` a bool, or None for as `do_sample` says."""
        made = self.make()
        assert isinstance(made.needs, frozenset)
        assert made.samples is None or isinstance(made.samples, bool)
        assert all(need.partition(":")[2] for need in made.needs), f"needs must read like cache:crop, got {made.needs}"

    def test_needs_are_all_it_uses(self) -> None:
        """It calls no ability of the cache that `needs` does not name."""
        allowed = {need.removeprefix("cache:") for need in self.make().needs}
        cache = plan(self.model(), self.prompts(), max_new_tokens=self.new).cache
        self.call(cache=_Guard(cache, allowed))

    def test_needs_are_checked(self) -> None:
        """With a cache that lacks what it needs it is refused, by name, before anything runs."""
        missing = sorted(need for need in self.make().needs if need.startswith("cache:"))
        if not missing:
            self._skip("it needs nothing of the cache")
        cache = plan(self.model(), self.prompts(), max_new_tokens=self.new).cache
        problem = self._refusal(cache=_Guard(cache, set()))
        assert problem, f"it ran on a cache without {missing[0]}"
        assert missing[0] in problem, f"the error does not name {missing[0]}: {problem}"

    def _refusal(self, **keys: Any) -> str:
        """The words of the error that a call raises; empty where it runs."""
        try:
            self.call(**keys)
        except DecodekitError as error:
            return str(error)
        return ""

    # -- steps -------------------------------------------------------------------------------------

    def test_one_step_for_each_forward_pass(self) -> None:
        """Every pass of the model yields one step, numbered from 0; tokens of the steps make up the sequences."""
        adapter = _Counter(adapter_for(self.model()))
        steps = []
        for step in stream(adapter, self.prompts(), **self._plain(), strategy=self.make()):
            steps.append(step)
            passes = adapter.passes - self.ahead
            assert passes == len(steps), f"step {step.index} came after {adapter.passes} passes of the model"
        assert [step.index for step in steps] == list(range(len(steps)))
        assert all(steps[-1].finished)
        if self.streams:
            made = torch.cat([s.tokens[:, None] if s.tokens.dim() == 1 else s.tokens for s in steps], 1)
            assert torch.equal(made, self.call().sequences[:, self.width :]), "steps and sequences differ"

    def test_passes_of_the_model(self) -> None:
        """No pass whose result nobody needs: none after the last token."""
        adapter = _Counter(adapter_for(self.model()))
        steps = sum(1 for _ in stream(adapter, self.prompts(), **self._plain(), strategy=self.make()))
        assert adapter.passes == steps + self.ahead, f"{adapter.passes} passes of the model for {steps} steps"

    def _plain(self, **keys: Any) -> dict[str, Any]:
        all_keys = {"max_new_tokens": self.new, "eos_token_id": None, "pad_token_id": 0, "seed": 11}
        all_keys |= {**self.keys, **keys}
        if not self._draws():  # where nothing is drawn a seed is said to have no effect
            del all_keys["seed"]
        return all_keys

    def _draws(self) -> bool:
        samples = getattr(self.make(), "samples", False)
        return bool(self.keys.get("do_sample") if samples is None else samples)

    def test_stops_where_criteria_say(self) -> None:
        """Lengths to the token, a criterion of the caller's, and the reason of each row."""
        for new in (1, 2, 7):
            output = self.call(max_new_tokens=new)
            assert output.sequences.shape[1] == self.width + new
            assert output.lengths == (new,) * len(output.sequences)
            assert all(output.stop_reasons), "a row ended without a reason"

        def four_tokens(input_ids: Tensor, scores: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.width + 4)

        output = self.call(stopping_criteria=[four_tokens])
        assert output.sequences.shape[1] == self.width + 4
        assert set(output.stop_reasons) == {"four_tokens"}

    def test_finished_rows_are_filled(self) -> None:
        """After its end token a row holds nothing but the pad token, and the others go on."""
        plain = self.call().sequences[:, self.width :]
        for row, ends in enumerate(plain[:, 3].tolist()):
            output = self.call(eos_token_id=ends, pad_token_id=1)
            new = output.sequences[:, self.width :]
            for tokens, length in zip(new, output.lengths, strict=True):
                assert (tokens[length:] == 1).all(), "something was written after the end"
                assert ends not in tokens[: length - 1].tolist(), f"an end token of row {row} was passed over"
                assert length == new.shape[1] or tokens[length - 1] == ends

    def test_streamers_get_everything_once(self) -> None:
        """The prompt, then every new token, then the end."""
        if not self.streams:
            self._skip("its tokens are not final before the end")
        heard = _Ear()
        output = self.call(streamer=heard)
        assert heard.ends == 1
        assert torch.equal(torch.cat(heard.pieces, 1), output.sequences)

    def test_closing_cancels(self) -> None:
        """Closing the iterator after a few steps ends the run: no pass of the model follows, nothing is delivered."""
        adapter, heard = _Counter(adapter_for(self.model())), _Ear()
        steps = stream(adapter, self.prompts(), **self._plain(), strategy=self.make(), streamer=heard)
        for _ in range(3):
            next(steps)
        passes = adapter.passes
        steps.close()  # type: ignore[attr-defined]
        assert adapter.passes == passes
        assert next(steps, None) is None
        assert heard.ends == 0

    # -- laws --------------------------------------------------------------------------------------

    def test_repeats(self) -> None:
        """The same options object and seed give the same tokens, and no argument is written to."""
        made, prompts = self.make(), self.prompts()
        before = prompts.clone()
        first = self.call(prompts, made=made)
        assert torch.equal(self.call(prompts, made=made).sequences, first.sequences), "the second call differs"
        assert torch.equal(prompts, before), "it wrote into the prompts"
        if self._draws():
            others = [self.call(prompts, made=made, seed=seed).sequences for seed in (1, 2, 3)]
            assert any(not torch.equal(other, first.sequences) for other in others), "claims samples; no seed mattered"

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """A row of a padded batch, with its own seed, gets the tokens it gets alone."""
        prompts = [row[i:].tolist() for i, row in enumerate(self.prompts())]
        seeds = tuple(range(5, 5 + self.rows))
        batch = self.call(prompts, seed=seeds)
        for row, prompt in enumerate(prompts):
            alone = self.call([prompt], seed=seeds[row]).sequences[0, len(prompt) :]
            assert torch.equal(batch.sequences[row, self.width :], alone), f"row {row} depends on its neighbours"

    def test_without_a_cache(self) -> None:
        """`use_cache=False` gives the same tokens, or an error that says what is missing."""
        problem = self._refusal(use_cache=False)
        if problem:
            assert any(need in problem for need in self.make().needs), f"unclear error: {problem}"
            return
        assert torch.equal(self.call(use_cache=False).sequences, self.call().sequences)

    def test_processors_act(self) -> None:
        """A processor of the caller's is asked for every token."""

        def only_nine(input_ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([9]), 0.0)

        assert (self.call(logits_processor=[only_nine]).sequences[:, self.width :] == 9).all()


class _Counter:
    """An adapter that counts the passes of its model."""

    def __init__(self, adapter: Any) -> None:
        self._adapter, self.passes = adapter, 0

    def __decodekit_adapter__(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.passes += 1
        return self._adapter.forward(*args, **kwargs)


class _Guard:
    """A cache that lets nobody use an ability beyond those allowed."""

    def __init__(self, cache: Any, allowed: set[str]) -> None:
        self._cache, self._allowed = cache, allowed

    def offers(self) -> frozenset[str]:
        return frozenset(self._cache.offers() & self._allowed)

    def __getattr__(self, name: str) -> Any:
        ability = next((a for a, methods in METHODS.items() if name in methods), None)
        if ability is not None and ability not in self._allowed:
            raise AssertionError(f"it used {name} of the cache, but needs does not name cache:{ability}")
        return getattr(self._cache, name)


class _Ear:
    """A streamer that remembers."""

    def __init__(self) -> None:
        self.pieces: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor, /) -> None:
        self.pieces.append(value[:, None] if value.dim() == 1 else value)

    def end(self) -> None:
        self.ends += 1

    def __deepcopy__(self, memo: Any) -> Any:
        return self

"""Faults of every kind of part: the part is named, before the first pass where that is possible."""

from __future__ import annotations

import copy
import json
import pickle
import signal
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from decodekit import (
    ConfigError,
    GenerationConfig,
    GenerationError,
    InputError,
    MissingExtra,
    PluginBroken,
    generate,
    hookimpl,
    option,
    plan,
)
from decodekit.config import ConfigFileError
from decodekit.errors import Problem
from decodekit.registry import registry
from decodekit.testing import ScriptedLM, TinyLM
from decodekit_plugins.commands.plugins import verdict
from decodekit_processors.truncation import TopKLogitsWarper
from torch import Tensor


def run(**keys: Any) -> Any:
    return generate(TinyLM(), [[1, 2]], **{"max_new_tokens": 3, **keys})


# -- errors ----------------------------------------------------------------------------------------


def test_errors_survive_copies_and_pickles() -> None:
    one = ConfigError([Problem("top_p", "must be in [0, 1]", "decodekit:top_p")])
    two = ConfigError([Problem("a", "b"), Problem("c", "d")])
    for error in (one, two, MissingExtra("gguf", "transformers", "reading x")):
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(other) is type(error)
            assert str(other) == str(error)
            assert getattr(other, "problems", ()) == getattr(error, "problems", ())


@pytest.mark.parametrize("text", ['{"max_length": ' + "9" * 5000 + "}", "[" * 100_000, b"\xff".decode("latin-1")])
def test_a_broken_configuration_file_is_named(text: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigFileError, match=r"generation_config\.json is not a valid JSON file"):
        GenerationConfig.from_pretrained(tmp_path)


def test_no_configuration_at_all() -> None:
    with pytest.raises(InputError, match="takes a folder, a file or a Hub id, not None"):
        GenerationConfig.from_pretrained(None)  # type: ignore[arg-type]


# -- strategies ------------------------------------------------------------------------------------


@attrs.frozen
class Does:
    """A strategy whose loop is a function."""

    loop: Any
    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool] = False
    selector: ClassVar[str] = "argmax"

    def decode(self, run: Any, /) -> Any:
        return self.loop(run)


def raises(run: Any) -> Iterator[Any]:
    run.prefill()
    raise KeyError("mine")
    yield


def raises_at_once(run: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize("loop", [raises, raises_at_once])
def test_an_error_of_a_strategy_names_it(loop: Any) -> None:
    with pytest.raises(KeyError, match=r"'Does' \(strategy\) failed in step 0: KeyError: 'mine'") as caught:
        run(strategy=Does(loop))
    assert isinstance(caught.value, GenerationError)


@pytest.mark.parametrize("made", [None, 5])
def test_a_strategy_that_makes_no_steps_is_named(made: Any) -> None:
    with pytest.raises(
        TypeError, match=r"'Does' \(strategy\) failed in step 0: TypeError: .* not an iterator"
    ) as caught:
        run(strategy=Does(lambda run: made))
    assert isinstance(caught.value, GenerationError)


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_number_of_tokens_is_named(count: int) -> None:
    def loop(run: Any) -> Iterator[Any]:
        run.prefill()
        yield run.accept(torch.ones(count, dtype=torch.long))

    with pytest.raises(GenerationError, match=rf"strategy 'Does'.* gave tokens \({count},\) where there are 2 rows"):
        generate(TinyLM(), [[1], [2]], strategy=Does(loop), max_new_tokens=2)


def test_a_strategy_that_never_looks_whether_all_is_over_is_stopped() -> None:
    made = []

    def loop(run: Any) -> Iterator[Any]:
        logits = run.prefill()
        while True:
            step = run.accept(run.select(run.process(logits)))
            made.append(step)
            yield step
            logits = run.forward(step.tokens)

    with pytest.raises(GenerationError, match="strategy 'Does' went on when every row was finished"):
        run(strategy=Does(loop))
    assert len(made) == 3


def test_an_error_of_the_model_is_nobody_elses() -> None:
    class Broken(TinyLM):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            raise ZeroDivisionError("model")

    with pytest.raises(ZeroDivisionError, match="^model$"):
        generate(Broken(), [[1]], max_new_tokens=2)


# -- streamers and processors ------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["put", "end"])
def test_an_error_of_a_streamer_names_it(where: str) -> None:
    class Loud:
        told: BaseException | None = None

        def put(self, value: Tensor) -> None:
            self.act("put")

        def end(self) -> None:
            self.act("end")

        def fail(self, error: BaseException) -> None:
            Loud.told = error

        def act(self, here: str) -> None:
            if here == where:
                raise OSError("disk full")

    with pytest.raises(OSError, match=r"'Loud' \(streamer\) failed in step \d: OSError: disk full") as caught:
        run(streamer=Loud())
    assert isinstance(caught.value, GenerationError)
    assert Loud.told is caught.value


def test_a_processor_that_raises_stop_iteration_is_named() -> None:
    def empty(input_ids: Tensor, scores: Tensor) -> Tensor:
        return next(iter(()))

    with pytest.raises(GenerationError, match=r"'empty' \(caller\) failed in step 0: StopIteration"):
        run(logits_processor=[empty])


def test_a_signal_is_nobodys_fault() -> None:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError("too long")

    def slow(input_ids: Tensor, scores: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGUSR1)
        return scores

    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(TimeoutError, match="^too long$"):
            run(logits_processor=[slow])
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", [torch.bool, torch.complex64, torch.int64])
def test_scores_that_are_no_numbers_to_compare_are_refused(kind: torch.dtype) -> None:
    with pytest.raises(GenerationError, match=rf"'<lambda>' \(caller\) must return floating scores .* {kind}"):
        run(logits_processor=[lambda input_ids, scores: scores.to(kind)])

    class Odd(TinyLM):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens).to(kind)

    with pytest.raises(GenerationError, match=rf"the model must give floating logits .* {kind}"):
        generate(Odd(), [[1]], max_new_tokens=1)


# -- scores that leave one token no rival ------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"top_p": 0.9}, {"top_k": 0}, {"top_k": 0, "min_p": 0.1}, {"typical_p": 0.5}])
def test_an_infinite_score_is_taken(keys: dict[str, Any]) -> None:
    out = run(do_sample=True, sequence_bias={(7,): float("inf")}, **keys)
    assert out[0, 2:].tolist() == [7, 7, 7]


def test_the_coldest_temperature_takes_the_likeliest() -> None:
    want = run()
    assert torch.equal(run(do_sample=True, temperature=1e-38), want)
    assert torch.equal(run(do_sample=True, temperature=1e-38, top_k=0), want)


def test_two_infinite_scores_share_the_chance() -> None:
    steep = ScriptedLM(torch.tensor([[float("inf"), 0.0, float("inf")]] * 3))
    out = generate(steep, [[1]], do_sample=True, top_k=0, max_new_tokens=60, seed=3)[0, 1:]
    assert set(out.tolist()) == {0, 2}


# -- what cannot take part ---------------------------------------------------------------------------


@attrs.frozen
class Idle:
    """Neither __call__ nor bind."""

    size: int = option("Nothing.", default=1)


@attrs.frozen
class Five:
    def bind(self, ctx: Any, /) -> Any:
        return 5


@attrs.frozen
class Stated:
    traits: ClassVar = {"phase": "SCALE"}

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores


@pytest.mark.parametrize("cls", [Idle, Five, Stated])
@pytest.mark.parametrize("kind", ["processors", "criteria"])
def test_what_cannot_act_is_broken_before_anything_runs(register: Any, kind: str, cls: type) -> None:
    plugin = register(kind, "odd", cls)
    with pytest.raises(PluginBroken, match=r"'odd' \(local:odd\)"):
        plan(TinyLM(), [[1]], **{kind: {"odd": {}}})
    if cls is not Five:  # what bind returns is known in a call only
        assert verdict(registry, plugin)[0] == "BROKEN"


@pytest.mark.parametrize(("kind", "key"), [("strategies", "strategy"), ("selectors", "selector")])
def test_a_bind_that_returns_no_part_names_the_plugin(register: Any, kind: str, key: str) -> None:
    register(kind, "odd", Five)
    with pytest.raises(InputError, match=f"{key} 'odd' must be an object with .*, not 5"):
        plan(TinyLM(), [[1]], **{key: "odd"})


def test_an_entry_point_that_is_a_number() -> None:
    from decodekit.registry import Plugin

    with pytest.raises(PluginBroken, match="it is 5, neither a class nor a function"):
        Plugin("processors", "number", f"{__name__}:NUMBER", "acme", "1").load()


NUMBER = 5


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"logits_processor": ["top_p"]}, "TopPLogitsWarper needs arguments"),
        ({"logits_processor": [TopKLogitsWarper]}, "TopKLogitsWarper needs arguments: pass an object of it"),
        ({"strategy": Does}, "strategy Does needs arguments"),
    ],
)
def test_a_class_that_needs_arguments(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        run(**keys)


# -- hooks -----------------------------------------------------------------------------------------


def hook(name: str, act: Any) -> Any:
    arguments = {
        "doubts": lambda settings, samples: act(),
        "report": lambda pipeline: act(),
        "config_translated": lambda settings: act(),
        "pipeline_assembled": lambda pipeline: act(),
        "run_wrapped": lambda pipeline: act(),
        "run_finished": lambda pipeline, output: act(),
    }
    return types.SimpleNamespace(**{name: hookimpl(arguments[name])})


def fail() -> Any:
    raise ZeroDivisionError("oops")


@pytest.mark.parametrize("name", ["config_translated", "pipeline_assembled", "run_wrapped", "run_finished"])
def test_a_hook_that_fails_is_named(register: Any, name: str) -> None:
    register("hooks", "half", hook(name, fail))
    with pytest.raises(ZeroDivisionError, match=f"hooks plugin local:half failed in {name}: ZeroDivisionError: oops"):
        run()


@pytest.mark.parametrize("act", [fail, lambda: 5, lambda: ["no problem"]])
@pytest.mark.parametrize("name", ["doubts", "report"])
def test_advice_that_fails_is_left_out(register: Any, name: str, act: Any) -> None:
    register("hooks", "half", hook(name, act))
    with pytest.warns(UserWarning, match=f"hooks plugin local:half failed in {name}"):
        described = plan(TinyLM(), [[1, 2]], max_new_tokens=2).describe()
    assert described["strategy"] == "greedy"


def test_a_hook_that_returns_no_context_is_named(register: Any) -> None:
    register("hooks", "half", hook("run_wrapped", lambda: 5))
    with pytest.raises(TypeError, match="hooks plugin local:half failed in run_wrapped: TypeError: returned 5"):
        run()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (types.SimpleNamespace(), "no function marked"),
        (types.SimpleNamespace(report=hookimpl(lambda pipeline, mood: None)), "mood"),
        (hook("doubts", lambda: 5), "doubts returned 5"),
        (hook("doubts", fail), "ZeroDivisionError: oops"),
    ],
)
def test_the_check_finds_what_is_wrong_with_hooks(register: Any, made: Any, words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, cause = verdict(registry, register("hooks", "half", made))
    assert state == "BROKEN"
    assert words in cause
    assert json.dumps(cause)

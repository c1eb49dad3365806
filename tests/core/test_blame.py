"""An error in a plugin names the plugin and keeps its type; what a plugin writes to or returns cannot spoil a run."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
import torch
from decodekit import ConfigError, GenerationError, InputError, Phase, PipelineError, Traits, generate, option, plan
from decodekit.errors import DecodekitError, named
from decodekit.testing import ScriptedLM, TinyLM
from torch import Tensor


@attrs.frozen
class Faulty:
    """Fails where it is told to."""

    traits: ClassVar = Traits(phase=Phase.TRUNCATE, after=("top_k",), reads_history=False, pure=True)
    where: str = option("The method that fails.", default="__call__")
    error: str = option("The kind of error.", default="KeyError")

    def fail(self, where: str) -> None:
        if where == self.where:
            raise {"KeyError": KeyError, "ValueError": ValueError, "InputError": InputError}[self.error]("boom")

    def bind(self, ctx: Any, /) -> Faulty:
        self.fail("bind")
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        self.fail("__call__")
        return scores

    def shorten(self, input_ids: Tensor, shortlist: Any, /) -> Any:
        self.fail("shorten")
        return shortlist

    def accept(self, tokens: Tensor, rows: Any, /) -> None:
        self.fail("accept")


def run(**keys: Any) -> Any:
    return generate(TinyLM(), [[1, 2]], max_new_tokens=3, do_sample=True, **keys)


@pytest.fixture
def faulty(register: Any) -> Callable[..., Any]:
    register("processors", "faulty", Faulty, fault_at="where", fault_kind="error")
    return lambda **keys: run(top_k=4, **keys)


@pytest.mark.parametrize("where", ["__call__", "shorten", "accept"])
def test_the_plugin_is_named_and_the_type_stays(faulty: Any, where: str) -> None:
    call = (lambda **keys: run(top_k=0, **keys)) if where == "__call__" else faulty
    with pytest.raises(KeyError) as caught:
        call(fault_at=where)
    assert isinstance(caught.value, GenerationError)
    assert str(caught.value) == "'faulty' (local:faulty) failed in step 0: KeyError: 'boom'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_bind_refuses_is_a_problem_of_its_keys(faulty: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        faulty(fault_at="bind", fault_kind="ValueError", temperature=(0.5, 0.7))
    found = {problem.key: (problem.message, problem.owner) for problem in caught.value.problems}
    assert found["fault_at, fault_kind"] == ("boom", "local:faulty")
    assert "2 values for 1 prompt" in found["temperature"][0]
    with pytest.raises(KeyError, match=r"'faulty' \(local:faulty\) cannot be prepared for this call: KeyError"):
        faulty(fault_at="bind")
    with pytest.raises(PipelineError, match="cannot be prepared"):
        faulty(fault_at="bind")
    with pytest.raises(InputError, match="^boom$"):  # it says all there is to say itself
        faulty(fault_at="bind", fault_kind="InputError")


def test_objects_of_the_caller_are_named_too() -> None:
    class Mine:
        def __call__(self, input_ids: Tensor, scores: Any) -> Any:
            return self.deeper()

        def deeper(self) -> Any:
            raise ValueError("mine")

    def function(input_ids: Tensor, scores: Any) -> Any:
        raise ValueError("function")

    class Module(torch.nn.Module):
        def forward(self, input_ids: Tensor, scores: Any) -> Any:
            raise ValueError("module")

    named_after = {"Mine": Mine(), "function": function, "partial": functools.partial(function), "Module": Module()}
    for name, item in named_after.items():
        for kind in ("logits_processor", "stopping_criteria"):
            with pytest.raises(ValueError, match=rf"'{name}' \(caller\) failed in step 0: ValueError: ") as caught:
                run(**{kind: [item]})
            assert isinstance(caught.value, GenerationError)
    with pytest.raises(TypeError, match=r"'isinstance' \(caller\) failed in step 0"):  # C code has no frame
        run(logits_processor=[isinstance])


def test_a_selector_is_named_and_a_model_is_not_taken_for_one(register: Any) -> None:
    class Shy:
        def __call__(self, scores: Any, ctx: Any) -> Tensor:
            raise ZeroDivisionError("shy")

    class Broken(TinyLM):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            raise ZeroDivisionError("model")

    register("selectors", "shy", Shy)
    with pytest.raises(ZeroDivisionError, match="'shy' .selector. failed in step 0"):
        run(selector="shy")
    with pytest.raises(ZeroDivisionError, match="^model$"):
        generate(Broken(), [[1]], max_new_tokens=2, logits_processor=[lambda ids, scores: scores])
    with pytest.raises(KeyboardInterrupt):
        run(logits_processor=[lambda ids, scores: (_ for _ in ()).throw(KeyboardInterrupt())])


def test_any_error_can_be_named() -> None:
    class Final(Exception):
        def __init_subclass__(cls) -> None:
            raise TypeError("no subclasses")

    class Carrier(ValueError):
        code = 0

    carrier = Carrier("x")
    carrier.code = 7
    errors = [KeyError("k"), OSError(2, "gone"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), carrier, Exception()]
    for error in errors:
        made = named(error, "who")
        assert isinstance(made, GenerationError)
        assert isinstance(made, type(error))
        assert str(made) == f"who: {type(error).__name__}: {error}".rstrip(": ")
        copied = pickle.loads(pickle.dumps(made))
        assert (type(copied), str(copied)) == (GenerationError, str(made))
    assert named(carrier, "who").code == 7  # type: ignore[attr-defined]
    assert type(named(Final("x"), "who")) is GenerationError


# -- what they write to and return -------------------------------------------------------------------


def scribble(input_ids: Tensor, scores: Any) -> Any:
    input_ids.fill_(0)
    return scores


def test_token_ids_given_to_objects_of_the_caller_are_theirs() -> None:
    def stop(input_ids: Tensor, scores: Any) -> Tensor:
        input_ids.fill_(0)
        return torch.tensor([False])

    seen: list[list[int]] = []

    def look(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    want = generate(TinyLM(), [[1, 2]], max_new_tokens=4)
    got = generate(
        TinyLM(), [[1, 2]], max_new_tokens=4, logits_processor=[scribble, look], stopping_criteria=[scribble_stop, stop]
    )
    assert torch.equal(got, want)
    assert seen == [want[0, :width].tolist() for width in range(2, 6)]


def scribble_stop(input_ids: Tensor, scores: Any) -> bool:
    input_ids.zero_()
    return False


def test_pure_plugins_get_no_copy(register: Any) -> None:
    pointers: set[int] = set()

    @attrs.frozen
    class Pure:
        traits: ClassVar = Traits(phase=Phase.BIAS, pure=True)

        def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
            pointers.add(input_ids.data_ptr())
            return scores

    register("processors", "pure", Pure)
    made = plan(TinyLM(), [[1, 2]], processors={"pure": {}}, max_new_tokens=4)
    from decodekit import Run

    for _ in Run(made):
        pass
    assert pointers == {made.context.tokens.data_ptr()}


@attrs.frozen
class Says:
    """A strategy that accepts one token, whatever the model says."""

    token: int
    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool] = False

    def decode(self, run: Any, /) -> Any:
        run.process(run.prefill())
        while not run.finished:
            yield run.accept(torch.tensor([3, self.token]))


@pytest.mark.parametrize("token", [37, -7, 10**6])
def test_a_token_outside_the_vocabulary(token: int) -> None:
    words = rf"strategy 'Says' accepted token {token}, which is outside .* vocabulary of 37 \(row 1, step 0\)"
    with pytest.raises(GenerationError, match=words):
        generate(TinyLM(), [[1], [2]], strategy=Says(token), max_new_tokens=2)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (torch.tensor([float("nan")]), r"got torch.float32 \(1,\)"),
        (torch.tensor([1.0]), r"got torch.float32 \(1,\)"),
        (torch.tensor(0.0), r"got torch.float32 \(\)"),
        (float("nan"), "got nan"),
        (1.0, "got 1.0"),
        (None, "got None"),
    ],
)
def test_a_verdict_that_is_no_yes_or_no(verdict: Any, words: str) -> None:
    def unsure(input_ids: Tensor, scores: Any) -> Any:
        return verdict

    with pytest.raises(GenerationError, match=rf"stopping criterion 'unsure' \(caller\) must return a bool .*{words}"):
        generate(ScriptedLM(torch.eye(4)), [[1]], max_new_tokens=3, stopping_criteria=[unsure])


def test_whole_numbers_still_are_verdicts() -> None:
    stop = [lambda input_ids, scores: torch.tensor([1])]
    out = generate(ScriptedLM(torch.eye(4)), [[1]], max_new_tokens=3, stopping_criteria=stop)
    assert out.shape == (1, 2)


@pytest.mark.parametrize(
    ("outcome", "words", "kind"),
    [
        (ValueError("boom"), r"the preparer 'dull' cannot prepare .*: ValueError: boom", ValueError),
        (InputError("an eager model is wanted"), "^an eager model is wanted", InputError),
        (None, r"what the preparer 'dull' returns must be an object with forward, not None", InputError),
    ],
)
def test_a_preparer_that_fails(register: Any, outcome: Any, words: str, kind: type[Exception]) -> None:
    class Dull:
        def prepare(self, adapter: Any, /) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    register("preparers", "dull", Dull)
    with pytest.raises(DecodekitError, match=words) as caught:
        generate(TinyLM(), [[1, 2]], prepare="dull")
    assert isinstance(caught.value, kind)

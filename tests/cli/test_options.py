"""Options of commands with a model: values of every kind, and words for what cannot be meant."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--no-do-sample", "--max-new-tokens", "3", "--no-echo")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("--logit-bias", '{" the": 30}'), {"logit_bias": {" the": 30}}),
        (("--sequence-bias", "[[[5], 30.5]]"), {"sequence_bias": [[[5], 30.5]]}),
        (
            ("--guidance-scale", "2", "--negative-prompt-ids", "[[1, 2]]"),
            {"guidance_scale": 2, "negative_prompt_ids": [[1, 2]]},
        ),
        (("--exponential-decay-length-penalty", "[1, 2.5]"), {"exponential_decay_length_penalty": (1, 2.5)}),
        (("--suppress-tokens", "[5, 6]"), {"suppress_tokens": [5, 6]}),
    ],
)
def test_values_that_their_owner_converts(here, words: tuple[str, ...], keys: dict[str, Any]) -> None:
    from decodekit import load

    done = here("generate", "She was", *SHORT, *words)
    assert done.returncode == 0, done.stderr
    want = load("bundled").generate("She was", do_sample=False, max_new_tokens=3, **keys)
    assert done.stdout == f"{want}\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [(("--logit-bias", '{"the": "x"}'), "logit_bias"), (("--sequence-bias", '[[[5], "a"]]'), "sequence_bias")],
)
def test_such_values_are_still_checked(here, words: tuple[str, ...], key: str) -> None:
    done = here("generate", "She was", *SHORT, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"decodekit: {key}: must map token ids")


@pytest.mark.parametrize("key", ["eos-token-id", "suppress-tokens"])
def test_lists_of_token_ids_for_each_prompt(here, key: str) -> None:
    done = here("generate", "She was", "He was", "--json", *SHORT, f"--{key}", "[[1], [2]]")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    wrong = here("generate", "She was", "He was", *SHORT, f"--{key}", "[[1], [2], [3]]")
    assert wrong.returncode == 2
    assert "has 3 values for 2 prompts" in wrong.stderr
    same = here("generate", "She was", "He was", "--json", *SHORT, f"--{key}", "[1, 2, 3]")
    assert same.returncode == 0, same.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("x", "--logprob-threshold", "5"), "--logprob-threshold: not available in this version of decodekit"),
        (("x", "--do-sample", "no"), "write --do-sample=false, or --no-do-sample"),
        (("x", "--do-sample", "YES"), "write --do-sample=true"),
        (("x", "--use-cache", "maybe"), "is followed by 'maybe', which is neither true nor false"),
        (("x", "--adapter", "native"), "--adapter: native opens what --model names"),
        (("x", "--config="), "--config: there is no file ''"),
    ],
)
def test_what_cannot_be_meant(here, words: tuple[str, ...], message: str) -> None:
    done = here("generate", *words)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("form", ["--json", "--no-stream", "--no-echo"])
def test_outputs_that_nobody_would_see(here, form: str) -> None:
    done = here("generate", "x", "--output-scores", form)
    assert done.returncode == 1
    assert "output_scores: this gives text only" in done.stderr


def test_a_file_without_a_name(here) -> None:
    done = here("generate", "x", "--file=")
    assert done.returncode == 1
    assert "--file names no file" in done.stderr


def test_a_prompt_may_still_follow_a_switch(here) -> None:
    done = here("generate", "--use-cache", "She was", "--json", *SHORT)
    assert json.loads(done.stdout)["prompt"] == "She was"
    done = here("generate", "--json", *SHORT, "--use-cache", "--", "no")
    assert json.loads(done.stdout)["prompt"] == "no"


def test_debug_stands_anywhere(here) -> None:
    done = here("generate", "x", "--top-p", "2", "--debug", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    done = here("generate", *SHORT, "--json", "--", "--debug")
    assert json.loads(done.stdout)["prompt"] == "--debug"


def test_no_standard_input(here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from decodekit_plugins.commands.main import main

    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_numpy_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('there is none')\n")
    path = ":".join([str(tmp_path), *filter(None, sys.path)])
    words = [sys.executable, "-m", "decodekit", "generate", "She was", *SHORT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PYTHONPATH": path})
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("error", [RecursionError, ImportError, SystemError])
def test_an_interruption_that_became_another_error(here, register, error: type[Exception]) -> None:
    def run(argv: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error("half imported") from None
        return 0

    register("commands", "halved", run)
    done = here("halved")
    assert done.returncode == 130
    assert done.stderr == "\ninterrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

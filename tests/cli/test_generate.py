"""``decodekit generate``, ``explain`` and ``keys`` in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from decodekit import load

SHORT = ("--no-do-sample", "--max-new-tokens", "6")


def test_json_lines_from_several_sources(here, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"Two\r\n\nThree\n")
    done = here("generate", "One", "--file", str(file), "-", "--json", *SHORT, "--seed", "3", stdin="Four\n")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["One", "Four", "Two", "Three"]
    assert all(row["tokens"] == 6 and row["stop_reason"] == "max_length" for row in rows)
    assert all(row["seconds"] > 0 and row["tokens_per_second"] > 0 for row in rows)


def test_streamed_and_complete_text_are_the_same(here) -> None:
    streamed = here("generate", "She was", *SHORT)
    whole = here("generate", "She was", *SHORT, "--no-stream", "--no-echo")
    assert streamed.returncode == whole.returncode == 0, streamed.stderr
    assert streamed.stdout == "She was" + whole.stdout
    assert "\x1b" not in streamed.stdout


def test_seeds_are_those_of_one_call_with_all_prompts(here) -> None:
    words = ("--do-sample", "--seed", "5", "--max-new-tokens", "8")
    done = here("generate", "She was", "He was", "--json", *words)
    texts = load("bundled").generate(["She was", "He was"], do_sample=True, seed=5, max_new_tokens=8)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == texts


def test_a_bad_prompt_among_others_costs_only_itself(here) -> None:
    done = here("generate", "Fine", os.fsdecode(b"\xff"), "Also fine", "--json", *SHORT)
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert ["text" in row for row in rows] == [True, False, True]
    assert "UTF-8" in rows[1]["error"]


def test_empty_prompt(here) -> None:
    done = here("generate", "", *SHORT)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("generate",), 2, "there is no prompt"),
        (("generate", "x", "--tpo-p", "1"), 2, "did you mean --top-p"),
        (("generate", "x", "--top-p", "3"), 2, "top_p: must be in [0, 1], got 3.0 (owner: decodekit:top_p)"),
        (("generate", "x", "--strategy", "gredy"), 2, "greedy"),
        (("generate", "x", "--model", "/no/such/folder"), 1, "/no/such/folder"),
        (("generate", "x", "--adapter", "natve", "--model", "/x"), 1, "did you mean native"),
        (("generate", "--file", "/no/such/file"), 1, "cannot read prompts from /no/such/file: No such file"),
        (("generate", "x", "--config", "/no/such/file"), 2, "there is no file '/no/such/file'"),
        (("generate", "x", "--model"), 2, "expected one argument"),
        (("explain", "a", "b"), 2, "one prompt"),
        (("keys", "tpo_p"), 2, "did you mean top_p"),
    ],
)
def test_errors_name_the_fix(here, words: tuple[str, ...], code: int, message: str) -> None:
    done = here(*words)
    assert message in done.stderr
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_key_without_effect_is_told(here) -> None:
    done = here("explain", "--no-do-sample", "--top-p", "0.5")
    assert done.returncode == 0
    assert "decodekit: warning: top_p: 0.5 has no effect without do_sample=True" in done.stderr


def test_config_file(here, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"max_new_tokens": 3, "temperature": 0.5, "do_sample": true}')
    done = here("explain", "--config", str(file), "--temperature", "0.7", "--json")
    settings = json.loads(done.stdout)["settings"]
    assert (settings["max_new_tokens"]["value"], settings["max_new_tokens"]["origin"]) == (3, "config")
    assert (settings["temperature"]["value"], settings["temperature"]["origin"]) == (0.7, "call")


def test_explain(here) -> None:
    done = here("explain", "--do-sample", "--top-p", "0.9", "--repetition-penalty", "1.1")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    order = [line[1] for line in lines if len(line) > 3 and line[0].isdigit()]
    assert order.index("repetition_penalty") < order.index("top_p")
    assert ["strategy", "sample"] in lines
    assert "top_p=0.9 (call)" in done.stdout
    assert "left out" in done.stdout


@pytest.mark.parametrize("stop", ["interrupt", "close"])
def test_a_run_that_is_stopped(command, stop: str) -> None:
    running = command.start("generate", "She was", "--max-new-tokens", "900", "--eos-token-id", "-1")
    first = os.read(running.stdout.fileno(), 7)
    assert first == b"She was"
    if stop == "interrupt":
        while len(first) < 30:
            first += os.read(running.stdout.fileno(), 30)
        running.send_signal(signal.SIGINT)
    else:
        running.stdout.close()
    assert running.wait(timeout=60) == (130 if stop == "interrupt" else 141)
    complaint = running.stderr.read().decode()
    assert "Traceback" not in complaint
    if stop == "interrupt":
        rest = running.stdout.read()
        assert len(first + rest) >= 30
        assert "interrupted" in complaint
    else:
        assert complaint == ""


def test_an_interrupted_run_still_gives_its_json(here, register) -> None:
    class Stop:
        def __call__(self, input_ids, scores, /):
            if input_ids.shape[1] > 5:
                raise KeyboardInterrupt
            return scores

    register("processors", "stop", Stop)
    done = here("generate", "She was", "He was", "--json", *SHORT, "--processors", '{"stop": {}}')
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["prompt"], row["stop_reason"]) == ("She was", "cancelled")
    assert 0 < row["tokens"] < 6
    whole = here("generate", "She was", "--no-echo", *SHORT).stdout
    assert row["text"]
    assert whole.startswith(row["text"])


def test_ctrl_c_and_json(command) -> None:
    running = command.start("generate", "She was", "--json", "--max-new-tokens", "100000", "--eos-token-id", "-1")
    while b"positions" not in running.stderr.readline():  # the warning of a text that has become very long
        pass
    running.send_signal(signal.SIGINT)
    out, complaint = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in complaint
    [row] = [json.loads(line) for line in out.decode().splitlines()]
    assert row["stop_reason"] == "cancelled"
    assert row["tokens"] > 100


@pytest.mark.parametrize("words", [("--temperature", "0.2,1.0"), ("--temperature", "[0.2, 1.0]")])
def test_one_value_for_each_prompt(here, words: tuple[str, ...]) -> None:
    draw = ("--do-sample", "--seed", "5", "--max-new-tokens", "8")
    done = here("generate", "She was", "He was", "--json", *draw, *words)
    assert done.returncode == 0, done.stderr
    texts = load("bundled").generate(
        ["She was", "He was"], do_sample=True, seed=5, max_new_tokens=8, temperature=[0.2, 1.0]
    )
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == texts
    seeded = here("generate", "She was", "She was", "--json", "--do-sample", "--seed", "5,5", "--max-new-tokens", "8")
    one, two = (json.loads(line)["text"] for line in seeded.stdout.splitlines())
    assert one == two
    for prompts, said in ((["a", "b", "c"], "2 values for 3 prompts"), (["a"], "2 values for 1 prompt")):
        done = here("generate", *prompts, *draw, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"temperature: has {said}" in done.stderr


def test_one_value_for_each_prompt_of_a_file(here, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": [0.001, 1.0], "max_new_tokens": 6, "seed": [1, 2]}', encoding="utf-8-sig")
    done = here("generate", "She was", "She was", "--json", "--do-sample", "--config", str(file))
    assert done.returncode == 0, done.stderr
    cold = here("generate", "She was", "--json", *SHORT)
    rows = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert rows[0] == json.loads(cold.stdout)["text"]
    assert rows[1] != rows[0]


def test_keys_tell_which_take_one_value_for_each_prompt(here) -> None:
    rows = {row["key"]: row for row in json.loads(here("keys", "--json").stdout)["keys"]}
    assert rows["temperature"]["per_prompt"]
    assert rows["seed"]["per_prompt"]
    assert not rows["strategy"]["per_prompt"]
    assert "or a list with one for each prompt" in here("keys", "temperature").stdout


def test_keys_forms(command, tmp_path: Path) -> None:
    site = tmp_path / "broken-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text(
        "[decodekit.processors]\nbad = broken_nowhere:Bad\n[decodekit.keys]\nbadness = broken_nowhere:Bad.badness\n"
    )
    done = command("keys", "--json", path=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = {row["key"]: row for row in json.loads(done.stdout)["keys"]}
    assert rows["top_p"]["range"] == "in [0, 1], or a list with one for each prompt"
    assert "broken 1.0" in rows["badness"]["error"]
    assert rows["do_sample"]["owner"] == "decodekit:Choices"
    table = command("keys", "--markdown").stdout.splitlines()
    assert table[0].startswith("| Key")
    assert any(line.startswith("| `top_p` |") for line in table)
    assert command("keys", "badness", path=str(tmp_path)).returncode == 1

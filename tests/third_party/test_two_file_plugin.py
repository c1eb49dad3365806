"""A plugin is a pyproject.toml and a module: once installed, everything knows it."""

from __future__ import annotations

from typing import Any

import pytest

NAMES = ("decodekit-sharpen", "decodekit-toy")


def test_generate_takes_its_key_and_the_scores_show_it(python: Any) -> None:
    result = python(
        """
        import json, torch, decodekit
        from decodekit_toy import Parrot
        kept = dict(do_sample=True, seed=3, max_new_tokens=4, top_k=0, output_scores=True, output_logits=True)
        runs = {
            "flat": decodekit.generate(Parrot(), [[5]], sharpen=2.5, **kept),
            "nested": decodekit.generate(Parrot(), [[5]], {"processors": {"sharpen": {"power": 2.5}}}, **kept),
            "object": decodekit.generate(Parrot(), [[5]], decodekit.GenerationConfig(sharpen=2.5), **kept),
            "without": decodekit.generate(Parrot(), [[5]], **kept),
        }
        print(json.dumps({name: {
            "ids": out.sequences.tolist(),
            "factor": sorted({round(float(s), 4) for s in (torch.stack(out.scores) / torch.stack(out.logits))[
                torch.stack(out.logits) > 0].flatten()}),
        } for name, out in runs.items()}))
        """,
        *NAMES,
    ).json
    assert [result[way]["factor"] for way in ("flat", "nested", "object", "without")] == [[2.5], [2.5], [2.5], [1.0]]
    assert result["flat"]["ids"] == result["nested"]["ids"] == result["object"]["ids"]


def test_plan_names_owner_phase_and_reason(python: Any) -> None:
    plan = python(
        """
        import json, decodekit
        from decodekit_toy import Parrot
        p = decodekit.plan(Parrot(), [[5]], sharpen=2.0, temperature=0.5, do_sample=True)
        print(json.dumps(p.describe(), default=str))
        """,
        *NAMES,
    ).json
    row = next(row for row in plan["processors"] if row["name"] == "sharpen")
    assert (row["owner"], row["phase"]) == ("decodekit-sharpen:sharpen", "SCALE")
    assert "sharpen=2.0 (call)" in row["why"]
    assert plan["settings"]["sharpen"] == {"value": 2.0, "origin": "call", "owner": "decodekit-sharpen:sharpen"}
    names = [row["name"] for row in plan["processors"]]
    assert names.index("sharpen") < names.index("top_k")


def test_a_value_its_validator_refuses_names_key_owner_and_range(python: Any) -> None:
    text = python(
        """
        import json, decodekit
        from decodekit_toy import Parrot
        try:
            decodekit.generate(Parrot(), [[5]], sharpen=-1.0, do_sample=True)
        except decodekit.ConfigError as error:
            print(json.dumps(str(error)))
        """,
        *NAMES,
    ).json
    assert "sharpen" in text
    assert "decodekit-sharpen:sharpen" in text
    assert "must be greater than 0, got -1.0" in text


def test_the_plugin_list_shows_it_without_importing_it(command: Any) -> None:
    rows = command(["plugins", "--json"], "decodekit-sharpen").json_document["plugins"]
    row = next(row for row in rows if row["name"] == "sharpen")
    assert (row["kind"], row["distribution"], row["version"]) == ("processors", "decodekit-sharpen", "1.0")
    assert row["state"] == "found"


def test_the_key_table_shows_it(command: Any) -> None:
    rows = command(["keys", "--json"], "decodekit-sharpen").json_document["keys"]
    row = next(row for row in rows if row["key"] == "sharpen")
    assert row["owner"] == "decodekit-sharpen:sharpen"
    # Unset, the processor does not act: what `power` is by itself is no default of the key.
    assert (row["type"], row["default"], row["range"]) == ("a number", None, "greater than 0")
    assert "power" in row["doc"]


def test_explain_and_generate_take_it_as_an_option(command: Any) -> None:
    result = command(["explain", "--model", "parrot:16", "--do-sample", "--sharpen", "2.0", "--json"], *NAMES)
    described = result.json_document
    assert any(row["owner"] == "decodekit-sharpen:sharpen" for row in described["processors"])
    bad = command(["explain", "--model", "parrot:16", "--do-sample", "--sharpen", "0", "--json"], *NAMES)
    assert bad.code == 2
    assert "greater than 0" in bad.err


@pytest.mark.parametrize("words", [["plugins"], ["keys"]])
def test_without_the_plugin_nothing_mentions_it(command: Any, words: list[str]) -> None:
    result = command(words)
    assert result.code == 0, result.err
    assert "decodekit-sharpen" not in result.out

"""Clashing and misspelt names: never settled by luck, always answered with the nearest name."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import json, decodekit, torch
from decodekit_toy import Parrot
kept = dict(do_sample=True, seed=1, max_new_tokens=2, output_scores=True)

def widths(**keys):
    try:
        out = decodekit.generate(keys.pop("model", Parrot()), [[5]], keys.pop("config", None), **kept, **keys)
    except decodekit.PluginClash as error:
        return str(error)
    return [int((s > -torch.inf).sum()) for s in out.scores]
"""


def test_a_clash_asks_for_the_qualified_name(python: Any) -> None:
    result = python(
        SCRIPT
        + """
model = Parrot()
model.defaults = {"top_k": 3}
print(json.dumps({
    "bare": widths(top_k=2),
    "theirs": widths(**{"decodekit-clash:top_k": 2}),
    "ours": widths(**{"decodekit:top_k": 4}),
    "both": widths(**{"decodekit:top_k": 4, "decodekit-clash:top_k": 2}),
    "neither": widths(),
    "section": widths(config={"processors": {"top_k": {"top_k": 2}}}),
    "qualified section": widths(config={"processors": {"decodekit-clash:top_k": {"k": 2}}}),
    "model": widths(model=model),
}))
""",
        "decodekit-clash",
        "decodekit-toy",
    ).json
    for way in ("bare", "section"):
        assert "decodekit:top_k" in result[way]
        assert "decodekit-clash:top_k" in result[way]
    assert result["theirs"] == [2, 2]
    assert result["ours"] == [4, 4]
    assert result["both"] == [2, 2]
    assert result["qualified section"] == [2, 2]
    # Nobody asked for the clashing name: the library's default, and what a model's file says, mean decodekit's own.
    assert result["neither"] == [32, 32]
    assert result["model"] == [3, 3]


def test_prefer_settles_it(python: Any) -> None:
    script = SCRIPT + "print(json.dumps({'three': widths(top_k=3), 'plan': [p['owner'] for p in"
    script += " decodekit.plan(Parrot(64), [[5]], top_k=60, do_sample=True).describe()['processors']]}))"
    for prefer, owner in (("decodekit-clash", "decodekit-clash:top_k"), ("decodekit:top_k", "decodekit:top_k")):
        result = python(script, "decodekit-clash", "decodekit-toy", DECODEKIT_PREFER=prefer).json
        assert result["three"] == [3, 3]
        # The library's default of 50 must not come on top of the preferred plugin's 60.
        assert result["plan"] == [owner]


def test_check_reports_the_clash(command: Any) -> None:
    import json

    result = command(["plugins", "--check", "--json"], "decodekit-clash")
    rows = [row for row in json.loads(result.out)["plugins"] if row["name"] == "top_k" and row["kind"] == "processors"]
    assert result.code == 1
    assert [row["state"] for row in rows] == ["CLASH", "CLASH"]
    assert "decodekit-clash:top_k" in rows[0]["cause"]


def test_keys_reports_the_clash(command: Any) -> None:
    rows = command(["keys", "--json"], "decodekit-clash").json_document["keys"]
    clashing = {row["owner"]: row.get("error", "") for row in rows if row["key"] == "top_k"}
    assert set(clashing) == {"decodekit:top_k", "decodekit-clash:top_k"}
    assert all("owned by several distributions" in error for error in clashing.values())
    assert not any("error" in row for row in rows if row["key"] != "top_k")
    shown = command(["keys", "top_k"], "decodekit-clash")
    assert shown.code == 1
    assert shown.out.count("config key 'top_k' is owned by several distributions") == 2
    lines = [line for line in command(["keys"], "decodekit-clash").out.splitlines() if "CLASH: " in line]
    assert [line.split()[0] for line in lines] == ["top_k", "top_k"]
    settled = command(["keys", "top_k"], "decodekit-clash", DECODEKIT_PREFER="decodekit")
    assert "several distributions" not in settled.out
    assert settled.code == 0


def test_a_typo_gets_the_nearest_key_and_three_faults_come_together(python: Any) -> None:
    result = python(
        SCRIPT
        + """
said = []
for keys in ({"top_kk": 5}, {"top_kk": 5, "temperature": "hot", "sharpen": -1.0}, {"sharpenn": 2.0}):
    try:
        decodekit.generate(Parrot(), [[5]], do_sample=True, **keys)
    except decodekit.ConfigError as error:
        said.append([str(error), [p.key for p in error.problems]])
print(json.dumps(said))
""",
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    one, three, theirs = result
    assert "did you mean top_k" in one[0]
    assert set(three[1]) == {"top_kk", "temperature", "sharpen"}
    assert "decodekit-sharpen:sharpen" in three[0]
    assert "got 'hot' (str)" in three[0]
    assert "did you mean sharpen" in theirs[0]


def test_an_allow_list_with_a_typo_is_an_error_that_lists_near_matches(python: Any) -> None:
    code = """
    import json, decodekit
    from decodekit.registry import registry
    try:
        names = sorted({p.distribution for p in registry.plugins() if not p.disabled})
        print(json.dumps(names))
    except decodekit.PluginNotFound as error:
        print(json.dumps(str(error)))
    """
    said = python(code, "decodekit-sharpen", DECODEKIT_ALLOW="decodekit,decodekit-sharpenn").json
    assert "'decodekit-sharpenn'" in said
    assert "did you mean decodekit-sharpen" in said
    assert "processors" in said
    only = python(code, "decodekit-sharpen", "decodekit-clash", DECODEKIT_ALLOW="decodekit,decodekit-sharpen").json
    assert only == ["decodekit", "decodekit-sharpen"]

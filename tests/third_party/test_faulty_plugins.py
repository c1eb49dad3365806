"""Faulty plugins harm only themselves, and whoever asks for one hears why (B37)."""

from __future__ import annotations

from typing import Any

BAD = ("decodekit-broken", "decodekit-exits")


def test_everything_else_works_and_asking_raises_the_cause(python: Any) -> None:
    result = python(
        """
        import json, decodekit
        from decodekit.registry import registry
        from decodekit_toy import Parrot
        keys = dict(max_new_tokens=2, sharpen=2.0, do_sample=True, top_k=1)
        seen = {"ids": decodekit.generate(Parrot(), [[5]], **keys).tolist()}
        for key in ("fragile", "quitter"):
            try:
                decodekit.generate(Parrot(), [[5]], **{key: 1.0})
            except decodekit.PluginBroken as error:
                seen[key] = [str(error), type(error.__cause__).__name__, str(error.__cause__)]
            # Once recorded, the failure does not change by asking again.
            entry = registry.find("processors", key)
            seen[key].append([entry.state, entry.error is not None])
            try:
                entry.load()
            except decodekit.PluginBroken as error:
                seen[key].append(error.__cause__ is entry.error)
        print(json.dumps(seen))
        """,
        *BAD,
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    assert result["ids"] == [[5, 6, 7]]
    message, kind, cause, state, same = result["fragile"]
    assert (kind, cause) == ("ModuleNotFoundError", "No module named 'library_that_is_gone'")
    assert "decodekit-broken 0.3" in message
    assert cause in message
    assert state == ["BROKEN", True]
    assert same
    message, kind, cause, state, same = result["quitter"]
    assert (kind, cause) == ("SystemExit", "no licence found")
    assert "decodekit-exits 0.4" in message
    assert same


def test_check_names_distribution_version_and_cause(command: Any) -> None:
    result = command(["plugins", "--check", "--json"], *BAD, "decodekit-sharpen")
    assert result.code == 1
    import json

    rows = {row["name"]: row for row in json.loads(result.out)["plugins"]}
    for name, distribution, version, cause in (
        ("fragile", "decodekit-broken", "0.3", "library_that_is_gone"),
        ("quitter", "decodekit-exits", "0.4", "no licence found"),
    ):
        row = rows[name]
        assert (row["state"], row["distribution"], row["version"]) == ("BROKEN", distribution, version)
        assert cause in row["cause"]
    assert rows["sharpen"]["state"] == "ok"


def test_help_list_and_keys_survive(command: Any) -> None:
    for words in (["--help"], ["plugins"], ["keys"]):
        result = command(words, *BAD)
        assert result.code == 0, result.err
    assert "library_that_is_gone" in command(["keys", "fragile"], *BAD).out


def test_keys_of_a_plugin_that_ends_the_program(command: Any) -> None:
    import json

    listed = command(["keys", "--json"], *BAD, "decodekit-sharpen")
    rows = {row["key"]: row for row in listed.json_document["keys"]}
    assert "SystemExit: no licence found" in rows["quitter"]["error"]
    assert "decodekit-exits 0.4" in rows["quitter"]["error"]
    assert "error" not in rows["sharpen"]
    asked = command(["keys", "quitter"], *BAD)
    assert asked.code == 1
    assert "no licence found" in asked.out
    [line] = [line for line in command(["keys"], *BAD).out.splitlines() if line.startswith("quitter ")]
    assert "BROKEN: " in line
    assert "no licence found" in line
    used = command(["explain", "--quitter", "1.0"], *BAD)
    assert used.code == 1
    assert "no licence found" in used.err
    assert "decodekit-exits" in used.err
    assert json.loads(command(["explain", "--json", "--sharpen", "2"], *BAD, "decodekit-sharpen").out)


def test_commands_that_end_the_program_or_clash(command: Any, fake: Any) -> None:
    folder = fake("leaver", "[decodekit.commands]\nleave = leaver:run\n", "raise SystemExit('bought nothing')")
    fake("twin", "[decodekit.commands]\nplugins = twin:run\n", "def run(argv):\n    print('twin')\n    return 0\n")
    helped = command(["--help"], before=[folder])
    assert helped.code == 0, helped.err
    assert "leave  (from leaver 1.0)" in helped.out
    left = command(["leave"], before=[folder])
    assert left.code == 1
    assert "SystemExit: bought nothing" in left.err
    assert "leaver 1.0" in left.err
    clash = command(["plugins"], before=[folder])
    assert clash.code == 1
    assert "decodekit:plugins, twin:plugins" in clash.err
    assert command(["twin:plugins"], before=[folder]).out.strip() == "twin"
    assert command(["decodekit:plugins"], before=[folder]).code == 0
    assert command(["plugins"], before=[folder], DECODEKIT_PREFER="decodekit:plugins").code == 0


def test_switched_off_a_broken_plugin_is_never_imported(python: Any) -> None:
    result = python(
        """
        import json, sys, decodekit
        from decodekit.registry import registry
        from decodekit.keys import keys
        state = registry.plugins("processors")
        off = {p.name: p.state for p in state if p.distribution != "decodekit"}
        try:
            decodekit.GenerationConfig(fragile=1.0)
        except decodekit.ConfigError as error:
            imported = [m for m in sys.modules if "broken" in m or "exits" in m]
            print(json.dumps({"off": off, "said": str(error), "imported": imported}))
        """,
        *BAD,
        DECODEKIT_DISABLE="decodekit-broken,processors:quitter",
    ).json
    assert result["off"] == {"fragile": "off", "quitter": "off"}
    assert "decodekit-broken" in result["said"]
    assert "switched off" in result["said"]
    assert result["imported"] == []


def test_strict_refuses_at_once_and_again(python: Any) -> None:
    result = python(
        """
        import json, decodekit
        from decodekit.registry import registry
        said = []
        for _ in range(2):
            try:
                registry.plugins()
            except decodekit.PluginBroken as error:
                said.append(str(error))
        print(json.dumps(said))
        """,
        "decodekit-broken",
        DECODEKIT_STRICT="1",
    ).json
    assert len(result) == 2
    assert "decodekit-broken 0.3" in result[0]


def test_bad_targets_and_damaged_metadata(python: Any, fake: Any) -> None:
    folder = fake("lacks", "[decodekit.processors]\nlacks = lacks:Nobody\n", "Somebody = 1")
    fake("raises", "[decodekit.processors]\nraises = raises:Thing\n", "raise KeyError('spoiled')")
    fake(
        "good",
        "[decodekit.processors]\ngood = good:Good\n",
        "class Good:\n    __call__ = lambda self, ids, scores: scores",
    )
    # Leftovers of a broken uninstall: no metadata at all, no name, entry points that are no ini file.
    fake("ghost", "[decodekit.processors]\nghost = ghost:Ghost\n", metadata="")
    nothing = fake("void", "[decodekit.processors]\nvoid = void:Void\n")
    (nothing / "void-1.0.dist-info" / "METADATA").unlink()
    fake("garbled", "[decodekit.processors]\nthis is no entry point\n")
    fake("binary", "")
    (nothing / "binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"[decodekit.processors]\n\xff\xfe = x:y\n")
    result = python(
        """
        import json
        from decodekit.registry import registry
        from decodekit_plugins.commands.plugins import verdict
        checked = {p: verdict(registry, p)[0] for p in registry.plugins("processors")}
        verdict = {p.name: v for p, v in checked.items() if p.distribution != "decodekit"}
        errors = {p.name: type(p.error).__name__ for p in registry.plugins("processors") if p.error}
        own = {v for p, v in checked.items() if p.distribution == "decodekit"}
        print(json.dumps([verdict, errors, sorted(own), registry.unreadable]))
        """,
        before=[folder],
        # torch reads every distribution's entry points when imported, and does not survive damaged ones.
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    ).json
    verdict, errors, own, unreadable = result
    assert (verdict["good"], verdict["lacks"], verdict["raises"]) == ("ok", "BROKEN", "BROKEN")
    assert (errors["lacks"], errors["raises"]) == ("AttributeError", "KeyError")
    assert own == ["ok"]
    for name in ("ghost", "void", "garbled", "binary"):
        assert any(name in line for line in unreadable), name
    assert len(unreadable) == 4


def test_half_registered_hooks_are_rolled_back(python: Any) -> None:
    result = python(
        """
        import json, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import decodekit, decodekit_hooks, decodekit_hooks_broken
            from decodekit.registry import registry
            from decodekit_toy import Parrot
            out = decodekit.generate(Parrot(), [[5]], do_sample=True, top_k=1, max_new_tokens=2).tolist()
        try:
            registry.find("hooks", "half").load()
        except decodekit.PluginBroken as error:
            asked = str(error)
        print(json.dumps({
            "out": out, "diary": decodekit_hooks.DIARY, "seen": decodekit_hooks_broken.SEEN, "asked": asked,
            "warned": [str(w.message) for w in caught if "hooks plugin" in str(w.message)],
        }))
        """,
        "decodekit-hooks",
        "decodekit-hooks-broken",
        "decodekit-toy",
    ).json
    assert result["out"] == [[5, 6, 7]]
    assert result["seen"] == []
    assert len(result["warned"]) == 1
    assert "decodekit-hooks-broken:half" in result["warned"][0]
    assert "mood" in result["asked"]
    assert result["diary"] == [
        "config_translated True",
        "pipeline_assembled sample",
        "run opened",
        "run closed",
        "run_finished (1, 3)",
    ]

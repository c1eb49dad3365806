"""What is installed is read from metadata alone, once, and costs nothing until used (B38, B40)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_without_decodekits_own_plugins_a_third_party_pipeline_generates(python: Any) -> None:
    result = python(
        """
        import json, sys, decodekit
        from decodekit.registry import KINDS, registry
        from decodekit_toy import Parrot
        out = decodekit.generate(Parrot(), [[5], [9]], strategy="toy", toy_limit=3)
        made = decodekit.plan(Parrot(), [[5]], strategy="toy", toy_limit=3)
        chosen = made.strategy_name, made.selector_name, type(made.adapter).__name__
        families = ("processors", "strategies", "caches", "schedulers", "plugins")
        try:
            decodekit.generate(Parrot(), [[5]], toy_limit=3)
        except decodekit.PluginNotFound as error:
            greedy = str(error)
        print(json.dumps({
            "out": out.tolist(), "chosen": chosen, "greedy": greedy,
            "processors": len(made.chain), "criteria": [part.owner for part in made.criteria],
            "left": sorted({p.distribution for p in registry.plugins() if not p.disabled and p.kind != "commands"}),
            "imported": [m for m in sys.modules if m.startswith(tuple(f"decodekit_{f}" for f in families))],
        }, default=str))
        """,
        "decodekit-toy",
        DECODEKIT_DISABLE="decodekit",
    ).json
    assert result["out"] == [[5, 7, 9, 11], [9, 11, 13, 15]]
    assert result["left"] == ["decodekit-toy"]
    assert result["imported"] == []
    assert result["chosen"] == ["toy", "toy_second", "ParrotAdapter"]
    assert result["processors"] == 0
    assert result["criteria"] == ["decodekit-toy:toy_limit"]
    assert "switched off" in result["greedy"]


def test_importing_and_listing_import_no_plugin_and_no_torch(python: Any) -> None:
    result = python(
        """
        import json, sys, time
        start = time.perf_counter()
        import decodekit
        from decodekit.registry import registry
        from decodekit.keys import keys
        names = [p.qualified for p in registry.plugins()]
        known = keys.names()
        decodekit.GenerationConfig(slow=1.0, top_k=5, sharpen=2.0)
        spent = time.perf_counter() - start
        heavy = [m for m in sys.modules if m.partition(".")[0] in ("torch", "transformers", "numpy", "tokenizers")]
        plugins = [m for m in sys.modules if m.startswith("decodekit_")]
        print(json.dumps({"names": names, "known": known, "heavy": heavy, "plugins": plugins, "spent": spent}))
        """,
        "decodekit-slow",
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    assert "decodekit-slow:slow" in result["names"]
    assert {"slow", "sharpen", "top_k", "toy_limit"} <= set(result["known"])
    assert result["heavy"] == []
    assert result["plugins"] == []
    assert result["spent"] < 2


def test_a_slow_plugin_costs_nothing_until_used(python: Any) -> None:
    result = python(
        """
        import json, sys, time, decodekit
        from decodekit_toy import Parrot
        decodekit.generate(Parrot(), [[5]], sharpen=2.0, top_k=1, do_sample=True, max_new_tokens=2)
        before = "decodekit_slow" in sys.modules
        start = time.perf_counter()
        decodekit.generate(Parrot(), [[5]], slow=0.5, max_new_tokens=2)
        first = time.perf_counter() - start
        start = time.perf_counter()
        decodekit.generate(Parrot(), [[5]], slow=0.5, max_new_tokens=2)
        second = time.perf_counter() - start
        print(json.dumps([before, first, second]))
        """,
        "decodekit-slow",
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    before, first, second = result
    assert not before
    assert first >= 2
    assert second < 1


def test_two_hundred_distributions_are_scanned_once_and_none_imported(python: Any, fake: Any) -> None:
    folder = Path()
    for number in range(200):
        name = f"filler-{number}"
        entries = f"[decodekit.processors]\nfill{number} = filler_{number}:Fill\n"
        entries += f"[decodekit.keys]\nfill{number} = filler_{number}:Fill.amount\n"
        folder = fake(name, entries, "raise RuntimeError('imported')" if number else "class Fill:\n    amount = 1\n")
    result = python(
        """
        import importlib.metadata, json, sys
        from decodekit import registry as module
        scans = []
        real = module.distributions
        module.distributions = lambda: scans.append(1) or real()
        from decodekit.keys import keys
        registry = module.registry
        count = len([p for p in registry.plugins("processors") if p.name.startswith("fill")])
        for _ in range(50):
            registry.find("processors", "fill7"), keys.find("fill9"), registry.names("criteria")
        registry.load("processors", "fill0")
        imported = [m for m in sys.modules if m.startswith("filler_")]
        once = len(scans)
        generation = registry.generation
        registry.refresh()
        registry.plugins()
        print(json.dumps([count, imported, once, len(scans), registry.generation - generation]))
        """,
        before=[folder],
    ).json
    assert result == [200, ["filler_0"], 1, 2, 1]


def test_refresh_sees_what_was_installed_meanwhile(python: Any, fake: Any) -> None:
    entries = "[decodekit.processors]\nlate = late:Late\n[decodekit.keys]\nlate = late:Late.amount\n"
    late = fake("late", entries)
    result = python(
        f"""
        import json, sys
        from decodekit.registry import registry
        from decodekit.keys import keys
        seen = ["late" in keys, "late" in registry.names("processors")]
        sys.path.append({str(late)!r})
        seen += ["late" in registry.names("processors")]
        registry.refresh()
        print(json.dumps([*seen, "late" in keys, "late" in registry.names("processors")]))
        """
    ).json
    assert result == [False, False, False, True, True]


def test_a_stale_egg_info_does_not_hide_the_real_metadata(python: Any, command: Any, fake: Any) -> None:
    real = "[decodekit.processors]\nfresh = acme_kit:Fresh\n"
    gone = "[decodekit.processors]\nstale = acme_kit:Gone\n"
    folder = fake("acme-kit", gone, version="0.1", folder="a", suffix="egg-info")
    second = fake("acme-kit", real, "class Fresh: pass", version="2.0", folder="b")
    code = """
    import json
    from decodekit.registry import registry
    rows = [(p.name, p.version) for p in registry.plugins("processors") if p.distribution == "acme-kit"]
    print(json.dumps([rows, registry.shadowed]))
    """
    rows, shadowed = python(code, before=[folder, second]).json
    assert rows == [["fresh", "2.0"]]
    assert [Path(path).name for path in shadowed] == ["acme_kit-0.1.egg-info"]
    # A development install has nothing but an egg-info: that one counts.
    rows, shadowed = python(code, before=[folder]).json
    assert rows == [["stale", "0.1"]]
    assert shadowed == []
    # Of two real ones the first on the path is what would be imported.
    old = fake("acme-kit", "[decodekit.processors]\nold = acme_kit:Old\n", version="1.0", folder="c")
    rows, shadowed = python(code, before=[second, old]).json
    assert rows == [["fresh", "2.0"]]
    assert [Path(path).name for path in shadowed] == ["acme_kit-1.0.dist-info"]
    listing = command(["plugins", "--json"], before=[folder, second]).json_document
    assert [Path(path).name for path in listing["shadowed"]] == ["acme_kit-0.1.egg-info"]


def test_the_same_processor_by_object_path_name_and_key_is_the_same(python: Any) -> None:
    result = python(
        """
        import json, torch, decodekit
        from decodekit_toy import Parrot
        from decodekit_sharpen import Sharpen
        torch.manual_seed(0)
        kept = dict(do_sample=True, seed=11, max_new_tokens=12, top_k=0, output_scores=True)
        noisy = Parrot(64)
        noisy.likes.data += torch.rand(64, 64) * 3
        ways = {
            "key": dict(sharpen=2.0),
            "section": dict(processors={"sharpen": {}}),
            "object": dict(logits_processor=[Sharpen(2.0)]),
            "class": dict(logits_processor=[Sharpen]),
            "path": dict(logits_processor=["decodekit_sharpen:Sharpen"]),
            "name": dict(logits_processor=["sharpen"]),
            "qualified": dict(logits_processor=["decodekit-sharpen:sharpen"]),
        }
        seen = {}
        for way, keys in ways.items():
            for strategy in ("sample", "toy"):
                try:
                    out = decodekit.generate(noisy, [[5, 6], [7, 8]], strategy=strategy, **kept, **keys)
                except Exception as error:
                    seen.setdefault(way, []).append(repr(error))
                    continue
                tops = [round(float(s.amax()), 4) for s in out.scores]
                seen.setdefault(way, []).append([out.sequences.tolist(), tops])
        print(json.dumps(seen))
        """,
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    assert len(result["key"][0][0][0]) == 14
    for way in ("section", "object", "class", "path", "name", "qualified"):
        assert result[way][0] == result["key"][0], way
    # The toy strategy does not sample; a key that only shapes the distribution is left out there, an object is not:
    # it was put into the call by hand. The tokens agree, since the likeliest order does not move.
    assert len({str(result[way][1][0]) for way in result}) == 1

"""A preparer from outside is used by one key, takes options, and keeps the kit's laws."""

from __future__ import annotations

from typing import Any


def test_one_key_prepares(python: Any) -> None:
    result = python(
        """
        import json, torch, decodekit
        from decodekit.registry import registry
        from decodekit.testing import PreparerContract, TinyLM, results

        model = TinyLM().eval()
        keys = dict(max_new_tokens=5, eos_token_id=None)
        plain = decodekit.generate(model, [[5, 9]], **keys)
        section = {"preparers": {"hurry": {"rows": 3}}}
        lm = decodekit.load(model, prepare="hurry")

        class Suite(PreparerContract):
            def make(self):
                return registry.load("preparers", "hurry")()

        try:
            decodekit.plan(model, [[5]], {"preparers": {"hurry": {"rows": 0}}})
        except decodekit.ConfigError as error:
            refused = str(error)
        print(json.dumps({
            "same": torch.equal(decodekit.generate(model, [[5, 9]], prepare="hurry", **keys), plain),
            "adapter": type(decodekit.plan(model, [[5]], prepare="hurry").adapter).__name__,
            "options": decodekit.plan(model, [[5]], section).describe()["prepared"],
            "by default": decodekit.plan(lm, [[5]]).describe()["prepared"],
            "refused": refused,
            "kit": {name: verdict for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")},
        }))
        """,
        "decodekit-hurry",
    ).json
    assert result["same"]
    assert result["adapter"] == "Hurried"
    assert result["options"] == [{"rows": 3}]
    assert result["by default"] == [{"rows": 100}]
    assert "preparers.hurry.rows: must be at least 1" in result["refused"]
    assert result["kit"] == {}


def test_its_absence_is_named(python: Any) -> None:
    done = python(
        """
        import decodekit
        from decodekit.testing import TinyLM
        decodekit.generate(TinyLM(), [[5]], prepare="hury")
        """,
        "decodekit-hurry",
    )
    assert done.code == 1
    assert "no preparers plugin is named 'hury'; did you mean hurry" in done.err

"""The command itself: what it imports, its exit codes, and how it lives with broken plugins."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ENTRIES = """
    [decodekit.commands]
    hello = acme.hello:run
    hurt = acme.hello:hurt
    broken = acme.nowhere:run
    keys = acme.hello:run

    [decodekit.processors]
    fine = acme.parts:Fine
    loud = acme.loud:Loud
    top_k = acme.parts:Shelf
    [decodekit.caches]
    shelf = acme.parts:Shelf

    [decodekit.keys]
    fineness = acme.parts:Fine.fineness
    lost = acme.parts:Nothing.lost
    gone = acme.parts:Fine.gone
"""
MODULES = {
    "__init__.py": "",
    "hello.py": """
        import sys
        def run(argv):
            print("hello", *argv)
            print("torch" in sys.modules)
        def hurt(argv):
            raise ZeroDivisionError("ouch")
    """,
    "parts.py": """
        import attrs
        print("imported with noise")
        @attrs.frozen
        class Fine:
            fineness: float = attrs.field(default=1.0, validator=attrs.validators.ge(0))
            def __call__(self, input_ids, scores): return scores
        @attrs.frozen
        class Shelf:
            provides = ("cache:crop", "cache:shelf")
    """,
    "loud.py": "raise RuntimeError('cannot be imported')",
}


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an installed third-party distribution, some of whose plugins are broken."""
    root = tmp_path_factory.mktemp("site")
    info = root / "acme-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRIES))
    package = root / "acme"
    package.mkdir()
    for name, text in MODULES.items():
        (package / name).write_text(textwrap.dedent(text))
    return str(root)


def test_import_is_light() -> None:
    code = "import decodekit, sys; print('torch' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_plugins_imports_neither_torch_nor_plugins(acme: str, command) -> None:
    code = (
        "import sys; from decodekit_plugins.commands.main import main; code = main(['plugins', '--json']); "
        "print(code, *sorted(sys.modules), file=sys.stderr)"
    )
    done = command.python("-c", code, path=acme)
    code, *modules = done.stderr.split()
    assert code == "0"
    roots = {m.partition(".")[0] for m in modules}
    assert not roots & {"torch", "acme", "rich"}
    # The command is itself a plugin: its own module, and no other one.
    own = ("decodekit_plugins", "decodekit_plugins.commands")
    assert not {m for m in modules if m.startswith("decodekit_") and m not in own and not m.startswith(own[1] + ".")}
    rows = json.loads(done.stdout)["plugins"]
    assert {"processors", "caches", "commands", "models"} <= {row["kind"] for row in rows}
    assert next(row for row in rows if row["name"] == "fine")["distribution"] == "acme"
    assert {row["state"] for row in rows if row["name"] == "top_k"} == {"CLASH"}


def test_plugins_check_names_the_broken(acme: str, command) -> None:
    done = command("plugins", "--check", "--json", path=acme)
    assert done.returncode == 1
    rows = {(r["kind"], r["name"], r["distribution"]): r for r in json.loads(done.stdout)["plugins"]}
    loud = rows["processors", "loud", "acme"]
    assert (loud["state"], loud["cause"], loud["version"]) == ("BROKEN", "RuntimeError: cannot be imported", "1.5")
    assert rows["processors", "fine", "acme"]["state"] == "ok"
    assert rows["commands", "keys", "acme"]["state"] == "CLASH"
    assert "acme:keys, decodekit:keys" in rows["commands", "keys", "decodekit"]["cause"]
    assert "no plugin of acme" in rows["keys", "lost", "acme"]["cause"]
    assert "no option 'gone'" in rows["keys", "gone", "acme"]["cause"]
    assert ("keys", "fineness", "acme") not in rows


def test_a_switch_that_matches_nothing_is_a_warning(acme: str, command) -> None:
    done = command("plugins", "--check", path=acme, DECODEKIT_DISABLE="decodekitt,acme:loud,acme")
    warned = [line for line in done.stderr.splitlines() if line.startswith("decodekit: warning:")]
    assert len(warned) == 1
    assert (
        "DECODEKIT_DISABLE names 'decodekitt', which no installed plugin matches; did you mean decodekit" in warned[0]
    )


def test_wrong_names_in_allow_leave_help_and_plugins_usable(command) -> None:
    for words in (("--help",), ("plugins",)):
        done = command(*words, DECODEKIT_ALLOW="decodekit,decodekitt")
        assert done.returncode == 0
        assert "warning: DECODEKIT_ALLOW/DECODEKIT_PREFER names 'decodekitt'" in done.stderr


def test_the_option_of_a_plugin_that_is_off_says_so(command) -> None:
    done = command("explain", "--top-p", "0.9", DECODEKIT_DISABLE="top_p")
    assert done.returncode == 2
    assert "--top-p: belongs to decodekit, which is switched off" in done.stderr


def test_plugins_offers(acme: str, command) -> None:
    done = command("plugins", "--offers", "cache:shelf", path=acme)
    assert done.returncode == 0
    assert "shelf" in done.stdout
    assert "dynamic" not in done.stdout
    assert "imported with noise" not in done.stdout
    assert "cannot be imported" in done.stderr


@pytest.mark.parametrize("switch", ["decodekit", "processors"])
def test_switched_off_plugins_are_shown_and_commands_stay(acme: str, command, switch: str) -> None:
    done = command("plugins", path=acme, DECODEKIT_DISABLE=switch)
    assert done.returncode == 0
    assert f"DECODEKIT_DISABLE has {switch!r}" in done.stdout
    assert not [row for row in done.stdout.splitlines() if row.startswith("commands") and "  off  " in row]
    assert command("hello", path=acme, DECODEKIT_DISABLE=switch).returncode == 0


@pytest.mark.parametrize("switch", ["acme", "hello", "acme:hello", "commands:hello", "commands"])
def test_commands_are_switched_off_like_all_plugins(acme: str, command, switch: str) -> None:
    done = command("hello", path=acme, DECODEKIT_DISABLE=switch)
    assert done.returncode == 1
    assert f"switched off (DECODEKIT_DISABLE has {switch!r})" in done.stderr


def test_the_name_of_a_command_is_that_of_no_table(command) -> None:
    code = "from decodekit.keys import keys; print('top_p' in keys)"
    assert command.python("-c", code, DECODEKIT_DISABLE="keys").stdout == "True\n"
    assert "switched off" in command("keys", DECODEKIT_DISABLE="keys").stderr


def test_a_leftover_metadata_folder_is_shown(command, tmp_path: Path) -> None:
    for folder, file in (("twin.egg-info", "PKG-INFO"), ("twin-2.0.dist-info", "METADATA")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("Metadata-Version: 2.1\nName: twin\nVersion: 2.0\n")
        (tmp_path / folder / "entry_points.txt").write_text("[decodekit.caches]\ntwin = twin_parts:Twin\n")
    done = command("plugins", "--kind", "caches", path=str(tmp_path))
    assert len([line for line in done.stdout.splitlines() if line.split()[:2] == ["caches", "twin"]]) == 1
    assert f"left out: {tmp_path / 'twin.egg-info'}" in done.stdout


def test_strict_does_not_break_the_command_line(acme: str, command) -> None:
    assert command("plugins", path=acme, DECODEKIT_STRICT="1").returncode == 0
    assert "False" in command("hello", path=acme, DECODEKIT_STRICT="1").stdout


def test_third_party_command(acme: str, command) -> None:
    done = command("hello", "--you", path=acme)
    assert done.stdout.split() == ["hello", "--you", "False"]
    assert done.returncode == 0
    assert "hello  (from acme 1.5)" in command("--help", path=acme).stdout


def test_an_unexpected_error_names_the_plugin(acme: str, command) -> None:
    done = command("hurt", path=acme)
    assert done.returncode == 1
    assert "'hurt' of acme 1.5" in done.stderr
    assert "ZeroDivisionError: ouch" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Traceback" in command("--debug", "hurt", path=acme).stderr
    assert "Traceback" in command("hurt", path=acme, DECODEKIT_DEBUG="1").stderr


def test_a_broken_command_harms_only_itself(acme: str, command) -> None:
    done = command("broken", path=acme)
    assert done.returncode == 1
    assert "acme 1.5" in done.stderr
    assert command("--help", path=acme).returncode == 0


def test_clashing_commands_need_a_qualified_name(acme: str, command) -> None:
    done = command("keys", path=acme)
    assert done.returncode == 1
    assert "acme:keys, decodekit:keys" in done.stderr
    assert "hello x" in command("acme:keys", "x", path=acme).stdout
    assert "hello" in command("keys", path=acme, DECODEKIT_PREFER="acme").stdout


def test_third_party_key_is_an_option(acme: str, command) -> None:
    done = command("explain", "--fineness", "2.5", "--json", path=acme)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["processors"]
    assert [row["why"] for row in rows if row["owner"] == "acme:fine"] == ["fineness=2.5 (call)"]
    assert "imported with noise" in done.stderr
    done = command("explain", "--fineness", "-1", "--finenes", "1", path=acme)
    assert done.returncode == 2
    assert "did you mean --fineness" in done.stderr
    done = command("explain", "--fineness", "-1", path=acme)
    assert done.returncode == 2
    assert "(owner: acme:fine)" in done.stderr


def test_help_and_version(command) -> None:
    done = command("--help")
    assert done.returncode == 0
    assert "example:" in done.stdout
    assert done.stdout.index("plugins") < done.stdout.index("generate", done.stdout.index("commands:"))
    assert command().returncode == 2
    assert command("--version").stdout.startswith("decodekit ")


@pytest.mark.parametrize(("word", "hint"), [("genrate", "generate"), ("--jsno", "--help"), ("plugin", "plugins")])
def test_unknown_command(command, word: str, hint: str) -> None:
    done = command(word)
    assert done.returncode == 2
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_reader_that_leaves(command) -> None:
    done = command.start("plugins", "--json")
    done.stdout.close()
    assert done.wait(timeout=60) == 141
    assert done.stderr.read() == b""


def test_check_judges_what_it_loads(tmp_path: Path, command) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[decodekit.processors]\nnumber = odd:NUMBER\nsecond = odd:Second\n")
    (tmp_path / "odd.py").write_text("NUMBER = 5\nclass Second:\n    traits = 5\n")
    done = command("plugins", "--check", "--kind", "processors", path=str(tmp_path))
    assert done.returncode == 1
    assert "neither a class nor a function" in done.stdout
    assert "its traits are 5, not Traits" in done.stdout

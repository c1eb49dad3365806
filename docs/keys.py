"""Writes docs/keys.md from the installed plugins of decodekit itself.

Example: python docs/keys.py           (with --check: only say whether the page is up to date)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from decodekit.keys import keys
from decodekit.options import REFERENCE
from decodekit_plugins.commands.keys import describe, markdown

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# Configuration keys

Every key that decodekit's own plugins understand, as `decodekit keys` prints it; installed plugins of others add theirs
there. A key can be passed to `generate`, written on the command line as `--key value`, or stand in a
`generation_config.json`. What an unset key means is said in its owner's words;
[configuration.md](configuration.md) tells which source wins. "Default" is what applies where nobody sets the key; many
plugins act only where a key of theirs is set, and have none. This page is written by `python docs/keys.py`.
"""
TAIL = """
## Keys of the reference that this version does not have

They are kept in files and written back, and refused when a call sets them to anything but None or False:
"""


def page() -> str:
    """The page as it should be."""
    rows = [describe(key) for key in keys.all() if key.distribution == "decodekit"]
    later = ", ".join(f"`{name}`" for name in sorted(REFERENCE.split()) if name not in keys)
    return "\n".join([HEAD, *markdown(rows), TAIL, later, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page is old")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

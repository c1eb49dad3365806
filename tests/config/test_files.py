"""Where configurations come from and go to: folders, files, the Hub; whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig, InputError

STORED = {"do_sample": True, "top_k": 5, "key_of_tomorrow": [1]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "generation_config.json").write_text(json.dumps(STORED))
    (tmp_path / "other.json").write_text(json.dumps({"top_k": 6}))
    (tmp_path / "deep" / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    return tmp_path


def test_from_folder_file_and_subfolder(folder: Path) -> None:
    assert GenerationConfig.from_pretrained(folder).to_dict() == STORED
    assert GenerationConfig.from_pretrained(str(folder), top_k=9).top_k == 9
    assert GenerationConfig.from_pretrained(folder, "other.json").top_k == 6
    assert GenerationConfig.from_pretrained(folder / "other.json").top_k == 6
    assert GenerationConfig.from_pretrained(folder, subfolder="deep").top_k == 7
    config, unused = GenerationConfig.from_pretrained(folder, foo=1, top_p=0.5, return_unused_kwargs=True)
    assert (config.top_p, unused) == (0.5, {"foo": 1})
    with pytest.raises(ConfigError, match="foo: unknown key"):
        GenerationConfig.from_pretrained(folder, foo=1)


def test_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def download(repo: str, name: str, **options: Any) -> str:
        asked.append((repo, name, options))
        return str(folder / "generation_config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    config = GenerationConfig.from_pretrained("acme/model", revision="v2", token="t", subfolder="deep", top_k=1)
    assert (config.top_k, config.do_sample) == (1, True)
    repo, name, options = asked[0]
    assert (repo, name) == ("acme/model", "generation_config.json")
    assert (options["revision"], options["token"], options["subfolder"]) == ("v2", "t", "deep")


@pytest.mark.parametrize("kind", ["LocalEntryNotFoundError", "EntryNotFoundError", "RepositoryNotFoundError"])
def test_what_the_hub_cannot_give_is_an_input_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    def download(*_: Any, **__: Any) -> str:
        error = getattr(errors, kind)
        raise error.__new__(error, "no such thing")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(InputError, match="acme/model is no folder or file") as caught:
        GenerationConfig.from_pretrained("acme/model")
    assert isinstance(caught.value, OSError)
    assert type(caught.value.__cause__).__name__ == kind


def test_a_path_that_is_not_there_needs_no_network() -> None:
    with pytest.raises(InputError, match="is no folder or file"):
        GenerationConfig.from_pretrained("/no/such/folder/at all")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{not json", "is not a valid JSON file"),
        (b"\xff\xfe{}", "is not a valid JSON file"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (b"", "is not a valid JSON file"),
    ],
)
def test_a_broken_file_says_so(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        GenerationConfig.from_pretrained(tmp_path)
    assert isinstance(caught.value, OSError)
    with pytest.raises(OSError, match=r"there is no other\.json"):
        GenerationConfig.from_pretrained(tmp_path, "other.json")


def test_the_file_is_json_with_sorted_keys_and_a_final_newline(tmp_path: Path) -> None:
    GenerationConfig(top_p=0.5, do_sample=True, eos_token_id=(1, 2)).save_pretrained(tmp_path / "new" / "deep")
    text = (tmp_path / "new" / "deep" / "generation_config.json").read_text()
    assert text == '{\n  "do_sample": true,\n  "eos_token_id": [\n    1,\n    2\n  ],\n  "top_p": 0.5\n}\n'
    loaded = GenerationConfig.from_dict({"transformers_version": "5", "top_k": 1})
    assert "transformers_version" in loaded.to_json_string()
    assert "transformers_version" not in loaded.to_json_string(ignore_metadata=True)


def test_saving_into_a_file_or_with_unknown_arguments_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="needs a folder"):
        GenerationConfig().save_pretrained(tmp_path / "file")
    with pytest.raises(InputError, match="does not know push"):
        GenerationConfig().save_pretrained(tmp_path, push=True)


def test_a_value_without_json_form_names_its_key_and_leaves_the_file(folder: Path) -> None:
    before = (folder / "generation_config.json").read_text()
    config = GenerationConfig(cache_config={"device": object()}, do_sample=True)
    assert "object object" in repr(config)
    with pytest.raises(ConfigError, match="cache_config: cannot be written as JSON"):
        config.save_pretrained(folder)
    assert (folder / "generation_config.json").read_text() == before
    assert sorted(os.listdir(folder)) == ["deep", "generation_config.json", "other.json"]


@pytest.mark.parametrize("moment", ["write", "replace"])
def test_killed_half_way_the_old_file_stays(folder: Path, moment: str) -> None:
    """The process dies by os._exit in the middle of writing, and just before the new file takes its place."""
    code = f"""
import os, pathlib, sys
from decodekit import GenerationConfig
config = GenerationConfig(top_k=99, do_sample=True)
if {moment!r} == "write":
    real = pathlib.Path.write_text
    def half(self, text, **kw):
        real(self, text[: len(text) // 2], **kw)
        os._exit(9)
    pathlib.Path.write_text = half
else:
    os.replace = lambda *a: os._exit(9)
config.save_pretrained({str(folder)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9, done.stderr
    assert GenerationConfig.from_pretrained(folder).to_dict() == STORED
    GenerationConfig(top_k=1, do_sample=True).save_pretrained(folder)
    assert GenerationConfig.from_pretrained(folder).top_k == 1


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    def write(k: int) -> None:
        for _ in range(20):
            GenerationConfig(top_k=k, do_sample=True, stop_strings=["x" * k] * 50).save_pretrained(tmp_path)

    threads = [threading.Thread(target=write, args=(k,)) for k in (1, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.stop_strings == ["x" * loaded.top_k] * 50
    assert os.listdir(tmp_path) == ["generation_config.json"]

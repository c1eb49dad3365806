"""Configurations from and to the Hub, played by a server of this machine: real requests of huggingface_hub."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import attrs
import pytest
from decodekit import GenerationConfig, InputError

TOKEN = "hf_of_the_tests"
NAME = "generation_config.json"


@attrs.define
class Repository:
    private: bool = False
    branches: dict[str, dict[str, bytes]] = attrs.field(factory=lambda: {"main": {}})
    messages: list[dict[str, Any]] = attrs.field(factory=list)


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name; every request by method, path and token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories: dict[str, Repository] = {}
        self.seen: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, repository: str, files: dict[str, Any], branch: str = "main", private: bool = False) -> None:
        found = self.repositories.setdefault(repository, Repository(private))
        found.branches[branch] = {name: json.dumps(data).encode() for name, data in files.items()}

    def read(self, repository: str, branch: str = "main", name: str = NAME) -> Any:
        return json.loads(self.repositories[repository].branches[branch][name])


class Answers(http.server.BaseHTTPRequestHandler):
    """The few answers of the Hub that files need."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, code: int, data: bytes = b"{}", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        token = self.headers.get("Authorization")
        self.server.seen.append((self.command, self.path, token))
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if self.command == "POST" and token != f"Bearer {TOKEN}":
            return self.say(401, b'{"error": "Invalid username or password."}')
        if words[:3] == ["api", "repos", "create"]:
            return self.create(json.loads(body))
        if words[0] == "api":
            repository = self.server.repositories.get("/".join(words[2:4]))
            return (
                self.say(404, X_Error_Code="RepoNotFound")
                if repository is None
                else self.change(repository, words[4], words[5], body, parse_qs(parts.query), "/".join(words[2:4]))
            )
        return self.file("/".join(words[:2]), words[3], "/".join(words[4:]), token)

    do_GET = do_HEAD = do_POST = handle_request

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        known = name in self.server.repositories
        if not known:
            self.server.repositories[name] = Repository(
                asked.get("visibility") == "private" or bool(asked.get("private"))
            )
        self.say(409 if known else 200, json.dumps({"url": f"{self.server.url}/{name}"}).encode())

    def change(self, found: Repository, what: str, branch: str, body: bytes, query: Any, name: str) -> None:
        if what == "branch":
            new = branch not in found.branches
            found.branches.setdefault(branch, dict(found.branches["main"]))
            return self.say(200 if new else 409)
        if what == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.say(200, json.dumps({"files": files}).encode())
        lines = [json.loads(line) for line in body.splitlines()]
        (header,) = [line["value"] for line in lines if line["key"] == "header"]
        request = query.get("create_pr") == ["1"]
        branch = "refs/pr/1" if request else branch
        found.messages.append(header)
        files = found.branches.setdefault(branch, {})
        for file in (line["value"] for line in lines if line["key"] == "file"):
            files[file["path"]] = base64.b64decode(file["content"])
        answer = {"commitUrl": f"{self.server.url}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}
        answer |= {"pullRequestUrl": f"{self.server.url}/{name}/discussions/1"} if request else {}
        return self.say(200, json.dumps(answer).encode())

    def file(self, repository: str, branch: str, name: str, token: str | None) -> None:
        found = self.server.repositories.get(repository)
        if found is None or (found.private and token != f"Bearer {TOKEN}"):
            return self.say(401, X_Error_Code="RepoNotFound")
        if branch not in found.branches:
            return self.say(404, X_Error_Code="RevisionNotFound")
        data = found.branches[branch].get(name)
        if data is None:
            return self.say(404, X_Error_Code="EntryNotFound", X_Repo_Commit="b" * 40)
        commit = hashlib.sha1(repr(sorted(found.branches[branch].items())).encode()).hexdigest()
        return self.say(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def there(hub: Hub, home: Path, code: str, **env: str) -> Any:
    """What `code` leaves in `out`, in a process whose Hub is `hub`."""
    program = (
        "import json, warnings\nwarnings.simplefilter('ignore')\nfrom decodekit import GenerationConfig, InputError\n"
        "def said(call):\n    try:\n        call()\n    except InputError as error:\n"
        "        return [str(error), isinstance(error, OSError), type(error.__cause__).__name__]\nout = None\n"
        f"{code}\nprint('\\n' + json.dumps(out))"
    )
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **settings, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """Branches, pull requests, folders inside, other names, tokens, the cache."""
    first = {"top_k": 1, "do_sample": True}
    hub.put("acme/model", {NAME: first, f"deep/{NAME}": {"top_k": 2}, "my.json": {"top_k": 3}})
    hub.put("acme/model", {NAME: {"top_k": 4}}, branch="v2")
    hub.put("acme/model", {NAME: {"top_k": 5, "key_of_tomorrow": 1}}, branch="refs/pr/7")
    hub.put("acme/secret", {NAME: {"top_k": 6}}, private=True)
    found = there(
        hub,
        tmp_path,
        f"""
load = GenerationConfig.from_pretrained
config, unused = load("acme/model", top_k=9, foo=False, do_sample=True, return_unused_kwargs=True)
out = [
    load("acme/model").to_dict(),
    load("acme/model", subfolder="deep").top_k,
    load("acme/model", "my.json").top_k,
    load("acme/model", config_file_name="my.json").top_k,
    load("acme/model", revision="v2").top_k,
    load("acme/model", revision="refs/pr/7").to_dict(),
    load("acme/secret", token={TOKEN!r}).top_k,
    [config.top_k, config.do_sample, unused],
    load("acme/model", cache_dir={str(tmp_path / "own")!r}).top_k,
]
""",
    )
    request = {"top_k": 5, "key_of_tomorrow": 1}
    assert found == [first, 2, 3, 3, 4, request, 6, [9, True, {"foo": False}], 1]
    assert list((tmp_path / "own").glob("models--acme--model/snapshots/*/generation_config.json"))
    # A changed file is seen, the cache serves where there is no network, and a forced download asks again.
    hub.put("acme/model", {NAME: {"top_k": 8}})
    assert there(hub, tmp_path, "out = GenerationConfig.from_pretrained('acme/model').top_k") == 8
    before = len(hub.seen)
    stay = "out = GenerationConfig.from_pretrained('acme/model', local_files_only=True).top_k"
    assert there(hub, tmp_path, stay) == 8
    assert len(hub.seen) == before
    bodies = lambda: sum(method == "GET" for method, _, _ in hub.seen)  # noqa: E731
    before = bodies()
    there(hub, tmp_path, "GenerationConfig.from_pretrained('acme/model')")
    assert bodies() == before, "an unchanged file was loaded again"
    there(hub, tmp_path, "GenerationConfig.from_pretrained('acme/model', force_download=True)")
    assert bodies() == before + 1


def test_the_token_of_a_login_is_used(hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/secret", {NAME: {"top_k": 6}}, private=True)
    load = "out = GenerationConfig.from_pretrained('acme/secret', token={}).top_k"
    for token in (None, True):
        assert there(hub, tmp_path / str(token), load.format(token), HF_TOKEN=TOKEN) == 6
    refused = "out = said(lambda: GenerationConfig.from_pretrained('acme/secret', token={}))"
    for token, env in ((False, {"HF_TOKEN": TOKEN}), ("'wrong'", {}), (None, {})):
        words, is_os_error, cause = there(hub, tmp_path / f"no{token}", refused.format(token), **env)
        assert "acme/secret is no folder or file, and the Hub says" in words
        assert is_os_error
        assert cause == "RepositoryNotFoundError"


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    hub.put("acme/model", {NAME: {}, "bad.json": [1]})
    found = there(
        hub,
        tmp_path,
        """
load = GenerationConfig.from_pretrained
out = [said(lambda: load("acme/none")), said(lambda: load("acme/model", revision="v9")),
       said(lambda: load("acme/model", "no.json")), said(lambda: load("acme/model", "bad.json")),
       said(lambda: load("acme/other", local_files_only=True)),
       said(lambda: load("acme/model", proxies={"https": "foo.bar:3128"}))]
""",
    )
    assert [cause for _, _, cause in found[:3]] == [
        "RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError",
    ]  # fmt: skip
    assert found[3][0].endswith("must hold a JSON object, not list")
    assert found[4][2] == "LocalEntryNotFoundError"
    assert found[5][0] == "proxies: this huggingface_hub takes them from the environment; set HTTPS_PROXY"
    assert all(is_os_error for _, is_os_error, _ in found[:5])


def test_proxies_go_to_a_hub_that_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / NAME).write_text("{}")
    asked: list[Any] = []

    def download(repo: str, name: str, proxies: Any = None, **_: Any) -> str:
        asked.append(proxies)
        return str(tmp_path / NAME)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    GenerationConfig.from_pretrained("acme/model", proxies={"http": "foo.bar:3128"})
    GenerationConfig.from_pretrained("acme/model")
    assert asked == [{"http": "foo.bar:3128"}, None]


def test_to_the_hub(hub: Hub, tmp_path: Path) -> None:
    """The folder names the repository unless told otherwise; what is there stays, and what comes back is equal."""
    hub.put("acme/old", {NAME: {"top_k": 1}, "README.md": "kept"})
    found = there(
        hub,
        tmp_path,
        f"""
config = GenerationConfig(top_k=5, do_sample=True, stop_strings=["x", "y"])
base = {str(tmp_path)!r}
config.save_pretrained(base + "/mine/", push_to_hub=True, token={TOKEN!r})
config.save_pretrained(base + "/a", "my.json", True, repo_id="acme/old", token={TOKEN!r}, commit_message="Cooler")
config.save_pretrained(base + "/b", push_to_hub=True, repo_id="acme/new", private=True, token={TOKEN!r},
                       revision="try", commit_description="Why")
config.push_to_hub("acme/old", token={TOKEN!r}, create_pr=True)
config.save_pretrained(base + "/c", push_to_hub=True, repo_id="acme/old", token={TOKEN!r}, revision="refs/pr/1")
back = GenerationConfig.from_pretrained("acme/new", revision="try", token={TOKEN!r})
out = [back == config, GenerationConfig.from_pretrained(base + "/mine") == config]
""",
    )
    assert found == [True, True]
    data = {"top_k": 5, "do_sample": True, "stop_strings": ["x", "y"]}
    assert hub.read("me/mine") == data
    assert hub.read("acme/old", name="my.json") == data
    assert hub.read("acme/old") == {"top_k": 1}
    assert hub.read("acme/old", name="README.md") == "kept"
    assert hub.read("acme/new", "try") == hub.read("acme/old", "refs/pr/1") == data
    assert hub.repositories["acme/new"].branches["main"] == {}
    assert [found.private for found in hub.repositories.values()] == [False, False, True]
    messages = {name: [m["summary"] for m in found.messages] for name, found in hub.repositories.items()}
    assert messages == {"acme/old": ["Cooler", "Upload config", "Upload config"], "me/mine": ["Upload config"],
                        "acme/new": ["Upload config"]}  # fmt: skip
    assert hub.repositories["acme/new"].messages[0]["description"] == "Why"


def test_what_the_hub_refuses_is_saved_all_the_same(hub: Hub, tmp_path: Path) -> None:
    found = there(
        hub,
        tmp_path,
        f"""
config, base = GenerationConfig(top_k=5, do_sample=True), {str(tmp_path)!r}
out = [said(lambda: config.save_pretrained(base + "/cfg", push_to_hub=True, token="wrong")),
       said(lambda: config.save_pretrained(base + "/not", push_to_hub=True, token="wrong", tags=["x"])),
       said(lambda: config.save_pretrained(base + "/not", token="wrong"))]
""",
    )
    assert "cfg/generation_config.json is saved, but the Hub refuses it: " in found[0][0]
    assert found[0][2] == "HfHubHTTPError"
    assert GenerationConfig.from_pretrained(tmp_path / "cfg").top_k == 5
    assert [words for words, _, _ in found[1:]] == [
        "save_pretrained does not know tags", "save_pretrained does not know token",
    ]  # fmt: skip
    assert not (tmp_path / "not").exists()
    assert hub.repositories == {}


def test_nothing_is_uploaded_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: Any, **__: Any) -> types.NoneType:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(huggingface_hub, "HfApi", refuse)
    GenerationConfig(top_k=5, do_sample=True).save_pretrained(tmp_path, None, False)
    assert GenerationConfig.from_pretrained(tmp_path, None).top_k == 5
    for wrong in ("folder", "name"):
        with pytest.raises(InputError, match=f"does not know {wrong}"):
            GenerationConfig().save_pretrained(tmp_path, push_to_hub=True, **{wrong: "x"})

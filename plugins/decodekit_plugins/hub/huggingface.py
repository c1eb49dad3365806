"""The Hugging Face Hub, through huggingface_hub."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decodekit.config import ConfigFileError
from decodekit.errors import InputError


class HuggingFaceHub:
    """The ``huggingface`` hubs plugin."""

    def fetch(self, repo_id: str, name: str, /, *, proxies: Mapping[str, str] | None = None, **options: Any) -> Path:
        """Download the file `name`; `options` are those of `hf_hub_download`.

        Raises `InputError` (also an OSError) with the Hub's words where there is none.
        """
        from huggingface_hub import hf_hub_download

        if proxies and "proxies" not in inspect.signature(hf_hub_download).parameters:
            raise InputError("proxies: this huggingface_hub takes them from the environment; set HTTPS_PROXY")
        if proxies:
            options["proxies"] = proxies
        try:
            return Path(hf_hub_download(repo_id, name, **options))
        except Exception as error:  # the Hub's errors share no base class
            raise ConfigFileError(f"{repo_id} is no folder or file, and the Hub says: {error}") from error

    def push(
        self,
        file: Path,
        /,
        *,
        repo_id: str | None = None,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
        commit_description: str | None = None,
    ) -> None:
        """Upload `file` to `repo_id` (unset: its folder's name, in your namespace), which is created where needed.

        Raises `InputError` with the Hub's words where it refuses.
        """
        from huggingface_hub import HfApi

        commit: dict[str, Any] = {"create_pr": create_pr, "commit_description": commit_description}
        commit |= {"revision": revision, "commit_message": commit_message or "Upload config"}
        api = HfApi(token=token)
        try:
            repo = api.create_repo(repo_id or file.parent.resolve().name, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo, branch=revision, exist_ok=True)
            api.upload_file(path_or_fileobj=file, path_in_repo=file.name, repo_id=repo, **commit)
        except Exception as error:  # the Hub's errors share no base class
            raise InputError(f"{file} is saved, but the Hub refuses it: {error}") from error

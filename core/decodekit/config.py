"""`GenerationConfig`: which keys were set, to what. What they mean belongs to the plugins that own them."""

from __future__ import annotations

import copy
import enum
import inspect
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .converter import plain
from .errors import ConfigError, DecodekitError, InputError, Problem, warn
from .keys import SECTIONS, keys
from .registry import registry

CONFIG_NAME = "generation_config.json"
METADATA = ("transformers_version", "_from_model_config", "_commit_hash", "decodekit_version")


class GenerationMode(str, enum.Enum):
    """What the keys ask for, by the reference's names."""

    GREEDY_SEARCH = "greedy_search"
    SAMPLE = "sample"
    BEAM_SEARCH = "beam_search"
    BEAM_SAMPLE = "beam_sample"
    GROUP_BEAM_SEARCH = "group_beam_search"
    CONSTRAINED_BEAM_SEARCH = "constrained_beam_search"
    CONTRASTIVE_SEARCH = "contrastive_search"
    ASSISTED_GENERATION = "assisted_generation"
    DOLA_GENERATION = "dola_generation"


class GenerationConfig:
    """Settings of a generation, by the reference's names; every installed plugin adds its own keys.

    A key that was never set reads as None. What was set is remembered, equal to a default or not, so an
    explicit ``do_sample=False`` overrules a model's True. Names are checked at once (a typo raises
    `ConfigError` with the nearest key) without importing any plugin; values are checked by `validate`, which
    `generate` calls before anything runs.
    """

    _values: dict[str, Any]
    _extra: dict[str, Any]

    def __init__(self, **values: Any) -> None:
        values = {name: value for name, value in values.items() if not keys.idle(name, value)}
        problems = [Problem(k, keys.unknown(k)) for k in values if not _known(k)]
        if problems:
            raise ConfigError(problems)
        self.__dict__.update(_values=copy.deepcopy(values), _extra={})

    # -- attributes --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_values", "_extra"):
            raise AttributeError(name)
        if name in self._values or _known(name):
            return self._values.get(name)
        if name in self._extra:
            return self._extra[name]
        raise AttributeError(f"GenerationConfig has no key {name!r}; {keys.unknown(name)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not _known(name):
            raise ConfigError([Problem(name, keys.unknown(name))])
        self._values[name] = value

    def __delattr__(self, name: str) -> None:
        if self._values.pop(name, self) is self and self._extra.pop(name, self) is self:
            raise AttributeError(f"{name} is not set")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerationConfig):
            return NotImplemented
        return self._text() == other._text()

    def __hash__(self) -> int:
        return hash(frozenset(self.to_dict()))

    def __repr__(self) -> str:
        return f"GenerationConfig {self._text()}"

    def _text(self) -> str:
        """What JSON would write, and None: 1, 1.0 and True differ, lists and tuples do not."""
        return json.dumps(plain(self.__getstate__()), indent=2, sort_keys=True, default=repr)

    def __copy__(self) -> GenerationConfig:
        return copy.deepcopy(self)

    # The state of copies and pickles; which keys are known may differ where it is unpickled.

    def __getstate__(self) -> dict[str, Any]:
        return {**self._extra, **self._values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = {k: v for k, v in state.items() if _known(k)}
        self.__dict__.update(_values=values, _extra={k: v for k, v in state.items() if k not in values})

    @property
    def set_keys(self) -> Mapping[str, Any]:
        """Everything that was set to a known key."""
        return dict(self._values)

    @property
    def unknown_keys(self) -> Mapping[str, Any]:
        """Keys of a file that no installed plugin owns; kept, and written back by `save_pretrained`."""
        return dict(self._extra)

    # -- conversion --------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything set but None, unknown keys of a file included, as an independent copy."""
        return copy.deepcopy({k: v for k, v in {**self._extra, **self._values}.items() if v is not None})

    to_diff_dict = to_dict

    def to_json_string(self, use_diff: bool = True, ignore_metadata: bool = False) -> str:
        """JSON text: indent 2, sorted keys, one final newline."""
        data = {k: v for k, v in self.to_dict().items() if not (ignore_metadata and k in METADATA)}
        bad = []
        for name, value in data.items():
            try:
                json.dumps(plain(value))
            except (TypeError, ValueError):
                bad.append(Problem(name, f"cannot be written as JSON: {value!r}"))
        if bad:
            raise ConfigError(bad)
        return json.dumps(plain(data), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str], use_diff: bool = True) -> None:
        """Write `to_json_string` to a file, whole or not at all."""
        path = Path(json_file_path)
        text = self.to_json_string(use_diff)
        draft = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Build from a file's dict, keeping keys nobody owns; `kwargs` override and must be known keys.

        With ``return_unused_kwargs=True`` returns ``(config, unused)`` instead of refusing unknown `kwargs`.
        """
        give_unused = kwargs.pop("return_unused_kwargs", False)
        unused = {k: v for k, v in kwargs.items() if not _known(k)}
        config = cls()
        for name, value in config_dict.items():
            if value is None:  # files of the reference write null for "unset"
                continue
            (config._values if _known(name) else config._extra)[name] = copy.deepcopy(value)
        config._values.update(copy.deepcopy({k: v for k, v in kwargs.items() if k not in unused}))
        if give_unused:
            return config, unused
        if unused:
            raise ConfigError([Problem(k, keys.unknown(k)) for k in unused])
        return config

    @classmethod
    def from_model_config(cls, model_config: Any) -> GenerationConfig:
        """Take the generation keys out of a model's configuration (object with `to_dict`, or dict)."""
        data = model_config if isinstance(model_config, Mapping) else model_config.to_dict()
        parts = (data.get(name) for name in ("decoder", "generator", "text_config"))
        nested: Mapping[str, Any] = next((part for part in parts if isinstance(part, Mapping)), {})
        merged = {**nested, **{k: v for k, v in data.items() if v is not None}}
        # `use_cache`, `dtype` and the like describe the model; of these only generation's own keys are taken.
        config: GenerationConfig = cls.from_dict({k: v for k, v in merged.items() if _known(k) and k not in SECTIONS})
        if any(config._values.get(k) for k in ("output_attentions", "output_hidden_states", "output_scores")):
            config._values.setdefault("return_dict_in_generate", True)
        return config

    # -- files -------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name: str | os.PathLike[str], config_file_name: str | os.PathLike[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None, force_download: bool = False, local_files_only: bool = False,
        token: str | bool | None = None, revision: str = "main", subfolder: str = "",
        proxies: Mapping[str, str] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Load from a folder, a JSON file or the Hub; `kwargs` are overrides, as in `from_dict`.

        config_file_name: unset, ``generation_config.json``. revision: a branch, tag or commit, also ``refs/pr/7``.

        Raises `InputError` (also an OSError) when the file is missing or is no JSON object.
        """
        if not isinstance(pretrained_model_name, (str, os.PathLike)):
            raise InputError(f"from_pretrained takes a folder, a file or a Hub id, not {pretrained_model_name!r}")
        source, name = Path(pretrained_model_name), str(config_file_name or CONFIG_NAME)
        if source.is_dir():
            path = source / subfolder / name
        elif source.is_file():
            path = source
        else:
            hub: dict[str, Any] = {"cache_dir": cache_dir, "force_download": force_download, "token": token}
            hub |= {"local_files_only": local_files_only, "revision": revision, "subfolder": subfolder or None}
            path = _hub().fetch(str(pretrained_model_name), name, proxies=proxies, **hub)
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
        except FileNotFoundError as error:
            raise ConfigFileError(f"there is no {name} in {source / subfolder}") from error
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, too deep, or with too many digits
            raise ConfigFileError(f"{path} is not a valid JSON file: {error}") from error
        if not isinstance(data, dict):
            raise ConfigFileError(f"{path} must hold a JSON object, not {type(data).__name__}")
        return cls.from_dict(data, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], config_file_name: str | os.PathLike[str] | None = None,
        push_to_hub: bool = False, *, strict: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Write the JSON file, creating the folder. What could be loaded can always be saved.

        push_to_hub: upload the file, too. `kwargs` are then repo_id (unset: the folder's name, in your namespace),
            token, private, revision, create_pr, commit_message and commit_description.
        strict: raise `ConfigError` instead of warning about values that are wrong or have no effect.

        Raises `InputError` for a file in the folder's place, and where the Hub refuses what was saved.
        """
        folder, name = Path(save_directory), str(config_file_name or CONFIG_NAME)
        if folder.is_file():
            raise InputError(f"{folder} is a file; save_pretrained needs a folder")
        if strange := kwargs.keys() - set(inspect.getfullargspec(_hub().push).kwonlyargs if push_to_hub else ()):
            raise InputError(f"save_pretrained does not know {', '.join(sorted(strange))}")
        try:
            self.validate(strict=strict)
        except DecodekitError as error:
            if strict:
                raise
            warn(f"saved as it is, though: {error}")
        folder.mkdir(parents=True, exist_ok=True)
        self.to_json_file(folder / name)
        if push_to_hub:
            _hub().push(folder / name, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> None:
        """Upload the JSON file to `repo_id`; `kwargs` as in `save_pretrained`."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, push_to_hub=True, repo_id=repo_id, **kwargs)

    # -- meaning -----------------------------------------------------------------------------------

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Set known keys and return the rest unchanged.

        defaults_only: fill only keys that are unset. allow_custom_entries: keep unknown keys too.
        """
        known = [name for name in kwargs if _known(name)]
        taken = {name: kwargs[name] for name in known if not (defaults_only and self._values.get(name) is not None)}
        extra = {k: v for k, v in kwargs.items() if allow_custom_entries and k not in known}
        draft = type(self)()
        draft._values.update({**self._values, **copy.deepcopy(taken)})
        draft.validate()
        self._values.update(draft._values)
        self._extra.update(copy.deepcopy(extra))
        return {k: v for k, v in kwargs.items() if k not in taken and k not in extra}

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Check every value with its owner. Raises one `ConfigError` that lists all problems.

        strict: also refuse keys without effect. Loads the owners of the keys that are set.
        """
        from .hooks import hooks
        from .settings import resolve

        settings = resolve([("config", self.set_keys)], library=False)
        samples = None if settings.get("strategy") else bool(settings.get("do_sample"))
        notes = hooks.doubts(settings, samples)
        notes = [note for note in notes if user_set_attributes is None or note.key in user_set_attributes]
        if notes and strict:
            raise ConfigError(notes)
        if notes:
            warn("; ".join(map(str, notes)))

    def get_generation_mode(self, assistant_model: Any = None) -> GenerationMode:
        """What the keys ask for, decided in the reference's order."""
        return mode_of(self._values, assistant_model)


def _hub() -> Any:
    return registry.load("hubs", "huggingface")()


class ConfigFileError(InputError, OSError):
    """A configuration file is missing or broken."""


def mode_of(values: Mapping[str, Any], assistant_model: Any = None) -> GenerationMode:
    """The generation mode that plain key values ask for."""
    get, mode = values.get, GenerationMode
    sample = bool(get("do_sample"))
    if get("constraints") is not None or get("force_words_ids") is not None:
        return mode.CONSTRAINED_BEAM_SEARCH
    if get("num_beams") not in (None, 1):
        if (get("num_beam_groups") or 1) > 1:
            return mode.GROUP_BEAM_SEARCH
        return mode.BEAM_SAMPLE if sample else mode.BEAM_SEARCH
    top_k = get("top_k") or 0
    most = max(top_k) if isinstance(top_k, (tuple, list)) else top_k  # one for each prompt
    if not sample and most > 1 and (get("penalty_alpha") or 0) > 0:
        return mode.CONTRASTIVE_SEARCH
    drafts = ("prompt_lookup_num_tokens", "assistant_early_exit")
    if assistant_model is not None or get("use_mtp") or any(get(name) is not None for name in drafts):
        return mode.ASSISTED_GENERATION
    if get("dola_layers") is not None:
        return mode.DOLA_GENERATION
    return mode.SAMPLE if sample else mode.GREEDY_SEARCH


def _known(name: str) -> bool:
    return name in keys or name in SECTIONS

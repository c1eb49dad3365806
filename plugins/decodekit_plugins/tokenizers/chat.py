"""Reads the files of a tokenizer, and renders conversations by its chat template."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from decodekit.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from .vocabulary import Fast

F = TypeVar("F", bound="Fast")


def load_tokenizer(folder: Path, make: type[F]) -> F:
    """Open tokenizer.json with what tokenizer_config.json and chat_template.jinja beside it say.

    Raises InputError, naming the file, for one that is missing or broken.
    """
    from tokenizers import Tokenizer

    folder = Path(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder} has no tokenizer.json: pass a tokenizer, or save one there")
    settings = folder / "tokenizer_config.json"
    config = _settings(settings) if settings.is_file() else {}
    template = _template(config.get("chat_template"), settings)
    if (folder / "chat_template.jinja").is_file():
        template = _text(folder / "chat_template.jinja")
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _token(name, config[name], settings) for name in names if config.get(name)}
    try:
        fast = Tokenizer.from_str(_text(file))
    except InputError:
        raise
    except Exception as error:  # `tokenizers` raises nothing more exact
        raise InputError(f"{file} cannot be read as a tokenizer ({error}); download it again") from error
    fast.no_truncation()
    fast.no_padding()
    return make(fast, template, tokens, config.get("add_bos_token"))


def _text(file: Path) -> str:
    """The text of a file, without a byte order mark."""
    try:
        return file.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error}); download it again") from error


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(file))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read ({error}); download it again") from error
    if not isinstance(found, dict):
        raise InputError(f"{file} must hold a JSON object, not {type(found).__name__}; download it again")
    return found


def _template(found: Any, file: Path) -> str | None:
    """The template of that name, or the one called default of several."""
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, Mapping) and entry.keys() >= {"name", "template"}]
        if len(named) < len(found):
            raise InputError(f"{file}: a chat_template that is a list must hold name and template in every entry")
        found = {entry["name"]: entry["template"] for entry in named}.get("default")
    if found is not None and not isinstance(found, str):
        raise InputError(f"{file}: chat_template must be text, not {type(found).__name__}")
    return found


def _token(name: str, given: Any, file: Path) -> str:
    text = given.get("content") if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise InputError(f"{file}: {name} must be the text of a token, not {given!r}")
    return text


def whole(text: str) -> str:
    """`text`, where it is made of characters. Raises InputError for half a surrogate pair, which has no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds {text[error.start]!a} at place {error.start}, half of a surrogate pair and no character: "
            "decode it with errors='replace' where it comes from"
        ) from error
    return text


def checked(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """`messages`, where each has a role and something said. Raises InputError naming the first that has not."""
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"chat message {place} has no role: write {{'role': 'user', 'content': 'text'}}")
        content = message.get("content")
        if content is None and not message.keys() - {"role", "content"}:  # calls of tools may say nothing else
            raise InputError(f"chat message {place} ({message['role']}) has no content: give it text")
        if content is not None and not isinstance(content, (str, list, tuple)):
            kind = type(content).__name__
            raise InputError(f"content of chat message {place} ({message['role']}) must be text, not {kind}")
    return messages


def refused(error: Exception) -> InputError:
    """What to say where a template fails: it is a program of the checkpoint, and may fail in any way."""
    return InputError(f"the chat template refuses these messages: {error}")


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]) -> str:
    """Fill in a chat template, up to where the assistant begins. Raises InputError where it refuses the messages.

    Templates come with checkpoints from the network: they run in a sandbox.
    """
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtra("jinja2", "chat", "a chat template") from error

    class Generation(Extension):
        """Templates may mark the assistant's own words, for training: here the mark means nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    env.filters["tojson"] = as_json
    try:
        return env.from_string(template).render(messages=messages, add_generation_prompt=True, **tokens)
    except MemoryError:
        raise
    except Exception as error:
        raise refused(error) from error

"""The keys of speculative decoding."""

from __future__ import annotations

import attrs
from decodekit.context import BindContext
from decodekit.errors import ConfigError, Problem, warn
from decodekit.fields import at_least, between, one_of, option
from decodekit.hooks import hookimpl
from decodekit.settings import CALLER, Settings

ASKING = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
"""Keys that ask for drafts; the others say how they are made."""
OWNER = "decodekit:speculation"
NONE = "this version of decodekit drafts no tokens"


@attrs.frozen
class Speculation:
    """Keys that say who drafts tokens and how many: read, checked and written back.

    Nothing in this version drafts. A text with drafts is the text without them, only sooner, so what a model's own file
    asks for is left out with a warning, and what a caller asks for is refused.
    """

    num_assistant_tokens: int | None = option("Tokens that are drafted at once.", default=None, check=at_least(1))
    num_assistant_tokens_schedule: str | None = option(
        "How that number follows what was accepted.",
        default=None,
        check=one_of("heuristic", "heuristic_transient", "constant"),
    )
    prompt_lookup_num_tokens: int | None = option(
        "Tokens that are copied from where the text has been the same before.", default=None, check=at_least(1)
    )
    max_matching_ngram_size: int | None = option(
        "Tokens that must be the same for that, at most; unset: 2.", default=None, check=at_least(1)
    )
    assistant_early_exit: int | None = option(
        "Layer after which the model itself drafts.", default=None, check=at_least(1)
    )
    assistant_lookbehind: int | None = option(
        "Tokens of the draft model read again where vocabularies differ; unset: 10.", default=None, check=at_least(1)
    )
    target_lookbehind: int | None = option(
        "Tokens of the model read again where vocabularies differ; unset: 10.", default=None, check=at_least(1)
    )
    assistant_ensemble_weight: float | None = option(
        "Share of the model in the mixture with the draft model that tokens are accepted against; unset: the model's "
        "own distribution.",
        default=None,
        check=between(0, 1, low_open=True, high_open=True),
    )
    use_mtp: bool | None = option("Draft by the model's own heads for several tokens.", default=None)
    speculation_type: str | None = option("Kind of draft model.", default=None, check=one_of("dflash"))
    is_assistant: bool | None = option("Whether the model drafts for another.", default=None)

    def bind(self, ctx: BindContext, /) -> None:
        """Nothing to do in a run without drafts."""


@hookimpl
def config_translated(settings: Settings) -> None:
    """Refuse drafts that the caller asks for; take what a model's file asks for out, with a word."""
    asked = [name for name in ASKING if settings.get(name)]
    own = [name for name in asked if settings.origin(name) in CALLER]
    if own:
        raise ConfigError([Problem(name, f"{NONE}: leave {name} out") for name in own])
    for name in asked:
        warn(f"the model's {name} has no effect: {NONE}")
    for name in ASKING:
        settings.values.pop(name, None)


@hookimpl
def doubts(settings: Settings, samples: bool | None, strategy: str | None) -> list[Problem]:
    """Keys of drafts that a caller set for a run without them; a configuration may be for other runs, too."""
    mine = [v for v in settings.values.values() if v.owner == OWNER and v.origin in CALLER]
    words = "has no effect: nothing is drafted in this run; leave it out"
    return [Problem(v.key, words, OWNER) for v in mine if v.value not in (None, False)] if strategy else []

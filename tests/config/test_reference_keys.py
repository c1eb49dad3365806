"""Keys of the reference that nobody owns: no typo, and never dropped without a word."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig, plan
from decodekit.config import METADATA
from decodekit.keys import keys
from decodekit.options import REFERENCE

FREE = sorted(name for name in REFERENCE.split() if name not in keys)
GONE = "logprob_threshold"


def test_every_key_of_the_reference_is_owned_or_known_to_be_missing() -> None:
    transformers = pytest.importorskip("transformers")
    names = {name for name in vars(transformers.GenerationConfig()) if name not in METADATA}
    assert [name for name in sorted(names) if name not in keys and name not in REFERENCE.split()] == []
    assert len(set(REFERENCE.split())) == len(REFERENCE.split())


@pytest.mark.parametrize("name", FREE)
def test_they_are_no_typos(parrot: Any, name: str) -> None:
    for call in (lambda: plan(parrot(), [[1]], **{name: 3}), lambda: GenerationConfig(**{name: 3})):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: not available in this version of decodekit")
    with pytest.raises(ConfigError, match=r"tpo_p: unknown key; did you mean top_p"):
        plan(parrot(), [[1]], tpo_p=0.5)


def test_an_object_of_the_reference_asks_like_keywords_do(parrot: Any) -> None:
    theirs = pytest.importorskip("transformers").GenerationConfig
    with pytest.raises(ConfigError, match=f"{GONE}: not available in this version"):
        plan(parrot(), [[1]], theirs(**{GONE: 3}))
    made = plan(parrot(), [[1]], theirs(max_new_tokens=3, do_sample=True, top_k=4))
    assert made.settings.get("top_k") == 4
    assert made.settings.unknown == {}


def test_what_the_models_own_file_says_is_only_reported(parrot: Any) -> None:
    theirs = pytest.importorskip("transformers").GenerationConfig
    model = parrot(**{GONE: 3})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Many pass a changed copy of the model's own configuration.
        for config in (None, theirs(**{GONE: 3}, max_new_tokens=2)):
            assert plan(model, [[1]], config).settings.unknown == {GONE: 3}
    assert sum(GONE in str(warning.message) for warning in caught) <= 1
    with pytest.raises(ConfigError, match=GONE):
        plan(model, [[1]], theirs(**{GONE: 4}))

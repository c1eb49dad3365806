"""``load(save(x)) == x`` for every key of every installed plugin (law 7), and for files of all ages (B34)."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import pytest
from decodekit import ConfigError, GenerationConfig, between, one_of, option
from decodekit.converter import field_types, plain, structure
from decodekit.fields import Between, Each, OneOf
from decodekit.keys import Key, keys
from decodekit.registry import KINDS, registry
from decodekit.settings import resolve
from hypothesis import given
from hypothesis import strategies as st

# -- values of a declared type and range -------------------------------------------------------------


def values(wanted: Any, check: Any = None) -> st.SearchStrategy[Any]:
    """Anything that a field of this type and check may hold."""
    if isinstance(check, OneOf):
        return st.sampled_from(check.choices)
    if wanted is Any and check is not None:
        return st.nothing()  # an object of some kind, such as a function: no plain data
    if isinstance(check, Each):
        one = st.one_of(*(values(kind, check.check) for kind in _members(wanted) if get_origin(kind) is not tuple))
        return one | st.lists(one, min_size=1, max_size=3)
    if isinstance(check, Between) and {int, float, type(None)}.issuperset(_members(wanted)):
        return _inside(check, wanted)
    made = _of(wanted)
    if isinstance(check, Between):
        made = made | _inside(check, wanted)
    return made.filter(lambda value: _passes(check, wanted, value))


def _inside(check: Between, wanted: Any) -> st.SearchStrategy[Any]:
    low, high = max(check.low, -1e6), min(check.high, 1e6)
    floats = st.floats(low, high, exclude_min=check.low_open, exclude_max=check.high_open)
    whole = [
        math.floor(low) + 1 if check.low_open else math.ceil(low),
        math.ceil(high) - 1 if check.high_open else high,
    ]
    whole_ = st.integers(whole[0], math.floor(whole[1])) if whole[0] <= whole[1] else st.nothing()
    return whole_ if float not in _members(wanted) else floats | whole_


def _members(wanted: Any) -> tuple[Any, ...]:
    return get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)


def _passes(check: Any, wanted: Any, value: Any) -> bool:
    try:
        item = structure(value, wanted)
        if check is not None:
            check(None, None, item)
    except (ValueError, TypeError, AttributeError):
        return False
    return True


def _of(wanted: Any) -> st.SearchStrategy[Any]:
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of(arg) for arg in args if arg is not type(None)))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (tuple, list):
        if origin is tuple and args[-1] is not Ellipsis:
            return st.tuples(*map(_of, args))
        return st.lists(_of(args[0]), max_size=4) | st.lists(_of(args[0]), max_size=4).map(tuple)
    if origin in (set, frozenset):
        return st.frozensets(_of(args[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(_hashable(args[0]), _of(args[1]), max_size=3)
    if attrs.has(wanted):
        fields = attrs.fields_dict(wanted)
        made = {n: values(t, fields[n].validator) for n, t in field_types(wanted).items() if fields[n].init}
        return st.fixed_dictionaries(made).filter(lambda value: _passes(None, wanted, value))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return st.sampled_from(list(wanted)).map(lambda member: member.value)
    plain_types = {
        bool: st.booleans(),
        int: st.integers(-3, 2**40),
        float: st.floats(allow_nan=False) | st.integers(-5, 5),
        str: st.text(max_size=8),
        dict: st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
        Any: st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    }
    return plain_types.get(wanted, st.nothing())


def _hashable(wanted: Any) -> st.SearchStrategy[Any]:
    return st.lists(_of(get_args(wanted)[0]), max_size=3).map(tuple) if get_origin(wanted) is tuple else _of(wanted)


def _type(key: Key) -> Any:
    return field_types(key.load())[key.field]


def of_key(key: Key) -> st.SearchStrategy[Any]:
    return values(_type(key), attrs.fields_dict(key.load())[key.field].validator)


KEYS = [key for key in keys.all() if key.plugin is None or key.plugin.distribution == "decodekit"]
USABLE = [key for key in KEYS if not of_key(key).is_empty]


def saved_and_loaded(config: GenerationConfig) -> GenerationConfig:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config.save_pretrained(folder)
        loaded: GenerationConfig = GenerationConfig.from_pretrained(folder)
    return loaded


def same_values(one: GenerationConfig, other: GenerationConfig) -> None:
    """The same keys, each with the same JSON and, structured by its owner, the same value and type."""
    assert one == other
    assert set(one.set_keys) == set(other.set_keys)
    before, after = resolved(one), resolved(other)
    assert before == after
    if isinstance(before, dict):
        assert {name: type(v.value) for name, v in before.items()} == {name: type(v.value) for name, v in after.items()}


def resolved(config: GenerationConfig) -> Any:
    """The final values, or the keys that their owners refuse (a rule between two keys)."""
    try:
        return resolve([("config", config.set_keys)], library=False).values
    except ConfigError as error:
        return {problem.key for problem in error.problems}


# -- law 7 -------------------------------------------------------------------------------------------


def test_values_can_be_made_for_every_key() -> None:
    objects = [key.name for key in KEYS if key not in USABLE and _type(key) is not Any]
    assert objects == []
    assert len(USABLE) >= 20


@pytest.mark.parametrize("key", USABLE, ids=lambda key: f"{key.distribution}:{key.name}")
@given(data=st.data())
def test_every_key_survives_the_file(key: Key, data: st.DataObject) -> None:
    value = data.draw(of_key(key))
    config = GenerationConfig(**{key.name: value})
    loaded = saved_and_loaded(config)
    same_values(config, loaded)
    assert saved_and_loaded(loaded).to_json_string() == config.to_json_string()


@given(data=st.data())
def test_any_set_of_keys_survives_file_copy_and_pickle(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(USABLE), max_size=8, unique_by=lambda key: key.name))
    config = GenerationConfig(**{key.name: data.draw(of_key(key)) for key in chosen})
    pickled = pickle.loads(pickle.dumps(config))
    for twin in (saved_and_loaded(config), copy.copy(config), copy.deepcopy(config), pickled):
        same_values(config, twin)
        assert hash(twin) == hash(config)
        assert twin is not config


OWN = [p for kind in KINDS if kind not in ("hooks", "commands", "frontends") for p in registry.plugins(kind)]
OPTIONS = [plugin for plugin in OWN if plugin.distribution == "decodekit"]


@pytest.mark.parametrize("plugin", OPTIONS, ids=lambda plugin: f"{plugin.kind}:{plugin.name}")
@given(data=st.data())
def test_options_of_every_plugin_survive_plain_data(plugin: Any, data: st.DataObject) -> None:
    cls = plugin.load()
    if not attrs.has(cls):
        return
    fields = attrs.fields_dict(cls)
    kept = {n: t for n, t in field_types(cls).items() if fields[n].init and not values(t, fields[n].validator).is_empty}
    given_ = {n: data.draw(values(t, fields[n].validator)) for n, t in kept.items()}
    try:
        options = cls(**{n: structure(v, kept[n]) for n, v in given_.items()})
    except (ValueError, TypeError):
        return  # a rule between two fields, or a field that is no plain data
    back = structure(json.loads(json.dumps(plain(options))), cls)
    assert back == options
    assert all(type(getattr(back, n)) is type(getattr(options, n)) for n in fields)


@attrs.frozen
class Mark:
    ratio: float = option("Share.", default=0.25, check=between(0, 1))
    scheme: str = option("Scheme.", default="left", check=one_of("left", "self"))


@attrs.frozen
class Rich:
    """Every shape of value that a key has in the reference."""

    bias: dict[tuple[int, ...], float] | None = option("As sequence_bias.", default=None)
    mark: Mark | None = option("As watermarking_config.", default=None)
    words: tuple[tuple[int, ...], ...] = option("As bad_words_ids.", default=())
    decay: tuple[int, float] | None = option("As exponential_decay_length_penalty.", default=None)
    stopping: bool | Literal["never"] = option("As early_stopping.", default=False)
    ids: dict[int, str] | None = option("Keys that are numbers.", default=None)

    def __call__(self, input_ids: Any, scores: Any, /) -> Any:
        return scores


@pytest.mark.parametrize(
    ("key", "value", "final"),
    [
        ("bias", {(1, 2): 0.5, (3,): -1.0}, {(1, 2): 0.5, (3,): -1.0}),
        ("bias", [[[1, 2], 0.5]], {(1, 2): 0.5}),
        ("mark", {"ratio": 0.5}, Mark(0.5)),
        ("mark", Mark(0.5, "self"), Mark(0.5, "self")),
        ("words", [[1, 2], [3]], ((1, 2), (3,))),
        ("decay", (3, 1.5), (3, 1.5)),
        ("stopping", "never", "never"),
        ("stopping", True, True),
        ("ids", {1: "a"}, {1: "a"}),
    ],
)
def test_values_that_json_has_no_form_for_survive(register: Any, key: str, value: Any, final: Any) -> None:
    register("processors", "rich", Rich, **{name: name for name in attrs.fields_dict(Rich)})
    config = GenerationConfig(**{key: value})
    loaded = saved_and_loaded(config)
    same_values(config, loaded)
    assert resolve([("config", loaded.set_keys)]).get(key) == final


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("bias", {(1, "2"): 0.5}, "expected a whole number, got '2' (str)"),
        ("bias", "much", "expected a dict"),
        ("mark", {"ratio": 2.0}, "mark: ratio: must be in [0, 1], got 2.0"),
        ("mark", {"ration": 0.5}, "mark: ration: unknown option; did you mean ratio"),
        ("mark", 5, "expected Mark"),
        ("words", [1], "expected a list of whole numbers, got 1 (int)"),
        ("words", "ab", "expected a list of lists of whole numbers, got 'ab' (str)"),
        ("decay", (3,), "expected 2 values, got 1: (3,)"),
        ("stopping", "sometimes", "True or False or one of 'never'"),
        ("ids", {"1": "a"}, "expected a whole number, got '1' (str)"),
        ("ids", [], "expected a dict, got [] (list)"),
    ],
)
def test_wrong_shapes_are_refused_in_words(register: Any, key: str, value: Any, words: str) -> None:
    register("processors", "rich", Rich, **{name: name for name in attrs.fields_dict(Rich)})
    with pytest.raises(ConfigError) as error:
        GenerationConfig(**{key: value}).validate()
    assert words in str(error.value)


# -- files (B34) -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stored",
    [
        {"do_sample": False, "temperature": 0.9},
        {"temperature": 2, "top_p": 1},
        {"temperature": "very", "top_p": 7},
        {"num_return_sequences": 3},
        {"eos_token_id": [2, 3], "pad_token_id": -1},
        {"processors": {"top_k": {"top_k": 5}}, "criteria": {"stop_strings": {"stop_strings": ["."]}}},
        {"processors": {"not_installed": {"power": 2.0}}},
        {"not_a_key": {"deep": [1, {"er": None}]}, "another": 1.5, "transformers_version": "5.24.0"},
        {"watermarking_conf": {"greenlist_ratio": 0.25}, "compile_conf": {"mode": "x"}, "batching": {"page_size": 256}},
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_whatever_loads_can_be_saved_unchanged(tmp_path: Path, stored: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    loaded = GenerationConfig.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    again = GenerationConfig.from_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert written == stored
    assert {k: type(v) for k, v in written.items()} == {k: type(v) for k, v in stored.items()}
    assert again == loaded
    assert again.unknown_keys == loaded.unknown_keys


def test_saving_warns_at_most_and_strict_refuses(tmp_path: Path) -> None:
    config = GenerationConfig(do_sample=False, temperature=0.9)
    with pytest.warns(UserWarning, match=r"temperature: 0.9 has no effect"):
        config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="temperature"):
        config.save_pretrained(tmp_path / "strict", strict=True)
    assert not (tmp_path / "strict").exists()
    with pytest.warns(UserWarning, match=r"saved as it is, though: top_p: must be in \[0, 1\]"):
        GenerationConfig(top_p=9.0).save_pretrained(tmp_path / "wrong")
    assert GenerationConfig.from_pretrained(tmp_path / "wrong").top_p == 9.0


def test_old_files_with_nulls_say_nothing_by_them() -> None:
    loaded = GenerationConfig.from_dict({"top_k": None, "temperature": 0.5, "not_a_key": None, "do_sample": None})
    assert loaded.to_dict() == {"temperature": 0.5}
    assert loaded == GenerationConfig(temperature=0.5)
    # Passed to a call, such a file must not take back what the model says, as an explicit None would.
    assert (dict(loaded.set_keys), dict(loaded.unknown_keys)) == ({"temperature": 0.5}, {})


def test_unknown_keys_of_a_model_are_reported_once(parrot: Any) -> None:
    from decodekit import plan

    model = parrot(key_of_tomorrow=1, key_of_yesterday=2, transformers_version="5")
    with pytest.warns(UserWarning, match="key_of_tomorrow, key_of_yesterday$"):
        made = plan(model, [[1]])
    assert made.describe()["unknown_keys"]["key_of_tomorrow"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(model, [[1]])


def test_types_matter_for_equality_and_forms_of_json_do_not() -> None:
    assert GenerationConfig(temperature=1) != GenerationConfig(temperature=1.0)
    assert GenerationConfig(do_sample=True) != GenerationConfig(do_sample=1)
    assert GenerationConfig(eos_token_id=[1, 2]) == GenerationConfig(eos_token_id=(1, 2))
    assert GenerationConfig(top_k=None) != GenerationConfig()
    assert GenerationConfig(do_sample=False) != GenerationConfig()
    assert GenerationConfig() != {}


def test_a_copy_keeps_none_and_shares_nothing() -> None:
    config = GenerationConfig(top_k=None, eos_token_id=[1])
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert dict(twin.set_keys) == {"top_k": None, "eos_token_id": [1]}
        twin.eos_token_id.append(2)
        twin.top_p = 0.5
        assert config.eos_token_id == [1]
        assert config.top_p is None


def test_copies_keep_the_unknown_keys_of_a_file() -> None:
    config = GenerationConfig.from_dict({"top_k": 5, "key_of_tomorrow": [1]})
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin.unknown_keys == {"key_of_tomorrow": [1]}
        assert twin.key_of_tomorrow is not config.key_of_tomorrow


def test_a_pickle_outlives_the_plugin_that_owned_a_key(register: Any) -> None:
    from decodekit.registry import registry

    plugin = register("processors", "rich", Rich, words="words")
    data = pickle.dumps(GenerationConfig(words=[[1]], top_k=5))
    registry.unregister(plugin)
    loaded = pickle.loads(data)
    assert loaded.unknown_keys == {"words": [[1]]}
    assert loaded.set_keys == {"top_k": 5}

"""Tests of rampup.config.files."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rampup import load_config
from rampup.config.files import BASE_FILE, MODELINE, explain, yaml_value
from rampup.config.schema import KEYS, Config
from rampup.config.yaml import parse_scalar
from rampup.contrib.rl.config import ROLLOUT_FILE, ROLLOUT_KEYS
from rampup.errors import ConfigError

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SCHEMA = BASE_FILE.json_schema
WHOLE = Draft202012Validator(SCHEMA)
BY_KEY = {name: Draft202012Validator(SCHEMA["properties"][name]) for name in KEYS}
PRESETS = sorted(CONFIGS.glob("*.yml"))
FILES = (BASE_FILE, ROLLOUT_FILE)


class Core(yaml.SafeLoader):
    """YAML as an editor reads it: the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - as in the base class


for tag, pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
}.items():
    Core.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"), None
    )
Core.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))


def test_base_yml_and_its_schema_are_current():
    """The files are those that `python -m rampup.config.files configs` writes: the
    defaults, and a valid schema.
    """
    assert load_config(CONFIGS / "base.yml") == Config()
    assert (CONFIGS / "base.yml").read_text() == BASE_FILE.text
    assert json.loads((CONFIGS / "rampup.schema.json").read_text()) == SCHEMA
    Draft202012Validator.check_schema(SCHEMA)


@given(
    st.one_of(
        st.booleans(),
        st.integers(-(10**9), 10**9),
        st.floats(allow_nan=False, allow_infinity=False),
        st.none(),
    )
)
def test_yaml_value_reads_back(value):
    """A value written to YAML is read as the same value."""
    assert parse_scalar(yaml_value(value), "file.yml") == value


@pytest.mark.parametrize(
    "text", ["runs", "", "yes", "5", "1e3", "a: b", "0:8 100:16", "null", "*.txt"]
)
def test_yaml_value_quotes_text_that_would_be_read_as_something_else(text):
    """Text is plain or in quotes."""
    written = yaml_value(text)
    assert written == f'"{text}"' or parse_scalar(written, "file.yml") == text


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_config_names_a_schema_that_accepts_it(path):
    """The first line of each file is the modeline that editors read, and the schema
    that it names accepts the file.
    """
    text = path.read_text()
    named = re.fullmatch(
        re.escape(MODELINE).replace(r"\{\}", "(.*)"), text.splitlines()[0]
    )
    schema = json.loads((path.parent / named[1]).read_text())
    assert list(Draft202012Validator(schema).iter_errors(yaml.load(text, Core))) == []


NO_CONFIGS = (
    {"stepz": 3},
    {"steps": 0},
    {"steps": "many"},
    {"base_config": 3},
    {"dtype": "float16"},
    [],
    "text",
)
NO_CONFIGS += (
    {"enable_rampup_batch_size": "true"},
    {"per_device_batch_size": "1/0"},
    {"per_device_batch_size": "-1/3"},
)


@pytest.mark.parametrize("content", [*NO_CONFIGS, {"run_name": "a/b"}])
def test_schema_refuses(content):
    """Unknown keys, wrong types, values outside the limits, and files that are not
    mappings.
    """
    assert not WHOLE.is_valid(content)


NUMBERS = (
    st.integers(-3, 3)
    | st.integers(-(10**19), 10**19)
    | st.floats(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [
            0.0,
            -0.0,
            1.0,
            0.5,
            -1.0,
            1e18,
            1e19,
            1e300,
            2e300,
            2**31 - 1,
            2**31,
            1024,
            1025,
            100_000,
            100_001,
        ]
    )
)
OTHERS = (
    st.none()
    | st.booleans()
    | st.lists(st.integers(), max_size=1)
    | st.dictionaries(st.text(), st.none(), max_size=1)
)


@pytest.mark.parametrize("name", KEYS)
@settings(max_examples=10)
@given(value=NUMBERS | OTHERS, text=st.text(max_size=5))
def test_schema_accepts_the_values_that_the_key_accepts(name, value, text):
    """An editor marks no value that rampup takes, and every number outside the
    limits.
    """
    if KEYS[name].kind in ("text", "name") and KEYS[name].allows(text):
        assert BY_KEY[name].is_valid(text)
    if KEYS[name].allows(value):
        assert BY_KEY[name].is_valid(value)
    elif isinstance(value, int | float) and abs(value) < 10**9 and value == int(value):
        assert not BY_KEY[name].is_valid(value)


LIMITS = {
    name: [key.minimum, key.maximum, key.above, key.below, *key.also]
    for name, key in KEYS.items()
}


@pytest.mark.parametrize(
    "name",
    [name for name, limits in LIMITS.items() if any(n is not None for n in limits)],
)
def test_schema_has_the_limits_of_the_key(name):
    """At each limit of each key, below it and above it."""
    for limit in LIMITS[name]:
        if limit is not None:
            for value in (
                limit,
                limit - 1,
                limit + 1,
                math.nextafter(limit, -9),
                math.nextafter(limit, 9),
            ):
                if not (KEYS[name].kind == "size" and 0 < abs(value) < 1e-18):
                    assert BY_KEY[name].is_valid(value) == KEYS[name].allows(value)


AS_TEXT = {
    "steps": ["1_000", "2K", "0.5m", "12"],
    "per_device_batch_size": ["1_000", "1/3", "0.5"],
}
AS_TEXT |= {
    "learning_rate": ["1_000", "0.5"],
    "run_name": ["", "run-1.2"],
    "batch_size_schedule": ["0:8 100:16", "auto"],
}


@pytest.mark.parametrize(("name", "texts"), AS_TEXT.items())
def test_schema_accepts_numbers_as_text(name, texts):
    """1_000, 2K and 1/3 are text for an editor. What it accepts is legal, as it is or
    as rampup's YAML reads it.
    """
    for text in texts:
        assert BY_KEY[name].is_valid(text)
        assert KEYS[name].allows(text) or KEYS[name].allows(
            parse_scalar(text, "file.yml")
        )


def test_schema_accepts_nested_keys():
    """A dotted key is accepted by its own name and nested in its group."""
    validator, name = Draft202012Validator(ROLLOUT_FILE.json_schema), "num_generations"
    contents = (
        {"rl": {name: 2}},
        {f"rl.{name}": 2},
        {"rl": {name: 0}},
        {"rl": {"nu": 1}},
    )
    assert [validator.is_valid(content) for content in contents] == [
        True,
        True,
        False,
        False,
    ]


def test_explain_gives_names_and_defaults_of_maxtext():
    """MaxText's name and default where it has the key; what it does where it has none.
    Interaction is symmetric.
    """
    found = {name: explain(name) for name in KEYS}
    assert all(
        name in found[other]["interacts"]
        for name in KEYS
        for other in found[name]["interacts"]
    )
    found |= {name: explain(name, FILES) for name in ROLLOUT_KEYS if name not in KEYS}
    assert {found[name]["file"] for name in ROLLOUT_KEYS if name not in KEYS} == {
        "rl.yml"
    }
    for name, maxtext, default in (
        ("steps", "steps", "150_001"),
        ("async_checkpointing", "async_checkpointing", "true"),
        ("learning_rate_batch_scaling", None, None),
        ("learning_rate_clock", None, "steps"),
        ("rl.num_generations", "rl.num_generations", "2"),
        ("shuffle_mini_batches", None, None),
        ("num_prompts", None, None),
    ):
        assert (found[name]["maxtext_name"], found[name]["maxtext_default"]) == (
            maxtext,
            default,
        )


CLOSE = {
    "stepz": "steps",
    "expnsion": "expansion_factor_real_data",
    "rampup": "enable_rampup_batch_size",
}
CLOSE |= {
    "LEARNING_RATE": "learning_rate",
    "num_generations": "rl.num_generations",
    "lr": "learning_rate",
}
CLOSE |= {
    "seed": "data_shuffle_seed",
    **dict.fromkeys(["", "\u00e9\u00e9\u00e9", "x" * 100_000, "[*"]),
}


@pytest.mark.parametrize(("name", "close"), CLOSE.items())
def test_explain_suggests_close_keys(name, close):
    """Typing errors, parts of names, capitals and names of other systems lead to the
    key; nothing is made up.
    """
    with pytest.raises(
        ConfigError, match="unknown key" if close else r"base\.yml lists all keys"
    ) as caught:
        explain(name, FILES)
    assert close in caught.value.nearest if close else caught.value.nearest == ()
    assert caught.value.key == name
    assert len(str(caught.value)) < 400

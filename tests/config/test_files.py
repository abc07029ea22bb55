"""Tests of rampup.config.files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup import load_config
from rampup.config.files import BASE_FILE, explain, yaml_value
from rampup.config.schema import KEYS, Config
from rampup.config.yaml import parse_scalar
from rampup.contrib.rl.config import ROLLOUT_FILE, ROLLOUT_KEYS
from rampup.errors import ConfigError

CONFIGS = Path(__file__).parent.parent.parent / "configs"
FILES = (BASE_FILE, ROLLOUT_FILE)


def test_base_yml_is_current():
    """The file is what `python -m rampup.config.files configs` writes: the defaults."""
    assert load_config(CONFIGS / "base.yml") == Config()
    assert (CONFIGS / "base.yml").read_text() == BASE_FILE.text


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
        ("mini_batch_size", None, None),
        ("num_prompts", None, None),
    ):
        assert (found[name]["maxtext_name"], found[name]["maxtext_default"]) == (
            maxtext,
            default,
        )


def test_explain_of_a_key_of_rollouts_alone_begins_with_the_keys_of_a_ramp():
    """`batch_size` is a key of rl.yml, and in base.yml a name of another quantity."""
    found = explain("batch_size", FILES)
    assert next(iter(found)) == "instead"
    assert "batch_size_schedule='0:N'" in found["instead"]["base.yml"]
    assert "per_device_batch_size" in found["instead"]["base.yml"]
    assert found["file"] == "rl.yml"
    for name in ("mini_batch_size", "steps"):
        assert explain(name, FILES)["instead"] == {}


CLOSE = {
    "stepz": "steps",
    "expansion_factr_real_data": "expansion_factor_real_data",
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
    """Typing errors, capitals and names of other systems lead to the
    key; nothing is made up.
    """
    with pytest.raises(
        ConfigError, match="unknown key" if close else "no key is like it"
    ) as caught:
        explain(name, FILES)
    assert close in caught.value.nearest if close else caught.value.nearest == ()
    assert caught.value.key == name
    assert len(str(caught.value)) < 400

"""Tests of rampup.config.template."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup import load_config
from rampup.config.schema import KEYS, Config
from rampup.config.template import base_yaml, yaml_value
from rampup.config.yaml import parse_scalar

BASE = Path(__file__).parent.parent.parent / "configs" / "base.yml"


def test_base_yml_is_written_from_the_schema():
    """The file in the repository is what the schema says; write it anew with `python -m rampup.config.template`."""
    assert BASE.read_text() == base_yaml()


def test_base_yml_holds_every_key_with_a_comment():
    """Every key stands in base.yml, under a comment."""
    lines = BASE.read_text().splitlines()
    for name in KEYS:
        (index,) = [number for number, line in enumerate(lines) if line.startswith(f"{name}:")]
        assert lines[index - 1].startswith("# ")


def test_base_yml_is_the_defaults_with_the_ramp_on():
    """Reading base.yml gives the schema's defaults, except that the ramp is on."""
    assert load_config(BASE) == Config(enable_rampup_batch_size=True)


@given(st.one_of(st.booleans(), st.integers(-(10**9), 10**9), st.floats(allow_nan=False, allow_infinity=False), st.none()))
def test_values_read_back(value):
    """What is written to YAML is read as the same value."""
    assert parse_scalar(yaml_value(value), "file.yml") == value


@pytest.mark.parametrize("text", ["runs", "", "yes", "5", "1e3", "a: b", "0:8 100:16", "null", "*.txt"])
def test_text_reads_back(text):
    """Text that would be read as something else is put in quotes."""
    written = yaml_value(text)
    assert written == f'"{text}"' or parse_scalar(written, "file.yml") == text

"""Tests of rampup.config.key."""

from fractions import Fraction

import pytest

from rampup.config.key import Key
from rampup.config.schema import Config
from rampup.errors import ConfigError


def read(value, **spec):
    """Read one value with a key made from the given properties."""
    return Key(doc="doc", section="section", **spec).read("name", value)


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ({"kind": "bool"}, True, True),
        ({"kind": "int"}, 7, 7),
        ({"kind": "int"}, 1e3, 1000),
        ({"kind": "int", "minimum": 1, "also": (-1,)}, -1, -1),
        ({"kind": "float"}, 1e-5, 1e-5),
        ({"kind": "size"}, 0.1, Fraction(1, 10)),
        ({"kind": "size"}, "1/3", Fraction(1, 3)),
        ({"kind": "text"}, "a b", "a b"),
        ({"kind": "text", "nullable": True}, None, None),
        ({"kind": "text", "choices": ("none", "full")}, None, "none"),
        ({"kind": "text", "choices": ("auto", "on", "off")}, False, "off"),
        ({"kind": "name"}, "run-1.2_x", "run-1.2_x"),
        ({"kind": "name"}, "", ""),
    ],
)
def test_read_converts(spec, value, expected):
    """A value becomes the key's own type."""
    result = read(value, **spec)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        ({"kind": "bool"}, 1, "true or false"),
        ({"kind": "int"}, 10.5, "a whole number"),
        ({"kind": "int"}, True, "a whole number"),
        ({"kind": "int"}, 10**19, "a whole number, at most 10**18"),
        ({"kind": "int"}, 1e22, "at most 10**18"),
        ({"kind": "int"}, float("nan"), "a whole number"),
        ({"kind": "int", "minimum": 1}, 0, "at least 1"),
        ({"kind": "float", "above": 0}, 0, "above 0"),
        ({"kind": "float", "below": 1}, 1.0, "below 1"),
        ({"kind": "float"}, float("nan"), "a number"),
        ({"kind": "float"}, 10**400, "a number"),
        ({"kind": "size", "above": 0}, 0, "above 0"),
        ({"kind": "size"}, "many", "fraction"),
        ({"kind": "text"}, 5, "put it in quotes: name: '5'"),
        ({"kind": "text"}, None, "name=null must be text"),
        ({"kind": "text"}, "a\0b", "must be text"),
        ({"kind": "text", "choices": ("a", "b")}, "c", "one of a, b"),
        *(
            ({"kind": "name"}, name, "a folder name")
            for name in ("..", ".", "../x", "a/b", "/etc", "a\0b", "a\nb", "~", "..\\x", "-" * 201, "con:", "\u2025")
        ),
    ],
)
def test_read_refuses_with_the_legal_values(spec, value, message):
    """The error about a wrong type or a value outside the limits names the key and the legal values."""
    with pytest.raises(ConfigError, match="name=") as caught:
        read(value, **spec)
    assert message in str(caught.value)
    assert caught.value.key == "name"


@pytest.mark.parametrize(
    ("spec", "value", "nearest"),
    [
        ({"kind": "int"}, "5", (5,)),
        ({"kind": "int", "minimum": 2}, 1.5, (2,)),
        ({"kind": "int"}, 1.5, (1, 2)),
        ({"kind": "int"}, "many", ()),
        ({"kind": "float"}, "1e-5", (1e-5,)),
        ({"kind": "bool"}, "yes", (True,)),
        ({"kind": "bool"}, 0, (False,)),
        ({"kind": "text"}, 5, ("5",)),
        ({"kind": "size", "above": 0}, -2, (1,)),
        ({"kind": "int", "minimum": 1, "also": (-1,)}, 0, (-1, 1)),
        ({"kind": "int"}, [5], ()),
    ],
)
def test_read_suggests_values_for_a_value_of_another_type(spec, value, nearest):
    """The error offers legal values close to the given one."""
    with pytest.raises(ConfigError) as caught:
        read(value, **spec)
    assert caught.value.nearest == nearest
    assert all(Key(doc="doc", section="section", **spec).allows(legal) for legal in nearest)


def test_settings_name_the_closest_key():
    """A misspelled attribute is refused with the hint that the command line gives."""
    with pytest.raises(TypeError, match="keyword argument 'batch_schedule'; its name here is batch_size_schedule"):
        Config(batch_schedule="0:8")
    with pytest.raises(TypeError, match="'stepz'; the closest is steps"):
        Config(stepz=3)


def test_whole_numbers_take_suffixes():
    """Every key that counts is written as the thresholds of a schedule are; other text is refused with the number it means."""
    config = Config(max_target_length="2k", steps="1.5K", enable_rampup_batch_size=True, global_rampup_samples="1M")
    assert (config.max_target_length, config.steps, config.global_rampup_samples) == (2000, 1500, 10**6)
    for name, value in {"steps": "1.0001K", "max_target_length": "2 k", "learning_rate": "1K", "log_period": "0K"}.items():
        with pytest.raises(ConfigError, match=name):
            Config(**{name: value})

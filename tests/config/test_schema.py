"""Tests of rampup.config.schema and rampup.config.key."""

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from rampup import Config, build_plan, load_config
from rampup.config.files import explain
from rampup.config.key import Key, attribute_of, keys_of_alias, other_names, read_keys
from rampup.config.schema import KEYS
from rampup.contrib.rl.config import ROLLOUT_KEYS
from rampup.contrib.rl.plan import AGGREGATIONS, MAX_SAMPLES
from rampup.errors import ConfigError, RampupError
from rampup.plan.hyperparameters import BATCH_RULES
from rampup.plan.learning_rate import BATCH_SCALING, CLOCKS
from rampup.plan.ramp_keys import SCHEDULE_UNITS
from rampup.plan.split import RAMPUP_MICROBATCH


def test_config_without_arguments_is_complete():
    """Every key has a default that its own rules accept, a section and documentation in
    full sentences.
    """
    config = Config()
    assert list(config.to_dict()) == list(KEYS)
    assert all(
        key.section and key.doc[0].isupper() and key.doc.endswith(".")
        for key in KEYS.values()
    )


WSD = {
    "lr_schedule_type": "wsd",
    "warmup_steps_fraction": 0.7,
    "wsd_decay_steps_fraction": 0.6,
}


@pytest.mark.parametrize(
    ("keys", "blamed", "nearest"),
    [
        ({"steps": -1}, "steps", ()),
        (WSD, "wsd_decay_steps_fraction", (0.3,)),
        (
            {"base_emb_dim": 120, "base_num_query_heads": 7, "base_num_kv_heads": 1},
            "base_num_query_heads",
            (6, 10),
        ),
        (
            {"base_emb_dim": 121, "base_num_query_heads": 7, "base_num_kv_heads": 1},
            "base_num_query_heads",
            (),
        ),
        (
            {"base_emb_dim": 10**18, "base_num_query_heads": 7, "base_num_kv_heads": 1},
            "base_num_query_heads",
            (5, 8),
        ),
        ({"base_num_kv_heads": 3}, "base_num_kv_heads", (2, 4)),
        ({"vocab_size": 100}, "vocab_size", (256,)),
        ({"dataset_type": "tokens"}, "grain_train_files", ()),
        ({"base_output_directory": " "}, "base_output_directory", ()),
        ({"batch_size_schedule": ""}, "batch_size_schedule", ()),
    ],
)
def test_contradiction_names_a_key_and_offers_legal_values(keys, blamed, nearest):
    """The error about keys that exclude each other names one of them, and each offered
    value is legal.
    """
    with pytest.raises(ConfigError) as caught:
        Config(**keys)
    assert (caught.value.key, caught.value.nearest) == (blamed, nearest)
    for value in nearest:
        Config(**{**keys, blamed: value})


def test_total_steps_and_num_kv_heads():
    """-1 takes the value of the other key; sizes are exact."""
    config = Config(steps=-1, learning_rate_schedule_steps=77)
    assert (config.total_steps, config.num_kv_heads) == (77, 4)
    assert (
        Config(per_device_batch_size="1/3").to_dict()["per_device_batch_size"] == "1/3"
    )
    assert Config(per_device_batch_size=0.5).per_device_batch_size == Fraction(1, 2)


ALIASES, REMOVED = (other_names()[table] for table in ("aliases", "removed"))


def test_the_tables_of_keys_have_the_attributes_and_the_choices_of_the_code():
    """No fact is about a key that does not exist, and a choice that a program knows is
    one that a file may have.
    """
    own = {
        attribute_of(name)
        for name, key in ROLLOUT_KEYS.items()
        if key is not KEYS.get(name)
    }
    assert set(read_keys("rampup.config")) == set(KEYS)
    assert set(read_keys("rampup.contrib.rl")) == own
    choices = {
        "rampup_microbatch": RAMPUP_MICROBATCH,
        "batch_size_schedule_unit": SCHEDULE_UNITS,
        "learning_rate_clock": CLOCKS,
        "batch_scaling": tuple(BATCH_RULES),
        "learning_rate_batch_scaling": ("auto", *BATCH_SCALING),
    }
    assert {name: KEYS[name].choices for name in choices} == choices
    assert ROLLOUT_KEYS["rl.loss_agg_mode"].choices == AGGREGATIONS
    assert ROLLOUT_KEYS["batch_size"].maximum == MAX_SAMPLES


@pytest.mark.parametrize("keys", [KEYS, ROLLOUT_KEYS], ids=["base.yml", "rl.yml"])
def test_aliases_name_keys_and_are_none(keys):
    """Each alias leads to keys that exist, and is not itself a key of the same file."""
    assert set(ALIASES) <= {*KEYS, *ROLLOUT_KEYS}
    words = [
        word
        for key, aliases in ALIASES.items()
        for word in aliases.split()
        if key in keys
    ]
    assert not set(words) & set(keys)
    assert {word for word in words if words.count(word) > 1} <= {"seed"}


def test_a_name_that_was_a_key_says_what_replaces_it(tmp_path):
    """In a file, on the command line, from Python and in `explain`; none is a key, and
    the keys that a sentence names exist.
    """
    assert not set(REMOVED) & {*KEYS, *ROLLOUT_KEYS}
    assert len(KEYS) <= 100
    for name, sentence in REMOVED.items():
        if name.startswith("rl."):
            continue  # the group of a rollout's file; tests/contrib/rl/test_config.py
        (tmp_path / "a.yml").write_text(f"{name}: 1\n")
        for read in (
            lambda: load_config(tmp_path / "a.yml"),
            lambda name=name: load_config("base.yml", [f"{name}=1"]),
            lambda name=name: Config(**{name: 1}),
            lambda name=name: explain(name),
        ):
            with pytest.raises((ConfigError, TypeError)) as caught:
                read()
            assert sentence in str(caught.value)
        named = {*re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", sentence)}
        in_python = {"train_step", "make_optimizer", name}
        assert named - in_python <= {*KEYS, *ROLLOUT_KEYS}, (name, named)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch-size", "per_device_batch_size is that of one device"),
        ("global_batch_size", "batch_size_schedule='0:N'"),
        ("lr_warmup", "warmup_steps_fraction a share"),
    ],
)
def test_unknown_key_error_says_that_a_key_is_another_quantity(name, words):
    """The key is named with what it means, and not as the name's place."""
    with pytest.raises(ConfigError, match=f"unknown key.*{words}") as caught:
        load_config("base.yml", [f"{name}=1"])
    assert "its name here" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "lr",
        "LR",
        "seq_len",
        "num_layers",
        "epochs",
        "output_dir",
        "max_steps",
    ],
)
def test_unknown_key_error_suggests_the_name_here(name):
    """A name from another system is refused, with the key to write instead."""
    with pytest.raises(
        ConfigError, match=r"unknown key.*; its name here is "
    ) as caught:
        load_config("base.yml", [f"{name}=1"])
    assert caught.value.nearest == keys_of_alias(name, KEYS)[0]


RAMP = {
    "per_device_batch_size_start": 4,
    "per_device_batch_size_increment": 4,
    "global_rampup_samples": 200,
}


@pytest.mark.parametrize(
    ("name", "value"), [*RAMP.items(), ("rampup_carry_overshoot", True)]
)
def test_ramp_key_without_its_switch_is_refused(name: str, value: object) -> None:
    """A key of the linear ramp says nothing without `enable_rampup_batch_size`, also if
    its value is the default.
    """
    with pytest.raises(
        ConfigError, match=f"{name}=.*enable_rampup_batch_size is not set"
    ) as caught:
        Config(**{name: value}, per_device_batch_size=16)
    assert caught.value.key == "enable_rampup_batch_size"
    assert caught.value.nearest == (True,)


def test_ramp_keys_next_to_a_schedule_are_refused() -> None:
    """Two ramps are an error, unless the linear one is off by the user's word."""
    with pytest.raises(ConfigError, match="two ramps") as caught:
        Config(**RAMP, batch_size_schedule="0:8 100:16")
    assert caught.value.key == "per_device_batch_size_start"
    assert not Config(
        **RAMP, batch_size_schedule="0:8 100:16", enable_rampup_batch_size=False
    ).enable_rampup_batch_size


def test_default_ramp_is_that_of_base_yml() -> None:
    """`Config()` has a ramp; a batch or a schedule of one's own has none unless it asks
    for one.
    """
    assert build_plan(Config(), 4).ramp.sizes == (8, 16, 24, 32)
    assert build_plan(Config(per_device_batch_size=16), 4).ramp.sizes == (64,)
    assert build_plan(Config(batch_size_schedule="0:8"), 4).ramp.sizes == (8,)
    assert replace(Config(), steps=3).enable_rampup_batch_size
    assert not replace(
        Config(per_device_batch_size=16), steps=3
    ).enable_rampup_batch_size


def read(value, **spec):
    """Read one value with a key made from the given properties."""
    return Key(doc="doc", section="section", **spec).convert("name", value)


@pytest.mark.parametrize(
    ("spec", "value", "expected"),
    [
        ({"kind": "bool"}, True, True),
        ({"kind": "int"}, 1e3, 1000),
        ({"kind": "int", "minimum": 1, "also": (-1,)}, -1, -1),
        ({"kind": "size"}, 0.1, Fraction(1, 10)),
        ({"kind": "size"}, "1/3", Fraction(1, 3)),
        ({"kind": "text"}, "a b", "a b"),
        ({"kind": "text", "nullable": True}, None, None),
        ({"kind": "text", "choices": ("none", "full")}, None, "none"),
        ({"kind": "text", "choices": ("auto", "on", "off")}, False, "off"),
        ({"kind": "name"}, "", ""),
    ],
)
def test_read_converts(spec, value, expected):
    """A value becomes the key's own type."""
    result = read(value, **spec)
    assert result == expected
    assert type(result) is type(expected)


REFUSED = (
    ({"kind": "bool"}, 1, "true or false", (True,)),
    ({"kind": "bool"}, 0, "true or false", (False,)),
    ({"kind": "bool"}, "yes", "true or false", (True,)),
    ({"kind": "int"}, 10.5, "a whole number", (10, 11)),
    ({"kind": "int", "minimum": 2}, 1.5, "at least 2", (2,)),
    ({"kind": "int"}, True, "a whole number", ()),
    ({"kind": "int"}, 1e22, "at most 10**18", ()),
    ({"kind": "int"}, float("nan"), "a whole number", ()),
    ({"kind": "int"}, "5", "a whole number", (5,)),
    ({"kind": "int"}, "many", "a whole number", ()),
    ({"kind": "int", "minimum": 1, "also": (-1,)}, 0, "at least 1, or -1", (-1, 1)),
    ({"kind": "float", "above": 0}, 0, "above 0", ()),
    ({"kind": "float", "below": 1}, 1.0, "below 1", ()),
    ({"kind": "float"}, float("nan"), "a number", ()),
    ({"kind": "float"}, 10**400, "a number", ()),
    ({"kind": "float"}, "1e-5", "a number", (1e-5,)),
    ({"kind": "size", "above": 0}, 0, "above 0", (1,)),
    ({"kind": "size", "above": 0}, -2, "above 0", (1,)),
    ({"kind": "size"}, "many", "fraction", ()),
    ({"kind": "text"}, 5, "put it in quotes: name: '5'", ("5",)),
    ({"kind": "text"}, None, "name=null must be text", ()),
    ({"kind": "text"}, "a\0b", "must be text", ()),
    ({"kind": "text", "choices": ("a", "b")}, "c", "one of a, b", ("a", "b")),
)
NO_FOLDER_NAMES = (
    "..",
    ".",
    "../x",
    "a/b",
    "/etc",
    "a\0b",
    "a\nb",
    "~",
    "..\\x",
    "-" * 201,
    "con:",
    "\u2025",
)


@pytest.mark.parametrize(
    ("spec", "value", "message", "nearest"),
    [
        *REFUSED,
        *(({"kind": "name"}, name, "a folder name", ()) for name in NO_FOLDER_NAMES),
    ],
)
def test_read_refuses_with_the_legal_values(spec, value, message, nearest):
    """The error about a wrong type or a value outside the limits has the key and the
    rule, and offers legal values near it.
    """
    with pytest.raises(ConfigError, match="name=") as caught:
        read(value, **spec)
    assert message in str(caught.value)
    assert (caught.value.key, caught.value.nearest) == ("name", nearest)
    assert all(
        Key(doc="doc", section="section", **spec).allows(legal) for legal in nearest
    )


BAD = {
    "bool": ["maybe", "2", "", "[true]"],
    "int": ["1.5", "x", "", "-7", "1e400", "[1]"],
    "text": ["", " "],
}
BAD |= {
    "float": ["x", "", "-1", "nan", "inf"],
    "size": ["x", "", "-2", "1/0", "nan", "inf"],
}
BAD |= {"name": ["a/b", "..", "a b", "\u00e9"]}


@pytest.mark.parametrize("name", KEYS)
def test_every_key_refuses_a_bad_value(name):
    """Before any work, an error names the key whose value is of another kind, below
    every minimum, or empty.
    """
    for value in ["no such choice", ""] if KEYS[name].choices else BAD[KEYS[name].kind]:
        with pytest.raises(RampupError) as caught:
            build_plan(load_config("base.yml", [f"{name}={value}"]), 4)
        assert caught.value.key == name


def test_settings_name_the_closest_key():
    """A misspelled attribute is refused with the hint that the command line gives."""
    with pytest.raises(
        TypeError,
        match="keyword argument 'batch_schedule'; its name here is batch_size_schedule",
    ):
        Config(batch_schedule="0:8")
    with pytest.raises(TypeError, match="'stepz'; the closest is steps"):
        Config(stepz=3)
    with pytest.raises(TypeError, match="closest is steps, and 'lr'; its name here is"):
        Config(stepz=3, lr=1e-3)


def test_whole_numbers_take_suffixes():
    """Every key that counts is written as the thresholds of a schedule are; other text
    is refused with the number it means.
    """
    config = Config(
        max_target_length="2k",
        steps="1.5K",
        enable_rampup_batch_size=True,
        global_rampup_samples="1M",
    )
    assert (config.max_target_length, config.steps, config.global_rampup_samples) == (
        2000,
        1500,
        10**6,
    )
    for name, value in {
        "steps": "1.0001K",
        "max_target_length": "2 k",
        "learning_rate": "1K",
        "log_period": "0K",
    }.items():
        with pytest.raises(ConfigError, match=name):
            Config(**{name: value})

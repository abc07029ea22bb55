"""Tests of rampup.config.schema."""

from dataclasses import replace
from fractions import Fraction

import pytest

from rampup import Config, build_plan, load_config
from rampup.config.key import ALIASES, keys_for_alias
from rampup.config.schema import KEYS
from rampup.errors import ConfigError
from rampup.rl.config import ROLLOUT_KEYS


def test_config_without_arguments_is_complete():
    """Every key has a default that its own rules accept, a section and documentation in full sentences."""
    config = Config()
    assert list(config.to_dict()) == list(KEYS)
    assert all(key.section and key.doc[0].isupper() and key.doc.endswith(".") for key in KEYS.values())


WSD = {"lr_schedule_type": "wsd", "warmup_steps_fraction": 0.7, "wsd_decay_steps_fraction": 0.6}


@pytest.mark.parametrize(
    ("keys", "blamed", "nearest"),
    [
        ({"steps": -1}, "steps", ()),
        (WSD, "wsd_decay_steps_fraction", (0.3,)),
        ({"base_emb_dim": 120, "base_num_query_heads": 7, "base_num_kv_heads": 1}, "base_num_query_heads", (6, 10)),
        ({"base_emb_dim": 121, "base_num_query_heads": 7, "base_num_kv_heads": 1}, "base_num_query_heads", ()),
        ({"base_emb_dim": 10**18, "base_num_query_heads": 7, "base_num_kv_heads": 1}, "base_num_query_heads", (5, 8)),
        ({"base_num_kv_heads": 3}, "base_num_kv_heads", (2, 4)),
        ({"vocab_size": 100}, "vocab_size", (256,)),
        ({"dataset_type": "tokens"}, "grain_train_files", ()),
        ({"base_output_directory": " "}, "base_output_directory", ()),
        ({"batch_size_schedule": ""}, "batch_size_schedule", ()),
    ],
)
def test_contradiction_names_a_key_and_offers_legal_values(keys, blamed, nearest):
    """The error about keys that exclude each other names one of them, and each offered value is legal."""
    with pytest.raises(ConfigError) as caught:
        Config(**keys)
    assert (caught.value.key, caught.value.nearest) == (blamed, nearest)
    for value in nearest:
        Config(**{**keys, blamed: value})


def test_total_steps_and_num_kv_heads():
    """-1 takes the value of the other key; sizes are exact."""
    config = Config(steps=-1, learning_rate_schedule_steps=77)
    assert (config.total_steps, config.num_kv_heads) == (77, 4)
    assert Config(per_device_batch_size="1/3").to_dict()["per_device_batch_size"] == "1/3"
    assert Config(per_device_batch_size=0.5).per_device_batch_size == Fraction(1, 2)


@pytest.mark.parametrize("keys", [KEYS, ROLLOUT_KEYS], ids=["base.yml", "rl.yml"])
def test_aliases_name_keys_and_are_none(keys):
    """Each alias leads to keys that exist, and is not itself a key of the same file."""
    assert set(ALIASES) <= {*KEYS, *ROLLOUT_KEYS}
    words = [word for key, aliases in ALIASES.items() for word in aliases.split() if key in keys]
    assert not set(words) & set(keys)
    assert {word for word in words if words.count(word) > 1} <= {"seed"}


@pytest.mark.parametrize("name", ["lr", "LR", "batch-size", "seq_len", "num_layers", "epochs", "output_dir", "max_steps"])
def test_unknown_key_error_suggests_the_name_here(name):
    """A name from another system is refused, with the key to write instead."""
    with pytest.raises(ConfigError, match=r"unknown key.*; its name here is ") as caught:
        load_config("base.yml", [f"{name}=1"])
    assert caught.value.nearest == keys_for_alias(name, KEYS)


RAMP = {"per_device_batch_size_start": 4, "per_device_batch_size_increment": 4, "global_rampup_samples": 200}


@pytest.mark.parametrize(("name", "value"), [*RAMP.items(), ("rampup_carry_overshoot", True)])
def test_ramp_key_without_its_switch_is_refused(name: str, value: object) -> None:
    """A key of the linear ramp says nothing without `enable_rampup_batch_size`, also if its value is the default."""
    with pytest.raises(ConfigError, match=f"{name}=.*enable_rampup_batch_size is not set") as caught:
        Config(**{name: value}, per_device_batch_size=16)
    assert caught.value.key == "enable_rampup_batch_size"
    assert caught.value.nearest == (True,)


def test_ramp_keys_next_to_a_schedule_are_refused() -> None:
    """Two ramps are an error, unless the linear one is off by the user's word."""
    with pytest.raises(ConfigError, match="two ramps") as caught:
        Config(**RAMP, batch_size_schedule="0:8 100:16")
    assert caught.value.key == "per_device_batch_size_start"
    assert not Config(**RAMP, batch_size_schedule="0:8 100:16", enable_rampup_batch_size=False).enable_rampup_batch_size


def test_default_ramp_is_that_of_base_yml() -> None:
    """`Config()` has a ramp; a batch or a schedule of one's own has none unless it asks for one."""
    assert build_plan(Config(), 4).ramp.sizes == (8, 16, 24, 32)
    assert build_plan(Config(per_device_batch_size=16), 4).ramp.sizes == (64,)
    assert build_plan(Config(batch_size_schedule="0:8"), 4).ramp.sizes == (8,)
    assert replace(Config(), steps=3).enable_rampup_batch_size
    assert not replace(Config(per_device_batch_size=16), steps=3).enable_rampup_batch_size

"""Tests of rampup.config.explain."""

import pytest

from rampup.config.explain import RULES, explain
from rampup.config.schema import KEYS, Config
from rampup.errors import ConfigError
from rampup.rl.config import ROLLOUT_KEYS


@pytest.mark.parametrize("name", KEYS)
def test_every_key_is_explained(name):
    """Meaning, default and limits are the schema's own; the keys it goes together with exist, and know of it too."""
    explained = explain(name)
    assert (explained.meaning, explained.unit, explained.legal) == (KEYS[name].doc, KEYS[name].unit, KEYS[name].expected)
    assert explained.default == Config().to_dict()[name]
    assert name not in explained.interacts
    assert all(name in explain(other).interacts for other in explained.interacts)


def test_rules_name_keys():
    """Every key that a rule names is one, and no rule stands alone."""
    assert all(set(names) <= set(KEYS) and len(set(names)) == len(names) > 1 for names in RULES.values())


def test_what_maxtext_calls_it():
    """MaxText's name and default where it has the key; what it does where it has none."""
    steps, scaling, clock = map(explain, ("steps", "learning_rate_batch_scaling", "learning_rate_clock"))
    assert (steps.maxtext_name, steps.maxtext_default) == ("steps", "150_001")
    assert explain("async_checkpointing").maxtext_default == "true"
    assert (scaling.maxtext_name, scaling.maxtext_default) == (None, None)
    assert (clock.maxtext_name, clock.maxtext_default) == (None, "steps")


def test_keys_of_a_rollout():
    """A key of rl.yml is explained too, with MaxText RL's name for it where it has one."""
    for name in set(ROLLOUT_KEYS) - set(KEYS):
        assert explain(name).file == "rl.yml"
    assert explain("rl.num_generations").maxtext_name == "rl.num_generations"
    assert explain("keep_prompts_together").maxtext_name is None
    assert explain("num_prompts").maxtext_name is None


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("stepz", "steps"),
        ("expnsion", "expansion_factor_real_data"),
        ("rampup", "enable_rampup_batch_size"),
        ("LEARNING_RATE", "learning_rate"),
        ("num_generations", "rl.num_generations"),
    ],
)
def test_unknown_keys_get_close_ones(name, close):
    """Slips of the pen, parts of names and capitals lead to the key that was meant."""
    with pytest.raises(ConfigError, match="unknown key") as caught:
        explain(name)
    assert close in caught.value.nearest
    assert caught.value.key == name


@pytest.mark.parametrize("name", ["", " ", "\u00e9\u00e9\u00e9", "x" * 100_000, "[*"])
def test_names_that_are_close_to_nothing(name):
    """Nothing is made up, and the message stays short."""
    with pytest.raises(ConfigError, match="the README lists all keys") as caught:
        explain(name)
    assert len(str(caught.value)) < 200

"""Tests of rampup.config.files."""

import pytest

from rampup.config.files import BASE_FILE, explain
from rampup.config.schema import KEYS, Config
from rampup.errors import ConfigError
from rampup.rl.config import ROLLOUT_FILE, ROLLOUT_KEYS

FILES = (BASE_FILE, ROLLOUT_FILE)


@pytest.mark.parametrize("name", KEYS)
def test_explain_gives_the_schema_of_every_key(name):
    """Meaning, default and limits are those of the schema; interaction is symmetric."""
    explained = explain(name)
    key = KEYS[name]
    assert (explained["meaning"], explained["unit"], explained["legal"]) == (key.doc, key.unit, key.expected)
    assert explained["default"] == Config().to_dict()[name]
    assert name not in explained["interacts"]
    assert all(name in explain(other)["interacts"] for other in explained["interacts"])


def test_explain_gives_maxtext_names_and_defaults():
    """MaxText's name and default where it has the key; what it does where it has none."""
    steps, scaling, clock = map(explain, ("steps", "learning_rate_batch_scaling", "learning_rate_clock"))
    assert (steps["maxtext_name"], steps["maxtext_default"]) == ("steps", "150_001")
    assert explain("async_checkpointing")["maxtext_default"] == "true"
    assert (scaling["maxtext_name"], scaling["maxtext_default"]) == (None, None)
    assert (clock["maxtext_name"], clock["maxtext_default"]) == (None, "steps")


def test_explain_knows_the_keys_of_rl_yml():
    """A key of rl.yml is explained too, with MaxText RL's name for it where it has one."""
    for name in set(ROLLOUT_KEYS) - set(KEYS):
        assert explain(name, FILES)["file"] == "rl.yml"
    assert explain("rl.num_generations", FILES)["maxtext_name"] == "rl.num_generations"
    assert explain("keep_prompts_together", FILES)["maxtext_name"] is None
    assert explain("num_prompts", FILES)["maxtext_name"] is None


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("stepz", "steps"),
        ("expnsion", "expansion_factor_real_data"),
        ("rampup", "enable_rampup_batch_size"),
        ("LEARNING_RATE", "learning_rate"),
        ("num_generations", "rl.num_generations"),
        ("lr", "learning_rate"),
        ("seed", "data_shuffle_seed"),
    ],
)
def test_explain_suggests_close_keys(name, close):
    """Typing errors, parts of names, capitals and names of other systems lead to the key."""
    with pytest.raises(ConfigError, match="unknown key") as caught:
        explain(name, FILES)
    assert close in caught.value.nearest
    assert caught.value.key == name


@pytest.mark.parametrize("name", ["", " ", "\u00e9\u00e9\u00e9", "x" * 100_000, "[*"])
def test_explain_suggests_nothing_for_a_name_close_to_no_key(name):
    """Nothing is made up, and the message stays short."""
    with pytest.raises(ConfigError, match=r"base\.yml lists all keys") as caught:
        explain(name, FILES)
    assert len(str(caught.value)) < 200

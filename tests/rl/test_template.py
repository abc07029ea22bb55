"""Tests of rampup.rl.template."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from rampup.rl.config import ROLLOUT_KEYS, RolloutConfig, load_rollout_config
from rampup.rl.template import ROLLOUT_FILE

RL = Path(__file__).parent.parent.parent / "configs" / "rl.yml"


def test_rl_yml_and_its_schema_are_current():
    """The files in the repository are those that `python -m rampup.rl.template configs` writes; the schema is valid."""
    assert RL.read_text() == ROLLOUT_FILE.text
    assert json.loads(RL.with_name("rl.schema.json").read_text()) == ROLLOUT_FILE.json_schema
    Draft202012Validator.check_schema(ROLLOUT_FILE.json_schema)


def test_rl_yml_holds_every_key_with_a_comment():
    """Every key stands in rl.yml, under a comment."""
    lines = RL.read_text().splitlines()
    for name in ROLLOUT_KEYS:
        (index,) = [number for number, line in enumerate(lines) if line.strip().startswith(f"{name.removeprefix('rl.')}:")]
        assert lines[index - 1].strip().startswith("# ")


def test_rl_yml_is_the_defaults_with_a_cut():
    """Reading rl.yml gives the schema's defaults, except for the sizes that it shows."""
    assert load_rollout_config(RL) == RolloutConfig(mini_batch_size=16, train_micro_batch_size=8)

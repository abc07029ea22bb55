"""Tests of rampup.rl.template."""

from pathlib import Path

from rampup.rl.config import ROLLOUT_KEYS, RolloutConfig, load_rollout_config
from rampup.rl.template import rollout_yaml

RL = Path(__file__).parent.parent.parent / "configs" / "rl.yml"


def test_rl_yml_is_written_from_the_schema():
    """The file in the repository is what the schema says; `python -m rampup.rl.template` writes it anew."""
    assert RL.read_text() == rollout_yaml()


def test_rl_yml_holds_every_key_with_a_comment():
    """Every key stands in rl.yml, under a comment."""
    lines = RL.read_text().splitlines()
    for name in ROLLOUT_KEYS:
        (index,) = [number for number, line in enumerate(lines) if line.strip().startswith(f"{name.removeprefix('rl.')}:")]
        assert lines[index - 1].strip().startswith("# ")


def test_rl_yml_is_the_defaults_with_a_cut():
    """Reading rl.yml gives the schema's defaults, except for the sizes that it shows."""
    assert load_rollout_config(RL) == RolloutConfig(mini_batch_size=16, train_micro_batch_size=8)

"""Tests of rampup.contrib.lab.suggest_command."""

from helpers.screen import printed

from rampup.cli import main
from rampup.contrib.lab.suggest_command import print_suggestion
from rampup.contrib.rl.starting_sizes import suggest


def test_print_suggestion_has_both_columns_and_memory():
    """Published and used sizes are side by side; memory and notes follow."""
    text = " ".join(
        printed(print_suggestion, suggest("6B", system="trlx", memory_gib=80)).split()
    )
    assert "num_rollouts 128 64" in text
    assert "training state: 100.6 GiB, at least 2 devices of 80 GiB" in text
    assert "a starting point only" in text
    without = printed(print_suggestion, suggest("6B", system="skyrl", memory_gib=80))
    assert "num_rollouts" not in without


def test_suggest_as_text(capsys):
    """The table of a system's sizes; the laws for tokens, with the option that adds
    more of them.
    """
    assert main(["suggest", "--params", "6B", "--system", "trlx"]) == 0
    assert "published for 6B" in capsys.readouterr().out
    assert main(["suggest", "--train-tokens", "300B"]) == 0
    assert "--params adds the laws" in capsys.readouterr().out

"""Tests of rampup.contrib.lab.suggest_command."""

from rampup.cli import main


def test_suggest_as_text(capsys):
    """The laws for tokens, with the option that adds more of them."""
    assert main(["suggest", "--train-tokens", "300B"]) == 0
    assert "--params adds the laws" in capsys.readouterr().out

"""Tests of rampup.cli.completion, in the shells themselves."""

import shutil
import subprocess

import pytest

from rampup.cli.completion import SHELLS, completion_script
from rampup.config.schema import KEYS
from rampup.errors import ConfigError

OPTIONS = {"plan": ["--json", "--devices"], "explain": ["--json"], "timetable": ["--stages"]}
BASH = """
source "$1"; shift
COMP_WORDS=(rampup "$@"); COMP_CWORD=$#
_rampup
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Outside a completion, these stand in for what zsh has inside one.
ZSH = """
compdef() { :; }
_files() { print -l -- FILES; }
compset() { PREFIX=${PREFIX#*=}; }
compadd() { while [[ $1 != -- ]]; do shift; done; shift; for word; do [[ $word == $PREFIX* ]] && print -r -- $word; done; }
source "$1"; shift
words=(rampup "$@") CURRENT=$#words PREFIX=$words[-1]
_rampup
true
"""


def complete(shell, folder, *words):
    """Return what a shell offers for the last of these words."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    script = folder / "completion"
    script.write_text(completion_script(shell, OPTIONS, KEYS, configured=["plan"]))
    program = {"bash": ["bash", "--norc", "-c", BASH], "zsh": ["zsh", "-f", "-c", ZSH]}[shell]
    done = subprocess.run([*program, shell, str(script), *words], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_and_keys(shell, tmp_path):
    """The first word is a command, a word with dashes an option of it, the word after explain a key."""
    assert complete(shell, tmp_path, "") == list(OPTIONS)
    assert complete(shell, tmp_path, "pl") == ["plan"]
    assert complete(shell, tmp_path, "plan", "--") == ["--json", "--devices"]
    assert complete(shell, tmp_path, "plan", "base.yml", "--d") == ["--devices"]
    assert complete(shell, tmp_path, "explain", "log_") == ["log_period"]
    assert complete(shell, tmp_path, "nothing", "--") == []


def test_keys_and_their_values_in_bash(tmp_path):
    """Bash takes key=value for three words; keys end in = and values are those of the schema."""
    assert complete("bash", tmp_path, "plan", "base.yml", "log_") == ["log_period="]
    assert complete("bash", tmp_path, "plan", "base.yml", "rampup_microbatch", "=") == ["fixed", "per_phase", "auto"]
    assert complete("bash", tmp_path, "plan", "base.yml", "rampup_microbatch", "=", "a") == ["auto"]
    assert complete("bash", tmp_path, "plan", "async_checkpointing", "=", "") == ["true", "false"]
    assert complete("bash", tmp_path, "plan", "log_period", "=", "") == []


def test_keys_and_their_values_in_zsh(tmp_path):
    """Zsh takes key=value for one word."""
    assert complete("zsh", tmp_path, "plan", "base.yml", "log_") == ["log_period", "FILES"]
    assert complete("zsh", tmp_path, "plan", "rampup_microbatch=") == ["fixed", "per_phase", "auto"]
    assert complete("zsh", tmp_path, "plan", "rampup_microbatch=a") == ["auto"]
    assert complete("zsh", tmp_path, "plan", "log_period=") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_files_are_offered(shell, tmp_path):
    """Configurations are completed by name; a command without keys gets files alone."""
    (tmp_path / "log_of_mine.yml").write_text("")
    wanted = "log_of_mine.yml" if shell == "bash" else "FILES"
    assert wanted in complete(shell, tmp_path, "plan", "log")
    assert [word for word in complete(shell, tmp_path, "timetable", "log") if word != wanted] == []


def test_other_shells():
    """A shell that is not known is an error that names those that are."""
    with pytest.raises(ConfigError, match="no completion for 'fish'") as caught:
        completion_script("fish", OPTIONS, KEYS)
    assert caught.value.nearest == SHELLS

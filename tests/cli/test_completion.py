"""Tests of rampup.cli.completion, in the shells themselves."""

import shutil
import subprocess
import sys

import pytest

from rampup.cli import COMMANDS
from rampup.cli.completion import SHELLS, completion_script
from rampup.config.schema import KEYS
from rampup.errors import ConfigError, MissingDependencyError

pytest.importorskip("shtab", reason="shtab is not installed: pip install 'rampup[completion]'")
BASH = """
source "$1"; shift
compopt() { :; }
COMP_WORDS=(rampup "$@"); COMP_CWORD=$#
_rampup
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Outside a completion, these functions replace what zsh has inside one; the completion of settings is called directly.
ZSH = """
compdef() { :; }
_files() { print -l -- FILES; }
compset() { [[ $PREFIX == *=* ]] || return 1; IPREFIX=${PREFIX%%=*}= PREFIX=${PREFIX#*=}; }
compadd() { while [[ $1 != -- ]]; do shift; done; shift; for word; do [[ $word == $PREFIX* ]] && print -r -- $word; done; }
eval "$(cat $1)"; shift
PREFIX=$2
$1
true
"""


def run(shell, folder, program, *words):
    """Return what a program in a shell prints, whose first argument is the completion script."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    script = folder / "completion"
    script.write_text(completion_script(shell, KEYS))
    start = {"bash": ["bash", "--norc", "-c"], "zsh": ["zsh", "-f", "-c"]}[shell]
    done = subprocess.run([*start, program, shell, str(script), *words], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_commands_options_and_keys(tmp_path):
    """The first word is a command, a word with dashes an option of it, the word after explain a key."""
    assert set(run("bash", tmp_path, BASH, "")) == set(COMMANDS)
    assert run("bash", tmp_path, BASH, "pl") == ["plan", "plot"]
    assert {"--json", "--devices", "--all"} <= set(run("bash", tmp_path, BASH, "plan", "--"))
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "--dev") == ["--devices"]
    assert run("bash", tmp_path, BASH, "explain", "log_") == ["log_period"]
    assert run("bash", tmp_path, BASH, "timetable", "--stag") == ["--stages"]


def test_bash_completes_keys_and_their_values(tmp_path):
    """Bash takes key=value for three words; keys end in = and values are those of the schema."""
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "log_") == ["log_period="]
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "rampup_microbatch", "=") == ["fixed", "per_phase", "auto"]
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "rampup_microbatch", "=", "a") == ["auto"]
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "async_checkpointing", "=", "") == ["true", "false"]
    assert run("bash", tmp_path, BASH, "plan", "base.yml", "log_period", "=", "") == []


def test_bash_completes_files(tmp_path):
    """A configuration is completed by its name."""
    (tmp_path / "log_of_mine.yml").write_text("")
    assert run("bash", tmp_path, BASH, "plan", "log") == ["log_of_mine.yml"]
    assert "log_of_mine.yml" in run("bash", tmp_path, BASH, "plot", "log")


def test_zsh_completes_keys_and_their_values(tmp_path):
    """Zsh takes key=value for one word; keys alone follow `explain`."""
    assert run("zsh", tmp_path, ZSH, "_rampup_settings", "log_") == ["log_period", "FILES"]
    assert run("zsh", tmp_path, ZSH, "_rampup_settings", "rampup_microbatch=") == ["fixed", "per_phase", "auto"]
    assert run("zsh", tmp_path, ZSH, "_rampup_settings", "rampup_microbatch=a") == ["auto"]
    assert run("zsh", tmp_path, ZSH, "_rampup_settings", "log_period=") == []
    assert run("zsh", tmp_path, ZSH, "_rampup_keys", "log_") == ["log_period"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_script_names_every_command(shell):
    """The script is made from the parsers of all commands."""
    script = completion_script(shell, KEYS)
    assert all(f"_shtab_rampup_{name}" in script for name in COMMANDS)


def test_completion_refuses_other_shells():
    """An unknown shell is an error that names the known ones."""
    with pytest.raises(ConfigError, match="no completion for 'fish'") as caught:
        completion_script("fish", KEYS)
    assert caught.value.nearest == SHELLS


def test_completion_needs_shtab(monkeypatch):
    """Without shtab, the error names the extra."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(MissingDependencyError, match=r"rampup\[completion\]"):
        completion_script("bash", KEYS)

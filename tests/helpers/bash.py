"""What bash itself runs, as the reference for scripts that are read."""

import itertools
import shlex
import shutil
import subprocess

import pytest

from rampup.contrib.check.shell.values import drop_unset

needs_bash = pytest.mark.skipif(
    shutil.which("bash") is None, reason="bash is the reference"
)
# Every command that is not a builtin is recorded with its arguments; `-c TEXT` also
# runs the text. Nothing else happens.
STUB = """
record() { { printf '%s\\0' "$#" "$@"; } >> "$RECORD"; }
command_not_found_handle() {
  record "$@"
  local before=""
  for word in "$@"; do
    if [[ "$before" == -c && "$word" == *" "* ]]; then "$BASH" -c "$word"; fi
    before="$word"
  done
}
bash() { if [[ "$1" == -*c ]]; then record bash "$@"; fi; command bash "$@"; }
sh() { command bash "$@"; }
sbatch() { while [[ "$1" != *.sh ]]; do shift; done; command bash "$@"; }
srun() { while [[ "$1" == -* ]]; do shift; done; "$@"; }
"""
PROGRAMS = "bash env expr dirname basename realpath readlink seq cut tr wc awk grep cat"


def commands_by_bash(text, tmp_path, arguments=()):
    """Return the words of each command that bash runs, from an empty environment."""
    shell, script, stub, record = (
        shutil.which("bash"),
        tmp_path / "script.sh",
        tmp_path / "stub.sh",
        tmp_path / "record",
    )
    script.write_text(f"{text}\nwait\n")  # for commands in the background
    stub.write_text(STUB)
    record.write_text("")
    places = {
        "RECORD": str(record),
        "BASH_ENV": str(stub),
        "PATH": str(tmp_path / "bin"),
    }
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS.split():
        if found := shutil.which(name):
            (tmp_path / "bin" / name).symlink_to(found)
    subprocess.run(
        [shell, str(script), *arguments],
        env=places, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    parts = iter(record.read_text().split("\0")[:-1])
    return [tuple(itertools.islice(parts, int(number))) for number in parts]


def runs(commands):
    """Return the words of the commands `run` among some. What was never set is empty in
    bash, and here has a name.
    """
    rows = (
        tuple(map(drop_unset, getattr(command, "words", command)))
        for command in commands
    )
    return [words for words in rows if words[0] == "run"]


def with_arguments(arguments):
    """Return the command that starts the script with arguments."""
    return shlex.join(["bash", "script.sh", *arguments])

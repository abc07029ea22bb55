"""Commands run in this process, for tests of what they print."""

import json

from rampup.cli import main


def run_json(capsys, *arguments):
    """Run a command with --json; return its exit code and its one object."""
    code = main([*arguments, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0])

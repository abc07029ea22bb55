"""`rampup completion`: a script that completes commands, options, files, configuration keys and their values in a shell."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Mapping

from rampup.cli.common import Result
from rampup.config.key import Key
from rampup.errors import ConfigError, MissingDependencyError

SHELLS = ("bash", "zsh")
FILES = ("CONFIG.yml", "CONFIG.yml|RUN_DIR", "DIR", "FILE", "FILE.html", "OTHER.yml", "RUN_DIR")

# Functions that shtab's script calls. Bash takes key=value for three words, zsh for one.
_BASH = """\
{values}
_rampup_keys() {{ compgen -W {keys} -- "$1"; }}
_rampup_settings() {{
  local key=
  if [[ $1 == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD-1]}}; set -- ""
  elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  if [[ -n $key ]]; then
    compgen -W "$(_rampup_values "$key")" -- "$1"
  else
    compgen -S = -W {keys} -- "$1"
    compgen -f -- "$1"
  fi
}}
"""
# A key is followed by its value without a space; only the function that bash calls itself can say so.
_BASH_END = """
_rampup() {
  _shtab_rampup
  [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o bashdefault -F _rampup rampup
"""
_ZSH = """\
{values}
_rampup_keys() {{ compadd -- ${{=:-{keys}}} }}
_rampup_settings() {{
  if compset -P '*='; then
    compadd -- $(_rampup_values ${{IPREFIX%=}})
  else
    compadd -S = -- ${{=:-{keys}}}
    _files
  fi
}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup completion`."""
    parser.add_argument("shell", metavar="bash|zsh", help="the shell")


def run(args: argparse.Namespace, console: object) -> Result:
    """Make the script."""
    from rampup.config.schema import KEYS

    script = completion_script(args.shell, KEYS)
    return Result(facts={"script": script}, show=lambda console: print(script, end=""))


def completion_script(shell: str, keys: Mapping[str, Key]) -> str:
    """Return a script that completes `rampup` in a shell: eval "$(rampup completion bash)".

    Args:
        shell: bash or zsh.
        keys: the keys of a configuration.

    Raises:
        ConfigError: another shell.
        MissingDependencyError: shtab is not installed.
    """
    from rampup.cli import COMMANDS, make_parser

    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}; choose from {', '.join(SHELLS)}", key="shell", nearest=SHELLS)
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        raise MissingDependencyError("completion needs shtab: pip install 'rampup[completion]'") from error
    root = argparse.ArgumentParser(prog="rampup")
    commands = root.add_subparsers()
    for name, line in COMMANDS.items():
        parser = commands.add_parser(name, help=line, parents=[make_parser(name)], add_help=False)
        for action in parser._actions:
            functions = {"key=value": "_rampup_settings", "KEY": "_rampup_keys"}
            if action.metavar in FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in functions:
                action.complete = dict.fromkeys(SHELLS, functions[action.metavar])  # type: ignore[attr-defined, index]
    cases = {name: " ".join(words) for name, key in keys.items() if (words := _values(key))}
    values = "\n".join(f"    {name}) echo {shlex.quote(words)} ;;" for name, words in cases.items())
    names, template = " ".join(keys), _BASH if shell == "bash" else _ZSH
    preamble = template.format(
        values=f'_rampup_values() {{\n  case "$1" in\n{values}\n  esac\n}}',
        keys=shlex.quote(names) if shell == "bash" else names,
    )
    script: str = shtab.complete(root, shell, preamble=preamble)
    return script + (_BASH_END if shell == "bash" else "\n")


def _values(key: Key) -> list[str]:
    """Return the values of a key that can be listed."""
    words = list(key.choices) or (["true", "false"] if key.kind == "bool" else [str(value) for value in key.also])
    return words + (["null"] if key.nullable else [])

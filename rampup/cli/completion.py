"""Completion of `rampup` in a shell: commands, their options, keys and the values of keys that have few."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rampup.config.key import Key
from rampup.errors import ConfigError

SHELLS = ("bash", "zsh")

_BASH = """\
# Completion of rampup for bash: eval "$(rampup completion bash)"
_rampup_words() {{
  case "$1" in
{options}
  esac
}}
_rampup_values() {{
  case "$1" in
{values}
  esac
}}
_rampup() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} key=
  COMPREPLY=()
  if [[ $word == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD-1]}} word=
  elif (( COMP_CWORD > 1 )) && [[ ${{COMP_WORDS[COMP_CWORD-1]}} == = ]]; then
    key=${{COMP_WORDS[COMP_CWORD-2]}}
  fi
  if [[ -n $key ]]; then
    COMPREPLY=($(compgen -W "$(_rampup_values "$key")" -- "$word"))
  elif (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W {commands} -- "$word"))
  elif [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$(_rampup_words "${{COMP_WORDS[1]}}")" -- "$word"))
  elif [[ ${{COMP_WORDS[1]}} == explain ]]; then
    COMPREPLY=($(compgen -W {keys} -- "$word"))
  elif [[ " "{configured}" " == *" ${{COMP_WORDS[1]}} "* ]]; then
    COMPREPLY=($(compgen -S = -W {keys} -- "$word"))
    (( ${{#COMPREPLY[@]}} )) && compopt -o nospace 2>/dev/null
    COMPREPLY+=($(compgen -f -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _rampup rampup
"""

_ZSH = """\
#compdef rampup
# Completion of rampup for zsh: eval "$(rampup completion zsh)", after compinit
_rampup_words() {{
  case "$1" in
{options}
  esac
}}
_rampup_values() {{
  case "$1" in
{values}
  esac
}}
_rampup() {{
  local key
  if (( CURRENT == 2 )); then
    compadd -- ${{=:-{commands}}}
  elif [[ $PREFIX == -* ]]; then
    compadd -- $(_rampup_words $words[2])
  elif [[ $PREFIX == *=* ]]; then
    key=${{PREFIX%%=*}}
    compset -P '*='
    compadd -- $(_rampup_values $key)
  elif [[ $words[2] == explain ]]; then
    compadd -- ${{=:-{keys}}}
  else
    [[ " {configured} " == *" $words[2] "* ]] && compadd -S = -- ${{=:-{keys}}}
    _files
  fi
}}
compdef _rampup rampup
"""


def completion_script(
    shell: str, options: Mapping[str, Sequence[str]], keys: Mapping[str, Key], *, configured: Sequence[str] = ()
) -> str:
    """Return a script that completes `rampup` in a shell.

    Args:
        shell: bash or zsh.
        options: the options of each command.
        keys: the keys of a configuration.
        configured: the commands that take key=value.

    Raises:
        ConfigError: another shell.

    Example:
        >>> "plan) echo '--devices --json' ;;" in completion_script("bash", {"plan": ["--devices", "--json"]}, {})
        True
    """
    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell!r}; choose from {', '.join(SHELLS)}", key="shell", nearest=SHELLS)
    values = {name: _values(key) for name, key in keys.items()}
    template = _BASH if shell == "bash" else _ZSH
    quote = shlex.quote if shell == "bash" else str
    return template.format(
        options=_cases({name: list(words) for name, words in options.items()}),
        values=_cases({name: words for name, words in values.items() if words}),
        commands=quote(" ".join(options)),
        keys=quote(" ".join(keys)),
        configured=quote(" ".join(configured)),
    )


def _values(key: Key) -> list[str]:
    """Return the values of a key that can be listed."""
    words = list(key.choices) or (["true", "false"] if key.kind == "bool" else [str(value) for value in key.also])
    return words + (["null"] if key.nullable else [])


def _cases(words: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(f"    {name}) echo {shlex.quote(' '.join(given))} ;;" for name, given in words.items())

"""Tests of rampup.dialects.reading: other systems' files are read safely, typed, and with suspicion."""

import re

import pytest

from rampup.config.yaml import read_text
from rampup.dialects.reading import Launch, Reading, entry, read_leaves, type_settings
from rampup.errors import ConfigError

ENTRIES = {
    "trainer.train_batch_size": entry(1024, "prompts", unit="prompts"),
    "trainer.model.path": entry(None, "a path", kind="text"),
    "trainer.micro_batch_size": entry(None, "samples"),
    "trainer.flag": entry(False, "a switch", kind="bool"),
}
LAUNCH = Launch(system="Some System", program=re.compile("!"), example="!", entries=ENTRIES)


def read(tmp_path, text, *overrides):
    """Read text as a file of a made-up system."""
    file = tmp_path / "file.yml"
    file.write_text(text)
    leaves, repeated = read_leaves(read_text(file), str(file))
    reading = Reading(path=str(file), leaves=leaves, overrides=overrides, repeated=repeated)
    return type_settings(reading, LAUNCH)


def test_type_settings_treats_nested_and_dotted_keys_alike(tmp_path):
    """Nested mappings, dotted keys and overrides give one table, with the given keys; an override wins over the file."""
    found = read(tmp_path, "trainer:\n  train_batch_size: 8\n  model: {path: m}\nother: {}\n", "trainer.flag=true")
    dotted = "trainer.train_batch_size: 9\ntrainer.model.path: m\n"
    assert found.values == read(tmp_path, dotted, "trainer.flag=true", "trainer.train_batch_size=8").values
    assert found.given == {"trainer.train_batch_size", "trainer.model.path", "trainer.flag"}
    assert found.others.keys() == {"other"}
    assert found["trainer.micro_batch_size"] is None
    assert read(tmp_path, "trainer.micro_batch_size: 8", "trainer.micro_batch_size=null")["trainer.micro_batch_size"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${trainer.train_batch_size}", 8),
        ("${.train_batch_size}", 8),
        ("${oc.select:trainer.train_batch_size,3}", 8),
        ("${oc.select:nothing.here,3}", 3),
        ("${oc.select:nothing.here,null}", None),
    ],
)
def test_type_settings_resolves_references(tmp_path, value, expected):
    """A reference stands for the value of another key, or for its own default."""
    found = read(tmp_path, f"trainer:\n  train_batch_size: 8\n  micro_batch_size: {value}\n")
    assert found["trainer.micro_batch_size"] == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer.train_batch_size: many", "must be a whole number"),
        ("trainer.train_batch_size: 2.5", "must be a whole number"),
        ("trainer.train_batch_size: true", "must be a whole number"),
        ("trainer.train_batch_size: [1]", "must be a whole number"),
        ("trainer.train_batch_size: null", "must be a whole number"),
        ("trainer.train_batch_size: 1e400", "must be a whole number"),
        (f"trainer.train_batch_size: {10**19}", "must be a whole number"),
        ("trainer.flag: 1\ntrainer.train_batch_size: 1", "true or false"),
        ("trainer.train_batchsize: 8", "did you mean trainer.train_batch_size"),
        ("trainer:\n  train_batch_size: 1\ntrainer.train_batch_size: 2", "given twice"),
        ("trainer.micro_batch_size: ${trainer.micro_batch_size}", "circular"),
        ("trainer.micro_batch_size: ${no.such.key}\ntrainer.flag: true", "no.such.key"),
        ("unrelated: 1", "not a file of Some System"),
        ("", "empty"),
        ("- 1", "a list"),
        ("a: &a [x, x]\nb: &b [*a, *a]", "not a file of Some System"),
        ("trainer.train_batch_size: !!python/object/apply:os.getcwd []", "not allowed"),
        ("{" * 2000, "nested too deeply"),
        ("trainer: {", "not valid YAML"),
        ("trainer:\n  train_batch_size: x\n  flag: 7\n", "2 problems"),
        ("a0: &a0 [x, x]\n" + "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 20)), "too large"),
        pytest.param("trainer.train_batch_size: 8\n#" + "x" * 4_000_000, "larger than", id="huge"),
    ],
)
def test_type_settings_rejects_invalid_files(tmp_path, text, said):
    """Mistyped, misspelt, foreign, empty, huge or malicious files give an error with the reason, and all problems at once."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.flag", "is not key=value"),
        ("--trainer.flag=true", "is not key=value"),
        ("trainer.flag =true", "is not key=value"),
        ("no_such_key=1", "unknown key 'no_such_key'"),
        ("no.such.key=8", "unknown key 'no.such.key'"),
        ("trainer.train_batchsize=8", "the closest is trainer.train_batch_size"),
    ],
)
def test_type_settings_rejects_invalid_overrides(tmp_path, setting, said):
    """An override must be key=value, and set a key of the system, which the file need not set."""
    found = read(tmp_path, "unrelated: 1", "trainer.train_batch_size=8", "trainer.logger=console")
    assert found["trainer.train_batch_size"] == 8
    assert found.others.keys() == {"unrelated", "trainer.logger"}
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(tmp_path, "trainer.flag: true", setting)

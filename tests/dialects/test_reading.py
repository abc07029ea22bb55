"""Tests of rampup.dialects.reading: other systems' files are read safely, typed, and with suspicion."""

import pytest
from helpers.dialect_files import verdict

from rampup.config.yaml import read_text
from rampup.dialects.reading import Reading, entry, flatten, read_leaves, type_settings
from rampup.errors import ConfigError

ENTRIES = {
    "trainer.train_batch_size": entry(1024, "prompts", unit="prompts"),
    "trainer.model.path": entry(None, "a path", kind="text"),
    "trainer.micro_batch_size": entry(None, "samples"),
    "trainer.flag": entry(False, "a switch", kind="bool"),
}


def read(tmp_path, text, *overrides):
    """Read text as a file of a made-up system."""
    file = tmp_path / "file.yml"
    file.write_text(text)
    leaves, repeated = read_leaves(read_text(file), str(file))
    reading = Reading(path=str(file), leaves=leaves, overrides=overrides, repeated=repeated)
    return type_settings(reading, ENTRIES, system="Some System")


def test_type_settings_treats_nested_and_dotted_keys_alike(tmp_path):
    """Nested mappings, dotted keys and overrides give one table, with the given keys."""
    found = read(tmp_path, "trainer:\n  train_batch_size: 8\n  model: {path: m}\nother: 1\n", "trainer.flag=true")
    same = read(tmp_path, "trainer.train_batch_size: 8\ntrainer.model.path: m\nother: 1\n", "trainer.flag=true")
    assert found.values == same.values
    assert found.given == {"trainer.train_batch_size", "trainer.model.path", "trainer.flag"}
    assert found.others == {"other"}
    assert found["trainer.micro_batch_size"] is None


def test_type_settings_lets_overrides_win(tmp_path):
    """An override replaces the value of the file."""
    assert read(tmp_path, "trainer.train_batch_size: 8", "trainer.train_batch_size=9")["trainer.train_batch_size"] == 9
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
    ],
)
def test_type_settings_rejects_invalid_files(tmp_path, text, said):
    """Mistyped, misspelt, foreign, empty or malicious files give an error with the reason."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert said in str(error.value)


@pytest.mark.parametrize("setting", ["trainer.flag", "--trainer.flag=true", "trainer.flag =true", "no_such_key=1"])
def test_type_settings_rejects_invalid_overrides(tmp_path, setting):
    """An override must be key=value, of a known key."""
    with pytest.raises(ConfigError):
        read(tmp_path, "trainer.train_batch_size: 8", setting)


def test_type_settings_takes_a_key_that_the_file_does_not_set(tmp_path):
    """`key=value` may set any key of the system, also of a file that sets none; a key of no group is refused."""
    found = read(tmp_path, "unrelated: 1", "trainer.train_batch_size=8", "trainer.logger=console")
    assert found["trainer.train_batch_size"] == 8
    assert found.others == {"unrelated", "trainer.logger"}
    with pytest.raises(ConfigError, match=r"the closest is trainer\.train_batch_size"):
        read(tmp_path, "unrelated: 1", "trainer.train_batchsize=8")
    with pytest.raises(ConfigError, match=r"unknown key 'no.such.key'"):
        read(tmp_path, "trainer.flag: true", "no.such.key=8")


def test_type_settings_rejects_yaml_bombs_and_huge_files(tmp_path):
    """A YAML bomb and a 50 MB file give an error."""
    bomb = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" if n else "a0: &a0 [x, x]" for n in range(20))
    with pytest.raises(ConfigError, match="too large"):
        read(tmp_path, bomb)
    with pytest.raises(ConfigError, match="larger than"):
        read(tmp_path, "trainer.train_batch_size: 8\n#" + "x" * 50_000_000)


def test_type_settings_reports_all_problems_at_once(tmp_path):
    """Every invalid key is named."""
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "trainer:\n  train_batch_size: x\n  flag: 7\n")
    assert "2 problems" in str(error.value)
    assert len(error.value.problems) == 2


def test_flatten_keeps_empty_mappings():
    """An empty mapping is a value."""
    assert dict(flatten({"a": {}, "b": {"c": 1}})) == {"a": {}, "b.c": 1}


@pytest.mark.parametrize("system", ["skyrl", "verl", "trlx"])
def test_check_file_accepts_unrelated_keys(system):
    """Keys that do not concern batches are accepted with any value."""
    own = {"skyrl": "trainer.train_batch_size", "verl": "data.train_batch_size", "trlx": "train.batch_size"}[system]
    text = f"{own}: 1024\nhydra: {{run: {{dir: .}}}}\ndefaults:\n  - actor\n  - _self_\noptimizer: {{lr: 1e-6}}\n"
    assert verdict(system, text).system == system

"""Tests of rampup.config.load and rampup.config.yaml."""

import os
from pathlib import Path

import pytest

from rampup.config.fix import find_fix
from rampup.config.key import Key
from rampup.config.load import load_config
from rampup.config.schema import KEYS
from rampup.config.yaml import (
    MAX_BYTES,
    parse_mapping,
    parse_scalar,
    positions,
    read_text,
)
from rampup.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(text, name="a.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.core
def test_load_config_merges_sources_by_precedence(write):
    """Defaults < base_config chain < file < command line and environment; `where`
    returns the source of each value.
    """
    write("steps: 1\nlearning_rate: 1e-5\nlog_period: 3\n", "base/root.yml")
    write("base_config: root.yml\nsteps: 2\neval_interval: 5\n", "base/middle.yml")
    path = write("base_config: base/middle.yml\nsteps: 3\n")
    config = load_config(
        path, ["eval_interval=7"], environ={"RAMPUP_LOG_PERIOD": "9", "HOME": "/"}
    )
    assert (
        config.steps,
        config.learning_rate,
        config.eval_interval,
        config.log_period,
    ) == (3, 1e-5, 7, 9)
    places = {
        "steps": f"{path}:2",
        "eval_interval": "command line",
        "log_period": "RAMPUP_LOG_PERIOD",
        "opt_type": "default",
    }
    assert {name: config.where(name) for name in places} == places
    assert config.where("learning_rate").endswith("root.yml:2")


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        ("stepz: 3\n", 1, "stepz", "unknown key 'stepz'; the closest is steps"),
        (
            "log_period: 2\nsteps: 10.5\n",
            2,
            "steps",
            "steps=10.5 must be a whole number",
        ),
        ("steps: [1, 2]\n", 1, "steps", "a whole number"),
        ("steps: null\n", 1, "steps", "steps=null"),
        ("run_name: 5\n", 1, "run_name", "put it in quotes: run_name: '5'"),
        ("base_config: nowhere.yml\n", 1, "base_config", "no such file"),
        ("base_config: bese.yml\n", 1, "base_config", "did you mean base.yml"),
    ],
)
def test_config_error_has_file_line_and_key(write, text, line, key, message):
    """An error in a file has the file, the line and the key."""
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert (caught.value.path, caught.value.line, caught.value.key) == (
        str(path),
        line,
        key,
    )


@pytest.mark.core
def test_unknown_keys_and_bad_values_are_one_list(write):
    """Those of the file, its base, the command line and the environment; the last
    sentence says what is not checked yet.
    """
    write("stepz: 1\nlog_period: 0\n", "base.yml")
    path = write("base_config: base.yml\nlearning_rat: 1\nsteps: x\n")
    with pytest.raises(ConfigError, match=r"^7 problems:") as caught:
        load_config(path, ["dtyp=float32", "dtype=c"], environ={"RAMPUP_REMAT": "full"})
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [
        "learning_rat",
        "stepz",
        "dtyp",
        "remat",
        "steps",
        "log_period",
        "dtype",
    ]
    assert str(caught.value).endswith("\nthe plan is checked once these are solved")
    with pytest.raises(
        ConfigError, match=r"closest is steps; the plan is checked once this is solved$"
    ):
        load_config(write("stepz: 1\n"))


@pytest.mark.parametrize(
    ("text", "settings", "environ", "place"),
    [
        ("global_rampup_samples: 500\n", [], {}, "a.yml"),
        ("steps: 9\n", ["global_rampup_samples=500"], {}, "command line"),
        (
            "steps: 9\n",
            ["base_num_kv_heads=3"],
            {"RAMPUP_VOCAB_SIZE": "99"},
            "RAMPUP_VOCAB_SIZE and command line",
        ),
        ("base_num_kv_heads: 3\n", ["log_period=4"], {}, "a.yml"),
    ],
)
def test_contradiction_names_what_set_the_keys(write, text, settings, environ, place):
    """The command line or the variable that set one of the keys, or the file if neither
    did.
    """
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, settings, environ=environ)
    assert caught.value.path == place.replace("a.yml", str(path))
    assert str(caught.value).startswith(f"{caught.value.path}: ")


def test_circular_base_config_is_refused(write):
    """The error shows the cycle."""
    write("base_config: a.yml\n", "b.yml")
    with pytest.raises(ConfigError, match=r"circular: a\.yml -> b\.yml -> a\.yml"):
        load_config(write("base_config: b.yml\n", "a.yml"))
    with pytest.raises(ConfigError, match="is circular"):
        load_config(write("base_config: c.yml\n", "c.yml"))


@pytest.mark.parametrize(
    ("overrides", "environ", "message"),
    [
        (["steps"], {}, "'steps' is not key=value"),
        (["--steps=5"], {}, "is not key=value"),
        (["steps=1", "steps=2"], {}, "steps is given twice: 1 .* and 2"),
        (["steps=1"], {"RAMPUP_STEPS": "2"}, "steps is given twice"),
        (
            ["enable_goodput_recording=true"],
            {},
            r"no key is like it; if it is a key of MaxText.*check FILE --from maxtext",
        ),
        (["steps=1.5"], {}, "command line: steps=1.5"),
    ],
)
def test_bad_overrides_are_refused(write, overrides, environ, message):
    """Invalid settings and variables are errors."""
    with pytest.raises(ConfigError, match=message):
        load_config(write("log_period: 3\n"), overrides, environ=environ)


def test_text_keys_take_settings_verbatim(write):
    """A setting of a text key is not parsed as YAML, except for null if the key allows
    it.
    """
    config = load_config(
        write("steps: 1\n"),
        ["run_name=2026", "grain_train_files=None", "remat_policy=none"],
    )
    assert (config.run_name, config.grain_train_files, config.remat_policy) == (
        "2026",
        None,
        "none",
    )
    assert load_config(write("steps: 1\n"), ["run_name="]).run_name == ""


def test_the_folder_of_a_run_has_its_configuration(write, monkeypatch):
    """It is read where a file is, by `plan` and `--fix` too."""
    folder = write("steps: 1\n", "config.yml").parent
    assert load_config(folder, ["log_period=3"]).steps == 1
    monkeypatch.chdir(folder.parent)
    found = find_fix(folder.name, check=lambda config: None)
    assert (found.file, found.changes) == (Path(folder.name, "config.yml"), ())


def test_missing_files_are_refused(tmp_path):
    """A missing file, a folder and a misspelled preset each have their own message."""
    os.mkfifo(tmp_path / "pipe")  # such as <(COMMAND) of a shell
    for path, message in (
        (tmp_path / "none.yml", "no such file"),
        ("run_name=k", "first give a configuration or the folder of a run"),
        (tmp_path, "is a folder, .* not of a run: it has no config.yml$"),
        ("bloom_176.yml", r"did you mean bloom_176b\.yml"),
        (tmp_path / "pipe", "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(path)


@pytest.mark.parametrize(
    "text", ["rl: {num_generations: 4}\n", "rl.num_generations: 4\n"]
)
def test_load_config_recognizes_the_file_of_a_rollout(tmp_path, text):
    """The error names the commands that take the file, instead of listing unknown
    keys.
    """
    (tmp_path / "rl.yml").write_text(text)
    with pytest.raises(ConfigError, match=r"configuration of a rollout.*`rampup plan`"):
        load_config(tmp_path / "rl.yml")


def test_load_config_reads_each_value_once(monkeypatch):
    """One call of `Key.convert` per key, for the values of base.yml and for the
    defaults.
    """
    names, convert = [], Key.convert
    monkeypatch.setattr(
        Key,
        "convert",
        lambda key, name, value: names.append(name) or convert(key, name, value),
    )
    load_config("base.yml")
    assert names == list(KEYS)


def test_auto_alone_is_enough(write):
    """`batch_size_schedule: auto` sets the keys that it needs, also against a file
    below it; beside it, others are refused.
    """
    needed = (
        "enable_rampup_batch_size",
        "measure_gradient_noise",
        "learning_rate_clock",
    )
    config = load_config("base.yml", ["batch_size_schedule=auto"])
    assert [getattr(config, name) for name in needed] == [False, True, "steps"]
    assert {config.where(name) for name in needed} == {"command line"}
    path = write("base_config: base.yml\nbatch_size_schedule: auto\n")
    assert load_config(path).measure_gradient_noise
    # The clock is that of the run's length, wherever that is set.
    for setting, clock in (
        ("train_samples=99", "samples"),
        ("train_tokens=99", "samples"),
        ("steps=9", "steps"),
    ):
        assert load_config(path, [setting]).learning_rate_clock == clock
    budget = write(
        "base_config: base.yml\nbatch_size_schedule: auto\ntrain_samples: 99\n",
        "budget.yml",
    )
    assert load_config(budget).learning_rate_clock == "samples"
    assert load_config(budget, ["steps=9"]).learning_rate_clock == "steps"
    for name, value in zip(needed, ("true", "false", "samples"), strict=True):
        for overrides in (
            ["batch_size_schedule=auto", f"{name}={value}"],
            [f"{name}={value}"],
        ):
            with pytest.raises(
                ConfigError, match=f"batch_size_schedule=auto needs {name}="
            ):
                load_config("base.yml" if len(overrides) == 2 else path, overrides)
        with pytest.raises(
            ConfigError, match=f"batch_size_schedule=auto needs {name}="
        ):
            load_config(
                write(
                    f"base_config: base.yml\nbatch_size_schedule: auto\n{name}:"
                    f" {value}\n",
                    "b.yml",
                )
            )


def values(text):
    """Return the parsed values by name."""
    return {
        name: located.value for name, located in parse_mapping(text, "file.yml").items()
    }


SCALARS = {
    "1e-5": 1e-5,
    "1.e-8": 1e-8,
    ".5": 0.5,
    "10_000": 10_000,
    "1_0.5": 10.5,
    "010": 10,
    "-1": -1,
    ".inf": float("inf"),
}
SCALARS |= {"None": None, "null": None, "": None, "yes": True, "True": True}
TEXTS = (
    "0:8 100:16",
    "1:30",
    "2020-01-01",
    "2024__01",
    "2024_",
    "1__0.5",
    "1_.5",
    "1_e5",
    "0x10",
    "1/3",
    "nonesuch",
)
SCALARS |= {text: text for text in TEXTS}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_follow_yaml_1_2(text, value):
    """Numbers are exact and decimal, 1e-5 is a float, None is null, and colons and
    dates stay text.
    """
    assert parse_scalar(text, "command line") == value
    assert values(f"key: {text}")["key"] == value
    assert type(values(f"key: {text}")["key"]) is type(value)


def test_parse_mapping_records_lines():
    """Every value carries file and line."""
    parsed = parse_mapping("# comment\na: 1\n\nb:\n  - 2\n  - x: 3\n", "file.yml")
    found = {name: (entry.value, str(entry)) for name, entry in parsed.items()}
    assert found == {"a": (1, "file.yml:2"), "b": ([2, {"x": 3}], "file.yml:4")}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", None, "is empty"),
        ("- 1\n- 2\n", 1, "is a list"),
        ("just text", 1, "is a single value"),
        ("a: 1\nb: 2\na: 3\n", 3, "a is given twice, first in line 1"),
        ("a: [1\nb: 2", 2, "not valid YAML"),
        ("a: 1\n\tb: 2", 2, "indent with spaces, not tabs"),
        ("a: !!python/object/apply:os.system ['ls']", 1, "python/object/apply"),
        ("a: !mine 3", 1, "!mine"),
        ("? [1, 2]\n: 3", 1, "a key must be a plain name"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: \x00", None, "not valid YAML"),
        ("a: " + "[" * 200 + "]" * 200, 1, "too deeply"),
        ("a: " + "9" * 5000, 1, "is not a usable number"),
    ],
)
def test_parse_mapping_refuses_invalid_files(text, line, message):
    """The error about an invalid file has the line."""
    with pytest.raises(ConfigError) as caught:
        parse_mapping(text, "file.yml")
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == ("file.yml", line)


def test_parse_mapping_limits_aliases_and_depth():
    """Aliases of aliases are not expanded into memory, and deep nesting is refused."""
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
    )
    with pytest.raises(ConfigError, match="too large"):
        parse_mapping(bomb, "bomb.yml")
    with pytest.raises(ConfigError, match="too deeply"):
        parse_mapping("a: " + "[" * 50_000, "deep.yml")


def test_read_text_refuses_unreadable_files(tmp_path):
    """A missing file, a folder, a huge file and one that is not UTF-8 are errors."""
    (tmp_path / "binary.yml").write_bytes(b"a: \xff\xfe")
    (tmp_path / "huge.yml").write_bytes(b"a: 1\n" + b"#" * MAX_BYTES)
    messages = {
        "missing.yml": "No such file",
        "": "directory",
        "binary.yml": "not UTF-8",
        "huge.yml": "larger than",
    }
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=message):
            read_text(tmp_path / name)


def test_positions_of_keys_and_values():
    """Keys and values are found in any context; values with an alias, an anchor or a
    tag are left out.
    """
    text = (
        "# x: 1\r\na:  5 # five\r\n\"b\": 'six'\nc:\nd: [1,\n 2]\ne: &e 1\nf: *e\ng:"
        " !!str 3\n"
    )
    found = {
        name: (text[key], text[value]) for name, (key, value) in positions(text).items()
    }
    assert found == {
        "a": ("a", "5"),
        "b": ('"b"', "'six'"),
        "c": ("c", ""),
        "d": ("d", "[1,\n 2]"),
    }

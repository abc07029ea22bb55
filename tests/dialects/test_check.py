"""Tests of `rampup check`, as a person types it, and of which system a file belongs to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.dialect_files import cases, nested, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup.cli import main
from rampup.dialects import SYSTEMS, check_file, write_conversion
from rampup.dialects.skyrl import KEYS as SKYRL
from rampup.dialects.trlx import KEYS as TRLX
from rampup.dialects.verl import KEYS as VERL
from rampup.errors import ConfigError, RampupError

GOOD = {"trainer.train_batch_size": 8, "trainer.policy_mini_batch_size": 4, "generator.n_samples_per_prompt": 2}
BAD = {**GOOD, "trainer.policy_mini_batch_size": 3}


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a configuration and returns its path."""

    def write(flat):
        path = tmp_path / "config.yml"
        path.write_text(yaml.safe_dump(nested(flat)))
        return str(path)

    return write


def run_json(capsys, *arguments):
    """Run `check` with --json in this process; return its exit code and its one object."""
    code = main(["check", *arguments, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0])


def test_json_is_the_contract(capsys, file):
    """Names and types of what --json prints, for a good and a bad file; exit 2 for the bad one only."""
    code, found = run_json(capsys, file(GOOD), "--from", "skyrl")
    assert code == 0
    assert list(found) == ["system", "validator", "run", "violations", "notes", "derived"]
    assert (found["system"], found["validator"], found["run"], found["violations"]) == ("skyrl", "accepts", "runs", [])
    assert found["derived"]["samples_per_step"] == 16
    code, found = run_json(capsys, file(BAD), "--from", "skyrl")
    assert code == 2
    assert (found["validator"], found["run"]) == ("rejects", "fails")
    assert set(found["violations"][0]) == {"rule", "keys", "message", "nearest"}


def test_the_verdict_is_printed_either_way(capsys, file):
    """People see the verdict of a bad file too, on standard output, and no traceback."""
    assert main(["check", file(BAD), "--from", "skyrl"]) == 2
    shown = capsys.readouterr()
    assert "must be a multiple of trainer.policy_mini_batch_size=3" in shown.out
    assert "8 prompts per training step" in shown.out
    assert not shown.err


def test_settings_win_over_the_file(capsys, file):
    """key=value after the file mends it, in any order with the options."""
    assert run_json(capsys, file(BAD), "--from", "skyrl", "trainer.policy_mini_batch_size=2")[0] == 0
    assert run_json(capsys, "--from=skyrl", file(BAD), "trainer.policy_mini_batch_size=2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--from", "nemo_aligner"], "from"),
        (["--from", "skyrl", "--to", "rampup"], "to"),
        (["--from", "skyrl", "-o", "x.yml"], "to"),
        ([], None),
        (["--from", "skyrl", "no.such.key=1"], "no.such.key"),
    ],
)
def test_wrong_usage_is_an_error(capsys, file, arguments, key):
    """Unknown systems, keys and half a conversion are refused with a message."""
    code, found = run_json(capsys, file(GOOD), *arguments)
    assert code == 2
    assert found["error"]["key"] == key


def test_a_missing_file_is_an_error(capsys, tmp_path):
    """No such file: an error of the usual form."""
    code, found = run_json(capsys, str(tmp_path / "nothing.yml"), "--from", "verl")
    assert code == 2
    assert "cannot read" in found["error"]["message"]


@pytest.mark.parametrize("asked", ["skyrl", "verl", "trlx"])
@pytest.mark.parametrize("real", ["skyrl", "verl", "trlx"])
def test_a_file_of_another_system_is_recognised(asked, real):
    """A file that sets none of the asked system's keys, but another's, is not read with defaults but named."""
    config = next(case["config"] for case in cases(real) if len(case["config"]) > 1)
    if asked == real:
        assert verdict(asked, config).system == asked
    else:
        with pytest.raises(ConfigError, match=f"looks like a file of {real}, not of {asked}.*--from {real}") as error:
            verdict(asked, config, *(["num_prompts=1000"]))
        assert error.value.nearest == (real,)


def test_conversion_never_replaces_its_source(file):
    """A run of reinforcement learning has no ramp to convert, and the source is never overwritten."""
    path = file(GOOD)
    before = Path(path).read_text()
    with pytest.raises(RampupError):
        write_conversion(check_file(path, "skyrl"), path, source=path)
    assert Path(path).read_text() == before


MEGATRON = {
    "micro_batch_size": 2,
    "global_batch_size": 64,
    "rampup_batch_size": [16, 16, 1000],
    "world_size": 4,
    "train_samples": 5000,
}


def test_conversion_from_the_command_line(capsys, file, tmp_path):
    """What --to writes plans the phases that the verdict shows; a file that cannot be written is an error."""
    output = tmp_path / "base.yml"
    code, found = run_json(capsys, file(MEGATRON), "--from", "megatron", "--to", "rampup", "-o", str(output))
    assert code == 0
    assert main(["plan", str(output), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["phases"]
    names = ("start_step", "start_sample", "global_batch_size")
    assert [[phase[name] for name in names] for phase in planned] == [
        [phase[name] for name in names] for phase in found["phases"]
    ]
    unwritable = str(tmp_path / "no" / "folder" / "x.yml")
    assert main(["check", file(MEGATRON), "--from", "megatron", "--to", "rampup", "-o", unwritable]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["check", file(MEGATRON), "--from", "megatron", "--to", "rampup", "-o", file(MEGATRON)]) == 2
    assert "must not be the source file" in capsys.readouterr().err


def test_check_imports_no_jax_and_only_the_requested_system(file):
    """`rampup check` imports neither JAX nor NumPy, and of the dialects only the requested one."""
    code = (
        "import sys; from rampup.cli import main; code = main(sys.argv[1:]);"
        "assert not {'jax', 'numpy', 'flax', 'optax'} & set(sys.modules);"
        "assert not any(name.startswith(('rampup.dialects.verl', 'rampup.dialects.megatron')) for name in sys.modules);"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "check", file(GOOD), "--from", "skyrl"]
    subprocess.run(command, check=True, capture_output=True)


SIZES = st.sampled_from(
    [-1, 0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 64, 1000, 10**9, 10**18, 2.5, 1e300, None, True, "x", "", [], {}]
)
LIKELY = st.integers(1, 24)


def values(entries):
    """Return configurations of a system: mostly plausible sizes, some nonsense."""

    def of_one(name):
        key = entries[name].key
        if key.choices:
            return st.sampled_from([*key.choices, "nonsense"])
        plausible = {"bool": st.booleans(), "text": st.sampled_from(["gae", "NeMoPPOTrainer", "ILQLConfig"])}.get(
            key.kind, LIKELY
        )
        return st.one_of(plausible, plausible, plausible, SIZES)

    names = st.lists(st.sampled_from(sorted(entries)), min_size=1, max_size=12, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: of_one(name) for name in chosen}))


@pytest.mark.parametrize(
    ("system", "entries"), [("skyrl", SKYRL), ("verl", VERL), ("trlx", TRLX)], ids=["skyrl", "verl", "trlx"]
)
@settings(max_examples=150)
@given(data=st.data())
def test_any_file_gives_a_verdict_or_a_clear_error(system, entries, data):
    """No exception but ours; a verdict is JSON, names keys and legal values, and is explained."""
    flat = data.draw(values(entries))
    try:
        found = verdict(system, yaml.safe_dump(flat))
    except RampupError as error:
        assert str(error)
        return
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    before = {violation.rule for violation in found.violations}
    for violation in found.violations:
        assert violation.message
        assert violation.keys
        assert all(key in entries for key in violation.keys)
        for value in violation.nearest:
            after = {other.rule for other in verdict(system, yaml.safe_dump(flat | {violation.keys[0]: value})).violations}
            assert after <= before - {violation.rule}
    assert len(before) == len(found.violations)
    if found.ok:
        assert found.derived
        assert found.meanings
        assert found.flow


def test_all_systems_are_known():
    """The six systems of the command line."""
    assert set(SYSTEMS) == {"maxtext", "maxtext_rl", "megatron", "skyrl", "verl", "trlx"}

"""Malformed input ends in either a valid plan or an error that names the key."""

import collections
import contextlib
import json
import os
import shutil
import string
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from faults import random_configs, toy_run
from helpers.tiny import TINY_MODEL, command_line
from hypothesis import HealthCheck, example, given, settings, target
from hypothesis import strategies as st

from rampup import Config
from rampup.config.yaml import parse_mapping
from rampup.errors import ConfigError, ResumeMismatchError
from rampup.loop.checkpoint import write_checksums

BASE = random_configs.BASE
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck)
)
ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=6), inner, max_size=3),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    "number", [200, pytest.param(20_000, marks=pytest.mark.faults)]
)
def test_random_config_is_planned_or_refused(number):
    """A plan agrees with the slow reference; an error names a key and offers legal
    values.
    """
    ends = collections.Counter()

    @given(random_configs.configs())
    @example(
        {
            "num_devices": 1,
            "per_device_batch_size_start": 1,
            "per_device_batch_size": 2,
            "batch_size_schedule": "auto",
        }
    )
    @example(
        {
            "num_devices": 2,
            "ici_data_parallelism": 1,
            "ici_tensor_parallelism": 1,
            "ici_pipeline_parallelism": 3,
            "dcn_data_parallelism": 1,
            "base_num_decoder_layers": 1,
            "rampup_microbatch": "whole",
            "enable_rampup_batch_size": False,
            "per_device_batch_size": 1,
            "batch_scaling": "none",
        }
    )
    # Of a few random examples, by chance too few may be legal.
    @settings(QUICK, max_examples=number, database=None, derandomize=number < 1000)
    def check(changes):
        ends[random_configs.check(changes)] += 1

    check()
    print(dict(ends))
    assert ends.total() >= number
    assert min(ends["planned"], ends["refused"]) >= number // 10


LINES = st.one_of(
    st.sampled_from((BASE).read_text().splitlines()),
    st.text(alphabet=string.printable, max_size=30),
    st.sampled_from(
        [
            "- a",
            "? b",
            "&x [1, 2]",
            "*x",
            "<<: {a: 1}",
            "!!python/object:os.system x",
            "a: !!binary aGk=",
            "---",
            "%TAG ! x",
        ]
    ),
    st.sampled_from(
        [
            "steps: 1e5",
            "steps: {a: 1}",
            "steps: [1",
            "steps: 'x",
            "steps: |",
            "  x",
            "\tsteps: 1",
            "steps: 1 # c",
            "a: b: c",
        ]
    ),
)


@given(st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n", "\x85", "\u2028"]))
@QUICK
def test_any_lines_are_parsed_or_refused(lines, ending):
    """Any text is a mapping of plain values or raises a ConfigError; the search prefers
    many different lines.
    """
    target(float(len(set(lines))))
    try:
        found = parse_mapping(ending.join(lines), "test.yml")
    except ConfigError as error:
        assert error.path == "test.yml"
        return
    json.dumps({name: located.value for name, located in found.items()})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A finished run with checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    toy_run.run(folder, checkpoint_period=12)
    return folder


@given(st.data())
@settings(QUICK, max_examples=25)
def test_any_checkpoint_record_is_accepted_or_refused(run_folder, data):
    """A record with any change is refused."""
    record = json.loads(
        (run_folder / "checkpoints" / "12" / "record" / "metadata").read_text()
    )
    name = data.draw(st.sampled_from([*record, "more"]))
    changed = data.draw(
        st.one_of(st.just(record | {name: data.draw(ANYTHING)}), ANYTHING)
    )
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(run_folder, copy, dirs_exist_ok=True)
        path = Path(copy) / "checkpoints" / "12" / "record" / "metadata"
        path.write_text(json.dumps(changed))
        (path.parents[1] / "checksums.json").unlink()
        write_checksums(path.parents[1])
        try:
            toy_run.run(Path(copy))
        except ResumeMismatchError:
            return
    assert changed == record


@given(st.text(max_size=12))
@QUICK
def test_run_folder_is_inside_the_base_folder(name):
    """No run name leads out of base_output_directory."""
    with contextlib.suppress(ConfigError):
        assert (
            (Path("/base") / Config(run_name=name).run_name)
            .resolve()
            .is_relative_to("/base")
        )


@pytest.mark.slow
def test_train_writes_only_its_folders_and_no_secrets(tmp_path):
    """A run writes only into its folder and the compilation cache, and never a value of
    the environment.
    """
    home, out, work = tmp_path / "home", tmp_path / "out", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    small = {
        "steps": 2,
        "per_device_batch_size": 1,
        "dataset_type": "synthetic",
        "enable_rampup_batch_size": False,
    }
    arguments = command_line(TINY_MODEL | small)
    secret = "hunter2-do-not-tell"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("JAX_")
    }
    environment |= {
        "HOME": str(home),
        "API_TOKEN": secret,
        "AWS_SECRET_ACCESS_KEY": secret,
        "TMPDIR": str(work),
    }
    command = [
        sys.executable,
        "-m",
        "rampup",
        "train",
        str(BASE),
        *arguments,
        f"base_output_directory={out}",
        "run_name=run",
    ]
    result = subprocess.run(
        [*command, "--fake-devices", "1"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=work,
    )
    assert result.returncode == 0, result.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    allowed = (out / "run", home / ".cache" / "rampup")
    assert [
        path
        for path in written
        if not any(path.is_relative_to(folder) for folder in allowed)
    ] == []
    assert secret not in result.stdout + result.stderr
    assert [path for path in written if secret.encode() in path.read_bytes()] == []

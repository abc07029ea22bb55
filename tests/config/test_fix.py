"""Tests of rampup.config.fix."""

import itertools
import os
import random
import shutil
import subprocess

import pytest

from rampup import build_plan, load_config
from rampup.config.fix import find_fix, write_fix
from rampup.config.schema import KEYS
from rampup.errors import ConfigError, RampupError

BASE = "base_config: base.yml\n"


def plan(config):
    """Check a configuration on four devices."""
    return build_plan(config, 4 if config.num_devices == -1 else None)


def fixed(folder, text, *settings, environ=None):
    """Write a file, find its fix, and check that the result is legal."""
    file = folder / "run.yml"
    file.write_bytes(text.encode())
    fix = find_fix(file, settings, environ=environ, check=plan)
    if not settings and environ is None:
        plan(load_config(file, text=fix.text))
    return fix


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("steps: 0  # few\nlog_period: 5\n", "steps: 1  # few\nlog_period: 5\n"),
        ("steps: '500'\n", "steps: 500\n"),
        ("log_period: 1.5\n", "log_period: 2\n"),
        ("run_name: 5\n", 'run_name: "5"\n'),
        ("enable_checkpointing: 'yes'\n", "enable_checkpointing: true\n"),
        ("dtype: bfloat\n", "dtype: bfloat16\n"),
        ("learning_rat: 0.1\n", "learning_rate: 0.1\n"),
        ("stepz: 0\n", "steps: 1\n"),
        ("lr: 0.1\nseed: 1\n", "learning_rate: 0.1\ninit_weights_seed: 1\n"),
        ("base_config: bse.yml\n", "base_config: base.yml\n"),
        (BASE + "per_device_batch_size: 15   # samples\n", BASE + "per_device_batch_size: 16   # samples\n"),
        (BASE + "per_device_batch_size_increment: 5\n", BASE + "per_device_batch_size_increment: 6\n"),
        (BASE + "ici_tensor_parallelism: 3", BASE + "ici_tensor_parallelism: 4"),
        (BASE + "base_num_kv_heads: 3\n", BASE + "base_num_kv_heads: 4\n"),
        (BASE + "microbatch_size: 3\n", BASE + "microbatch_size: 4\n"),
        (
            "enable_rampup_batch_size: false\nbatch_size_schedule: '0:100, 3K:250 5K:250'\n",
            'enable_rampup_batch_size: false\nbatch_size_schedule: "0:100, 3K:252 5K:252"\n',
        ),
        (
            "enable_rampup_batch_size: false\nbatch_size_schedule: 0:65 1:3 500:8\n",
            'enable_rampup_batch_size: false\nbatch_size_schedule: "0:64 1:4 500:8"\n',
        ),
        (BASE + "batch_size_schedule: 0:64\n", BASE + "batch_size_schedule: 0:64\nenable_rampup_batch_size: false\n"),
        ("steps: 0\r\nlog_period: 7\r\n", "steps: 1\r\nlog_period: 7\r\n"),
        ("{steps: 0, log_period: 3}", "{steps: 1, log_period: 3}"),
        ("log_period: >-\n  5\nsteps: 9\n", "log_period: 5\nsteps: 9\n"),
        ('{"steps":0.5}', '{"steps":1}'),
    ],
)
def test_find_fix_changes_only_the_value(tmp_path, text, result):
    """Comments, quotes, order and line ends of everything else stay; a key that is not in the file is added at its end."""
    assert fixed(tmp_path, text).text == result


def test_find_fix_leaves_a_legal_file(tmp_path):
    """A legal file has no change and no patch."""
    fix = fixed(tmp_path, BASE)
    assert (fix.changes, fix.patch, fix.problems, fix.text) == ((), "", (), BASE)


def test_find_fix_changes_several_values(tmp_path):
    """Independent mistakes are all fixed, each listed with its line."""
    fix = fixed(tmp_path, BASE + "steps: 0\nper_device_batch_size: 15\nremat_policy: fulll\n")
    assert fix.text == BASE + "steps: 1\nper_device_batch_size: 16\nremat_policy: full\n"
    assert {change.where.rpartition(":")[2] for change in fix.changes} == {"2", "3", "4"}
    assert len(fix.problems) == 2


def test_find_fix_keeps_the_final_batch():
    """A ramp that does not divide gets another increment or start if one is within a factor of two; the nearest wins."""
    end = "per_device_batch_size"
    for start, increment, last in itertools.product((2, 3, 4), (3, 5), (9, 12, 16)):
        keys = {f"{end}_start": start, f"{end}_increment": increment, end: last, "enable_rampup_batch_size": True}
        fix = find_fix("base.yml", [f"{key}={value}" for key, value in keys.items()], check=plan)
        if (last - start) % increment == 0:
            assert fix.changes == ()
            continue
        (change,) = fix.changes
        increments = [n for n in range(1, last - start + 1) if (last - start) % n == 0]
        starts = [n for n in range(1, last) if (last - n) % increment == 0]
        near = [n for n in increments if increment <= 2 * n <= 4 * increment] + [
            n for n in starts if start <= 2 * n <= 4 * start
        ]
        assert (change.key == end) == (not near)


def test_find_fix_changes_the_key_that_the_file_sets(tmp_path):
    """A file that sets only the final batch, or only the start, gets another value of that key."""
    assert fixed(tmp_path, BASE + "per_device_batch_size: 17\n").text == BASE + "per_device_batch_size: 16\n"
    assert fixed(tmp_path, BASE + "per_device_batch_size_start: 3\n").text == BASE + "per_device_batch_size_start: 4\n"


def test_find_fix_changes_devices_last(tmp_path):
    """The number of devices stays if an axis of the mesh can change."""
    (change,) = fixed(tmp_path, BASE + "num_devices: 6\nici_tensor_parallelism: 4\n").changes
    assert (change.key, change.after) == ("ici_tensor_parallelism", "3")


def test_find_fix_changes_settings_where_they_were_made(tmp_path):
    """A value from the command line or the environment is changed there, and the file stays as it is."""
    fix = fixed(tmp_path, BASE, "per_device_batch_size=15")
    assert [(c.key, c.before, c.after, c.where) for c in fix.changes] == [("per_device_batch_size", "15", "16", "command line")]
    assert fix.patch == ""
    fix = fixed(tmp_path, BASE, environ={"RAMPUP_PER_DEVICE_BATCH_SIZE": "15"})
    assert [(c.after, c.where) for c in fix.changes] == [("16", "RAMPUP_PER_DEVICE_BATCH_SIZE")]
    fix = fixed(tmp_path, BASE, "steps=0", environ={"RAMPUP_STEPS": "0"})
    assert [(c.key, c.after) for c in fix.changes] == [("steps", "1")]
    fix = fixed(tmp_path, BASE, "stepz=3")
    assert [(c.renamed, c.key, c.where) for c in fix.changes] == [("stepz", "steps", "command line")]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("banana: 5\n", "banana"),
        ("remat_policy: banana\n", "remat_policy"),
        ("steps: many\n", "steps='many'"),
        ("steps:\n", "steps=null"),
        ("steps: 5\nstepz: 6\n", "stepz"),
        ("dataset_type: tokens\n", "grain_train_files"),
        ("run_name: a/b\n", "run_name='a/b'"),
        ("steps: &a 0\nlog_period: *a\n", "steps=0"),
        ("batch_size_schedule: 5:8\n", "first threshold"),
    ],
)
def test_find_fix_names_the_problem_that_is_left(tmp_path, text, left):
    """If no error offers a value that helps, the message gives the remaining problem."""
    with pytest.raises(ConfigError, match="no legal configuration was found near this one") as caught:
        fixed(tmp_path, text)
    assert left in str(caught.value)


def test_find_fix_names_the_values_that_it_would_change(tmp_path):
    """The message gives the values that were fixed and the problem behind them."""
    with pytest.raises(ConfigError, match=r"what is left with log_period=1: .*grain_train_files"):
        fixed(tmp_path, "log_period: 0\ndataset_type: tokens\n")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "- 1\n", "text", "a: [", "steps: 1\nsteps: 2\n", "a: !!python/none x\n", "\0"]
)
def test_find_fix_raises_the_readers_error(tmp_path, text):
    """Empty, no mapping, not YAML: the reader's own error."""
    with pytest.raises(ConfigError) as caught:
        fixed(tmp_path, text)
    assert "run.yml" in str(caught.value)
    with pytest.raises(ConfigError, match="no such file"):
        find_fix(tmp_path / "nowhere.yml", check=plan)


@pytest.mark.parametrize("text", [BASE + "steps: 0\n# end", BASE + "steps: 0", BASE + "a_key: 1\n" * 0 + "steps: 0\n"])
def test_patch_can_be_applied(tmp_path, text):
    """`patch` turns the file into the fixed text, also if its last line has no line end."""
    fix = fixed(tmp_path, text)
    if shutil.which("patch") is None:
        pytest.skip("there is no `patch` on this machine")
    subprocess.run(["patch", "-p0", str(tmp_path / "run.yml")], input=fix.patch.encode(), check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "run.yml").read_text() == fix.text


def test_write_fix_keeps_permissions_links_and_byte_order_mark(tmp_path):
    """The target of a link is replaced, with its permissions and its byte order mark, and no other file is left."""
    file, link = tmp_path / "run.yml", tmp_path / "link.yml"
    file.write_bytes(b"\xef\xbb\xbfsteps: 0\n")
    file.chmod(0o640)
    link.symlink_to(file)
    write_fix(find_fix(link, check=plan))
    assert file.read_bytes() == b"\xef\xbb\xbfsteps: 1\n"
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link.yml", "run.yml"]


def test_write_fix_leaves_a_file_that_cannot_be_written(tmp_path, monkeypatch):
    """The error names the file, which stays as it was, and no other file is left behind."""
    fix = fixed(tmp_path, "steps: 0\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("rampup.config.fix.os.replace", refuse)
    with pytest.raises(ConfigError, match="cannot write the file: Permission denied"):
        write_fix(fix)
    assert os.listdir(tmp_path) == ["run.yml"]
    assert (tmp_path / "run.yml").read_text() == "steps: 0\n"


VALUES = {
    "num_devices": ["1", "4", "6", "8"],
    "per_device_batch_size": ["0", "1.5", "7", "16", "1/3", "-2"],
    "per_device_batch_size_start": ["1", "3", "0.25"],
    "per_device_batch_size_increment": ["0", "2", "0.5", "7"],
    "global_rampup_samples": ["0", "100", "1.5"],
    "gradient_accumulation_steps": ["0", "2", "3"],
    "microbatch_size": ["-1", "2", "0", "5"],
    "ici_tensor_parallelism": ["2", "3"],
    "ici_pipeline_parallelism": ["2", "3", "4"],
    "num_pipeline_microbatches": ["-1", "1", "3", "8"],
    "num_pipeline_repeats": ["-1", "2", "3"],
    "base_num_decoder_layers": ["1", "4", "6"],
    "steps": ["0", "'500'", "10"],
    "eval_per_device_batch_size": ["0", "3"],
    "rampup_microbatch": ["per_phase", "perphase"],
    "expansion_factor_real_data": ["0.3", "2"],
    "base_emb_dim": ["100", "96"],
    "vocab_size": ["100"],
}


@pytest.mark.parametrize("seed", range(40))
def test_find_fix_of_random_values_is_legal_or_refused(tmp_path, seed):
    """The result is legal, changes only keys that exist, and leaves every other line as it is; nothing else is raised."""
    chosen = random.Random(seed)
    names = chosen.sample(sorted(VALUES), chosen.randint(1, 5))
    text = BASE + "".join(f"{name}: {chosen.choice(VALUES[name])}  # {name}\n" for name in names)
    try:
        fix = fixed(tmp_path, text)
    except RampupError as error:
        assert error.key in KEYS
        return
    changed = {change.key for change in fix.changes}
    assert changed <= set(KEYS)
    for before, after in zip(text.splitlines(), fix.text.splitlines(), strict=False):
        assert before == after or before.partition(":")[0] in changed
        assert before.partition("#")[2] == after.partition("#")[2]


def test_find_fix_drops_changes_that_are_not_needed(tmp_path):
    """Both numbers of heads are refused, but with 4 query heads the 2 key-value heads are legal."""
    fix = fixed(tmp_path, BASE + "base_num_query_heads: 3\nbase_num_kv_heads: 2\n")
    assert [(change.key, change.after) for change in fix.changes] == [("base_num_query_heads", "4")]
    assert len(fix.problems) == 2


def test_find_fix_ends(tmp_path):
    """A file with a bad value for every key that takes a number is given up after a bounded number of rounds."""
    tries = []

    def check(config):
        tries.append(config)
        return plan(config)

    file = tmp_path / "run.yml"
    file.write_text("".join(f"{name}: -7\n" for name, key in KEYS.items() if key.kind in ("int", "size", "float")))
    try:
        find_fix(file, check=check)
    except ConfigError as error:
        assert "no legal configuration" in str(error)
    assert len(tries) <= 20 + len(KEYS)

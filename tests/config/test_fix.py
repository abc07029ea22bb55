"""Tests of rampup.config.fix."""

import itertools
import random
import shutil
import subprocess

import pytest
from faults import random_configs
from hypothesis import HealthCheck, given, settings

from rampup import build_plan, load_config
from rampup.config.fix import find_fix
from rampup.config.schema import KEYS
from rampup.errors import ConfigError, RampupError

BASE = "base_config: base.yml\n"
OFF = "enable_rampup_batch_size: false\n"


def plan(config):
    """Check a configuration on four devices."""
    return build_plan(config, 4 if config.num_devices == -1 else None)


def fixed(folder, text):
    """Write a file, find its fix, and check that the result is legal."""
    file = folder / "run.yml"
    file.write_bytes(text.encode())
    fix = find_fix(file, check=plan)
    plan(load_config(file, text=fix.text))
    return fix


def as_text(settings):
    """Return a file with a key and a value on each line, on top of base.yml."""
    lines = [f"{key}: {value}\n" for key, value in settings.items()]
    return BASE + "".join(lines)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("steps: 0  # few\nlog_period: 5\n", "steps: 1  # few\nlog_period: 5\n"),
        ("steps: '500'\n", "steps: 500\n"),
        ("run_name: 5\n", 'run_name: "5"\n'),
        ("enable_checkpointing: 'yes'\n", "enable_checkpointing: true\n"),
        ("dtype: bfloat\n", "dtype: bfloat16\n"),
        ("learning_rat: 0.1\n", "learning_rate: 0.1\n"),
        ("stepz: 0\n", "steps: 1\n"),
        ("lr: 0.1\nseed: 1\n", "learning_rate: 0.1\ninit_weights_seed: 1\n"),
        ("base_config: bse.yml\n", "base_config: base.yml\n"),
        (
            BASE + "per_device_batch_size: 15   # samples\n",
            BASE + "per_device_batch_size: 16   # samples\n",
        ),
        (
            BASE + "per_device_batch_size_increment: 5\n",
            BASE + "per_device_batch_size_increment: 6\n",
        ),
        (BASE + "ici_tensor_parallelism: 3", BASE + "ici_tensor_parallelism: 4"),
        (
            BASE + "num_devices: 6\nici_tensor_parallelism: 4\n",
            BASE + "num_devices: 6\nici_tensor_parallelism: 3\n",
        ),
        (BASE + "microbatch_size: 3\n", BASE + "microbatch_size: 2\n"),
        (
            OFF + "batch_size_schedule: '0:100, 3K:250 5K:250'\n",
            OFF + 'batch_size_schedule: "0:100, 3K:252 5K:252"\n',
        ),
        (
            OFF + "batch_size_schedule: 0:65 1:3 500:8\n",
            OFF + 'batch_size_schedule: "0:64 1:4 500:8"\n',
        ),
        # One microbatch of 4 samples, where 20, 32 and 68 have one of 1.
        (
            OFF + "batch_size_schedule: 0:18 2K:30 8K:66\n",
            OFF + 'batch_size_schedule: "0:16 2K:32 8K:64"\n',
        ),
        (
            BASE + "batch_size_schedule: 0:64\n",
            BASE + "batch_size_schedule: 0:64\n" + OFF,
        ),
        # With 4 query heads, the 2 key-value heads are legal.
        (
            BASE + "base_num_query_heads: 3\nbase_num_kv_heads: 2\n",
            BASE + "base_num_query_heads: 4\nbase_num_kv_heads: 2\n",
        ),
        ("steps: 0\r\nlog_period: 7\r\n", "steps: 1\r\nlog_period: 7\r\n"),
        ("{steps: 0, log_period: 3}", "{steps: 1, log_period: 3}"),
        ("log_period: >-\n  5\nsteps: 9\n", "log_period: 5\nsteps: 9\n"),
        ('{"steps":0.5}', '{"steps":1}'),
    ],
)
def test_find_fix_changes_only_the_value(tmp_path, text, result):
    """Comments, quotes, order and line ends of everything else stay; a key that is not
    in the file is added at its end.
    """
    assert fixed(tmp_path, text).text == result


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("global_batch_size: 512\n", "per_device_batch_size"),
        ("warmup: 2000\n", "warmup_steps_fraction"),
        ("min_lr: 0.00001\n", "learning_rate_final_fraction"),
        ("zero_stage: 3\n", "ici_fsdp_parallelism"),
        ("num_microbatches: 8\n", "num_pipeline_microbatches"),
    ],
)
def test_a_number_of_another_quantity_is_not_moved_to_a_key(tmp_path, text, key):
    """The error names the key, and the fix leaves the value to the user."""
    (tmp_path / "run.yml").write_text(text)
    with pytest.raises(RampupError, match=key):
        find_fix(tmp_path / "run.yml", (), check=plan)


def test_find_fix_keeps_the_final_batch_and_the_growth_of_a_linear_ramp(tmp_path):
    """A ramp that does not divide gets another increment or start if one is within a
    factor of two; the nearest wins.
    """
    end = "per_device_batch_size"
    for start, increment, last in itertools.product(
        (2, 3, 4, 7), (3, 5, 8), (*range(1, 13), 16)
    ):
        keys = {
            f"{end}_start": start,
            f"{end}_increment": increment,
            end: last,
            "enable_rampup_batch_size": "true",
        }
        try:
            fix = fixed(tmp_path, as_text(keys))
        except RampupError:
            assert last <= start  # far below the first size that this ramp can end at
            continue
        after = keys | {change.key: float(change.after) for change in fix.changes}
        assert (
            after[f"{end}_start"] < after[end]
        )  # a final batch at the start of the ramp is none
        assert all(0.5 <= after[key] / keys[key] <= 2 for key in (f"{end}_start", end))
        if last > start and (last - start) % increment == 0:
            assert fix.changes == ()
        elif last - start > increment:
            (change,) = fix.changes
            increments = [
                n for n in range(1, last - start + 1) if (last - start) % n == 0
            ]
            starts = [n for n in range(1, last) if (last - n) % increment == 0]
            near = [n for n in increments if increment <= 2 * n <= 4 * increment]
            near += [n for n in starts if start <= 2 * n <= 4 * start]
            assert (change.key == end) == (not near)


def test_find_fix_changes_the_fewest_keys_and_keeps_the_ramp(tmp_path):
    """Of two near values, the one wins that leaves nothing else to change: 4
    microbatches instead of 8, with which the first batch would have to double.
    """
    keys = {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 6}
    keys |= {"base_num_decoder_layers": 8, "per_device_batch_size_start": 1.0}
    keys |= {"per_device_batch_size_increment": 1.0, "per_device_batch_size": 4.0}
    keys |= {"global_rampup_samples": 400, "enable_rampup_batch_size": "true"}
    fix = fixed(tmp_path, as_text(keys | {"num_devices": 8}))
    assert [(c.key, c.after) for c in fix.changes] == [
        ("num_pipeline_microbatches", "4")
    ]
    made = plan(load_config(fix.file, text=fix.text))
    assert made.ramp.sizes == (8, 16, 24, 32)


def keeps_shape(before, after):
    """Return whether sizes are within a quarter of those before and grow, stay and fall
    where they did.
    """
    near = all(
        0.75 * old <= new and 0.75 * new <= old
        for old, new in zip(before, after, strict=True)
    )
    steps = [
        [(a < b, a > b) for a, b in itertools.pairwise(sizes)]
        for sizes in (before, after)
    ]
    return near and steps[0] == steps[1]


@pytest.mark.parametrize("seed", range(30))
def test_find_fix_keeps_the_shape_of_a_schedule(seed, tmp_path):
    """A fixed schedule grows, stays and falls where it did, with every size within a
    quarter; anything else is an error.
    """
    chosen = random.Random(seed)
    devices, sizes = (
        chosen.choice((2, 4, 8)),
        [chosen.randint(1, 40) * chosen.choice((1, 2, 8)) for _ in range(4)],
    )
    schedule = " ".join(f"{1000 * place}:{size}" for place, size in enumerate(sizes))
    keys = {
        "batch_size_schedule": schedule,
        "enable_rampup_batch_size": "false",
        "microbatch_size": chosen.choice((2, 4, 8)),
        "num_devices": devices,
    }
    try:
        fix = fixed(tmp_path, as_text(keys))
    except RampupError as error:
        assert error.key == "batch_size_schedule"
        choices = [
            {size // devices * devices, -(-size // devices) * devices} for size in sizes
        ]
        assert not any(keeps_shape(sizes, new) for new in itertools.product(*choices))
        return
    after = {change.key: change.after for change in fix.changes}
    new = [
        int(entry.partition(":")[2])
        for entry in after.get("batch_size_schedule", schedule).strip('"').split()
    ]
    assert keeps_shape(sizes, new)
    if all(size % devices == 0 for size in sizes):
        assert new == sizes


def test_find_fix_takes_a_smaller_microbatch_before_other_sizes(tmp_path):
    """The schedule keeps its sizes as far as the devices allow; a ramp that would
    become flat is an error.
    """
    keys = {
        "enable_rampup_batch_size": "false",
        "batch_size_schedule": "0:16 500:24 900:50 2K:64",
        "microbatch_size": 8,
    }
    fix = fixed(tmp_path, as_text(keys | {"num_devices": 8}))
    changes = [(change.key, change.after) for change in fix.changes]
    assert sorted(changes) == [
        ("batch_size_schedule", '"0:16 500:24 900:48 2K:64"'),
        ("microbatch_size", "1"),
    ]
    with pytest.raises(
        RampupError,
        match=(
            r"keeps the ramp \(it grows where it grew, and a size moves by at most"
            r" 25%\)"
        ),
    ):
        fixed(tmp_path, as_text(keys | {"num_devices": 64}))


@pytest.mark.parametrize(
    ("settings", "environ", "place"),
    [
        (["steps=0"], {}, "command line"),
        ([], {"RAMPUP_STEPS": "0"}, "RAMPUP_STEPS"),
        (["stepz=3"], {}, "command line"),
    ],
)
@pytest.mark.parametrize("own", ["", "steps: 0\n"])
def test_find_fix_changes_nothing_outside_the_file(
    tmp_path, settings, environ, place, own
):
    """A value or a name from the command line or the environment is the user's: the
    error names its place, also if the file sets the same key.
    """
    (tmp_path / "run.yml").write_text(BASE + own)
    with pytest.raises(ConfigError, match="no legal configuration") as caught:
        find_fix(tmp_path / "run.yml", settings, environ=environ, check=plan)
    assert place in str(caught.value)
    is_value = "stepz" not in str(caught.value)
    assert ("where nothing is changed" in str(caught.value)) == is_value


def test_find_fix_changes_the_file_beside_legal_settings(tmp_path):
    """What is set outside stays, and the fix of the file is legal with it."""
    (tmp_path / "run.yml").write_text(BASE + "per_device_batch_size: 15\n")
    fix = find_fix(tmp_path / "run.yml", ["steps=7"], check=plan)
    assert [(c.key, c.before, c.after) for c in fix.changes] == [
        ("per_device_batch_size", "15", "16")
    ]
    assert fix.text == BASE + "per_device_batch_size: 16\n"
    (tmp_path / "run.yml").write_text(BASE)
    fix = find_fix(tmp_path / "run.yml", ["per_device_batch_size=15"], check=plan)
    (change,) = fix.changes
    assert change.key == "per_device_batch_size_start"
    plan(load_config(fix.file, ["per_device_batch_size=15"], text=fix.text))


LEFT = {
    "banana: 5\n": "banana",
    "remat_policy: banana\n": "remat_policy",
    "steps: many\n": "steps='many'",
}
LEFT |= {"steps: 5\nstepz: 6\n": "stepz", "dataset_type: tokens\n": "grain_train_files"}
LEFT |= {
    "steps: &a 0\nlog_period: *a\n": "steps=0",
    "batch_size_schedule: 5:8\n": "first threshold",
}


@pytest.mark.parametrize(("text", "left"), LEFT.items())
def test_find_fix_names_the_problem_that_is_left(tmp_path, text, left):
    """If no error offers a value that helps, the message gives the remaining
    problem.
    """
    with pytest.raises(
        ConfigError, match="no legal configuration was found near this one"
    ) as caught:
        fixed(tmp_path, text)
    assert left in str(caught.value)


def test_find_fix_raises_the_readers_error(tmp_path):
    """Of a file that is no configuration and of one that is missing."""
    with pytest.raises(ConfigError, match=r"run\.yml:1: .*is a list"):
        fixed(tmp_path, "- 1\n")
    with pytest.raises(ConfigError, match="no such file"):
        find_fix(tmp_path / "nowhere.yml", check=plan)


@pytest.mark.parametrize(
    "text", [BASE + "steps: 0\n# end", BASE + "steps: 0", BASE + "steps: 0\n"]
)
def test_patch_can_be_applied(tmp_path, text):
    """`patch` turns the file into the fixed text, also if its last line has no line
    end.
    """
    fix = fixed(tmp_path, text)
    if shutil.which("patch") is None:
        pytest.skip("there is no `patch` on this machine")
    subprocess.run(
        ["patch", "-p0", str(tmp_path / "run.yml")],
        input=fix.patch.encode(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert (tmp_path / "run.yml").read_text() == fix.text


@given(random_configs.configs())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_find_fix_of_random_values_is_legal_or_refused(tmp_path_factory, values):
    """The result is legal, changes only keys that exist, and leaves every other line as
    it is; nothing else is raised.
    """
    text = random_configs.as_yaml(values)
    try:
        fix = fixed(tmp_path_factory.mktemp("run"), text)
    except RampupError as error:
        assert error.key in KEYS
        return
    changed = {change.key for change in fix.changes}
    assert changed <= set(KEYS)
    for before, after, name in zip(
        text.splitlines()[1:], fix.text.splitlines()[1:], values, strict=False
    ):
        assert before == after or (name in changed and after.endswith(f"  # {name}"))


def test_find_fix_ends(tmp_path):
    """A file with a bad value for every fourth key that takes a number is given up
    after a bounded number of rounds.
    """
    tries, file = [], tmp_path / "run.yml"
    names = [
        name for name, key in KEYS.items() if key.kind in ("int", "size", "float")
    ][::4]
    file.write_text("".join(f"{name}: -7\n" for name in names))
    with pytest.raises(ConfigError, match="no legal configuration"):
        find_fix(file, check=lambda config: tries.append(config) or plan(config))
    assert len(tries) <= 20 + len(names)

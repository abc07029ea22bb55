"""Tests of rampup.contrib.rl.config and rampup.contrib.rl.schedule."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup import load_config
from rampup.config.key import other_names
from rampup.contrib.rl.config import (
    ROLLOUT_FILE,
    ROLLOUT_KEYS,
    RolloutConfig,
    build_rollout_plan,
    build_rollout_schedule,
    is_rollout_file,
    load_rollout_config,
    rollout_notes,
)
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampupError,
    ResumeMismatchError,
)

ROOT = Path(__file__).parents[3]
RL = ROOT / "configs" / "rl.yml"
CASES = json.loads(
    (Path(__file__).parents[2] / "goldens" / "maxtext_rl.json").read_text()
)


def planned(case):
    """Return configuration and plan of a MaxText RL case."""
    config = {
        name: value for name, value in case["config"].items() if name != "rl"
    } | case["config"].get("rl", {})
    config = RolloutConfig(**config, num_prompts=case["dataset_prompts"])
    return config, build_rollout_plan(config, config.ici_fsdp_parallelism)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_plan_agrees_with_maxtext_rl(case):
    """The same file gives MaxText RL's numbers, or an error where it rejects the file
    or its batch does not divide.
    """
    expect = case["expect"]
    if expect["validator"] == "rejects":
        with pytest.raises(RampupError) as caught:
            planned(case)
        assert caught.value.key in ROLLOUT_KEYS
        assert caught.value.nearest
        return
    devices = case["config"].get("ici_fsdp_parallelism", 1)
    if expect["microbatch_samples"][0] % devices:
        with pytest.raises(
            BatchDivisibilityError, match=f"data_parallel_size={devices}"
        ):
            planned(case)
        return
    config, plan = planned(case)
    numbers = plan.to_dict()
    for name in (
        "total_optimizer_steps",
        "accumulation_steps",
        "samples_per_step",
        "weight_syncs",
        "eval_prompts",
    ):
        assert numbers[name] == expect[name], name
    assert [numbers["microbatch_samples"]] == expect["microbatch_samples"]
    assert config.prompts_used == expect["prompts_used"]
    scheduled = f"learning rate for {expect['scheduled_optimizer_steps']:,}"
    notes = " ".join(rollout_notes(config, plan))
    assert (scheduled in notes) == (
        expect["scheduled_optimizer_steps"] != expect["total_optimizer_steps"]
    )


def test_rl_yml_can_be_planned():
    """The shipped configuration can be planned for 1 to 64 devices, and records the
    lines of its keys, also of nested ones.
    """
    config = load_rollout_config(RL)
    file, _, line = config.where("rl.num_iterations").rpartition(":")
    assert (file, RL.read_text().splitlines()[int(line) - 1].strip()) == (
        str(RL),
        "num_iterations: 1",
    )
    for devices in (1, 2, 4, 8, 64):
        plan = build_rollout_plan(config, devices)
        assert plan.policy_updates.optimizer_steps == 2
        assert plan.policy_updates.microbatch_size * devices == 64


def test_is_rollout_file(tmp_path):
    """A rollout's file is recognized by its keys, also through base_config. Every other
    configuration is a ramp's.
    """
    assert is_rollout_file(RL)
    for path in (ROOT / "configs").glob("*.yml"):
        assert is_rollout_file(path) == (path.stem == "rl")
    for text, expected in {
        f"base_config: {RL}": True,
        "rl: {num_generations: 4}": True,
        "rl.num_generations: 4": True,
        "steps: 4": False,
        "num_epoch: 4": False,
        # A key of rollouts, but also what people call the batch of a language model.
        "batch_size: 8": False,
        "batch_size: 8\nmini_batch_size: 4": True,
        "base_config: base.yml\nnum_devices: 4": False,
        "wrong: 4": False,
    }.items():
        (tmp_path / "some.yml").write_text(text)
        assert is_rollout_file(tmp_path / "some.yml") == expected, text
    with pytest.raises(ConfigError, match="configuration of a rollout"):
        load_config(RL)


def test_load_nested_dotted_and_overridden_keys(tmp_path):
    """`rl:` with nested keys, a dotted key, the command line and the environment set
    the same value.
    """
    file = tmp_path / "some.yml"
    for text, overrides, environ, value in [
        ("rl:\n  num_generations: 3", [], {}, 3),
        ("rl.num_generations: 3", [], {}, 3),
        ("rl.num_generations: 3", ["rl.num_generations=4"], {}, 4),
        ("rl.num_generations: 3", [], {"RAMPUP_RL_NUM_GENERATIONS": "5"}, 5),
        (f"base_config: {RL}\nrl: {{num_iterations: 2}}", [], {}, 8),
    ]:
        file.write_text(text)
        assert (
            load_rollout_config(file, overrides, environ=environ).num_generations
            == value
        )


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rl:\n  num_generation: 3", "rl.num_generation"),
        ("rl: 3", "rl"),
        ("rl: null", "rl"),
        ("rl: {num_generations: 3}\nrl.num_generations: 3", "rl.num_generations"),
        ("rl: {num_generations: {a: 1}}", "rl.num_generations"),
        ("batch_sise: 3", "batch_sise"),
        ("batch_size: 3\nsteps: 3", "steps"),
        ("batch_size: null", "batch_size"),
        ("train_fraction: 1.01", "train_fraction"),
        ("train_fraction: 0", "train_fraction"),
        ("batch_size: 4\nnum_prompts: 3", "num_prompts"),
        ("train_fraction: 0.0001", "num_batches"),
        ("microbatch_size: 4\ntoken_budget: 4000", "token_budget"),
        (
            "train_micro_batch_size: 4\nmicrobatch_size: 4\ntoken_budget: 4000",
            "microbatch_size",
        ),
        (
            "batch_size: 4\nnum_test_batches: 2\ntest_batch_start_index: 5",
            "test_batch_start_index",
        ),
    ],
)
def test_load_rejects_bad_files(text, key, tmp_path):
    """Unknown, mistyped and contradictory keys raise errors with file and key."""
    (tmp_path / "bad.yml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_rollout_config(tmp_path / "bad.yml")
    assert caught.value.key == key
    assert "bad.yml" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "partial_step",
        "token_batch_size",
        "token_budget_shapes",
        "experience_dtype",
        "keep_prompts_together",
        "rl.num_generations_schedule",
        "enable_critic",
        "rl.gae_lambda",
        "enable_reference_policy",
        "shuffle_mini_batches",
        "dataset_name",
    ],
)
def test_a_name_that_was_a_key_says_what_replaces_it(name, tmp_path):
    """In a file of a rollout and on the command line."""
    (tmp_path / "a.yml").write_text("batch_size: 4\n")
    (tmp_path / "b.yml").write_text(f"batch_size: 4\n{name}: 1\n")
    for file, overrides in (("a.yml", [f"{name}=1"]), ("b.yml", [])):
        with pytest.raises(ConfigError) as caught:
            load_rollout_config(tmp_path / file, overrides)
        assert other_names()["removed"][name] in str(caught.value)


@pytest.mark.parametrize(
    "name", [name for name, key in ROLLOUT_KEYS.items() if key.kind == "int"]
)
def test_counts_reject_bad_numbers(name):
    """Every count rejects zero if it must be positive, negative numbers, fractions,
    text and huge numbers.
    """
    key = ROLLOUT_KEYS[name]
    bad = (
        [-2, 1.5, "x", True, 10**19, float("nan")]
        + ([] if key.minimum == 0 else [0])
        + ([] if key.nullable else [None])
    )
    bad += [] if key.maximum is None else [int(key.maximum) + 1]
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            RolloutConfig(**{name.removeprefix("rl."): value})
        assert name in str(caught.value)


@given(
    st.fixed_dictionaries(
        {
            name: st.integers(1, 12)
            for name in ("batch_size", "num_batches", "num_epoch", "num_prompts")
        }
    ),
    st.fractions(0, 1) | st.fractions(0, 1, max_denominator=40),
)
def test_num_steps_agrees_with_counting(sizes, fraction):
    """Steps are the full batches of counting prompts one by one. None at all is an
    error.
    """
    total = sizes["num_batches"] * sizes["batch_size"]
    prompts = [i for i in range(total) if i + 1 <= total * fraction][
        : sizes["num_prompts"]
    ] * sizes["num_epoch"]
    steps = len(range(0, len(prompts) - sizes["batch_size"] + 1, sizes["batch_size"]))
    keys = sizes | {"train_fraction": fraction, "num_test_batches": 0}
    try:
        assert RolloutConfig(**keys).num_steps == steps
    except ConfigError as error:
        assert steps == 0
        if fraction >= Fraction(1, 10**18):
            offers = {
                problem.key: problem.nearest[0]
                for problem in error.problems or (error,)
            }
            assert RolloutConfig(**keys | offers).num_steps >= 1


BATCHES = ("mini", "train_micro", "rollout_micro")
SIZES = {"batch_size": st.integers(1, 24), "num_generations": st.integers(1, 6)}
SIZES |= {
    f"{of}_batch_size": st.sampled_from([-1, 1, 2, 3, 4, 6, 8, 12]) for of in BATCHES
}
SIZES |= {
    "pad_microbatches": st.booleans(),
    "ici_tensor_parallelism": st.sampled_from([1, 2]),
}


@given(st.fixed_dictionaries(SIZES), st.integers(1, 16))
def test_build_rollout_plan_returns_a_plan_or_an_error_with_a_key(keys, devices):
    """Any sizes give a plan, or errors that each name a key of the file."""
    try:
        plan = build_rollout_plan(RolloutConfig(**keys), devices)
    except RampupError as error:
        assert all(
            problem.key in ROLLOUT_KEYS for problem in error.problems or (error,)
        )
        return
    assert plan.samples_per_step == keys["batch_size"] * keys["num_generations"]
    shared = keys["ici_tensor_parallelism"]
    assert plan.policy_updates.data_parallel_size * shared == devices
    assert json.dumps(plan.to_dict())


def test_default_sizes():
    """-1 is the size in the documentation of the key: the batch or the mini batch."""
    config = RolloutConfig(batch_size=24, mini_batch_size=12, train_micro_batch_size=4)
    plan = build_rollout_plan(config, 2)
    assert (
        plan.policy_updates.mini_batch_samples,
        plan.policy_updates.microbatch_size,
    ) == (96, 16)
    assert plan.sequences_per_call == 32
    plan = build_rollout_plan(RolloutConfig(batch_size=24), 2)
    assert (
        plan.policy_updates.mini_batch_samples,
        plan.policy_updates.accumulation_steps,
        plan.generate_calls,
    ) == (192, 1, 1)


def test_build_rollout_plan_errors_have_the_location():
    """An error of the plan has file and line of its key."""
    config = load_rollout_config(RL, ["train_micro_batch_size=3"])
    with pytest.raises(
        BatchDivisibilityError, match=r"\[train_micro_batch_size: command line\]"
    ):
        build_rollout_plan(config, 4)
    with pytest.raises(BatchDivisibilityError, match=r"\[batch_size: .*rl.yml:\d+\]"):
        build_rollout_plan(load_rollout_config(RL), 7)
    with pytest.raises(ConfigError, match="num_devices=-1"):
        build_rollout_plan(load_rollout_config(RL))


def test_rollout_notes_about_dropped_prompts():
    """Notes count the prompts that do not fill a batch, in training and in
    evaluation.
    """
    config = RolloutConfig(batch_size=32, num_prompts=100, test_batch_start_index=3)
    notes = " ".join(rollout_notes(config, build_rollout_plan(config, 4)))
    assert "the last 4 prompts, too few for batch_size=32" in notes
    assert "last 29 prompts of an evaluation" in notes
    assert rollout_notes(RolloutConfig(), build_rollout_plan(RolloutConfig(), 4)) == ()


def test_rl_yml_is_current():
    """`python -m rampup.contrib.rl.config configs` writes the file of the repository."""
    assert RL.read_text() == ROLLOUT_FILE.text


def test_schedule_counts_every_optimizer_step_once():
    """Steps are those of the plans, over stages of growing batches."""
    sizes = {
        "batch_size": 16,
        "num_generations": 4,
        "num_batches": 7,
        "mini_batch_size": 4,
        "train_micro_batch_size": 2,
    }
    growth = {"batch_size_schedule": "0:4 2:8 5:16"}
    schedule = build_rollout_schedule(
        RolloutConfig(**sizes, **growth, num_iterations=2), 1
    )
    samples, position = 0, 0
    responses = 4
    for rollout, batch in enumerate([4, 4, 8, 8, 8, 16, 16]):
        updates = batch // 4 * 2
        for update in range(updates):
            at = schedule.at(position)
            assert (at.rollout, at.update) == (rollout, update)
            assert at.consumed_samples == samples
            assert at.is_first == (update == 0)
            assert at.is_last == (update == updates - 1)
            assert at.split.global_batch_size == 4 * responses
            position += 1
        samples += batch * responses
    assert (schedule.total_steps, schedule.consumed_samples, schedule.num_rollouts) == (
        position,
        samples,
        7,
    )
    # One shape for all stages: a pass of 2 * 4 samples.
    assert (
        schedule.pass_samples,
        schedule.sequences_per_call,
        schedule.max_samples,
    ) == (8, 8, 64)
    assert schedule.ramp_plan().splits[0].accumulation_steps == 2
    with pytest.raises(ResumeMismatchError):
        schedule.at(position)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"batch_size_schedule": "1:4 2:8"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 0:16"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 4:64"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:0"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "many"}, "rl.batch_size_schedule"),
        ({"batch_size_schedule": "0:8 4:12", "mini_batch_size": 8}, "mini_batch_size"),
        ({"batch_size_schedule": "0:8 auto"}, "rl.batch_size_schedule"),
    ],
)
def test_schedule_rejects_bad_growth(settings, key):
    """Every error names the key; sizes of a later stage that do not divide name its
    prompts.
    """
    with pytest.raises(ValueError, match=r"\d") as caught:
        build_rollout_schedule(RolloutConfig(**settings), 1)
    assert key in str(caught.value) or caught.value.key == key


def test_a_plan_says_that_groups_of_one_sample_teach_nothing():
    """`train` refuses them, so a plan has a note."""
    config = RolloutConfig(num_generations=1)
    notes = rollout_notes(config, build_rollout_plan(config, 1))
    assert "rl.num_generations=1 gives groups of one sample" in notes[0]


@pytest.mark.parametrize(
    "greedy", [{"decode_sampling_temperature": 0.0}, {"decode_sampling_top_k": 1}]
)
def test_a_plan_says_that_greedy_samples_teach_nothing(greedy):
    """`train` refuses them too."""
    config = RolloutConfig(**greedy)
    (note,) = rollout_notes(config, build_rollout_plan(config, 1))
    ((key, value),) = greedy.items()
    assert f"{key}={value:g}" in note
    assert "sample greedily" in note

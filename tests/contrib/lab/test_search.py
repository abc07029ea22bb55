"""Tests of rampup.contrib.lab.search."""

import json
import math

import jax
import pytest
from helpers.tiny import TUNED, command_line

from rampup import Config, build_plan
from rampup.cli import main
from rampup.contrib.lab.largest import MARGIN, memory_limit
from rampup.contrib.lab.programs import Trial
from rampup.contrib.lab.search import one_shape, problem_of, tune
from rampup.contrib.lab.topology import compiler_version, topology_devices
from rampup.errors import BatchDivisibilityError, ConfigError, MissingDependencyError
from rampup.lm.train import unconstrained
from rampup.plan.numbers import GIB

RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 4,
    "per_device_batch_size_increment": 4,
}
RAMP |= {"per_device_batch_size": 16}
CONFIGS = {
    "ramp": RAMP,
    "constant": {"enable_rampup_batch_size": False},
    "accumulating": RAMP | {"gradient_accumulation_steps": 4},
    "auto": RAMP | {"rampup_microbatch": "auto"},
    "per_phase": RAMP | {"rampup_microbatch": "per_phase"},
    "schedule": {"batch_size_schedule": "0:96 200:32 500:160"},
    "pipeline": RAMP | {"ici_pipeline_parallelism": 2, "base_num_decoder_layers": 2},
    "pipeline, m given": (
        RAMP
        | {
            "ici_pipeline_parallelism": 2,
            "num_pipeline_microbatches": 2,
            "base_num_decoder_layers": 2,
        }
    ),
    "unreached": RAMP | {"steps": 3},
}


@pytest.mark.parametrize("eval_interval", [-1, 10])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_tried_keeps_the_ramp(name, eval_interval):
    """Every configuration is legal, with the same batches at the same steps, in
    microbatches that divide them.
    """
    config = Config(eval_interval=eval_interval, **CONFIGS[name])
    plan = build_plan(config, 4)
    shared = one_shape(config, plan)
    assert shared
    for size, made in shared.items():
        again = build_plan(made, 4)
        assert again.ramp.phases == plan.ramp.phases
        if again.eval_split is not None:
            assert again.eval_split.microbatch_size <= size
        assert {split.microbatch_size for split in again.splits} == {size}
        legal = unconstrained(plan.splitter).legal_microbatches
        for split, batch in zip(again.splits, plan.ramp.sizes, strict=True):
            assert split.global_batch_size == batch
            assert split.microbatch_size in legal([batch])


def test_every_size_that_divides_all_phases_is_tried():
    """A larger one for the last phase alone is found without the ramp."""
    config = Config(**RAMP)
    assert list(one_shape(config, build_plan(config, 4))) == [1, 2, 4]
    constant = Config(**RAMP | {"enable_rampup_batch_size": False})
    assert max(one_shape(constant, build_plan(constant, 4))) == 16


@pytest.fixture(scope="module")
def trial():
    """The tiny configuration in microbatches of 2 on one device."""
    config = Config(**TUNED)
    plan = build_plan(config, 1)
    made = one_shape(config, plan)[2]
    return Trial(made, build_plan(made, 1), jax.devices()[:1])


def test_the_time_of_a_step_is_on_a_line(trial):
    """Through the timed numbers of microbatches; it is infinite if none was timed."""
    for split in trial.plan.splits:
        number = split.num_microbatches
        assert trial.step_seconds(split, {1: 2.0, 2: 3.0}) == pytest.approx(1 + number)
        assert trial.step_seconds(split, {2: 3.0}) == pytest.approx(1.5 * number)
        assert trial.step_seconds(split, {}) == math.inf


@pytest.mark.slow
def test_tune_recommends_settings_that_fit_and_were_timed(trial, capsys):
    """`rampup tune --json`: settings of a plan whose microbatches fit; every phase has
    its memory and throughput.
    """
    settings = command_line(TUNED | {"enable_rampup_batch_size": False})
    # A byte less than the microbatch of 2 takes.
    memory = f"--memory-gib={int((trial.bytes - 1) / (1 - MARGIN))}/{GIB}"
    arguments = ["tune", "base.yml", *settings, memory, "--devices", "1", "--json"]
    assert main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "error" not in facts
    fits = {row["microbatch_size"]: row["fits"] for row in facts["candidates"]}
    assert fits == {1: True, 2: False}
    assert (facts["largest_microbatch"], facts["next_larger"]) == (1, 2)
    plan = build_plan(Config(**TUNED | facts["settings"]), 1)
    assert [row["microbatch_size"] for row in facts["phases"]] == [
        split.microbatch_size for split in plan.splits
    ]
    assert all(
        row["bytes"] <= facts["usable_bytes"] and row["tokens_per_second"] > 0
        for row in facts["phases"]
    )
    assert all(row["step_seconds"] > 0 for row in facts["phases"])


@pytest.mark.parametrize(
    "memory_gib", ["0", "-1", "1e-10", "1e7", "much", "nan", "inf", "", "1/0"]
)
def test_memory_limit_rejects_invalid_sizes(memory_gib):
    """Zero, negative, too large or not a number: the error names the option. Of several
    devices the smallest limit counts.
    """
    small, large = (
        type("Device", (), {"memory_stats": lambda self, n=n: {"bytes_limit": n}})()
        for n in (5, 7)
    )
    assert memory_limit(None, [large, small]) == 5
    with pytest.raises((ConfigError, ValueError)) as caught:
        memory_limit(memory_gib, [large])
    assert caught.value.key == "memory-gib"


@pytest.mark.parametrize(
    ("keys", "options", "error", "message"),
    [
        (
            {},
            {"num_devices": 1},
            ConfigError,
            r"no memory limit of its own.*--memory-gib 16",
        ),
        ({}, {"memory_gib": 1, "num_devices": 9}, ConfigError, "from 1 to 8"),
        (
            {"gradient_accumulation": "multi_steps"},
            {"memory_gib": 1},
            ConfigError,
            "multi_steps is not tuned",
        ),
        (
            {},
            {"memory_gib": 1, "num_devices": 8},
            BatchDivisibilityError,
            "data_parallel_size",
        ),
        (
            {"num_devices": 8},
            {"topology": "v5e:2x2"},
            ConfigError,
            "num_devices=8, but topology=v5e:2x2 has 4",
        ),
    ],
)
def test_tune_rejects_what_cannot_be_tuned(keys, options, error, message):
    """A CPU has no memory limit of its own; devices must exist; only the fused engine
    is tuned.
    """
    with pytest.raises(error, match=message):
        tune(Config(**TUNED | keys), **options)


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("0.0.21.1", True), ("0.0.9", True), ("0.0.23", False), ("0.1", False)],
)
def test_old_libtpu_is_refused(monkeypatch, version, is_old):
    """Versions before that of JAX 0.7.2, such as Colab's, end the process in a
    compilation, and are refused before it.
    """
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    if not is_old:
        assert compiler_version() == f"libtpu {version}"
        return
    with pytest.raises(
        MissingDependencyError,
        match=rf"libtpu {version} cannot.*0\.0\.23.*'rampup\[tpu-compile\]'",
    ):
        topology_devices("v5e:2x2")


@pytest.mark.slow
def test_nothing_fits_says_how_much_is_needed_and_what_saves_memory():
    """One byte less than the smallest microbatch needs: no settings, and an error with
    the bytes and the keys that save some.
    """
    config = Config(**TUNED)
    made = one_shape(config, build_plan(config, 1))[1]
    needs = Trial(made, build_plan(made, 1), jax.devices()[:1]).bytes
    limit = math.ceil((needs - 1) / (1 - MARGIN))
    found = tune(config, memory_gib=f"{limit}/{GIB}", num_devices=1)
    assert (found["largest_microbatch"], found["settings"]) == (None, None)
    problem = problem_of(found)
    assert f"microbatch_size=1 needs {needs:,} bytes" in str(problem)
    assert "shard_optimizer_over_data" in str(problem)
    assert problem.key == "microbatch_size"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--memory-options", "remat_policy=full"), ("-o=memory.png", "draws no picture")],
)
def test_options_that_went_say_what_to_do(option, said, capsys):
    """The error of an option that there was names what is there instead."""
    assert main(["tune", "base.yml", "--memory-gib", "1", option]) == 2
    assert said in " ".join(capsys.readouterr().err.split())

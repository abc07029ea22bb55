"""Tests of rampup.config.build, refusal and resume."""

import contextlib

import pytest
from helpers.runs import recorded

from rampup import Config, build_plan
from rampup.config import devices as devices_of
from rampup.config.draft import plan_or_first_error
from rampup.config.resume import plan_to_resume, possible_devices
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampupError,
    ResumeMismatchError,
)


def test_noise_of_stages_names_both_keys_that_make_them():
    """A value of one key is not offered, as the other may need one as well."""
    with pytest.raises(
        ConfigError, match="and dcn_pipeline_parallelism to 1"
    ) as caught:
        build_plan(Config(measure_gradient_noise=True, dcn_pipeline_parallelism=2), 4)
    assert caught.value.nearest == ()


def test_tensor_parallelism_allows_fractions_of_a_sample_per_device():
    """Half a sample per device is legal if two devices share a sample, and refused
    otherwise.
    """
    keys = {
        "per_device_batch_size_start": 0.5,
        "per_device_batch_size_increment": 0.5,
        "per_device_batch_size": 2,
    }
    keys |= {"enable_rampup_batch_size": True, "global_rampup_samples": 500}
    assert build_plan(Config(**keys, ici_tensor_parallelism=2), 8).ramp.sizes == (
        4,
        8,
        12,
        16,
    )
    with pytest.raises(BatchDivisibilityError, match="data_parallel_size = 8"):
        build_plan(Config(**keys), 8)


@pytest.mark.core
def test_build_plan_reports_all_problems_at_once():
    """Layers, pipeline microbatches and batch are all named."""
    bad = {
        "base_num_decoder_layers": 7,
        "num_pipeline_microbatches": 3,
        "per_device_batch_size": 0.3,
    }
    with pytest.raises(RampupError, match="3 problems") as caught:
        build_plan(Config(**bad, ici_pipeline_parallelism=2), 8)
    assert [problem.key for problem in caught.value.problems] == list(bad)


@pytest.mark.core
@pytest.mark.parametrize(
    ("keys", "error", "key"),
    [
        ({"microbatch_size": 5}, BatchDivisibilityError, "microbatch_size"),
        ({"ici_tensor_parallelism": 3}, BatchDivisibilityError, "num_devices"),
        (
            {"num_pipeline_microbatches": 3},
            PipelineShapeError,
            "num_pipeline_microbatches",
        ),
        (
            {"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 6},
            PipelineShapeError,
            "num_pipeline_microbatches",
        ),
        (
            {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 6},
            PipelineShapeError,
            "base_num_decoder_layers",
        ),
    ],
)
def test_build_plan_error_names_the_key(keys, error, key):
    """The error about each rule names the key that a user would change."""
    with pytest.raises(error) as caught:
        build_plan(Config(**keys), 4)
    assert caught.value.key == key


def test_build_plan_lists_the_order_and_the_sizes_of_a_schedule():
    """Every threshold in the wrong order, every size that does not divide and every bad
    entry are in one list.
    """
    keys = {"batch_size_schedule": "0:17 500:25 400:50 300:64", "microbatch_size": 8}
    with pytest.raises(RampupError) as caught:
        build_plan(Config(**keys), 8)
    texts = list(map(str, caught.value.problems))
    assert [
        "sample 400 comes after sample 500" in texts[0],
        "sample 300 comes after sample 400" in texts[1],
    ] == [True, True]
    assert [problem.value for problem in caught.value.problems[2:]] == [17, 25, 50]
    # A microbatch is checked once the devices can share the batches.
    keys["batch_size_schedule"] = "0:16 500:24 600:64"
    with pytest.raises(BatchDivisibilityError, match="nearest: 1 ") as caught:
        build_plan(Config(**keys), 8)
    assert (caught.value.key, caught.value.nearest) == ("microbatch_size", (1,))
    with pytest.raises(RampupError, match="2 problems"):
        build_plan(Config(batch_size_schedule="0:16 500 x:24"), 8)


def test_build_plan_says_what_a_refused_mesh_hides():
    """Without a mesh no batch size can be checked; an evaluation batch of its own is in
    the list of the ramp's problems.
    """
    mesh = {
        "ici_tensor_parallelism": 3,
        "per_device_batch_size": 15.5,
        "enable_rampup_batch_size": False,
    }
    with pytest.raises(
        RampupError, match="the batch sizes are checked again once the mesh is legal"
    ) as caught:
        build_plan(
            Config(
                **mesh,
                sources={
                    "ici_tensor_parallelism": "command line",
                    "num_devices": "a.yml:3",
                },
            ),
            8,
        )
    assert "[ici_tensor_parallelism: command line]" in str(caught.value)
    with pytest.raises(RampupError) as caught:
        build_plan(Config(batch_size_schedule="0:9", eval_per_device_batch_size=0.3), 8)
    assert [problem.key for problem in caught.value.problems] == [
        "batch_size_schedule",
        "eval_per_device_batch_size",
    ]


def test_build_plan_checks_sizes_that_no_step_reaches():
    """With the offered size, a step would reach them. They do not matter if all other
    sizes are legal.
    """
    with pytest.raises(RampupError) as caught:
        build_plan(Config(batch_size_schedule="0:65 1:1 50:2 65:64 500:8"), 2)
    assert [(problem.value, problem.nearest) for problem in caught.value.problems] == [
        (65, (64, 66)),
        (1, (2,)),
    ]
    assert "from sample 1, jumped over" in str(caught.value)
    assert build_plan(Config(batch_size_schedule="0:64 1:1 64:8"), 2).ramp.sizes == (
        64,
        8,
    )


def test_build_plan_offers_only_values_that_a_file_can_have():
    """A legal number of devices that exceeds the limit of the key is not offered."""
    with pytest.raises(
        BatchDivisibilityError, match="num_devices=1 must be a multiple"
    ) as caught:
        build_plan(
            Config(
                dcn_pipeline_parallelism=200_000, dcn_data_parallelism=5 * 10**12 + 1
            ),
            1,
        )
    assert caught.value.nearest == ()


def test_build_plan_needs_a_number_of_devices():
    """A number of devices below 1 is refused."""
    with pytest.raises(ConfigError, match="num_devices=-1 must be at least 1"):
        build_plan(Config())
    assert build_plan(Config(num_devices=4)).num_devices == 4


def test_whole_batches_have_one_microbatch_and_say_what_they_cost():
    """In every phase and in evaluation, without a shape to fall back to; what needs
    several microbatches is refused.
    """
    keys = {"batch_size_schedule": "0:16 64:32", "rampup_microbatch": "whole"}
    plan = build_plan(Config(**keys), 4)
    assert [
        (s.num_microbatches, s.microbatch_size) for s in (*plan.splits, plan.eval_split)
    ] == [(1, 4), (1, 8), (1, 8)]
    assert plan.max_microbatches == {4: 1, 8: 1}
    assert "each batch size compiles its own program, 2 in all" in str(plan)
    assert "up to 8 samples" in str(plan)
    # What is wrong with stages is not one key: the devices may need both of them.
    for contrary, key in {
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "ici_pipeline_parallelism": "rampup_microbatch",
        "microbatch_size": "microbatch_size",
    }.items():
        with pytest.raises(
            ConfigError,
            match="rampup_microbatch=whole makes every batch one microbatch",
        ) as caught:
            build_plan(Config(**keys, **{contrary: 2}), 4)
        assert caught.value.key == key
    with pytest.raises(ConfigError, match=r"one stage .*set both to 1") as caught:
        build_plan(Config(**keys, dcn_pipeline_parallelism=2), 4)
    assert caught.value.nearest == ()
    for contrary in (
        {"measure_gradient_noise": True},
        {"gradient_accumulation": "multi_steps"},
    ):
        with pytest.raises(ConfigError, match="rampup_microbatch=whole"):
            Config(**keys, **contrary)


def test_build_plan_ignores_the_evaluation_batch_if_evaluation_is_off():
    """An evaluation batch that cannot be split matters only if evaluation is on or its
    size is set.
    """
    keys = {
        "per_device_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "microbatch_size": 2,
    }
    assert build_plan(Config(**keys, eval_interval=-1), 1).eval_split is None
    with pytest.raises(BatchDivisibilityError, match="eval_per_device_batch_size"):
        build_plan(Config(**keys), 1)
    with pytest.raises(BatchDivisibilityError, match="eval_per_device_batch_size"):
        build_plan(Config(**keys, eval_interval=-1, eval_per_device_batch_size=0.3), 1)
    with pytest.raises(
        BatchDivisibilityError, match=r"gives 1\.2 samples \(num_devices = 4\)"
    ):  # it is not accumulated
        build_plan(
            Config(gradient_accumulation_steps=4, eval_per_device_batch_size=0.3), 4
        )


SCHEDULE = {"batch_size_schedule": "0:16 160:32 800:64", "steps": 60}
LINEAR = {"enable_rampup_batch_size": True, "steps": 60, "global_rampup_samples": 800}


def written(config, devices, step):
    """Return the record in the checkpoint of a step of a run on these devices."""
    return recorded(config, build_plan(config, devices), step)


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        (SCHEDULE, 8),
        (LINEAR | {"ici_tensor_parallelism": 2, "dcn_data_parallelism": 2}, 8),
        (LINEAR | {"ici_fsdp_parallelism": 3, "microbatch_size": 1}, 3),
        (LINEAR | {"ici_data_parallelism": 2, "ici_tensor_parallelism": -1}, 4),
        (LINEAR | {"ici_data_parallelism": 4}, 4),
        (LINEAR | {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 4}, 4),
        (
            {
                "batch_size_schedule": "auto",
                "per_device_batch_size_start": 3,
                "per_device_batch_size": 12,
            },
            4,
        ),
        ({"seesaw_factor": 2, "steps": 60}, 4),
    ],
    ids=[
        "schedule",
        "slices",
        "fsdp",
        "open tensor",
        "no open axis",
        "pipeline",
        "auto",
        "seesaw",
    ],
)
def test_possible_devices_are_those_that_resume(keys, devices):
    """A checkpoint resumes on each of these numbers, with its ramp, and on no other
    one; a fresh run names the same ones.
    """
    config = Config(**keys)
    record, can = written(config, devices, 5), []
    for number in range(
        1, 4 * devices + 1 if config.ici_tensor_parallelism == -1 else 130
    ):
        with contextlib.suppress(RampupError):
            plan = plan_to_resume(config, number, record)
            assert (plan.ramp.to_rows(), plan.eval_global_batch_size) == (
                record["ramp"],
                record["eval_global_batch_size"],
            )
            assert plan.num_devices == number
            can.append(number)
    assert devices in can
    assert possible_devices(config, build_plan(config, devices)) == can


def test_possible_devices_builds_one_plan_for_each_number(monkeypatch):
    """A number that is refused does not start another search."""
    config = Config(**SCHEDULE, microbatch_size=4)
    plan, numbers = build_plan(config, 4), []
    monkeypatch.setattr(
        devices_of,
        "plan_or_first_error",
        lambda draft: numbers.append(draft.num_devices) or plan_or_first_error(draft),
    )
    assert possible_devices(config, plan) == [1, 2, 4]
    assert numbers == [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"batch_size_schedule": "0:64", "on_plan_change": "continue_by_samples"},
        {
            "batch_size_schedule": "0:2 18:128",
            "on_plan_change": "continue_by_samples",
        },
    ],
    ids=["same ramp", "no small batches", "other sizes"],
)
def test_more_devices_after_the_batch_has_grown(change):
    """A run that has left its small batches goes on where those to come can be split,
    with the same ramp or another; before, it is refused with the devices that can.
    """
    keys = {"batch_size_schedule": "0:2 18:64", "steps": 14}
    config, changed = Config(**keys), Config(**(keys | change))
    plan = plan_to_resume(changed, 8, written(config, 2, 10))
    size = plan.ramp.sizes[-1]
    assert plan.ramp.to_rows()[0] == [0, 0, 2]
    assert plan.position(11).split.global_batch_size == size
    assert plan.position(11).split.data_parallel_size == 8
    if changed.batch_size_schedule != "0:64":
        with pytest.raises(RampupError) as caught:
            plan_to_resume(changed, 8, written(config, 2, 8))
        assert "global_batch_size=2 (phase 0" in str(caught.value)
    with pytest.raises(RampupError) as caught:
        plan_to_resume(changed, 3, written(config, 2, 10))
    if not change:
        assert caught.value.nearest == (2, 4)
        assert "1, 2, 4, 8, 16, 32, 64" in str(caught.value)


@pytest.mark.core
def test_plan_to_resume_refuses_another_ramp_with_both_tables():
    """The message has the keys and the phases before and now."""
    changed = Config(**(SCHEDULE | {"batch_size_schedule": "0:16 160:48"}))
    with pytest.raises(ResumeMismatchError) as caught:
        plan_to_resume(changed, 8, written(Config(**SCHEDULE), 8, 5))
    for text in (
        "0:16 160:32 800:64 -> 0:16 160:48",
        "from sample 160: 32",
        "from sample 160: 48",
        "restore the keys, as `rampup train RUN_DIR` does, or",
    ):
        assert text in str(caught.value)
    assert caught.value.key == "on_plan_change"


def test_plan_to_resume_accepts_other_keys_of_the_same_ramp():
    """The same table from a schedule is the same ramp."""
    linear = Config(**LINEAR)
    ramp = build_plan(linear, 4).ramp
    text = " ".join(
        f"{phase.start_sample}:{phase.global_batch_size}" for phase in ramp.phases
    )
    same = Config(batch_size_schedule=text, steps=60)
    assert (
        plan_to_resume(same, 4, written(linear, 4, 3)).ramp.to_rows() == ramp.to_rows()
    )


@pytest.mark.parametrize("step", [0, 1, 9, 10, 11, 30, 31, 50])
def test_continue_by_samples_looks_sizes_up_by_samples(step):
    """Consumed samples are kept, and each later step has the size of the new schedule
    at its samples.
    """
    config = Config(
        **(
            SCHEDULE
            | {
                "batch_size_schedule": "0:8 200:48 900:96",
                "on_plan_change": "continue_by_samples",
            }
        )
    )
    before, wanted = build_plan(Config(**SCHEDULE), 8).ramp, build_plan(config, 8).ramp
    ramp = plan_to_resume(config, 8, written(Config(**SCHEDULE), 8, step)).ramp
    assert ramp.samples_before(step) == before.samples_before(step)
    consumed = ramp.samples_before(step)
    for later in range(step, step + 60):
        assert ramp.samples_before(later) == consumed
        assert (
            ramp.global_batch_size_at(later)
            == wanted.phase_of_sample(consumed).global_batch_size
        )
        consumed += ramp.global_batch_size_at(later)


@pytest.mark.parametrize("schedule", ["0:16 160:32", "0:16 160:32 640:64 900:128"])
def test_a_continued_ramp_keeps_the_batch_of_its_rates(schedule):
    """With a `batch_scaling`, another last batch is refused until the old one is named;
    the rate of every batch is then that of before.
    """
    keys = {"batch_size_schedule": "0:16 160:32 640:64", "batch_scaling": "sqrt"}
    config = Config(**keys, steps=60)
    record = written(config, 2, 24)
    changed = keys | {
        "batch_size_schedule": schedule,
        "on_plan_change": "continue_by_samples",
    }
    with pytest.raises(
        ResumeMismatchError, match="set batch_scaling_reference=64 to keep the rates"
    ) as caught:
        plan_to_resume(Config(**changed, steps=60), 2, record)
    assert (caught.value.key, caught.value.nearest) == (
        "batch_scaling_reference",
        (64,),
    )
    named = Config(**changed, steps=60, batch_scaling_reference=64)
    plan = plan_to_resume(named, 2, record)
    before = build_plan(config, 2)
    assert plan.segment_at(23).scale == before.segment_at(23).scale
    # Named or not, it is the reference of the same ramp; without scaling, of nothing.
    plan_to_resume(Config(**keys, steps=60, batch_scaling_reference=64), 2, record)
    plan_to_resume(Config(**(changed | {"batch_scaling": "none"})), 2, record)
    again = recorded(named, plan, 30)
    with pytest.raises(ResumeMismatchError, match="batch_scaling_reference=64"):
        plan_to_resume(Config(**changed, steps=60), 2, again)
    plan_to_resume(named, 2, again)


def test_plan_to_resume_keeps_a_continued_ramp():
    """If the keys have not changed since, the recorded ramp is used, including its
    past.
    """
    config = Config(
        **(
            SCHEDULE
            | {
                "batch_size_schedule": "0:8 200:48",
                "on_plan_change": "continue_by_samples",
            }
        )
    )
    plan = plan_to_resume(config, 8, written(Config(**SCHEDULE), 8, 12))
    kept = Config(**(SCHEDULE | {"batch_size_schedule": "0:8 200:48"}))
    assert (
        plan_to_resume(kept, 4, recorded(config, plan, 20)).ramp.to_rows()
        == plan.ramp.to_rows()
    )


def test_plan_to_resume_keeps_the_sizes_of_a_batch_that_follows_the_noise():
    """On other devices the sizes are those of the run; keys that `auto` does not read
    may change; new sizes need a decision.
    """
    keys = {
        "batch_size_schedule": "auto",
        "per_device_batch_size_start": 2,
        "per_device_batch_size": 8,
    }
    record = written(Config(**keys), 8, 40) | {"ramp": [[0, 0, 16], [20, 320, 32]]}
    for devices in (8, 4, 2):
        plan = plan_to_resume(
            Config(**keys, enable_rampup_batch_size=False, global_rampup_samples=7),
            devices,
            record,
        )
        assert (plan.reserved_sizes, plan.ramp.sizes, plan.num_devices) == (
            (16, 32, 64),
            (16, 32),
            devices,
        )
        record = recorded(Config(**keys), plan, 40)
    with pytest.raises(
        ResumeMismatchError,
        match=r"num_devices=6; numbers .* all of them: 1, 2, 4, 8, 16"
        r" \(rampup train --fake-devices N simulates N on a CPU\)\. ",
    ) as caught:
        plan_to_resume(Config(**keys), 6, record)
    assert caught.value.nearest == (4, 8)
    larger = keys | {"per_device_batch_size": 16}
    with pytest.raises(ResumeMismatchError, match="per_device_batch_size: 8 -> 16"):
        plan_to_resume(Config(**larger), 8, record)
    plan = plan_to_resume(
        Config(**larger, on_plan_change="continue_by_samples"), 8, record
    )
    assert (plan.reserved_sizes, plan.ramp.sizes) == ((16, 32, 64, 128), (16, 32))


def test_phases_that_are_over_need_no_split_with_seesaw_either():
    """Their sizes are checked neither in the planned ramp nor after the transform."""
    keys = {"batch_size_schedule": "0:8 80:16 400:32", "steps": 40}
    keys |= {"seesaw_factor": 2, "seesaw_max_batch_size": 64}
    config = Config(**keys, lr_schedule_type="cosine")
    with pytest.raises(BatchDivisibilityError, match="must be a multiple"):
        build_plan(config, num_devices=16)
    assert build_plan(config, num_devices=16, consumed_samples=100).ramp.sizes_to_come


@pytest.mark.parametrize(
    "keys", [{"num_pipeline_microbatches": 2}, {"num_pipeline_repeats": 2}]
)
def test_a_pipeline_that_the_devices_do_not_allow_is_no_second_problem(keys):
    """What the keys of the pipeline need is judged by a mesh that there is."""
    config = Config(ici_pipeline_parallelism=2, **keys)
    with pytest.raises(RampupError) as refused:
        build_plan(config, 5)
    assert str(refused.value).startswith("devices per slice")
    assert "problems" not in str(refused.value)

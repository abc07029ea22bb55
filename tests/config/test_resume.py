"""Tests of rampup.config.resume."""

import contextlib

import pytest
from helpers.runs import recorded

from rampup import Config, build_plan
from rampup.config import resume
from rampup.config.build import plan_or_first_error
from rampup.config.resume import plan_to_resume, possible_devices
from rampup.errors import BatchDivisibilityError, RampupError, ResumeMismatchError

SCHEDULE = {"batch_size_schedule": "0:16 160:32 800:64", "steps": 60}
LINEAR = {"enable_rampup_batch_size": True, "steps": 60, "global_rampup_samples": 800}


def written(config, devices, step):
    """Return the record in the checkpoint of a step of a run on these devices."""
    return recorded(config, build_plan(config, devices), step)


def test_plan_to_resume_names_the_devices_that_can_split_the_batches():
    """16, 32 and 64 samples do not divide over 6 devices; the error lists all numbers over which they do."""
    config = Config(**SCHEDULE)
    with pytest.raises(ResumeMismatchError, match=r"num_devices=6; numbers .* all of them: 1, 2, 4, 8, 16\. ") as caught:
        plan_to_resume(config, 6, written(config, 8, 5))
    assert caught.value.nearest == (4, 8)


@pytest.mark.parametrize(
    ("keys", "devices"),
    [
        (SCHEDULE, 8),
        (LINEAR | {"ici_tensor_parallelism": 2, "dcn_data_parallelism": 2}, 8),
        (LINEAR | {"ici_fsdp_parallelism": 3, "microbatch_size": 1}, 3),
        (LINEAR | {"ici_data_parallelism": 2, "ici_tensor_parallelism": -1}, 4),
        (LINEAR | {"ici_data_parallelism": 4}, 4),
        (LINEAR | {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 4}, 4),
        ({"batch_size_schedule": "auto", "per_device_batch_size_start": 3, "per_device_batch_size": 12}, 4),
        ({"seesaw_factor": 2, "steps": 60}, 4),
    ],
    ids=["schedule", "slices", "fsdp", "open tensor", "no open axis", "pipeline", "auto", "seesaw"],
)
def test_possible_devices_are_those_that_resume(keys, devices):
    """A checkpoint resumes on each of these numbers, with its ramp, and on no other one; a fresh run names the same ones."""
    config = Config(**keys)
    record, can = written(config, devices, 5), []
    for number in range(1, 4 * devices + 1 if config.ici_tensor_parallelism == -1 else 130):
        with contextlib.suppress(RampupError):
            plan = plan_to_resume(config, number, record)
            assert (plan.ramp.to_rows(), plan.eval_global_batch_size) == (record["ramp"], record["eval_global_batch_size"])
            assert plan.num_devices == number
            can.append(number)
    assert devices in can
    assert possible_devices(config, build_plan(config, devices)) == can


def test_possible_devices_builds_one_plan_for_each_number(monkeypatch):
    """A number that is refused does not start another search."""
    config = Config(**SCHEDULE, microbatch_size=4)
    plan, numbers = build_plan(config, 4), []
    monkeypatch.setattr(
        resume, "plan_or_first_error", lambda *args, **keys: numbers.append(args[1]) or plan_or_first_error(*args, **keys)
    )
    assert possible_devices(config, plan) == [1, 2, 4]
    assert numbers == [1, 2, 4, 8, 16]


def test_a_run_on_devices_that_cannot_run_a_phase_names_those_that_can():
    """The sizes of a schedule do not follow the devices, so a fresh run can say where they run; not if no number helps."""
    with pytest.raises(BatchDivisibilityError, match=r"devices that can run these batches: 1, 2, 4, 8, 16$"):
        build_plan(Config(**SCHEDULE), 3)
    for keys in ({**SCHEDULE, "microbatch_size": 5}, {**LINEAR, "per_device_batch_size": "17/3"}):
        with pytest.raises(RampupError) as caught:
            build_plan(Config(**keys), 2)
        assert "devices that can run" not in str(caught.value)


def test_plan_to_resume_refuses_another_ramp_with_both_tables():
    """The message has the keys and the phases before and now."""
    changed = Config(**(SCHEDULE | {"batch_size_schedule": "0:16 160:48"}))
    with pytest.raises(ResumeMismatchError) as caught:
        plan_to_resume(changed, 8, written(Config(**SCHEDULE), 8, 5))
    for text in ("0:16 160:32 800:64 -> 0:16 160:48", "from sample 160: 32", "from sample 160: 48"):
        assert text in str(caught.value)
    assert caught.value.key == "on_plan_change"


def test_plan_to_resume_accepts_other_keys_of_the_same_ramp():
    """The same table from a schedule is the same ramp."""
    linear = Config(**LINEAR)
    ramp = build_plan(linear, 4).ramp
    text = " ".join(f"{phase.start_sample}:{phase.global_batch_size}" for phase in ramp.phases)
    same = Config(batch_size_schedule=text, steps=60)
    assert plan_to_resume(same, 4, written(linear, 4, 3)).ramp.to_rows() == ramp.to_rows()


@pytest.mark.parametrize("step", [0, 1, 9, 10, 11, 30, 31, 50])
def test_continue_by_samples_looks_sizes_up_by_samples(step):
    """Consumed samples are kept, and each later step has the size of the new schedule at its samples."""
    config = Config(**(SCHEDULE | {"batch_size_schedule": "0:8 200:48 900:96", "on_plan_change": "continue_by_samples"}))
    before, wanted = build_plan(Config(**SCHEDULE), 8).ramp, build_plan(config, 8).ramp
    ramp = plan_to_resume(config, 8, written(Config(**SCHEDULE), 8, step)).ramp
    assert ramp.samples_before(step) == before.samples_before(step)
    consumed = ramp.samples_before(step)
    for later in range(step, step + 60):
        assert ramp.samples_before(later) == consumed
        assert ramp.global_batch_size_at(later) == wanted.phase_of_sample(consumed).global_batch_size
        consumed += ramp.global_batch_size_at(later)


def test_plan_to_resume_keeps_a_continued_ramp():
    """If the keys have not changed since, the recorded ramp is used, including its past."""
    config = Config(**(SCHEDULE | {"batch_size_schedule": "0:8 200:48", "on_plan_change": "continue_by_samples"}))
    plan = plan_to_resume(config, 8, written(Config(**SCHEDULE), 8, 12))
    kept = Config(**(SCHEDULE | {"batch_size_schedule": "0:8 200:48"}))
    assert plan_to_resume(kept, 4, recorded(config, plan, 20)).ramp.to_rows() == plan.ramp.to_rows()


def test_plan_to_resume_keeps_the_sizes_of_a_batch_that_follows_the_noise():
    """On other devices the sizes are those of the run; keys that `auto` does not read may change; new sizes need a decision."""
    keys = {"batch_size_schedule": "auto", "per_device_batch_size_start": 2, "per_device_batch_size": 8}
    record = written(Config(**keys), 8, 40) | {"ramp": [[0, 0, 16], [20, 320, 32]]}
    for devices in (8, 4, 2):
        plan = plan_to_resume(Config(**keys, enable_rampup_batch_size=False, global_rampup_samples=7), devices, record)
        assert (plan.reserved_sizes, plan.ramp.sizes, plan.num_devices) == ((16, 32, 64), (16, 32), devices)
        record = recorded(Config(**keys), plan, 40)
    with pytest.raises(ResumeMismatchError, match=r"all of them: 1, 2, 4, 8, 16\. "):
        plan_to_resume(Config(**keys), 5, record)
    larger = keys | {"per_device_batch_size": 16}
    with pytest.raises(ResumeMismatchError, match="per_device_batch_size: 8 -> 16"):
        plan_to_resume(Config(**larger), 8, record)
    plan = plan_to_resume(Config(**larger, on_plan_change="continue_by_samples"), 8, record)
    assert (plan.reserved_sizes, plan.ramp.sizes) == ((16, 32, 64, 128), (16, 32))

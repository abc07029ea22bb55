"""Tests of rampup.config.build."""

import pytest

from rampup import Config, build_plan, load_config
from rampup.errors import BatchDivisibilityError, ConfigError, PipelineShapeError, RampupError


def test_tensor_parallelism_allows_fractions_of_a_sample_per_device():
    """Half a sample per device is legal if two devices share a sample, and refused otherwise."""
    keys = {"per_device_batch_size_start": 0.5, "per_device_batch_size_increment": 0.5, "per_device_batch_size": 2}
    keys |= {"enable_rampup_batch_size": True, "global_rampup_samples": 500}
    assert build_plan(Config(**keys, ici_tensor_parallelism=2), 8).ramp.sizes == (4, 8, 12, 16)
    with pytest.raises(BatchDivisibilityError, match="data_parallel_size = 8"):
        build_plan(Config(**keys), 8)


def test_build_plan_error_has_the_place_of_the_key(tmp_path):
    """A rule broken by a file's key is reported with the file and line."""
    path = tmp_path / "a.yml"
    path.write_text("steps: 10\nper_device_batch_size: 2.5\n")
    with pytest.raises(BatchDivisibilityError, match=r"\[per_device_batch_size: .*a\.yml:2\]"):
        build_plan(load_config(path), 4)


def test_build_plan_reports_all_problems_at_once():
    """Layers, pipeline microbatches and batch are all named."""
    bad = {"base_num_decoder_layers": 7, "num_pipeline_microbatches": 3, "per_device_batch_size": 0.3}
    with pytest.raises(RampupError, match="3 problems") as caught:
        build_plan(Config(**bad, ici_pipeline_parallelism=2), 8)
    assert [problem.key for problem in caught.value.problems] == list(bad)


@pytest.mark.parametrize(
    ("keys", "error", "key"),
    [
        ({"microbatch_size": 5}, BatchDivisibilityError, "microbatch_size"),
        ({"eval_per_device_batch_size": 0.3}, BatchDivisibilityError, "eval_per_device_batch_size"),
        ({"ici_tensor_parallelism": 3}, BatchDivisibilityError, "num_devices"),
        ({"num_pipeline_microbatches": 3}, PipelineShapeError, "num_pipeline_microbatches"),
        ({"ici_pipeline_parallelism": 4, "num_pipeline_microbatches": 6}, PipelineShapeError, "num_pipeline_microbatches"),
        ({"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 6}, PipelineShapeError, "base_num_decoder_layers"),
        ({"batch_size_schedule": "0:4 10:6"}, BatchDivisibilityError, "batch_size_schedule"),
    ],
)
def test_build_plan_error_names_the_key(keys, error, key):
    """The error about each rule names the key that a user would change."""
    with pytest.raises(error) as caught:
        build_plan(Config(**keys), 4)
    assert caught.value.key == key


def test_build_plan_lists_the_order_and_the_sizes_of_a_schedule():
    """Every threshold in the wrong order, every size that does not divide and every bad entry are in one list."""
    schedule = {"batch_size_schedule": "0:16 500:24 400:50 300:64", "microbatch_size": 8}
    with pytest.raises(RampupError) as caught:
        build_plan(Config(**schedule), 8)
    texts = list(map(str, caught.value.problems))
    assert ["400 samples comes after 500" in texts[0], "300 samples comes after 400" in texts[1]] == [True, True]
    assert [problem.value for problem in caught.value.problems[2:]] == [16, 24, 50]
    assert all(problem.alternatives == {"microbatch_size": (1,)} for problem in caught.value.problems[2:])
    with pytest.raises(RampupError, match="2 problems"):
        build_plan(Config(batch_size_schedule="0:16 500 x:24"), 8)


def test_build_plan_says_what_a_refused_mesh_hides():
    """Without a mesh no batch size can be checked; an evaluation batch of its own is in the list of the ramp's problems."""
    mesh = {"ici_tensor_parallelism": 3, "per_device_batch_size": 15.5, "enable_rampup_batch_size": False}
    with pytest.raises(RampupError, match="the batch sizes are checked again once the mesh is legal") as caught:
        build_plan(Config(**mesh, sources={"ici_tensor_parallelism": "command line", "num_devices": "a.yml:3"}), 8)
    assert "[ici_tensor_parallelism: command line]" in str(caught.value)
    with pytest.raises(RampupError) as caught:
        build_plan(Config(batch_size_schedule="0:9", eval_per_device_batch_size=0.3), 8)
    assert [problem.key for problem in caught.value.problems] == ["batch_size_schedule", "eval_per_device_batch_size"]


def test_build_plan_checks_sizes_that_no_step_reaches():
    """With the offered size, a step would reach them. They do not matter if all other sizes are legal."""
    with pytest.raises(RampupError) as caught:
        build_plan(Config(batch_size_schedule="0:65 1:1 50:2 65:64 500:8"), 2)
    assert [(problem.value, problem.nearest) for problem in caught.value.problems] == [(65, (64, 66)), (1, (2,))]
    assert "from sample 1, jumped over" in str(caught.value)
    assert build_plan(Config(batch_size_schedule="0:64 1:1 64:8"), 2).ramp.sizes == (64, 8)


def test_build_plan_offers_only_values_that_a_file_can_have():
    """A legal number of devices that exceeds the limit of the key is not offered."""
    with pytest.raises(BatchDivisibilityError, match="num_devices=1 must be a multiple") as caught:
        build_plan(Config(dcn_context_parallelism=200_000, dcn_data_parallelism=5 * 10**12 + 1), 1)
    assert caught.value.nearest == ()


def test_build_plan_needs_a_number_of_devices():
    """A number of devices below 1 is refused."""
    with pytest.raises(ConfigError, match="num_devices=-1 must be at least 1"):
        build_plan(Config())
    with pytest.raises(ConfigError, match="num_devices=0"):
        build_plan(Config(), 0)
    assert build_plan(Config(num_devices=4)).num_devices == 4


def test_whole_batches_have_one_microbatch_and_say_what_they_cost():
    """In every phase and in evaluation, without a shape to fall back to; what needs several microbatches is refused."""
    keys = {"batch_size_schedule": "0:16 64:32", "whole_batch": True}
    plan = build_plan(Config(**keys), 4)
    assert [(s.num_microbatches, s.microbatch_size) for s in (*plan.splits, plan.eval_split)] == [(1, 4), (1, 8), (1, 8)]
    assert plan.max_microbatches == {4: 1, 8: 1}
    assert "2 batch sizes compile as many programs" in str(plan)
    assert "up to 8 samples" in str(plan)
    for contrary in ("gradient_accumulation_steps", "ici_pipeline_parallelism", "microbatch_size"):
        with pytest.raises(ConfigError, match="whole_batch=true makes every batch one microbatch") as caught:
            build_plan(Config(**keys, **{contrary: 2}), 4)
        assert caught.value.key == contrary
    for contrary in ({"measure_gradient_noise": True}, {"gradient_accumulation": "multi_steps"}):
        with pytest.raises(ConfigError, match="whole_batch=true"):
            Config(**keys, **contrary)


def test_build_plan_ignores_the_evaluation_batch_if_evaluation_is_off():
    """An evaluation batch that cannot be split matters only if evaluation is on or its size is set."""
    keys = {"per_device_batch_size": 3, "gradient_accumulation_steps": 2, "microbatch_size": 2}
    assert build_plan(Config(**keys, eval_interval=-1), 1).eval_split is None
    with pytest.raises(BatchDivisibilityError, match="eval_per_device_batch_size"):
        build_plan(Config(**keys), 1)
    with pytest.raises(BatchDivisibilityError, match="eval_per_device_batch_size"):
        build_plan(Config(**keys, eval_interval=-1, eval_per_device_batch_size=0.3), 1)
    with pytest.raises(BatchDivisibilityError, match=r"gives 1\.2 samples \(num_devices = 4\)"):  # it is not accumulated
        build_plan(Config(gradient_accumulation_steps=4, eval_per_device_batch_size=0.3), 4)

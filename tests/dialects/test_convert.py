"""Tests of rampup.dialects.to_rampup: our YAML of another system's run, read back."""

import pytest
import yaml
from helpers.dialect_files import cases, verdict

from rampup import build_plan, load_config
from rampup.dialects import to_rampup
from rampup.errors import ConfigError


def read_back(tmp_path, result):
    """Write the conversion and plan it again."""
    path = tmp_path / "converted.yml"
    path.write_text(to_rampup(result))
    return build_plan(load_config(path))


@pytest.mark.parametrize(
    ("system", "case"),
    [(system, case) for system in ("maxtext", "megatron") for case in cases(f"ramp_{system}")],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_convert_keeps_ramps(tmp_path, system, case):
    """The plan and phases of every reference case are equal, with accumulation; MaxText's ramp of fractions is refused."""
    mesh = {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": -1} if system == "maxtext" else {}
    name = "num_devices" if system == "maxtext" else "data_parallel_size"
    result = verdict(system, {**case["config"], **mesh}, f"{name}={case[name]}")
    if result.plan is None:
        assert system == "maxtext"
        with pytest.raises(ConfigError, match="whole number of samples"):
            to_rampup(result)
        return
    plan = read_back(tmp_path, result)
    assert plan == result.plan
    assert tuple(plan.phase_rows()) == result.phases


BASE = {"global_batch_size": 64, "micro_batch_size": 1}
PP, CP, CHUNKS = "pipeline_model_parallel_size", "context_parallel_size", "virtual_pipeline_model_parallel_size"
MEGATRON = {
    "constant pipeline": {"global_batch_size": 80, "micro_batch_size": 2, PP: 4},
    "ramp in a pipeline": BASE | {"global_batch_size": 128, PP: 4, "rampup_batch_size": "32 32 999"},
    "interleaved": BASE | {"rampup_batch_size": [32, 32, 500], PP: 4, CHUNKS: 2, CP: 2, "num_layers": 16},
    "decreased": BASE | {"micro_batch_size": 4, "rampup_batch_size": "48 8 600", "decrease_batch_size_if_needed": True},
    "unsorted": {"step_batch_size_schedule": "100:64 0:32", "micro_batch_size": 1, "seq_length": 4},
}


@pytest.mark.parametrize("config", MEGATRON.values(), ids=MEGATRON)
def test_convert_keeps_megatron_pipelines_and_roundings(tmp_path, config):
    """One pass of any number of microbatches, growing multiples of the stages, and rounded sizes."""
    result = verdict("megatron", config, "data_parallel_size=8")
    assert result.ok
    plan = read_back(tmp_path, result)
    ramp = [[phase.start_step, phase.global_batch_size, phase.start_sample] for phase in plan.ramp.phases]
    assert ramp == result.derived["ramp_phases"]
    assert [split.num_microbatches for split in plan.splits] == result.derived["num_microbatches"]
    if result.phases is not None:
        assert plan.phase_rows() == [dict(row) for row in result.phases]


def test_convert_keeps_a_maxtext_pipeline(tmp_path):
    """Stages, repeats, microbatches, accumulation and evaluation."""
    config = {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 16, "num_pipeline_microbatches": 8}
    config |= {"per_device_batch_size": 4, "gradient_accumulation_steps": 2, "eval_interval": 5}
    result = verdict("maxtext", config, "num_devices=8")
    plan = read_back(tmp_path, result)
    assert plan == result.plan
    (row,) = plan.phase_rows()
    names = ("accumulation_steps", "num_pipeline_microbatches", "num_repeats", "microbatch_size")
    assert [row[name] for name in names] == [2, 8, 4, 2]
    assert plan.eval_split is not None


def test_convert_comments_each_key_without_a_counterpart():
    """Keys that are not converted are named in one comment each; a line break in a name cannot write a line of its own."""
    config = {"per_device_batch_size": 2, "quantization": "int8", "attention": "flash", "learning_rate": 0.1, "x\nsteps": 1}
    text = to_rampup(verdict("maxtext", config, "num_devices=4"))
    for name in ("quantization", "attention", "learning_rate", "x?steps"):
        assert text.count(f"\n# {name}: ") == 1
    assert "learning_rate: not converted; rampup has a key of this name" in text
    assert {"per_device_batch_size": 2, "steps": 150_001}.items() <= yaml.safe_load(text).items()


@pytest.mark.parametrize("system", ["maxtext_rl", "skyrl", "trlx"])
def test_convert_refuses_reinforcement_learning(system):
    """The error names the file in which such a run is configured."""
    case = cases(system)[0]
    settings = [f"num_prompts={case.get('dataset_prompts') or case.get('num_prompts') or 1000}"] if system != "skyrl" else []
    with pytest.raises(ConfigError, match=r"configs/rl\.yml"):
        to_rampup(verdict(system, case["config"], *settings))


def test_convert_refuses_a_growing_pipeline_of_uneven_microbatches():
    """Rampup's pipeline grows in multiples of its stages; the error names the first number that is not one."""
    config = BASE | {"global_batch_size": 72, "rampup_batch_size": [24, 24, 500], PP: 4}
    with pytest.raises(ConfigError, match="multiples of its 4 stages, but the file has phases of 3"):
        to_rampup(verdict("megatron", config, "data_parallel_size=8"))

"""Tests of `measure_gradient_noise` in runs of the language model."""

import pytest
from helpers.runs import metrics_of
from helpers.tiny import TINY

from rampup import Config, build_plan
from rampup.batch_size.noise_scale import NoiseScale
from rampup.errors import ConfigError
from rampup.lm.train import train
from rampup.loop.checkpoint import find_checkpoint
from rampup.loop.components import GRADIENT_NOISE

pytestmark = pytest.mark.usefixtures("optimized")


def config(folder, **changes):
    """Return a tiny configuration that measures the noise."""
    # With one layer, the compiler joins other operations in a program that measures.
    own = {
        "base_num_decoder_layers": 2,
        "checkpoint_period": 5,
        "learning_rate_schedule_steps": 12,
        "measure_gradient_noise": True,
    }
    return Config(base_output_directory=str(folder), run_name="run", **(TINY | own | changes))


def metrics(folder):
    """Return every line of metrics.jsonl, without the times."""
    return metrics_of(folder / "run")


@pytest.mark.slow
def test_gradient_noise_is_in_metrics_and_checkpoints_and_resumes_bit_for_bit(tmp_path):
    """Every line has S, G2 and averages; a stopped and resumed run has the same lines, one without it the same losses."""
    keys = {"gradient_noise_half_life_samples": 100}
    train(config(tmp_path / "whole", **keys))
    lines = metrics(tmp_path / "whole")
    noise = NoiseScale(half_life_samples=100)
    for line in lines:
        weight = line["global_batch_size"] * 16.0
        trace, squared_norm = line["gradient_noise_trace"], line["gradient_squared_norm"]
        noise.update(samples=line["global_batch_size"], weight=weight, trace=trace, squared_norm=squared_norm)
        assert {name: line[name] for name in noise.metrics()} == pytest.approx(noise.metrics())
    assert {f"adam_{name}" for name in noise.metrics()} <= lines[0].keys()
    assert lines[-1]["noise_scale_samples_low"] is not None
    train(config(tmp_path / "stopped", steps=7, **keys))
    saved = find_checkpoint(tmp_path / "stopped" / "run" / "checkpoints")
    assert saved.record[GRADIENT_NOISE][""]["total"] > 0
    assert train(config(tmp_path / "stopped", **keys)).resumed_from == 7
    assert metrics(tmp_path / "stopped") == lines
    train(config(tmp_path / "off", measure_gradient_noise=False))
    assert [line["loss"] for line in metrics(tmp_path / "off")] == [line["loss"] for line in lines]


def test_gradient_noise_chooses_a_microbatch_or_is_refused():
    """On one device an automatic microbatch leaves two blocks in every phase; a given one that does not is refused."""
    plan = build_plan(Config(measure_gradient_noise=True), 1)
    assert plan.ramp.sizes == (4, 8, 12, 16)
    assert [split.num_microbatches for split in plan.splits] == [2, 4, 6, 8]
    assert build_plan(Config(measure_gradient_noise=True), 2).splits == build_plan(Config(), 2).splits
    with pytest.raises(ConfigError, match=r"phase 0.*set microbatch_size=2"):
        build_plan(Config(measure_gradient_noise=True, microbatch_size=4), 1)
    with pytest.raises(ConfigError, match="one block"):
        build_plan(Config(measure_gradient_noise=True, per_device_batch_size=1), 1)
    with pytest.raises(ConfigError, match="logits_via_embedding=false"):
        build_plan(
            Config(measure_gradient_noise=True, logits_via_embedding=True, ici_pipeline_parallelism=2, num_pipeline_repeats=2),
            2,
        )
    with pytest.raises(ConfigError, match="gradient_accumulation=fused"):
        Config(measure_gradient_noise=True, gradient_accumulation="multi_steps")

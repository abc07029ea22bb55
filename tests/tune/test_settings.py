"""Tests of rampup.tune.settings."""

from fractions import Fraction

import pytest

from rampup import Config, build_plan
from rampup.tune.settings import legal_sizes, proposals

RAMP = {"enable_rampup_batch_size": True, "per_device_batch_size_start": 4, "per_device_batch_size_increment": 4}
CONFIGS = {
    "ramp": RAMP,
    "constant": {},
    "accumulating": RAMP | {"gradient_accumulation_steps": 4},
    "auto": RAMP | {"rampup_microbatch": "auto"},
    "per_phase": RAMP | {"rampup_microbatch": "per_phase"},
    "schedule": {"batch_size_schedule": "0:96 200:32 500:160"},
    "pipeline": RAMP | {"ici_pipeline_parallelism": 2, "base_num_decoder_layers": 2},
    "pipeline, m given": RAMP | {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2, "base_num_decoder_layers": 2},
    "unreached": RAMP | {"steps": 3},
}


@pytest.mark.parametrize("found", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_proposals_keep_the_ramp_and_fit(name, found):
    """Whatever fits: every proposal is a legal configuration with the same batches at the same steps, in sizes that fit."""
    config = Config(eval_interval=-1, **CONFIGS[name])
    plan = build_plan(config, 4)
    made = proposals(config, plan, found)
    assert made
    for proposal in made:
        again = build_plan(Config(eval_interval=-1, **(CONFIGS[name] | dict(proposal.settings))), 4)
        assert again.ramp.phases == plan.ramp.phases
        assert [split.global_batch_size for split in again.splits] == list(plan.ramp.sizes)
        assert again.splits == proposal.plan.splits
        assert max(split.microbatch_size for split in again.splits) <= found
        assert all(b in legal for b, legal in zip((s.microbatch_size for s in again.splits), legal_sizes(plan), strict=True))


def test_each_policy_is_proposed():
    """One shape, two shapes and a shape a phase, the configuration's own kind first, each way of cutting once."""
    config = Config(**RAMP)
    made = proposals(config, build_plan(config, 4), 8)
    cuts = [tuple(split.microbatch_size for split in proposal.plan.splits) for proposal in made]
    assert cuts == [(4, 4, 4, 4), (2, 2, 2, 2), (1, 1, 1, 1), (2, 2, 2, 8), (2, 4, 6, 8)]
    assert made[0].to_dict() == {"microbatch_size": 4}
    assert made[3].settings["per_device_batch_size"] == Fraction(8)
    assert made[4].settings["gradient_accumulation_steps"] == 2
    assert len(set(cuts)) == len(cuts)


def test_time_counts_the_steps_that_are_run():
    """Every phase for as many steps as the run has of it; nothing where a size was not timed."""
    config = Config(**RAMP, steps=40)
    plan = build_plan(config, 4)
    proposal = proposals(config, plan, 4)[0]
    steps = [min(phase.num_steps or 40, 40 - phase.start_step) for phase in plan.ramp.phases if phase.start_step < 40]
    counts = [split.num_microbatches for split in proposal.reached]
    assert proposal.seconds(lambda b, n: 1.0) == sum(steps) == 40
    assert proposal.seconds(lambda b, n: n) == sum(s * n for s, n in zip(steps, counts, strict=True))
    assert proposal.seconds(lambda b, n: None) is None

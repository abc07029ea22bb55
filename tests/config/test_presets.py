"""The presets reproduce published ramps."""

from pathlib import Path

import pytest

from rampup import build_plan, load_config
from rampup.contrib.lab.scaling_laws import suggest_batch
from rampup.plan.describe import summary

CONFIGS = Path(__file__).parent.parent.parent / "configs"
# First and last batch, phases, steps and samples of the ramp: published, or computed by
# the exact rule from what is published. Then the tokens that a report gives for the
# whole run.
PUBLISHED = {
    "gpt3_175b": (16, 1536, 96, 19_802, 5_859_424, 3e11),
    "bloom_176b": (192, 2048, 117, 12_658, 9_765_808, 3.66e11),
    "palm_540b": (512, 2048, 3, 115_000, 92_160_000, 7.759e11),
    "nemotron4_15b": (384, 1152, 3, 190_736, 97_656_960, 8e12),
    "nemotron4_340b": (768, 2304, 3, 95_368, 97_656_576, 8e12),
    "llama3_405b": (512, 2048, 3, 342_162, 350_342_656, 1.56e13),
    "deepseek_v3": (3072, 15_360, 5, 19_414, 114_508_800, 1.48e13),
    "minimax_01": (2048, 16_384, 4, 83_865, 573_736_960, None),
    "olmo_1b": (1024, 4096, 3, 79_990, 122_803_200, 6.08e11),
    "deepseek_v2": (2304, 9216, 4, 14_571, 54_934_272, 8.1e12),
    "glm_4_5": (4096, 16_384, 13, 14_752, 122_074_112, 2.3e13),
    "mimo_7b": (512, 640, 10, 1_130_872, 2_868_653_056, None),
    # Not published: models of the shape of Llama, with ramps of 10% of their tokens.
    "llama_1b_v5e": (32, 128, 4, 12_126, 634_976, None),
    "llama_8b_v5p": (256, 512, 2, 7632, 1_953_792, None),
    "llama_70b_v6e": (512, 1024, 2, 33_380, 17_090_560, None),
}
# The steps at which the batch changes, which the reports give or which follow from
# their token counts.
CHANGES = {
    "palm_540b": [50_000, 115_000],
    "nemotron4_15b": [127_157, 190_736],
    "nemotron4_340b": [63_579, 95_368],
    "minimax_01": [4113, 25_601, 83_865],
    "olmo_1b": [40_055, 79_990],
    "deepseek_v3": [9319, 13_978, 17_084, 19_414],
    "llama3_405b": [61, 342_162],
}


def preset(name):
    """Return a preset's configuration and plan."""
    config = load_config(CONFIGS / f"{name}.yml")
    return config, build_plan(config)


def test_every_preset_is_checked():
    """This file has the expected numbers of every preset."""
    assert {path.stem for path in CONFIGS.glob("*.yml")} - {"base", "rl"} == set(
        PUBLISHED
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_expected_ramp(name):
    """Sizes, phases, steps and samples of the ramp, where it changes, and the tokens
    that a report gives for the run.
    """
    config, plan = preset(name)
    *expected, tokens = PUBLISHED[name]
    ramp, changes = plan.ramp, [phase.start_step for phase in plan.ramp.phases[1:]]
    assert [
        ramp.sizes[0],
        ramp.sizes[-1],
        len(ramp.phases),
        ramp.ramp_steps,
        ramp.ramp_samples,
    ] == expected
    assert changes == CHANGES.get(name, changes)
    assert (
        tokens is None
        or plan.consumed_samples * config.max_target_length
        == pytest.approx(tokens, rel=1e-3)
    )


def test_mimo_shrinks_its_batch_in_the_last_phase():
    """The last phase of MiMo is smaller than the one before, and the headline names the
    largest batch too.
    """
    _, plan = preset("mimo_7b")
    assert plan.ramp.sizes[-2:] == (2560, 640)
    assert "from 512 to 640 samples (at most 2,560)" in summary(plan)[1]


@pytest.mark.parametrize("name", ["llama_1b_v5e", "llama_8b_v5p", "llama_70b_v6e"])
def test_recipes_end_within_the_laws_of_their_tokens(name):
    """The last batch of a model of ours needs at most 20% more tokens by one critical
    law, and the rate follows the batch.
    """
    config, plan = preset(name)
    params = {"llama_1b_v5e": "1.2B", "llama_8b_v5p": "8B", "llama_70b_v6e": "70B"}[
        name
    ]
    found = suggest_batch(
        plan.ramp.samples_before(plan.total_steps) * config.max_target_length, params
    )
    largest = max(found["optimal_batch_tokens"][1], found["critical_batch_tokens"][1])
    assert plan.ramp.sizes[-1] * config.max_target_length <= largest
    assert config.batch_scaling == "sqrt"

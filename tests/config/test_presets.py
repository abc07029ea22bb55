"""The presets reproduce published ramps."""

from pathlib import Path

import pytest

from rampup import build_plan, load_config

CONFIGS = Path(__file__).parent.parent.parent / "configs"
# Steps at which the batch changes, and its sizes: published, or computed by the exact rule from what is published.
PUBLISHED = {
    "gpt3_175b": {"first": 16, "last": 1536, "phases": 96, "ramp_steps": 19_802, "ramp_samples": 5_859_424},
    "bloom_176b": {"first": 192, "last": 2048, "phases": 117, "ramp_steps": 12_658, "ramp_samples": 9_765_808},
    "palm_540b": {"first": 512, "last": 2048, "phases": 3, "ramp_steps": 115_000, "ramp_samples": 92_160_000},
    "nemotron4_15b": {"first": 384, "last": 1152, "phases": 3, "ramp_steps": 190_736, "ramp_samples": 97_656_960},
    "nemotron4_340b": {"first": 768, "last": 2304, "phases": 3, "ramp_steps": 95_368, "ramp_samples": 97_656_576},
    "llama3_405b": {"first": 512, "last": 2048, "phases": 3, "ramp_steps": 342_162, "ramp_samples": 350_342_656},
    "deepseek_v3": {"first": 3072, "last": 15_360, "phases": 5, "ramp_steps": 19_414, "ramp_samples": 114_508_800},
    "minimax_01": {"first": 2048, "last": 16_384, "phases": 4, "ramp_steps": 83_865, "ramp_samples": 573_736_960},
    "olmo_1b": {"first": 1024, "last": 4096, "phases": 3, "ramp_steps": 79_990, "ramp_samples": 122_803_200},
    "deepseek_v2": {"first": 2304, "last": 9216, "phases": 4, "ramp_steps": 14_571, "ramp_samples": 54_934_272},
    "glm_4_5": {"first": 4096, "last": 16_384, "phases": 13, "ramp_steps": 14_752, "ramp_samples": 122_074_112},
    "mimo_7b": {"first": 512, "last": 640, "phases": 10, "ramp_steps": 1_130_872, "ramp_samples": 2_868_653_056},
    # Not published: models of the shape of Llama, with ramps of 10% of their tokens.
    "llama_1b_v5e": {"first": 32, "last": 128, "phases": 4, "ramp_steps": 12_126, "ramp_samples": 634_976},
    "llama_8b_v5p": {"first": 256, "last": 1024, "phases": 4, "ramp_steps": 4664, "ramp_samples": 1_953_792},
    "llama_70b_v6e": {"first": 512, "last": 2048, "phases": 4, "ramp_steps": 20_400, "ramp_samples": 17_091_584},
}


def preset(name):
    """Return a preset's configuration and plan."""
    config = load_config(CONFIGS / f"{name}.yml")
    return config, build_plan(config)


def test_every_preset_is_checked():
    """This file has the expected numbers of every preset."""
    assert {path.stem for path in CONFIGS.glob("*.yml")} - {"base", "rl"} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_expected_ramp(name):
    """First and last batch, number of phases, steps and samples of the ramp."""
    ramp = preset(name)[1].ramp
    found = {"first": ramp.sizes[0], "last": ramp.sizes[-1], "phases": len(ramp.phases)}
    assert found | {"ramp_steps": ramp.ramp_steps, "ramp_samples": ramp.ramp_samples} == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("palm_540b", [50_000, 115_000]),
        ("nemotron4_15b", [127_157, 190_736]),
        ("nemotron4_340b", [63_579, 95_368]),
        ("minimax_01", [4113, 25_601, 83_865]),
        ("olmo_1b", [40_055, 79_990]),
        ("deepseek_v3", [9319, 13_978, 17_084, 19_414]),
    ],
)
def test_preset_changes_its_batch_at_the_published_steps(name, steps):
    """The batch changes at the steps that the reports give or that follow from their token counts."""
    assert [phase.start_step for phase in preset(name)[1].ramp.phases[1:]] == steps


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt3_175b", 300e9),
        ("bloom_176b", 366e9),
        ("palm_540b", 775.9e9),
        ("nemotron4_15b", 8e12),
        ("nemotron4_340b", 8e12),
        ("llama3_405b", 15.6e12),
        ("deepseek_v3", 14.8e12),
        ("olmo_1b", 608e9),
        ("deepseek_v2", 8.1e12),
        ("glm_4_5", 23e12),
    ],
)
def test_preset_consumes_the_published_tokens(name, tokens):
    """Steps times batches are the tokens that each report gives for the whole run."""
    config, plan = preset(name)
    assert plan.consumed_samples * config.max_target_length == pytest.approx(tokens, rel=1e-3)


def test_llama3_ramp_has_the_published_tokens():
    """Llama 3's first phase is about 60 steps of 4M tokens, and the last change comes at 2.87T tokens."""
    _, plan = preset("llama3_405b")
    assert plan.ramp.phases[1].start_step == 61
    assert plan.ramp.phases[2].start_sample * 8192 == pytest.approx(2.87e12, rel=1e-5)


def test_mimo_shrinks_its_batch_in_the_last_phase():
    """The last phase of MiMo is smaller than the one before, and the headline names the largest batch too."""
    _, plan = preset("mimo_7b")
    assert plan.ramp.sizes[-2:] == (2560, 640)
    assert "from 512 to 640 samples (at most 2,560)" in plan.summary[1]

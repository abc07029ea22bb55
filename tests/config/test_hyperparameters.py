"""Budgets, shares, Seesaw, the scalings of hyperparameters, and published rules, as keys of a
configuration.
"""

import math
from fractions import Fraction

import jax.numpy as jnp
import pytest
from helpers.commands import run_json
from helpers.runs import recorded

from rampup import Config, build_plan, load_config
from rampup.cli import main
from rampup.config.draft import hyperparameters
from rampup.config.resume import plan_to_resume
from rampup.engine.optimizer import LearningRate
from rampup.errors import ConfigError, RampupError, ResumeMismatchError
from rampup.plan import BatchRamp

SHARES = {"batch_size_schedule": "0:16 3%:32 10%:64", "max_target_length": 128}
# Of the run for which nanochat's weight decay was chosen.
NANOCHAT_REFERENCE_TOKENS = 1_321_210_944
PLAN = ("plan", "base.yml", "--devices", "4")


@pytest.mark.parametrize("tokens", [1, 127, 128, 12_345_678, "1.5M", "2B"])
def test_a_token_budget_is_reached_by_the_last_step(tokens):
    """The run ends with the first batch that reaches the budget; as many samples are
    the same budget.
    """
    config = Config(
        train_tokens=tokens,
        max_target_length=128,
        batch_size_schedule="0:16 100:32 20K:64",
    )
    plan = build_plan(config, 4)
    samples = -(-config.train_tokens // 128)
    assert (
        plan.ramp.samples_before(plan.total_steps - 1)
        < samples
        <= plan.consumed_samples
    )
    assert plan.schedule_steps == plan.total_steps
    same = build_plan(Config(train_samples=samples, batch_size_schedule="0:16"), 4)
    assert same.total_steps == -(-samples // 16)


@pytest.mark.parametrize("share", ["3%", "0.1%", "33.3333%", "1/3%", "99.999%", "100%"])
@pytest.mark.parametrize(
    "budget",
    [
        {"train_tokens": 987_654_321},
        {"train_samples": 7_654_321},
        {"train_samples": 10**17 + 1},
    ],
)
def test_shares_are_exact_and_rounded_down(share, budget):
    """A threshold is the whole samples in the share of the budget, from exact
    fractions.
    """
    number = share.removesuffix("%")
    exact = (
        Fraction(number)
        / 100
        * (budget.get("train_samples") or Fraction(budget["train_tokens"], 128))
    )
    plan = build_plan(Config(batch_size_schedule=f"0:16 {share}:32", **budget), 4)
    assert (
        plan.ramp.to_rows()
        == BatchRamp.piecewise([(0, 16), (math.floor(exact), 32)]).to_rows()
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"batch_size_schedule": "0:16 3%:32"},
            "share of the budget, but there is none; set train_tokens or train_samples",
        ),
        (
            {"batch_size_schedule": "0:16 101%:32", "train_samples": 1000},
            "between 0% and 100%",
        ),
        (
            {"batch_size_schedule": "0:16 x%:32", "train_samples": 1000},
            "is not a number",
        ),
        (
            {"batch_size_schedule": "0:16 10%:32 3%:64", "train_samples": 1000},
            "thresholds must increase",
        ),
        (
            {"batch_size_schedule": "0:16 10%:32 10.01%:64", "train_samples": 1000},
            "thresholds must increase",
        ),
        (
            {"batch_size_schedule": "3%:16", "train_samples": 1000},
            "first threshold must be 0",
        ),
        (
            {"steps": 10, "train_samples": 100},
            "steps=10 and train_samples=100 both set the length",
        ),
        (
            {"train_samples": 10, "train_tokens": 100},
            "train_samples=10 and train_tokens=100 both set the length",
        ),
        ({"train_samples": 0}, "train_samples=0 must be a whole number, at least 1"),
        ({"train_tokens": "2.5"}, "train_tokens='2.5' must be a whole number"),
        ({"train_tokens": 10**19}, "train_tokens"),
    ],
)
def test_bad_budgets_and_shares_are_refused(keys, text):
    """The error names the rule and the numbers, before any work."""
    with pytest.raises(RampupError, match=text):
        build_plan(Config(**keys), 4)


def test_the_nearest_budget_counts(tmp_path, capsys):
    """A budget on the command line replaces the steps of the file, and the other way
    round; both in one place is an error.
    """
    code, plan = run_json(
        capsys, *PLAN, "train_samples=6400", "enable_rampup_batch_size=false"
    )
    assert (code, plan["total_steps"]) == (0, 200)
    (tmp_path / "my.yml").write_text("base_config: base.yml\ntrain_tokens: 1M\n")
    assert load_config(tmp_path / "my.yml").train_tokens == 10**6
    assert load_config(tmp_path / "my.yml", ["steps=7"]).total_steps == 7
    assert load_config(tmp_path / "my.yml", ["train_samples=7"]).train_tokens is None
    code, refused = run_json(capsys, *PLAN, "train_samples=6400", "steps=3")
    assert (code, refused["error"]["key"]) == (2, "steps")


def test_seesaw_takes_fewer_steps_for_the_same_samples():
    """The batch grows at the cuts, the samples stay, and rate / sqrt(batch) is that of
    the planned staircase.
    """
    keys = {
        "batch_size_schedule": "0:32 500:64",
        "steps": 500,
        "learning_rate_final_fraction": 0.0,
    }
    plain = build_plan(Config(**keys), 4)
    plan = build_plan(Config(**keys, seesaw_factor=2, seesaw_max_batch_size=512), 4)
    assert (
        plain.consumed_samples <= plan.consumed_samples < plain.consumed_samples + 512
    )
    assert plan.total_steps < 0.75 * plain.total_steps
    assert plan.ramp.sizes == (32, 64, 128, 256, 512)
    assert plan.eval_global_batch_size == plain.eval_global_batch_size == 64
    assert plan.num_compiled_shapes == 1
    # With a fixed microbatch, every batch is a multiple of the replicas times the
    # microbatch.
    rounded = Config(
        per_device_batch_size=16,
        microbatch_size=4,
        seesaw_factor=1.5,
        train_tokens="4M",
        steps=-1,
    )
    assert build_plan(rounded, 4).ramp.sizes == (64, 96, 144, 208, 320, 480)
    assert (
        build_plan(Config(**keys, seesaw_factor=2, opt_type="sgd"), 4).seesaw.exponent
        == 2 * plan.seesaw.exponent
        == 1
    )
    for segment in plan.clock:
        base = plain.ramp.phase_of_sample(
            plan.ramp.samples_before(segment.start_step)
        ).global_batch_size
        assert segment.scale == pytest.approx(
            math.sqrt(segment.global_batch_size / base)
        )


def test_seesaw_warms_up_over_the_planned_samples():
    """Until the first cut, the schedule has the progress that it has without Seesaw,
    also after a resume.
    """
    keys = {
        "per_device_batch_size": 16,
        "steps": 200,
        "warmup_steps_fraction": 0.2,
        "learning_rate_clock": "samples",
    }
    plain, config = (
        build_plan(Config(**keys), 4),
        Config(**keys, seesaw_factor=2, seesaw_max_batch_size=512),
    )
    plan = build_plan(config, 4)
    assert plan.consumed_samples > plain.consumed_samples == 12_800
    for each in (plain, plan, plan_to_resume(config, 8, recorded(config, plan, 5))):
        assert (each.clock[0].progress, each.clock[0].progress_per_step) == (0, 1 / 200)


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"seesaw_factor": 1}, "seesaw_factor"),
        ({"seesaw_max_batch_size": 100}, "seesaw_max_batch_size"),
        ({"seesaw_factor": 2, "seesaw_max_batch_size": 8}, "seesaw_max_batch_size"),
        ({"seesaw_factor": 2, "lr_schedule_type": "constant"}, "seesaw_factor"),
        ({"seesaw_factor": 2, "learning_rate_final_fraction": 1.0}, "seesaw_factor"),
        ({"seesaw_factor": 2, "learning_rate_clock": "steps"}, "learning_rate_clock"),
        ({"adam_b2_floor": 0.9}, "adam_b2_floor"),
        ({"batch_scaling": "half_life", "opt_type": "sgd"}, "batch_scaling"),
        ({"batch_scaling": "half-life"}, "batch_scaling"),
        ({"batch_scaling": "sde", "batch_scaling_reference": 1}, "batch_scaling"),
        ({"learning_rate_batch_scaling": "sde"}, "learning_rate_batch_scaling"),
        (
            {"adam_weight_decay_reference_tokens": "1B"},
            "adam_weight_decay_reference_tokens",
        ),
        ({"batch_scaling_reference": 0}, "batch_scaling_reference"),
    ],
)
def test_bad_hyperparameter_keys_are_refused(keys, key):
    """The error names the key, before any work, and its nearest values are accepted."""
    with pytest.raises(RampupError) as caught:
        build_plan(Config(**({"per_device_batch_size": 16} | keys)), 4)
    assert caught.value.key == key
    for value in caught.value.nearest[:2]:
        build_plan(Config(**({"per_device_batch_size": 16} | keys | {key: value})), 4)


def test_plan_prints_the_hyperparameters_of_every_phase(capsys):
    """The JSON of every phase has its constants: b2**(1/B) is constant to 1e-12, and
    the learning rate is that of the run.
    """
    words = ["batch_scaling=half_life", "learning_rate_batch_scaling=sqrt"]
    code, plan = run_json(capsys, *PLAN, "--hyperparameters", *words)
    assert code == 0
    phases = plan["phases"]
    roots = [phase["adam_b2"] ** (1 / phase["global_batch_size"]) for phase in phases]
    assert max(roots) - min(roots) < 1e-12
    assert [phase["learning_rate_scale"] for phase in phases] == [
        0.5,
        math.sqrt(0.5),
        math.sqrt(0.75),
        1.0,
    ]
    assert [phase["adam_b2_half_life_tokens"] for phase in phases] == pytest.approx(
        [phases[0]["adam_b2_half_life_tokens"]] * 4
    )
    assert phases[-1]["peak_learning_rate"] == 0.003
    assert phases[1]["learning_rate"] == pytest.approx(
        0.003 * math.sqrt(0.5) * 1000 / 2765.6, rel=1e-3
    )
    assert main([*PLAN, "--hyperparameters", *words]) == 0
    assert "half life" in capsys.readouterr().out
    assert (
        "adam_b2"
        not in run_json(capsys, *PLAN, "--hyperparameters", "opt_type=sgd")[1][
            "phases"
        ][0]
    )
    assert run_json(capsys, *PLAN, "--hyperparameters", "--rows", "1")[0] == 2


@pytest.mark.parametrize(
    ("rule", "rate", "constants"),
    [
        ("none", 1, (0.9, 0.95, 1e-8, 0.1)),
        ("linear", 0.25, (0.9, 0.95, 1e-8, 0.1)),
        ("sqrt", 0.5, (0.9, 0.95, 1e-8, 0.1)),
        ("sde", 0.5, (0.975, 0.9875, 2e-8, 0.1)),
        ("half_life", 1, (0.9, 0.95**0.25, 1e-8, 0.1)),
        ("timescale", 0.5, (0.9, 0.95, 1e-8, 0.05)),
        ("power_lines", 0.5, (0.9, 0.95, 1e-8, 0.05)),
        ("complete", 0.5, (0.975, 0.9875, 2e-8, 0.05)),
    ],
)
def test_each_rule_scales_its_constants(rule, rate, constants):
    """For a quarter of the reference batch; `learning_rate_batch_scaling` departs from
    the rule for the learning rate alone.
    """
    for chosen, factor in (("auto", rate), ("none", 1), ("linear", 0.25)):
        config = Config(
            batch_size_schedule="0:16 160:64",
            batch_scaling=rule,
            learning_rate_batch_scaling=chosen,
        )
        plan = build_plan(config, 4)
        assert plan.clock[0].scale == factor
        found = hyperparameters(config, plan)[0]
        decay = 0.1 * 0.25 / factor if constants[3] != 0.1 else 0.1
        assert (found.b1, found.b2, found.eps, found.weight_decay) == pytest.approx(
            (*constants[:3], decay)
        )
        assert chosen != "auto" or decay == constants[3]


def test_a_resumed_plan_keeps_seesaw_on_other_devices():
    """The rates and batches come from the record, on 4, 8 and 2 devices; another budget
    or factor is refused.
    """
    keys = {
        "batch_size_schedule": "0:32 500:64",
        "train_samples": 20_000,
        "seesaw_factor": 2,
        "seesaw_max_batch_size": 512,
    }
    config = Config(**keys)
    plan = build_plan(config, 4)
    record = recorded(config, plan, 5)
    for devices in (4, 8, 2):
        resumed = plan_to_resume(config, devices, record)
        assert (resumed.clock, resumed.total_steps, resumed.ramp) == (
            plan.clock,
            plan.total_steps,
            plan.ramp,
        )
        record = recorded(config, resumed, 5)
    for change in (
        {"train_samples": 30_000},
        {"seesaw_factor": 4},
        {"seesaw_factor": None, "seesaw_max_batch_size": None},
    ):
        with pytest.raises(ResumeMismatchError, match=next(iter(change))):
            plan_to_resume(Config(**(keys | change)), 4, record)


def test_a_run_continues_by_samples_with_seesaw():
    """`on_plan_change=continue_by_samples` turns Seesaw on in the middle of a run."""
    keys = {"per_device_batch_size": 16, "train_samples": 20_000}
    config = Config(**keys)
    changed = Config(**keys, seesaw_factor=2, on_plan_change="continue_by_samples")
    plan = plan_to_resume(changed, 4, recorded(config, build_plan(config, 4), 200))
    assert plan.ramp.samples_before(200) == 200 * 64
    assert max(plan.ramp.sizes) > 64
    assert plan.consumed_samples >= 20_000
    again = plan_to_resume(changed, 4, recorded(changed, plan, 210))
    assert (again.clock, again.total_steps) == (plan.clock, plan.total_steps)


def test_a_longer_budget_without_shares_is_the_same_ramp():
    """A budget that the ramp does not depend on can be extended; one that shares depend
    on is part of the ramp.
    """
    short, long = (
        Config(train_samples=n, batch_size_schedule="0:16 100:32") for n in (1000, 2000)
    )
    record = recorded(short, build_plan(short, 4), 5)
    assert (
        plan_to_resume(long, 8, record).total_steps
        > plan_to_resume(short, 8, record).total_steps
    )
    shares = [Config(train_samples=n, **SHARES) for n in (10_000, 20_000)]
    with pytest.raises(ResumeMismatchError, match="train_samples: 10000 -> 20000"):
        plan_to_resume(shares[1], 4, recorded(shares[0], build_plan(shares[0], 4), 5))


@pytest.mark.parametrize("tokens", [NANOCHAT_REFERENCE_TOKENS, 10**10, 10**11, 10**12])
def test_the_keys_of_nanochat_have_its_three_formulas(tokens):
    """Batch, learning rate and weight decay as nanochat's base_train.py computes
    them.
    """
    total = 2 ** round(math.log2(2**19 * (tokens / NANOCHAT_REFERENCE_TOKENS) ** 0.383))
    config = Config(
        batch_size_schedule=f"0:{total // 2048}",
        batch_scaling="timescale",
        batch_scaling_reference=2**19 // 2048,
        adam_weight_decay_reference_tokens=NANOCHAT_REFERENCE_TOKENS,
        train_tokens=tokens,
        max_target_length=2048,
        adam_weight_decay=0.28,
        eval_interval=-1,
    )
    plan = build_plan(config, 8)
    assert plan.clock[0].scale == pytest.approx((total / 2**19) ** 0.5)
    decay = 0.28 * math.sqrt(total / 2**19) * (NANOCHAT_REFERENCE_TOKENS / tokens)
    assert hyperparameters(config, plan)[0].weight_decay == pytest.approx(decay)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(32, 0.999), (64, 0.998), (128, 0.996), (256, 0.992), (512, 0.984), (2048, 0.95)],
)
def test_the_keys_of_marin_have_its_beta2(batch, expected):
    """The values that marin's issue lists for sequences of 4,096 tokens; tokens count,
    not sequences.
    """
    for length in (4096, 1024):
        size = batch * 4096 // length
        config = Config(
            adam_b2=0.999,
            batch_scaling="half_life",
            adam_b2_floor=0.95,
            batch_scaling_reference=32 * 4096 // length,
            batch_size_schedule=f"0:{size}",
            max_target_length=length,
            eval_interval=-1,
        )
        assert hyperparameters(config, build_plan(config, 8))[0].b2 == pytest.approx(
            expected, abs=5e-4
        )


def test_olmo_preset_has_the_published_sizes_and_rates():
    """Batches of 1,024 to 4,096 sequences. The first batch has the given rate, others
    more.
    """
    plan = build_plan(load_config("olmo_1b", ["train_tokens=1T"]))
    assert (plan.ramp.sizes, plan.ramp.ramp_steps) == ((1024, 2048, 4096), 79_990)
    assert [segment.scale for segment in plan.clock] == pytest.approx([1, 2**0.5, 2])


def test_a_rate_of_a_configuration_has_its_decay():
    """And its peak: nothing of the schedule is an argument beside the keys."""
    keys = {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.5, "steps": 100}
    keys |= {"enable_rampup_batch_size": False, "batch_size_schedule": "0:16"}
    config = Config(**keys, warmup_steps_fraction=0.0, learning_rate=0.02)
    rate = LearningRate.from_config(config, build_plan(config, 8))
    assert (rate.decay_fraction, rate.at(50)) == (0.5, 0.02)
    assert rate.at(75) == pytest.approx(0.02 * 0.55)
    with pytest.raises(TypeError, match="no argument 'peak'; it is learning_rate"):
        LearningRate.from_config(config, build_plan(config, 8), peak=0.02)


@pytest.mark.parametrize("clock", ["samples", "steps"])
@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_a_warm_up_in_steps_reaches_the_peak_at_that_step(clock, kind):
    """It is counted in optimizer steps, also where batches grow in it."""
    keys = {"batch_size_schedule": "0:8 80:16 240:32", "steps": 100, "warmup_steps": 17}
    rates = {"learning_rate_clock": clock, "lr_schedule_type": kind}
    config = Config(**keys, **rates, learning_rate=0.25)
    plan = build_plan(config, 4)
    rate = LearningRate.from_config(config, plan)
    values = [rate.at(step) for step in range(25)]
    assert values[17] == pytest.approx(0.25, rel=1e-6)
    assert values[0] == 0
    assert values[:18] == sorted({*values[:18]})
    assert rate(jnp.int32(17)) == pytest.approx(0.25, rel=1e-6)
    assert rate(jnp.int32(9)) == pytest.approx(values[9], rel=1e-6)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"warmup_steps": 101}, "warmup_steps=101 must be at most 100"),
        (
            {"warmup_steps": 91, "lr_schedule_type": "wsd"},
            "warmup_steps=91 must be at most 90",
        ),
        ({"warmup_steps": 5, "seesaw_factor": 2.0}, "set warmup_steps_fraction"),
        (
            {
                "warmup_steps": 5,
                "batch_size_schedule": "auto",
                "per_device_batch_size_start": 1,
                "measure_gradient_noise": True,
            },
            "needs warmup_steps=null",
        ),
    ],
)
def test_a_warm_up_in_steps_that_no_schedule_has_is_refused(keys, words):
    """The error names the key before any work starts."""
    with pytest.raises(ConfigError, match=words):
        build_plan(Config(**{"per_device_batch_size": 4, "steps": 100} | keys), 4)


def test_the_warm_up_that_is_set_last_counts(tmp_path):
    """A share on the command line replaces the steps of a file, and the other way."""
    (tmp_path / "run.yml").write_text("base_config: base.yml\nwarmup_steps: 7\n")
    file = load_config(tmp_path / "run.yml", ["steps=100"])
    assert file.warmup_steps == 7
    line = load_config(tmp_path / "run.yml", ["warmup_steps_fraction=0.3"])
    assert (line.warmup_steps, line.warmup_steps_fraction) == (None, 0.3)

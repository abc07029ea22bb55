"""Tests of rampup.contrib.lab.search."""

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import jax
import pytest
from helpers.tiny import TUNED, command_line
from hypothesis import given
from hypothesis import strategies as st

from rampup import Config, build_plan
from rampup.cli import main
from rampup.contrib.lab import search as tuning
from rampup.contrib.lab.programs import Programs, Timing
from rampup.contrib.lab.search import (
    GIB,
    MARGIN,
    find_largest,
    memory_limit,
    problem_of,
    proposals,
    tune,
)
from rampup.contrib.lab.topology import compiler_version, topology_devices
from rampup.errors import BatchDivisibilityError, ConfigError, MissingDependencyError
from rampup.lm.train import unconstrained

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


@given(
    st.lists(st.integers(0, 1000), min_size=200, max_size=200), st.integers(-10, 10**5)
)
def test_find_largest_agrees_with_trying_all(rises, limit):
    """For any costs that do not decrease, the largest size within the limit and the
    next one are found, and both were tried.
    """
    plan = build_plan(Config(**RAMP), 1)
    costs, tried = list(itertools.accumulate(rises)), []
    programs = SimpleNamespace(plan=plan, splitter=plan.splitter, size=lambda b: b)
    programs.bytes = lambda b: tried.append(b) or costs[min(b, 199)]
    programs.topology = None
    found = find_largest(programs, limit)
    fits = [
        b
        for b in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)
        if costs[min(b, 199)] <= limit
    ]
    assert found[0] == max(fits, default=None)
    assert set(found) - {None} <= set(tried)
    assert found[1] is None or costs[min(found[1], 199)] > limit
    assert len(tried) <= 8


@pytest.mark.parametrize(
    ("seconds", "spread", "said"),
    [(9.7, 0.001, "faster than"), (11.0, 0.3, "not certain"), (11.0, 0.02, None)],
)
def test_notes_say_that_the_choice_is_a_tie_or_within_the_noise(
    programs, seconds, spread, said
):
    """An alternative that is faster, or whose time differs by less than the times vary,
    is named with the rule that decides.
    """
    first, second, *_ = proposals(Config(**RAMP), build_plan(Config(**RAMP), 4), 8)
    chosen, other = (
        replace(first, run_seconds=10.0),
        replace(second, run_seconds=seconds),
    )
    times = {
        (b, 1): Timing(seconds=1.0, spread=spread, rounds=3)
        for b in chosen.sizes | other.sizes
    }
    notes = list(tuning._notes(programs, [other], chosen, times))
    texts = {
        "faster than": "microbatch_size=2 is 3.0% faster",
        "not certain": "up to 30%, and 1 of the alternatives",
    }
    for name, text in texts.items():
        assert [text in note for note in notes if name in note] == [True] * (
            said == name
        )


@pytest.mark.parametrize("found", [1, 2, 3, 5, 8, 16, 64])
@pytest.mark.parametrize("name", CONFIGS)
def test_proposals_keep_the_ramp_and_fit(name, found):
    """Every proposal is a legal configuration with the same batches at the same steps,
    in microbatches that fit.
    """
    config = Config(eval_interval=-1, **CONFIGS[name])
    plan = build_plan(config, 4)
    made = proposals(config, plan, found)
    legal = [
        unconstrained(plan.splitter).legal_microbatches([size])
        for size in plan.ramp.sizes
    ]
    assert made
    for proposal in made:
        again = build_plan(
            Config(eval_interval=-1, **(CONFIGS[name] | dict(proposal.settings))), 4
        )
        assert again.ramp.phases == plan.ramp.phases
        assert [split.global_batch_size for split in again.splits] == list(
            plan.ramp.sizes
        )
        assert again.splits == proposal.plan.splits
        assert max(split.microbatch_size for split in again.splits) <= found
        assert all(
            split.microbatch_size in sizes
            for split, sizes in zip(again.splits, legal, strict=True)
        )


def test_proposals_cover_each_policy():
    """One shape, two shapes and one per phase, the configuration's own policy first,
    without duplicates.
    """
    config = Config(**RAMP)
    made = proposals(config, build_plan(config, 4), 8)
    cuts = [
        tuple(split.microbatch_size for split in proposal.plan.splits)
        for proposal in made
    ]
    assert cuts == [
        (4, 4, 4, 4),
        (2, 2, 2, 2),
        (1, 1, 1, 1),
        (2, 2, 2, 8),
        (2, 4, 6, 8),
    ]
    assert made[0].to_dict() == {"microbatch_size": 4}
    assert made[3].settings["per_device_batch_size"] == Fraction(8)
    assert made[4].settings["gradient_accumulation_steps"] == 2
    assert len(set(cuts)) == len(cuts)


def test_proposal_seconds_counts_reached_steps():
    """Each phase counts with its reached steps; the total is infinite if a size was not
    timed.
    """
    config = Config(**RAMP, steps=40)
    plan = build_plan(config, 4)
    proposal = proposals(config, plan, 4)[0]
    steps = [
        min(phase.num_steps or 40, 40 - phase.start_step)
        for phase in plan.ramp.phases
        if phase.start_step < 40
    ]
    counts = [split.num_microbatches for split in proposal.reached]
    assert proposal.seconds(lambda b, n: 1.0) == sum(steps) == 40
    assert proposal.seconds(lambda b, n: n) == sum(
        s * n for s, n in zip(steps, counts, strict=True)
    )
    assert (
        proposal.seconds(lambda b, n: math.inf if n == counts[0] else 1.0) == math.inf
    )


@pytest.fixture(scope="module")
def programs():
    """The programs of the tiny configuration on one device."""
    return Programs(Config(**TUNED), jax.devices()[:1])


@pytest.mark.slow
def test_tune_recommends_settings_that_fit_and_were_timed(programs, capsys):
    """`rampup tune --json`: settings of a plan whose microbatches fit; every phase has
    its memory and throughput.
    """
    needs = programs.bytes(programs.size(2))
    settings = command_line(TUNED | {"enable_rampup_batch_size": False})
    memory = f"--memory-gib={math.ceil(needs / (1 - MARGIN))}/{GIB}"
    assert (
        main(["tune", "base.yml", *settings, memory, "--devices", "1", "--json"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert "error" not in facts
    assert (facts["largest_microbatch"], facts["next_larger"]) == (2, 4)
    assert needs <= facts["usable_bytes"] <= needs + 1
    fits = {row["microbatch_size"]: row["fits"] for row in facts["candidates"]}
    assert (fits[2], fits[4]) == (True, False)
    plan = build_plan(Config(**TUNED | facts["settings"]), 1)
    assert [row["microbatch_size"] for row in facts["phases"]] == [
        split.microbatch_size for split in plan.splits
    ]
    assert all(
        row["bytes"] <= facts["usable_bytes"] and row["tokens_per_second"] > 0
        for row in facts["phases"]
    )
    assert facts["run_seconds"] > 0


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
        ({}, {"memory_gib": 1, "num_devices": 9}, ConfigError, "between 1 and the 8"),
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
def test_nothing_fits_says_how_much_is_needed_and_what_saves_memory(programs):
    """One byte less than the smallest microbatch needs: no settings, and an error with
    the bytes and the keys that save some.
    """
    needs = programs.bytes(programs.size(1))
    limit = math.ceil((needs - 1) / (1 - MARGIN))
    found = tune(Config(**TUNED), memory_gib=f"{limit}/{GIB}", num_devices=1)
    assert (found["largest_microbatch"], found["settings"]) == (None, None)
    problem = problem_of(found)
    assert f"microbatch_size=1 needs {needs:,} bytes" in str(problem)
    assert "optimizer_memory_host_offload" in str(problem)
    assert problem.key == "microbatch_size"


@pytest.mark.parametrize(
    ("option", "said"),
    [("--memory-options", "remat_policy=full"), ("-o=memory.png", "draws no picture")],
)
def test_options_that_went_say_what_to_do(option, said, capsys):
    """The error of an option that there was names what is there instead."""
    assert main(["tune", "base.yml", "--memory-gib", "1", option]) == 2
    assert said in " ".join(capsys.readouterr().err.split())

"""Tests of rampup.contrib.check.skyrl: its rules on both sides of each boundary."""

import itertools

import pytest
from helpers.dialect_files import (
    boundary_test,
    checker,
    expect,
    numbers_test,
    verdict,
)

from rampup.contrib.check import check_command
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.skyrl import (
    CRITIC_MINI,
    DEVICES,
    DIALECT,
    KEYS,
    MICRO,
    MINI,
    RESPONSES,
    TRAIN,
    SkyRLJob,
)
from rampup.errors import ConfigError

GPUS, CRITIC_GPUS, REF_GPUS = (keys[0] for keys in DEVICES.values())
SEQUENCE, REF_SEQUENCE, CRITIC_SEQUENCE = (
    f"trainer.{model}.sequence_parallel_size" for model in ("policy", "ref", "critic")
)
CONTEXT = "trainer.policy.megatron_config.context_parallel_size"
REF_STAGES = "trainer.ref.megatron_config.pipeline_model_parallel_size"
BASE = {TRAIN: 64, MINI: 16, CRITIC_MINI: 16, MICRO: 2, GPUS: 4, RESPONSES: 4}
CRITIC = {"trainer.critic.model.path": "m", CRITIC_GPUS: 4}
MEGATRON = {
    "trainer.strategy": "megatron",
    "trainer.policy.megatron_config.tensor_model_parallel_size": 2,
}
MEGATRON4 = {**MEGATRON, REF_GPUS: 4}
ENGINES = "generator.inference_engine.num_engines"
skyrl = checker("skyrl", BASE)
BOUNDARIES = [
    ("policy_mini_divides_train", {MINI: 64}, {MINI: 65}, "rejects"),
    ("policy_mini_divides_train", {TRAIN: 48}, {TRAIN: 47}, "rejects"),
    (
        "policy_mini_reaches_every_replica",
        {MINI: 1, MICRO: 1},
        {MINI: 1, GPUS: 5},
        "rejects",
    ),
    ("micro_divides_policy_mini", {MICRO: 16}, {MICRO: 15}, "rejects"),
    ("micro_divides_policy_mini", {MICRO: 16}, {MICRO: 32}, "rejects"),
    (
        "critic_mini_divides_train",
        {**CRITIC, CRITIC_MINI: 64},
        {**CRITIC, CRITIC_MINI: 65},
        "rejects",
    ),
    (
        "critic_mini_divides_train",
        {**CRITIC, CRITIC_MINI: 32},
        {**CRITIC, CRITIC_MINI: 24},
        "rejects",
    ),
    (
        "critic_mini_reaches_every_replica",
        {**CRITIC, CRITIC_MINI: 2},
        {**CRITIC, CRITIC_MINI: 1, CRITIC_GPUS: 8},
        "rejects",
    ),
    (
        "micro_divides_critic_mini",
        {**CRITIC, CRITIC_MINI: 8, MICRO: 8},
        {**CRITIC, CRITIC_MINI: 8, MICRO: 16},
        "rejects",
    ),
    ("policy_has_a_replica", {SEQUENCE: 4}, {SEQUENCE: 5}, "rejects"),
    (
        "critic_has_a_replica",
        {**CRITIC, CRITIC_SEQUENCE: 4},
        {**CRITIC, CRITIC_SEQUENCE: 5},
        "rejects",
    ),
    ("megatron_divides_policy_devices", MEGATRON, {**MEGATRON, CONTEXT: 3}, "rejects"),
    (
        "megatron_divides_ref_devices",
        {**MEGATRON4, REF_STAGES: 4},
        {**MEGATRON4, REF_STAGES: 3},
        "rejects",
    ),
    ("megatron_has_no_critic", MEGATRON, {**MEGATRON, **CRITIC}, "rejects"),
    (
        "megatron_policy_sequence_parallel",
        MEGATRON,
        {**MEGATRON, SEQUENCE: 2},
        "rejects",
    ),
    (
        "megatron_ref_sequence_parallel",
        MEGATRON,
        {**MEGATRON, REF_SEQUENCE: 2},
        "rejects",
    ),
    (
        "samples_reach_every_replica",
        {REF_GPUS: 4, TRAIN: 16},
        {REF_GPUS: 65, TRAIN: 64},
        "rejects",
    ),
    ("engines_fill_the_devices", {ENGINES: 4}, {ENGINES: 3}, "rejects"),
    (
        "engines_fill_the_devices",
        {"generator.num_inference_engines": 4},
        {"generator.num_inference_engines": 5},
        "rejects",
    ),
    ("data_set_fills_a_step", {"num_prompts": 64}, {"num_prompts": 63}, "rejects"),
    ("no_tail_is_cut", {GPUS: 8}, {GPUS: 24, MICRO: 1}, "accepts"),
    ("colocated_ref_devices", {REF_GPUS: 4}, {REF_GPUS: 2}, "accepts"),
    ("colocated_critic_devices", CRITIC, {**CRITIC, CRITIC_GPUS: 2}, "accepts"),
    (
        "ref_has_a_replica",
        {REF_GPUS: 4, REF_SEQUENCE: 4},
        {REF_GPUS: 4, REF_SEQUENCE: 5},
        "accepts",
    ),
]
test_rules_break_just_beyond_their_boundary = boundary_test("skyrl", BASE, BOUNDARIES)


def test_rules_find_runs_that_the_check_of_skyrl_misses():
    """Of the 4,854 small configurations that SkyRL's check accepts, 1,413 stop in their
    first step and 235 are padded.
    """
    defaults = {key: entry.default for key, entry in KEYS.items()} | {
        "trainer.algorithm.use_kl_loss": False
    }
    accepted = stopped = padded = 0
    choices = ((2, 3, 4, 6, 8), (1, 2, 3, 4, 5, 8), range(1, 33), (1, 2, 3, 4))
    for replicas, responses, prompts, micro in itertools.product(*choices):
        for mini in (size for size in range(1, prompts + 1) if prompts % size == 0):
            sizes = {
                TRAIN: prompts,
                MINI: mini,
                MICRO: micro,
                RESPONSES: responses,
                GPUS: replicas,
            }
            job = SkyRLJob(Settings(values=defaults | sizes))
            broken = [rule.found_by for rule in DIALECT.rules(job) if not rule.holds]
            if "validator" not in broken:
                accepted += 1
                stopped += bool(broken)
                padded += not broken and job.outcome == "pads"
    assert (accepted, stopped, padded) == (4854, 1413, 235)


LEGACY = {
    "trainer.algorithm.loss_reduction": "token_mean_legacy",
    MINI: 32,
    RESPONSES: 3,
    GPUS: 5,
    TRAIN: 160,
    MICRO: 19,
}
SHARES, TOKENS = (
    {MINI: 3, MICRO: 3, RESPONSES: 5},
    {"trainer.max_tokens_per_microbatch": 8192},
)
SPLIT, NODES = (
    {"trainer.placement.colocate_all": False, GPUS: 4},
    {"trainer.placement.policy_num_nodes": 2, REF_GPUS: 4},
)
NUMBERS = [
    # SkyRL compares samples per replica, both rounded down: 6 * 5 // 4 = 7 is not a
    # multiple of 3 * 5 // 4 = 3.
    ({**SHARES, TRAIN: 6}, {"rules": ["policy_share_divides_train_share", "no_tail_is_cut"]}),
    ({**SHARES, TRAIN: 12}, {"run": "pads"}),
    ({**CRITIC, CRITIC_MINI: 3, RESPONSES: 5, TRAIN: 6, MINI: 6, MICRO: 1},
     {"rules": ["critic_share_divides_train_share", "no_tail_is_cut"]}),
    # The example of the guide: its error has 5,120 samples, SkyRL's has prompts.
    ({TRAIN: 1024, MINI: 300, RESPONSES: 5, MICRO: 1},
     {"rules": ["policy_mini_divides_train"], "validator": "rejects",
      "message": f"{TRAIN}=1,024 must be a multiple of {MINI}=300; nearest {TRAIN}: 900, 1200"}),
    # With a token budget the number of passes is unknown, and the rules of micro sizes
    # still apply.
    (TOKENS, {"ok": True, "accumulation_steps": "absent"}),
    ({**TOKENS, MICRO: 3}, {"rules": ["micro_divides_policy_mini"]}),
    # Prompts that do not fill a step are dropped.
    ({"num_prompts": 128}, {"run": "runs"}),
    ({"num_prompts": 129},
     {"run": "drops", "training_steps": 2, "total_optimizer_steps": 8, "note": "the last 1 prompt of 129"}),
    ({"trainer.strategy": "fsdp2"}, {"ok": True}),
    ({"trainer.policy.sequence_parallel_size": 3}, {"note": "rounded down"}),
    ({"trainer.placement.colocate_all": True}, {"note": "does not size the inference engines"}),
    (LEGACY, {"note": "weights wrongly"}),
    # SkyRL's check requires equal nodes and devices with colocate_policy_ref
    # (train/utils/utils.py, validate_cfg).
    (SPLIT, {"validator": "rejects", "rules": ["colocated_ref_num_gpus_per_node"], "message": "nearest " + REF_GPUS + ": 4"}),
    ({**SPLIT, REF_GPUS: 4}, {"ok": True}),
    ({**SPLIT, "trainer.placement.colocate_policy_ref": False}, {"ok": True}),
    ({**SPLIT, "trainer.algorithm.use_kl_loss": False}, {"ok": True}),
    ({**SPLIT, **NODES}, {"rules": ["colocated_ref_num_nodes"]}),
]  # fmt: skip
test_numbers_and_notes = numbers_test(skyrl, NUMBERS)


@pytest.mark.parametrize("key", [*BASE, SEQUENCE, "trainer.update_epochs_per_batch"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused(key, value):
    """Before anything is computed, with the least that the key may be."""
    with pytest.raises(ConfigError, match=rf"{key}={value} must be .*at least 1"):
        skyrl({key: value})


def test_fully_asynchronous_training_is_asked_about():
    """Its trainer has rules of its own; its program is refused."""
    key = "trainer.fully_async.enabled"
    with pytest.raises(
        ConfigError, match=f"unknown: {key}=True generates while it tra"
    ):
        skyrl({key: True})
    with pytest.raises(
        ConfigError, match=r"starts .*main_fully_async, which the rules"
    ):
        verdict("skyrl", "python -m skyrl.train.entrypoints.main_fully_async a.b=1")


def test_fine_tuning_is_refused():
    """SkyRL's other trainer has keys of its own, which are not covered."""
    with pytest.raises(ConfigError, match="not a file of SkyRL"):
        verdict("skyrl", "batch_size: 32\nmicro_train_batch_size_per_gpu: 4\n")
    with pytest.raises(
        ConfigError,
        match=r"starts skyrl.train.main_sft, which the rules of SkyRL do not cover",
    ):
        verdict("skyrl", "python -m skyrl.train.main_sft batch_size=32")


SIZES = (
    "trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256"
    " trainer.micro_train_batch_size_per_gpu=40"
    " trainer.micro_forward_batch_size_per_gpu=40"
)


@pytest.mark.parametrize(
    ("module", "settings", "version", "ok"),
    [
        ("skyrl_train.entrypoints.main_base", [], "SkyRL of 2025 (skyrl_train)", True),
        ("skyrl.train.entrypoints.main_base", [], "SkyRL of August 2026", False),
        ("skyrl.train.entrypoints.main_base", ["skyrl_version=legacy"], "SkyRL of 2025", True),
    ],
)  # fmt: skip
def test_the_name_of_the_module_tells_the_generation(module, settings, version, ok):
    """`skyrl_train` had DeepSpeed, which `skyrl` has not."""
    command = f"python3 -m {module} trainer.strategy=deepspeed {SIZES}"
    found = check_command(command.split(), "skyrl", settings)
    assert found.version.startswith(version)
    expect(found, ok=ok, samples_per_step=5120, optimizer_steps=4)


ASYNC = "generator.inference_engine.async_engine"
ENGINE = "generator.num_inference_engines=1"
OLD = r"SkyRL 0\.3 .*refuses.*num_inference_engines.*add skyrl_version=legacy"


@pytest.mark.parametrize(
    ("module", "key", "settings", "wanted"),
    [
        ("skyrl.train.entrypoints.main_base", ENGINE, [], OLD),
        ("skyrl.train.entrypoints.main_base", ENGINE, ["skyrl_version=head"], OLD),
        ("examples.train.algorithms.dapo.main_dapo", ENGINE, [], OLD),
        ("skyrl.train.entrypoints.main_base", ENGINE, ["skyrl_version=legacy"], True),
        ("skyrl_train.entrypoints.main_base", ENGINE, [], True),
        (
            "skyrl.train.entrypoints.main_base",
            "trainer.use_sample_packing=true",
            [],
            True,
        ),
        ("skyrl.train.entrypoints.main_base", f"{ASYNC}=true", [], True),
        (
            "skyrl.train.entrypoints.main_base",
            f"{ASYNC}=false",
            [],
            f"unknown: {ASYNC}=F",
        ),
        (
            "skyrl.train.entrypoints.main_base",
            "trainer.policy.megatron_config.transformer_config_kwargs.recompute_method=a",
            [],
            True,
        ),
    ],
)
def test_old_keys_are_refused_where_the_module_is_the_new_one(
    module, key, settings, wanted
):
    """SkyRL 0.1 and 0.2 translated the keys of 2025, 0.3 refuses them. A few it kept."""
    command = f"python3 -m {module} {SIZES} {key}".split()
    if wanted is True:
        expect(check_command(command, "skyrl", settings), ok=True, no_note="SkyRL had")
    else:
        with pytest.raises(ConfigError, match=wanted):
            check_command(command, "skyrl", settings)


def test_an_old_key_without_a_new_name_is_to_be_left_out():
    """The new names of engines do not help where the old key is of something else."""
    command = f"python3 -m skyrl.train.entrypoints.main_base {SIZES}"
    key = "trainer.placement.reward_num_nodes=2"
    with pytest.raises(ConfigError, match="if not, rename or leave out these keys"):
        check_command(f"{command} {key}".split(), "skyrl")


def test_an_entry_point_of_another_repository_is_asked_about():
    """One answer says that SkyRL's rules hold; keys of its own are then its own. One of
    2025 has the old keys, which `head` would refuse.
    """
    command = f"python3 -m my_agent.main_terminal {SIZES} trainer.own_key=1".split()
    said = r"my_agent/main_terminal, a program of a fork.*add skyrl_version=head \(or legacy"
    with pytest.raises(ConfigError, match=said):
        check_command(command, "skyrl")
    found = check_command(command, "skyrl", ["skyrl_version=head"])
    expect(found, ok=True, note=["a program of a fork", "trainer.own_key"])
    found = check_command([*command, ENGINE], "skyrl", ["skyrl_version=legacy"])
    expect(found, ok=True, note=["a program of a fork", "trainer.own_key"])


def test_the_run_ends_after_its_training_steps():
    """`trainer.max_training_steps` limits the run, with or without a known data set."""
    command = f"python3 -m skyrl.train.entrypoints.main_base {SIZES}".split()
    last = "trainer.max_training_steps=5"
    for more, steps in (([], 5), (["num_prompts=3072"], 3), (["num_prompts=9216"], 5)):
        expect(check_command([*command, last], "skyrl", more), training_steps=steps)

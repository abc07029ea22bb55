"""Tests of rampup.contrib.check.verl: its check, what only the run finds, its trainers and
versions, and keys that none has.
"""

import math

import pytest
from helpers.dialect_files import (
    boundary_test,
    cases,
    checker,
    expect,
    nested,
    numbers_test,
    rules,
    verdict,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup.contrib.check import check_command, check_file
from rampup.contrib.check.verl import (
    DYNAMICS,
    FILTER,
    GEN,
    GENERATIONS,
    LOSS,
    MICROS,
    MINIS,
    OLD_MICROS,
    RESPONSES,
    TRAIN,
    WORD,
    WORKERS,
)
from rampup.errors import ConfigError

A, R, REF = (
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.rollout.",
    "actor_rollout_ref.ref.",
)
MINI, C_MINI = MINIS.values()
MICRO, LOG, REF_LOG, C_MICRO = MICROS.values()
OLD, OLD_LOG, OLD_REF_LOG, C_OLD = OLD_MICROS.values()
DYNAMIC, LOG_DYNAMIC, *_ = DYNAMICS.values()
GPUS = "trainer.n_gpus_per_node"
STRATEGY, TP, CP = (
    f"{A}strategy",
    f"{A}megatron.tensor_model_parallel_size",
    f"{A}megatron.context_parallel_size",
)
SP, OLD_SP = (
    f"{A}fsdp_config.ulysses_sequence_parallel_size",
    f"{A}ulysses_sequence_parallel_size",
)
MODE = "trainer.v1.trainer_mode"
V0 = {"trainer.use_v1": False}
BASE = {
    TRAIN: 64,
    RESPONSES: 4,
    MINI: 16,
    MICRO: 4,
    LOG: 4,
    GPUS: 8,
    "algorithm.adv_estimator": "grpo",
}
CRITIC = {"algorithm.adv_estimator": "gae", C_MICRO: 4}
KL = {f"{A}use_kl_loss": True, REF_LOG: 4}
BUDGET = {DYNAMIC: True, MICRO: None, LOG: None}
MEGATRON = {STRATEGY: "megatron", TP: 2}
C_MEGATRON = {**CRITIC, "critic.strategy": "megatron"}
REF_ONLY = {**KL, **BUDGET, REF_LOG: None, SP: 4}
PACKING = "actor_rollout_ref.model.use_remove_padding"
DP, BY_MEGATRON = ({"model_engine": engine} for engine in ("dp", "megatron"))
COUNTS = (
    TRAIN,
    RESPONSES,
    MINI,
    MICRO,
    LOG,
    SP,
    f"{A}ppo_epochs",
    C_MINI,
    WORKERS,
    GPUS,
)
verl = checker("verl", BASE)
BOUNDARIES = [
    ("megatron_divides_devices", {**MEGATRON, CP: 4}, {**MEGATRON, CP: 3}, "rejects"),
    ("samples_fill_minimal_batch", {TRAIN: 18}, {TRAIN: 17}, "rejects"),
    (
        "samples_fill_minimal_batch",
        {**MEGATRON, TRAIN: 68},
        {**MEGATRON, TRAIN: 66},
        "rejects",
    ),
    ("actor_micro_given", {}, {MICRO: None}, "rejects"),
    ("actor_micro_given_once", {}, {OLD: 8}, "rejects"),
    ("mini_at_most_train", {MINI: 64}, {MINI: 65}, "rejects"),
    ("actor_old_micro_divides_mini", {}, {MICRO: None, OLD: 12}, "rejects"),
    ("actor_old_micro_reaches_every_device", {}, {MICRO: None, OLD: 4}, "rejects"),
    (
        "actor_micro_per_gpu_needed",
        MEGATRON,
        {**MEGATRON, MICRO: None, OLD: 8},
        "accepts",
    ),
    (
        "sequence_parallel_needs_packing",
        {OLD_SP: 2},
        {OLD_SP: 2, PACKING: False},
        "rejects",
    ),
    ("rollout_micro_given", {}, {LOG: None}, "rejects"),
    ("rollout_micro_given_once", {}, {OLD_LOG: 8}, "rejects"),
    ("ref_micro_given", KL, {**KL, REF_LOG: None}, "rejects"),
    ("ref_micro_given_once", KL, {**KL, OLD_REF_LOG: 8}, "rejects"),
    ("critic_micro_given", CRITIC, {**CRITIC, C_MICRO: None}, "rejects"),
    ("critic_micro_given_once", CRITIC, {**CRITIC, C_OLD: 8}, "rejects"),
    ("critic_micro_given_once", CRITIC, {**CRITIC, C_MICRO: None, C_OLD: 8}, "rejects"),
    ("critic_old_micro_divides_mini", CRITIC, {**CRITIC, C_OLD: 3}, "rejects"),
    ("critic_old_micro_reaches_every_device", CRITIC, {**CRITIC, C_OLD: 4}, "rejects"),
    (
        "critic_mini_at_most_train",
        {**CRITIC, C_MINI: 64},
        {**CRITIC, C_MINI: 65},
        "rejects",
    ),
    ("actor_has_a_replica", {SP: 8}, {SP: 9}, "accepts"),
    (
        "ref_has_a_replica",
        KL,
        {**KL, f"{REF}fsdp_config.ulysses_sequence_parallel_size": 9},
        "accepts",
    ),
    (
        "critic_has_a_replica",
        CRITIC,
        {**CRITIC, "critic.fsdp.ulysses_sequence_parallel_size": 9},
        "accepts",
    ),
    (
        "megatron_starts_actor",
        {**MEGATRON, **BUDGET},
        {**MEGATRON, **BUDGET, CP: 3},
        "accepts",
    ),
    (
        "megatron_starts_critic",
        C_MEGATRON,
        {**C_MEGATRON, "critic.megatron.pipeline_model_parallel_size": 3},
        "accepts",
    ),
    ("dynamic_everywhere", BUDGET, {**BUDGET, LOG_DYNAMIC: False}, "accepts"),
    ("dynamic_everywhere", {LOG_DYNAMIC: False}, {LOG_DYNAMIC: True}, "accepts"),
    ("actor_micro_per_gpu_needed", {}, {MICRO: None, OLD: 8}, "accepts"),
    ("rollout_micro_per_gpu_needed", {}, {LOG: None, OLD_LOG: 8}, "accepts"),
    ("ref_micro_per_gpu_needed", KL, {**KL, REF_LOG: None, OLD_REF_LOG: 8}, "accepts"),
    (
        "actor_mini_divides_over_replicas",
        {MINI: 2, MICRO: 1},
        {MINI: 3, MICRO: 1},
        "accepts",
    ),
    (
        "critic_mini_divides_over_replicas",
        {**CRITIC, C_MINI: 2},
        {**CRITIC, C_MINI: 3},
        "accepts",
    ),
    ("actor_mini_divides_share", {**V0, TRAIN: 80}, {**V0, TRAIN: 72}, "accepts"),
    (
        "critic_mini_divides_share",
        {**V0, **CRITIC, C_MINI: 32},
        {**V0, **CRITIC, C_MINI: 24},
        "accepts",
    ),
    ("micro_divides_mini", {MICRO: 8}, {MICRO: 16}, "accepts"),
    ("micro_divides_mini", {MICRO: 2}, {MICRO: 3}, "accepts"),
    ("rollout_micro_divides_share", {LOG: 32}, {LOG: 33}, "accepts"),
    ("ref_micro_divides_share", {**KL, REF_LOG: 16}, {**KL, REF_LOG: 12}, "accepts"),
    (
        "samples_divide_over_actor_replicas",
        {**V0, **BUDGET},
        {**V0, **BUDGET, TRAIN: 65, WORKERS: 1},
        "accepts",
    ),
    (
        "samples_divide_over_ref_replicas",
        {**REF_ONLY, TRAIN: 16, MINI: 2},
        {**REF_ONLY, TRAIN: 1, MINI: 1},
        "accepts",
    ),
    (
        "samples_divide_over_workers",
        {**V0, WORKERS: 256},
        {**V0, WORKERS: 257},
        "accepts",
    ),
    ("loss_is_known", {LOSS: "token-sum"}, {LOSS: "token-product"}, "rejects"),
    (
        "loss_is_known",
        {WORD: 0.4, LOSS: "seq-mean-token-sum"},
        {WORD: 0.4, LOSS: "token-sum"},
        "rejects",
    ),
    ("loader_divides_train", {GEN: 32}, {GEN: 33}, "accepts"),
    (
        "engines_divide_devices",
        {f"{R}tensor_model_parallel_size": 4},
        {f"{R}tensor_model_parallel_size": 3},
        "accepts",
    ),
    (
        "fsdp_size_divides_devices",
        {f"{A}fsdp_config.fsdp_size": 4},
        {f"{A}fsdp_config.fsdp_size": 3},
        "accepts",
    ),
    ("data_set_fills_a_step", {"num_prompts": 64}, {"num_prompts": 63}, "accepts"),
]
test_rules_break_just_beyond_their_boundary = boundary_test("verl", BASE, BOUNDARIES)


BUDGET_512, C_SP = (
    {**BUDGET, f"{A}ppo_max_token_len_per_gpu": 512},
    "critic.ulysses_sequence_parallel_size",
)
SHORT = "at least the longest sequence, 1,024: the first such sequence stops the run"
FILTERED = {FILTER: True, TRAIN: 512, GEN: 1536, MINI: 32, RESPONSES: 16}
PARTIAL = {"async_training.partial_rollout": True}
OWN_DEVICES = {
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 6,
    f"{R}tensor_model_parallel_size": 3,
}
NUMBERS = [
    # The check counts devices although the run needs only the replicas: a false
    # rejection.
    ({TRAIN: 5, MINI: 5, SP: 2, MICRO: 1, LOG: 1},
     {"data_parallel_size": 4, "message": "the devices, although a run needs only its replicas"}),
    # A token budget disables the checks of a static batch, and the newer trainer pads.
    ({**BUDGET, TRAIN: 5, MINI: 16, OLD: 3, MICRO: 7},
     {"validator": "accepts", "run": "pads", "padded_samples": 16 * 4 - 5 * 4, "accumulation_steps": "absent"}),
    # A budget below the longest sequence can stop the run; all devices that share a
    # sequence count.
    (BUDGET_512, {"note": SHORT}),
    ({**BUDGET_512, SP: 2}, {"no_note": SHORT}),
    # The critic's passes are filled by tokens, regardless of its micro size.
    ({**CRITIC, C_MICRO: 3}, {"ok": True, "note": "never reach its engine"}),
    ({OLD_SP: 2}, {"data_parallel_size": 4}),
    ({SP: 3}, {"note": "8 devices are not a multiple of the 3 that share a sample: veRL counts 2 replicas, rounded"}),
    ({SP: 5}, {"note": "veRL counts 1 replica, rounded down."}),
    ({**MEGATRON, OLD_SP: 8}, {"note": "ulysses_sequence_parallel_size has no effect with megatron"}),
    ({GPUS: 1}, {"note": "does not divide 1 device"}),
    ({**V0, GEN: 32}, {"note": "data.gen_batch_size=32 prompts"}),
    ({}, {"note": "once per training step"}),
    ({"num_prompts": 65}, {"note": "the last 1 prompt of 65"}),
    ({"algorithm.adv_estimator": None, C_MICRO: 4}, {"note": "gae by default"}),
    # An estimator of a fork may need a critic.
    ({"algorithm.adv_estimator": "turn_gae"}, {"note": "no critic is counted; critic.enable=true counts one"}),
    ({"algorithm.adv_estimator": "turn_gae", "critic.enable": False}, {"no_note": "no critic is counted"}),
    ({"algorithm.adv_estimator": "gdpo"}, {"no_note": "no critic is counted"}),
    ({**CRITIC, C_SP: 2}, {"note": "read by the check alone"}),
    (MEGATRON, {"data_parallel_size": 4}),
    # With filter_groups the trainer sets gen_batch_size to 1
    # (trainer/ppo/v1/trainer_base.py, _init_dataloader).
    (FILTERED, {"ok": True, "samples_per_step": 8192, "note": f"{FILTER} sets data.gen_batch_size to 1"}),
    ({**FILTERED, FILTER: False}, {"rules": ["loader_divides_train"]}),
    # DAPO's recipe generates in batches of gen_batch_size, but keeps train_batch_size
    # prompts (dapo_ray_trainer.py).
    ({**FILTERED, **V0}, {"ok": True, "samples_per_step": 8192, "mini_batches": 16, "note": "1,536 prompts at a time"}),
    (PARTIAL, {"samples_per_step": 64 * 4}),
    # Engines on devices of their own divide those, not the trainer's.
    (OWN_DEVICES, {"ok": True}),
    ({**OWN_DEVICES, "rollout.n_gpus_per_node": 8}, {"rules": ["engines_divide_devices"]}),
]  # fmt: skip
test_numbers_and_notes = numbers_test(verl, NUMBERS)


@given(sizes=st.tuples(*(st.integers(1, most) for most in (40, 40, 40, 6, 9))))
@settings(max_examples=60)
def test_newer_trainer_pads_to_full_mini_batches(sizes):
    """Samples are padded to the least multiple that suits replicas, actor and
    critic.
    """
    train, mini, critic, responses, replicas = sizes
    change = {
        TRAIN: train,
        MINI: mini,
        C_MINI: critic,
        RESPONSES: responses,
        GPUS: replicas,
        **CRITIC,
        **BUDGET,
    }
    found = verl(change)
    total = train * responses + found.derived["padded_samples"]
    multiple = math.lcm(replicas, mini * responses, critic * responses)
    assert total % multiple == 0
    assert total - multiple < train * responses <= total
    assert found.derived["mini_batches"] == total // (mini * responses)
    assert found.derived["critic_mini_batches"] == total // (critic * responses)
    assert found.ok == (
        mini * responses % replicas == 0 and critic * responses % replicas == 0
    )


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused(key, value):
    """Before anything is computed, with the least that the key may be."""
    with pytest.raises(ConfigError, match=rf"{key}={value} must be .*at least 1"):
        verl({key: value})


PP = f"{A}megatron.pipeline_model_parallel_size"


def test_model_engine_chooses_the_backend():
    """`model_engine` selects the base files, and with them the backend
    (trainer/config/ppo_trainer.yaml).
    """
    for sizes, replicas in ((DP, 8), ({**BY_MEGATRON, TP: 2, PP: 2}, 2)):
        found = verl(sizes)
        assert found.ok, rules(found)
        assert found.derived["data_parallel_size"] == replicas
        assert found.derived["accumulation_steps"] == 64 // replicas // 4
        critic = verl(sizes, CRITIC, {GPUS: 6})
        assert critic.ok == (sizes is DP and 64 % 6 == 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_engine", "veomni"),
        ("model_engine", "torchtitan"),
        (STRATEGY, "fsdp_turbo"),
        ("critic.strategy", "veomni"),
    ],
)
def test_backends_without_rules_are_refused(key, value):
    """The rules cover FSDP and Megatron; another backend has sizes of its own."""
    with pytest.raises(ConfigError, match=f"{key}='{value}' must be one of .*megatron"):
        verl({key: value})


@pytest.mark.parametrize(
    ("engine", "other"),
    [
        (DP, {STRATEGY: "megatron"}),
        (DP, {**BUDGET, STRATEGY: "megatron"}),
        (DP, {TP: 2}),
        (DP, C_MEGATRON),
        (BY_MEGATRON, {SP: 2}),
        (BY_MEGATRON, {STRATEGY: "fsdp"}),
    ],
)
def test_a_backend_beside_that_of_the_base_files_is_refused(engine, other):
    """The base files give each model the configuration class of one backend
    (trainer/config/ppo_trainer.yaml): sizes of another stop at the composition.
    """
    assert verl(engine, {STRATEGY: "fsdp2"} if engine is DP else {}).ok
    right = "megatron" if engine is DP else "dp"
    with pytest.raises(
        ConfigError, match=rf"not be set with model_engine=.*set model_engine={right}"
    ):
        verl(engine, other)


def test_commands_start_from_the_base_file_of_fsdp():
    """A command without --config-name has model_engine=dp; a complete file has the
    engine of its strategy.
    """
    command = [
        "python3",
        "-m",
        "verl.trainer.main_ppo",
        *(f"{key}={value}" for key, value in (BASE | MEGATRON).items()),
    ]
    with pytest.raises(ConfigError, match="must not be set with model_engine=dp"):
        check_command(command, "verl")
    group = "actor@actor_rollout_ref.actor=megatron_actor"
    for engine in (
        "model_engine=megatron",
        "--config-name=ppo_megatron_trainer",
        group,
    ):
        found = check_command([*command, engine], "verl")
        assert (rules(found), found.derived["data_parallel_size"]) == ([], 4)


@pytest.mark.parametrize(
    ("program", "settings", "samples"),
    [
        ("recipe.dapo.main_dapo", [], 48 * 4),
        ("recipe.dapo.main_dapo", [f"{FILTER}=True"], 16 * 4),
    ],
)
def test_program_decides_which_trainer_runs(program, settings, samples):
    """Without --config-name a command starts from its program's own base file
    (recipe/dapo/main_dapo.py: dapo_trainer).
    """
    sizes = [
        f"{key}={value}"
        for key, value in {
            TRAIN: 16,
            GEN: 48,
            RESPONSES: 4,
            MINI: 8,
            MICRO: 1,
            LOG: 1,
        }.items()
    ]
    command = [
        "python3",
        "-m",
        program,
        *sizes,
        "algorithm.adv_estimator=grpo",
        *settings,
    ]
    found = check_command(command, "verl")
    assert found.derived["samples_per_step"] == samples
    assert found.ok, rules(found)
    with_v1 = check_command(
        [word.replace(program, "verl.trainer.main_ppo") for word in command], "verl"
    )
    assert with_v1.ok == ("filter_groups" in str(settings))


def test_megatron_starts_on_full_replicas_where_no_check_tests_it():
    """A step filled by tokens has no check, which leaves it to Megatron's own start."""
    budget = {**BUDGET, STRATEGY: "megatron"}
    found = verl(budget, {TP: 3, GPUS: 4})
    assert ("megatron_starts_actor" in rules(found), found.validator, found.run) == (
        True,
        "accepts",
        "fails",
    )
    assert "megatron_starts_actor" not in rules(verl(budget, {TP: 2, GPUS: 4}))
    assert rules(verl(MEGATRON, {TP: 3, GPUS: 4})) == ["megatron_divides_devices"]


def test_trainers_of_their_own_are_refused_or_asked_about():
    """The recipe gkd (verl-recipe gkd/megatron/ray_trainer.py) and fully asynchronous
    training (experimental/fully_async_policy) have trainers and sizes of their own,
    which are not covered.
    """
    with pytest.raises(ConfigError, match="gkd, which has a trainer of its own"):
        verl({"actor_rollout_ref.teacher.server_ip": "127.0.0.1"})
    for mode in ("separate_async", "colocate_async"):
        with pytest.raises(ConfigError, match=f"{mode} generates while it trains"):
            verl({MODE: mode})
    for key in ("require_batches", "trigger_parameter_sync_step"):
        with pytest.raises(ConfigError, match="fully asynchronous training, whose"):
            verl({f"async_training.{key}": 4})
    with pytest.raises(
        ConfigError, match="starts main_gkd, which the rules of veRL do not cover"
    ):
        check_command(["python3", "-m", "main_gkd", "data.train_batch_size=64"], "verl")


@pytest.mark.parametrize(
    ("recipe", "settings", "samples"),
    [
        ("prime", [], 64 * 4),
        ("prime", [f"{RESPONSES}=8"], 64 * 8),
        ("sppo", [], 64),
        ("entropy", ["algorithm.adv_estimator=grpo", f"{RESPONSES}=2"], 64 * 2),
    ],
)
def test_a_recipe_starts_from_its_own_base_file(recipe, settings, samples):
    """PRIME's has 4 responses and RLOO, SPPO's no estimator (recipe/*/config of veRL
    0.4): neither has a critic, as veRL's own default would.
    """
    sizes = [f"{TRAIN}=64", f"{MINI}=64", f"{MICRO}=4", f"{LOG}=4", f"{GPUS}=4"]
    program = f"recipe.{recipe}.main_{recipe}"
    found = check_command(["python3", "-m", program, *sizes, *settings], "verl")
    assert found.derived["samples_per_step"] == samples
    assert not any("critic" in rule for rule in rules(found))


def test_the_recipe_spin_is_refused():
    """SPIN trains on pairs of responses, in a trainer and with sizes of its own."""
    command = ["python3", "-m", "recipe.spin.main_spin", f"{TRAIN}=64", f"{MINI}=16"]
    with pytest.raises(ConfigError, match="starts main_spin, which the rules of veRL"):
        check_command(command, "verl")


PPO = "python3 -m verl.trainer.main_ppo"
PASS_SIZE = f"{R}log_prob_micro_batch_size_per_gpu=4"
NEW = (
    f"algorithm.adv_estimator=grpo data.train_batch_size=64 {R}n=4"
    f" {A}ppo_mini_batch_size=16 {A}ppo_micro_batch_size_per_gpu=4 {PASS_SIZE}"
)
EARLY = (
    f"algorithm.adv_estimator=grpo data.train_batch_size=8 {R}n=16"
    f" {A}ppo_mini_batch_size=64 {A}ppo_micro_batch_size=16"
    f" {R}log_prob_micro_batch_size=160"
    " actor_rollout_ref.ref.log_prob_micro_batch_size=160 trainer.n_gpus_per_node=4"
)


@pytest.mark.parametrize(
    "case", cases("verl_versions"), ids=lambda case: case["version"]
)
def test_verdict_equals_the_checks_and_workers_of_each_version(case):
    """The answers are those of the validators and workers of 0.2 to 0.7, run on the
    same sizes; versions without rules of their own have those of the nearest.
    """
    nearest = "0.2" if case["version"] == "0.2" else "0.4"
    # 0.3 still counts the samples of a critic's mini batch, and since 0.5 the critic's
    # size is the deprecated key by default.
    is_critic = case["config"]["algorithm.adv_estimator"] == "gae"
    if not (is_critic and case["version"] not in GENERATIONS):
        found = verdict("verl", nested(case["config"]), f"verl_version={nearest}")
        expect(found, **case["expect"])


@pytest.mark.parametrize(
    ("version", "settings", "wanted"),
    [
        # A mini batch of more than a step is one update of all samples until 0.2.
        ("0.2", EARLY, {"ok": True, "optimizer_steps": 1, "mini_batch_samples": 128, "note": "more than there is"}),
        # Nothing reads the sizes of the whole job since 0.8.
        ("0.9", f"{EARLY} {A}ppo_mini_batch_size=8 {A}ppo_micro_batch_size=8", {"validator": "accepts", "run": "fails"}),
        # Only the newer trainer pads; the older workers take what is left as a last,
        # smaller mini batch.
        ("0.9", f"{NEW} {A}ppo_mini_batch_size=48", {"run": "pads", "padded_samples": 128}),
        ("0.4", f"{NEW} {A}ppo_mini_batch_size=48",
         {"run": "runs", "optimizer_steps": 2, "note": "the last update of a step has 64 samples instead of 192"}),
        # A pass of log-probabilities may be larger than what there is, until 0.7.
        ("0.4", NEW.replace(PASS_SIZE, PASS_SIZE.replace("=4", "=96")), {"ok": True}),
        ("0.9", NEW.replace(PASS_SIZE, PASS_SIZE.replace("=4", "=96")), {"rules": ["rollout_micro_divides_share"]}),
        # Until 0.7 a token budget holds the padded sequence, 1,024 tokens, or no batch
        # is trained (utils/seqlen_balancing.py, rearrange_micro_batches).
        *[
            (version, f"{NEW} {A}use_dynamic_bsz=true {A}ppo_max_token_len_per_gpu={budget}", wanted)
            for version in ("0.2", "0.4")
            for budget, wanted in (
                (1023, {"validator": "accepts", "run": "fails", "message": "actor.ppo_max_token_len_per_gpu * devices that share a sequence = 1,023 tokens must be at least the padded sequence, 1,024"}),
                (1024, {"ok": True}),
            )
        ],
    ],
)  # fmt: skip
def test_versions_differ_as_their_code_does(version, settings, wanted):
    """Mini batches above a step, the whole job's sizes, padding, and passes that are
    larger than what there is.
    """
    kept = {word.partition("=")[0]: word for word in f"{PPO} {settings}".split()}
    expect(
        check_command([*kept.values()], "verl", [f"verl_version={version}"]), **wanted
    )


def test_the_first_version_refuses_parts_of_the_devices():
    """Its sizes are divided by devices / fsdp_size, which no rule follows."""
    size = f"{A}fsdp_config.fsdp_size"
    with pytest.raises(ConfigError, match=r"veRL 0\.2 divides sizes by devices"):
        verl({WORD: 0.2, size: 4})
    assert verl({WORD: 0.4, size: 4}).version == "veRL 0.4"


def test_version_is_stated_by_the_user_a_file_or_the_keys(tmp_path):
    """In this order; the report names the version and why, and other possible versions
    that decide otherwise.
    """
    (tmp_path / "a" / "b").mkdir(parents=True)
    script = tmp_path / "a" / "b" / "run.sh"

    def check(text, *settings):
        script.write_text(text)
        return check_file(script, "verl", settings)

    assert check(f"{PPO} {NEW}").version == "veRL of August 2026 (1dda039)"
    found = check(f"{PPO} {EARLY}")  # its sizes of the whole job are read until 0.7
    assert found.version == "veRL 0.4"
    said = ["later versions do not read", "fits veRL 0.2 too"]
    expect(found, note=[*said, "verl_version=0.2 shows it"])
    fitting = "the rules are those of veRL 0.2: +trainer.balance_batch does not fit"
    expect(check(f"{PPO} {NEW} +trainer.balance_batch=True"), note=fitting)
    version = tmp_path / "verl" / "version" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("0.4rc1\n")
    expect(check(f"{PPO} {NEW}"), note="the rules are those of veRL 0.4: ")
    version.write_text("0.0.2\n")
    found = check(f"{PPO} {EARLY}")
    assert (found.version, found.ok) == ("veRL 0.2", True)
    expect(found, note="verl/version/version says 0.0.2")
    assert check(f"{PPO} {EARLY}", "verl_version=0.4").version == "veRL 0.4"
    with pytest.raises(ConfigError, match=r"verl_version=0\.6 must be one of 0\.2, 0"):
        check(f"{PPO} {EARLY}", "verl_version=0.6")


@pytest.mark.parametrize(
    ("version", "nearest", "key"),
    [
        ("0.6.1", "0.4", "global_profiler.steps=null"),
        ("0.8.0", "0.9", "trainer.use_v1=False"),
    ],
)
def test_a_version_without_rules_is_named_and_asked_about(
    tmp_path, version, nearest, key
):
    """The answer chooses the rules, and keeps the keys of the file's own version."""
    script = tmp_path / "run.sh"
    script.write_text(f"{PPO} {NEW} trainer.nonsense=1 {key}\n")
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text(f"{version}\n")
    said = rf"for veRL {version[:3]} \(.*says {version}\).*verl_version={nearest}"
    with pytest.raises(ConfigError, match=said):
        check_file(script, "verl")
    found = check_file(script, "verl", [f"verl_version={nearest}"])
    assert rules(found) == ["known_keys"]
    message = found.violations[0].message
    assert "trainer.nonsense" in message
    assert ("use_v1" in message) == (version == "0.8.0")
    assert "profiler" not in message


def test_program_starts_from_the_base_file_beside_it(tmp_path):
    """A vendored base file gives the defaults and the keys that Hydra finds, also those
    of its groups.
    """
    folder = tmp_path / "verl" / "trainer" / "config"
    (folder / "actor").mkdir(parents=True)
    (folder / "ppo_trainer.yaml").write_text(
        "defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - _self_\ndata:"
        " {train_batch_size: 64, own_key: 1}\nalgorithm: {adv_estimator: grpo}\ncritic:"
        " {enable: false}\nactor_rollout_ref: {rollout: {n: 4,"
        " log_prob_micro_batch_size_per_gpu: 4}}\n"
    )
    (folder / "actor" / "dp_actor.yaml").write_text(
        "defaults: [actor, _self_]\nppo_micro_batch_size_per_gpu: 4\n"
    )
    (folder / "actor" / "actor.yaml").write_text(
        "ppo_mini_batch_size: 32\nppo_micro_batch_size_per_gpu: 8\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(f"{PPO} data.own_key=2\n")
    expect(
        check_file(script, "verl"),
        ok=True,
        samples_per_step=256,
        mini_batches=2,
        accumulation_steps=4,
    )


def test_keys_and_programs_that_no_version_has_are_never_ignored(tmp_path):
    """One that looks like a size, and another trainer, are questions; Hydra refuses any
    other key without `+`.
    """
    command = f"{PPO} {NEW} data.n_samples=8".split()
    said = (
        r"unknown, a fork: data\.n_samples=8 is a key of no version of veRL.*add"
        r" data\.n_samples=null"
    )
    with pytest.raises(ConfigError, match=said):
        check_command(command)
    assert (
        check_command(
            command, "verl", ["data.n_samples=null", "data.train_batch_size=512"]
        ).derived["optimizer_steps"]
        == 32
    )
    for key in (f"{R}n_agent", f"{R}n_trajectories", "env.rollout.n", "+agent_grpo.n"):
        with pytest.raises(ConfigError, match="unknown, a fork: "):
            check_command([*command[:-1], f"{key}=8"], "verl")
    script = tmp_path / "run.sh"
    script.write_text(f"{PPO} {NEW} \\\n  data.my_own=2 +data.mine=3\n")
    said = "data.my_own (line 1) must be written with `+`"
    expect(
        check_file(script, "verl"),
        rules=["known_keys"],
        validator="rejects",
        message=said,
    )
    script.write_text(f"{PPO} {NEW} data.my_own=2 trainer.its_own=1\n")
    expect(
        check_file(script, "verl", ["data.my_own=2"]),
        ok=True,
        note="a fork: trainer.its_own are taken as keys of its own",
    )
    fork = " ".join(["python3 -m verl.agent_trainer.main_ppo", NEW]).split()
    said = (
        r"starts verl/agent_trainer/main_ppo, a program of a fork.*add"
        r" verl_version=0\.4"
    )
    with pytest.raises(ConfigError, match=said):
        check_command(fork)
    expect(
        check_command(fork, "verl", ["verl_version=0.4"]),
        ok=True,
        note="a program of a fork",
    )


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("0.9", f"{A}fsdp_config.grad_offload=True"),
        ("0.9", f"{R}val_kwargs.max_reward=3.0"),
        ("0.9", f"{A}optim.nonsense=1"),
        ("0.9", f"{R}engine_kwargs.vllm.swap_space=1"),
        ("0.9", "data.custom_cls.nonsense=x"),
        ("0.4", "critic.optim.lr_warmup=3"),
        ("0.4", "algorithm.kl_ctrl.taget_kl=0.1"),
    ],
)
def test_keys_of_sections_are_looked_up_as_hydra_does(version, key):
    """Below the third level too, a key that the version does not have is refused, and
    accepted with `+`.
    """
    command = f"{PPO} {NEW}".split()
    stated = [f"verl_version={version}"]
    found = check_command([*command, key], "verl", stated)
    expect(found, rules=["known_keys"], message=f"{key.partition('=')[0]} must be")
    assert check_command([*command, f"+{key}"], "verl", stated).ok


def test_no_padding_is_told_of_a_run_that_fails():
    """It never comes to it."""
    padded = {TRAIN: 24, RESPONSES: 4, MINI: 16}
    expect(verl(padded), run="pads", note="short artificial samples")
    broken = verl(padded | {MINI: 17})
    expect(broken, run="fails", no_note=["short artificial samples"])
    assert broken.derived["padded_samples"]


@pytest.mark.parametrize("model", ["actor", "critic", "ref"])
def test_a_model_of_megatron_without_a_replica_breaks_a_rule(model):
    """More devices share a sample than there are: no number of it is known, and the
    verdict says so.
    """
    prefix = model if model == "critic" else f"actor_rollout_ref.{model}"
    found = check_file(
        ("python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=64"),
        "verl",
        [
            "model_engine=megatron",
            "actor_rollout_ref.actor.use_kl_loss=true",
            f"{prefix}.megatron.context_parallel_size=9",
        ],
    )
    assert f"verl.megatron_starts_{model}" in {v.rule for v in found.violations}

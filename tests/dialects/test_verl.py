"""Tests of rampup.dialects.verl: its check, what only the run finds, and both trainers."""

import math

import pytest
from helpers.dialect_files import agrees, case_settings, cases, check_nearest, nested, rules, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup.dialects import check_command

A, R, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
TRAIN, RESPONSES, GPUS = "data.train_batch_size", f"{R}n", "trainer.n_gpus_per_node"
MINI, MICRO, OLD, DYNAMIC = (
    f"{A}{name}" for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size", "use_dynamic_bsz")
)
LOG, OLD_LOG, LOG_DYNAMIC = (
    f"{R}log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size", "use_dynamic_bsz")
)
REF_LOG, OLD_REF_LOG = f"{REF}log_prob_micro_batch_size_per_gpu", f"{REF}log_prob_micro_batch_size"
C_MINI, C_MICRO, C_OLD = (
    f"critic.{name}" for name in ("ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size")
)
STRATEGY, TP, CP = f"{A}strategy", f"{A}megatron.tensor_model_parallel_size", f"{A}megatron.context_parallel_size"
SP, OLD_SP = f"{A}fsdp_config.ulysses_sequence_parallel_size", f"{A}ulysses_sequence_parallel_size"
SYNC, MODE = "trainer.v1.separate_async.parameter_sync_step", "trainer.v1.trainer_mode"
V0, GEN, WORKERS, LEGACY = {"trainer.use_v1": False}, "data.gen_batch_size", f"{R}agent.num_workers", {"verl_version": "legacy"}
BASE = {TRAIN: 64, RESPONSES: 4, MINI: 16, MICRO: 4, LOG: 4, GPUS: 8, "algorithm.adv_estimator": "grpo"}
CRITIC = {"algorithm.adv_estimator": "gae", C_MICRO: 4}
KL = {f"{A}use_kl_loss": True, REF_LOG: 4}
BUDGET = {DYNAMIC: True, MICRO: None, LOG: None}
MEGATRON = {STRATEGY: "megatron", TP: 2}


def verl(*changes, **extra):
    """Check the base file with changes; None takes a key away."""
    config = dict(BASE)
    for change in (*changes, extra):
        config |= change
    return verdict("verl", nested({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("case", cases("verl"), ids=lambda case: case["name"])
def test_verdict_equals_every_reference_case(case):
    """Both verdicts and every number are those of veRL's own code."""
    found = verdict("verl", case["config"], *case_settings(case))
    assert not agrees(found, case["expect"])
    check_nearest("verl", case["config"], case_settings(case), found)


BOUNDARIES = [
    # rule, changes that just hold, changes that just break it, validator's verdict on the latter
    ("megatron_divides_devices", {**MEGATRON, CP: 4}, {**MEGATRON, CP: 3}, "rejects"),
    ("samples_fill_minimal_batch", {TRAIN: 18}, {TRAIN: 17}, "rejects"),
    ("samples_fill_minimal_batch", {**MEGATRON, TRAIN: 68}, {**MEGATRON, TRAIN: 66}, "rejects"),
    ("actor_micro_given", {}, {MICRO: None}, "rejects"),
    ("actor_micro_given_once", {}, {OLD: 8}, "rejects"),
    ("mini_at_most_train", {MINI: 64}, {MINI: 65}, "rejects"),
    ("actor_old_micro_divides_mini", {}, {MICRO: None, OLD: 12}, "rejects"),
    ("actor_old_micro_reaches_every_device", {}, {MICRO: None, OLD: 4}, "rejects"),
    ("megatron_micro_per_gpu_needed", MEGATRON, {**MEGATRON, MICRO: None, OLD: 8}, "rejects"),
    (
        "sequence_parallel_needs_packing",
        {OLD_SP: 2},
        {OLD_SP: 2, "actor_rollout_ref.model.use_remove_padding": False},
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
    ("critic_mini_at_most_train", {**CRITIC, C_MINI: 64}, {**CRITIC, C_MINI: 65}, "rejects"),
    ("actor_has_a_replica", {SP: 8}, {SP: 9}, "accepts"),
    ("ref_has_a_replica", KL, {**KL, f"{REF}fsdp_config.ulysses_sequence_parallel_size": 9}, "accepts"),
    ("critic_has_a_replica", CRITIC, {**CRITIC, "critic.fsdp.ulysses_sequence_parallel_size": 9}, "accepts"),
    ("megatron_starts_actor", {**MEGATRON, **BUDGET}, {**MEGATRON, **BUDGET, CP: 3}, "accepts"),
    (
        "megatron_starts_critic",
        {**CRITIC, "critic.strategy": "megatron"},
        {**CRITIC, "critic.strategy": "megatron", "critic.megatron.pipeline_model_parallel_size": 3},
        "accepts",
    ),
    ("dynamic_everywhere", BUDGET, {**BUDGET, LOG_DYNAMIC: False}, "accepts"),
    ("dynamic_everywhere", {LOG_DYNAMIC: False}, {LOG_DYNAMIC: True}, "accepts"),
    ("actor_micro_per_gpu_needed", {}, {MICRO: None, OLD: 8}, "accepts"),
    ("rollout_micro_per_gpu_needed", {}, {LOG: None, OLD_LOG: 8}, "accepts"),
    ("ref_micro_per_gpu_needed", KL, {**KL, REF_LOG: None, OLD_REF_LOG: 8}, "accepts"),
    ("actor_mini_divides_over_replicas", {MINI: 2, MICRO: 1}, {MINI: 3, MICRO: 1}, "accepts"),
    ("critic_mini_divides_over_replicas", {**CRITIC, C_MINI: 2}, {**CRITIC, C_MINI: 3}, "accepts"),
    ("actor_mini_divides_share", {**V0, TRAIN: 80}, {**V0, TRAIN: 72}, "accepts"),
    ("critic_mini_divides_share", {**V0, **CRITIC, C_MINI: 32}, {**V0, **CRITIC, C_MINI: 24}, "accepts"),
    ("micro_divides_mini", {MICRO: 8}, {MICRO: 16}, "accepts"),
    ("micro_divides_mini", {MICRO: 2}, {MICRO: 3}, "accepts"),
    ("rollout_micro_divides_share", {LOG: 32}, {LOG: 33}, "accepts"),
    ("ref_micro_divides_share", {**KL, REF_LOG: 16}, {**KL, REF_LOG: 12}, "accepts"),
    ("samples_divide_over_actor_replicas", {**V0, **BUDGET}, {**V0, **BUDGET, TRAIN: 65, WORKERS: 1}, "accepts"),
    (
        "samples_divide_over_ref_replicas",
        {**KL, **BUDGET, REF_LOG: None, SP: 4, TRAIN: 16, MINI: 2},
        {**KL, **BUDGET, REF_LOG: None, SP: 4, TRAIN: 1, MINI: 1},
        "accepts",
    ),
    ("samples_divide_over_workers", {**V0, WORKERS: 256}, {**V0, WORKERS: 257}, "accepts"),
    ("parts_divide_train", {"trainer.v1.sync.parameter_sync_step": 4}, {"trainer.v1.sync.parameter_sync_step": 3}, "accepts"),
    ("part_is_one_mini_batch", {MODE: "separate_async", SYNC: 4, LOG: 8}, {MODE: "separate_async", SYNC: 2}, "accepts"),
    ("loader_divides_train", {GEN: 32}, {GEN: 33}, "accepts"),
    ("engines_divide_devices", {f"{R}tensor_model_parallel_size": 4}, {f"{R}tensor_model_parallel_size": 3}, "accepts"),
    ("data_set_fills_a_step", {"num_prompts": 64}, {"num_prompts": 63}, "accepts"),
    ("legacy_actor_mini_reaches_every_replica", {**LEGACY, MINI: 2, MICRO: 1}, {**LEGACY, MINI: 1, MICRO: 1}, "accepts"),
    ("legacy_actor_micro_divides_mini", {**LEGACY, MICRO: 8}, {**LEGACY, MICRO: 16}, "accepts"),
    (
        "legacy_actor_micro_divides_mini",
        {**LEGACY, MICRO: None, OLD: 16},
        {**LEGACY, MICRO: None, OLD: 28, MINI: 28},
        "accepts",
    ),
    ("legacy_critic_micro_divides_mini", {**LEGACY, **CRITIC}, {**LEGACY, **CRITIC, C_MICRO: 3}, "accepts"),
    ("legacy_critic_mini_reaches_every_replica", {**LEGACY, **CRITIC}, {**LEGACY, **CRITIC, C_MINI: 1}, "accepts"),
]


@pytest.mark.parametrize(
    ("rule", "holds", "breaks", "validator"), BOUNDARIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_rules_break_just_beyond_their_boundary(rule, holds, breaks, validator):
    """One step to either side of each rule."""
    valid, invalid = verl(holds), verl(breaks)
    assert valid.ok, rules(valid)
    assert rule in rules(invalid)
    assert (invalid.validator, invalid.run) == (validator, "fails")
    config = {key: value for key, value in (BASE | breaks).items() if value is not None}
    check_nearest("verl", nested(config), [], invalid)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("key", [TRAIN, RESPONSES, MINI, MICRO, LOG, GPUS, SP, f"{A}ppo_epochs", C_MINI, WORKERS])
def test_counts_must_be_positive(key, value):
    """Zero and less break one rule and cause no division by zero."""
    found = verl(CRITIC, {key: value})
    assert f"positive.{key}" in rules(found)
    assert found.validator == ("rejects" if key == GPUS else "accepts")


def test_check_of_verl_ignores_shared_sequences():
    """A false rejection: 20 samples would suffice for 4 replicas, but the check counts 8 devices."""
    found = verl({TRAIN: 5, MINI: 5, SP: 2, MICRO: 1, LOG: 1})
    assert found.derived["data_parallel_size"] == 4
    assert "the run itself would need only the 4 replicas" in found.violations[0].message


def test_token_budget_disables_the_checks():
    """The checks of a static batch do not apply to a dynamic one; the newer trainer then pads."""
    found = verl(BUDGET, {TRAIN: 5, MINI: 16, OLD: 3, MICRO: 7})
    assert (found.validator, found.run) == ("accepts", "pads")
    assert found.derived["padded_samples"] == 16 * 4 - 5 * 4
    assert "accumulation_steps" not in found.derived


def test_note_reports_a_short_token_budget():
    """A budget below the longest sequence can stop the run; all devices that share a sequence count."""
    budget = {**BUDGET, f"{A}ppo_max_token_len_per_gpu": 512}
    assert any("less than the longest sequence" in note for note in verl(budget).notes)
    assert not any("less than the longest sequence" in note for note in verl(budget, {SP: 2}).notes)


@given(
    train=st.integers(1, 40),
    mini=st.integers(1, 40),
    critic=st.integers(1, 40),
    responses=st.integers(1, 6),
    replicas=st.integers(1, 9),
)
@settings(max_examples=60)
def test_newer_trainer_pads_to_full_mini_batches(train, mini, critic, responses, replicas):
    """Samples are padded to the least multiple that suits replicas, actor and critic."""
    change = {TRAIN: train, MINI: mini, C_MINI: critic, RESPONSES: responses, GPUS: replicas, **CRITIC, **BUDGET}
    found = verl(change)
    total = train * responses + found.derived["padded_samples"]
    multiple = math.lcm(replicas, mini * responses, critic * responses)
    assert total % multiple == 0
    assert total - multiple < train * responses <= total
    assert found.derived["mini_batches"] == total // (mini * responses)
    assert found.derived["critic_mini_batches"] == total // (critic * responses)
    fits = mini * responses % replicas == 0 and critic * responses % replicas == 0
    assert found.ok == fits


def test_separate_async_trains_in_parts():
    """separate_async trains on one mini batch at a time, with the same optimizer steps."""
    found = verl({MODE: "separate_async", SYNC: 4, LOG: 8})
    assert found.derived["mini_batches"] == 4
    assert found.derived["padded_samples"] == 0
    assert any("4 times, with 64 samples each" in line for line in found.flow)


def test_legacy_version_rounds_down():
    """Sizes per replica were rounded down, remainders of log-probability passes allowed, and nothing was padded."""
    found = verl(LEGACY, {MINI: 17, MICRO: 2, LOG: 5, TRAIN: 64})
    assert (found.validator, found.run) == ("accepts", "runs")
    assert found.derived["mini_batches"] == 4
    assert found.derived["mini_batch_samples"] == 17 * 4 // 8 * 8
    assert found.derived["accumulation_steps"] == 4
    assert "micro_divides_mini" not in rules(found)
    old = verl(LEGACY, {MICRO: None, OLD: 16})
    assert old.ok
    assert old.derived["accumulation_steps"] == 4


def test_note_reports_that_critic_keys_are_ignored():
    """The critic's passes are filled by tokens, regardless of its micro size."""
    found = verl(CRITIC, {C_MICRO: 3})
    assert found.ok
    assert any("never reach its engine" in note for note in found.notes)
    assert found.plan.critic.token_budget == 32_768


def test_older_trainer_uses_gen_batch_size():
    """With gen_batch_size a step of the older trainer has that many prompts."""
    found = verl(V0, {GEN: 32})
    assert found.derived["samples_per_step"] == 128
    assert any("data.gen_batch_size=32 prompts" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({OLD_SP: 2}, f"{OLD_SP} is deprecated; use {SP}"),
        ({"data.train_prompt_bsz": 64}, f"the key is {TRAIN}"),
        ({"data.val_batch_size": 8}, "validation is dispatched as a whole"),
        ({SP: 3}, "8 devices are not a multiple of the 3 that share a sample: veRL counts 2 replicas, rounded"),
        ({SP: 5}, "veRL counts 1 replica, rounded down."),
        ({GPUS: 1}, "does not divide 1 device"),
        ({GEN: 4, MODE: "colocate_async"}, "sets data.gen_batch_size to 1"),
        ({}, "once per training step"),
        ({"num_prompts": 65}, "the last 1 prompt of 65"),
        ({"algorithm.adv_estimator": None, C_MICRO: 4}, "gae by default"),
        ({**CRITIC, "critic.ulysses_sequence_parallel_size": 2}, "read by the check alone"),
    ],
)
def test_notes_report_surprises(change, said):
    """Legal but surprising settings have a note."""
    assert any(said in note for note in verl(change).notes)


def test_log_probability_passes_are_counted():
    """The meaning of their size has the number of passes over a replica's samples of a step."""
    (means,) = [meaning.means for meaning in verl().meanings if meaning.says.startswith(LOG)]
    assert means.endswith("passes: 8 passes over 32 samples")


def test_explanation_has_the_numbers_of_the_file():
    """Meanings, flow and advice are present, with this file's numbers."""
    found = verl(CRITIC, KL)
    text = " ".join([meaning.means for meaning in found.meanings] + list(found.flow))
    for number in ("64 prompts", "256 samples", "64 samples per optimizer step", "4 mini batches", "8 replicas", "2 passes"):
        assert number in text, number
    assert {line.split()[0].rstrip(":") for line in found.flow} >= {"load", "generate", "dispatch", "train", "advance"}
    assert {advice.holds for advice in found.advice} == {False}
    assert None in {advice.holds for advice in verl(BUDGET).advice}


def test_plan_equals_the_verdict():
    """The RolloutPlan of a verdict has its numbers."""
    built = 0
    for case in cases("verl"):
        found = verdict("verl", case["config"], *case_settings(case))
        if found.plan:
            built += 1
            assert found.plan.policy_updates.optimizer_steps == found.derived["optimizer_steps"]
            assert found.plan.policy_updates.accumulation_steps == found.derived.get("accumulation_steps")
    assert built == sum(case["expect"]["run"] == "runs" for case in cases("verl"))


ENGINE = {
    "dp": {},
    "megatron": {TP: 2, f"{A}megatron.pipeline_model_parallel_size": 2},
    "veomni": {f"{A}veomni.ulysses_parallel_size": 4},
    "torchtitan": {f"{A}torchtitan.tensor_parallel_size": 4, f"{A}torchtitan.data_parallel_shard_size": 2},
}


@pytest.mark.parametrize(("engine", "replicas"), [("dp", 8), ("megatron", 2), ("veomni", 2), ("torchtitan", 2)])
def test_model_engine_chooses_the_backend(engine, replicas):
    """`model_engine` selects the base files, and with them the backend (trainer/config/ppo_trainer.yaml)."""
    found = verl(ENGINE[engine], {"model_engine": engine})
    assert found.ok, rules(found)
    assert found.derived["data_parallel_size"] == replicas
    assert found.derived["accumulation_steps"] == 64 // replicas // 4
    critic = verl(ENGINE[engine], CRITIC, {"model_engine": engine, GPUS: 6})
    assert critic.ok == (engine == "dp" and 64 % 6 == 0)


@pytest.mark.parametrize(
    ("change", "rules_", "validator"),
    [
        ({"model_engine": "dp", STRATEGY: "megatron"}, ["actor_strategy_fits_engine"], "rejects"),
        ({"model_engine": "dp", STRATEGY: "megatron", **BUDGET}, ["actor_strategy_fits_engine"], "accepts"),
        ({"model_engine": "dp", STRATEGY: "veomni"}, ["actor_strategy_fits_engine"], "accepts"),
        ({"model_engine": "veomni", STRATEGY: "megatron"}, ["actor_strategy_fits_engine"], "rejects"),
        ({"model_engine": "megatron", STRATEGY: "veomni"}, ["actor_strategy_fits_engine"], "accepts"),
        ({"model_engine": "dp", TP: 2}, ["keys_fit_engine"], "rejects"),
        ({"model_engine": "megatron", SP: 2}, ["keys_fit_engine"], "rejects"),
        ({"model_engine": "dp", **CRITIC, "critic.strategy": "megatron"}, ["critic_strategy_fits_engine"], "accepts"),
        ({"model_engine": "dp", "critic.strategy": "megatron"}, [], "accepts"),
        ({"model_engine": "dp", STRATEGY: "fsdp2"}, [], "accepts"),
    ],
)
def test_strategy_and_sizes_are_those_of_the_engine(change, rules_, validator):
    """The base files give each model the configuration class of one backend (trainer/config/ppo_trainer.yaml).

    Composed by Hydra and given to veRL's own validate_config (utils/config.py) at 1dda039: strategy=megatron stops at `Key
    'megatron' is not in struct`, sizes of another backend at the composition, and the rest at the engine
    (workers/engine_workers.py: the FSDP class with another backend's strategy).
    """
    found = verl(change)
    assert (rules(found), found.validator) == (rules_, validator)
    check_nearest("verl", nested({key: value for key, value in (BASE | change).items() if value is not None}), [], found)


def test_strategy_does_not_change_the_engine():
    """With model_engine=megatron the engine is Megatron, whatever the strategy: only the check reads that (utils/config.py)."""
    found = verl({"model_engine": "megatron", STRATEGY: "fsdp", TP: 2})
    assert (found.ok, found.derived["data_parallel_size"]) == (True, 4)
    assert any("strategy=fsdp is read by the check alone" in note for note in found.notes)
    assert (
        verl({"model_engine": "megatron", STRATEGY: "fsdp", TP: 8, MICRO: 8, TRAIN: 17, MINI: 2, LOG: 1}).validator == "rejects"
    )


def test_commands_start_from_the_base_file_of_fsdp():
    """A command without --config-name has model_engine=dp; a complete file has the engine of its strategy."""
    command = ["python3", "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in (BASE | MEGATRON).items())]
    assert rules(check_command(command, "verl")) == ["actor_strategy_fits_engine", "keys_fit_engine"]
    for engine in (
        "model_engine=megatron",
        "--config-name=ppo_megatron_trainer",
        "actor@actor_rollout_ref.actor=megatron_actor",
    ):
        found = check_command([*command, engine], "verl")
        assert (rules(found), found.derived["data_parallel_size"]) == ([], 4)
    assert verl(MEGATRON).derived["data_parallel_size"] == 4


def test_torchtitan_sizes_fill_the_devices():
    """TorchTitan's mesh has replicas * tensor * pipeline * context devices (engine/torchtitan/transformer_impl.py)."""
    found = verl(ENGINE["torchtitan"], {"model_engine": "torchtitan", GPUS: 16})
    assert "torchtitan_fills_devices" in rules(found)


FILTERED = {"algorithm.filter_groups.enable": True, TRAIN: 512, GEN: 1536, MINI: 32, RESPONSES: 16}


def test_dapo_loads_prompts_one_by_one():
    """With filter_groups the trainer sets gen_batch_size to 1 (trainer/ppo/v1/trainer_base.py, _init_dataloader)."""
    found = verl(FILTERED)
    assert found.ok, rules(found)
    assert found.derived["samples_per_step"] == 8192
    assert any("algorithm.filter_groups.enable sets data.gen_batch_size to 1" in note for note in found.notes)
    assert "loader_divides_train" in rules(verl(FILTERED, {"algorithm.filter_groups.enable": False}))
    refill = {"algorithm.filter_groups.enable": False, "trainer.v1.sampler.sync_refill_failed_groups": True}
    assert verl(FILTERED, refill).ok


@pytest.mark.parametrize("older", [LEGACY, V0], ids=["legacy", "v0"])
def test_dapo_of_the_older_trainer_trains_on_train_batch_size(older):
    """Its recipe generates in batches of gen_batch_size, but keeps train_batch_size prompts (dapo_ray_trainer.py)."""
    found = verl(FILTERED, older)
    assert found.ok, rules(found)
    assert (found.derived["samples_per_step"], found.derived["mini_batches"]) == (8192, 16)
    assert any("1,536 prompts at a time" in note for note in found.notes)


@pytest.mark.parametrize(
    ("program", "settings", "samples"),
    [
        ("recipe.dapo.main_dapo", [], 48 * 4),
        ("recipe.dapo.main_dapo", ["algorithm.filter_groups.enable=True"], 16 * 4),
        ("verl.experimental.fully_async_policy.fully_async_main", ["data.train_batch_size=0", f"{GEN}=1"], 8 * 4),
    ],
)
def test_program_decides_which_trainer_runs(program, settings, samples):
    """Without --config-name a command starts from its program's own base file (recipe/dapo/main_dapo.py: dapo_trainer)."""
    sizes = [f"{key}={value}" for key, value in {TRAIN: 16, GEN: 48, RESPONSES: 4, MINI: 8, MICRO: 1, LOG: 1}.items()]
    command = ["python3", "-m", program, *sizes, "algorithm.adv_estimator=grpo", *settings]
    found = check_command(command, "verl")
    assert found.derived["samples_per_step"] == samples
    assert found.ok, rules(found)
    with_v1 = check_command([word.replace(program, "verl.trainer.main_ppo") for word in command], "verl")
    assert with_v1.ok == ("filter_groups" in str(settings))


ASYNC = {TRAIN: 0, GEN: 1, "async_training.trigger_parameter_sync_step": 4, "async_training.require_batches": 2}


def test_fully_asynchronous_training_has_no_batch_of_prompts():
    """It asserts data.train_batch_size=0 (fully_async_rollouter.py) and trains on require_batches mini batches at a time."""
    found = verl(ASYNC, {"num_prompts": 1000, "trainer.total_epochs": 1})
    assert (found.validator, found.run, found.violations) == ("accepts", "drops", ())
    assert verl(ASYNC, {"num_prompts": 1000, "trainer.total_epochs": 4}).run == "runs"
    assert (found.derived["samples_per_step"], found.derived["optimizer_steps"]) == (2 * 16 * 4, 2)
    assert found.derived["training_steps"] == 1000 // 32
    (broken,) = verl(ASYNC, {TRAIN: 64}).violations
    assert (broken.rule, broken.nearest) == ("verl.async_train_batch_is_zero", (0,))
    assert rules(verl(ASYNC, {GEN: 2})) == ["async_gen_batch_is_one"]
    assert rules(verl({TRAIN: 0})) == [f"positive.{TRAIN}"]
    partial = {"async_training.partial_rollout": True}
    assert verl({TRAIN: 0}, partial).derived["samples_per_step"] == 16 * 4
    assert verl(partial).derived["samples_per_step"] == 64 * 4


@pytest.mark.parametrize(
    "change",
    [
        {**ASYNC, STRATEGY: "megatron"},
        {"model_engine": "megatron", STRATEGY: "fsdp", TRAIN: 48},
        {"actor_rollout_ref.teacher.server_ip": "127.0.0.1", STRATEGY: "megatron"},
    ],
)
def test_megatron_starts_on_full_replicas_where_no_check_tests_it(change):
    """Trainers without a check, and the check with another strategy, leave it to Megatron's own start."""
    found = verl(change, {TP: 3, GPUS: 4})
    assert ("megatron_starts_actor" in rules(found), found.validator, found.run) == (True, "accepts", "fails")
    assert "megatron_starts_actor" not in rules(verl(change, {TP: 2, GPUS: 4}))
    assert rules(verl(MEGATRON, {TP: 3, GPUS: 4})) == ["megatron_divides_devices"]


def test_engines_of_fully_asynchronous_training_have_their_own_devices():
    """Its engines divide rollout.nnodes * rollout.n_gpus_per_node (fully_async_main.py), not the trainer's devices."""
    own = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 6, f"{R}tensor_model_parallel_size": 3}
    assert verl(ASYNC, own).ok
    assert "engines_divide_devices" in rules(verl(ASYNC, own, {"rollout.n_gpus_per_node": 8}))


def test_legacy_critic_reads_its_own_sequence_parallel_size():
    """Until April 2026 the critic's workers read critic.ulysses_sequence_parallel_size (workers/fsdp_workers.py)."""
    key = "critic.ulysses_sequence_parallel_size"
    change = {**CRITIC, key: 2, C_MINI: 16, C_MICRO: 16}
    assert verl(LEGACY, change).ok
    assert "legacy_critic_micro_divides_mini" in rules(verl(LEGACY, change, {key: 1}))


def test_fsdp_size_divides_the_devices():
    """FSDP with fewer devices than the job builds a mesh of devices // fsdp_size by fsdp_size (engine/fsdp/utils.py)."""
    key = f"{A}fsdp_config.fsdp_size"
    found = verl({key: 4})
    assert any(
        "2 copies of the model" in meaning.means and "2 times the parameters" in meaning.means for meaning in found.meanings
    )
    assert rules(verl({key: 3})) == ["fsdp_size_divides_devices"]
    assert verl({key: 64}).ok


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"actor_rollout_ref.model.enable_gradient_checkpointing": False}, "all activations of a pass are kept"),
        ({"data.max_response_length": 16384}, f"{SP}=2 halves that, and the data-parallel size falls from 8 to 4"),
        ({"model_engine": "megatron", "data.max_response_length": 16384}, f"{CP}=2 halves that"),
        ({MICRO: 8}, "with 1 a pass needs about 1/8 of the activations, in 8 passes instead of 1"),
        ({f"{R}gpu_memory_utilization": 0.8}, "nothing is offloaded"),
    ],
)
def test_advice_on_memory_applies_only_to_files_that_need_it(change, said):
    """Each piece of advice names this file's numbers, and the base file gets none but that on its micro batch."""
    assert any(said in advice.because for advice in verl(change).advice)
    assert not any(said in advice.because for advice in verl().advice)
    offload = {f"{A}fsdp_config.optimizer_offload": True}
    assert not any(
        "nothing is offloaded" in advice.because for advice in verl(offload, {f"{R}gpu_memory_utilization": 0.8}).advice
    )


def test_70b_example_of_the_guide():
    """32 nodes of 8 devices, TP 8, PP 2 and rollout TP 4: 16 replicas, 64 engines; a Ulysses size of 8 has no effect there."""
    found = verl(
        {"model_engine": "megatron", TP: 8, f"{A}megatron.pipeline_model_parallel_size": 2, "trainer.nnodes": 32, OLD_SP: 8},
        {f"{R}tensor_model_parallel_size": 4, TRAIN: 512, MINI: 128, RESPONSES: 8, MICRO: 1, LOG: 2},
    )
    assert found.ok, rules(found)
    derived = found.derived
    assert (derived["data_parallel_size"], derived["samples_per_step"], derived["mini_batch_samples"]) == (16, 4096, 1024)
    assert (derived["optimizer_steps"], derived["accumulation_steps"]) == (4, 64)
    assert any("64 engines" in meaning.means for meaning in found.meanings)
    assert any("ulysses_sequence_parallel_size=8 has no effect with megatron" in note for note in found.notes)
    fsdp = verl({"trainer.nnodes": 32, SP: 8, TRAIN: 512, MINI: 128, RESPONSES: 8, MICRO: 1, LOG: 2})
    assert (fsdp.derived["data_parallel_size"], fsdp.derived["accumulation_steps"]) == (32, 32)


# verl-recipe gkd/megatron/test_qwen.sh, whose base file is config/on_policy_distill_trainer.yaml.
DISTILL = (
    "python3 -m main_gkd --config-name on_policy_distill_trainer data.train_batch_size=64 +teacher.server_port=15555 "
    "+actor_rollout_ref.actor.ppo_mini_batch_size=64 +actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1 trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4"
)


def test_distillation_from_a_served_teacher_has_sizes_of_its_own():
    """One update per step with all its samples (gkd/megatron/ray_trainer.py), in passes of actor.micro_batch_size.

    Its workers (megatron_workers.py, update_policy) read neither ppo_ nor log_prob_ sizes, and nothing calls validate_config.
    """
    found = check_command(DISTILL.split(), "verl")
    assert (found.validator, found.run, found.violations) == ("accepts", "runs", ())
    sizes = ("data_parallel_size", "samples_per_step", "optimizer_steps", "mini_batch_samples", "accumulation_steps")
    assert [found.derived[name] for name in sizes] == [4, 64, 1, 64, 8]
    assert check_command([*DISTILL.split(), "verl_version=legacy"], "verl").version.startswith("veRL of August 2026")
    budget = check_command([*DISTILL.split(), f"{A}use_dynamic_bsz=True", f"{A}max_token_len=6000", f"{CP}=2"], "verl")
    assert budget.plan.policy.token_budget == 12_000
    assert "accumulation_steps" not in budget.derived


@pytest.mark.parametrize(
    ("setting", "broken"),
    [
        (f"{A}micro_batch_size=20", []),
        (f"{A}micro_batch_size=17", []),
        (f"{A}micro_batch_size=5", ["distill_micro_divides_share"]),  # passes of 5, 5, 5 and 1 samples, parts of 4
        ("data.train_batch_size=66", ["prompts_divide_over_engines", "samples_divide_over_actor_replicas"]),
        ("rollout.n_gpus_per_node=3", ["prompts_divide_over_engines"]),
    ],
)
def test_distillation_splits_samples_evenly(setting, broken):
    """PyTorch splits off passes of micro_batch_size, numpy's array_split the teacher's tokens into equal parts."""
    command = [word for word in DISTILL.split() if word.partition("=")[0] != setting.partition("=")[0]]
    found = check_command([*command, setting], "verl")
    assert (rules(found), found.validator) == (broken, "accepts")


@pytest.mark.parametrize(("key", "critic"), [("actor_rollout_ref.teacher.server_ip", False), ("distillation.enabled", True)])
def test_distillation_from_a_served_teacher_has_no_critic(key, critic):
    """verl-recipe `gkd/megatron/ray_trainer.py` sets `use_critic = False`, although the estimator is gae by default."""
    found = verl({key: "127.0.0.1", "algorithm.adv_estimator": None, C_MICRO: 4})
    assert any("there is a critic" in note for note in found.notes) is critic
    assert verl({key: "127.0.0.1", "algorithm.adv_estimator": None, C_MICRO: 4, C_MINI: 3}).ok is not critic

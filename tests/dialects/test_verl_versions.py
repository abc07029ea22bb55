"""Tests of rampup.dialects.verl_versions: the rules of each version, how it is chosen, and keys that no version has."""

import pytest
from helpers.dialect_files import cases, expect, nested, rules, verdict

from rampup.dialects import check_command, check_file
from rampup.errors import ConfigError

A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
PPO = "python3 -m verl.trainer.main_ppo"
LOG = f"{R}log_prob_micro_batch_size_per_gpu=4"
NEW = (
    f"algorithm.adv_estimator=grpo data.train_batch_size=64 {R}n=4 {A}ppo_mini_batch_size=16 {A}ppo_micro_batch_size_per_gpu=4 "
    f"{LOG}"
)
OLD = (
    f"algorithm.adv_estimator=grpo data.train_batch_size=8 {R}n=16 {A}ppo_mini_batch_size=64 {A}ppo_micro_batch_size=16 "
    f"{R}log_prob_micro_batch_size=160 actor_rollout_ref.ref.log_prob_micro_batch_size=160 trainer.n_gpus_per_node=4"
)


@pytest.mark.parametrize("case", cases("verl_versions"), ids=lambda case: case["version"])
def test_verdict_equals_the_checks_and_workers_of_each_version(case):
    """The answers are those of the validators and workers of 0.2 to 0.7, run on the same sizes."""
    found = verdict("verl", nested(case["config"]), f"verl_version={case['version']}")
    expect(found, **case["expect"])


@pytest.mark.parametrize(
    ("version", "settings", "wanted"),
    [
        # A mini batch of more than a step: one update of all samples until 0.2, rejected since 0.3.
        ("0.2", OLD, {"ok": True, "optimizer_steps": 1, "mini_batch_samples": 128, "note": "more than there is"}),
        ("0.3", OLD, {"validator": "rejects", "rules": ["mini_at_most_train"]}),
        # Sizes of the whole job are divided by the older workers; nothing reads them since 0.8.
        ("0.2", f"{OLD} {A}ppo_mini_batch_size=8 {A}ppo_micro_batch_size=8", {"ok": True, "accumulation_steps": 16}),
        ("0.8", f"{OLD} {A}ppo_mini_batch_size=8 {A}ppo_micro_batch_size=8", {"validator": "accepts", "run": "fails"}),
        # Only the newer trainer pads; the older workers take what is left as a last, smaller mini batch.
        ("0.9", f"{NEW} {A}ppo_mini_batch_size=48", {"run": "pads", "padded_samples": 128}),
        ("0.4", f"{NEW} {A}ppo_mini_batch_size=48",
         {"run": "runs", "optimizer_steps": 2, "note": "the last update of a step has 64 samples instead of 192"}),
        # A pass of log-probabilities may be larger than what there is, until 0.7.
        ("0.6.1", NEW.replace(LOG, LOG.replace("=4", "=96")), {"ok": True}),
        ("head", NEW.replace(LOG, LOG.replace("=4", "=96")), {"rules": ["rollout_micro_divides_share"]}),
    ],
)  # fmt: skip
def test_versions_differ_as_their_code_does(version, settings, wanted):
    """Mini batches above a step, the whole job's sizes, padding, and passes that are larger than what there is."""
    kept = {word.partition("=")[0]: word for word in f"{PPO} {settings}".split()}
    expect(check_command([*kept.values()], "verl", [f"verl_version={version}"]), **wanted)


def test_version_is_stated_by_the_user_a_file_a_pin_or_the_keys(tmp_path):
    """In this order; the report names the version and why, and other possible versions that decide otherwise."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    script = tmp_path / "a" / "b" / "run.sh"

    def check(text, *settings):
        script.write_text(text)
        return check_file(script, "verl", settings)

    assert check(f"{PPO} {NEW}").version == "veRL of August 2026 (1dda039)"
    found = check(f"{PPO} {OLD}")  # its sizes of the whole job are read until 0.7
    assert found.version == "veRL 0.7"
    expect(found, note=["later versions do not read", "0.2: 128 samples, 1 update of 128", "verl_version=... chooses one"])
    expect(
        check(f"{PPO} {NEW} +trainer.balance_batch=True"),
        note="the rules are those of veRL 0.2: +trainer.balance_batch does not fit",
    )
    (tmp_path / "requirements.txt").write_text("torch\nverl[vllm]==0.4.1\n")
    expect(check(f"{PPO} {NEW}"), note="the rules are those of veRL 0.4: ")
    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.0.2\n")
    found = check(f"{PPO} {OLD}")
    assert (found.version, found.ok) == ("veRL 0.2", True)
    expect(found, note="verl/version/version says 0.0.2")
    assert check(f"{PPO} {OLD}", "verl_version=0.3.0.post1").version == "veRL 0.3"
    with pytest.raises(ConfigError, match=r"verl_version=1\.5 must be one of 0\.1, "):
        check(f"{PPO} {OLD}", "verl_version=1.5")


def test_program_starts_from_the_base_file_beside_it(tmp_path):
    """A vendored base file gives the defaults and the keys that Hydra finds, also those of its groups."""
    folder = tmp_path / "verl" / "trainer" / "config"
    (folder / "actor").mkdir(parents=True)
    (folder / "ppo_trainer.yaml").write_text(
        "defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - _self_\n"
        "data: {train_batch_size: 64, own_key: 1}\nalgorithm: {adv_estimator: grpo}\ncritic: {enable: false}\n"
        "actor_rollout_ref: {rollout: {n: 4, log_prob_micro_batch_size_per_gpu: 4}}\n"
    )
    (folder / "actor" / "dp_actor.yaml").write_text("defaults: [actor, _self_]\nppo_micro_batch_size_per_gpu: 4\n")
    (folder / "actor" / "actor.yaml").write_text("ppo_mini_batch_size: 32\nppo_micro_batch_size_per_gpu: 8\n")
    script = tmp_path / "run.sh"
    script.write_text(f"{PPO} data.own_key=2\n")
    expect(check_file(script, "verl"), ok=True, samples_per_step=256, mini_batches=2, accumulation_steps=4)


def test_keys_and_programs_that_no_version_has_are_never_ignored(tmp_path):
    """One that looks like a size, and another trainer, are questions; Hydra refuses any other key without `+`."""
    command = f"{PPO} {NEW} data.n_samples=8".split()
    with pytest.raises(
        ConfigError, match=r"unknown, a fork: data\.n_samples=8 is a key of no version of veRL.*Add data\.n_samples=null"
    ):
        check_command(command)
    assert check_command(command, "verl", ["data.n_samples=null", "data.train_batch_size=512"]).derived["optimizer_steps"] == 32
    for key in (f"{R}n_agent", f"{R}n_trajectories", "env.rollout.n", "+agent_grpo.n"):
        with pytest.raises(ConfigError, match="unknown, a fork: "):
            check_command([*command[:-1], f"{key}=8"], "verl")
    script = tmp_path / "run.sh"
    script.write_text(f"{PPO} {NEW} \\\n  data.my_own=2 +data.mine=3\n")
    found = check_file(script, "verl")
    assert (rules(found), found.validator) == (["known_keys"], "rejects")
    assert "data.my_own (line 1) must be written with `+`" in found.violations[0].message
    script.write_text(f"{PPO} {NEW} data.my_own=2 trainer.its_own=1\n")
    expect(check_file(script, "verl", ["data.my_own=2"]), ok=True, note="a fork: trainer.its_own are taken as keys of its own")
    fork = " ".join(["python3 -m verl.agent_trainer.main_ppo", NEW]).split()
    with pytest.raises(
        ConfigError, match=r"starts verl/agent_trainer/main_ppo, a trainer of a fork.*say which: verl_version=0\.9"
    ):
        check_command(fork)
    expect(check_command(fork, "verl", ["verl_version=0.4"]), ok=True, note="a trainer of a fork")

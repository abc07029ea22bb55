"""Tests of rampup.dialects.known: keys, options, programs and models that a system does not have are never ignored."""

import pytest
from helpers.dialect_files import expect, rules

from rampup.dialects import check_command, check_file
from rampup.dialects.known import load_known_keys
from rampup.errors import ConfigError

SKYRL = [
    *("python", "-m", "skyrl.train.entrypoints.main_base", "trainer.train_batch_size=32", "trainer.policy_mini_batch_size=32"),
    *("generator.n_samples_per_prompt=4", "generator.inference_engine.num_engines=1"),
]
MEGATRON = [
    *("torchrun", "--nproc_per_node", "8", "pretrain_gpt.py", "--micro-batch-size", "1", "--global-batch-size", "64"),
    *("--num-layers", "30"),
]
STAGES = ["--pipeline-model-parallel-size", "8"]


def test_tables_say_which_versions_have_a_key():
    """A key, a section that is replaced as a whole, a key further down, and one that none has."""
    verl = load_known_keys("verl")
    assert verl.life("actor_rollout_ref.rollout.n") == (2, 9)
    assert verl.life("trainer.use_v1") == (9, 9)
    assert verl.life("actor_rollout_ref.actor") == (1, 9)
    assert verl.life("actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params") is not None
    assert verl.life("data.n_samples") is None
    assert load_known_keys("skyrl").life("trainer.n_samples_per_prompt") is None


def test_skyrl_refuses_keys_that_its_classes_do_not_have():
    """Invalid fields are rejected, a key that looks like a size is a question, and older keys are named."""
    assert check_command(SKYRL, "skyrl").ok
    found = check_command([*SKYRL, "trainer.no_such_thing=1"], "skyrl")
    assert (rules(found), found.validator) == (["known_keys"], "rejects")
    with pytest.raises(ConfigError, match=r"unknown, a fork: trainer\.policy\.fsdp_config\.context_parallel_size=2"):
        check_command([*SKYRL, "trainer.policy.fsdp_config.context_parallel_size=2"], "skyrl")
    old = check_command([*SKYRL, "trainer.strategy=deepspeed"], "skyrl")
    expect(old, rules=["strategy"], samples_per_step=128, message="only SkyRL before January 2026 has it")
    words = [*SKYRL, "trainer.no_such_thing=1", "terminal_bench_config.x=2"]
    assert check_command(words, "skyrl", ["trainer.no_such_thing=1"]).ok
    words = [word.replace("skyrl.train.entrypoints.main_base", "examples.dapo.main_dapo") for word in words]
    expect(check_command(words, "skyrl"), ok=True, note="trainer.no_such_thing")
    with pytest.raises(ConfigError, match=r"unknown, a fork: trainer\.n_samples_per_prompt=8 is a key of no version of SkyRL"):
        check_command([*SKYRL, "trainer.n_samples_per_prompt=8"], "skyrl")
    expect(check_command([*SKYRL, "generator.async_engine=true"], "skyrl"), ok=True, note="SkyRL had these keys until 2026")


def test_options_and_programs_of_megatron_forks_are_questions(tmp_path):
    """Unknown options that may be sizes, unknown programs and meshes of several kinds are questions, answered by a setting."""
    assert rules(check_command([*MEGATRON, *STAGES], "megatron")) == ["layers_over_stages"]
    with pytest.raises(ConfigError, match=r"unknown, a fork: allow_padding_num_layers=True.*Add allow_padding_num_layers=null"):
        check_command([*MEGATRON, *STAGES, "--allow-padding-num-layers"], "megatron")
    words = [*MEGATRON, *STAGES, "--allow-padding-num-layers"]
    assert check_command(words, "megatron", ["allow_padding_num_layers=null", "num_layers=32"]).ok
    with pytest.raises(ConfigError, match=r"unknown, a fork: pp=8"):
        check_command([*MEGATRON, "-pp", "8"], "megatron")
    other = [word.replace("pretrain_gpt", "mg_test") for word in MEGATRON]
    with pytest.raises(ConfigError, match=r"this starts mg_test\.py\. If it takes .* megatron_version=legacy"):
        check_command(other, "megatron")
    assert check_command(other, "megatron", ["megatron_version=legacy"]).ok
    path = tmp_path / "train.yaml"
    path.write_text("micro_batch_size: 1\nglobal_batch_size: 8\nworld_size: 8\nenable_hetero: true\n")
    with pytest.raises(ConfigError, match="enable_hetero=True"):
        check_file(path, "megatron")
    assert check_file(path, "megatron", ["enable_hetero=null"]).ok


def test_what_repeats_prompts_in_forks_has_a_hint(tmp_path):
    """A key of a fork that repeats each prompt says what has the same effect; a YAML of another trainer names its keys."""
    words = ["python3", "-m", "verl.trainer.main_ppo", "data.train_batch_size=512", "actor_rollout_ref.rollout.n_agent=5"]
    with pytest.raises(ConfigError, match=r"n_agent=5 .* counts the rows: give data\.train_batch_size as many times as large"):
        check_command(words, "verl")
    assert check_command([*words[:-1], "actor_rollout_ref.rollout.n_agent=1"], "verl", ["verl_version=0.2"]).violations
    with pytest.raises(ConfigError, match=r"this starts train, a trainer of a fork"):
        check_command(["python", "-u", "train.py", *words[3:-1], "actor_rollout_ref.rollout.n=2"], "verl")
    path = tmp_path / "sac.yaml"
    path.write_text("defaults: [ppo_trainer]\nactor_rollout_ref: {actor: {sac: {gamma: 1}}}\n")
    expect(check_file(path, "verl"), note="no version of veRL has actor_rollout_ref.actor.sac.gamma (line 2)")


def test_other_options_of_megatron_forks_are_named():
    """An option that is no size is named, unless it is one of the launcher before the program."""
    words = [*MEGATRON[:3], "--rdzv_backend", "c10d", *MEGATRON[3:], "--no-such-thing", "2", "--swiglu"]
    expect(check_command(words, "megatron"), ok=True, note="does not have, such as no_such_thing:")
    assert not any("does not have" in note for note in check_command([*MEGATRON, "--swiglu"], "megatron").notes)


def test_keys_that_maxtext_does_not_have_are_refused_as_maxtext_does(tmp_path):
    """A key of no version is rejected with its line, one of older versions noted, and one like a size asked for."""
    command = "python3 -m MaxText.train MaxText/configs/base.yml num_target_devices=8"
    old = [*command.split(), "enable_profiler=true"]
    expect(check_command(old, "maxtext"), ok=True, note="only MaxText before August 2026")
    with pytest.raises(ConfigError, match=r"unknown, a fork: n_samples=4 is a key of no version of MaxText"):
        check_command([*command.split(), "n_samples=4"], "maxtext")
    path = tmp_path / "scripts" / "run.sh"
    path.parent.mkdir()
    path.write_text(f"true\n{command} no_such_thing=1")
    found = check_file(path, "maxtext")
    assert (rules(found), found.validator) == (["known_keys"], "rejects")
    assert "no_such_thing (line 2) must be left out" in found.violations[0].message
    assert check_file(path, "maxtext", ["no_such_thing=1"]).ok
    base = tmp_path / "MaxText" / "configs" / "base.yml"
    base.parent.mkdir(parents=True)
    base.write_text("per_device_batch_size: 3\nno_such_thing: 0\n")
    found = check_file(path, "maxtext")
    expect(found, ok=True, global_batch_size_to_train_on=24, note="MaxText/configs/base.yml: its base file")
    rl = ["python3", "-m", "maxtext.trainers.post_train.rl.train_rl", "rl.yml", "batch_size=4", "num_target_devices=4"]
    assert check_command(rl, "maxtext_rl").ok
    assert rules(check_command([*rl, "no_such_thing=1"], "maxtext_rl")) == ["known_keys"]


def test_model_files_of_maxtext_forks_are_read_or_named(tmp_path):
    """The file of a model is read above base.yml if it is there; otherwise a model that MaxText does not have is named."""
    command = "python3 -m MaxText.train configs/base.yml model_name=omni num_target_devices=8"
    path = tmp_path / "scripts" / "run.sh"
    path.parent.mkdir()
    path.write_text(command)
    expect(check_file(path, "maxtext"), global_batch_size_to_train_on=96, note="model_name=omni is no model of MaxText")
    (tmp_path / "configs" / "models").mkdir(parents=True)
    (tmp_path / "configs" / "models" / "omni.yml").write_text("per_device_batch_size: 64\nbase_emb_dim: 8\n")
    expect(check_file(path, "maxtext"), global_batch_size_to_train_on=512, note="omni.yml is read above base.yml")
    path.write_text(f"{command} per_device_batch_size=2")
    expect(check_file(path, "maxtext"), global_batch_size_to_train_on=16)

"""Tests of the answers that people act on: what is wasteful, what differs, what keeps an
update on other devices, and what is still to come.
"""

import json

import pytest
from helpers.dialect_files import expect, rules, verdict

from rampup.cli import main
from rampup.contrib.check import check_file
from rampup.errors import ConfigError

GPT = "pretrain_gpt.py --micro-batch-size 1 --global-batch-size 256"
MEGATRON = {"micro_batch_size": 1, "global_batch_size": 256, "world_size": 8}
MAXTEXT = {"per_device_batch_size": 4, "num_devices": 8, "steps": 100}
RAMP = {"micro_batch_size": 1, "global_batch_size": 16, "world_size": 2} | {
    "rampup_batch_size": [2, 2, 1000]
}
STEPS = {"step_batch_size_schedule": "0:8 1000:16 2500:32"} | {
    "micro_batch_size": 1,
    "data_parallel_size": 8,
}
MAXTEXT_RAMP = MAXTEXT | {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 1,
    "per_device_batch_size_increment": 1,
    "global_rampup_samples": 3000,
}


def run(capsys, *words):
    """Return the exit code and the JSON of a check."""
    code = main(["check", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def write(tmp_path, name, text):
    """Write a file; return its path as text."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


NOTES = [
    ("megatron", RAMP | {"train_samples": 100}, "ends in step 50, before the ramp does in step 186: its last batch is 2 samples, and 16 are never"),
    ("megatron", {"trainer": {"devices": 8, "num_nodes": 1, "max_steps": 50}, "model": {"micro_batch_size": 1, "global_batch_size": 64, "rampup_batch_size": [8, 8, 100000]}}, "ends in step 50, before the ramp"),
    ("maxtext", MAXTEXT_RAMP | {"steps": 10}, "ends in step 10, before the ramp does"),
    ("megatron", STEPS | {"train_samples": 800}, "ends in step 100, before the ramp does in step 219: its last batch is 8 samples, and 32 are never"),
    ("megatron", STEPS | {"train_iters": 150}, "ends in step 150, before the ramp does in step 219: its last batch is 16 samples, and 32 are never"),
    ("megatron", RAMP | {"train_samples": 999}, "ends in step 185, before the ramp does in step 186: its last batch is 14 samples, and 16 are never"),
    ("megatron", MEGATRON, "32 passes of 1 sample: micro_batch_size=8 makes 4 of 8"),
    ("maxtext", MAXTEXT | {"per_device_batch_size": 1, "gradient_accumulation_steps": 64}, "64 passes of 1 sample: per_device_batch_size=8 makes 8 of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "config", "note"), NOTES)
def test_what_is_legal_but_wasteful_is_said_with_its_arithmetic(system, config, note):
    """A run that ends before its ramp, and many passes of one sample."""
    expect(verdict(system, config), ok=True, note=note)


def test_what_is_not_wasteful_is_not_said():
    """A ramp that fits, passes of several samples, and passes that fill a pipeline."""
    for system, config in (
        ("megatron", RAMP | {"train_samples": 100_000}),
        ("megatron", STEPS | {"train_iters": 220}),
        ("megatron", MEGATRON | {"micro_batch_size": 2}),
        ("megatron", MEGATRON | {"pipeline_model_parallel_size": 4}),
        ("maxtext", MAXTEXT_RAMP | {"steps": 1000}),
    ):
        expect(verdict(system, config), no_note=["before the ramp", "passes of 1"])


KEPT = [
    ("megatron", MEGATRON, 16, "on 16 devices the update stays the same"),
    ("megatron", MEGATRON | {"micro_batch_size": 8}, 64, "on 64 devices micro_batch_size=4 keeps the update of 8"),
    ("megatron", MEGATRON, 24, "on 24 devices no legal sizes keep the update of 8"),
    ("maxtext", MAXTEXT, 16, "on 16 devices per_device_batch_size=2 keeps the update of 8"),
    ("maxtext", MAXTEXT, 4, "on 4 devices per_device_batch_size=8 keeps"),
    ("maxtext", MAXTEXT | {"gradient_accumulation_steps": 2, "per_device_batch_size": 1}, 16, "gradient_accumulation_steps=1 keeps"),
    ("maxtext", MAXTEXT_RAMP, 4, "per_device_batch_size=8 per_device_batch_size_start=2 per_device_batch_size_increment=2 keeps"),
]  # fmt: skip


@pytest.mark.parametrize(("system", "config", "devices", "said"), KEPT)
def test_other_devices_say_what_keeps_the_update(
    tmp_path, system, config, devices, said
):
    """The values to change, none, or that no legal ones exist; with them the update is
    that of the file.
    """
    path = write(tmp_path, "config.yml", json.dumps(config))
    found = check_file(path, system, devices=devices)
    assert said in found.notes[0]
    assert found.derived["num_devices"] == devices
    settings = [word for word in found.notes[0].split() if "=" in word]
    if settings:
        kept = check_file(path, system, settings, devices=devices)
        assert kept.ok
        assert "the update stays the same" in kept.notes[0] or settings
        for name in ("global_batch_size", "global_batch_size_to_train_on"):
            before = check_file(path, system).derived.get(name)
            assert kept.derived.get(name) == before


def test_devices_are_refused_where_they_are_no_setting(tmp_path):
    """And where the file does not say its own, there is nothing to keep."""
    path = write(tmp_path, "run.sh", f"srun python {GPT}\n")
    found = check_file(path, "megatron", devices=8)
    assert "no other update to keep on 8" in found.notes[0]
    trlx = write(tmp_path, "t.yml", "train: {batch_size: 4}\nmethod: {chunk_size: 4}\n")
    with pytest.raises(ConfigError, match=r"--devices is not for trlx.*num_processes"):
        check_file(trlx, "trlx", devices=8)


@pytest.mark.parametrize(
    ("system", "key"),
    [
        ("maxtext_rl", "ici_fsdp_parallelism"),
        ("skyrl", "policy_num_gpus_per_node, trainer.placement.policy_num_nodes"),
        ("verl", "trainer.n_gpus_per_node, trainer.nnodes"),
    ],
)
def test_a_system_without_one_number_of_devices_names_its_keys(tmp_path, system, key):
    """That are to be set instead."""
    path = write(tmp_path, "config.yml", "{}")
    with pytest.raises(ConfigError, match=f"key=value, such as .*{key}"):
        check_file(path, system, devices=8)


def test_an_update_that_no_sizes_keep_is_said_of_every_system(tmp_path):
    """Of Tunix, whose sizes count no devices; and where a size is null."""
    broken = {"batch_size": 1, "rl_training_config": {"mini_batch_size": 4}}
    tunix = {"batch_size": 16, "actor_model_config": {"mesh": {"shape": "(2, 4)"}}}
    for system, config, devices, said in (
        ("tunix", tunix, 16, "on 16 devices the update stays the same"),
        ("tunix", tunix, 4, "on 4 devices no legal sizes keep the update of 8: "),
        ("tunix", {"batch_size": 16}, 4, "the update stays the same"),
        (
            "tunix",
            broken,
            4,
            "the file breaks a rule also without --devices: mend that",
        ),
        (
            "megatron",
            MEGATRON | {"micro_batch_size": None},
            16,
            "also without --devices",
        ),
        (
            "megatron",
            MEGATRON | {"num_experts": 3, "expert_model_parallel_size": 2},
            16,
            "also without --devices",
        ),
    ):
        path = write(tmp_path, "config.yml", json.dumps(config))
        assert said in check_file(path, system, devices=devices).notes[0]


def test_two_files_differ_in_their_update_or_in_how_it_is_divided(capsys, tmp_path):
    """The sizes of the update that differ are named, and make the exit code 2."""
    texts = {
        "a.sh": f"torchrun --nproc_per_node 8 {GPT}\n",
        "b.sh": f"torchrun --nproc_per_node 4 {GPT}\n",
        "c.sh": f"torchrun --nproc_per_node 8 {GPT.replace('256', '512')}\n",
    }
    a, b, c = (write(tmp_path, name, text) for name, text in texts.items())
    code, found = run(capsys, a, "--against", b)
    assert (code, found["update"]) == (0, [])
    assert found["different"]["data_parallel_size"] == [8, 4]
    code, found = run(capsys, a, "--against", c)
    assert (code, found["update"]) == (2, ["global_batch_size", "ramp_phases"])
    assert found["different"]["global_batch_size"] == [256, 512]
    main(["check", a, "--against", b])
    assert "the update is the same" in capsys.readouterr().out


def test_a_file_that_breaks_rules_is_not_compared(capsys, tmp_path):
    """Its numbers are not those of a run, and two such files are not the same."""
    good, bad = f"torchrun --nproc_per_node 8 {GPT}\n", "--nproc_per_node 3"
    a = write(tmp_path, "a.sh", good)
    b = write(tmp_path, "b.sh", good.replace("--nproc_per_node 8", bad))
    for pair in ((a, b), (b, a), (b, b)):
        code, found = run(capsys, pair[0], "--against", pair[1])
        assert code == 2
        assert "a file breaks rules: " in found["error"]["message"]


def test_a_folder_and_several_files_are_rows(capsys, tmp_path, monkeypatch):
    """One for each file of a system, with its update and its verdict; a question is a
    row too, with its text below the table, and files of no system are counted.
    """
    a = write(tmp_path, "a.sh", f"torchrun --nproc_per_node 8 {GPT}\n")
    write(tmp_path, "b.sh", f"torchrun --nproc_per_node 3 {GPT}\n")
    write(tmp_path, "c.sh", f"torchrun --nproc_per_node $N {GPT}\n")
    write(tmp_path, "other.sh", "echo done\n")
    cell = (
        "from tunix.rl.grpo.grpo_learner import GRPOConfig\n"
        "grpo = GRPOConfig(num_generations=2)\n"
        "train = RLTrainingConfig(mini_batch_size=6)\n"
        "BATCH_SIZE = 3"
    )
    cells = [{"cell_type": "code", "source": cell, "metadata": {}, "outputs": []}]
    write(tmp_path, "d.ipynb", json.dumps({"cells": cells, "metadata": {}}))
    code, found = run(capsys, str(tmp_path))
    assert code == 2
    assert [row["ok"] for row in found["files"]] == [True, False, False, False]
    assert found["files"][3]["file"].endswith("d.ipynb")
    assert "256 samples" in found["files"][0]["summary"]
    assert "number of devices is not" in found["files"][2]["error"]
    assert found["others"] == 1
    assert run(capsys, a, a)[0] == 0
    monkeypatch.chdir(tmp_path)
    main(["check", "a.sh", "b.sh", "c.sh"])
    table, asked = capsys.readouterr().out.split("\n\n")
    heads = [line.split()[0] for line in table.splitlines() if line[0] != " "]
    assert heads == ["file", "a.sh", "b.sh", "c.sh"]
    assert max(map(len, table.splitlines())) <= 80
    assert asked.startswith("c.sh: the number of devices is not in the file")


def test_env_takes_the_variables_of_this_shell_and_names_them(
    capsys, tmp_path, monkeypatch
):
    """Where the script does not set them; without --env the environment is empty."""
    monkeypatch.setenv("MY_GPUS", "4")
    monkeypatch.setenv("MY_NODES", "9")
    path = write(
        tmp_path,
        "run.sh",
        f"MY_NODES=2\ntorchrun --nnodes $MY_NODES --nproc_per_node $MY_GPUS {GPT}\n",
    )
    assert "number of devices is not" in run(capsys, path)[1]["error"]["message"]
    code, found = run(capsys, path, "--env")
    assert (code, found["derived"]["data_parallel_size"]) == (0, 8)
    assert any("MY_GPUS=4" in note for note in found["notes"])
    assert run(capsys, path, "--env", "MY_GPUS=2")[1]["derived"]["num_devices"] == 4


def test_only_phases_to_come_are_checked(capsys, tmp_path):
    """On devices that cannot split the first batches, once those are over."""
    config = RAMP | {"world_size": 8, "train_samples": 100_000}
    path = write(tmp_path, "ramp.yml", json.dumps(config))
    assert rules(check_file(path, "megatron")) == ["ramp_phases_divisible"]
    code, found = run(capsys, path, "at_step=186")
    assert (code, found["derived"]["num_microbatches"]) == (0, [2])
    assert run(capsys, path, "at_step=100")[0] == 2
    config = MAXTEXT_RAMP | {"ici_fsdp_parallelism": 8, "num_devices": 8}
    config |= {
        "per_device_batch_size_start": 0.5,
        "per_device_batch_size_increment": 0.5,
    }
    path = write(tmp_path, "maxtext.yml", json.dumps(config))
    assert run(capsys, path, "--from", "maxtext")[0] == 2
    assert run(capsys, path, "--from", "maxtext", "at_step=300")[0] == 0

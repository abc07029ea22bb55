"""Tests of `rampup check` on the command line, of the system that a file belongs to,
and of its conversion.
"""

import json
import subprocess
import sys

import pytest
import yaml
from helpers.commands import run_json
from helpers.dialect_files import cases, check_nearest, expect, nested, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup import Config, build_plan, load_config
from rampup.cli import main
from rampup.contrib.check import (
    SYSTEMS,
    check_file,
    load_dialect,
    to_rampup,
)
from rampup.errors import ConfigError, RampupError

VALID = {
    "trainer.train_batch_size": 8,
    "trainer.policy_mini_batch_size": 4,
    "generator.n_samples_per_prompt": 2,
}
INVALID = {**VALID, "trainer.policy_mini_batch_size": 3}


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a configuration and returns its path."""
    path = tmp_path / "config.yml"
    return lambda flat: path.write_text(yaml.safe_dump(nested(flat))) and str(path)


def test_check_json_has_the_documented_keys(capsys, file):
    """The names and types that --json prints, for a valid and an invalid file; exit
    code 2 for the invalid one only.
    """
    code, found = run_json(capsys, "check", file(VALID), "--from", "skyrl")
    assert code == 0
    assert list(found) == [
        "system",
        "validator",
        "run",
        "violations",
        "notes",
        "derived",
    ]
    assert (found["system"], found["validator"], found["run"], found["violations"]) == (
        "skyrl",
        "accepts",
        "runs",
        [],
    )
    code, found = run_json(capsys, "check", file(INVALID), "--from", "skyrl")
    assert (code, found["validator"], found["run"]) == (2, "rejects", "fails")
    assert set(found["violations"][0]) == {"rule", "keys", "message", "nearest"}
    assert (
        main(["check", file(INVALID), "--from", "skyrl"]) == 2
    )  # as text: a verdict on standard output, no traceback
    shown = capsys.readouterr()
    assert "must be a multiple of trainer.policy_mini_batch_size=3" in shown.out
    assert "8 prompts per training step" in shown.out
    assert not shown.err


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["--from", "nemo_aligner"], "from", "unknown system"),
        (["--from", "skyrl", "--to", "rampup"], "to", ""),
        (["--from", "skyrl", "-o", "x.yml"], "to", ""),
        (["--from", "skyrl", "no.such.key=1"], "no.such.key", "unknown key"),
        (["nothing.yml", "--from", "verl"], None, "cannot read"),
        (["--from", "verl"], None, "give a file, or a command"),
    ],
)
def test_check_rejects_wrong_usage(capsys, file, arguments, key, said):
    """Unknown systems and keys, no file and an incomplete conversion are errors;
    key=value may come before or after options.
    """
    assert (
        run_json(
            capsys,
            "check",
            file(INVALID),
            "--from",
            "skyrl",
            "trainer.policy_mini_batch_size=2",
        )[0]
        == 0
    )
    assert (
        run_json(
            capsys,
            "check",
            "--from=skyrl",
            file(INVALID),
            "trainer.policy_mini_batch_size=2",
        )[0]
        == 0
    )
    files = (
        [] if said in ("cannot read", "give a file, or a command") else [file(VALID)]
    )
    code, found = run_json(capsys, "check", *files, *arguments)
    assert code == 2
    assert found["error"]["key"] == key
    assert said in found["error"]["message"]


@pytest.mark.parametrize("real", ["skyrl", "verl", "trlx"])
def test_check_file_of_another_system_is_refused(real):
    """A file that sets keys only of another system; the error says how the right one is
    found.
    """
    config = next(case["config"] for case in cases(real) if len(case["config"]) > 1)
    for asked in {"skyrl", "verl", "trlx"} - {real}:
        with pytest.raises(ConfigError, match="leave out --from"):
            verdict(asked, config, "num_prompts=1000")
    assert verdict(None, config, "num_prompts=1000").system == real


FOREIGN = {
    "TRL": ["per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\neval_steps: 100\nbeta: 0.01\n", "accelerate launch grpo.py --per_device_train_batch_size 4 --num_generations 8\n", "trl sft --model_name_or_path x --per_device_train_batch_size 1\n"],
    "the Hugging Face Trainer": ["torchrun --nproc_per_node 8 run_clm.py --per_device_train_batch_size 4 --eval_steps 10\n"],
    "accelerate": ["compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n"],
    "DeepSpeed": ['{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}'],
    "axolotl": ["base_model: m\ndatasets:\n  - path: d\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"],
    "LLaMA-Factory": ["stage: sft\nfinetuning_type: lora\nper_device_train_batch_size: 1\n"],
    "OpenRLHF": ["python3 -m openrlhf.cli.train_ppo_ray --micro_train_batch_size 8 --rollout_batch_size 1024\n"],
    "EasyR1": ["python3 -m verl.trainer.main config=examples/config.yaml worker.rollout.n=8\n", "data:\n  rollout_batch_size: 512\nworker:\n  actor:\n    global_batch_size: 128\n"],
    "slime": ["python3 train.py --num-rollout 9 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256\n"],
    "NeMo-RL": ["grpo:\n  num_prompts_per_step: 32\npolicy:\n  train_global_batch_size: 512\n", "defaults: ../../grpo_math_1B.yaml\npolicy:\n  megatron_cfg:\n    expert_model_parallel_size: 4\n    pipeline_model_parallel_size: 4\ncluster:\n  gpus_per_node: 8\n", "defaults: sft.yaml\npolicy:\n  tensor_model_parallel_size: 2\n  context_parallel_size: 2\ncluster:\n  gpus_per_node: 4\n"],
    "torchtitan": ["torchrun --nproc_per_node=8 -m torchtitan.train --training.global_batch_size 8\n"],
    "nanotron": ["tokens:\n  batch_accumulation_per_replica: 2\n  micro_batch_size: 4\nparallelism:\n  dp: 8\n"],
    "Levanter": ["trainer:\n  tracker: {type: wandb}\n  train_batch_size: 1024\n  num_train_steps: 10\n"],
    "GPT-NeoX": ["pipe-parallel-size: 1\nmodel-parallel-size: 2\ntrain_micro_batch_size_per_gpu: 4\n"],
    "ms-swift": ["swift sft --model m --per_device_train_batch_size 1\n", "NPROC_PER_NODE=8 megatron rlhf --rlhf_type grpo --micro_batch_size 1 --global_batch_size 16\n"],
    "AReaL": ["allocation_mode: sglang.d4p1t1+d4p1t1\ngconfig:\n  n_samples: 8\n", "python3 -m areal.launcher.local gsm8k.py --config c.yaml\n"],
    "prime-rl": ["uv run prime-rl --batch-size 8\n"],
    "MaxDiffusion": ["python src/maxdiffusion/train_sdxl.py src/maxdiffusion/configs/base_xl.yml --steps 9\n"],
    "Megatron-Bridge": ["torchrun --nproc_per_node 8 -m megatron.bridge.training --train.global_batch_size 64\n"],
    "simply": ["python -m simply.main --experiment_config lm\n"],
    "OLMo-core": ["from olmo_core.data import NumpyDatasetConfig\nGLOBAL_BATCH_SIZE = 256\n"],
}  # fmt: skip


@pytest.mark.parametrize("asked", [None, *SYSTEMS])
@pytest.mark.parametrize(
    ("system", "text"),
    [(system, text) for system, texts in FOREIGN.items() for text in texts],
)
def test_files_of_systems_without_rules_are_named_and_refused(
    capsys, tmp_path, system, text, asked
):
    """Such a file is never read as another system's, whatever `--from` says; the error
    says what can be read.
    """
    path = tmp_path / ("run.sh" if "--" in text else "config.yaml")
    path.write_text(text)
    code, found = run_json(
        capsys, "check", str(path), *([] if asked is None else ["--from", asked])
    )
    assert (code, found["error"]["key"]) == (2, "from")
    said = (
        f"this is a file of {system}, which rampup cannot check; it reads files and"
        " launch scripts of MaxText"
    )
    assert said in found["error"]["message"]
    assert "its update is " in found["error"]["message"]


@pytest.mark.parametrize("system", ["skyrl", "verl", "trlx", "maxtext_rl"])
def test_check_finds_the_system_by_itself(capsys, file, system):
    """Without `--from` the system is the one whose keys a file sets; a key that many
    systems have is no evidence of one.
    """
    config = max(
        (case["config"] for case in cases(system)), key=lambda config: len(str(config))
    )
    given = file(config)
    facts = ["num_prompts=1000"]
    assert (
        run_json(capsys, "check", given, *facts)[1]
        == run_json(capsys, "check", given, "--from", system, *facts)[1]
    )
    path = file({"eval_steps": 10, "gradient_accumulation_steps": 2})
    for asked in ([], ["--from", "skyrl"]):
        code, found = run_json(capsys, "check", path, *asked)
        assert (code, "maxtext," in found["error"]["message"]) == (2, False)
    assert (
        "say which with --from"
        in run_json(capsys, "check", path)[1]["error"]["message"]
    )


def test_check_to_writes_the_phases_of_the_verdict(capsys, file, tmp_path):
    """The file that --to writes has the phases of the verdict; one that cannot be
    written, or is the source, is an error.
    """
    output = tmp_path / "base.yml"
    path = file(
        PIPELINES["ramp in a pipeline"]
        | {
            "data_parallel_size": 8,
            "train_samples": 5000,
        }
    )
    convert = ["check", path, "--from", "megatron", "--to", "rampup", "-o"]
    code, found = run_json(capsys, *convert, str(output))
    planned = run_json(capsys, "plan", str(output))[1]["phases"]
    assert code == 0
    for words in ([str(output)], [str(output), "--from", "maxtext"]):
        code, error = run_json(capsys, "check", *words)
        assert code == 2
        assert "a file of rampup itself" in error["error"]["message"]
    for name in ("start_step", "start_sample", "global_batch_size"):
        assert [phase[name] for phase in planned] == [
            phase[name] for phase in found["phases"]
        ]
    assert main([*convert, str(tmp_path / "no" / "folder" / "x.yml")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main([*convert, path]) == 2
    assert "must not be the source file" in capsys.readouterr().err
    path = file(VALID)  # a run of reinforcement learning is not converted
    with pytest.raises(ConfigError, match=r"configs/rl\.yml"):
        to_rampup(check_file(path, "skyrl"))


def test_check_imports_no_jax_and_only_the_requested_system(file):
    """`rampup check` imports neither JAX nor NumPy, and of the dialects only the
    requested one.
    """
    code = (
        "import sys; from rampup.cli import main; code = main(sys.argv[1:]);assert not"
        " {'jax', 'numpy', 'flax', 'optax'} & set(sys.modules);assert not"
        " any(name.startswith(('rampup.contrib.check.verl', 'rampup.contrib.check.megatron')) for"
        " name in sys.modules);sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "check", file(VALID), "--from", "skyrl"]
    subprocess.run(command, check=True, capture_output=True)


SIZES = st.sampled_from(
    [
        -1,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        8,
        12,
        16,
        24,
        64,
        1000,
        10**9,
        10**18,
        2.5,
        1e300,
        None,
        True,
        "x",
        "",
        [],
        {},
    ]
)
LIKELY = st.integers(1, 24)
TEXTS = st.sampled_from(
    ["gae", "ILQLConfig", "16 8 100", "0:8 100:16", "0:1 1:1e18", "5:-1", "1 1 1"]
)


def values(entries):
    """Return configurations of a system: mostly plausible sizes, some nonsense."""

    def of_one(name):
        key = entries[name]
        if key.choices:
            return st.sampled_from([*key.choices, "nonsense"])
        plausible = {"bool": st.booleans(), "text": TEXTS}.get(key.kind, LIKELY)
        return st.one_of(plausible, plausible, plausible, SIZES)

    names = st.lists(
        st.sampled_from(sorted(entries)), min_size=1, max_size=12, unique=True
    )
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries({name: of_one(name) for name in chosen})
    )


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=60)
@given(data=st.data())
def test_check_file_returns_a_verdict_or_a_rampup_error(system, data):
    """Only a RampupError is raised; a verdict is JSON, names keys and legal values, and
    is explained.
    """
    entries = load_dialect(system).launch.entries
    flat = data.draw(values(entries))
    try:
        found = verdict(system, flat)
    except RampupError as error:
        assert str(error)
        return
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    check_nearest(system, flat, [], found)
    assert all(
        violation.message and violation.keys and entries.keys() >= {*violation.keys}
        for violation in found.violations
    )
    assert len({violation.rule for violation in found.violations}) == len(
        found.violations
    )
    if found.ok:
        assert found.derived
        assert found.summary


@pytest.mark.parametrize(
    ("system", "case"),
    [
        (system, case)
        for system in ("skyrl", "verl", "trlx", "maxtext_rl")
        for case in cases(system)
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_verdict_equals_every_reference_case(system, case):
    """Both verdicts and every number are those of the system's own code."""
    facts = [
        f"{key}={case[key]}"
        for key in ("num_processes", "num_prompts", "dataset_prompts")
        if key in case
    ]
    facts += (
        [f"actor_rollout_ref.actor.strategy={case['backend']}"]
        if "backend" in case
        else []
    )
    found = verdict(system, case["config"], *facts)
    expect(
        found,
        **{
            name: value
            for name, value in case["expect"].items()
            if not name.startswith("original")
        },
    )
    check_nearest(system, case["config"], facts, found)


X = "\u00d7"
SUMMARIES = {
    "skyrl": ({"trainer.policy_mini_batch_size": 256, "trainer.micro_train_batch_size_per_gpu": 64, "trainer.placement.policy_num_gpus_per_node": 4, "trainer.placement.ref_num_gpus_per_node": 4}, f"1,024 prompts {X} 5 = 5,120 samples; 4 optimizer steps of 1,280; 4 replicas {X} 5 passes {X} 64"),
    "verl": ({"data.train_batch_size": 64, "actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 16, "actor_rollout_ref.actor.use_dynamic_bsz": True, "algorithm.adv_estimator": "grpo"}, f"64 prompts {X} 4 = 256 samples; 4 optimizer steps of 64; 8 replicas {X} passes of up to 16,384 tokens"),
    "trlx": ({"train.batch_size": 32, "train.minibatch_size": 8}, f"128 prompts {X} 1 = 128 samples; 16 optimizer steps of 32; 1 replica {X} 4 passes {X} 8"),
    "megatron": ({"micro_batch_size": 1, "global_batch_size": 48, "rampup_batch_size": [16, 8, 500], "data_parallel_size": 8}, f"48 samples per optimizer step; 8 replicas {X} 6 microbatches {X} 1; ramp from 16 in 5 phases and 21 steps"),
    "maxtext": ({"per_device_batch_size": 0.5, "ici_fsdp_parallelism": 8, "num_devices": 8, "gradient_accumulation_steps": 2}, f"8 samples per optimizer step; 8 replicas {X} 2 passes {X} 0.5; 16 rows loaded"),
    "maxtext_rl": ({"batch_size": 8, "rl.num_generations": 4, "train_micro_batch_size": 2}, f"8 prompts {X} 4 = 32 samples; 1 optimizer step of 32; 4 passes {X} 8"),
    "tunix": ({"batch_size": 8, "grpo_config.num_generations": 4, "rl_training_config.mini_batch_size": 4}, f"8 prompts {X} 4 = 32 samples; 2 optimizer steps of 16; 1 pass {X} 16"),
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_summary_is_the_arithmetic_of_a_step_in_one_line(capsys, file, system):
    """Prompts, samples, optimizer steps, replicas, passes and their size, below the
    verdict; then the version of the rules.
    """
    config, summary = SUMMARIES[system]
    path = file(config)
    main(["check", path, "--from", system])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == summary
    assert lines[2].startswith("rules: ")
    assert "2026" in lines[2] or "2024" in lines[2]


def test_all_shows_every_phase(capsys, file):
    """A table of 117 phases is folded without --all."""
    path = file(
        {
            "micro_batch_size": 2,
            "global_batch_size": 2048,
            "rampup_batch_size": [192, 16, 9765625],
            "world_size": 8,
        }
    )
    short, long = (
        (main(["check", path, "--from", "megatron", *more]), capsys.readouterr().out)[1]
        for more in ([], ["--all"])
    )
    assert "97 phases left out; the command's --all shows them" in short
    assert len(long.splitlines()) - len(short.splitlines()) == 97 - 2


def read_back(tmp_path, result):
    """Write the conversion and plan it again."""
    path = tmp_path / "converted.yml"
    path.write_text(to_rampup(result))
    return build_plan(load_config(path))


@pytest.mark.parametrize(
    ("system", "case"),
    [
        (system, case)
        for system in ("maxtext", "megatron")
        for case in cases(f"ramp_{system}")
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_convert_keeps_ramps(tmp_path, system, case):
    """The plan and phases of every reference case are equal, with accumulation;
    MaxText's ramp of fractions is refused.
    """
    mesh = (
        {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": -1}
        if system == "maxtext"
        else {}
    )
    name = "num_devices" if system == "maxtext" else "data_parallel_size"
    result = verdict(system, {**case["config"], **mesh}, f"{name}={case[name]}")
    if result.conversion.refusal is not None:
        assert system == "maxtext"
        with pytest.raises(ConfigError, match="whole number of samples"):
            to_rampup(result)
        return
    plan = read_back(tmp_path, result)
    assert plan == build_plan(Config(**result.conversion.values))
    assert tuple(plan.phase_rows()) == result.phases


BASE = {"global_batch_size": 64, "micro_batch_size": 1}
PP, CP, CHUNKS = (
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
PIPELINES = {
    "constant pipeline": {"global_batch_size": 80, "micro_batch_size": 2, PP: 4},
    "ramp in a pipeline": (
        BASE | {"global_batch_size": 128, PP: 4, "rampup_batch_size": "32 32 999"}
    ),
    "interleaved": (
        BASE
        | {
            "rampup_batch_size": [32, 32, 500],
            PP: 4,
            CHUNKS: 2,
            CP: 2,
            "num_layers": 16,
        }
    ),
    "unsorted": {
        "step_batch_size_schedule": "100:64 0:32",
        "micro_batch_size": 1,
        "seq_length": 4,
    },
}


@pytest.mark.parametrize("config", PIPELINES.values(), ids=PIPELINES)
def test_convert_keeps_megatron_pipelines(tmp_path, config):
    """One pass of any number of microbatches, and growing multiples of the stages."""
    result = verdict("megatron", config, "data_parallel_size=8")
    assert result.ok
    plan = read_back(tmp_path, result)
    ramp = [
        [phase.start_step, phase.global_batch_size, phase.start_sample]
        for phase in plan.ramp.phases
    ]
    assert ramp == result.derived["ramp_phases"]
    assert [split.num_microbatches for split in plan.splits] == result.derived[
        "num_microbatches"
    ]
    if result.phases is not None:
        assert plan.phase_rows() == [dict(row) for row in result.phases]


def test_convert_keeps_a_maxtext_pipeline(tmp_path):
    """Stages, repeats, microbatches, accumulation and evaluation."""
    config = {
        "ici_pipeline_parallelism": 4,
        "base_num_decoder_layers": 16,
        "num_pipeline_microbatches": 8,
    }
    config |= {
        "per_device_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "eval_interval": 5,
    }
    result = verdict("maxtext", config, "num_devices=8")
    plan = read_back(tmp_path, result)
    assert plan == build_plan(Config(**result.conversion.values))
    (row,) = plan.phase_rows()
    names = (
        "accumulation_steps",
        "num_pipeline_microbatches",
        "num_repeats",
        "microbatch_size",
    )
    assert [row[name] for name in names] == [2, 8, 4, 2]
    assert plan.eval_split is not None


def test_convert_comments_each_key_without_a_counterpart():
    """Keys that are not converted are named in one comment each; a line break in a name
    cannot write a line of its own.
    """
    config = {
        "per_device_batch_size": 2,
        "quantization": "int8",
        "attention": "flash",
        "learning_rate": 0.1,
        "x\nsteps": 1,
    }
    text = to_rampup(verdict("maxtext", config, "num_devices=4"))
    for name in ("quantization", "attention", "learning_rate", "x?steps"):
        assert text.count(f"\n# {name}: ") == 1
    assert "learning_rate: not converted; rampup's key is learning_rate" in text
    assert {"per_device_batch_size": 2, "steps": 150_001}.items() <= yaml.safe_load(
        text
    ).items()


def test_convert_refuses_a_growing_pipeline_of_uneven_microbatches():
    """Rampup's pipeline grows in multiples of its stages; the error names the first
    number that is not one.
    """
    config = BASE | {"global_batch_size": 72, "rampup_batch_size": [24, 24, 500], PP: 4}
    with pytest.raises(
        ConfigError, match="multiples of its 4 stages, but the file has phases of 3"
    ):
        to_rampup(verdict("megatron", config, "data_parallel_size=8"))


def test_an_option_that_went_names_what_replaces_it(capsys):
    """Where a run stands is a step."""
    assert main(["check", "x.yml", "--samples=100"]) == 2
    assert "check FILE at_step=N" in " ".join(capsys.readouterr().err.split())
    assert main(["check", "x.yml", "--step=100"]) == 2
    assert "check FILE at_step=N" in " ".join(capsys.readouterr().err.split())

"""Record what every command prints, and compare two records.

    python tests/helpers/snapshot.py record OUT.json.gz
    python tests/helpers/snapshot.py compare OLD.json.gz [NEW.json.gz]

The `rampup` that can be imported is recorded; without NEW, `compare` records it first. Floats of a training run are rounded;
times and paths of the machine are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import gzip
import html
import importlib
import inspect
import io
import itertools
import json
import os
import re
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

# Differences that are meant: a pattern of the printed path, in which `*` stands for anything, and the reason.
EXPLAINED: dict[str, str] = {
    "* > table > *": "printed tables have new wording and layout",
    "* > json > notes": "notes are reworded",
    "* > json > error > message": "error messages are reworded",
    "* > json > violations > * > message": "error messages are reworded",
    "bench > * > json > results > * > notes": "notes of benchmarks are reworded",
    "bench > * > json > results > * > title": "titles of benchmarks are reworded",
    "completion > * > json > script": "shtab generates the completion scripts",
    "configs > * > _given": "a configuration knows which keys were set",
    "configs > * > shard_optimizer_over_data": "a new key",
    "convert > * > json > error": "a conversion that fails prints one JSON object, as every command does",
    "convert > * > json > not one object": "a conversion that fails prints one JSON object, as every command does",
    "convert > * > json > standard error": "a conversion that fails prints its error as JSON",
    "convert > * > text": "the first comment of a converted file is reworded",
    "errors > * > json > error": "a conversion that fails prints one JSON object, as every command does",
    "errors > * > json > not one object": "a conversion that fails prints one JSON object, as every command does",
    "errors > * > json > standard error": "a conversion that fails prints its error as JSON",
    "errors > train rl.yml > *": "the configuration of a rollout trains now",
    "errors > * > json > error > nearest": "there is a new command, generate",
    "explain > explain enable_rampup_batch_size > json > default": "the default is the value of base.yml",
    "explain > explain shard_optimizer_over_data": "a new key",
    "explain > explain remat_policy > json > legal": "there are more policies",
    "explain > * > json > interacts": "the keys come from the documentation alone; there are no rules written by hand",
    "explain > * > json > meaning": "the documentation of keys is reworded",
    "explain > * > json > rules": "the rules written by hand are gone",
    "explain > * > json > unit": "sizes of dcn axes count slices, and of pipeline axes stages",
    "plan > plan rl.yml steps=3 * > json > error > nearest": "there are more keys to suggest",
    "report > * > text": "pages are reworded",
    "suggest > suggest * --system skyrl* > *": "a community guide publishes three configurations for SkyRL",
    "train > * > json > seconds": "the summary has the time of the run",
    "train > * > json > *_eval_loss": "the summary has the first and the last evaluation loss",
    "train > * > run > eval.jsonl > * > consumed_samples": "an evaluation has the samples consumed before it",
    "train > * > run > config.yml": "the comments of config.yml are reworded; its values are the same",
}
# Wording that may change: shown apart, and no reason to fail.
WORDING = ("help", "names")
DATA = Path(__file__).resolve().parent.parent / "data"
DEVICES = 4
# What differs from run to run, by command.
TIMES = ("tokens_per_second", "step_seconds", "compile_seconds", "tflops_per_device", "mfu")
VOLATILE = {
    "train": TIMES,
    "tune": (*TIMES, "run_seconds", "settings", "alternatives", "bytes"),
    "bench": TIMES,
    "report": ("bytes",),
}
ABSENT = "(absent)"
MAX_SHOWN = 300

PLAN_DEVICES = (1, 3, 4, 8, 16, 48, 64, 1024, 4096)
OVERRIDES = (
    "steps=100",
    "enable_rampup_batch_size=false",
    "enable_rampup_batch_size=false per_device_batch_size=12",
    "per_device_batch_size=12 per_device_batch_size_increment=2 global_rampup_samples=500",
    "rampup_carry_overshoot=true",
    "rampup_carry_overshoot=true global_rampup_samples=7",
    "global_rampup_samples=1",
    "rampup_microbatch=auto",
    "rampup_microbatch=per_phase",
    "rampup_microbatch=auto microbatch_size=4",
    "microbatch_size=2",
    "microbatch_size=1 gradient_accumulation=multi_steps",
    "gradient_accumulation_steps=2",
    "gradient_accumulation_steps=3 rampup_microbatch=per_phase",
    "per_device_batch_size_start=0.5 per_device_batch_size_increment=0.5 per_device_batch_size=2",
    "per_device_batch_size_start=1/4 per_device_batch_size_increment=1/4 per_device_batch_size=1",
    "enable_rampup_batch_size=false per_device_batch_size=1/2",
    "eval_per_device_batch_size=4",
    "eval_interval=-1",
    "eval_steps=-1",
    "ici_tensor_parallelism=2",
    "ici_fsdp_parallelism=2",
    "ici_fsdp_parallelism=-1 ici_data_parallelism=1",
    "ici_context_parallelism=2",
    "ici_expert_parallelism=4",
    "dcn_data_parallelism=2",
    "num_slices=2",
    "num_slices=2 dcn_pipeline_parallelism=2",
    "dcn_fsdp_parallelism=2 ici_tensor_parallelism=2",
    "ici_pipeline_parallelism=2",
    "ici_pipeline_parallelism=4",
    "ici_pipeline_parallelism=4 num_pipeline_microbatches=4",
    "ici_pipeline_parallelism=4 num_pipeline_microbatches=8",
    "ici_pipeline_parallelism=2 num_pipeline_repeats=2",
    "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=2",
    "ici_pipeline_parallelism=2 num_layers_per_pipeline_stage=-1 pipeline_tick_overhead=0.5",
    "ici_pipeline_parallelism=4 pipeline_tick_overhead=2 base_num_decoder_layers=16 num_layers_per_pipeline_stage=-1",
    "ici_pipeline_parallelism=4 pipeline_strict_multiple=false num_pipeline_microbatches=6 per_device_batch_size=12",
    "ici_pipeline_parallelism=4 pipeline_delay_activation_forwarding=true",
    "ici_pipeline_parallelism=2 pipeline_keep=dots rampup_microbatch=per_phase",
    "expansion_factor_real_data=2",
    "learning_rate_clock=steps learning_rate_batch_scaling=sqrt lr_schedule_type=wsd",
    "max_target_length=4096 dtype=bfloat16 remat_policy=full",
)
SCHEDULES = (
    "0:64",
    "0:16 100:32 1K:64",
    "0:64 200:32 1_000:128",
    "0:64, 1000:96, 5000:128",
    "0:16 160:16 320:32",
    "0:768 250M:1536 500M:3072",
    "0:8 1:16 2:24 3:32",
    "0:16 100:17",
    "0:16 50:0",
    "5:16 50:32",
    "0:16 100:32 100:64",
    "0:16 100",
    "",
)
ROLLOUT_OVERRIDES = (
    "",
    "rl.num_generations=4 rl.num_iterations=3",
    "batch_size=64 mini_batch_size=64 train_micro_batch_size=-1",
    "num_prompts=100",
    "num_prompts=20",
    "num_epoch=2 train_fraction=0.5",
    "rollout_micro_batch_size=4",
    "microbatch_size=4 train_micro_batch_size=-1",
    "token_budget=4096 train_micro_batch_size=-1",
    "token_budget=100 train_micro_batch_size=-1",
    "pad_microbatches=true mini_batch_size=12 train_micro_batch_size=5",
    "mini_batch_size=12",
    "enable_critic=true",
    "enable_critic=true critic_mini_batch_size=8 critic_num_iterations=2 critic_train_micro_batch_size=4",
    "num_test_batches=0",
    "eval_batch_size=16 test_batch_start_index=32 eval_num_generations=4",
    "enable_reference_policy=false experience_dtype=bfloat16 token_dtype=uint16",
    "shuffle_mini_batches=false keep_prompts_together=false",
    "ici_fsdp_parallelism=2",
    "ici_pipeline_parallelism=2",
    "ici_tensor_parallelism=3",
    "train_micro_batch_size=3",
    "batch_sise=8",
    "batch_size=0",
    "steps=3",
)
SUGGESTED = ("125M", "1.3B", "6B", "7B", "20B", "70B", "176B")
DRAFTS = {
    "comment": "steps: 0  # few\nlog_period: 5\n",
    "quoted": "steps: '500'\n",
    "half": "log_period: 1.5\n",
    "name": "run_name: 5\n",
    "yes": "enable_checkpointing: 'yes'\n",
    "choice": "dtype: bfloat\n",
    "misspelt": "learning_rat: 0.1\n",
    "misspelt_zero": "stepz: 0\n",
    "base": "base_config: bse.yml\n",
    "fifteen": "base_config: base.yml\nper_device_batch_size: 15   # samples\n",
    "increment": "base_config: base.yml\nper_device_batch_size_increment: 5\n",
    "tensor": "base_config: base.yml\nici_tensor_parallelism: 3",
    "heads": "base_config: base.yml\nbase_num_kv_heads: 3\n",
    "microbatch": "base_config: base.yml\nmicrobatch_size: 3\n",
    "schedule": "enable_rampup_batch_size: false\nbatch_size_schedule: '0:100, 3K:250 5K:250'\n",
    "both_ramps": "base_config: base.yml\nbatch_size_schedule: 0:64\n",
    "windows": "steps: 0\r\nlog_period: 7\r\n",
    "flow": "{steps: 0, log_period: 3}",
    "several": "base_config: base.yml\nsteps: 0\nper_device_batch_size: 15\nremat_policy: fulll\n",
    "pipeline": "base_config: base.yml\nici_pipeline_parallelism: 4\nnum_pipeline_microbatches: 6\n",
    "layers": "base_config: base.yml\nici_pipeline_parallelism: 4\nbase_num_decoder_layers: 6\n",
    "devices": "base_config: base.yml\nnum_devices: 6\nici_tensor_parallelism: 4\n",
    "legal": "base_config: base.yml\nsteps: 5\n",
    "unknown": "banana: 5\n",
    "twice": "steps: 1\nsteps: 2\n",
    "nothing": "",
    "no_value": "steps:\n",
    "words": "steps: many\n",
    "alias": "steps: &a 0\nlog_period: *a\n",
    "broken": "steps: [1\n",
    "a_list": "- steps\n",
    "files": "dataset_type: tokens\n",
    "slash": "run_name: a/b\n",
}
BAD_PLANS = (
    "stepz=3",
    "steps",
    "steps=0",
    "steps=1.5",
    "steps=many",
    "steps=",
    "steps=1 steps=2",
    "per_device_batch_size=15",
    "per_device_batch_size=nan",
    "per_device_batch_size=1/0",
    "per_device_batch_size=0.3",
    "per_device_batch_size_start=20",
    "per_device_batch_size_increment=0",
    "global_rampup_samples=-5",
    "microbatch_size=3",
    "microbatch_size=0",
    "rampup_microbatch=sometimes",
    "gradient_accumulation=none",
    "ici_tensor_parallelism=3",
    "ici_data_parallelism=-1 ici_fsdp_parallelism=-1",
    "ici_data_parallelism=3",
    "num_slices=3",
    "ici_pipeline_parallelism=4 num_pipeline_microbatches=0",
    "ici_pipeline_parallelism=4 num_pipeline_microbatches=6",
    "ici_pipeline_parallelism=4 base_num_decoder_layers=6",
    "ici_pipeline_parallelism=4 num_pipeline_repeats=3",
    "ici_pipeline_parallelism=4 per_device_batch_size_start=1 per_device_batch_size_increment=3 num_pipeline_microbatches=8",
    "dtype=float64",
    "learning_rate=-1",
    "learning_rate=inf",
    "warmup_steps_fraction=2",
    "adam_b1=1.5",
    "run_name=a/b",
    "batch_size_schedule=0:16",
    "eval_per_device_batch_size=0.3",
    "base_num_query_heads=3",
    "steps=0 dtype=float64 per_device_batch_size=15",
    "--devices 0",
    "--devices 2.5",
    "--devices 4 --wrong",
    "--budget many",
    "--budget 0",
    "--budget 1B --tokens-per-second fast",
    "--budget 1B --measured nowhere",
    "--budget 1B --diff base.yml",
    "--tokens-per-second 5",
    "--diff nowhere.yml",
    "--diff rl.yml",
)
BAD = (
    "plan",
    "plan nowhere.yml",
    "plan drafts/broken.yml",
    "plan drafts/twice.yml",
    "plan rl.yml --devices 7",
    "plan rl.yml --budget 1B --devices 4",
    "plam base.yml",
    "rows base.yml",
    "rows base.yml --step 1000000 --devices 4",
    "rows base.yml --step -1 --devices 4",
    "rows rl.yml --step 1 --devices 4",
    "rows base.yml --step 1 --devices 4 grain_train_files=none/*.txt",
    "rows base.yml --step 1 --devices 4 dataset_type=tokens",
    "rows base.yml --step 1 --devices 4 dataset_type=tokens grain_train_files=texts/a.txt token_dtype=uint8",
    "rows base.yml --step 499 --devices 4 num_epoch=1 grain_train_files=texts/*.txt",
    "train base.yml --fake-devices 0",
    "train base.yml expansion_factor_real_data=1.5",
    "train base.yml expansion_factor_real_data=0.5",
    "train base.yml ici_context_parallelism=2",
    "train base.yml ici_tensor_parallelism=4 base_num_query_heads=2 base_output_directory=refused",
    "train base.yml ici_pipeline_parallelism=4 num_pipeline_microbatches=6",
    "train rl.yml",
    "tune base.yml",
    "tune base.yml --memory-gib two",
    "tune base.yml --memory-gib 1 --devices 99",
    "tune base.yml --memory-gib 1 gradient_accumulation=multi_steps",
    "tune base.yml --memory-gib 1 -o found.txt",
    "bench nothing",
    "bench packing -o none/found.md",
    "explain stepz",
    "explain",
    "completion fish",
    "suggest --params 0 --system trlx",
    "suggest --params 6X --system trlx",
    "suggest --params 6B --system nemo",
    "suggest --params 6B --system verl --memory-gib -80",
    "suggest --params 6B",
    "check texts/a.txt --from skyrl",
    "check drafts/several.yml --from verl",
    "check drafts/several.yml --from nobody",
    "check golden/ramp_maxtext_0.yml --from megatron",
    "check golden/ramp_maxtext_0.yml --from maxtext --to rampup",
    "check golden/skyrl_0.yml --from skyrl --to rampup -o converted.yml",
    "check nowhere.yml --from maxtext",
    "fix rl.yml",
    "fix nowhere.yml",
    "fix base.yml steps=0 --write --devices 4",
    "plot base.yml",
    "plot base.yml -o x.gif --devices 4",
    "plot base.yml -o x.png --width 1 --devices 4",
    "plot base.yml -o x.png --kind nice --devices 4",
    "plot base.yml -o x.png --kind runs --devices 4",
    "plot base.yml -o x.png --kind timetable --devices 4",
    "plot texts -o x.png",
    "plot rl.yml -o x.png --devices 4",
    "report base.yml -o x.pdf --devices 4",
    "report base.yml -o none/x.html --devices 4",
    "report texts -o x.html",
    "report base.yml --from nobody -o x.html",
    "timetable --stages 0 --microbatches 8",
    "timetable --stages 4 --microbatches 0",
    "timetable --stages 4 --microbatches 8 --schedule fast",
    "timetable --stages 4 --microbatches 8 --repeats 2 --schedule gpipe",
    "timetable --stages 4 --microbatches 8 --forward-cost free",
    "timetable --stages 4 --microbatches 8 -o picture.xyz",
    "timetable --stages 4",
)
TINY = (
    "per_device_batch_size_start=1 per_device_batch_size_increment=1 per_device_batch_size=3 global_rampup_samples=40 "
    "max_target_length=16 base_emb_dim=16 base_num_decoder_layers=1 base_mlp_dim=32 base_num_query_heads=2 eval_interval=4 "
    "eval_steps=1 checkpoint_period=4 jax_cache_dir=null grain_train_files=texts/*.txt base_output_directory=runs"
)
# The name of a run and what it sets; a name that comes twice goes on where the first one ended.
TRAINED = (
    ("fused", "steps=8"),
    ("fused", "steps=8"),
    ("fused", "steps=10 learning_rate_schedule_steps=8"),
    ("fused", "steps=12 global_rampup_samples=50"),
    ("multi", "steps=6 gradient_accumulation=multi_steps"),
    ("staged", "steps=6 ici_pipeline_parallelism=2 base_num_decoder_layers=2 microbatch_size=1"),
    ("auto", "steps=8 rampup_microbatch=auto opt_type=sgd lr_schedule_type=wsd learning_rate_batch_scaling=linear"),
    ("phases", "steps=6 rampup_microbatch=per_phase ici_fsdp_parallelism=2 dropout_rate=0.1 remat_policy=minimal"),
)
MODULES = ("rampup", "rampup.run", "rampup.plan", "rampup.errors", "rampup.show.plots")


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of the command line.

    Attributes:
        group: the command, under which differences are listed.
        words: the arguments.
        table: also keep what is printed for people.
        volatile: keep only the types of the numbers.
    """

    group: str
    words: Sequence[str]
    table: bool = False
    volatile: bool = False


def planned(configs: Sequence[str]) -> Iterator[Case]:
    """Yield the calls of `rampup plan`."""
    for config in configs:
        yield Case("plan", ["plan", config], table=True)
        for number in PLAN_DEVICES:
            yield Case("plan", ["plan", config, "--devices", str(number)])
    for number, settings in enumerate(OVERRIDES):
        for devices in (4, 8):
            yield Case("plan", ["plan", "base.yml", *settings.split(), f"--devices={devices}"], table=number % 4 == 0)
    for schedule, more in itertools.product(SCHEDULES, ("", "rampup_microbatch=auto", "batch_size_schedule_unit=tokens")):
        words = ["plan", "base.yml", "enable_rampup_batch_size=false", f"batch_size_schedule={schedule}", *more.split()]
        yield Case("plan", [*words, "--devices=4"])
    for number, settings in enumerate(ROLLOUT_OVERRIDES):
        for devices in (4, 8):
            yield Case("plan", ["plan", "rl.yml", *settings.split(), f"--devices={devices}"], table=number % 4 == 0)
    for config, budget in itertools.product(("gpt3_175b.yml", "base.yml", "bloom_176b.yml"), ("10M", "300B", "1.5T", "7")):
        yield Case("budget", ["plan", config, "--devices=16", "--budget", budget], table=True)
        yield Case("budget", ["plan", config, "--devices=16", "--budget", budget, "--tokens-per-second", "1.5M"], table=True)
    yield Case("diff", ["plan", "gpt3_175b.yml", "--diff", "palm_540b.yml"], table=True)
    yield Case("diff", ["plan", "base.yml", "steps=7", "dtype=bfloat16", "--diff", "base.yml", "--devices=4"], table=True)
    yield Case("diff", ["plan", "base.yml", "--diff", "base.yml", "--devices=4"], table=True)
    yield Case("diff", ["plan", "llama3_405b.yml", "--diff", "deepseek_v3.yml"], table=True)


def row_cases() -> Iterator[Case]:
    """Yield the calls of `rampup rows`."""
    common = ["rows", "base.yml", "--devices=2", "max_target_length=32"]
    texts = "grain_train_files=texts/*.txt"
    tokens = ("dataset_type=tokens", "grain_train_files=tokens.bin", "token_dtype=uint16")
    for data in ((texts,), tokens, ("dataset_type=synthetic",), (texts, "enable_data_shuffling=false")):
        for step in (0, 1, 70, 140, 499):
            yield Case("rows", [*common, *data, "--step", str(step)], table=step == 1)
    yield Case("rows", [*common, texts, "data_shuffle_seed=5", "rampup_carry_overshoot=true", "--step=33"])
    yield Case("rows", [*common, texts, "grain_eval_files=texts/b.txt", "--step=33"])
    yield Case("rows", [*common, texts, "eval_holdout_fraction=0.5", "num_epoch=3", "--step=3"])


def timetables() -> Iterator[Case]:
    """Yield the calls of `rampup timetable`."""
    sizes = ((1, 1), (2, 3), (4, 4), (4, 8), (3, 7), (4, 2))
    for schedule, (stages, microbatches) in itertools.product(("gpipe", "1f1b", "zb-h1", "interleaved", "circular"), sizes):
        for repeats in (1,) if schedule in ("gpipe", "1f1b", "zb-h1") else (1, 2, 3):
            words = ["timetable", f"--stages={stages}", f"--microbatches={microbatches}", f"--schedule={schedule}"]
            yield Case("timetable", [*words, f"--repeats={repeats}"], table=stages > 1)
    common = ["timetable", "--stages=4", "--microbatches=8"]
    yield Case("timetable", common)
    yield Case("timetable", [*common, "--repeats=2"])
    for group in (4, 6, 8):
        yield Case("timetable", [*common, "--repeats=2", f"--group-size={group}"], table=True)
    for costs in (("1", "1"), ("1.5", "2.5"), ("1/3", "2/3"), ("2", "0"), ("0", "1"), ("-1", "1")):
        for schedule in ("1f1b", "zb-h1"):
            given = [f"--forward-cost={costs[0]}", f"--backward-cost={costs[1]}", f"--schedule={schedule}"]
            yield Case("timetable", [*common, *given])
    yield Case("timetable", [*common, "-o", "timetable.svg"])


def golden() -> Iterator[Case]:
    """Write the reference cases of other systems into files; yield the calls of `rampup check` on them."""
    Path("golden").mkdir()
    systems = {"ramp_maxtext": "maxtext", "ramp_megatron": "megatron"}
    for file in sorted(DATA.glob("*.json")):
        system = systems.get(file.stem, file.stem)
        for number, case in enumerate(json.loads(file.read_text())):
            path = Path("golden", f"{file.stem}_{number}.yml")
            path.write_text(yaml.safe_dump(case["config"]))
            named = {"dataset_prompts": "num_prompts", "backend": "actor_rollout_ref.actor.strategy"}
            stated = ("num_devices", "data_parallel_size", "num_processes", "num_prompts", *named)
            settings = [f"{named.get(key, key)}={case[key]}" for key in stated if case.get(key) is not None]
            words = ["check", str(path), *settings, "--from", system]
            yield Case("check", words, table=number % 3 == 0)
            if system in ("maxtext", "megatron"):
                mesh = ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=-1"] if system == "maxtext" else []
                yield Case("convert", [*words, *mesh, "--to", "rampup", "-o", f"converted_{path.name}"])
    pipeline = {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 16, "per_device_batch_size": 4}
    pipeline |= {"num_pipeline_microbatches": 8, "gradient_accumulation_steps": 2, "eval_interval": 5, "quantization": "int8"}
    Path("golden", "pipeline.yml").write_text(yaml.safe_dump(pipeline))
    words = ["check", "golden/pipeline.yml", "num_devices=8", "--from=maxtext", "--to=rampup", "-o", "converted_pipeline.yml"]
    yield Case("convert", words)
    yield Case("report", ["report", "golden/verl_9.yml", "--from", "verl", "-o", "verl.html"])
    yield Case("report", ["report", "golden/ramp_megatron_0.yml", "--from", "megatron", "data_parallel_size=8", "-o", "m.html"])


def other_tools(configs: Sequence[str]) -> Iterator[Case]:
    """Yield the calls of `explain`, `suggest`, `fix`, `completion`, and those that are refused."""
    for name in known_keys():
        yield Case("explain", ["explain", name], table=True)
    for system, params in itertools.product(("trlx", "skyrl", "verl", "maxtext_rl"), SUGGESTED):
        for memory in ([], ["--memory-gib", "24"], ["--memory-gib", "80"]):
            yield Case("suggest", ["suggest", "--params", params, "--system", system, *memory], table=params == "7B")
    for name in DRAFTS:
        yield Case("fix", ["fix", f"drafts/{name}.yml", "--devices", "4"], table=True)
    for settings in ("per_device_batch_size=15", "ici_tensor_parallelism=5", "stepz=3"):
        yield Case("fix", ["fix", "drafts/legal.yml", settings, "--devices", "6"])
    yield Case("fix", ["fix", "drafts/several.yml", "--devices", "4", "--write"])
    for shell in ("bash", "zsh"):
        yield Case("completion", ["completion", shell])
    for settings in BAD_PLANS:
        devices = [] if "--devices" in settings else ["--devices", "4"]
        yield Case("errors", ["plan", "base.yml", *settings.split(), *devices], table=True)
    for line in BAD:
        yield Case("errors", shlex.split(line), table=True)
    for config in configs:
        yield Case("report", ["report", config, "--devices=4", "-o", f"{Path(config).stem}.html"])
        yield Case("plot", ["plot", config, "--devices=4", "-o", f"{Path(config).stem}.svg"])
    for kind in ("batch", "rate", "timetable"):
        words = ["plot", "base.yml", "ici_pipeline_parallelism=4", "--devices=8", "--kind", kind, "-o", f"{kind}.svg"]
        yield Case("plot", words)


def on_devices() -> Iterator[Case]:
    """Yield the calls that compute, and those that read what a run has left."""
    for name, settings in TRAINED:
        given = [setting.split("=")[0] for setting in settings.split()]
        common = [setting for setting in TINY.split() if setting.split("=")[0] not in given]
        yield Case("train", ["train", "base.yml", f"run_name={name}", *settings.split(), "--quiet", *common])
    yield Case("plot", ["plot", "runs/fused", "runs/auto", "-o", "runs.svg"])
    yield Case("plot", ["plot", "runs/fused", "--kind", "batch", "-o", "run.svg"])
    yield Case("report", ["report", "runs/fused", "-o", "run.html"])
    words = ["plan", "base.yml", *TINY.split(), "--devices=4", "--budget=1M", "--measured", "runs/fused"]
    yield Case("budget", words, volatile=True)
    small = "dataset_type=synthetic vocab_size=16 max_target_length=8 base_emb_dim=8 base_num_decoder_layers=1 steps=3"
    small += " base_mlp_dim=8 base_num_query_heads=1 enable_rampup_batch_size=false per_device_batch_size=2 jax_cache_dir=null"
    yield Case("tune", ["tune", "base.yml", *small.split(), "--memory-gib", "1", "--devices", "1"], volatile=True)
    yield Case("tune", ["tune", "base.yml", *small.split(), "--memory-gib", "1e-6", "--devices", "1"], volatile=True)
    yield Case("bench", ["bench", "packing", "--quick", "--fake-devices", str(DEVICES)], volatile=True)


def known_keys() -> list[str]:
    """Return every key that the two full configurations set, nested ones with a dot."""
    found: list[str] = []
    for name in ("base.yml", "rl.yml"):
        for key, value in yaml.safe_load((shipped() / name).read_text()).items():
            found += [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
    return list(dict.fromkeys(found))


def shipped() -> Path:
    """Return the folder of the configurations that come with the package."""
    package = Path(str(importlib.import_module("rampup").__file__)).resolve().parent
    return next(folder for folder in (package.parent / "configs", package / "configs") if (folder / "base.yml").exists())


def write_inputs() -> None:
    """Write drafts, texts and tokens into the current folder."""
    for folder in ("drafts", "texts"):
        Path(folder).mkdir()
    for name, text in DRAFTS.items():
        Path("drafts", f"{name}.yml").write_bytes(text.encode())
    for name, length in (("a", 3000), ("b", 2000), ("c", 999)):
        words = (f"{name}{number * number % 977} " for number in range(length))
        Path("texts", f"{name}.txt").write_text("".join(words))
    Path("tokens.bin").write_bytes(b"".join((number * 7919 % 256).to_bytes(2, "little") for number in range(40_000)))


def call(words: Sequence[str]) -> tuple[int, str, str]:
    """Run the command line in this process; return its exit code and what it printed."""
    from rampup.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def recorded(case: Case) -> dict[str, Any]:
    """Return what a call does: its exit code, its object, its table and the text of the files that it writes."""
    code, out, err = call([*case.words, "--json"])
    try:
        value = json.loads(out)
    except ValueError:
        value = {"not one object": out, "standard error": err}
    facts = {"code": code, "json": steady(value, group=case.group, types_only=case.volatile)}
    if case.group == "train":
        facts["run"] = run_files(Path("runs", next(word[9:] for word in case.words if word.startswith("run_name="))))
    if "--write" in case.words and Path(case.words[1]).exists():
        facts["file"] = Path(case.words[1]).read_text()
    output = Path(case.words[case.words.index("-o") + 1]) if "-o" in case.words[:-1] else None
    if output is not None:
        facts["written"] = output.exists()
        if output.exists() and output.suffix in (".yml", ".html") and "runs/fused" not in case.words:
            facts["text"] = visible(output.read_text()) if output.suffix == ".html" else output.read_text().splitlines()
    if case.table:
        code, out, err = call(case.words)
        facts["table"] = {"code": code, "lines": [line.rstrip() for line in out.splitlines()]}
        if case.group == "errors":
            facts["table"]["error"] = err.splitlines()
    return facts


def steady(value: Any, *, group: str, types_only: bool = False) -> Any:
    """Return a JSON value without what differs from run to run."""
    if isinstance(value, dict):
        left_out = [key for key in VOLATILE.get(group, ()) if value.get(key) is not None]
        kept = {key: steady(inner, group=group, types_only=types_only) for key, inner in value.items()}
        return kept | dict.fromkeys(left_out, "(left out)")
    if isinstance(value, list):
        return [steady(part, group=group, types_only=types_only) for part in value[: 1 if types_only else None]]
    if types_only and isinstance(value, str):
        return re.sub(r"[0-9][0-9.,e+-]*", "#", value)
    if types_only and isinstance(value, int | float) and not isinstance(value, bool):
        return f"({type(value).__name__})"
    return float(f"{value:.4g}") if group == "train" and isinstance(value, float) else value


def run_files(folder: Path) -> dict[str, Any]:
    """Return what a run has left in its folder: lines without timings, configuration, and checkpoints."""
    found: dict[str, Any] = {}
    for name in ("metrics.jsonl", "eval.jsonl"):
        lines = (folder / name).read_text().splitlines() if (folder / name).exists() else []
        found[name] = [steady(json.loads(line), group="train") for line in lines]
    found["config.yml"] = (folder / "config.yml").read_text().splitlines() if (folder / "config.yml").exists() else None
    checkpoints = folder / "checkpoints"
    found["checkpoints"] = sorted(path.name for path in checkpoints.iterdir()) if checkpoints.exists() else None
    found["files"] = sorted(path.name for path in folder.iterdir()) if folder.exists() else None
    return found


def visible(page: str) -> list[str]:
    """Return the text of a page, without styles, scripts and tags."""
    text = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    lines = (html.unescape(line).strip() for line in re.sub(r"<[^>]*>", "\n", text).splitlines())
    return [line for line in lines if line]


def public_names() -> dict[str, Any]:
    """Return the public names of each module, with the signature of each function, class and method."""
    found: dict[str, Any] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            found[name] = f"cannot be imported: {type(error).__name__}"
            continue
        found[name] = {public: described(getattr(module, public)) for public in sorted(names_of(module))}
    return found


def names_of(module: ModuleType) -> list[str]:
    """Return what a module offers: what it lists, or what it defines."""
    listed = getattr(module, "__all__", None)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return list(listed) if listed is not None else [name for name in own if not name.startswith("_")]


def described(thing: Any) -> Any:
    """Return the signature of a function as text, or those of a class and of its public members."""
    if not inspect.isclass(thing):
        return signature(thing)
    members = {"": signature(thing), "bases": ", ".join(base.__name__ for base in thing.__bases__)}
    for name in dir(thing):
        if not name.startswith("_") and not hasattr(BaseException, name):
            value = inspect.getattr_static(thing, name)
            inner = getattr(value, "__func__", value)
            members[name] = signature(inner) if inspect.isfunction(inner) else f"({type(value).__name__})"
    return members


def signature(thing: Any) -> str:
    """Return a signature as text, without addresses."""
    try:
        return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(thing)))
    except (TypeError, ValueError):
        return f"({type(thing).__name__})"


def helps() -> dict[str, Any]:
    """Return the help of each command."""
    from rampup.cli import COMMANDS

    pages = {"rampup": ["--help"], **{name: [name, "--help"] for name in COMMANDS}}
    return {name: call(words)[1].splitlines() for name, words in pages.items()}


def defaults(configs: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key of each configuration."""
    from rampup import load_config

    found: dict[str, Any] = {}
    for name in configs:
        if name != "rl.yml":
            config = load_config(name)
            fields = [field.name for field in dataclasses.fields(config) if field.name not in ("sources", "where")]
            found[name] = {field: repr(getattr(config, field)) for field in fields}
    return found


def record() -> dict[str, Any]:
    """Return everything that the importable version does, by command and call."""
    for name in [name for name in os.environ if name.startswith(("RAMPUP_", "JAX_", "XLA_"))]:
        del os.environ[name]
    os.environ |= {"COLUMNS": "120", "NO_COLOR": "1", "MPLBACKEND": "agg", "TERM": "dumb", "JAX_PLATFORMS": "cpu"}
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print(f"recording {importlib.import_module('rampup').__file__}", file=sys.stderr)
    configs = sorted(path.name for path in shipped().glob("*.yml"))
    found: dict[str, Any] = {"help": helps(), "names": public_names()}
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="snapshot-") as folder:
        os.chdir(folder)
        try:
            write_inputs()
            found["configs"] = defaults(configs)
            cases = [*planned(configs), *row_cases(), *timetables(), *golden(), *other_tools(configs), *on_devices()]
            for number, case in enumerate(cases):
                if sys.stderr.isatty():
                    print(f"\r{number + 1} of {len(cases)}", end="", file=sys.stderr)
                group = found.setdefault(case.group, {})
                name = shlex.join(case.words)
                group[f"{name} (again)" if name in group else name] = recorded(case)
        finally:
            os.chdir(before)
        return without_paths(found, folder)


def without_paths(found: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a record in which paths of this machine have names."""
    places = {folder: "<here>", str(shipped()): "<configs>", str(shipped().parent): "<root>"}
    places |= {sysconfig.get_path("stdlib"): "<python>", sys.prefix: "<prefix>", str(Path.home()): "<home>"}
    text = json.dumps(found)
    for path, name in sorted(places.items(), key=lambda place: -len(place[0])):
        if len(path) > 2:
            text = text.replace(json.dumps(os.path.realpath(path))[1:-1], name).replace(json.dumps(path)[1:-1], name)
    result: dict[str, Any] = json.loads(text)
    return result


def write(found: dict[str, Any], path: Path) -> None:
    """Write a record, the same bytes for the same record."""
    text = json.dumps(found, indent=0, sort_keys=True)
    path.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def read(path: Path) -> dict[str, Any]:
    """Read a record."""
    result: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return result


def differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path of each difference with both values; lists of lines are compared whole."""
    if old == new and type(old) is type(new):
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path} > {key}")
    elif isinstance(old, list) and isinstance(new, list) and not lines_of(old, new):
        for number, (one, other) in enumerate(itertools.zip_longest(old, new, fillvalue=ABSENT)):
            yield from differences(one, other, f"{path} > {number}")
    else:
        yield path, old, new


def lines_of(*values: Any) -> bool:
    """Say whether all values are lists of text."""
    return all(isinstance(value, list) and all(isinstance(part, str) for part in value) for value in values)


def shown(old: Any, new: Any) -> list[str]:
    """Return a difference as lines: of a text only what changed."""
    if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        old, new = old.splitlines(), new.splitlines()
    if lines_of(old, new):
        return [f"    {line}" for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:3] not in ("---", "+++")]
    return [f"    {sign} {short(value)}" for sign, value in (("-", old), ("+", new))]


def short(value: Any) -> str:
    """Return a value as JSON, cut off where it is long."""
    text = value if value is ABSENT else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ... ({len(text):,} characters)"


def explanation(path: str) -> str | None:
    """Return the pattern that explains a difference, if there is one."""
    return next((pattern for pattern in EXPLAINED if re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), path)), None)


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print every difference by command, wording last; return the exit code. What is only new needs no explanation."""
    unexplained, used, counts = 0, set(), {}
    groups = sorted(old.keys() | new.keys(), key=lambda group: (group in WORDING, group))
    for group in groups:
        found = list(differences(old.get(group, ABSENT), new.get(group, ABSENT), group))
        if found:
            print(f"== {group}{' (wording)' if group in WORDING else ''}: {len(found)} differences")
        for path, one, other in found:
            pattern = explanation(path)
            used.add(pattern)
            reason = EXPLAINED[pattern] if pattern else "added since" if one is ABSENT else None
            print("\n".join([f"  {path}" + (f"  [explained: {reason}]" if reason else ""), *shown(one, other)]))
            unexplained += reason is None and group not in WORDING
        counts[group] = len(found)
    for pattern in EXPLAINED.keys() - used:
        print(f"explains nothing: {pattern}")
    calls = sum(len(group) for group in old.values())
    changed = ", ".join(f"{group} {count}" for group, count in counts.items() if count)
    print(f"{calls:,} entries; differences: {changed or 'none'}; unexplained: {unexplained}")
    return 1 if unexplained else 0


def main() -> int:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("output", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path, nargs="?")
    args = parser.parse_args()
    if args.command == "record":
        write(record(), args.output.absolute())
        return 0
    old = read(args.old)
    return compare(old, json.loads(json.dumps(record())) if args.new is None else read(args.new))


if __name__ == "__main__":
    sys.exit(main())

"""MaxText's reinforcement learning (rl.yml, on Tunix): every size is in prompts of the whole job, also the micro batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located
from rampup.dialects.maxtext.keys import read_chain, rename
from rampup.dialects.maxtext_rl.explain import advice, flow, meanings
from rampup.dialects.maxtext_rl.job import ALIASES, ENTRIES, OLD, ROLLOUT, TRAIN, RlFile
from rampup.dialects.maxtext_rl.rules import RULES
from rampup.dialects.nearest import find_violations
from rampup.dialects.reading import Settings, settings_from
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError


def check(path: str | Path, overrides: Sequence[str] = ()) -> Verdict:
    """Return what an rl.yml really does.

    Args:
        path: the file; keys may stand flat or in their `rl`, `dataset` and `cluster` sections.
        overrides: `key=value` settings of known keys; `num_prompts=N` says how many prompts the data set has after its filter,
            `num_devices=N` how many devices run it.

    Raises:
        ConfigError: the file cannot be read as MaxText's.
    """
    settings = _with_old_key(_read(path, overrides))
    file = RlFile(values=settings.values)
    violations = find_violations(RULES, settings.values, lambda values: RlFile(values=values))
    explained = not any(violation.found_by == "validator" for violation in violations)
    return Verdict(
        system="maxtext_rl",
        violations=violations,
        outcome="drops" if explained and file.dropped_prompts else "runs",
        notes=tuple(_notes(file, settings, explained)),
        derived=_derived(file) if explained else {},
        meanings=meanings(file, settings) if explained else (),
        flow=flow(file) if explained else (),
        advice=advice(file) if explained else (),
    )


def _read(path: str | Path, overrides: Sequence[str]) -> Settings:
    located: dict[str, Located] = {}
    for name, value in read_chain(path).items():
        canonical = ALIASES.get(name, name)
        if canonical in located and located[canonical].value != value.value:
            raise ConfigError(
                f"{canonical} is given twice, as {located[canonical].value!r} and as {value.value!r} ({name}); leave one out",
                key=canonical,
                path=value.path,
                line=value.line,
            )
        located[canonical] = value
    renamed = [rename(setting, ALIASES) for setting in overrides]
    return settings_from(located, renamed, ENTRIES, system="MaxText RL", path=str(path))


def _with_old_key(settings: Settings) -> Settings:
    """Let the older micro_batch_size stand for the two keys that it was split into, where they are not set."""
    if settings[OLD] is None:
        return settings
    taken = {key: settings[OLD] for key in (TRAIN, ROLLOUT) if key not in settings.given}
    return dataclasses.replace(settings, values={**settings.values, **taken}, given=settings.given | set(taken))


def _derived(file: RlFile) -> dict[str, Any]:
    devices = (
        {}
        if file["num_devices"] is None
        else {"trainer_devices": file.trainer_devices, "sampler_devices": file.sampler_devices}
    )
    return {
        "samples_per_step": file.batch * file.generations,
        "mini_batches": 1,
        "mini_batch_samples": file.batch * file.generations,
        "optimizer_steps": file["rl.num_iterations"],
        "accumulation_steps": file.batch // file.train_micro,
        "microbatch_samples": [file.train_micro * file.generations],
        "generation_calls": file.batch // file.rollout_micro,
        "samples_per_generation_call": file.rollout_micro * file.generations,
        "num_batches": file.full_batches,
        "prompts_used": file.prompts,
        "dropped_prompts": file.dropped_prompts,
        "weight_syncs": file.full_batches,
        "scheduled_optimizer_steps": file.scheduled_steps,
        "total_optimizer_steps": file.full_batches * file["rl.num_iterations"],
        "eval_prompts": file.eval_prompts,
        **devices,
    }


def _notes(file: RlFile, settings: Settings, explained: bool) -> list[str]:
    notes = []
    if settings[OLD] is not None:
        notes.append(
            f"{OLD}={settings[OLD]} is the older name of {TRAIN} and {ROLLOUT}; "
            + (f"it is read as {TRAIN}={settings[TRAIN]}, {ROLLOUT}={settings[ROLLOUT]}; newer versions do not know it")
        )
    if not explained:
        return notes
    if settings["num_prompts"] is None:
        notes.append(f"the data set is taken to have {file.asked_prompts:,} prompts or more; say with num_prompts=N")
    elif file.prompts < file.asked_prompts:
        notes.append(f"the data set has {file.prompts:,} prompts where the keys ask for {file.asked_prompts:,}")
    total = file.full_batches * settings["rl.num_iterations"]
    if total != file.scheduled_steps:
        notes.append(
            f"the learning-rate schedule is told of {file.scheduled_steps:,} optimizer steps, and {total:,} happen: it never "
            "reaches its end"
        )
    if file.dropped_prompts:
        notes.append(
            f"{file.dropped_prompts:,} of {file.prompts * settings['num_epoch']:,} prompts fill no batch of {file.batch:,} "
            "and are dropped"
        )
    if settings["rl.use_agentic_rollout"]:
        notes.append(f"the agentic learner generates for one prompt at a time, whatever {ROLLOUT} says")
    return [*notes, *_replication(file)]


def _replication(file: RlFile) -> list[str]:
    sequences, fsdp = file.train_micro * file.generations, file.fsdp
    if fsdp is None:
        return [f"ici_fsdp_parallelism=-1: with num_devices=N it can be said whether {sequences:,} sequences divide over it"]
    if sequences % fsdp == 0:
        return []
    return [
        f"train micro batch * num_generations = {file.train_micro:,} * {file.generations:,} = {sequences:,} sequences do not "
        f"divide over fsdp={fsdp:,}: every device silently gets all of them, and {fsdp:,} times the work is done"
    ]

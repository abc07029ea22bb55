"""trlX: its two rules, what the run then does, and the numbers that follow, with Accelerate or NeMo."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rampup.dialects.nearest import Rule
from rampup.dialects.plans import Trained, rollout_plan
from rampup.dialects.reading import read_settings
from rampup.dialects.rules import divisors, multiples, positive, violations, where_usable
from rampup.dialects.trlx import explain as words
from rampup.dialects.trlx.job import (
    CHUNK,
    ENTRIES,
    INNER,
    MAX_LISTED,
    MICRO,
    NEMO_INSIDE,
    NEMO_KEYS,
    ROLLOUTS,
    TRAIN,
    TrlxJob,
)
from rampup.dialects.verdict import Run, Verdict, in_words
from rampup.rl.plan import RolloutPlan


def check(path: str | Path, overrides: Sequence[str]) -> Verdict:
    """Say what a trlX configuration does, and whether its own check and its run take it.

    Args:
        path: a YAML file in trlX's keys, nested or dotted.
        overrides: `key=value` settings that win over the file; `num_processes=N` and `num_prompts=N` state what no file says,
            `trainer.devices=8 model.tensor_model_parallel_size=2` what NeMo's own file says.

    Raises:
        ConfigError: unreadable, mistyped, or no file of trlX.
    """
    settings = read_settings(path, overrides, ENTRIES, system="trlX")
    job = TrlxJob(settings)
    found = violations(RULES, settings, TrlxJob)
    if not job.usable:
        return Verdict(system="trlx", violations=found)
    return Verdict(
        system="trlx",
        violations=found,
        outcome=_outcome(job),
        derived=_derived(job),
        plan=None if found or not job.ppo or job.planned_steps < 1 else _plan(job),
        **in_words(job, words),
    )


def _plan(job: TrlxJob) -> RolloutPlan | None:
    sizes = Trained(
        mini_batch=job.batch * job.replicas, micro=job.micro, data_parallel_size=job.replicas, num_epochs=job[INNER]
    )
    samples = job.collected * job.replicas
    return rollout_plan(samples, "samples", samples_per_prompt=1, policy=sizes, pad=job.last_batch < job.batch)


def _outcome(job: TrlxJob) -> Run:
    """NeMo's loaders drop what does not fill a chunk; Accelerate's keep everything."""
    num_prompts = job["num_prompts"]
    if not (job.nemo and job.ppo) or num_prompts is None:
        return "runs"
    return "drops" if num_prompts % job.replicas or num_prompts // job.replicas % job.chunk else "runs"


def _derived(job: TrlxJob) -> dict[str, Any]:
    derived: dict[str, Any] = {
        "data_parallel_size": job.replicas,
        "micro_batch_samples_per_process": job.micro,
        "accumulation_steps": job.passes,
        "mini_batch_samples": job.batch * job.replicas,
    }
    if not job.ppo:
        return derived
    derived |= {
        "rollouts_per_process": job.collected,
        "samples_per_step": job.collected * job.replicas,
        "num_chunks": job.num_chunks,
        "mini_batches": job.mini_batches,
        "optimizer_steps": job.mini_batches * job[INNER],
        "total_optimizer_steps": job.planned_steps,
        "eval_prompts": _eval_prompts(job),
    }
    if job.num_chunks <= MAX_LISTED:
        derived["chunks"] = job.chunk_sizes()
    if job.passes <= MAX_LISTED:
        whole, rest = divmod(job.last_batch, job.micro)
        derived["last_mini_batch_microbatches"] = [job.micro] * whole + ([rest] if rest else [])
    if job.nemo:
        derived |= {"chunk_size": job.chunk, "train_samples": job.train_samples, "max_steps": job.planned_steps}
    return derived


def _eval_prompts(job: TrlxJob) -> int:
    """Without evaluation prompts of its own, trlX takes a global batch of the training prompts."""
    wanted = job.batch * job.replicas
    return wanted if job["num_prompts"] is None else min(wanted, job["num_prompts"])


def _collects(job: TrlxJob) -> bool:
    return job.ppo


def _nemo(job: TrlxJob) -> bool:
    return job.nemo


_CHECK: list[Rule[TrlxJob]] = [
    Rule(
        name="trlx.micro_divides_batch",
        keys=(MICRO, TRAIN),
        holds=lambda job: job.nemo or job.batch % job.micro == 0,
        message=lambda job: f"{TRAIN}={job.batch:,} must be a multiple of {MICRO}={job.micro:,}",
        candidates=lambda job: divisors(job.batch, near=job.micro),
    ),
    Rule(
        name="trlx.nemo_micro_divides_batch",
        keys=(MICRO, TRAIN),
        holds=lambda job: not job.nemo or job.batch % job.micro == 0,
        message=lambda job: (
            f"{TRAIN}={job.batch:,} must be a multiple of {MICRO}={job.micro:,}: Megatron splits the global batch "
            f"{job.batch * job.replicas:,} into micro batches on {job.replicas:,} replicas"
        ),
        candidates=lambda job: divisors(job.batch, near=job.micro),
        found_by="run",
    ),
    Rule(
        name="trlx.total_steps_reached",
        keys=("train.total_steps",),
        holds=lambda job: (
            job["train.total_steps"] >= 1 or (job["train.total_steps"] == 0 and 0 < _first_passes(job) < job.passes)
        ),
        message=lambda job: (
            f"train.total_steps={job['train.total_steps']:,} must be at least 1: the first optimizer step is already beyond "
            "it, and trlX stops in the middle of it"
        ),
        candidates=lambda job: [1],
        found_by="run",
    ),
    Rule(
        name="trlx.epochs_train",
        keys=("train.epochs",),
        holds=lambda job: job["train.epochs"] >= 1,
        message=lambda job: f"train.epochs={job['train.epochs']:,} must be at least 1: nothing would be trained",
        candidates=lambda job: [1],
        found_by="run",
    ),
    Rule(
        name="trlx.nemo_prompts_fill_a_chunk",
        keys=("num_prompts", CHUNK),
        holds=lambda job: (
            not (job.nemo and job.ppo) or job["num_prompts"] is None or job["num_prompts"] // job.replicas >= job.chunk
        ),
        message=lambda job: (
            f"each of {job.replicas:,} replicas has {job['num_prompts'] // job.replicas:,} of the {job['num_prompts']:,} "
            f"prompts, fewer than a chunk of {job.chunk:,}; incomplete chunks are dropped, so the run waits for prompts "
            "for ever"
        ),
        candidates=lambda job: multiples(job["num_prompts"], job.replicas * job.chunk),
        found_by="run",
    ),
]


def _first_passes(job: TrlxJob) -> int:
    """Passes of the first optimizer step; it is short where fewer samples than a batch are collected."""
    return -(-min(job.batch, job.collected) // job.micro) if job.ppo else job.passes


_FIRST: list[Rule[TrlxJob]] = [
    positive("trlx", TRAIN, found_by="validator", why="the trainer divides by it"),
    *[
        positive("trlx", key, found_by="run", why="nothing would be collected or trained", applies=_collects)
        for key in (ROLLOUTS, CHUNK, INNER)
    ],
    *[positive("trlx", key, found_by="run", why="there would be nothing to train") for key in ("num_processes", "num_prompts")],
    *[
        positive("trlx", key, found_by="validator", why="the trainer divides by it")
        for key in (*NEMO_KEYS.values(), *NEMO_INSIDE.values())
    ],
    Rule(
        name="trlx.micro_not_negative",
        keys=(MICRO,),
        holds=lambda job: job.micro_given >= 0,
        message=lambda job: f"{MICRO}={job.micro_given:,} must not be negative: no pass would be made",
        candidates=lambda job: [0],
        found_by="run",
    ),
    positive("trlx", MICRO, found_by="run", why="with NeMo 0 is not the same as unset", applies=_nemo),
    Rule(
        name="trlx.nemo_has_a_replica",
        keys=tuple(NEMO_KEYS[name] for name in ("devices", "num_nodes", "tensor", "pipeline")),
        holds=lambda job: not job.nemo or job.replicas >= 1,
        message=lambda job: (
            f"num_nodes * devices // (tensor * pipeline parallel size) = {job.nemo_size('num_nodes'):,} * "
            f"{job.nemo_size('devices'):,} // {job.nemo_size('tensor') * job.nemo_size('pipeline'):,} = 0 replicas, by which "
            "trlX divides"
        ),
        candidates=lambda job: multiples(
            job.nemo_size("devices"), job.nemo_size("tensor") * job.nemo_size("pipeline"), number=2
        ),
    ),
]
RULES: list[Rule[TrlxJob]] = [*_FIRST, *where_usable(_CHECK)]

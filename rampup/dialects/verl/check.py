"""veRL: what its check says, what its run then does, and the numbers that follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rampup.dialects.plans import Trained, rollout_plan
from rampup.dialects.reading import read_settings
from rampup.dialects.rules import violations
from rampup.dialects.verdict import Run, Verdict, in_words
from rampup.dialects.verl import explain as words
from rampup.dialects.verl.explain import CRITIC_BUDGET, token_budget
from rampup.dialects.verl.job import ENTRIES, VerlJob
from rampup.dialects.verl.rules import CHECK_RULES
from rampup.dialects.verl.run_rules import RUN_RULES
from rampup.rl.plan import RolloutPlan


def check(path: str | Path, overrides: Sequence[str]) -> Verdict:
    """Say what a veRL configuration does, and whether its own check and its run take it.

    Args:
        path: a YAML file in veRL's keys, nested or dotted.
        overrides: `key=value` settings that win over the file; `actor_rollout_ref.actor.strategy=megatron` states the backend,
            `verl_version=legacy` the rules until April 2026, `num_prompts=N` the size of the data set.

    Raises:
        ConfigError: unreadable, mistyped, or no file of veRL.
    """
    settings = read_settings(path, overrides, ENTRIES, system="veRL")
    job = VerlJob(settings)
    found = violations([*CHECK_RULES, *RUN_RULES], settings, VerlJob)
    if not job.usable:
        return Verdict(system="verl", violations=found)
    return Verdict(
        system="verl",
        violations=found,
        outcome=_outcome(job),
        derived=_derived(job),
        plan=None if found or job.padding or job.legacy or job.sync_step > 1 else _plan(job),
        **in_words(job, words),
    )


def _plan(job: VerlJob) -> RolloutPlan | None:
    """The plan of a step that is trained on as generated; the critic's engine fills its passes by tokens in any case."""
    actor, critic = job.role("actor"), job.role("critic") if job.has_critic else None
    tokens = token_budget(job) if job.dynamic else None
    return rollout_plan(
        job.prompts,
        "prompts",
        samples_per_prompt=job.samples_per_prompt,
        policy=Trained(
            mini_batch=actor.mini,
            micro=job.micro,
            tokens=tokens,
            data_parallel_size=actor.data_parallel_size,
            num_epochs=actor.epochs,
        ),
        critic=None
        if critic is None
        else Trained(
            mini_batch=critic.mini,
            micro=None,
            tokens=CRITIC_BUDGET,
            data_parallel_size=critic.data_parallel_size,
            num_epochs=critic.epochs,
        ),
    )


def _outcome(job: VerlJob) -> Run:
    if job.padding:
        return "pads"
    return "drops" if job["num_prompts"] is not None and job["num_prompts"] % job.prompts else "runs"


def _derived(job: VerlJob) -> dict[str, Any]:
    actor = job.role("actor")
    mini_batches = job.mini_batches("actor")
    derived: dict[str, Any] = {
        "data_parallel_size": actor.data_parallel_size,
        "samples_per_step": job.samples,
        "mini_batches": mini_batches,
        "optimizer_steps": mini_batches * actor.epochs,
        "mini_batch_samples": actor.per_replica * actor.data_parallel_size if job.legacy else actor.mini_samples,
        "padded_samples": job.padding,
    }
    if job.micro:
        derived["accumulation_steps"] = actor.per_replica // job.micro
    if job.has_critic:
        critic = job.role("critic")
        derived["critic_mini_batches"] = job.mini_batches("critic")
        derived["critic_optimizer_steps"] = derived["critic_mini_batches"] * critic.epochs
        derived["critic_mini_batch_samples"] = critic.mini_samples
    if job["num_prompts"] is not None:
        steps = job["num_prompts"] // job.prompts * job["trainer.total_epochs"]
        derived["training_steps"] = steps
        derived["total_optimizer_steps"] = steps * derived["optimizer_steps"]
    return derived

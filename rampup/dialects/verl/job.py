"""The numbers that follow from a veRL file (replicas, padding, mini batches), and what they mean in words.

Sources: veRL `trainer/ppo`, `workers/engine_workers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rampup.dialects import verl as keys
from rampup.dialects.reading import Settings
from rampup.dialects.rollout import RolloutJob, TrainedModel, batch_meanings, dropped_prompts
from rampup.dialects.rollout import flow as step_flow
from rampup.dialects.verdict import Advice, counted
from rampup.dialects.verl import ACTOR, BUDGET, LOG_PROB, MICRO, MINI, OLD_MICRO, RESPONSES, TRAIN
from rampup.rl.plan import RolloutPlan

PREFIXES = {"actor": ACTOR, "critic": "critic", "ref": keys.REF}
CRITIC_BUDGET = 32_768
COUNTS = (
    *(TRAIN, "data.gen_batch_size", RESPONSES, MINI, keys.BUDGET, keys.EPOCHS),
    *(keys.OLD_SEQUENCE["actor"], keys.SEQUENCE["actor"], f"{ACTOR}.veomni.ulysses_parallel_size"),
    *(f"{role}.megatron.{name}" for role in (ACTOR, keys.REF) for name in keys.MEGATRON_SIZES),
    *(keys.OLD_SEQUENCE["ref"], keys.SEQUENCE["ref"], f"{keys.REF}.veomni.ulysses_parallel_size"),
    *(*keys.ROLLOUT_SIZES, keys.WORKERS, "trainer.n_gpus_per_node", "trainer.nnodes"),
    *(f"trainer.v1.{mode}.parameter_sync_step" for mode in keys.MODES),
)
STATIC_COUNTS = (OLD_MICRO, MICRO, keys.OLD_LOG_PROB, LOG_PROB, keys.OLD_REF_LOG_PROB, keys.REF_LOG_PROB)
CRITIC_COUNTS = (
    *(keys.CRITIC_MINI, keys.OLD_CRITIC_MICRO, keys.CRITIC_MICRO, "critic.ppo_epochs"),
    *(keys.OLD_SEQUENCE["critic"], keys.SEQUENCE["critic"], "critic.veomni.ulysses_parallel_size"),
    *(f"critic.megatron.{name}" for name in keys.MEGATRON_SIZES),
)


class VerlJob(RolloutJob):
    """A veRL file's numbers, by veRL's own formulas."""

    data_epochs = "trainer.total_epochs"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.has_critic = bool(self._or("critic.enable", self["algorithm.adv_estimator"] == "gae"))
        self.has_ref: bool = self["algorithm.use_kl_in_reward"] or self[f"{ACTOR}.use_kl_loss"]
        self.models = ("actor", *(["critic"] if self.has_critic else []), *(["ref"] if self.has_ref else []))
        # Until April 2026 (legacy) sizes per replica were rounded down and remainders allowed. The newer trainer (v1) pads.
        self.legacy: bool = self["verl_version"] == "legacy"
        self.v1: bool = self["trainer.use_v1"] and not self.legacy
        self.mode: str = self["trainer.v1.trainer_mode"] if self.v1 else "sync"
        # Parts in which a step's samples are trained on before the weights are sent.
        self.sync_step: int = self[f"trainer.v1.{self.mode}.parameter_sync_step"] if self.v1 else 1

        # Passes are filled by tokens (dynamic) or by a fixed number of samples (static).
        self.dynamic: bool = self[keys.DYNAMIC]
        self.rollout_dynamic = bool(self._or(f"{keys.ROLLOUT}.log_prob_use_dynamic_bsz", self.dynamic))
        self.ref_dynamic = bool(self._or(f"{keys.REF}.log_prob_use_dynamic_bsz", self.dynamic))
        self.critic_dynamic = bool(self._or("critic.use_dynamic_bsz", self.dynamic))  # its engine uses tokens in any case
        # The default of the critic's micro size is the deprecated key.
        self.critic_micro: int | None = self[
            keys.CRITIC_MICRO if keys.CRITIC_MICRO in settings.given else keys.OLD_CRITIC_MICRO
        ]

        self.devices: int = self["trainer.n_gpus_per_node"] * self["trainer.nnodes"]
        self.strategies = dict.fromkeys(PREFIXES, self[f"{ACTOR}.strategy"])
        self.strategies["critic"] = self._or("critic.strategy", self.strategies["actor"])
        self.model_sizes = {model: self._model_size(model) for model in PREFIXES}
        self.replicas = {model: self.devices // max(size, 1) for model, size in self.model_sizes.items()}  # rounded down
        self.rollout_size = math.prod(self[key] for key in keys.ROLLOUT_SIZES)

        counts = (*COUNTS, *(() if self.dynamic else STATIC_COUNTS), *(CRITIC_COUNTS if self.has_critic else ()))
        self.usable = all(self[key] is None or self[key] >= 1 for key in counts) and all(
            self.replicas[model] >= 1 for model in self.models
        )
        if not self.usable:
            return

        self.samples_per_prompt: int = self[RESPONSES]
        # The older trainer's data loader returns gen_batch_size prompts if that is set.
        self.prompts: int = self[TRAIN] if self.v1 else self._or("data.gen_batch_size", self[TRAIN])
        # Samples of a training pass and replica; None with a token budget, or if no key that is used sets it.
        self.micro: int | None = None if self.dynamic else self[MICRO]
        if not self.dynamic and self[MICRO] is None and self[OLD_MICRO] is not None and self.legacy:
            self.micro = self[OLD_MICRO] // self.replicas["actor"]
        # The check wants the samples of a step to be a multiple of this; None if it cannot compute it.
        self.minimal_batch: int | None = self.devices
        if self.strategies["actor"] == "megatron":
            self.minimal_batch = None if self[MICRO] is None else self.replicas["actor"] * self[MICRO]
        # Tokens of a pass and replica: the budget of all devices that share a sequence.
        shares = self[f"{ACTOR}.megatron.context_parallel_size"]
        self.token_budget: int = self[keys.BUDGET] * (
            shares if self.strategies["actor"] == "megatron" else self.model_sizes["actor"]
        )

        self.trained = {name: self._trained(name) for name in self.models if name != "ref"}
        if self.micro:
            self.passes = self.policy.share // self.micro

        # The newer trainer pads each part of a step to what all mini batches and replicas need (trainer_base.py).
        self.required_multiple = math.lcm(self.policy.replicas, *(model.mini_samples for model in self.trained.values()))
        self.part_samples = self.samples // self.sync_step
        multiple = self.required_multiple if self.v1 else 1
        self.padded_part_samples = -(-self.part_samples // multiple) * multiple
        self.padded_samples = (self.padded_part_samples - self.part_samples) * self.sync_step

    def effective(self, key: str) -> Any:
        """Return the value that a key has in effect: the critic's mini batch follows the actor's."""
        return self._or(keys.CRITIC_MINI, self[MINI]) if key == keys.CRITIC_MINI else self[key]

    def _or(self, key: str, other: Any) -> Any:
        return other if self[key] is None else self[key]

    def _model_size(self, model: str) -> int:
        """Return how many devices share one sample."""
        prefix, strategy = PREFIXES[model], self.strategies[model]
        if strategy == "megatron":
            sizes = [self._or(f"{prefix}.megatron.{name}", self[f"{ACTOR}.megatron.{name}"]) for name in keys.MEGATRON_SIZES]
            return math.prod(sizes)
        if strategy == "veomni":
            key = "veomni.ulysses_parallel_size"
            return int(self._or(f"{prefix}.{key}", self[f"{ACTOR}.{key}"]))
        old = self[keys.OLD_SEQUENCE["actor"]]
        if model == "critic":
            old = 1
        elif model == "ref":
            old = self._or(keys.OLD_SEQUENCE["ref"], old)
        return int(old if old > 1 else self[keys.SEQUENCE[model]])

    def _trained(self, name: str) -> TrainedModel:
        mini, epochs, micro = self[MINI], self[keys.EPOCHS], self.micro
        tokens = self.token_budget if self.dynamic else None
        if name == "critic":
            # Its engine fills its passes by tokens in any case.
            mini, epochs = self.effective(keys.CRITIC_MINI), self._or("critic.ppo_epochs", epochs)
            micro, tokens = None, CRITIC_BUDGET
        return TrainedModel(
            name=name,
            mini_batch=mini,
            mini_samples=mini * self.samples_per_prompt,
            replicas=self.replicas[name],
            micro=micro,
            tokens=tokens,
            epochs=epochs,
        )

    def num_mini_batches(self, model: TrainedModel) -> int:
        """Return the updates of a pass over a step's samples; the old code also updates on the remainder."""
        if self.legacy:
            return -(-(self.samples // model.replicas) // max(model.share, 1))
        return self.padded_part_samples // model.mini_samples * self.sync_step

    def step_share(self, model: str = "actor") -> int:
        """Return the samples of a part of a step that one replica of a model gets."""
        return self.padded_part_samples // self.replicas[model]

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        rounded = {"mini_batch_samples": self.policy.share * self.policy.replicas} if self.legacy else {}
        return super().derived() | rounded

    def plan(self) -> RolloutPlan | None:
        """Return the plan of a step that is trained on as generated."""
        return None if self.padded_samples or self.legacy or self.sync_step > 1 else self.rollout_plan()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self["data.max_prompt_length"] + self["data.max_response_length"])


TUNING, EXPLAINED = "veRL's performance tuning guide", "veRL's explanation of its keys"


def meanings(job: VerlJob) -> Iterator[tuple[str, str]]:
    """Yield each setting of the file with its meaning."""
    actor, share = job.policy, job.step_share()
    yield from batch_meanings(job, TRAIN, RESPONSES, MINI, keys.EPOCHS)
    yield (
        f"{counted(job.devices, 'device')} / {job.model_sizes['actor']:,} that share a sample ({job.strategies['actor']})",
        f"{counted(actor.replicas, 'replica')}; each has {counted(actor.share, 'sample')} of a mini batch",
    )
    if job.dynamic:
        yield BUDGET, f"about {job.token_budget:,} tokens per replica and pass: {job.passes_text}"
    else:
        yield MICRO, f"samples per replica (not per device): {job.passes_text} per optimizer step"
        passes = (
            f"{counted(-(-share // job[LOG_PROB]), 'pass')} over {counted(share, 'sample')}" if job[LOG_PROB] else "not set"
        )
        yield LOG_PROB, f"samples per replica in log-probability passes: {passes} over {counted(share, 'sample')}"
    if job.padded_samples:
        yield "", f"{counted(job.padded_samples, 'short artificial sample')} added to each step"


def flow(job: VerlJob) -> Iterator[str]:
    """Yield the stages of a training step."""
    prepare, part, padded = [], job.part_samples, job.padded_part_samples
    if job.sync_step > 1:
        times = f"run the following stages {job.sync_step:,} times, with {counted(part, 'sample')} each"
        prepare.append(f"{times}, before the weights are sent")
    if padded > part:
        size = f"{counted(padded, 'sample')}, of which {padded - part:,} are artificial"
        prepare.append(f"pad to a multiple of {job.required_multiple:,}: {size}")
    order = "balanced by total length" if job["trainer.balance_batch"] or job.v1 else "in the order of generation"
    replicas = counted(job.policy.replicas, "replica")
    prepare.append(f"dispatch: each of {replicas} gets {counted(job.step_share(), 'sample')}, {order}")
    models = "log-probabilities of the actor" + (" and the reference" if job.has_ref else "")
    prepare.append(models + ("; values of the critic" if job.critic else ""))
    share = job.policy.share
    return step_flow(
        job,
        generated=" over the engines",
        prepare=[*prepare, "advantages, on the controller"],
        layout=[f"mini batch j on a replica is its own samples j * {share:,} to (j + 1) * {share:,} - 1"],
        last="advance the learning rate, once; send the actor's weights to the engines, once",
    )


def advice(job: VerlJob) -> Iterator[Advice]:
    """Yield the rules of the guides, each with what is true of this file."""
    yield from [
        Advice("train_batch_size equal to ppo_mini_batch_size with one epoch keeps training on-policy", EXPLAINED,
            job.updates(job.policy) == 1, f"{counted(job.updates(job.policy), 'update')} per rollout"),
        Advice("a token budget (use_dynamic_bsz) instead of a count of samples is faster if lengths vary", TUNING, job.dynamic,
            "it is on" if job.dynamic else "it is off"),
    ]  # fmt: skip
    if job.dynamic:
        yield from [
            Advice("the token budget is at least twice the longest sequence", TUNING, job[BUDGET] >= 2 * job.longest,
                f"{job[BUDGET]:,} compared with 2 * {job.longest:,}"),
            Advice("a micro batch never exceeds the token budget", EXPLAINED, None,
                "until August 2026 the budget gave only the number of parts, which are balanced by work and may exceed it"),
        ]  # fmt: skip
    elif job.micro and job[LOG_PROB]:
        yield Advice(
            "forward-only micro batches are larger than those of training; start with twice the size",
            TUNING,
            job[LOG_PROB] >= 2 * job.micro,
            f"{job[LOG_PROB]:,} compared with {job.micro:,}",
        )


def notes(job: VerlJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    yield f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples of one data-parallel replica."
    for model in job.models:
        if job.devices % job.model_sizes[model]:
            yield (
                f"{job.devices:,} devices are not a multiple of the {job.model_sizes[model]:,} that share a sample of the "
                f"{model}: veRL counts {job.replicas[model]:,} replicas, rounded down."
            )
    if job.padded_samples:
        padded = counted(job.padded_samples, "short artificial sample")
        yield (
            f"the newer trainer adds {padded} so that every mini batch is full; the "
            "loss still divides by full mini batches. trainer.use_v1=false fails instead."
        )
    if job.dynamic:
        yield "with a token budget veRL skips most of its checks of sizes and ignores micro batch sizes."
        if job.token_budget < job.longest:
            yield (
                f"{BUDGET} * devices that share a sequence = {job.token_budget:,} tokens is less than the longest sequence, "
                f"{job.longest:,}: the first such sequence stops the run."
            )
    if job.critic is not None and not job.legacy:
        yield (
            "the critic's micro sizes and token budget never reach its engine: it fills its passes by tokens, "
            f"{CRITIC_BUDGET:,} of them, regardless of {keys.CRITIC_MICRO} and critic.use_dynamic_bsz."
        )
        if job[keys.OLD_SEQUENCE["critic"]] > 1:
            old, new = keys.OLD_SEQUENCE["critic"], keys.SEQUENCE["critic"]
            yield f"{old} is read by the check alone; the critic's engine reads {new}."
        if not job.settings.given & {"critic.enable", "algorithm.adv_estimator"}:
            yield "there is a critic because algorithm.adv_estimator is gae by default."
    yield from _key_notes(job)
    yield from _data_notes(job)
    yield "the learning rate advances once per training step, not per optimizer step."


def _key_notes(job: VerlJob) -> Iterator[str]:
    deprecated = {
        keys.OLD_MICRO: MICRO,
        keys.OLD_LOG_PROB: LOG_PROB,
        keys.OLD_REF_LOG_PROB: keys.REF_LOG_PROB,
        keys.OLD_CRITIC_MICRO: keys.CRITIC_MICRO,
        keys.OLD_SEQUENCE["actor"]: keys.SEQUENCE["actor"],
        "data.val_batch_size": "nothing: validation is dispatched as a whole",
    }
    for old, new in deprecated.items():
        if old in job.settings.given and job[old] is not None:
            yield f"{old} is deprecated; use {new}."
    for name, key in keys.SHELL_NAMES.items():
        if name in job.settings.others:
            yield f"{name} is not a key of veRL but a shell variable of its examples; the key is {key}."
    if not job.settings.given & set(keys.ROLLOUT_SIZES) and job.devices % job.rollout_size:
        size = keys.ROLLOUT_SIZES[0]
        yield (
            f"the file does not size the inference engines, and {size} is {job[size]:,} by default, "
            f"which does not divide {counted(job.devices, 'device')}."
        )


def _data_notes(job: VerlJob) -> Iterator[str]:
    yield from dropped_prompts(job)
    if job["data.gen_batch_size"] is not None:
        if job.v1 and job.mode != "sync":
            yield f"trainer_mode={job.mode} sets data.gen_batch_size to 1, regardless of the file."
        elif not job.v1 and job.prompts != job[TRAIN]:
            yield f"with the older trainer a step has data.gen_batch_size={job.prompts:,} prompts, not {TRAIN}={job[TRAIN]:,}."

"""SkyRL: keys, numbers and rules, those of its check and those that only the run finds.

Batch and mini batch count prompts; micro sizes count samples of one data-parallel
replica. Sources: SkyRL `train/utils/utils.py`, `train/trainer.py`,
`distributed/dispatch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rampup.contrib.check.base_files import (
    looked_up,
    read_bases,
    start_hydra,
    type_above,
)
from rampup.contrib.check.known import load_table, load_unread
from rampup.contrib.check.launch import Launch, load_launch, program_of
from rampup.contrib.check.reading import Source
from rampup.contrib.check.rollout import (
    RolloutJob,
    batch_meanings,
    dropped_prompts,
    group_note,
    rounded_replicas,
)
from rampup.contrib.check.rules import Dialect, Ruling
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Run, Term, format_count, product
from rampup.errors import ConfigError

TRAIN = "trainer.train_batch_size"
MICRO = "trainer.micro_train_batch_size_per_gpu"
RESPONSES = "generator.n_samples_per_prompt"
STRATEGY = "trainer.strategy"
# Of 2025, when its module was `skyrl_train`, and of August 2026, when it is `skyrl`.
WORD, OLD, NEWEST = "skyrl_version", "legacy", "head"
CRITIC = "trainer.critic.model.path"
EPOCHS = "trainer.update_epochs_per_batch"
TOKENS = "trainer.max_tokens_per_microbatch"
COLOCATE = "trainer.placement.colocate_all"
COLOCATE_REF = "trainer.placement.colocate_policy_ref"
_PARTS = load_table("skyrl", "parts")
MINIS: dict[str, str] = _PARTS["minis"]
MINI, CRITIC_MINI = MINIS.values()
DEVICES: dict[str, list[str]] = _PARTS["devices"]
SEQUENCE: dict[str, str] = _PARTS["sequence"]
MEGATRON: dict[str, dict[str, str]] = _PARTS["megatron"]
ENGINES: list[str] = _PARTS["engines"]
LAUNCH = load_launch(
    "skyrl",
    # Until March 2026 SkyRL had a YAML file; its sizes are those of the dataclasses.
    bases={name: {} for name in ("ppo_base_config", "skyrl_gym_config/default")},
    unread=load_unread("skyrl"),
)
KEYS = LAUNCH.entries


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source by the version that its module's name tells, or the user, who is
    asked where the module is the new one and the keys are old. Programs beside SkyRL's
    own, such as its examples, add keys to its settings.
    """
    bases = read_bases(source, overrides, launch, start_hydra)
    reading = bases.source
    program = "" if reading.command is None else program_of(reading.command)
    reading.is_fork |= "/" in program and "skyrl" not in program
    version = OLD if "skyrl_train" in program else NEWEST
    # `skyrl` 0.1 and 0.2 translated the keys of 2025; 0.3, of July 2026, does not.
    old = [
        name
        for name in sorted(reading.written(""))
        if launch.known_keys.life(name) == (1, 1)
    ]
    if old and version == NEWEST and f"{WORD}={OLD}" not in overrides:
        reading.questions.append(
            ConfigError(
                f"SkyRL 0.3 (July 2026) refuses keys of older ones: {', '.join(old[:4])}",
                fix=f"if the run has an older SkyRL, add {WORD}={OLD}; if not, rename or"
                " leave out these keys: those of engines begin with"
                " generator.inference_engine",
                key=old[0],
                path=reading.path,
            )
        )
    return type_above(bases, looked_up(bases), {WORD: version})


class SkyRLJob(RolloutJob):
    """A SkyRL file's numbers, by SkyRL's own formulas."""

    system = "skyrl"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.version = "SkyRL of 2025 (skyrl_train)"
        if self[WORD] == NEWEST:
            self.version = "SkyRL of August 2026 (a956457)"
        self.prompts: int = self[TRAIN]
        self.samples_per_prompt: int = self[RESPONSES]
        # The number of passes depends on lengths with a token budget.
        self.tokens: int | None = self[TOKENS] if self[TOKENS] > 0 else None
        self.models = ["policy"]
        if self[CRITIC] is not None:
            self.models.append("critic")
        kl = self["trainer.algorithm.use_kl_loss"]
        if kl or self["trainer.algorithm.use_kl_in_reward"]:
            self.models.append("ref")
        self._count_replicas()
        self.usable = all(self.replicas[name] for name in self.models)
        if self.usable:
            self._count_step()

    def _count_replicas(self) -> None:
        """Count devices that share a sample, and replicas, rounded down."""
        self.devices = {
            model: math.prod(self[key] for key in keys)
            for model, keys in DEVICES.items()
        }
        self.model_sizes = {model: self._model_size(model) for model in DEVICES}
        self.replicas = {
            model: self.devices[model] // size
            for model, size in self.model_sizes.items()
        }
        self.engine_devices: int | None = None
        if self.settings.given & {*ENGINES}:
            self.engine_devices = math.prod(self[key] for key in ENGINES)

    def _model_size(self, model: str) -> int:
        """Return the devices that share one sample of a model."""
        size: int = self[SEQUENCE[model]]
        if self.has_megatron(model):
            size *= math.prod(self[key] for key in MEGATRON[model].values())
        return size

    def has_megatron(self, model: str) -> bool:
        """Return whether Megatron runs a model, which is never the critic."""
        return self[STRATEGY] == "megatron" and model in MEGATRON

    def _count_step(self) -> None:
        """Count the updates of a step and their passes, with padding."""
        for name in self.models:
            if name in MINIS:
                mini = self[MINIS[name]]
                self.train(name, mini, self.replicas[name], self[EPOCHS])
        self.micro = self[MICRO]
        # Passes per update and replica; the last may be smaller.
        if self.tokens is None:
            self.passes = -(-self.policy.padded_share // self[MICRO])
        self.padded_samples = self.policy.padding * self.num_mini_batches(self.policy)
        self.read_data(self["trainer.epochs"], self["trainer.max_training_steps"])

    @property
    def outcome(self) -> Run:
        """Mini batches are padded to the replicas; the last, incomplete step of the
        data set is dropped.
        """
        if any(model.padding for model in self.trained.values()):
            return "pads"
        return super().outcome


def _meanings(job: SkyRLJob) -> Iterator[tuple[str, str]]:
    keys, size = (TRAIN, RESPONSES, MINI, EPOCHS), job.model_sizes["policy"]
    yield from batch_meanings(job, keys, job.devices["policy"], size)
    yield MICRO, f"samples per replica: {job.passes_text} per optimizer step"
    yield (
        "trainer.micro_forward_batch_size_per_gpu",
        "samples per replica in forward-only passes (log-probabilities, values)",
    )
    prompts = job["trainer.eval_batch_size"]
    evaluated = format_count(
        prompts * job["generator.eval_n_samples_per_prompt"], "sample"
    )
    yield (
        "trainer.eval_batch_size",
        f"{evaluated} per evaluation batch; the last batch may be smaller",
    )


def _notes(job: SkyRLJob) -> Iterator[str]:
    yield (
        f"{TRAIN}, {MINI} and the critic's count prompts; micro sizes count samples of"
        " one data-parallel replica."
    )
    yield (
        "a mini batch is consecutive samples, those of a prompt next to each other;"
        " replicas take consecutive parts of it."
    )
    devices = {
        model: job.devices[model] for model in job.models if not job.has_megatron(model)
    }
    yield from rounded_replicas("SkyRL", devices, job.model_sizes)
    for trained in job.trained.values():
        if trained.padding:
            yield (
                f"{trained.name}: {trained.mini_samples:,} samples of a mini batch over"
                f" {trained.replicas:,} replicas: the run adds"
                f" {format_count(trained.padding, 'empty sample')} to each."
            )
        if (rest := trained.padded_share % job[MICRO]) and job.tokens is None:
            weight = "; the loss is weighted accordingly"
            if job["trainer.algorithm.loss_reduction"] == "token_mean_legacy":
                weight = (
                    ", which trainer.algorithm.loss_reduction=token_mean_legacy weights"
                    " wrongly"
                )
            yield (
                f"{trained.name}: the last pass of each mini batch has {rest:,} samples"
                f" instead of {job[MICRO]:,}{weight}."
            )
    if job.tokens is not None:
        yield (
            f"{TOKENS}={job.tokens:,} fills the passes by tokens; a longer sequence"
            f" still gets a pass of its own. {MICRO} is then ignored, but its rules are"
            " still enforced."
        )
    yield from dropped_prompts(job)
    if job[COLOCATE] and job.engine_devices is None:
        yield (
            f"{COLOCATE} is on and the file does not size the inference engines: engines"
            " * tensor * pipeline * data parallel size must be"
            f" {job.devices['policy']:,}, and so must every other model's devices."
        )
    yield group_note(job.samples_per_prompt)
    yield "the learning-rate schedule advances with every optimizer step."


def _rules(job: SkyRLJob) -> Iterator[Ruling]:
    """Yield what SkyRL's check and its run ask."""
    if job[STRATEGY] == "deepspeed" and job[WORD] == NEWEST:
        yield job.broken(
            "strategy",
            [STRATEGY],
            "trainer.strategy=deepspeed must be another: only SkyRL before January 2026"
            " has it",
            candidates=["fsdp"],
        )
    yield from job.unknown(
        job.keys_of("skyrl", None),
        TRAIN,
        "left out: SkyRL refuses them as invalid fields. For a fork with keys of its"
        " own, give one of them on rampup's command line as well",
    )
    for model in job.models:
        yield from _device_rules(job, model)
    if job.usable:
        for name in job.trained:
            yield from _mini_batch_rules(job, name)
        yield from _step_rules(job)
        yield from _placement_rules(job)


def _devices(job: SkyRLJob, model: str) -> Term:
    count = job.devices[model]
    return Term(f"the {model}'s {count:,} devices", count)


def _device_rules(job: SkyRLJob, model: str) -> Iterator[Ruling]:
    """Yield the rules that Megatron's sizes divide a model's devices, and that there is
    at least one replica.
    """
    per_node, size = DEVICES[model][0], job.model_sizes[model]
    devices = _devices(job, model)
    if job.has_megatron(model):
        keys = (per_node, *MEGATRON[model].values())
        sizes = {word: job[key] for word, key in MEGATRON[model].items()}
        yield job.multiple(
            f"megatron_divides_{model}_devices", keys, devices, product(sizes)
        )
        key, note = SEQUENCE[model], " with trainer.strategy=megatron"
        yield job.equal(f"megatron_{model}_sequence_parallel", [key], key, 1, note)
    else:
        yield job.at_least(
            f"{model}_has_a_replica",
            (SEQUENCE[model], per_node),
            devices,
            Term(f"the {size:,} that share a sample", size),
            ": there is no replica",
            found_by="run" if model == "ref" else "validator",
        )


def _mini_batch_rules(job: SkyRLJob, name: str) -> Iterator[Ruling]:
    """Yield the rules of the mini batch of the policy or the critic."""
    key, model = MINIS[name], job.trained[name]
    samples = product({key: job[key], RESPONSES: job.samples_per_prompt}, "samples")
    replicas = Term(f"the {model.replicas:,} replicas", model.replicas)
    share = Term(
        f"{samples.text} // {model.replicas:,} replicas = {model.share:,} samples per"
        " replica",
        model.share,
    )
    yield job.multiple(f"{name}_mini_divides_train", (TRAIN, key), TRAIN, key)
    rule = f"{name}_mini_reaches_every_replica"
    yield job.at_least(rule, (key, RESPONSES), samples, replicas)
    if model.share > 0:
        yield job.multiple(f"micro_divides_{name}_mini", (MICRO, key), share, MICRO)
    if model.share > 0 and job.prompts % job[key] == 0:
        size = job.samples // model.replicas
        text = (
            f"{job.samples:,} samples // {model.replicas:,} replicas = {size:,} samples"
        )
        keys = (TRAIN, key, RESPONSES)
        rule = f"{name}_share_divides_train_share"
        yield job.multiple(rule, keys, Term(text, size), share)


def _step_rules(job: SkyRLJob) -> Iterator[Ruling]:
    """Yield what a step asks: SkyRL's check looks at the policy and the reference, and
    every model must get full samples from the run.
    """
    keys = (TRAIN, RESPONSES)
    replicas = [job.replicas[model] for model in job.models]
    checked = [job.replicas[model] for model in job.models if model != "critic"]
    least, common = math.lcm(*checked), math.lcm(*replicas)
    yield job.at_least(
        "samples_reach_every_replica",
        keys,
        product({TRAIN: job.prompts, RESPONSES: job.samples_per_prompt}, "samples"),
        least,
        ", the least common multiple of the policy's and the reference's replicas",
    )
    stride = common // math.gcd(common, job.samples_per_prompt)
    yield job.multiple(
        "no_tail_is_cut",
        keys,
        TRAIN,
        stride,
        f", the prompts whose {job.samples_per_prompt:,} responses each fill every"
        f" replica of every model ({', '.join(f'{n:,}' for n in replicas)}); the run"
        f" keeps {job.prompts // stride * stride:,} prompts and stops in its first step,"
        " because their number is not the requested one. SkyRL's own check does not"
        " notice it",
        found_by="run",
    )
    yield from job.data_set_rule(TRAIN)


def _placement_rules(job: SkyRLJob) -> Iterator[Ruling]:
    """Yield which models and engines go together, and on which devices."""
    policy = _devices(job, "policy")
    if job[COLOCATE] and (engines := job.engine_devices) is not None:
        yield job.equal(
            "engines_fill_the_devices",
            ENGINES,
            Term(
                "the engines' devices, engines * tensor * pipeline * data parallel size"
                f" = {engines:,},",
                engines,
            ),
            policy,
            f" with {COLOCATE}",
        )
    if job[STRATEGY] == "megatron" and "critic" in job.models:
        yield job.broken(
            "megatron_has_no_critic",
            (STRATEGY, CRITIC),
            f"trainer.strategy=megatron trains no critic: {CRITIC} must be null",
            candidates=["fsdp"],
        )
    for model in job.models[1:]:
        if job[COLOCATE] and job.settings.given & set(DEVICES[model]):
            yield job.equal(
                f"colocated_{model}_devices",
                DEVICES[model],
                _devices(job, model),
                policy,
                f" with {COLOCATE}",
                found_by="run",
            )
    for own, key in zip(DEVICES["ref"], DEVICES["policy"], strict=True):
        if "ref" in job.models and job[COLOCATE_REF] and not job[COLOCATE]:
            keys, note = (own, key, COLOCATE_REF), f" with {COLOCATE_REF}"
            yield job.equal(f"colocated_{own.rpartition('.')[2]}", keys, own, key, note)


DIALECT = Dialect(
    job=SkyRLJob,
    rules=_rules,
    launch=LAUNCH,
    meanings=_meanings,
    notes=_notes,
    reader=read,
)

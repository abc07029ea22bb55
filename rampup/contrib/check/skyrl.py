"""SkyRL: keys, numbers and rules, those of its check and those that only the run finds.

Batch and mini batch count prompts; micro sizes count samples of one data-parallel
replica. Sources: SkyRL `train/utils/utils.py`, `train/trainer.py`,
`distributed/dispatch.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from rampup.config.yaml import Located
from rampup.contrib.check.known import (
    load_known_keys,
    load_unread,
    with_lines,
)
from rampup.contrib.check.reading import (
    Launch,
    Reading,
    Settings,
    Source,
    Version,
    load_entries,
    program_of,
    read_hydra,
)
from rampup.contrib.check.rollout import (
    RolloutJob,
    batch_meanings,
    dropped_prompts,
    group_note,
)
from rampup.contrib.check.rules import (
    Dialect,
    Rule,
    apply_if,
    at_least,
    equal,
    multiple,
    positive,
    table,
    usable,
)
from rampup.contrib.check.rules import (
    OldSide as Side,
)
from rampup.contrib.check.verdict import Run, Term, counted, product, rounded_down
from rampup.contrib.rl.plan import RolloutPlan

TRAIN = "trainer.train_batch_size"
MINI = "trainer.policy_mini_batch_size"
CRITIC_MINI = "trainer.critic_mini_batch_size"
MICRO = "trainer.micro_train_batch_size_per_gpu"
FORWARD = "trainer.micro_forward_batch_size_per_gpu"
RESPONSES = "generator.n_samples_per_prompt"
WORKERS = "trainer.fully_async.num_parallel_generation_workers"
LAST = "trainer.max_training_steps"
STRATEGY = "trainer.strategy"
# Of 2025, when its module was `skyrl_train`, and of August 2026, when it is `skyrl`.
WORD, OLD, NEWEST = "skyrl_version", "legacy", "head"
COLOCATE = "trainer.placement.colocate_all"
COLOCATE_REF = "trainer.placement.colocate_policy_ref"
MODELS = ("policy", "critic", "ref")
# Of each model: the keys of its devices per node and nodes; its Megatron sizes, which
# multiply to the devices that share a sample; and the devices that share a sequence.
DEVICES = {
    model: tuple(
        f"trainer.placement.{model}_num_{what}" for what in ("gpus_per_node", "nodes")
    )
    for model in MODELS
}
_SIZES = tuple(
    f"megatron_config.{name}_parallel_size"
    for name in ("tensor_model", "pipeline_model", "context")
)
_PARALLEL = ("tensor", "pipeline", "context parallel size")
MEGATRON = {
    model: tuple(f"trainer.{model}.{size}" for size in _SIZES) for model in MODELS
}
SEQUENCE = {model: f"trainer.{model}.sequence_parallel_size" for model in MODELS}
_ENGINE_SIZES = (
    "num_engines",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
)
ENGINE_KEYS = tuple(f"generator.inference_engine.{name}" for name in _ENGINE_SIZES)
OLD_ENGINE_KEYS = (
    "generator.num_inference_engines",
    *(f"generator.inference_engine_{name}" for name in _ENGINE_SIZES[1:]),
)
KEYS = load_entries("skyrl")
LAUNCH = Launch(
    system="SkyRL",
    program=re.compile(
        r"\bskyrl[\w.]*\.main\w*|\bmain_(?:base|dapo|fully_async|async)\w*|trainer\.policy_mini_batch_size="
    ),
    others=re.compile(
        r"[\w.]*main_(?:sft\w*|(?:\w+_)?gen(?:erate)?)\b|tinker|entrypoints\.serve"
    ),
    example="python -m skyrl.train.entrypoints.main_base key=value",
    entries=KEYS,
    groups=(
        "data",
        "environment",
        "hydra",
        "terminal_bench_config",
        "harbor_trial_config",
    ),
    # Until March 2026 SkyRL had a YAML file; its sizes are those of the dataclasses.
    bases={name: {} for name in ("ppo_base_config", "skyrl_gym_config/default")},
    version="August 2026",
    keys="skyrl",
    own=re.compile(
        r"(?:.*/)?(?:skyrl(?:_train)?|examples|integrations)/.+|(?:main_[^/]*)?"
    ),
    follows=f"{WORD}={NEWEST}",
    unread=load_unread("skyrl"),
)
COUNTS = (TRAIN, MINI, MICRO, FORWARD, RESPONSES)
TRAINED = (
    "trainer.update_epochs_per_batch",
    "trainer.epochs",
    "trainer.eval_batch_size",
    "num_prompts",
)
MODEL_COUNTS: dict[str, tuple[str, ...]] = {
    model: (*DEVICES[model][::-1], SEQUENCE[model]) for model in MODELS
}
MODEL_COUNTS |= {
    model: (*MODEL_COUNTS[model], *MEGATRON[model]) for model in ("policy", "ref")
}
MODEL_COUNTS["critic"] = (CRITIC_MINI, *MODEL_COUNTS["critic"])
_KNOWN = load_known_keys("skyrl")
_SECTIONS = (
    "data",
    "trainer",
    "generator",
    "environment",
)  # integrations have sections of their own


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source by the version that its module's name tells; programs beside
    SkyRL's own, such as its examples, add keys to its settings.
    """

    def choose(reading: Reading, _: Mapping[str, Located]) -> Version:
        program = "" if reading.command is None else program_of(reading.command)
        is_old = "skyrl_train" in program
        return Version(
            defaults={WORD: OLD if is_old else NEWEST},
            is_fork=reading.is_fork or ("/" in program and "skyrl" not in program),
        )

    return read_hydra(source, overrides, launch, choose)


class SkyRLJob(RolloutJob):
    """A SkyRL file's numbers, by SkyRL's own formulas."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.version = "SkyRL of 2025 (skyrl_train)"
        if self[WORD] == NEWEST:
            self.version = "SkyRL of August 2026 (a956457)"
        self.prompts: int = self[TRAIN]
        self.samples_per_prompt: int = self[RESPONSES]
        self.by_tokens: bool = (
            self["trainer.max_tokens_per_microbatch"] > 0
        )  # the number of passes then depends on lengths
        self.megatron: bool = self[STRATEGY] == "megatron"
        self.has_critic: bool = self["trainer.critic.model.path"] is not None
        self.has_ref: bool = (
            self["trainer.algorithm.use_kl_loss"]
            or self["trainer.algorithm.use_kl_in_reward"]
        )
        self.models = (
            "policy",
            *(["critic"] if self.has_critic else []),
            *(["ref"] if self.has_ref else []),
        )
        # Keys that no class of SkyRL's settings has, with their lines.
        looked_up = {
            name: at
            for name, at in settings.looked_up.items()
            if name.partition(".")[0] in _SECTIONS
        }
        self.unknown_keys = with_lines(
            {name: at for name, at in looked_up.items() if _KNOWN.life(name) is None}
        )
        # Devices that share a sample, and replicas, rounded down. The critic never has
        # Megatron's sizes.
        self.devices = {
            model: math.prod(self[key] for key in DEVICES[model]) for model in MODELS
        }
        self.model_sizes = {model: self[SEQUENCE[model]] for model in MODELS}
        if self.megatron:
            self.model_sizes |= {
                model: math.prod(self[key] for key in MEGATRON[model])
                for model in ("policy", "ref")
            }
        self.replicas = {
            model: self.devices[model] // max(self.model_sizes[model], 1)
            for model in MODELS
        }
        # Models that take part and whose devices are no multiple of their size, which
        # Megatron refuses.
        self.rounded = [
            model
            for model in self.models
            if self.devices[model] % max(self.model_sizes[model], 1)
        ]
        self.uneven = [
            model for model in self.rounded if self.megatron and model != "critic"
        ]
        counts = [
            *COUNTS,
            *(key for model in self.models for key in MODEL_COUNTS[model]),
        ]
        has_replicas = (
            all(self.replicas[model] for model in self.models) and not self.uneven
        )
        self.usable = has_replicas and all(self[key] >= 1 for key in counts)
        if not self.usable:
            return
        tokens = self["trainer.max_tokens_per_microbatch"] if self.by_tokens else None
        epochs = self["trainer.update_epochs_per_batch"]
        for name in ("policy", "critic") if self.has_critic else ("policy",):
            size = self[f"trainer.{name}_mini_batch_size"]
            self.train(
                name,
                size,
                self.replicas[name],
                micro=self[MICRO],
                tokens=tokens,
                epochs=epochs,
            )
        # Passes per update and replica; the last may be smaller. With a token budget
        # lengths decide.
        self.passes = (
            None if self.by_tokens else -(-self.policy.padded_share // self[MICRO])
        )
        self.padded_samples = self.policy.padding * self.num_mini_batches(self.policy)
        # SkyRL's check looks at the policy and the reference; every model must get full
        # samples from the run.
        self.lcm_checked = math.lcm(
            self.replicas["policy"], *([self.replicas["ref"]] if self.has_ref else [])
        )
        common = math.lcm(*(self.replicas[model] for model in self.models))
        self.prompt_stride = common // math.gcd(common, self.samples_per_prompt)
        self.max_workers: int = self.policy.mini_batch * (
            self["trainer.fully_async.max_staleness_steps"] + 1
        )
        self.engine_devices: int | None = None
        if settings.given & {*ENGINE_KEYS, *OLD_ENGINE_KEYS}:
            pairs = zip(ENGINE_KEYS, OLD_ENGINE_KEYS, strict=True)
            self.engine_devices = math.prod(
                self[new] if self[old] is None else self[old] for new, old in pairs
            )
        self.read_data(self["trainer.epochs"], most=self[LAST])

    @property
    def outcome(self) -> Run:
        """Mini batches are padded to the replicas; the last, incomplete step of the
        data set is dropped.
        """
        return (
            "pads"
            if any(model.padding for model in self.trained.values())
            else super().outcome
        )

    def plan(self) -> RolloutPlan:
        """Return the plan of one training step."""
        return self.rollout_plan(pad=self.outcome == "pads")


def _meanings(job: SkyRLJob) -> Iterator[tuple[str, str]]:
    policy, padding = job.policy, job.policy.padding
    yield from batch_meanings(
        job, TRAIN, RESPONSES, MINI, "trainer.update_epochs_per_batch"
    )
    empty = f" ({padding:,} of the mini batch are empty)" if padding else ""
    share = f"each has {counted(policy.padded_share, 'sample')} of a mini batch{empty}"
    devices = (
        f"{counted(job.devices['policy'], 'policy device')} /"
        f" {job.model_sizes['policy']:,} that share a sample"
    )
    yield devices, f"{counted(policy.replicas, 'replica')}; {share}"
    yield MICRO, f"samples per replica: {job.passes_text} per optimizer step"
    yield (
        FORWARD,
        "samples per replica in forward-only passes (log-probabilities, values)",
    )
    evaluated = (
        job["trainer.eval_batch_size"] * job["generator.eval_n_samples_per_prompt"]
    )
    yield (
        "trainer.eval_batch_size",
        (
            f"{counted(evaluated, 'sample')} per evaluation batch; the last batch may"
            " be smaller"
        ),
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
    for model in job.rounded:
        devices = f"the {model}'s {job.devices[model]:,} devices"
        yield (
            f"{rounded_down(devices, job.model_sizes[model], 'SkyRL', job.replicas[model])},"
            " without a warning."
        )
    for trained in job.trained.values():
        if trained.padding:
            added = f"the run adds {counted(trained.padding, 'empty sample')} to each"
            size = (
                f"{trained.mini_samples:,} samples of a mini batch over"
                f" {trained.replicas:,} replicas"
            )
            yield f"{trained.name}: {size}: {added}."
        if (rest := trained.padded_share % job[MICRO]) and not job.by_tokens:
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
    if job.by_tokens:
        budget = (
            f"trainer.max_tokens_per_microbatch={job['trainer.max_tokens_per_microbatch']:,}"
            " fills the passes by tokens"
        )
        ignored = f"{MICRO} is then ignored, but its rules are still enforced"
        yield f"{budget}; a longer sequence still gets a pass of its own. {ignored}."
    yield from dropped_prompts(job)
    if job[COLOCATE] and job.engine_devices is None:
        sizes = (
            "engines * tensor * pipeline * data parallel size must be"
            f" {job.devices['policy']:,}"
        )
        unsized = f"{COLOCATE} is on and the file does not size the inference engines"
        yield f"{unsized}: {sizes}, and so must every other model's devices."
    if job[STRATEGY] == "fsdp2":
        yield "trainer.strategy=fsdp2 is an old name of fsdp."
    if old := [name for name in job.settings.looked_up if _KNOWN.life(name) == (1, 1)]:
        yield (
            f"{', '.join(old[:4])}: SkyRL had these keys until 2026; that of August"
            " 2026 refuses them."
        )
    yield group_note(job.samples_per_prompt)
    yield "the learning-rate schedule advances with every optimizer step."


def _devices(model: str) -> Side[SkyRLJob]:
    return f"the {model}'s {{:,}} devices", lambda job: job.devices[model]


def _device_rules(model: str) -> list[Rule[SkyRLJob]]:
    """Return the rules that Megatron's sizes divide a model's devices, and that there
    is at least one replica.
    """
    per_node = DEVICES[model][0]
    has_a_replica = at_least(
        f"skyrl.{model}_has_a_replica",
        (SEQUENCE[model], per_node),
        _devices(model),
        ("the {:,} that share a sample", lambda job: job.model_sizes[model]),
        when=lambda job: model in job.models and model not in job.uneven,
        note=": there is no replica",
        found_by="run" if model == "ref" else "validator",
    )
    if model == "critic":
        return [has_a_replica]
    return [
        multiple(
            f"skyrl.megatron_divides_{model}_devices",
            (per_node, *MEGATRON[model]),
            _devices(model),
            lambda job: product(
                dict(zip(_PARALLEL, map(job.__getitem__, MEGATRON[model]), strict=True))
            ),
            when=lambda job: job.megatron and model in job.models,
        ),
        has_a_replica,
    ]


def _mini_batch_rules(name: str) -> list[Rule[SkyRLJob]]:
    """Return the rules of the mini batch of the policy or the critic. Each applies if
    those before it hold.
    """
    key = f"trainer.{name}_mini_batch_size"

    def samples(job: SkyRLJob) -> Term:
        return product({key: job[key], RESPONSES: job.samples_per_prompt}, "samples")

    def share(job: SkyRLJob) -> Term:
        size, replicas = job.trained[name].share, job.trained[name].replicas
        return Term(
            f"{samples(job).text} // {replicas:,} replicas = {size:,} samples per"
            " replica",
            size,
        )

    def step_share(job: SkyRLJob) -> Term:
        size = job.samples // job.trained[name].replicas
        return Term(
            f"{job.samples:,} samples // {job.trained[name].replicas:,} replicas ="
            f" {size:,} samples",
            size,
        )

    return apply_if(
        lambda job: name in job.trained,
        [
            at_least(
                f"skyrl.{name}_mini_at_most_train",
                (key, TRAIN),
                TRAIN,
                key,
                note="; both count prompts",
            ),
            multiple(
                f"skyrl.{name}_mini_divides_train",
                (TRAIN, key),
                TRAIN,
                key,
                when=lambda job: job.prompts >= job[key],
            ),
            at_least(
                f"skyrl.{name}_mini_reaches_every_replica",
                (key, RESPONSES),
                samples,
                ("the {:,} replicas", lambda job: job.trained[name].replicas),
            ),
            multiple(
                f"skyrl.micro_divides_{name}_mini",
                (MICRO, key),
                share,
                MICRO,
                when=lambda job: job.trained[name].share > 0,
            ),
            multiple(
                f"skyrl.{name}_share_divides_train_share",
                (TRAIN, key, RESPONSES),
                step_share,
                share,
                when=lambda job: (
                    job.trained[name].share > 0 and job.prompts % job[key] == 0
                ),
            ),
        ],
    )


def _colocated(model: str) -> Rule[SkyRLJob]:
    """Return the rule that models on shared devices have equally many; it applies only
    if the file says how many.
    """
    return equal(
        f"skyrl.colocated_{model}_devices",
        DEVICES[model],
        _devices(model),
        _devices("policy"),
        when=lambda job: (
            model in job.models
            and job[COLOCATE]
            and bool(job.settings.given & set(DEVICES[model]))
        ),
        note=" with trainer.placement.colocate_all",
        found_by="run",
    )


def _shares_devices(key: str) -> Rule[SkyRLJob]:
    """Return the rule that a policy and a reference on the same devices have equally
    many nodes, and devices per node.
    """
    own = key.replace("policy_", "ref_")
    return equal(
        f"skyrl.colocated_{own.rpartition('.')[2]}",
        (own, key, COLOCATE_REF),
        own,
        key,
        when=lambda job: job.has_ref and not job[COLOCATE] and job[COLOCATE_REF],
        note=f" with {COLOCATE_REF}",
    )


RULES: list[Rule[SkyRLJob]] = [
    Rule(
        name="skyrl.strategy",
        keys=(STRATEGY,),
        holds=lambda job: job[STRATEGY] != "deepspeed" or job[WORD] == OLD,
        message=lambda job: (
            "trainer.strategy=deepspeed must be another: only SkyRL before January 2026 has it"
        ),
        candidates=lambda job: ["fsdp"],
    ),
    Rule(
        name="skyrl.known_keys",
        keys=(TRAIN,),
        holds=lambda job: not job.unknown_keys,
        message=lambda job: (
            f"{', '.join(job.unknown_keys[:4])} must be left out: SkyRL refuses them as invalid fields. For "
            "a fork with keys of its own, give one of them on rampup's command line as well"
        ),
        candidates=lambda job: None,
    ),
    *positive(
        "skyrl",
        [*COUNTS, *MODEL_COUNTS["policy"]],
        "SkyRL's check divides by it or compares it with 0",
    ),
    *positive(
        "skyrl",
        MODEL_COUNTS["critic"],
        "the critic needs it",
        when=lambda job: job.has_critic,
    ),
    *positive(
        "skyrl",
        MODEL_COUNTS["ref"],
        "the reference model needs it",
        when=lambda job: job.has_ref,
        found_by="run",
    ),
    *positive(
        "skyrl", TRAINED, "nothing would be trained or evaluated", found_by="run"
    ),
    *[rule for model in MODELS for rule in _device_rules(model)],
    *apply_if(
        usable,
        [
            *_mini_batch_rules("policy"),
            *_mini_batch_rules("critic"),
            at_least(
                "skyrl.samples_reach_every_replica",
                (TRAIN, RESPONSES),
                lambda job: product(
                    {TRAIN: job.prompts, RESPONSES: job.samples_per_prompt}, "samples"
                ),
                ("{:,}", lambda job: job.lcm_checked),
                note=", the least common multiple of the policy's and the reference's replicas",
            ),
            multiple(
                "skyrl.no_tail_is_cut",
                (TRAIN, RESPONSES),
                TRAIN,
                ("{:,}", lambda job: job.prompt_stride),
                note=lambda job: (
                    f", the prompts whose {job.samples_per_prompt:,} responses each fill every replica of every model "
                    f"({', '.join(f'{job.replicas[model]:,}' for model in job.models)}); the run keeps "
                    f"{job.prompts // job.prompt_stride * job.prompt_stride:,} prompts and stops in its first step, because their "
                    "number is not the requested one. SkyRL's own check does not notice it"
                ),
                found_by="run",
            ),
            equal(
                "skyrl.engines_fill_the_devices",
                ENGINE_KEYS,
                lambda job: Term(
                    f"the engines' devices, engines * tensor * pipeline * data parallel size = {job.engine_devices:,},",
                    job.engine_devices or 0,
                ),
                _devices("policy"),
                when=lambda job: job[COLOCATE] and job.engine_devices is not None,
                note=" with trainer.placement.colocate_all",
            ),
            at_least(
                "skyrl.data_set_fills_a_step",
                ("num_prompts", TRAIN),
                ("a data set of {:,} prompts", lambda job: job["num_prompts"]),
                TRAIN,
                when=lambda job: job["num_prompts"] is not None,
            ),
            equal(
                "skyrl.async_step_is_one_mini_batch",
                (TRAIN, MINI),
                TRAIN,
                MINI,
                when=lambda job: job["trainer.fully_async.enabled"],
                note=" in fully asynchronous training",
            ),
            Rule(
                name="skyrl.async_workers",
                keys=(WORKERS, "trainer.fully_async.max_staleness_steps"),
                when=lambda job: job["trainer.fully_async.enabled"],
                holds=lambda job: (
                    job.policy.mini_batch <= job[WORKERS] <= job.max_workers
                ),
                message=lambda job: (
                    f"{WORKERS}={job[WORKERS]:,} must be between {MINI}={job.policy.mini_batch:,} and that times "
                    f"(max_staleness_steps + 1) = {job.max_workers:,}"
                ),
                division=lambda job: (job.max_workers, job.policy.mini_batch),
            ),
            Rule(
                name="skyrl.megatron_has_no_critic",
                keys=(STRATEGY, "trainer.critic.model.path"),
                holds=lambda job: not (job.megatron and job.has_critic),
                message=lambda job: (
                    "trainer.strategy=megatron trains no critic: trainer.critic.model.path must be null"
                ),
                candidates=lambda job: ["fsdp"],
            ),
            *[
                equal(
                    f"skyrl.megatron_{model}_sequence_parallel",
                    (SEQUENCE[model],),
                    SEQUENCE[model],
                    1,
                    when=lambda job: job.megatron,
                    note=" with trainer.strategy=megatron",
                )
                for model in ("policy", "ref")
            ],
            *map(_colocated, ("critic", "ref")),
            *map(_shares_devices, DEVICES["policy"]),
        ],
    ),
]
DIALECT = Dialect(
    job=SkyRLJob,
    rules=table(RULES),
    launch=LAUNCH,
    meanings=_meanings,
    notes=_notes,
    reader=read,
)

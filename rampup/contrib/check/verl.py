"""veRL: its generations, its keys, its numbers by its own formulas, its words, and its
rules.

Batch and mini batch count prompts; sizes per gpu count samples of one data-parallel
replica. Sources: veRL `trainer/ppo`, `workers/engine_workers.py`, and until 0.7
`workers/fsdp_workers.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.base_files import (
    BaseFiles,
    find_in_repository,
    looked_up,
    read_bases,
    start_hydra,
    type_above,
)
from rampup.contrib.check.known import load_table, load_unread, with_lines
from rampup.contrib.check.launch import Launch, Reading, load_launch
from rampup.contrib.check.reading import Source
from rampup.contrib.check.rollout import (
    RolloutJob,
    TrainedModel,
    batch_meanings,
    dropped_prompts,
    group_note,
    rounded_replicas,
)
from rampup.contrib.check.rules import Dialect, Ruling, broken_names, found_by_run
from rampup.contrib.check.settings import Settings
from rampup.contrib.check.verdict import Term, format_count, product
from rampup.errors import ConfigError

TRAIN = "data.train_batch_size"
GEN = "data.gen_batch_size"
RESPONSES = "actor_rollout_ref.rollout.n"
EPOCHS = "actor_rollout_ref.actor.ppo_epochs"
WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
ESTIMATOR = "algorithm.adv_estimator"
FILTER = "algorithm.filter_groups.enable"
LOSS = "actor_rollout_ref.actor.loss_agg_mode"
SUM = "token-sum"
DEVICES = "trainer.n_gpus_per_node"
ROLLOUT_DEVICES = "rollout.n_gpus_per_node"
ROLLOUT_NODES = "rollout.nnodes"
FSDP_SIZE = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
WORD = "verl_version"
# The keys that each model and each kind of passes has, by its name.
_PARTS: dict[str, dict[str, str]] = load_table("verl", "parts")
MINIS = _PARTS["minis"]
MODEL = _PARTS["models"]
MICROS = _PARTS["micros"]
OLD_MICROS = _PARTS["old_micros"]
DYNAMICS = _PARTS["dynamics"]
BUDGETS = _PARTS["budgets"]
STRATEGIES = _PARTS["strategies"]
SEQUENCE = _PARTS["sequence"]
OLD_SEQUENCE = _PARTS["old_sequence"]
PACKING = _PARTS["packing"]
MINI, CRITIC_MINI = MINIS.values()
MICRO, DYNAMIC, BUDGET = MICROS["actor"], DYNAMICS["actor"], BUDGETS["actor"]
_NAMES = load_table("verl", "names")
MEGATRON: dict[str, list[str]] = _NAMES["megatron"]
ROLLOUT_SIZES: list[str] = _NAMES["rollout_sizes"]
# Tokens of the critic's passes since 0.8, whatever the file says.
CRITIC_BUDGET = 32_768


class Generation(NamedTuple):
    """What a version of veRL does otherwise than that of August 2026."""

    number: int  # of the version in the table of keys, where 0.1 is 1
    title: str  # the version, for the report
    defaults: Mapping[str, Any] = {}
    # Workers that divide the whole job's micro sizes, and whose last mini batch and
    # pass may be smaller.
    old_workers: bool = False
    # Only FSDP is covered; each sample is trained on once, the critic's mini batch
    # counts samples, and there is always a reference policy.
    early: bool = False


# The newest, and those of which most public scripts are.
GENERATIONS = {
    name: Generation(**row) for name, row in load_table("verl", "versions").items()
}
NEWEST = 9
LAUNCH = load_launch(
    "verl", bases=load_table("verl", "bases"), unread=load_unread("verl")
)
_NUMBER = re.compile(r"v?0\.(\d+)")
_MANY = 50  # a file with so many keys is a base file of its version
_LAST_OF_OLD_WORKERS = 7
# The versions that a source may be for, the likeliest first, and why.
_Evidence = tuple[Sequence[int], str]


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source as Hydra does, by the rules of its version. A version without
    rules is asked about; the user's word answers that.
    """
    bases = read_bases(source, overrides, launch, start_hydra)
    reading, looked = bases.source, looked_up(bases)
    numbers, why = _find_versions(bases, looked)
    keys_of = numbers[0]  # the version whose keys the source may have
    rules = {row.number: name for name, row in GENERATIONS.items()}
    covered = [rules[number] for number in numbers if number in rules]
    # Words of the user, above one of the file, choose rules.
    stated = [str(reading.leaves[WORD].value)] if WORD in reading.leaves else []
    stated += [
        text.partition("=")[2] for text in overrides if text.startswith(f"{WORD}=")
    ]
    if stated:
        version, why = _chosen(stated[-1]), f"{WORD} says so"
        keys_of = GENERATIONS[version].number if covered else keys_of
    elif covered:
        version = covered[0]
    else:
        version = "0.9" if keys_of > _LAST_OF_OLD_WORKERS else "0.4"
    if not (stated or covered or reading.questions):
        question = ConfigError(
            f"unknown: this is for veRL 0.{keys_of} ({why}), and rampup has the rules of"
            f" {', '.join(GENERATIONS)}",
            fix=f"if it follows one of them, say which: {WORD}={version}",
            key=WORD,
            path=reading.path,
            line=(reading.command and reading.command.line) or None,
        )
        reading.questions.append(question)
    settings = type_above(
        bases,
        looked,
        {WORD: float(version), **GENERATIONS[version].defaults},
        [f"the rules are those of veRL {version}: {why}."] if why else [],
    )
    # A source without a stated version may be of a day between two versions.
    versions = [keys_of] if stated else [keys_of - 1, keys_of, keys_of + 1]
    unknown = {
        name: place
        for name, place in settings.looked_up.items()
        if not any(launch.known_keys.has(name, version) for version in versions)
    }
    others = () if stated else tuple(covered[1:])
    return dataclasses.replace(settings, looked_up=unknown, other_versions=others)


def _chosen(text: str) -> str:
    """Return the version that the user chooses, if it has rules."""
    if text not in GENERATIONS:
        raise ConfigError(
            f"{WORD}={text} must be one of {', '.join(GENERATIONS)}",
            fix="0.9 is that of August 2026",
            key=WORD,
            nearest=tuple(GENERATIONS),
        )
    return text


def _find_versions(bases: BaseFiles, looked: Mapping[str, Located]) -> _Evidence:
    """Return the version of a source: that of its version file or its base file, or
    what its keys fit.
    """
    known, reading = bases.launch.known_keys, bases.source
    required = [key for key in looked if known.life(key)]
    added = sorted(reading.written("+"))
    # For each version the keys that it has not, and those that `+` adds although it has
    # them.
    misfits = {
        version: (
            [key for key in required if not known.has(key, version)]
            + [f"+{key}" for key in added if known.has(key, version)]
        )
        for version in range(1, NEWEST + 1)
    }
    for file in find_in_repository(reading.path, "verl/version/version"):
        text = read_text(file).strip()
        if match := _NUMBER.match(text):
            minor = min(int(match[1]), NEWEST)
            is_open = "dev" in text or minor < 2
            numbers = _NAMES["development"][minor] if is_open else [minor]
            why = f"{_short(file)} says {text}"
            return sorted(numbers, key=lambda n: (len(misfits[n]), -n)), why
    leaves = bases.beside or (reading.leaves if reading.command is None else {})
    own = {known.name(key) for key in leaves}
    if len(own) >= _MANY:
        files = {version: known.in_version(version) for version in misfits}
        best = max(files, key=lambda n: len(own & files[n]) / len(own | files[n]))
        file_name = _short(Path(next(iter(leaves.values())).path or ""))
        return [best], f"{file_name} has the keys of that version"
    return _by_keys(reading, misfits)


def _by_keys(reading: Reading, misfits: Mapping[int, Sequence[str]]) -> _Evidence:
    """Return the versions that the keys of a source fit, the newest first."""
    versions, why = [*misfits], ""
    given = {key for key, place in reading.leaves.items() if place.value is not None}
    old = [
        key
        for kind, key in OLD_MICROS.items()
        if key in given and MICROS[kind] not in reading.leaves
    ]
    if old and reading.command is not None:
        versions = versions[:_LAST_OF_OLD_WORKERS]
        why = f"later versions do not read {old[0]}"
    least = min(len(misfits[version]) for version in versions)
    fitting = [version for version in versions if len(misfits[version]) == least][::-1]
    if len(misfits[NEWEST]) > least:
        others = misfits[fitting[0]]
        unfit = next(name for name in misfits[NEWEST] if name not in others)
        why = f"{unfit} does not fit later versions"
    return fitting, why


def _short(file: Path) -> str:
    return "/".join(file.parts[-3:])


class VerlJob(RolloutJob):
    """A veRL file's numbers, by veRL's own formulas."""

    system = "verl"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.of = GENERATIONS[str(self[WORD])]
        self.version = self.of.title
        self._choose_trainer()
        self._choose_backends()
        self._count_replicas()
        self.usable = all(self.replicas[model] for model in self.models)
        if self.usable:
            self._count_step()
            self._count_updates()

    def _choose_trainer(self) -> None:
        """Decide which trainer runs, and which models and passes it has."""
        self.dynamic = {
            kind: bool(self._or(key, self[DYNAMIC])) for kind, key in DYNAMICS.items()
        }
        self.has_critic = self._or("critic.enable", self[ESTIMATOR] == "gae")
        kl = (
            self["algorithm.use_kl_in_reward"]
            or self["actor_rollout_ref.actor.use_kl_loss"]
        )
        self.models = ["actor"]
        self.models += ["critic"] if self.has_critic else []
        self.models += ["ref"] if kl or self.of.early else []
        # The newer trainer, which pads.
        self.v1: bool = self["trainer.use_v1"] and not self.of.old_workers
        # Whether the check looks at the samples of a step.
        self.checks_step = self.of.old_workers or not self.dynamic["actor"]

    def _choose_backends(self) -> None:
        """Decide the backend of each model: that of the base files, or, if the source
        has none or chooses those of a model by `actor@...=`, of its strategy.
        """
        grouped = any("@" in name for name in self.settings.others)
        engine = None if grouped else _NAMES["engines"].get(self["model_engine"])
        actor = self[STRATEGIES["actor"]] or engine or "fsdp"
        critic = self[STRATEGIES["critic"]] or engine or actor
        self.strategies = {"actor": actor, "critic": critic, "ref": actor}
        if engine and (mixed := self._keys_of_another(engine)):
            raise ConfigError(
                f"{' and '.join(mixed[:2])} must not be set with"
                f" model_engine={self['model_engine']}: its base files are those of"
                f" {engine} alone",
                fix=f"set model_engine={'megatron' if engine == 'fsdp' else 'dp'}",
                key="model_engine",
            )
        if self.of.early and "megatron" in self.strategies.values():
            raise ConfigError(
                f"the rules of veRL {self[WORD]} cover FSDP, not Megatron",
                fix=f"{WORD}=0.4 or later covers both",
                key=STRATEGIES["actor"],
            )

    def _keys_of_another(self, engine: str) -> list[str]:
        """Return the keys of another backend than that of the base files."""
        sections = tuple(_NAMES["foreign_sections"][engine])
        values = {key: self[key] for key in self.settings.given}
        values |= {key: at.value for key, at in self.settings.others.items()}
        names = [key for key in sorted(values) if values[key] is not None]
        strategies = [
            key
            for model, key in STRATEGIES.items()
            if model in self.models and self.is_fsdp(model) != (engine == "fsdp")
        ]
        return strategies + [name for name in names if name.startswith(sections)]

    def is_fsdp(self, model: str) -> bool:
        """Return whether FSDP runs a model."""
        return self.strategies[model].startswith("fsdp")

    def _count_replicas(self) -> None:
        """Count the devices that share one sample, and replicas; a number of devices
        that does not divide is rounded down.
        """
        self.devices: int = self[DEVICES] * self["trainer.nnodes"]
        if self.of.early and 0 < self[FSDP_SIZE] < self.devices:
            raise ConfigError(
                f"veRL 0.2 divides sizes by devices / {FSDP_SIZE}, not by replicas, and"
                " the rules do not follow it",
                fix=f"{FSDP_SIZE}=-1 shards over all devices; {WORD}=0.4 or later has"
                " other rules",
                key=FSDP_SIZE,
            )
        # Those of the inference engines, which may have nodes of their own.
        self.rollout_devices = self.devices
        if self[ROLLOUT_NODES] or self[ROLLOUT_DEVICES]:
            each = self._or(ROLLOUT_DEVICES, 8)
            self.rollout_devices = self._or(ROLLOUT_NODES, 1) * each
        self.rollout_size = math.prod(self[key] for key in ROLLOUT_SIZES)
        self.model_sizes = {model: self._model_size(model) for model in MEGATRON}
        self.replicas: dict[str, int] = {
            model: self.devices // size for model, size in self.model_sizes.items()
        }

    def _model_size(self, model: str) -> int:
        """Return the devices that share one sample of a model."""
        if not self.is_fsdp(model):
            pairs = zip(MEGATRON[model], MEGATRON["actor"], strict=True)
            return math.prod(self._or(key, self[other]) for key, other in pairs)
        of_actor: int = self[OLD_SEQUENCE["actor"]]
        old: int = self._or(OLD_SEQUENCE[model], of_actor)
        if self.of.old_workers:
            # They read no other key, and the actor's for the reference.
            return of_actor if model == "ref" else old
        # Since 0.8 the critic's deprecated key is read by the check alone.
        new: int = self[SEQUENCE[model]]
        return new if model == "critic" or old == 1 else old

    def _count_step(self) -> None:
        """Count the prompts and samples of a step, with padding."""
        self.samples_per_prompt: int = self[RESPONSES]
        # The older trainer's data loader returns gen_batch_size prompts if that is set.
        # DAPO's generates until train_batch_size prompts are left.
        self.prompts: int = self[TRAIN]
        if not self.v1 and not self[FILTER]:
            self.prompts = self._or(GEN, self[TRAIN])
        # The newer trainer fetches prompts one by one where the number that it needs is
        # not known before.
        self.fetches_one = self.v1 and self[FILTER]
        # The newer trainer pads a step to what all mini batches and replicas need
        # (trainer_base.py).
        needed = 1
        if self.v1:
            minis = [self[MINI]]
            minis += [self._or(CRITIC_MINI, self[MINI])] if self.has_critic else []
            sizes = [mini * self.samples_per_prompt for mini in minis]
            needed = math.lcm(self.replicas["actor"], *sizes)
        self.padded: int = -(-self.samples // needed) * needed
        self.padded_samples = self.padded - self.samples

    def _count_updates(self) -> None:
        """Count what the actor and the critic train on in an update, and the actor's
        passes.
        """
        self.mini_shares: dict[str, int] = {}  # samples of an update and replica
        epochs = 1 if self.of.early else self[EPOCHS]
        self._train("actor", self[MINI], epochs)
        if self.has_critic:
            if not self.of.early:
                epochs = self._or("critic.ppo_epochs", epochs)
            self._train("critic", self._or(CRITIC_MINI, self[MINI]), epochs)
        if self.dynamic["actor"]:
            self.tokens = self.token_budget("actor")
        else:
            self.micro = self.pass_size("actor")
        if self.micro:
            share = self.policy.share
            whole = share // self.micro
            self.passes = -(-share // self.micro) if self.of.old_workers else whole
        self.read_data(
            self["trainer.total_epochs"], self["trainer.total_training_steps"]
        )

    def _train(self, name: str, mini: int, epochs: int) -> None:
        """Add a model that is trained. The older workers round its share of a mini
        batch down, and cut what there is.
        """
        replicas = self.replicas[name]
        samples = mini * self.samples_per_prompt
        if name == "critic" and self.of.early:  # its mini batch counts samples
            samples = mini
        self.mini_shares[name] = samples // replicas
        if self.of.old_workers:
            samples = min(self.mini_shares[name], self.step_share(name)) * replicas
        self.train(name, mini, replicas, epochs, samples)

    def token_budget(self, kind: str) -> int:
        """Return the tokens of a pass and replica: the budget of all devices that share
        a sequence.
        """
        model = MODEL[kind]
        shares: int = self.model_sizes[model]
        if not self.is_fsdp(model):
            context = MEGATRON[model][2]
            shares = self._or(context, self[MEGATRON["actor"][2]])
        budget: int = self._or(BUDGETS[kind], self[BUDGET])
        return budget * shares

    def pass_size(self, kind: str) -> int | None:
        """Return the samples of a pass: the key of today, or what the older workers
        make of the whole job's size.
        """
        own: int | None = self[MICROS[kind]]
        old: int | None = self[OLD_MICROS[kind]]
        if self.of.old_workers and old is not None:
            own = old // self.replicas[MODEL[kind]]
        return own

    def is_static(self, kind: str) -> bool:
        """Return whether the check looks at the samples of these passes."""
        decides = "critic" if kind == "critic" else "actor"
        return MODEL[kind] in self.models and not self.dynamic[decides]

    def _or(self, key: str, other: Any) -> Any:
        return other if self[key] is None else self[key]

    def num_mini_batches(self, model: TrainedModel) -> int:
        """Return the updates of a pass over a step's samples, with those of the
        padding.
        """
        if self.of.old_workers:
            return -(-self.step_share(model.name) // max(model.share, 1))
        return self.padded // model.mini_samples

    def step_share(self, model: str = "actor") -> int:
        """Return the samples of a step that one replica of a model gets."""
        return self.padded // self.replicas[model]


def _meanings(job: VerlJob) -> Iterator[tuple[str, str]]:
    prompts = TRAIN if job.prompts == job[TRAIN] else GEN
    keys, size = (prompts, RESPONSES, MINI, EPOCHS), job.model_sizes["actor"]
    yield from batch_meanings(job, keys, job.devices, size)
    if job.tokens is not None:
        yield (
            BUDGET,
            f"about {job.tokens:,} tokens per replica and pass: {job.passes_text}",
        )
    else:
        yield (
            MICRO,
            f"samples per replica (not per device): {job.passes_text} per optimizer"
            " step",
        )


def _old_worker_notes(job: VerlJob) -> Iterator[str]:
    """Yield what the older workers do otherwise than the numbers say."""
    share, mini = job.step_share(), job.mini_shares["actor"]
    if share > mini and (rest := share % max(mini, 1)):
        yield (
            f"the last update of a step has {rest * job.policy.replicas:,} samples"
            f" instead of {job.policy.mini_samples:,}."
        )
    elif share < mini:
        yield (
            f"{MINI} is more than there is: a step's"
            f" {format_count(job.samples, 'sample')} are one update."
        )
        if job.micro and (mini // job.micro > -(-share // job.micro)):
            yield (
                f"each pass is divided by the {mini // job.micro:,} of a full mini batch,"
                f" and there are {-(-share // job.micro):,}: the gradient is too small by"
                " this ratio."
            )
    if job.of.early and job[EPOCHS] > 1:
        yield f"veRL 0.2 reads no {EPOCHS}: each sample is trained on once."
    if job.of.early and job.critic is not None:
        yield f"until veRL 0.3 {CRITIC_MINI} counts samples, not prompts."


def _critic_notes(job: VerlJob) -> Iterator[str]:
    """Yield whether there is a critic where the file does not say, and how the newer
    engine fills its passes.
    """
    if (
        job[ESTIMATOR] not in (None, *_NAMES["estimators"])
        and job["critic.enable"] is None
    ):
        yield (
            f"{ESTIMATOR}={job[ESTIMATOR]} is none of veRL's: that of a fork, or"
            " misspelled. If it needs a critic, the numbers leave it out: no critic is"
            " counted; critic.enable=true counts one."
        )
    if job.has_critic and not job.settings.given & {"critic.enable", ESTIMATOR}:
        yield "there is a critic because algorithm.adv_estimator is gae by default."
    if job.has_critic and not job.of.old_workers:
        yield (
            "the critic's micro sizes and token budget never reach its engine: it fills"
            f" its passes by tokens, {CRITIC_BUDGET:,} of them, regardless of"
            f" {MICROS['critic']} and {DYNAMICS['critic']}. {OLD_SEQUENCE['critic']} is"
            f" read by the check alone; the engine reads {SEQUENCE['critic']}."
        )


def _budgets(job: VerlJob, sequence: str) -> Iterator[Ruling]:
    """Yield that a pass filled by tokens holds a sequence of the largest length, which
    `sequence` names.
    """
    longest = job["data.max_prompt_length"] + job["data.max_response_length"]
    for kind, key in BUDGETS.items():
        is_read = kind != "critic" or job.of.old_workers
        if is_read and MODEL[kind] in job.models and job.dynamic[kind]:
            budget = job.token_budget(kind)
            yield job.at_least(
                f"{kind}_budget_holds_sequence",
                [key],
                Term(
                    f"{key} * devices that share a sequence = {budget:,} tokens", budget
                ),
                Term(f"{sequence}, {longest:,}", longest),
            )


def _budget_notes(job: VerlJob) -> Iterator[str]:
    """Yield what a token budget does, and which are below the longest sequence."""
    for budget in () if job.of.old_workers else _budgets(job, "the longest sequence"):
        if not budget.holds:
            yield f"{budget.message}: the first such sequence stops the run."
    if job.dynamic["actor"]:
        yield (
            "with a token budget veRL skips most of its checks of sizes and ignores"
            " micro batch sizes."
        )


def _device_notes(job: VerlJob) -> Iterator[str]:
    devices = dict.fromkeys(job.models, job.devices)
    yield from rounded_replicas("veRL", devices, job.model_sizes)
    is_sized = bool(job.settings.given & set(ROLLOUT_SIZES))
    if not is_sized and job.rollout_devices % job.rollout_size:
        yield (
            "the file does not size the inference engines, and"
            f" {ROLLOUT_SIZES[0]} is {job[ROLLOUT_SIZES[0]]:,} by default, which does"
            f" not divide {format_count(job.rollout_devices, 'device')}."
        )
    sequence = max(job[OLD_SEQUENCE["actor"]], job[SEQUENCE["actor"]])
    if sequence > 1 and not job.is_fsdp("actor"):
        yield (
            "ulysses_sequence_parallel_size has no effect with megatron; devices"
            f" share a sequence by {MEGATRON['actor'][2]}."
        )


def _data_notes(job: VerlJob) -> Iterator[str]:
    """Yield where the prompts of a step come from, if not from the data loader."""
    generated, wanted = job[GEN], job[TRAIN]
    yield from dropped_prompts(job)
    if job.fetches_one and generated not in (None, 1):
        yield f"{FILTER} sets {GEN} to 1, regardless of the file."
    elif job[FILTER] and not job.v1:
        yield (
            f"DAPO generates for {job._or(GEN, wanted):,} prompts at a time, until"
            f" {TRAIN}={wanted:,} of them have responses that are not all alike; the"
            " rest are dropped."
        )
    elif not job.v1 and job.prompts != wanted:
        yield (
            f"with the older trainer a step has {GEN}={job.prompts:,} prompts, not"
            f" {TRAIN}={wanted:,}."
        )


def _notes(job: VerlJob) -> Iterator[str]:
    """Yield what is special to the file first, and what is always true last."""
    if others := job.settings.other_versions:
        yield (
            f"the source fits veRL {' and '.join(others)} too, which may decide"
            f" otherwise; {WORD}={others[0]} shows it."
        )
    validates = job.settings.others.get("trainer.val_only")
    if validates is not None and validates.value is True:
        yield "trainer.val_only: the run validates and ends, and trains on nothing."
    if job.of.old_workers:
        yield from _old_worker_notes(job)
    if job[LOSS] == SUM:
        yield (
            f"{LOSS}=token-sum adds the losses of all tokens of an update: the gradient"
            f" grows with its {job.policy.mini_samples:,} samples, so twice the batch"
            " is twice the gradient. token-mean divides by the tokens."
        )
    yield from _device_notes(job)
    if job.padded_samples and not broken_names(DIALECT, job):
        yield (
            "the newer trainer adds"
            f" {format_count(job.padded_samples, 'short artificial sample')} so that"
            " every mini batch is full; the loss still divides by full mini batches."
            " trainer.use_v1=false fails instead."
        )
    yield from _critic_notes(job)
    yield from _budget_notes(job)
    yield from _data_notes(job)
    yield group_note(job.samples_per_prompt)
    yield (
        f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples"
        " of one data-parallel replica."
    )
    yield "the learning rate advances once per training step, not per optimizer step."


def _rules(job: VerlJob) -> Iterator[Ruling]:
    """Yield what veRL's check, the classes of its settings, and its run ask."""
    yield from found_by_run(_starts(job))
    if not job.usable:
        return
    yield from _check_step(job)
    for name in job.trained:
        yield from _check_model(job, name)
    for kind in MICROS:
        if job.is_static(kind):
            yield from _one_of_two(job, kind)
    losses = _NAMES["losses"]
    if job[LOSS] not in losses and (job[LOSS] != SUM or job.of.old_workers):
        yield job.broken(
            "loss_is_known",
            [LOSS],
            f"{LOSS}={job[LOSS]} must be one of {', '.join(losses)}",
            candidates=losses,
        )
    yield from job.unknown(
        with_lines(job.settings.looked_up),
        TRAIN,
        f"written with `+`, or left out: no base file of veRL {job[WORD]} has it. A fork"
        " with keys of its own: give one on rampup's command line",
    )
    workers = _old_workers if job.of.old_workers else _new_workers
    yield from found_by_run(workers(job))
    yield from found_by_run(_run_step(job))


def _devices(job: VerlJob) -> Term:
    return Term(f"the {job.devices:,} devices", job.devices)


def _replicas(job: VerlJob, model: str) -> Term:
    count = job.replicas[model]
    return Term(f"the {model}'s {count:,} replicas", count)


def _model_size(job: VerlJob, model: str) -> Term:
    size = job.model_sizes[model]
    return Term(
        f"the {model}'s tensor * pipeline * context parallel size = {size:,}", size
    )


def _starts(job: VerlJob) -> Iterator[Ruling]:
    """Yield the rules that a model has a replica, and Megatron full ones, which the
    check tests of an actor alone.
    """
    for model in job.models:
        if job.is_fsdp(model):
            size = job.model_sizes[model]
            yield job.at_least(
                f"{model}_has_a_replica",
                (DEVICES, SEQUENCE[model]),
                Term(f"{model}: the {job.devices:,} devices", job.devices),
                Term(f"the {size:,} that share a sample", size),
                ": there is no replica",
            )
        elif model != "actor" or not (job.checks_step and job.usable):
            name, size_of = f"megatron_starts_{model}", _model_size(job, model)
            yield job.multiple(name, [DEVICES], _devices(job), size_of)


def _check_step(job: VerlJob) -> Iterator[Ruling]:
    """Yield what the check asks of a step. A token budget skips most of it."""
    if not job.checks_step:
        return
    least, text = job.devices, "the devices, although a run needs only its replicas"
    if not job.is_fsdp("actor"):
        keys, size = (DEVICES, MEGATRON["actor"][0]), _model_size(job, "actor")
        yield job.multiple("megatron_divides_devices", keys, _devices(job), size)
        # 0 if the check cannot compute it.
        least = job.replicas["actor"] * (job[MICRO] or 0)
        text = "the replicas times the micro batch size"
    sizes = {TRAIN: job[TRAIN], RESPONSES: job.samples_per_prompt}
    yield job.multiple(
        "samples_fill_minimal_batch",
        (TRAIN, RESPONSES),
        product(sizes, "samples"),
        Term(f"{least:,}, {text}", least),
    )


def _check_model(job: VerlJob, name: str) -> Iterator[Ruling]:
    """Yield what the check asks of the actor or the critic. A deprecated micro size
    counts the samples of the whole job.
    """
    old, sequence, packing = OLD_MICROS[name], OLD_SEQUENCE[name], PACKING[name]
    prefix = "" if name == "actor" else "critic_"
    if job.is_static(name):
        size = job.trained[name].mini_batch
        mini = Term(f"{MINIS[name]}={size:,}", size)
        if not job.of.early:
            keys, note = (MINIS[name], TRAIN), "; both count prompts"
            yield job.at_least(f"{prefix}mini_at_most_train", keys, TRAIN, mini, note)
        if job[old] is not None:
            keys = (old, MINIS[name])
            yield job.multiple(f"{name}_old_micro_divides_mini", keys, mini, old)
        if job[old] is not None and (name == "actor" or job.is_fsdp(name)):
            shares = job[sequence] if job.is_fsdp(name) else 1
            reached = product({old: job[old], sequence: shares})
            yield job.at_least(
                f"{name}_old_micro_reaches_every_device",
                (old, sequence),
                reached,
                _devices(job),
            )
    # Until 0.4 it is read only with the strategy `fsdp` itself, and since then of the
    # actor alone.
    reads = job.is_fsdp(name) and name == "actor"
    if job.of.old_workers:
        reads = job.strategies[name] == "fsdp"
    if reads and job[sequence] > 1 and not job[packing]:
        yield job.broken(
            f"{prefix}sequence_parallel_needs_packing",
            (packing, sequence),
            f"{sequence}={job[sequence]:,} needs {packing}=true",
            candidates=[True],
        )


def _one_of_two(job: VerlJob, kind: str) -> Iterator[Ruling]:
    """Yield the rules that exactly one of a deprecated micro size and its successor is
    set.
    """
    old, new = OLD_MICROS[kind], MICROS[kind]
    value = job[new]
    # The critic's size is the deprecated key by default, so that one is of no use.
    if kind == "critic" and not job.of.old_workers:
        value = value or job[old]
    if job[old] is None and value is None:
        yield job.broken(
            f"{kind}_micro_given",
            [new],
            f"{new} must be set (or a token budget used, {DYNAMIC})",
            candidates=(8, 4, 2, 1),  # a good start, of those that divide
        )
    if job[old] is not None and value is not None:
        yield job.broken(
            f"{kind}_micro_given_once",
            (old, new),
            f"{old}={job[old]:,} and {new}={value:,} must not both be set; the first is"
            " deprecated",
            candidates=[None],
        )


def _new_workers(job: VerlJob) -> Iterator[Ruling]:
    """Yield what the workers ask of the passes and mini batches since 0.8."""
    actor, rollout = job.dynamic["actor"], job.dynamic["rollout"]
    if actor != rollout:
        yield job.broken(
            "dynamic_everywhere",
            (DYNAMICS["rollout"], DYNAMIC),
            f"{DYNAMICS['rollout']}={str(rollout).lower()} must equal"
            f" {DYNAMIC}={str(actor).lower()}; the workers stop without a message",
            candidates=[actor],
        )
    for name in job.trained:
        yield from _mini_divides(job, name)
    for kind in ("actor", "rollout", "ref"):
        if MODEL[kind] not in job.models or job.dynamic[kind]:
            continue
        old, new, share = OLD_MICROS[kind], MICROS[kind], job.step_share(MODEL[kind])
        rule, what = f"{kind}_micro_divides_share", "of a step"
        if kind == "actor":
            share, rule, what = (
                job.policy.share,
                "micro_divides_mini",
                "of a mini batch",
            )
        if job[new] is not None:
            samples = Term(f"each replica's {share:,} samples {what}", share)
            yield job.multiple(rule, (new, MINI, TRAIN), samples, new)
        elif job[old] is not None:
            yield job.broken(
                f"{kind}_micro_per_gpu_needed",
                (new, old),
                f"{new} must be set: {old}={job[old]:,} passes the check, but nothing"
                " reads it and the workers stop silently",
                division=(share, 1),
            )


def _mini_divides(job: VerlJob, name: str) -> Iterator[Ruling]:
    """Yield what a worker asserts of its mini batch."""
    model, replicas = job.trained[name], job.replicas[name]
    factors = {MINIS[name]: model.mini_batch, RESPONSES: job.samples_per_prompt}
    yield job.multiple(
        f"{name}_mini_divides_over_replicas",
        (MINIS[name], RESPONSES),
        product(factors, "samples"),
        _replicas(job, name),
    )
    if not job.v1 and model.mini_samples % replicas == 0:
        share = job.samples // replicas
        text = f"with trainer.use_v1=false each replica's {share:,} samples"
        yield job.multiple(
            f"{name}_mini_divides_share",
            (TRAIN, MINIS[name]),
            Term(text, share),
            Term(f"its mini batch of {model.share:,}", model.share),
            "; the newer trainer would pad them",
        )


def _old_workers(job: VerlJob) -> Iterator[Ruling]:
    """Yield what the workers ask until 0.7: a size of the whole job reaches every
    replica.
    """
    for kind, old in OLD_MICROS.items():
        is_read = kind in MINIS or not job.dynamic[kind]
        if MODEL[kind] in job.models and job[old] is not None and is_read:
            yield job.at_least(
                f"{kind}_old_micro_reaches_every_replica",
                [old],
                old,
                _replicas(job, MODEL[kind]),
            )
    # They compare with the padded length, which is that of every batch.
    yield from _budgets(job, "the padded sequence")
    for name in job.trained:
        yield from _old_mini_batch(job, name)


def _old_mini_batch(job: VerlJob, name: str) -> Iterator[Ruling]:
    """Yield what the older workers ask of a mini batch, which they round down, and of a
    pass: to divide it, or to fit.
    """
    size = job.mini_shares[name]
    mini = Term(f"each replica's {size:,} samples of a mini batch", size)
    keys: tuple[str, ...] = (MINIS[name], RESPONSES)
    yield job.at_least(f"{name}_mini_reaches_every_replica", keys, mini, 1)
    if size < 1:
        return
    keys = (MICROS[name], OLD_MICROS[name], MINIS[name])
    if count := job.pass_size(name):
        micro = Term(f"the {count:,} of a pass", count)
        if not job.of.early or job[OLD_MICROS[name]] is not None:
            note = ", also with a token budget"
            yield job.multiple(f"{name}_pass_divides_mini", keys, mini, micro, note)
        elif job.is_static(name):
            note = ": the loss is divided by the passes of a full mini batch, 0"
            yield job.at_least(f"{name}_pass_fits_mini", keys, mini, micro, note)
    if not job.is_fsdp(name):
        step = job.step_share(name)
        share = Term(f"each replica's {step:,} samples of a step", step)
        keys = (TRAIN, MINIS[name])
        yield job.multiple(f"{name}_minis_fill_share", keys, share, mini)


def _run_step(job: VerlJob) -> Iterator[Ruling]:
    """Yield what the trainer and its engines ask of a step."""
    samples = Term(f"{job.padded:,} samples", job.padded)
    for model in job.models:
        yield job.multiple(
            f"samples_divide_over_{model}_replicas",
            (TRAIN, RESPONSES),
            samples,
            _replicas(job, model),
            ": only equal chunks are dispatched",
        )
    if not job.v1 and not job.of.old_workers:
        keys, note = (TRAIN, WORKERS), " with trainer.use_v1=false"
        yield job.multiple("samples_divide_over_workers", keys, samples, WORKERS, note)
    if job.v1 and not job.fetches_one and job[GEN] is not None:
        yield job.multiple("loader_divides_train", (GEN, TRAIN), TRAIN, GEN)
    if job.settings.given & set(ROLLOUT_SIZES):
        devices, size = job.rollout_devices, job.rollout_size
        text = f"an engine's tensor * data * pipeline parallel size = {size:,}"
        yield job.multiple(
            "engines_divide_devices",
            ROLLOUT_SIZES,
            Term(f"the {devices:,} devices that generate", devices),
            Term(text, size),
        )
    if job.is_fsdp("actor") and 0 < job[FSDP_SIZE] < job.devices:
        yield job.multiple(
            "fsdp_size_divides_devices", [FSDP_SIZE], _devices(job), FSDP_SIZE
        )
    yield from job.data_set_rule(TRAIN)


DIALECT = Dialect(
    job=VerlJob,
    rules=_rules,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
)

"""veRL: its versions, its keys, its numbers by its own formulas, its words, and its
rules.

Batch and mini batch count prompts; sizes per gpu count samples of one data-parallel
replica. Sources: veRL `trainer/ppo`, `workers/engine_workers.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.known import load_known_keys, with_lines
from rampup.contrib.check.reading import (
    PARENT,
    Entry,
    Launch,
    Reading,
    Settings,
    Source,
    Version,
    entry,
    find_in_repository,
    looked_up,
    program_of,
    read_hydra,
    repository_folders,
)
from rampup.contrib.check.rollout import (
    RolloutJob,
    TrainedModel,
    batch_meanings,
    dropped_prompts,
)
from rampup.contrib.check.rules import (
    Dialect,
    Rule,
    Side,
    apply_if,
    at_least,
    equal,
    found_by_run,
    multiple,
    positive,
    usable,
)
from rampup.contrib.check.verdict import Term, counted, product, rounded_down
from rampup.contrib.rl.plan import RolloutPlan
from rampup.errors import ConfigError, RampupError
from rampup.plan.numbers import divisors

ACTOR, ROLLOUT, REF = (
    f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref")
)
PREFIXES = {"actor": ACTOR, "critic": "critic", "ref": REF}
TRAIN, GEN = (f"data.{name}_batch_size" for name in ("train", "gen"))
RESPONSES = f"{ROLLOUT}.n"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
MINIS = {
    "actor": f"{ACTOR}.ppo_mini_batch_size",
    "critic": "critic.ppo_mini_batch_size",
}
MINI, CRITIC_MINI = MINIS.values()
BUDGET, EPOCHS = (f"{ACTOR}.ppo_{name}" for name in ("max_token_len_per_gpu", "epochs"))
# The kinds of passes, and of each: the key of its samples and replica, the deprecated
# one of the whole job, and whether it is filled by tokens instead (null = as the
# actor's).
_PASSES = {
    "actor": f"{ACTOR}.ppo_",
    "rollout": f"{ROLLOUT}.log_prob_",
    "ref": f"{REF}.log_prob_",
    "critic": "critic.ppo_",
}
MICROS = {kind: f"{start}micro_batch_size_per_gpu" for kind, start in _PASSES.items()}
OLD_MICROS = {kind: f"{start}micro_batch_size" for kind, start in _PASSES.items()}
DYNAMICS = {
    kind: f"{start.removesuffix('ppo_')}use_dynamic_bsz"
    for kind, start in _PASSES.items()
}
MODEL = {
    kind: "actor" if kind == "rollout" else kind for kind in _PASSES
}  # that makes the passes
MICRO, OLD_MICRO, DYNAMIC = (keys["actor"] for keys in (MICROS, OLD_MICROS, DYNAMICS))
LOG_PROB = MICROS["rollout"]
WORKERS = f"{ROLLOUT}.agent.num_workers"
_FSDP = {
    "actor": f"{ACTOR}.fsdp_config",
    "critic": "critic.fsdp",
    "ref": f"{REF}.fsdp_config",
}
# Devices that share a sequence with FSDP: the key of today and its deprecated name.
SEQUENCE = {
    model: f"{section}.ulysses_sequence_parallel_size"
    for model, section in _FSDP.items()
}
OLD_SEQUENCE = {
    model: f"{prefix}.ulysses_sequence_parallel_size"
    for model, prefix in PREFIXES.items()
}
ROLLOUT_SIZES = tuple(
    f"{ROLLOUT}.{name}_parallel_size"
    for name in ("tensor_model", "data", "pipeline_model")
)
MEGATRON_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
)
TORCHTITAN_SIZES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)
TORCHTITAN_REPLICAS = ("data_parallel_shard_size", "data_parallel_replicate_size")
# The sizes that multiply to the devices that share a sample, by backend; with FSDP it
# is a sequence's.
MODEL_SIZES = {
    "megatron": MEGATRON_SIZES,
    "torchtitan": TORCHTITAN_SIZES,
    "veomni": ("ulysses_parallel_size",),
}
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan")
# The groups of veRL's base files, which decide the backend of all models.
ENGINES = {
    "dp": "fsdp",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
}
FILTER = "algorithm.filter_groups.enable"
REFILL = "trainer.v1.sampler.sync_refill_failed_groups"
# Fully asynchronous training, a trainer of its own (experimental/fully_async_policy).
ASYNC = "async_training."
ASYNC_BATCHES, ASYNC_SYNC = (
    f"{ASYNC}{name}" for name in ("require_batches", "trigger_parameter_sync_step")
)
DEVICES, ROLLOUT_DEVICES = (f"{of}.n_gpus_per_node" for of in ("trainer", "rollout"))
ROLLOUT_NODES = "rollout.nnodes"
FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
PACKING = {
    "actor": "actor_rollout_ref.model.use_remove_padding",
    "critic": "critic.model.use_remove_padding",
}
MODES = ("sync", "colocate_async", "separate_async")
WORD = "verl_version"
VERSIONS = tuple(f"0.{number}" for number in range(1, 10))
NEWEST = len(VERSIONS)  # 0.9, of August 2026; versions are counted from 0.1


def _parallel_sizes(model: str, default: int | None) -> dict[str, Entry]:
    role = PREFIXES[model]
    return {
        OLD_SEQUENCE[model]: entry(default, "deprecated: devices that share a sequence"),
        SEQUENCE[model]: entry(1, "devices that share a sequence"),
        f"{role}.veomni.ulysses_parallel_size": entry(default, "devices that share a sequence; null = as the actor"),
        **{f"{role}.megatron.{name}": entry(default, f"Megatron's {name}") for name in MEGATRON_SIZES},
        **{f"{role}.torchtitan.{name}": entry(default, f"TorchTitan's {name}")
           for name in (*TORCHTITAN_SIZES, *TORCHTITAN_REPLICAS)},
    }  # fmt: skip


KEYS: dict[str, Entry] = {
    TRAIN: entry(1024, "prompts of a training step", unit="prompts"),
    GEN: entry(None, "prompts that the data loader gives at once", unit="prompts"),
    LENGTHS[0]: entry(512, "longest prompt", unit="tokens"),
    LENGTHS[1]: entry(512, "longest response", unit="tokens"),
    RESPONSES: entry(1, "responses per prompt", unit="samples"),
    "model_engine": entry(None, "backend of all models; null = by strategy", kind="text", choices=tuple(ENGINES)),
    f"{ACTOR}.strategy": entry(None, "backend of the actor; null = as model_engine", kind="text", choices=STRATEGIES),
    f"{ACTOR}.ppo_mini_batch_size": entry(256, "prompts of an actor update", unit="prompts"),
    f"{ACTOR}.ppo_micro_batch_size": entry(None, "deprecated: samples of a pass, whole job", unit="samples"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": entry(None, "samples of a training pass", unit="samples"),
    f"{ACTOR}.use_dynamic_bsz": entry(False, "fill passes by tokens", kind="bool"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": entry(16384, "token budget of a training pass", unit="tokens"),
    f"{ACTOR}.ppo_epochs": entry(1, "times that a step's samples are trained on"),
    f"{ACTOR}.use_kl_loss": entry(False, "a reference policy in the loss", kind="bool"),
    **_parallel_sizes("actor", 1),
    "actor_rollout_ref.model.use_remove_padding": entry(True, "pack sequences without padding", kind="bool"),
    OLD_MICROS["rollout"]: entry(None, "deprecated: samples, whole job", unit="samples"),
    MICROS["rollout"]: entry(None, "samples of a log-probability pass", unit="samples"),
    DYNAMICS["rollout"]: entry(None, "fill these passes by tokens; null = as the actor", kind="bool"),
    OLD_MICROS["ref"]: entry(None, "deprecated: samples, whole job", unit="samples"),
    MICROS["ref"]: entry(None, "samples of a log-probability pass", unit="samples"),
    DYNAMICS["ref"]: entry(None, "fill these passes by tokens; null = as the actor", kind="bool"),
    **_parallel_sizes("ref", None),
    f"{ROLLOUT}.tensor_model_parallel_size": entry(2, "devices of an inference engine"),
    f"{ROLLOUT}.data_parallel_size": entry(1, "data-parallel size of an inference engine"),
    f"{ROLLOUT}.pipeline_model_parallel_size": entry(1, "pipeline stages of an inference engine"),
    f"{ROLLOUT}.agent.num_workers": entry(8, "processes that generate"),
    "critic.enable": entry(None, "whether there is a critic; null = for gae", kind="bool"),
    "critic.strategy": entry(None, "backend of the critic; null = as the actor", kind="text", choices=STRATEGIES),
    "critic.ppo_mini_batch_size": entry(None, "prompts of a critic update; null = as the actor", unit="prompts"),
    "critic.ppo_micro_batch_size": entry(None, "deprecated: samples of a critic pass", unit="samples"),
    "critic.ppo_micro_batch_size_per_gpu": entry(None, "samples of a critic pass", unit="samples"),
    "critic.use_dynamic_bsz": entry(None, "fill the critic's passes by tokens; null = as the actor", kind="bool"),
    "critic.ppo_epochs": entry(None, "as the actor's; null = the same"),
    **_parallel_sizes("critic", 1),
    "algorithm.adv_estimator": entry("gae", "how advantages are estimated", kind="text", nullable=True),
    "algorithm.use_kl_in_reward": entry(False, "a reference policy in the reward", kind="bool"),
    FILTER: entry(False, "DAPO: generate again for prompts whose responses are all alike", kind="bool"),
    REFILL: entry(False, "generate again for prompts without responses", kind="bool"),
    ASYNC_BATCHES: entry(None, "mini batches of a step of fully asynchronous training; there 1 by default"),
    ASYNC_SYNC: entry(None, "steps between two updates of its generator's weights; there 4 by default", unit="steps"),
    ROLLOUT_DEVICES: entry(None, "devices per node that only generate", minimum=0, unit="devices"),
    ROLLOUT_NODES: entry(None, "nodes that only generate", minimum=0, unit="nodes"),
    FSDP_SIZE: entry(-1, "devices over which FSDP shards a copy; -1 = all", unit="devices"),
    "trainer.n_gpus_per_node": entry(8, "devices per node", unit="devices"),
    "trainer.nnodes": entry(1, "nodes", unit="nodes"),
    "trainer.balance_batch": entry(True, "give each replica samples of like total length", kind="bool"),
    "trainer.total_epochs": entry(30, "times that the data set is read"),
    "trainer.use_v1": entry(True, "the newer trainer, which pads", kind="bool"),
    "trainer.v1.trainer_mode": entry("sync", "how generation and training overlap", kind="text", choices=MODES),
    **{f"trainer.v1.{mode}.parameter_sync_step": entry(4 if mode == "separate_async" else 1, "parts of a step")
       for mode in MODES},
    "trainer.use_legacy_worker_impl": entry("auto", "0.6 and 0.7: disable = the workers of 0.8", kind="text"),
    "critic.model.use_remove_padding": entry(True, "pack the critic's sequences without padding", kind="bool"),
    "critic.ppo_max_token_len_per_gpu": entry(32_768, "token budget of a critic pass, read until 0.7", unit="tokens"),
    f"{ROLLOUT}.mode": entry("async", "whether agents generate", kind="text"),
    WORD: entry(VERSIONS[-1], "the version of veRL", kind="text", choices=VERSIONS),
    "num_prompts": entry(None, "prompts of the data set; given as num_prompts=N", unit="prompts"),
}  # fmt: skip
# The sizes that veRL's base files set, where they differ from its defaults, as of
# August 2026.
_DP: dict[str, Any] = {"model_engine": "dp"}
_MEGATRON: dict[str, Any] = {PARENT: "ppo_megatron_trainer"}
_OLDER = {"trainer.use_v1": False}  # trainers that build on the older one
_DAPO = {**_OLDER, GEN: f"${{{TRAIN}}}"}
_BOTH: dict[str, dict[str, Any]] = {
    "fully_async_ppo": {GEN: 1, "rollout.n": 4, ROLLOUT_NODES: 1, ROLLOUT_DEVICES: 8, f"{ASYNC}staleness_threshold": 0.1,
                        ASYNC_SYNC: 4, ASYNC_BATCHES: 1},
    "one_step_off_ppo": {**_OLDER, ROLLOUT_NODES: 1, ROLLOUT_DEVICES: 8},
    "transfer_queue_ppo": {}, "dapo": _DAPO, "dapo_qat": _DAPO,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "ppo_trainer": _DP,
    "ppo_megatron_trainer": {"model_engine": "megatron"},
    **{f"{name}{kind}": {PARENT: f"ppo{kind}", **sizes}
       for kind in ("_trainer", "_megatron_trainer") for name, sizes in _BOTH.items()},
    **{f"{name}_trainer": {**_DP, **_DAPO} for name in ("entropy", "flowrl")},
    "dapo_transfer_queue_trainer": {**_MEGATRON, **_DAPO},
    **{f"{name}_trainer": {**_DP, **_OLDER} for name in ("gvpo", "rep_exp", "spin", "spo", "sppo")},
    **{f"{name}_trainer": _DP for name in ("dynamo", "rob_ppo", "specRL")},
    "prime_trainer": {**_DP, **_OLDER, RESPONSES: 4, "algorithm.adv_estimator": "rloo", "trainer.balance_batch": False},
    "atropos_trainer": {**_DP, **_OLDER, "algorithm.adv_estimator": "grpo"},
    **{
        name: {**(_MEGATRON if "megatron" in name else _DP), TRAIN: 256}
        | dict.fromkeys(LENGTHS, 2048 if "geo3k" in name else 1024)
        for name in ("gsm8k_multiturn_grpo", "gsm8k_multiturn_grpo_server", "gsm8k_multiturn_grpo_w_interaction",
                     "retool_multiturn_grpo", "search_multiturn_grpo", "search_multiturn_grpo_one_step_off",
                     "geo3k_multiturn_grpo", "gsm8k_multiturn_megatron_grpo", "geo3k_multiturn_megatron_grpo")
    },
}  # fmt: skip
# The base files that programs start from if no `--config-name` names another.
PROGRAMS = {
    "fully_async_main": "fully_async_ppo_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    **{
        f"main_{name.removesuffix('_trainer')}": name
        for name in BASES
        if name.endswith("_trainer") and "ppo" not in name
    },
    "": "ppo_trainer",
}
LAUNCH = Launch(
    system="veRL",
    program=re.compile(
        r"\bverl[\w.]*\.\w*main\w*|\bmain_(?:ppo|dapo|\w+po|prime|spin|\w*split)\w*\b|actor_rollout_ref\.\w+\.\w+="
    ),
    others=re.compile(r"sft_trainer\w*|main_(?:generation|eval|gkd)\w*|model_merger"),
    example="python3 -m verl.trainer.main_ppo key=value",
    entries=KEYS,
    groups=(
        *(
            "reward_model",
            "reward",
            "custom_reward_function",
            "ray_kwargs",
            "ray_init",
            "global_profiler",
            "transfer_queue",
        ),
        *(
            "async_training",
            "rollout",
            "distillation",
            "hydra",
            "env",
            "model",
            "optim",
            "engine",
        ),
    ),
    bases=BASES,
    version="August 2026",
    programs=PROGRAMS,
    keys="verl",
    repeats=(
        "In Search-R1, ZeroSearch, PRIME and verl-agent such a key repeats each prompt,"
        " and a mini batch counts the rows: give data.train_batch_size as many times as"
        " large"
    ),
)


# The programs of veRL and of its recipes; a fork has others beside them.
_PROGRAMS = re.compile(
    r"(?:.*/)?verl/trainer/main_ppo(?:_sync|_v0)?|(?:.*/)?verl/(?:experimental|recipe)/.+|(?:.*/)?recipe/.+"
    r"|(?:main_[^/]*)?"
)
_NUMBER = re.compile(r"v?(\d+)\.(\d+)([\w.]*)")
_PIN = re.compile(
    r"(?m)^[^#\n]*\bverl(?:\[[\w,\- ]*\])?(?:\s*==\s*|(?:\.git)?@)v?(\d+\.(\d+)[\w.]*)"
)
_PINNED = (
    "requirements*.txt",
    "pyproject.toml",
    "setup.py",
    "setup.cfg",
    "environment*.y*ml",
    "Dockerfile*",
)
_MANY = 50  # a file with so many keys is a base file of its version
_LAST_OF_OLD_WORKERS = 7
# Key: its value until a version, that of 0.9 since then.
_UNTIL: Mapping[str, tuple[int, Any]] = {
    **{
        OLD_MICROS[kind]: (1, size)
        for kind, size in {
            "actor": 64,
            "rollout": 128,
            "ref": 128,
            "critic": 64,
        }.items()
    },
    **dict.fromkeys(PACKING.values(), (6, False)),
    f"{ROLLOUT}.mode": (6, "sync"),
    "trainer.use_v1": (8, False),
}
_Evidence = tuple[
    Collection[int], str
]  # the versions that are possible, the likeliest first, and why


def old_defaults(version: int) -> dict[str, Any]:
    """Return the sizes that a version has by default, where they differ from those of
    0.9.
    """
    return {key: value for key, (last, value) in _UNTIL.items() if version <= last}


def _stated_version(text: str) -> int:
    """Return the version that a user states, such as `0.4.1` or `head`."""
    if text == "head":
        return NEWEST
    match = _NUMBER.fullmatch(text)
    if match is None or match[1] != "0" or f"0.{match[2]}" not in VERSIONS:
        said = (
            f"{WORD}={text} must be one of {', '.join(VERSIONS)}; {VERSIONS[-1]} or"
            " head is that of August 2026"
        )
        raise ConfigError(said, key=WORD, nearest=VERSIONS)
    return int(match[2])


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source as Hydra does, by the rules of its version, which the user states
    of a program that is not veRL's.
    """
    stated = [
        setting.partition("=")[2]
        for setting in overrides
        if setting.startswith(f"{WORD}=")
    ]
    others = [setting for setting in overrides if not setting.startswith(f"{WORD}=")]

    def choose(reading: Reading, beside: Mapping[str, Located]) -> Version:
        texts = stated or (
            [str(reading.leaves[WORD].value)] if WORD in reading.leaves else []
        )
        found = (
            ([_stated_version(texts[-1])], f"{WORD} says so")
            if texts
            else _find_versions(reading, beside)
        )
        (version, *possible), why = found
        name = VERSIONS[version - 1]
        is_default = version == NEWEST and not why
        notes = (
            []
            if is_default
            else [
                f"the rules are those of veRL {name}: {why}. {WORD}=... chooses"
                " another."
            ]
        )
        command = reading.command
        if is_fork := command is not None and not _PROGRAMS.fullmatch(
            program_of(command)
        ):
            said = (
                f"this starts {program_of(command)}, a trainer of a fork: its rules may"
                " differ from those of veRL"
            )
            if not stated:
                said = (
                    f"unknown, a fork: {said}. If it follows them, say which:"
                    f" {WORD}={name}"
                )
                raise ConfigError(
                    said, key=WORD, path=command.path, line=command.line or None
                )
            notes.append(f"{said}.")
        defaults = {WORD: name, **old_defaults(version)}
        return Version(
            defaults=defaults,
            notes=notes,
            others=tuple(VERSIONS[other - 1] for other in possible),
            is_fork=is_fork,
        )

    return read_hydra(source, others, launch, choose)


def _find_versions(reading: Reading, beside: Mapping[str, Located]) -> _Evidence:
    """Return the version of a source: that of its version file, a pin, its base file,
    or what its keys fit.
    """
    known = load_known_keys("verl")
    required = [key for key in looked_up(reading, beside) if known.life(key)]
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
    if file := next(_statements(reading.path), None):
        possible, why = file
        return (
            sorted(possible, key=lambda version: (len(misfits[version]), -version)),
            why,
        )
    leaves = beside or (reading.leaves if reading.command is None else {})
    own = {known.name(key) for key in leaves}
    if len(own) >= _MANY:
        files = {version: known.in_version(version) for version in misfits}
        best = max(
            files,
            key=lambda version: len(own & files[version]) / len(own | files[version]),
        )
        return (
            [best],
            (
                f"{_short(Path(next(iter(leaves.values())).path or ''))} has the keys"
                " of that version"
            ),
        )
    versions, why = [*misfits], ""
    given = {key for key, place in reading.leaves.items() if place.value is not None}
    old = [
        key
        for kind, key in OLD_MICROS.items()
        if key in given and MICROS[kind] not in reading.leaves
    ]
    if old and reading.command is not None:
        versions, why = (
            versions[:_LAST_OF_OLD_WORKERS],
            f"later versions do not read {old[0]}",
        )
    least = min(len(misfits[version]) for version in versions)
    fitting = [version for version in versions if len(misfits[version]) == least][::-1]
    if len(misfits[NEWEST]) > least:
        unfit = next(
            name for name in misfits[NEWEST] if name not in misfits[fitting[0]]
        )
        why = f"{unfit} does not fit later versions"
    return fitting, why


def _statements(path: str) -> Iterator[_Evidence]:
    """Yield the versions that files say, from the source upwards."""
    for file in find_in_repository(path, "verl/version/version"):
        if file.is_file() and (match := _NUMBER.match(text := read_text(file).strip())):
            yield (
                _of_version_file(int(match[1]), int(match[2]), match[3]),
                f"{_short(file)} says {text}",
            )
    for folder in repository_folders(path):
        for file in (
            file
            for pattern in _PINNED
            for file in sorted(folder.glob(pattern))
            if file.is_file()
        ):
            if match := _PIN.search(read_text(file)):
                yield (
                    [min(max(int(match[2]), 1), NEWEST)],
                    f"{_short(file)} pins {match[1]}",
                )


def _of_version_file(major: int, minor: int, rest: str) -> Collection[int]:
    """Return what a version file may mean: until 0.5 its `.dev` came after a release,
    since 0.6 before one.
    """
    if major > 0 or minor > NEWEST:
        return [NEWEST]
    if minor <= 1:  # unchanged until February 2025, when most of 0.2 was there
        return [1, 2]
    if "dev" not in rest:
        return [minor]
    return {2: [2, 3, 4], 3: [3, 4], 4: [4, 5], 5: [5, 6]}.get(
        minor, [minor - 1, minor]
    )


def _short(file: Path) -> str:
    return "/".join(file.parts[-3:])


CRITIC_BUDGET = 32_768
COUNTS = (
    *(GEN, RESPONSES, MINI, BUDGET, EPOCHS, ASYNC_BATCHES, ASYNC_SYNC),
    *(
        OLD_SEQUENCE["actor"],
        SEQUENCE["actor"],
        f"{ACTOR}.veomni.ulysses_parallel_size",
    ),
    *(f"{role}.megatron.{name}" for role in (ACTOR, REF) for name in MEGATRON_SIZES),
    *(
        f"{ACTOR}.torchtitan.{name}"
        for name in (*TORCHTITAN_SIZES, *TORCHTITAN_REPLICAS)
    ),
    *(OLD_SEQUENCE["ref"], SEQUENCE["ref"], f"{REF}.veomni.ulysses_parallel_size"),
    *(*ROLLOUT_SIZES, WORKERS, "trainer.n_gpus_per_node", "trainer.nnodes"),
    *(f"trainer.v1.{mode}.parameter_sync_step" for mode in MODES),
)
STATIC_COUNTS = tuple(
    keys[kind] for kind in ("actor", "rollout", "ref") for keys in (OLD_MICROS, MICROS)
)
CRITIC_COUNTS = (
    *(CRITIC_MINI, OLD_MICROS["critic"], MICROS["critic"], "critic.ppo_epochs"),
    *(
        OLD_SEQUENCE["critic"],
        SEQUENCE["critic"],
        "critic.veomni.ulysses_parallel_size",
    ),
    *(f"critic.megatron.{name}" for name in MEGATRON_SIZES),
)


class VerlJob(RolloutJob):
    """A veRL file's numbers, by veRL's own formulas."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if any(
            name.startswith(("actor_rollout_ref.teacher.", "teacher."))
            for name in settings.others
        ):
            raise ConfigError(
                "the recipe gkd has a trainer of its own, which the rules of veRL do"
                " not cover",
                key="teacher",
            )
        self.era = VERSIONS.index(self[WORD]) + 1  # the version, counted from 0.1
        self.version = (
            "veRL of August 2026 (1dda039)"
            if self.era == NEWEST
            else f"veRL {self[WORD]}"
        )
        # Whether passes are filled by tokens (dynamic) or by a fixed number of samples
        # (static).
        self.dynamic = {
            kind: bool(self._or(key, self[DYNAMIC])) for kind, key in DYNAMICS.items()
        }
        self._choose_trainer()
        self._choose_backends()
        self._count_replicas()
        if self.usable:
            self._count_step()
            self._count_updates()

    def _choose_trainer(self) -> None:
        """Decide which trainer and workers run, and which models."""
        # Workers until 0.7, which read the whole job's micro sizes and whose last mini
        # batch and pass may be smaller.
        self.old_workers = (
            self.era <= _LAST_OF_OLD_WORKERS
            and self["trainer.use_legacy_worker_impl"] != "disable"
        )
        self.has_critic = bool(
            self._or("critic.enable", self["algorithm.adv_estimator"] == "gae")
        )
        has_ref = (
            self.era <= 3
            or self["algorithm.use_kl_in_reward"]
            or self[f"{ACTOR}.use_kl_loss"]
        )
        self.models = (
            "actor",
            *(["critic"] if self.has_critic else []),
            *(["ref"] if has_ref else []),
        )
        # A file of the fully asynchronous trainer, which builds on the older one and
        # does not call veRL's check. Other trainers borrow some of its keys, such as
        # partial_rollout.
        given = any(self[key] is not None for key in (ASYNC_BATCHES, ASYNC_SYNC))
        self.fully_async = given or (
            self[TRAIN] == 0
            and any(key.startswith(ASYNC) for key in self.settings.others)
        )
        self.v1: bool = (
            self["trainer.use_v1"] and not self.fully_async and self.era >= 9
        )  # the newer trainer, which pads
        self.mode: str = self["trainer.v1.trainer_mode"] if self.v1 else "sync"
        # Parts in which a step's samples are trained on before the weights are sent.
        self.sync_step: int = (
            self[f"trainer.v1.{self.mode}.parameter_sync_step"] if self.v1 else 1
        )
        # Whether processes generate, each an equal share of the samples.
        is_older = not self.v1 and not self.fully_async
        self.has_agents = is_older and (
            self.era >= 9 or (self.era >= 5 and self[f"{ROLLOUT}.mode"] == "async")
        )
        # Whether the check looks at the samples of a step: none in 0.1, and since 0.6
        # only a static one.
        self.checks_step = self.era >= 2 and (
            not self.dynamic["actor"] or self.era <= 5
        )

    def _choose_backends(self) -> None:
        """Decide the backend of each model."""
        # That of the base files; None if the source has none, or chooses those of a
        # model by `actor@...=`.
        grouped = any("@" in name for name in self.settings.others)
        self.engine: str | None = None if grouped else ENGINES.get(self["model_engine"])
        # Only FSDP's base files, or none, leave the backend to the strategy. The
        # critic's default is then the actor's.
        chosen = [
            self[f"{section}.strategy"] if self.engine in (None, "fsdp") else None
            for section in (ACTOR, "critic")
        ]
        actor: str = chosen[0] or self.engine or "fsdp"
        self.strategies = {
            "actor": actor,
            "critic": chosen[1] or self.engine or actor,
            "ref": actor,
        }
        if self.era <= 3 and "megatron" in self.strategies.values():
            said = (
                f"the rules of veRL {self[WORD]} cover FSDP, not Megatron; {WORD}=0.4"
                " or later covers both"
            )
            raise ConfigError(said, key=f"{ACTOR}.strategy")
        # Whether veRL's check, which reads the strategy alone, expects Megatron's
        # sizes.
        self.checked_as_megatron = actor == "megatron" and self[
            f"{ACTOR}.strategy"
        ] in (None, "megatron")
        self.checks_megatron = (
            self.checked_as_megatron and self.checks_step and not self.fully_async
        )

    def _count_replicas(self) -> None:
        """Count the devices that share one sample, and replicas; a number of devices
        that does not divide is rounded down.
        """
        self.devices: int = self["trainer.n_gpus_per_node"] * self["trainer.nnodes"]
        self.rollout_devices = self.devices  # those of the inference engines
        if (
            self.fully_async
            or self[ROLLOUT_NODES] is not None
            or self[ROLLOUT_DEVICES] is not None
        ):
            self.rollout_devices = self._or(ROLLOUT_NODES, 1) * self._or(
                ROLLOUT_DEVICES, 8
            )
        self.rollout_size = math.prod(self[key] for key in ROLLOUT_SIZES)
        self.model_sizes: dict[str, int] = {}
        self.replicas: dict[str, int] = {}
        # Since 0.8 the critic's deprecated key is read by the check alone. The older
        # workers read no other.
        actor = self[OLD_SEQUENCE["actor"]]
        old = {"actor": actor, "critic": 1, "ref": self._or(OLD_SEQUENCE["ref"], actor)}
        if self.old_workers:
            old |= {"critic": self[OLD_SEQUENCE["critic"]], "ref": actor}
        for model, strategy in self.strategies.items():
            self.model_sizes[model] = (
                old[model]
                if old[model] > 1 or self.old_workers
                else self[SEQUENCE[model]]
            )
            if strategy in MODEL_SIZES:
                self.model_sizes[model] = self._product(model, MODEL_SIZES[strategy])
            self.replicas[model] = self.devices // max(self.model_sizes[model], 1)
            if strategy == "torchtitan":
                self.replicas[model] = self._product(model, TORCHTITAN_REPLICAS)
        has_counts = not any(rule.is_broken(self) for rule in POSITIVE)
        self.usable = has_counts and all(
            self.replicas[model] >= 1 for model in self.models
        )

    def _count_step(self) -> None:
        """Count the prompts and samples of a step, with padding."""
        self.samples_per_prompt: int = self[RESPONSES]
        # The older trainer's data loader returns gen_batch_size prompts if that is set.
        # DAPO's generates until train_batch_size prompts are left, and the asynchronous
        # one waits for some mini batches.
        self.prompts: int = (
            self[TRAIN] if self.v1 or self[FILTER] else self._or(GEN, self[TRAIN])
        )
        if self.fully_async:
            self.prompts = self._or(ASYNC_BATCHES, 1) * self[MINI]
        # The newer trainer fetches prompts one by one where the number that it needs is
        # not known before.
        self.fetches_one = self.v1 and (
            self.mode != "sync" or self[FILTER] or self[REFILL]
        )
        # The check wants the samples of a step to be a multiple of this; None if it
        # cannot compute it.
        self.minimal_batch: int | None = self.devices
        if self.checked_as_megatron:
            self.minimal_batch = (
                None if self[MICRO] is None else self.replicas["actor"] * self[MICRO]
            )
        self.longest: int = sum(
            self[key] for key in LENGTHS
        )  # tokens of the longest sequence
        # The newer trainer pads each part of a step to what all mini batches and
        # replicas need (trainer_base.py).
        self.part_samples = self.samples // self.sync_step
        minis = [
            self[MINI],
            *([self.effective(CRITIC_MINI)] if self.has_critic else []),
        ]
        needed = (
            math.lcm(
                self.replicas["actor"],
                *(mini * self.samples_per_prompt for mini in minis),
            )
            if self.v1
            else 1
        )
        self.padded_part_samples = -(-self.part_samples // needed) * needed
        self.padded_samples = (
            self.padded_part_samples - self.part_samples
        ) * self.sync_step

    def _count_updates(self) -> None:
        """Count what the actor and the critic train on in an update, and the actor's
        passes.
        """
        # Tokens of a pass and replica: the budget of all devices that share a sequence.
        is_dynamic = self.dynamic["actor"]
        shares = self[f"{ACTOR}.megatron.context_parallel_size"]
        if self.strategies["actor"] != "megatron":
            shares = self.model_sizes["actor"]
        self.token_budget: int = self[BUDGET] * shares
        # Samples of a training pass and replica; None with a token budget, or if no key
        # that is used sets it.
        self.micro = None if is_dynamic else self.pass_size("actor")
        # FSDP's workers of 0.2 have no loop over epochs.
        epochs = 1 if self.era == 2 else self[EPOCHS]
        self.mini_shares: dict[
            str, int
        ] = {}  # samples of an update and replica, also if a step has fewer
        self._train(
            "actor",
            self[MINI],
            micro=self.micro,
            tokens=self.token_budget if is_dynamic else None,
            epochs=epochs,
        )
        if self.has_critic:
            # Its engine since 0.8 fills its passes by tokens in any case.
            is_static = self.old_workers and not self.dynamic["critic"]
            micro = self.pass_size("critic") if is_static else None
            budget = (
                self["critic.ppo_max_token_len_per_gpu"] * self.model_sizes["critic"]
            )
            tokens = (
                None if is_static else budget if self.old_workers else CRITIC_BUDGET
            )
            critic_epochs = (
                epochs if self.era == 2 else self._or("critic.ppo_epochs", epochs)
            )
            self._train(
                "critic",
                self.effective(CRITIC_MINI),
                micro=micro,
                tokens=tokens,
                epochs=critic_epochs,
            )
        if self.micro:
            self.passes = (
                -(-self.policy.share // self.micro)
                if self.old_workers
                else self.policy.share // self.micro
            )
        # The data loader of fully asynchronous training gives prompts one by one: only
        # the end of the run is dropped.
        self.read_data(self["trainer.total_epochs"], joined=self.fully_async)

    def _train(self, name: str, mini_batch: int, **sizes: Any) -> None:
        """Add a model that is trained. The older workers round its share of a mini
        batch down, and cut what there is.
        """
        replicas = self.replicas[name]
        # Until 0.3 the critic's mini batch counts samples.
        samples = (
            mini_batch
            if name == "critic" and self.era <= 3
            else mini_batch * self.samples_per_prompt
        )
        self.mini_shares[name] = samples // replicas
        if self.old_workers:
            samples = min(self.mini_shares[name], self.step_share(name)) * replicas
        self.trained[name] = TrainedModel(
            name=name,
            mini_batch=mini_batch,
            mini_samples=samples,
            replicas=replicas,
            **sizes,
        )

    def pass_size(self, kind: str) -> int | None:
        """Return the samples of a pass: the key of today, or what the older workers
        make of the whole job's size.
        """
        own: int | None = self[MICROS[kind]]
        old: int | None = self[OLD_MICROS[kind]]
        return (
            old // self.replicas[MODEL[kind]]
            if self.old_workers and old is not None
            else own
        )

    def is_static(self, kind: str) -> bool:
        """Return whether the check looks at the samples of these passes."""
        return (
            MODEL[kind] in self.models
            and not self.dynamic["critic" if kind == "critic" else "actor"]
        )

    def effective(self, key: str) -> Any:
        """Return the value that a key has in effect: the critic's mini batch follows
        the actor's.
        """
        return self._or(CRITIC_MINI, self[MINI]) if key == CRITIC_MINI else self[key]

    def _or(self, key: str, other: Any) -> Any:
        return other if self[key] is None else self[key]

    def foreign_strategy(self, key: str) -> str | None:
        """Return a model's strategy if its configuration class, that of `model_engine`,
        is made for another backend.
        """
        given: str | None = self[key]
        if given is None or self.engine is None or given.startswith(self.engine):
            return None
        # FSDP's engine is chosen by the strategy; of the actor's, these two are looked
        # up by name (engine_workers.py).
        looked_up = given in ("megatron", "veomni") and key.startswith(ACTOR)
        return given if self.engine == "fsdp" or looked_up else None

    def foreign_keys(self) -> list[str]:
        """Return the keys of backends that are not those of the base files, of models
        that take part.
        """
        if self.engine is None:
            return []
        sections = [name for name in MODEL_SIZES if name != self.engine]
        sections += [] if self.engine == "fsdp" else ["fsdp_config", "fsdp"]
        foreign = tuple(
            f"{PREFIXES[model]}.{section}."
            for model in self.models
            for section in sections
        )
        return sorted(
            name
            for name in {*self.settings.given, *self.settings.others}
            if name.startswith(foreign)
        )

    def unknown_keys(self) -> dict[str, Located]:
        """Return the keys that Hydra looks up and no base file of this version has."""
        known = load_known_keys("verl")
        return {
            name: place
            for name, place in self.settings.looked_up.items()
            if not known.has(name, self.era)
        }

    def at_version(self, version: str) -> VerlJob:
        """Return the job of the same file with the rules of another version."""
        before, after = (
            old_defaults(VERSIONS.index(name) + 1) for name in (self[WORD], version)
        )
        values = {**self.settings.values, WORD: version}
        for key in {*before, *after} - self.settings.given:
            if self[key] == before.get(key, KEYS[key].default):
                values[key] = after.get(key, KEYS[key].default)
        return VerlJob(dataclasses.replace(self.settings, values=values))

    def _product(self, model: str, names: Iterable[str]) -> int:
        """Return the product of sizes of a model's backend; an unset one is the
        actor's.
        """
        strategy = self.strategies[model]
        return math.prod(
            self._or(
                f"{PREFIXES[model]}.{strategy}.{name}",
                self[f"{ACTOR}.{strategy}.{name}"],
            )
            for name in names
        )

    def num_mini_batches(self, model: TrainedModel) -> int:
        """Return the updates of a pass over a step's samples, with those of the
        padding.
        """
        if self.old_workers:
            return -(-self.step_share(model.name) // max(model.share, 1))
        return self.padded_part_samples // model.mini_samples * self.sync_step

    def step_share(self, model: str = "actor") -> int:
        """Return the samples of a part of a step that one replica of a model gets."""
        return self.padded_part_samples // self.replicas[model]

    def plan(self) -> RolloutPlan | None:
        """Return the plan of a step that is trained on as generated."""
        is_cut = any(
            model.mini_samples != model.mini_batch * self.samples_per_prompt
            for model in self.trained.values()
        )
        return (
            None
            if self.padded_samples or self.sync_step > 1 or is_cut
            else self.rollout_plan()
        )


def _meanings(job: VerlJob) -> Iterator[tuple[str, str]]:
    actor, share = job.policy, job.step_share()
    prompts = (
        f"{MINI} * require_batches = {actor.mini_batch:,} *"
        f" {job.num_mini_batches(actor):,}"
    )
    if not job.fully_async:
        prompts = TRAIN if job.prompts == job[TRAIN] else GEN
    yield from batch_meanings(job, prompts, RESPONSES, MINI, EPOCHS)
    size = (
        f"{job.model_sizes['actor']:,} that share a sample ({job.strategies['actor']})"
    )
    replicas = (
        f"{counted(actor.replicas, 'replica')}; each has"
        f" {counted(actor.share, 'sample')} of a mini batch"
    )
    yield f"{counted(job.devices, 'device')} / {size}", replicas
    if job.dynamic["actor"]:
        yield (
            BUDGET,
            (
                f"about {job.token_budget:,} tokens per replica and pass:"
                f" {job.passes_text}"
            ),
        )
    else:
        yield (
            MICRO,
            (
                f"samples per replica (not per device): {job.passes_text} per optimizer"
                " step"
            ),
        )
        passes = (
            counted(-(-share // job[LOG_PROB]), "pass") if job[LOG_PROB] else "not set"
        )
        yield (
            LOG_PROB,
            (
                f"samples per replica in log-probability passes: {passes} over"
                f" {counted(share, 'sample')}"
            ),
        )
    if job.padded_samples:
        yield (
            "",
            (
                f"{counted(job.padded_samples, 'short artificial sample')} added to"
                " each step"
            ),
        )
    if (
        ROLLOUT_SIZES[0] in job.settings.given
        and job.rollout_devices % job.rollout_size == 0
    ):
        yield (
            ROLLOUT_SIZES[0],
            (
                f"{counted(job.rollout_devices // job.rollout_size, 'engine')} that"
                " generate"
            ),
        )
    if job.strategies["actor"].startswith("fsdp") and 0 < job[FSDP_SIZE] < job.devices:
        copies = counted(job.devices // job[FSDP_SIZE], "copy")
        yield (
            FSDP_SIZE,
            f"{copies} of the model, each over {counted(job[FSDP_SIZE], 'device')}",
        )


def _outcome(job: VerlJob) -> str:
    """Return what a run does, in a few words."""
    if broken := [rule.name.partition(".")[2] for rule in RULES if rule.is_broken(job)]:
        return f"{', '.join(broken[:2])} broken"
    updates = (
        f"{counted(job.updates(job.policy), 'update')} of {job.policy.mini_samples:,}"
    )
    passes = [] if job.passes is None else [counted(job.passes, "pass")]
    padding = (
        [f"{job.padded_samples:,} artificial samples"] if job.padded_samples else []
    )
    return ", ".join([counted(job.samples, "sample"), updates, *passes, *padding])


def _other_versions(job: VerlJob) -> Iterator[str]:
    """Yield a note on versions that are possible and decide otherwise."""
    own, groups = _outcome(job), dict[str, list[str]]()
    for version in job.settings.other_versions:
        with contextlib.suppress(RampupError):
            if (text := _outcome(job.at_version(version))) != own:
                groups.setdefault(text, []).append(version)
    if groups:
        said = "; ".join(
            f"{', '.join(versions)}: {text}" for text, versions in groups.items()
        )
        yield (
            f"the source fits other versions of veRL, which decide otherwise ({said});"
            f" {WORD}=... chooses one."
        )


def _notes(job: VerlJob) -> Iterator[str]:
    yield from _other_versions(job)
    if (
        only := job.settings.others.get("trainer.val_only")
    ) is not None and only.value is True:
        yield "trainer.val_only: the run validates and ends, and trains on nothing."
    if job.old_workers:
        rest = job.step_share() % max(job.mini_shares["actor"], 1)
        if rest and job.step_share() > job.mini_shares["actor"]:
            last = rest * job.policy.replicas
            yield (
                f"the last update of a step has {last:,} samples instead of"
                f" {job.policy.mini_samples:,}."
            )
        elif job.step_share() < job.mini_shares["actor"]:
            yield (
                f"{MINI} is more than there is: a step's"
                f" {counted(job.samples, 'sample')} are one update."
            )
        if job.era == 2 and job[EPOCHS] > 1:
            yield f"veRL 0.2 reads no {EPOCHS}: each sample is trained on once."
        if job.era == 2 and 0 < job[FSDP_SIZE] < job.devices:
            yield (
                f"veRL 0.2 divides sizes by devices / {FSDP_SIZE}, not by replicas: its"
                " batches are larger than here."
            )
    yield (
        f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples"
        " of one data-parallel replica."
    )
    if job.fully_async:
        taken = (
            f"{ASYNC_BATCHES} ="
            f" {counted(job.num_mini_batches(job.policy), 'mini batch')}"
        )
        weights = (
            "the generator gets new weights every"
            f" {counted(job[ASYNC_SYNC] or 4, 'step')}"
        )
        queue = (
            f"a step takes {taken} from the queue of generated samples, and {weights}"
        )
        yield (
            f"fully asynchronous training, which does not call veRL's check: {queue},"
            " so samples may be older than that."
        )
    for model in job.models:
        if job.devices % job.model_sizes[model]:
            devices = f"the {model}'s {job.devices:,} devices"
            yield (
                f"{rounded_down(devices, job.model_sizes[model], 'veRL', job.replicas[model])}."
            )
    if job.sync_step > 1:
        yield (
            f"a step is trained on in {job.sync_step:,} parts of"
            f" {counted(job.part_samples, 'sample')}."
        )
    if job.padded_samples:
        padded = (
            f"{counted(job.padded_samples, 'short artificial sample')} so that every"
            " mini batch is full"
        )
        loss = "the loss still divides by full mini batches"
        yield (
            f"the newer trainer adds {padded}; {loss}. trainer.use_v1=false fails"
            " instead."
        )
    if job.dynamic["actor"]:
        yield (
            "with a token budget veRL skips most of its checks of sizes and ignores"
            " micro batch sizes."
        )
        if job.token_budget < job.longest:
            budget = (
                f"{BUDGET} * devices that share a sequence = {job.token_budget:,}"
                " tokens"
            )
            yield (
                f"{budget} is less than the longest sequence, {job.longest:,}: the"
                " first such sequence stops the run."
            )
    if job.critic is not None and not job.old_workers:
        tokens = (
            f"{CRITIC_BUDGET:,} of them, regardless of {MICROS['critic']} and"
            f" {DYNAMICS['critic']}"
        )
        yield (
            "the critic's micro sizes and token budget never reach its engine: it"
            f" fills its passes by tokens, {tokens}."
        )
        if job[OLD_SEQUENCE["critic"]] > 1:
            yield (
                f"{OLD_SEQUENCE['critic']} is read by the check alone; the critic's"
                f" engine reads {SEQUENCE['critic']}."
            )
    if job.critic is not None:
        if job.era <= 3:
            yield f"until veRL 0.3 {CRITIC_MINI} counts samples, not prompts."
        if not job.settings.given & {"critic.enable", "algorithm.adv_estimator"}:
            yield "there is a critic because algorithm.adv_estimator is gae by default."
    deprecated = [
        *((OLD_MICROS[kind], MICROS[kind]) for kind in MICROS),
        (OLD_SEQUENCE["actor"], SEQUENCE["actor"]),
    ]
    for old, new in deprecated:
        if old in job.settings.given and job[old] is not None and not job.old_workers:
            yield f"{old} is deprecated; use {new}."
    if (
        not job.settings.given & set(ROLLOUT_SIZES)
        and job.rollout_devices % job.rollout_size
    ):
        default = f"{ROLLOUT_SIZES[0]} is {job[ROLLOUT_SIZES[0]]:,} by default"
        devices = counted(job.rollout_devices, "device")
        yield (
            f"the file does not size the inference engines, and {default}, which does"
            f" not divide {devices}."
        )
    strategy, key = job.strategies["actor"], f"{ACTOR}.strategy"
    if job[key] not in (None, strategy) and job.foreign_strategy(key) is None:
        yield (
            f"{key}={job[key]} is read by the check alone; the engine is {strategy}, by"
            " model_engine."
        )
    sequence = max(job[OLD_SEQUENCE["actor"]], job[SEQUENCE["actor"]])
    if sequence > 1 and not strategy.startswith("fsdp"):
        own = f"{ACTOR}.{strategy}.{'ulysses_parallel_size' if strategy == 'veomni' else 'context_parallel_size'}"
        yield (
            f"ulysses_sequence_parallel_size={sequence:,} has no effect with"
            f" {strategy}; devices share a sequence by {own}."
        )
    if not job.fully_async:
        yield from dropped_prompts(job)
    generated = job[GEN]
    if job.fetches_one and generated not in (None, 1):
        why = (
            f"trainer_mode={job.mode}"
            if job.mode != "sync"
            else FILTER
            if job[FILTER]
            else REFILL
        )
        yield f"{why} sets {GEN} to 1, regardless of the file."
    elif job[FILTER] and not job.v1:
        kept = f"{TRAIN}={job[TRAIN]:,} of them have responses that are not all alike"
        yield (
            f"DAPO generates for {generated or job[TRAIN]:,} prompts at a time, until"
            f" {kept}; the rest are dropped."
        )
    elif (
        generated is not None
        and not job.v1
        and not job.fully_async
        and job.prompts != job[TRAIN]
    ):
        yield (
            f"with the older trainer a step has {GEN}={job.prompts:,} prompts, not"
            f" {TRAIN}={job[TRAIN]:,}."
        )
    yield "the learning rate advances once per training step, not per optimizer step."


Rules = list[Rule[VerlJob]]
Condition = Callable[[VerlJob], bool]
_DEVICES: Side[VerlJob] = ("the {:,} devices", lambda job: job.devices)


def _replicas(model: str) -> Side[VerlJob]:
    return f"the {model}'s {{:,}} replicas", lambda job: job.replicas[model]


def _model_size(model: str) -> Side[VerlJob]:
    return (
        f"the {model}'s tensor * pipeline * context parallel size = {{:,}}",
        lambda job: job.model_sizes[model],
    )


def _model_starts(model: str) -> Rules:
    """Return the rules that a model has a replica, and Megatron full ones; the check
    tests only an actor that it reads so.
    """

    def is_megatron(job: VerlJob) -> bool:
        return job.strategies[model] == "megatron"

    return apply_if(lambda job: model in job.models, [
        at_least(f"verl.{model}_has_a_replica", (DEVICES, SEQUENCE[model]),
            (f"{model}: the {{:,}} devices", lambda job: job.devices),
            ("the {:,} that share a sample", lambda job: job.model_sizes[model]),
            when=lambda job: not is_megatron(job) or job.devices % max(job.model_sizes[model], 1) == 0,
            note=": there is no replica", found_by="run"),
        multiple(f"verl.megatron_starts_{model}", (DEVICES,), _DEVICES, _model_size(model),
            when=lambda job: is_megatron(job) and (model != "actor" or not job.checks_megatron), found_by="run"),
    ])  # fmt: skip


def _one_of_two(kind: str, total: Callable[[VerlJob], int]) -> Rules:
    """Return the rules that exactly one of a deprecated micro size and its successor is
    set.
    """
    old, new = OLD_MICROS[kind], MICROS[kind]

    def follows(
        job: VerlJob,
    ) -> bool:  # since 0.5 the default of the critic's micro size is the deprecated key
        return kind == "critic" and new not in job.settings.given and job.era >= 5

    def new_value(job: VerlJob) -> Any:
        return job[old if follows(job) else new]

    return apply_if(lambda job: job.is_static(kind), [
        Rule(name=f"verl.{kind}_micro_given", keys=(new,), holds=lambda job: job[old] is not None or new_value(job) is not None,
            message=lambda job: f"{new} must be set (or a token budget used, {DYNAMIC})",
            # The largest divisor up to 8 is a good start.
            candidates=lambda job: sorted(divisors(total(job)), key=lambda n: (n > 8, -n if n <= 8 else n))),
        Rule(name=f"verl.{kind}_micro_given_once", keys=(old, new),
            holds=lambda job: job[old] is None or new_value(job) is None, message=lambda job: (
                f"{old}={job[old]:,} and {new}={new_value(job):,} must not both be set; "
                + ("the second is the first by default, so the first can never be used" if follows(job)
                   else "the first is deprecated")), candidates=lambda job: [None]),
    ])  # fmt: skip


def _checked_model(name: str) -> Rules:
    """Return what the check asks of the actor or the critic. A deprecated micro size
    counts the samples of the whole job.
    """
    prefix = "" if name == "actor" else "critic_"
    micro, sequence, packing = (
        keys[name] for keys in (OLD_MICROS, OLD_SEQUENCE, PACKING)
    )
    mini: Side[VerlJob] = (
        f"{MINIS[name]}={{:,}}",
        lambda job: job.trained[name].mini_batch,
    )

    def is_fsdp(job: VerlJob) -> bool:
        return job.strategies[name].startswith("fsdp")

    def given(job: VerlJob) -> bool:
        return job.is_static(name) and job[micro] is not None

    def packs(job: VerlJob) -> bool:  # until 0.4 only with the strategy `fsdp` itself
        reads = name == "actor" or (job.old_workers and job.has_critic)
        return (
            reads
            and job[sequence] > 1
            and (job.strategies[name] == "fsdp" or (is_fsdp(job) and job.era >= 5))
        )

    def near(job: VerlJob) -> list[int | None]:
        whole = sorted(
            divisors(job.trained[name].mini_batch),
            key=lambda n: (abs(n - job[micro]), n),
        )
        return [*whole, *range(job.devices, job.devices + 64), None]

    return [
        at_least(f"verl.{prefix}mini_at_most_train", (MINIS[name], TRAIN), TRAIN, mini,
            when=lambda job: job.is_static(name) and job.era >= 3, note="; both count prompts"),
        multiple(f"verl.{name}_old_micro_divides_mini", (micro, MINIS[name]), mini, micro, when=given, candidates=near),
        at_least(f"verl.{name}_old_micro_reaches_every_device", (micro, sequence),
            lambda job: product({micro: job[micro], sequence: job[sequence] if is_fsdp(job) else 1}), _DEVICES,
            when=lambda job: given(job) and (name == "actor" or is_fsdp(job)), candidates=near),
        Rule(name=f"verl.{prefix}sequence_parallel_needs_packing", keys=(packing, sequence), when=packs,
            holds=lambda job: job[packing], message=lambda job: f"{sequence}={job[sequence]:,} needs {packing}=true",
            candidates=lambda job: [True]),
    ]  # fmt: skip


def _minimal_batch(job: VerlJob) -> Term:
    text = (
        "the replicas times the micro batch size"
        if job.strategies["actor"] == "megatron"
        else "the devices"
    )
    if job.strategies["actor"] != "megatron" and job.replicas["actor"] != job.devices:
        needed = (
            f"the run itself would need only the {job.replicas['actor']:,} replicas"
        )
        text += f" ({needed}: the check ignores that devices share a sequence)"
    return Term(f"{job.minimal_batch or 0:,}, {text}", job.minimal_batch or 0)


def _strategy_fits(name: str, *, checked: bool) -> Rule[VerlJob]:
    """Return the rule that a strategy is one of the engine's; the check finds only
    Megatron's, and with a static batch.
    """
    key = f"{PREFIXES[name]}.strategy"

    def applies(job: VerlJob) -> bool:
        is_read = (
            name == "actor"
            and job.foreign_strategy(key) == "megatron"
            and job.is_static(name)
            and not job.fully_async
        )
        return name in job.models and checked == is_read

    return Rule(name=f"verl.{name}_strategy_fits_engine", keys=("model_engine", key), when=applies,
        holds=lambda job: job.foreign_strategy(key) is None,
        message=lambda job: f"{key}={job[key]} is not a backend of model_engine={job['model_engine']}, whose configuration has "
            f"none of its sizes{'' if checked else ': the engine stops'}",
        candidates=lambda job: [engine for engine, backend in ENGINES.items() if job[key].startswith(backend)],
        found_by="validator" if checked else "run")  # fmt: skip


# veRL's own check. A token budget skips most of it.
_CHECK: Rules = apply_if(lambda job: not job.fully_async and job.era >= 2, [
    multiple("verl.megatron_divides_devices", (DEVICES, f"{ACTOR}.megatron.tensor_model_parallel_size"), _DEVICES,
        _model_size("actor"), when=lambda job: job.checks_megatron),
    multiple("verl.samples_fill_minimal_batch", (TRAIN, RESPONSES),
        lambda job: product({TRAIN: job[TRAIN], RESPONSES: job.samples_per_prompt}, "samples"), _minimal_batch,
        when=lambda job: job.checks_step),
    *_checked_model("actor"), *_checked_model("critic"),
])  # fmt: skip
# The classes of veRL's settings check these, so they hold for every trainer that uses
# them.
_CHECK += [
    _strategy_fits("actor", checked=True),
    Rule(name="verl.keys_fit_engine", keys=("model_engine",), holds=lambda job: not job.foreign_keys(),
        message=lambda job: f"{' and '.join(job.foreign_keys()[:2])} must not be set with model_engine={job['model_engine']}, "
            "whose configuration has no such keys", candidates=lambda job: list(ENGINES)),
    *apply_if(lambda job: job.era >= 2, [
        *_one_of_two("actor", lambda job: job.policy.share),
        Rule(name="verl.megatron_micro_per_gpu_needed", keys=(MICRO, OLD_MICRO),
            when=lambda job: job.is_static("actor") and job.checked_as_megatron and job[OLD_MICRO] is not None,
            holds=lambda job: job[MICRO] is not None,
            message=lambda job: f"{MICRO} must be set with Megatron, instead of {OLD_MICRO}={job[OLD_MICRO]:,}",
            division=lambda job: (job.policy.share, 1)),
        *_one_of_two("rollout", lambda job: job.step_share()),
        *_one_of_two("ref", lambda job: job.step_share("ref")),
        *_one_of_two("critic", lambda job: job.trained["critic"].mini_batch),
    ]),
    Rule(name="verl.known_keys", keys=("data.train_batch_size",), holds=lambda job: not job.unknown_keys(),
        message=lambda job: f"{_listed(job.unknown_keys())} must be written with `+`, or left out: no base file of veRL "
            f"{job[WORD]} has it. A fork with keys of its own: give one on rampup's command line", candidates=lambda job: None),
]  # fmt: skip


def _listed(keys: Mapping[str, Located], most: int = 4) -> str:
    shown = with_lines(keys)
    return ", ".join(shown[:most]) + (
        f" and {len(shown) - most} more" if len(shown) > most else ""
    )


def _per_gpu_needed(kind: str, when: Condition) -> Rule[VerlJob]:
    """Return the rule against a deprecated key that passes the check, after which
    nothing reads it.
    """
    old, new = OLD_MICROS[kind], MICROS[kind]
    return Rule(name=f"verl.{kind}_micro_per_gpu_needed", keys=(new, old),
        when=lambda job: job[old] is not None and when(job), holds=lambda job: job[new] is not None, message=lambda job: (
            f"{new} must be set: {old}={job[old]:,} passes the check, but nothing reads it and the workers stop silently"),
        division=lambda job: (job.policy.share, 1))  # fmt: skip


def _mini_divides(name: str) -> Rules:
    """Return what a worker asserts of its mini batch."""
    return apply_if(lambda job: name in job.models, [
        multiple(f"verl.{name}_mini_divides_over_replicas", (MINIS[name], RESPONSES),
            lambda job: product({MINIS[name]: job.trained[name].mini_batch, RESPONSES: job.samples_per_prompt}, "samples"),
            _replicas(name)),
        multiple(f"verl.{name}_mini_divides_share", (TRAIN, MINIS[name]),
            ("with trainer.use_v1=false each replica's {:,} samples", lambda job: job.samples // job.replicas[name]),
            ("its mini batch of {:,}", lambda job: job.trained[name].share),
            when=lambda job: not job.v1 and job.trained[name].mini_samples % job.replicas[name] == 0,
            note="; the newer trainer would pad them"),
    ])  # fmt: skip


def _log_prob(kind: str) -> Rule[VerlJob]:
    """Return the rule that log-probability passes have equal sizes."""
    key, model = MICROS[kind], MODEL[kind]
    return multiple(f"verl.{kind}_micro_divides_share", (key, TRAIN),
        ("each replica's {:,} samples of a step", lambda job: job.step_share(model)), key,
        when=lambda job: model in job.models and not job.dynamic[kind] and job[key] is not None and not job.old_workers,
        note=" when log-probabilities are computed")  # fmt: skip


def _equal_chunks(model: str) -> Rule[VerlJob]:
    """Return the rule that samples divide over replicas; the newer trainer pads for the
    actor and the critic only.
    """
    return multiple(f"verl.samples_divide_over_{model}_replicas", (TRAIN, RESPONSES),
        ("{:,} samples", lambda job: job.padded_part_samples), _replicas(model), when=lambda job: model in job.models,
        note=": only equal chunks are dispatched")  # fmt: skip


def _old_micro_reaches_replicas(kind: str) -> Rule[VerlJob]:
    """Return the rule that a whole job's size gives each replica a sample; the older
    workers divide it.
    """
    old = OLD_MICROS[kind]
    return at_least(f"verl.{kind}_old_micro_reaches_every_replica", (old,), old, _replicas(kind if kind in MINIS else "actor"),
        when=lambda job: (
            job.old_workers and job[old] is not None and MODEL[kind] in job.models
            and (kind in MINIS or not job.dynamic[kind])))  # fmt: skip


def _old_worker(name: str) -> Rules:
    """Return what the older workers ask of a mini batch, which they round down, and of
    a pass: to divide it, or to fit.
    """

    def size(job: VerlJob) -> int:  # 0 also if there is no mini batch
        return (job.pass_size(name) or 0) if job.mini_shares[name] > 0 else 0

    def divides(job: VerlJob) -> bool:
        return job.era not in (2, 3) or job[OLD_MICROS[name]] is not None

    share: Side[VerlJob] = (
        "each replica's {:,} samples of a mini batch",
        lambda job: job.mini_shares[name],
    )
    micro: Side[VerlJob] = ("the {:,} of a pass", size)
    keys = (MICROS[name], OLD_MICROS[name], MINIS[name])
    return apply_if(lambda job: job.old_workers and name in job.models, [
        at_least(f"verl.{name}_mini_reaches_every_replica", (MINIS[name], RESPONSES), share, 1),
        multiple(f"verl.{name}_pass_divides_mini", keys, share, micro, when=lambda job: size(job) > 0 and divides(job),
            note=", also with a token budget"),
        at_least(f"verl.{name}_pass_fits_mini", keys, share, micro,
            when=lambda job: size(job) > 0 and not divides(job) and job.is_static(name),
            note=": the loss is divided by the passes of a full mini batch, which would be 0"),
        multiple(f"verl.{name}_minis_fill_share", (TRAIN, MINIS[name]),
            ("each replica's {:,} samples of a step", lambda job: job.step_share(name)), share,
            when=lambda job: job.mini_shares[name] > 0 and (job.era == 1 or job.strategies[name] == "megatron")),
    ])  # fmt: skip


# What only the run finds.
_RUN: Rules = [
    *map(_old_micro_reaches_replicas, ("actor", "critic", "rollout", "ref")),
    *_old_worker("actor"), *_old_worker("critic"),
    _strategy_fits("actor", checked=False), _strategy_fits("critic", checked=False),
    *apply_if(lambda job: not job.old_workers, [
        Rule(name="verl.dynamic_everywhere", keys=(DYNAMICS["rollout"], DYNAMIC),
            holds=lambda job: job.dynamic["actor"] == job.dynamic["rollout"],
            message=lambda job: f"{DYNAMICS['rollout']}={str(job.dynamic['rollout']).lower()} must equal "
                f"{DYNAMIC}={str(job.dynamic['actor']).lower()}; the workers stop without a message",
            candidates=lambda job: [job.dynamic["actor"]]),
        _per_gpu_needed("actor", lambda job: job.is_static("actor") and job.strategies["actor"] != "megatron"),
        _per_gpu_needed("rollout", lambda job: job.is_static("rollout")),
        _per_gpu_needed("ref", lambda job: "ref" in job.models and not job.dynamic["ref"]),
        *_mini_divides("actor"), *_mini_divides("critic"),
    ]),
    multiple("verl.micro_divides_mini", (MICRO, MINI), lambda job: Term(
        f"{MINI} * {RESPONSES} // replicas = {job.policy.mini_samples:,} // {job.policy.replicas:,} = "
        f"{job.policy.share:,} samples",
        job.policy.share), MICRO, when=lambda job: job.micro is not None and not job.old_workers),
    _log_prob("rollout"), _log_prob("ref"),
    *map(_equal_chunks, ("actor", "critic", "ref")),
    multiple("verl.samples_divide_over_workers", (TRAIN, WORKERS), lambda job: Term(
        f"{'with trainer.use_v1=false ' if job.era >= 9 else ''}the {job.samples:,} samples of a step", job.samples),
        WORKERS, when=lambda job: job.has_agents),
    multiple("verl.parts_divide_train", (TRAIN,), TRAIN, ("parameter_sync_step={:,}", lambda job: job.sync_step)),
    equal("verl.part_is_one_mini_batch", (TRAIN, MINI), TRAIN,
        lambda job: product({"parameter_sync_step": job.sync_step, MINI: job.policy.mini_batch}),
        when=lambda job: job.mode == "separate_async", note=" with trainer_mode=separate_async"),
    multiple("verl.loader_divides_train", (GEN, TRAIN), TRAIN, GEN,
        when=lambda job: job.v1 and not job.fetches_one and job[GEN] is not None),
    multiple("verl.engines_divide_devices", ROLLOUT_SIZES, ("the {:,} devices that generate", lambda job: job.rollout_devices),
        ("an engine's tensor * data * pipeline parallel size = {:,}", lambda job: job.rollout_size),
        when=lambda job: bool(job.settings.given & set(ROLLOUT_SIZES))),
    multiple("verl.fsdp_size_divides_devices", (FSDP_SIZE,), _DEVICES, FSDP_SIZE,
        when=lambda job: job.strategies["actor"].startswith("fsdp") and 0 < job[FSDP_SIZE] < job.devices),
    equal("verl.torchtitan_fills_devices", (f"{ACTOR}.torchtitan.{TORCHTITAN_REPLICAS[0]}", DEVICES),
        lambda job: product({"replicas": job.replicas["actor"], "devices of a replica": job.model_sizes["actor"]}), _DEVICES,
        when=lambda job: job.strategies["actor"] == "torchtitan"),
    *apply_if(lambda job: job.fully_async, [
        equal("verl.async_train_batch_is_zero", (TRAIN,), TRAIN, 0, candidates=lambda job: [0],
            note=" in fully asynchronous training, which has no batch of prompts"),
        equal("verl.async_gen_batch_is_one", (GEN,), GEN, 1, when=lambda job: job[GEN] is not None,
            note=" in fully asynchronous training"),
    ]),
    at_least("verl.data_set_fills_a_step", ("num_prompts", TRAIN),
        ("a data set of {:,} prompts", lambda job: job["num_prompts"]), ("a step's {:,}", lambda job: job.prompts),
        when=lambda job: job["num_prompts"] is not None),
]  # fmt: skip
_EMPTY = "the run divides by it or stays empty"
POSITIVE: Rules = [
    *positive("verl", [TRAIN], f"{_EMPTY}; only fully asynchronous training, whose files set {ASYNC}*, wants 0",
        when=lambda job: not job.fully_async, found_by="run"),
    *[rule for key in COUNTS
      for rule in positive("verl", [key], _EMPTY, found_by="validator" if key.startswith("trainer.n") else "run")],
    *positive("verl", STATIC_COUNTS, "the run divides by it", when=lambda job: job.is_static("actor"), found_by="run"),
    *positive("verl", CRITIC_COUNTS, "the critic needs it", when=lambda job: job.has_critic, found_by="run"),
    *[rule for role in ("critic", REF) for name in (*TORCHTITAN_SIZES, *TORCHTITAN_REPLICAS)
      for rule in positive("verl", [f"{role}.torchtitan.{name}"], _EMPTY, found_by="run",
          when=lambda job: "torchtitan" in job.strategies.values())],
]  # fmt: skip
RULES: Rules = [
    *POSITIVE,
    *positive("verl", ["num_prompts", "trainer.total_epochs"], "nothing would be trained", found_by="run"),
    *[rule for model in PREFIXES for rule in _model_starts(model)],
    *apply_if(usable, [*_CHECK, *found_by_run(_RUN)]),
]  # fmt: skip
DIALECT = Dialect(
    job=VerlJob,
    rules=RULES,
    meanings=_meanings,
    notes=_notes,
    reader=read,
    launch=LAUNCH,
)

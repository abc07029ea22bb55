"""The rules of veRL: those of its own check, and those that only the run finds, where trainers and workers assert them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rampup.dialects import verl as keys
from rampup.dialects.rules import Dialect, Rule, Side, apply_if, at_least, equal, found_by_run, if_usable, multiple, positive
from rampup.dialects.verdict import Term, product
from rampup.dialects.verl import LOG_PROB, MICRO, MINI, OLD_MICRO, RESPONSES, TRAIN
from rampup.dialects.verl.explain import WORDS
from rampup.dialects.verl.job import COUNTS, CRITIC_COUNTS, STATIC_COUNTS, VerlJob
from rampup.plan.numbers import divisors

DEVICES = "trainer.n_gpus_per_node"
PACKING = "actor_rollout_ref.model.use_remove_padding"
MINIS = {"actor": MINI, "critic": keys.CRITIC_MINI}
Rules = list[Rule[VerlJob]]
Condition = Callable[[VerlJob], bool]


def _static(job: VerlJob) -> bool:
    return not job.dynamic


def _critic_static(job: VerlJob) -> bool:
    return job.has_critic and not job.critic_dynamic


def _mini(name: str) -> Side[VerlJob]:
    return f"{MINIS[name]}={{:,}}", lambda job: job.trained[name].mini_batch


def _mini_share(name: str) -> Callable[[VerlJob], Term]:
    """Return the samples of a mini batch that one replica gets, rounded down."""

    def term(job: VerlJob) -> Term:
        own = job.trained[name]
        arithmetic = f"{MINIS[name]} * {RESPONSES} // replicas = {own.mini_samples:,} // {own.replicas:,}"
        return Term(f"{arithmetic} = {own.share:,} samples", own.share)

    return term


def _replicas(model: str) -> Side[VerlJob]:
    return f"the {model}'s {{:,}} replicas", lambda job: job.replicas[model]


def _nearest_divisors(number: int, value: int) -> list[int]:
    return sorted(divisors(number), key=lambda n: (abs(n - value), n))


# Devices and replicas.


_DEVICES: Side[VerlJob] = ("the {:,} devices", lambda job: job.devices)


def _model_size(model: str) -> Side[VerlJob]:
    return f"the {model}'s tensor * pipeline * context parallel size = {{:,}}", lambda job: job.model_sizes[model]


def _by_megatron(job: VerlJob, model: str) -> bool:
    return model in job.models and job.strategies[model] == "megatron"


def _checks_megatron(job: VerlJob) -> bool:
    return _static(job) and job.checked_as_megatron and not job.unchecked


def _device_rules(model: str) -> Rules:
    """Return the rules that a model has a replica, and that Megatron starts on full ones."""
    has_a_replica: Rule[VerlJob] = at_least(f"verl.{model}_has_a_replica", (DEVICES, keys.SEQUENCE[model]),
        lambda job: Term(f"{model}: the {job.devices:,} devices", job.devices),
        ("the {:,} that share a sample", lambda job: job.model_sizes[model]),
        when=lambda job: (
            model in job.models and (job.strategies[model] != "megatron" or job.devices % max(job.model_sizes[model], 1) == 0)),
        note=": there is no replica")  # fmt: skip
    # The check tests it only for the actor of a static batch whose strategy it reads as Megatron.
    starts: Rule[VerlJob] = multiple(f"verl.megatron_starts_{model}", (DEVICES,), _DEVICES, _model_size(model),
        when=lambda job: _by_megatron(job, model) and (model != "actor" or not _checks_megatron(job)))  # fmt: skip
    return found_by_run([has_a_replica, starts])


def _positive(key: str) -> Rule[VerlJob]:
    why = "the run divides by it or stays empty"
    if key == TRAIN:
        why += f"; only fully asynchronous training, whose files set {keys.ASYNC}*, wants 0"
    (rule,) = positive("verl", [key], why, when=lambda job: key in job.counts,
        found_by="validator" if key.startswith("trainer.n") else "run")  # fmt: skip
    return rule


_DEVICE_RULES = [_device_rules(model) for model in ("actor", "critic", "ref")]
_FIRST: Rules = [
    *[_positive(key) for key in COUNTS],
    *found_by_run(
        [
            *positive("verl", STATIC_COUNTS, "the run divides by it", when=_static),
            *positive("verl", CRITIC_COUNTS, "the critic needs it", when=lambda job: job.has_critic),
            *positive("verl", ["num_prompts", "trainer.total_epochs"], "nothing would be trained"),
        ]
    ),
    *[has_a_replica for has_a_replica, _ in _DEVICE_RULES],
    *[starts for _, starts in _DEVICE_RULES],
]  # fmt: skip


# veRL's own check. A token budget skips most of it.


def _one_of_two(name: str, old: str, new: str, total: Callable[[VerlJob], int], when: Condition = _static) -> Rules:
    """Return the rules that exactly one of a deprecated micro size and its successor is set."""

    def new_value(job: VerlJob) -> int | None:
        return job.critic_micro if new == keys.CRITIC_MICRO else job[new]

    def note(job: VerlJob) -> str:
        if new == keys.CRITIC_MICRO and new not in job.settings.given:
            return "the second is the first by default, so the first can never be used"
        return "the first is deprecated"

    given: Rule[VerlJob] = Rule(
        name=f"verl.{name}_given",
        keys=(new,),
        when=when,
        holds=lambda job: job[old] is not None or new_value(job) is not None,
        message=lambda job: f"{new} must be set (or a token budget used, {keys.DYNAMIC})",
        # The largest divisor up to 8 is a good start.
        candidates=lambda job: sorted(divisors(total(job)), key=lambda n: (n > 8, -n if n <= 8 else n)),
    )
    given_once: Rule[VerlJob] = Rule(name=f"verl.{name}_given_once", keys=(old, new), when=when,
        holds=lambda job: job[old] is None or new_value(job) is None,
        message=lambda job: f"{old}={job[old]:,} and {new}={new_value(job):,} must not both be set; {note(job)}",
        candidates=lambda job: [None])  # fmt: skip
    return [given, given_once]


def _deprecated_micro(name: str, key: str, when: Condition) -> Rules:
    """Return the check's rules for a deprecated micro batch size, which counts the samples of the whole job."""
    sequence = keys.OLD_SEQUENCE[name]

    def fsdp(job: VerlJob) -> bool:
        return job.strategies[name].startswith("fsdp")

    def given(job: VerlJob) -> bool:
        return when(job) and job[key] is not None

    def near(job: VerlJob) -> list[int | None]:
        return [*_nearest_divisors(job.trained[name].mini_batch, job[key]), *range(job.devices, job.devices + 64), None]

    return [
        multiple(f"verl.{name}_old_micro_divides_mini", (key, MINIS[name]), _mini(name), key, when=given, candidates=near),
        at_least(f"verl.{name}_old_micro_reaches_every_device", (key, sequence),
            lambda job: product({key: job[key], sequence: job[sequence] if fsdp(job) else 1}), _DEVICES,
            when=lambda job: given(job) and (name == "actor" or fsdp(job)), candidates=near),
    ]  # fmt: skip


def _minimal_batch(job: VerlJob) -> Term:
    text = "the replicas times the micro batch size"
    if job.strategies["actor"] != "megatron":
        text = "the devices"
        if job.replicas["actor"] != job.devices:
            needed = f"the run itself would need only the {job.replicas['actor']:,} replicas"
            text += f" ({needed}: the check ignores that devices share a sequence)"
    return Term(f"{job.minimal_batch or 0:,}, {text}", job.minimal_batch or 0)


def _mini_at_most_train(rule: str, name: str, when: Condition) -> Rule[VerlJob]:
    return at_least(f"verl.{rule}", (MINIS[name], TRAIN), TRAIN, _mini(name), when=when, note="; both count prompts")


_NO_SIZES = "whose configuration has none of its sizes"


def _engine_of(strategy: str | None) -> list[str]:
    """Return the `model_engine` whose configuration is made for a strategy."""
    return [engine for engine, backend in keys.ENGINES.items() if strategy is not None and strategy.startswith(backend)]


def _strategy_fits(name: str, key: str, why: str, *, checked: bool) -> Rule[VerlJob]:
    """Return the rule that a strategy is one of the engine's; the check finds only Megatron's, and with a static batch."""

    def applies(job: VerlJob) -> bool:
        reads_megatron = name == "actor" and job.foreign_strategy(key) == "megatron" and _static(job) and not job.unchecked
        return (name == "actor" or job.has_critic) and checked == reads_megatron

    return Rule(name=f"verl.{name}_strategy_fits_engine", keys=("model_engine", key), when=applies,
        holds=lambda job: job.foreign_strategy(key) is None,
        message=lambda job: f"{key}={job[key]} is not a backend of model_engine={_engine_of(job.engine)[0]}, {why}",
        candidates=lambda job: _engine_of(job[key]), found_by="validator" if checked else "run")  # fmt: skip


_CHECK: Rules = apply_if(lambda job: not job.unchecked, [
    multiple("verl.megatron_divides_devices", (DEVICES, f"{keys.ACTOR}.megatron.tensor_model_parallel_size"), _DEVICES,
        _model_size("actor"), when=_checks_megatron),
    multiple("verl.samples_fill_minimal_batch", (TRAIN, RESPONSES),
        lambda job: product({TRAIN: job[TRAIN], RESPONSES: job.samples_per_prompt}, "samples"), _minimal_batch,
        when=_static),
    _mini_at_most_train("mini_at_most_train", "actor", _static),
    *_deprecated_micro("actor", OLD_MICRO, _static),
    Rule(name="verl.sequence_parallel_needs_packing", keys=(PACKING, keys.OLD_SEQUENCE["actor"]),
        when=lambda job: job.strategies["actor"].startswith("fsdp") and job[keys.OLD_SEQUENCE["actor"]] > 1,
        holds=lambda job: job[PACKING],
        message=lambda job: f"{keys.OLD_SEQUENCE['actor']}={job[keys.OLD_SEQUENCE['actor']]:,} needs {PACKING}=true",
        candidates=lambda job: [True]),
    *_deprecated_micro("critic", keys.OLD_CRITIC_MICRO, _critic_static),
    _mini_at_most_train("critic_mini_at_most_train", "critic", _critic_static),
])  # fmt: skip
# The classes of veRL's settings check these, so they hold for every trainer that uses them.
_CHECK += apply_if(lambda job: not job.distills, [
    _strategy_fits("actor", f"{keys.ACTOR}.strategy", _NO_SIZES, checked=True),
    Rule(name="verl.keys_fit_engine", keys=("model_engine",), holds=lambda job: not job.foreign_keys(),
        message=lambda job: (
            f"{' and '.join(job.foreign_keys()[:2])} must not be set with model_engine={_engine_of(job.engine)[0]}, whose "
            "configuration has no such keys"),
        candidates=lambda job: list(keys.ENGINES)),
    *_one_of_two("actor_micro", OLD_MICRO, MICRO, lambda job: job.policy.share),
    Rule(name="verl.megatron_micro_per_gpu_needed", keys=(MICRO, OLD_MICRO),
        when=lambda job: not job.dynamic and job.checked_as_megatron and job[OLD_MICRO] is not None,
        holds=lambda job: job[MICRO] is not None,
        message=lambda job: f"{MICRO} must be set with Megatron, instead of {OLD_MICRO}={job[OLD_MICRO]:,}",
        division=lambda job: (job.policy.share, 1)),
    *_one_of_two("rollout_micro", keys.OLD_LOG_PROB, LOG_PROB, lambda job: job.step_share()),
    *_one_of_two("ref_micro", keys.OLD_REF_LOG_PROB, keys.REF_LOG_PROB, lambda job: job.step_share("ref"),
        when=lambda job: _static(job) and job.has_ref),
    *_one_of_two("critic_micro", keys.OLD_CRITIC_MICRO, keys.CRITIC_MICRO, lambda job: job.trained["critic"].mini_batch,
        _critic_static),
])  # fmt: skip


# What only the run finds.


def _per_gpu_needed(name: str, old: str, new: str, when: Condition) -> Rule[VerlJob]:
    """Return the rule against a deprecated key that passes the check, after which nothing reads it."""
    return Rule(name=f"verl.{name}_micro_per_gpu_needed", keys=(new, old),
        when=lambda job: job[old] is not None and when(job), holds=lambda job: job[new] is not None,
        message=lambda job: (
            f"{new} must be set: {old}={job[old]:,} passes the check, but nothing reads it and the workers stop silently"),
        division=lambda job: (job.policy.share, 1))  # fmt: skip


def _mini_divides(name: str) -> Rules:
    """Return what a worker asserts of its mini batch."""

    def samples(job: VerlJob) -> Term:
        return product({MINIS[name]: job.trained[name].mini_batch, RESPONSES: job.samples_per_prompt}, "samples")

    return apply_if(lambda job: name in job.models, [
        multiple(f"verl.{name}_mini_divides_over_replicas", (MINIS[name], RESPONSES), samples, _replicas(name)),
        multiple(f"verl.{name}_mini_divides_share", (TRAIN, MINIS[name]),
            ("with trainer.use_v1=false each replica's {:,} samples", lambda job: job.samples // job.replicas[name]),
            ("its mini batch of {:,}", lambda job: job.trained[name].share),
            when=lambda job: not job.v1 and samples(job).number % job.replicas[name] == 0,
            note="; the newer trainer would pad them"),
    ])  # fmt: skip


def _log_prob(name: str, key: str, model: str, dynamic: Condition) -> Rule[VerlJob]:
    """Return the rule that log-probability passes have equal sizes; the code until April 2026 allowed a remainder."""
    return multiple(f"verl.{name}_micro_divides_share", (key, TRAIN),
        ("each replica's {:,} samples of a step", lambda job: job.step_share(model)), key,
        when=lambda job: model in job.models and not dynamic(job) and job[key] is not None,
        note=" when log-probabilities are computed")  # fmt: skip


def _equal_chunks(model: str) -> Rule[VerlJob]:
    """Return the rule that samples divide over replicas; the newer trainer pads for the actor and the critic only."""
    return multiple(f"verl.samples_divide_over_{model}_replicas", (TRAIN, RESPONSES),
        ("{:,} samples", lambda job: job.padded_part_samples), _replicas(model), when=lambda job: model in job.models,
        note=": only equal chunks are dispatched")  # fmt: skip


def _legacy(name: str, key: str, micro: Callable[[VerlJob], int | None]) -> Rules:
    """Return what the workers until April 2026 asserted of sizes per replica, each rounded down."""

    def near(job: VerlJob) -> list[int]:
        # The deprecated key counts the samples of all replicas.
        found = _nearest_divisors(job.trained[name].share, micro(job) or 1)
        return [*found, *(factor * job.replicas[name] for factor in found)]

    return apply_if(lambda job: name in job.models, [
        at_least(f"verl.legacy_{name}_mini_reaches_every_replica", (MINIS[name], RESPONSES),
            ("{:,} samples of a mini batch", lambda job: job.trained[name].mini_samples), _replicas(name)),
        Rule(name=f"verl.legacy_{name}_micro_divides_mini", keys=(key, MINIS[name]),
            when=lambda job: micro(job) is not None and job.trained[name].share > 0,
            holds=lambda job: (micro(job) or 0) > 0 and job.trained[name].share % (micro(job) or 1) == 0,
            message=lambda job: f"{_mini_share(name)(job).text} must be a multiple of the micro batch of {micro(job) or 0:,}",
            candidates=near),
    ])  # fmt: skip


_TODAY: Rules = [
    Rule(name="verl.dynamic_everywhere", keys=(f"{keys.ROLLOUT}.log_prob_use_dynamic_bsz", keys.DYNAMIC),
        holds=lambda job: job.dynamic == job.rollout_dynamic,
        message=lambda job: (
            f"{keys.ROLLOUT}.log_prob_use_dynamic_bsz={str(job.rollout_dynamic).lower()} must equal "
            f"{keys.DYNAMIC}={str(job.dynamic).lower()}; the workers stop without a message"),
        candidates=lambda job: [job.dynamic]),
    _per_gpu_needed("actor", OLD_MICRO, MICRO, lambda job: not job.dynamic and job.strategies["actor"] != "megatron"),
    _per_gpu_needed("rollout", keys.OLD_LOG_PROB, LOG_PROB, _static),
    _per_gpu_needed("ref", keys.OLD_REF_LOG_PROB, keys.REF_LOG_PROB, lambda job: job.has_ref and not job.ref_dynamic),
    *_mini_divides("actor"),
    *_mini_divides("critic"),
    multiple("verl.micro_divides_mini", (MICRO, MINI), _mini_share("actor"), MICRO, when=lambda job: job.micro is not None),
    _log_prob("rollout", LOG_PROB, "actor", lambda job: job.rollout_dynamic),
    _log_prob("ref", keys.REF_LOG_PROB, "ref", lambda job: job.ref_dynamic),
]  # fmt: skip
_DISTILLATION: Rules = [
    # torch's split leaves a short last pass; numpy's array_split of the teacher's tokens makes equal ones.
    Rule(name="verl.distill_micro_divides_share", keys=(keys.DISTILL_MICRO, TRAIN),
        when=lambda job: job.micro is not None and job.samples % job.replicas["actor"] == 0,
        holds=lambda job: job.policy.share <= (job.micro or 1) or -job.policy.share % (job.micro or 1) <= 1,
        message=lambda job: (
            f"each replica's {job.policy.share:,} samples must be a multiple of {keys.DISTILL_MICRO}={job.micro:,}, or one "
            "less: the teacher's tokens are split into equal passes"),
        division=lambda job: (job.policy.share, job.micro or 1)),
    multiple("verl.prompts_divide_over_engines", (TRAIN, keys.ROLLOUT_DEVICES), ("{:,} prompts", lambda job: job.prompts),
        ("the {:,} engines", lambda job: job.rollout_devices // job.rollout_size), note=": only equal chunks are dispatched"),
]  # fmt: skip
_ASYNC: Rules = [
    equal("verl.async_train_batch_is_zero", (TRAIN,), TRAIN, 0, candidates=lambda job: [0],
        note=" in fully asynchronous training, which has no batch of prompts"),
    equal("verl.async_gen_batch_is_one", (keys.GEN,), keys.GEN, 1, when=lambda job: job[keys.GEN] is not None,
        note=" in fully asynchronous training"),
]  # fmt: skip
_LEGACY: Rules = [
    *_legacy("actor", MICRO, lambda job: job.micro),
    *_legacy("critic", keys.CRITIC_MICRO, lambda job: None if job.critic_dynamic else job.critic_micro),
]
_RUN: Rules = [
    *[_strategy_fits(name, f"{prefix}.strategy", _NO_SIZES + ": the engine stops", checked=False)
      for name, prefix in (("actor", keys.ACTOR), ("critic", "critic"))],
    *apply_if(lambda job: not job.legacy and not job.distills, _TODAY),
    *apply_if(lambda job: job.distills, _DISTILLATION),
    *map(_equal_chunks, ("actor", "critic", "ref")),
    multiple("verl.samples_divide_over_workers", (TRAIN, keys.WORKERS),
        ("with trainer.use_v1=false the {:,} samples of a step", lambda job: job.samples), keys.WORKERS,
        when=lambda job: not job.v1 and not job.legacy and not job.unchecked),
    multiple("verl.parts_divide_train", (TRAIN,), TRAIN, ("parameter_sync_step={:,}", lambda job: job.sync_step)),
    equal("verl.part_is_one_mini_batch", (TRAIN, MINI), TRAIN,
        lambda job: product({"parameter_sync_step": job.sync_step, MINI: job.policy.mini_batch}),
        when=lambda job: job.mode == "separate_async", note=" with trainer_mode=separate_async"),
    multiple("verl.loader_divides_train", (keys.GEN, TRAIN), TRAIN, keys.GEN,
        when=lambda job: job.v1 and not job.fetches_one and job[keys.GEN] is not None),
    multiple("verl.engines_divide_devices", keys.ROLLOUT_SIZES,
        ("the {:,} devices that generate", lambda job: job.rollout_devices),
        ("an engine's tensor * data * pipeline parallel size = {:,}", lambda job: job.rollout_size),
        when=lambda job: bool(job.settings.given & set(keys.ROLLOUT_SIZES))),
    multiple("verl.fsdp_size_divides_devices", (keys.FSDP_SIZE,), _DEVICES, keys.FSDP_SIZE,
        when=lambda job: job.strategies["actor"].startswith("fsdp") and 0 < job[keys.FSDP_SIZE] < job.devices),
    equal("verl.torchtitan_fills_devices", (f"{keys.ACTOR}.torchtitan.{keys.TORCHTITAN_REPLICAS[0]}", DEVICES),
        lambda job: product({"replicas": job.replicas["actor"], "devices of a replica": job.model_sizes["actor"]}), _DEVICES,
        when=lambda job: job.strategies["actor"] == "torchtitan"),
    *apply_if(lambda job: job.fully_async, _ASYNC),
    at_least("verl.data_set_fills_a_step", ("num_prompts", TRAIN),
        ("a data set of {:,} prompts", lambda job: job["num_prompts"]), ("a step's {:,}", lambda job: job.prompts),
        when=lambda job: job["num_prompts"] is not None),
    *apply_if(lambda job: job.legacy, _LEGACY),
]  # fmt: skip
RULES: list[Rule[Any]] = [*_FIRST, *if_usable([*_CHECK, *found_by_run(_RUN)])]
DIALECT = Dialect(job=VerlJob, rules=RULES, words=WORDS, launch=keys.LAUNCH)

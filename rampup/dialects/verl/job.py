"""The numbers that follow from a veRL file: replicas, padding, mini batches.

Sources: veRL `trainer/ppo`, `workers/engine_workers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rampup.dialects import verl as keys
from rampup.dialects.reading import Settings
from rampup.dialects.rollout import RolloutJob, TrainedModel
from rampup.dialects.verdict import Run
from rampup.dialects.verl import ACTOR, LOG_PROB, MICRO, MINI, OLD_MICRO, RESPONSES, TRAIN
from rampup.rl.plan import RolloutPlan

PREFIXES = {"actor": ACTOR, "critic": "critic", "ref": keys.REF}
CRITIC_BUDGET = 32_768
COUNTS = (
    *(TRAIN, keys.GEN, RESPONSES, MINI, keys.BUDGET, keys.EPOCHS, keys.ASYNC_BATCHES, keys.ASYNC_SYNC, keys.DISTILL_BUDGET),
    *(keys.OLD_SEQUENCE["actor"], keys.SEQUENCE["actor"], f"{ACTOR}.veomni.ulysses_parallel_size"),
    *(f"{role}.megatron.{name}" for role in (ACTOR, keys.REF) for name in keys.MEGATRON_SIZES),
    *(f"{ACTOR}.torchtitan.{name}" for name in (*keys.TORCHTITAN_SIZES, *keys.TORCHTITAN_REPLICAS)),
    *(keys.OLD_SEQUENCE["ref"], keys.SEQUENCE["ref"], f"{keys.REF}.veomni.ulysses_parallel_size"),
    *(*keys.ROLLOUT_SIZES, keys.WORKERS, "trainer.n_gpus_per_node", "trainer.nnodes"),
    *(f"trainer.v1.{mode}.parameter_sync_step" for mode in keys.MODES),
)
STATIC_COUNTS = (OLD_MICRO, MICRO, keys.DISTILL_MICRO, keys.OLD_LOG_PROB, LOG_PROB, keys.OLD_REF_LOG_PROB, keys.REF_LOG_PROB)
CRITIC_COUNTS = (
    *(keys.CRITIC_MINI, keys.OLD_CRITIC_MICRO, keys.CRITIC_MICRO, "critic.ppo_epochs"),
    *(keys.OLD_SEQUENCE["critic"], keys.SEQUENCE["critic"], "critic.veomni.ulysses_parallel_size"),
    *(f"critic.megatron.{name}" for name in keys.MEGATRON_SIZES),
)


class VerlJob(RolloutJob):
    """A veRL file's numbers, by veRL's own formulas."""

    data_epochs = "trainer.total_epochs"

    @property
    def version(self) -> str:  # type: ignore[override]
        """The version of veRL."""
        if self.legacy:
            return "veRL until April 2026 (b178a3c); without verl_version=legacy, veRL of August 2026"
        return "veRL of August 2026 (1dda039); verl_version=legacy is for veRL until April 2026"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # The recipe gkd distills from a served teacher, with a trainer of its own: no check, critic or log-probabilities, one
        # response per prompt, and one update with all samples of a step (gkd/megatron/ray_trainer.py, megatron_workers.py).
        served = any(name.startswith(("actor_rollout_ref.teacher.", "teacher.")) for name in settings.others)
        self.distills: bool = served or self[keys.DISTILL_BUDGET] is not None
        self.has_critic = not self.distills and bool(self._or("critic.enable", self["algorithm.adv_estimator"] == "gae"))
        self.has_ref: bool = not self.distills and (self["algorithm.use_kl_in_reward"] or self[f"{ACTOR}.use_kl_loss"])
        self.models = ("actor", *(["critic"] if self.has_critic else []), *(["ref"] if self.has_ref else []))
        # Until April 2026 (legacy) sizes per replica were rounded down and remainders allowed. The newer trainer (v1) pads.
        self.legacy: bool = self["verl_version"] == "legacy" and not self.distills
        # A file of the fully asynchronous trainer, which builds on the older one and does not call veRL's check.
        # Other trainers borrow some of its keys, such as partial_rollout.
        given = {key for key in (keys.ASYNC_BATCHES, keys.ASYNC_SYNC) if self[key] is not None}
        if self[TRAIN] == 0:
            given |= {key for key in settings.others if key.startswith(keys.ASYNC)}
        self.fully_async = bool(given)
        self.unchecked = self.fully_async or self.distills  # trainers that do not call veRL's check
        self.v1: bool = self["trainer.use_v1"] and not self.legacy and not self.unchecked
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
        self.rollout_devices = self.devices  # those of the inference engines
        if self.fully_async or self[keys.ROLLOUT_NODES] is not None or self[keys.ROLLOUT_DEVICES] is not None:
            self.rollout_devices = self._or(keys.ROLLOUT_NODES, 1) * self._or(keys.ROLLOUT_DEVICES, 8)
        # The backend of the base files; None if the source has none, or chooses those of a model by `actor@...=`.
        grouped = any("@" in name for name in settings.others)
        self.engine: str | None = None if grouped else keys.ENGINES.get(self["model_engine"])
        self.strategies = dict.fromkeys(PREFIXES, self._strategy(self[f"{ACTOR}.strategy"], "fsdp"))
        self.strategies["critic"] = self._strategy(self["critic.strategy"], self.strategies["actor"])
        self.model_sizes = {model: self._model_size(model) for model in PREFIXES}
        self.replicas = {model: self._replicas(model) for model in PREFIXES}
        # Keys that must be positive. Fully asynchronous training has no batch of prompts.
        self.counts = [key for key in COUNTS if not (self.fully_async and key == TRAIN)]
        self.rollout_size = math.prod(self[key] for key in keys.ROLLOUT_SIZES)

        counts = (*self.counts, *(() if self.dynamic else STATIC_COUNTS), *(CRITIC_COUNTS if self.has_critic else ()))
        self.usable = all(self[key] is None or self[key] >= 1 for key in counts) and all(
            self.replicas[model] >= 1 for model in self.models
        )
        if not self.usable:
            return

        self.samples_per_prompt: int = 1 if self.distills else self[RESPONSES]
        # The older trainer's data loader returns gen_batch_size prompts if that is set. DAPO's generates until train_batch_size
        # prompts are left, and the asynchronous one waits for some mini batches.
        self.prompts: int = self[TRAIN] if self.v1 or self[keys.FILTER] else self._or(keys.GEN, self[TRAIN])
        if self.fully_async:
            self.prompts = self._or(keys.ASYNC_BATCHES, 1) * self[MINI]
        # The newer trainer fetches prompts one by one where the number that it needs is not known before.
        self.fetches_one = self.v1 and (self.mode != "sync" or self[keys.FILTER] or self[keys.REFILL])
        # Samples of a training pass and replica; None with a token budget, or if no key that is used sets it.
        self.micro: int | None = None if self.dynamic else self[MICRO]
        if not self.dynamic and self[MICRO] is None and self[OLD_MICRO] is not None and self.legacy:
            self.micro = self[OLD_MICRO] // self.replicas["actor"]
        if self.distills and not self.dynamic:
            self.micro = self._or(keys.DISTILL_MICRO, 2)
        # The check wants the samples of a step to be a multiple of this; None if it cannot compute it.
        self.minimal_batch: int | None = self.devices
        if self.checked_as_megatron:
            self.minimal_batch = None if self[MICRO] is None else self.replicas["actor"] * self[MICRO]
        # Tokens of a pass and replica: the budget of all devices that share a sequence.
        shares = self[f"{ACTOR}.megatron.context_parallel_size"]
        self.token_budget: int = (self._or(keys.DISTILL_BUDGET, 1024) if self.distills else self[keys.BUDGET]) * (
            shares if self.strategies["actor"] == "megatron" else self.model_sizes["actor"]
        )

        self.trained = {name: self._trained(name) for name in self.models if name != "ref"}
        if self.micro:
            self.passes = -(-self.policy.share // self.micro) if self.distills else self.policy.share // self.micro

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

    def _strategy(self, given: str | None, default: str) -> str:
        """Return the backend of a model: that of the base files, of which only FSDP's read the strategy."""
        return given or self.engine or default if self.engine in (None, "fsdp") else self.engine

    @property
    def checked_as_megatron(self) -> bool:
        """Whether veRL's check, which reads the strategy alone, expects Megatron's sizes."""
        return self.strategies["actor"] == "megatron" and self[f"{ACTOR}.strategy"] in (None, "megatron")

    def foreign_strategy(self, key: str) -> str | None:
        """Return a model's strategy if its configuration class, that of `model_engine`, is made for another backend."""
        given: str | None = self[key]
        if given is None or self.engine is None or given.startswith(self.engine):
            return None
        # FSDP's engine is chosen by the strategy; of the actor's, these two are looked up by name (engine_workers.py).
        looked_up = given in ("megatron", "veomni") and key.startswith(ACTOR)
        return given if self.engine == "fsdp" or looked_up or self.legacy else None

    def foreign_keys(self) -> list[str]:
        """Return the keys of backends that are not those of the base files, of models that take part."""
        if self.engine is None:
            return []
        sections = [name for name in keys.MODEL_SIZES if name != self.engine]
        sections += [] if self.engine == "fsdp" else ["fsdp_config", "fsdp"]
        foreign = tuple(f"{PREFIXES[model]}.{section}." for model in self.models for section in sections)
        return sorted(name for name in self.settings.given | self.settings.others if name.startswith(foreign))

    def _product(self, model: str, names: Iterable[str]) -> int:
        """Return the product of sizes of a model's backend; an unset one is the actor's."""
        strategy = self.strategies[model]
        return math.prod(self._or(f"{PREFIXES[model]}.{strategy}.{name}", self[f"{ACTOR}.{strategy}.{name}"]) for name in names)

    def _model_size(self, model: str) -> int:
        """Return how many devices share one sample."""
        if self.strategies[model] in keys.MODEL_SIZES:
            return self._product(model, keys.MODEL_SIZES[self.strategies[model]])
        old = self[keys.OLD_SEQUENCE["actor"]]
        if model == "critic":
            # Until April 2026 its workers read the old key; since then only the check does.
            old = self[keys.OLD_SEQUENCE["critic"]] if self.legacy else 1
        elif model == "ref":
            old = self._or(keys.OLD_SEQUENCE["ref"], old)
        return int(old if old > 1 else self[keys.SEQUENCE[model]])

    def _replicas(self, model: str) -> int:
        """Return the data-parallel size; a number of devices that does not divide is rounded down."""
        if self.strategies[model] == "torchtitan":
            return self._product(model, keys.TORCHTITAN_REPLICAS)
        return int(self.devices // max(self.model_sizes[model], 1))

    def _trained(self, name: str) -> TrainedModel:
        mini, epochs, micro = self[MINI], self[keys.EPOCHS], self.micro
        tokens = self.token_budget if self.dynamic else None
        if self.distills:
            mini, epochs = self.prompts, 1
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
        derived = super().derived()
        if self.legacy:
            derived["mini_batch_samples"] = self.policy.share * self.policy.replicas
        if self.fully_async and self["num_prompts"] is not None:  # its loader gives prompts one by one and drops none
            derived["training_steps"] = self["num_prompts"] * self[self.data_epochs] // self.prompts
            derived["total_optimizer_steps"] = derived["training_steps"] * derived["optimizer_steps"]
        return derived

    @property
    def outcome(self) -> Run:
        """Fully asynchronous training drops only the prompts at the end of the run that fill no step."""
        if not self.fully_async:
            return super().outcome
        return "drops" if (self["num_prompts"] or 0) * self[self.data_epochs] % self.prompts else "runs"

    def plan(self) -> RolloutPlan | None:
        """Return the plan of a step that is trained on as generated."""
        return None if self.padded_samples or self.legacy or self.sync_step > 1 else self.rollout_plan()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self["data.max_prompt_length"] + self["data.max_response_length"])

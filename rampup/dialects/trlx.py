"""trlX: keys, numbers and rules, those of its check and those that only the run finds, with Accelerate or NeMo.

Sizes count samples of one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rampup.config.yaml import Located
from rampup.dialects.commands import Launch, option
from rampup.dialects.reading import Entry, Settings, entry, flatten
from rampup.dialects.rollout import RolloutJob, TrainedModel
from rampup.dialects.rules import Dialect, Rule, Side, at_least, found_by_run, if_usable, multiple, positive
from rampup.dialects.script import Command
from rampup.dialects.verdict import Advice, Run, Words, counted, product, times
from rampup.rl.plan import RolloutPlan

TRAIN, MICRO = "train.batch_size", "train.minibatch_size"
ROLLOUTS, CHUNK, INNER = "method.num_rollouts", "method.chunk_size", "method.ppo_epochs"
GENERATIONS, IMPROVE = "method.n_generations_per_prompt", "method.n_improve_steps"
# NeMo's own file, or the mapping in its place under train.trainer_kwargs.megatron_cfg.
NEMO_KEYS = {
    "num_nodes": "trainer.num_nodes",
    "devices": "trainer.devices",
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
}
NEMO_NESTED = {name: f"train.trainer_kwargs.megatron_cfg.{key}" for name, key in NEMO_KEYS.items()}

KEYS: dict[str, Entry] = {
    TRAIN: entry(None, "samples of an optimizer step; 32 for PPO, 128 for ILQL, 8 for SFT", unit="samples"),
    MICRO: entry(None, "samples of a pass; null or 0 = all", unit="samples"),
    "train.epochs": entry(100, "rounds of collecting and training"),
    "train.total_steps": entry(10_000, "optimizer steps at most", unit="steps"),
    "train.trainer": entry("AcceleratePPOTrainer", "the trainer class", kind="text"),
    "method.name": entry("PPOConfig", "the method's configuration class", kind="text"),
    ROLLOUTS: entry(128, "samples to collect before training", unit="samples"),
    CHUNK: entry(128, "prompts of a generate call", unit="prompts"),
    INNER: entry(4, "times that the collected samples are trained on"),
    GENERATIONS: entry(32, "RFT: responses per prompt of a growth step"),
    IMPROVE: entry(4, "RFT: epochs on each set of responses, with a rising threshold", unit="steps"),
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_KEYS.items()},
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_NESTED.items()},
    "num_processes": entry(1, "processes; given as num_processes=N"),
    "num_prompts": entry(None, "prompts of the training set, or samples of an offline one", unit="prompts"),
    "deepspeed": entry(False, "whether DeepSpeed runs under Accelerate; given as deepspeed=true", kind="bool"),
}  # fmt: skip


def read_words(command: Command, path: str) -> dict[str, Located]:
    """Return the keys of the JSON argument of a trlX script, and Accelerate's processes."""
    located: dict[str, Located] = {}
    for word in command.words:
        if word.startswith("{"):
            try:
                found = json.loads(word)
            except (ValueError, RecursionError):
                continue
            located |= {name: Located(value=value, path=path, line=command.line or None) for name, value in flatten(found)}
    processes = option(command, "--num_processes", "--num-processes")
    if processes is not None:
        value = int(processes) if processes.isdigit() else processes
        located["num_processes"] = Located(value=value, path=path, line=command.line or None)
    return located


LAUNCH = Launch(
    system="trlX",
    program=re.compile(r"accelerate launch|trlx|\b(?:ppo|ilql|sft|rft|nemo)_\w+\.py"),
    example="accelerate launch --num_processes 8 ppo_sentiments.py '{\"train.batch_size\": 32}'",
    entries=KEYS,
    groups=("model", "optimizer", "scheduler", "tokenizer"),
    read=read_words,
)


MAX_LISTED = 10_000
# Defaults of the library's three ready-made configurations: PPO, ILQL, SFT.
BATCH_SIZES: Mapping[str, int] = {"ppo": 32, "ilql": 128, "sft": 8}
METHODS = ("ilql", "sft", "rft", "ppo")


class TrlxJob(RolloutJob):
    """A trlX file's numbers, by its own formulas (trainer/accelerate_base_trainer.py, trainer/nemo_ppo_trainer.py)."""

    version = "trlX of January 2024 (3340c2f), its last"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        text = (self["method.name"] + self["train.trainer"]).lower()
        self.method = next((name for name in METHODS if name in text), "ppo")
        # PPO collects samples from the model before it trains, RFT selects the best of them; the others train on given ones.
        self.ppo, self.rft = self.method == "ppo", self.method == "rft"
        nemo_keys = {*NEMO_KEYS.values(), *NEMO_NESTED.values()}
        self.nemo = "nemo" in self["train.trainer"].lower() or bool(settings.given & nemo_keys)

        # Sizes of one process (with NeMo: of one data-parallel replica).
        self.batch: int = BATCH_SIZES.get(self.method, 1) if self[TRAIN] is None else self[TRAIN]
        self.micro_given: int = self[MICRO] or 0
        self.micro = self.micro_given or self.batch
        sizes = {name: 1 if self[NEMO_NESTED[name]] is None else self[NEMO_NESTED[name]] for name in NEMO_KEYS}
        sizes |= {name: self[key] for name, key in NEMO_KEYS.items() if self[key] is not None}
        self.nodes, self.devices_per_node = sizes["num_nodes"], sizes["devices"]
        self.model_size = sizes["tensor"] * sizes["pipeline"]
        self.replicas: int = self["num_processes"]
        if self.nemo:
            self.replicas = self.nodes * self.devices_per_node // max(self.model_size, 1)  # NeMo rounds down

        counts = (TRAIN, "num_processes", "num_prompts", *((ROLLOUTS, CHUNK, INNER) if self.ppo else ()), *nemo_keys)
        counts += (GENERATIONS, IMPROVE) if self.rft else ()
        self.usable = (
            all(self[key] is None or self[key] >= 1 for key in counts)
            and self.micro_given >= 0
            and (not self.nemo or (self.replicas >= 1 and self[MICRO] != 0))
        )
        if not self.usable:
            return
        self.passes: int = self.batch // self.micro
        self.global_batch = self.batch * self.replicas
        if self.ppo:
            self._collect()

    def _collect(self) -> None:
        """Compute what PPO collects before it trains: whole chunks until there are enough samples."""
        wanted: int = self[ROLLOUTS]
        self.chunk: int = -(-self[CHUNK] // self.batch) * self.batch if self.nemo else self[CHUNK]  # NeMo: whole batches
        # A single process meets a short chunk at the end of each pass over the prompts. With several processes Accelerate
        # completes it from the beginning, and NeMo drops it.
        self.prompts_per_pass = None if self.nemo or self.replicas > 1 else self["num_prompts"]
        if self.prompts_per_pass is None:
            self.num_chunks = -(-wanted // self.chunk)
            self.collected = self.num_chunks * self.chunk
        else:
            rounds, rest = divmod(wanted - 1, self.prompts_per_pass)
            last = -(-(rest + 1) // self.chunk)
            self.num_chunks = rounds * -(-self.prompts_per_pass // self.chunk) + last
            self.collected = rounds * self.prompts_per_pass + min(last * self.chunk, self.prompts_per_pass)
        self.prompts, self.samples_per_prompt = self.collected * self.replicas, 1
        size = self.global_batch
        self.trained = {
            "policy": TrainedModel(
                name="policy", mini_batch=size, mini_samples=size, replicas=self.replicas, micro=self.micro, epochs=self[INNER]
            )
        }
        # Accelerate's last mini batch is short, NeMo drops it. NeMo plans with what is wanted, not with what is collected.
        self.mini_batches: int = self.collected // self.batch if self.nemo else -(-self.collected // self.batch)
        self.last_batch = self.batch if self.nemo else self.collected - (self.mini_batches - 1) * self.batch
        self.train_samples: int = self.replicas * wanted * self[INNER]
        per_round = self.train_samples // (self.batch * self.replicas) if self.nemo else self.mini_batches * self[INNER]
        self.planned_steps: int = min(self["train.epochs"] * per_round, self["train.total_steps"])

    def num_mini_batches(self, _: TrainedModel) -> int:
        """Return the updates of a pass over a round's samples; the last one may be short."""
        return self.mini_batches

    def chunk_sizes(self) -> list[int]:
        """Return the prompts of each generate call, in order."""
        sizes, left = [], self.prompts_per_pass
        for _ in range(self.num_chunks):
            sizes.append(self.chunk if left is None else min(self.chunk, left))
            if left is not None:
                left = left - sizes[-1] or self.prompts_per_pass
        return sizes

    @property
    def first_passes(self) -> int:
        """Passes of the first optimizer step, which is short if fewer samples than a batch are collected."""
        return -(-min(self.batch, self.collected) // self.micro) if self.ppo else self.passes

    @property
    def outcome(self) -> Run:
        """NeMo's loaders drop prompts that do not fill a chunk; Accelerate's keep all of them."""
        num_prompts = self["num_prompts"]
        if not (self.nemo and self.ppo) or num_prompts is None:
            return "runs"
        return "drops" if num_prompts % self.replicas or num_prompts // self.replicas % self.chunk else "runs"

    def summary(self) -> str:
        """Return the numbers of a round, or of an optimizer step, in one line."""
        processes = counted(self.replicas, "replica" if self.nemo else "process")
        step = times(processes, counted(self.passes, "pass"), self.micro)
        if not self.ppo:
            return f"{counted(self.global_batch, 'sample')} per optimizer step; {step}"
        collected = f"{times(processes, self.collected)} = {counted(self.samples, 'sample')}"
        return f"{collected}; {counted(self.updates(self.policy), 'optimizer step')} of {self.global_batch:,}; {step}"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "data_parallel_size": self.replicas,
            "micro_batch_samples_per_process": self.micro,
            "accumulation_steps": self.passes,
            "mini_batch_samples": self.global_batch,
        }
        if not self.ppo:
            return derived
        # Without evaluation prompts of its own, trlX takes a global batch of the training prompts.
        eval_prompts, num_prompts = self.global_batch, self["num_prompts"]
        derived |= {
            "rollouts_per_process": self.collected,
            "samples_per_step": self.samples,
            "num_chunks": self.num_chunks,
            "mini_batches": self.mini_batches,
            "optimizer_steps": self.updates(self.policy),
            "total_optimizer_steps": self.planned_steps,
            "eval_prompts": eval_prompts if num_prompts is None else min(eval_prompts, num_prompts),
        }
        if self.num_chunks <= MAX_LISTED:
            derived["chunks"] = self.chunk_sizes()
        if self.passes <= MAX_LISTED:
            full, rest = divmod(self.last_batch, self.micro)
            derived["last_mini_batch_microbatches"] = [self.micro] * full + ([rest] if rest else [])
        if self.nemo:
            derived |= {"chunk_size": self.chunk, "train_samples": self.train_samples, "max_steps": self.planned_steps}
        return derived

    def plan(self) -> RolloutPlan | None:
        """Return the plan of one round of collecting and training."""
        if not self.ppo or self.planned_steps < 1:
            return None
        return self.rollout_plan("samples", pad=self.last_batch < self.batch)


GUIDE = "a community guide to trlX"


def _meanings(job: TrlxJob) -> Iterator[tuple[str, str]]:
    yield (
        f"{counted(job.replicas, 'data-parallel replica')} (NeMo)" if job.nemo else counted(job.replicas, "process"),
        "each collects samples of its own and trains on them; gradients are averaged over them",
    )
    yield (
        TRAIN if TRAIN in job.settings.given else f"{TRAIN} = {job.batch:,} (default)",
        f"samples per process: {counted(job.global_batch, 'sample')} per optimizer step",
    )
    yield (MICRO, f"{counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} per process and optimizer step")
    if job.rft:
        total = "" if job["num_prompts"] is None else f", {counted(job['num_prompts'] * job[GENERATIONS], 'sample')} in all"
        yield GENERATIONS, f"{counted(job[GENERATIONS], 'response')} to every prompt of the data set{total}"
        yield IMPROVE, f"{counted(job[IMPROVE], 'epoch')} on the best of them, with a rising threshold; then generate again"
    if not job.ppo:
        return
    over = job.collected - job[ROLLOUTS]
    yield from [
        (ROLLOUTS, f"at least this many per process: {counted(job.collected, 'sample')} are collected"
         + (f", {over:,} more than requested" if over else "")
         + f", {job.collected * job.replicas:,} in total"),
        (CHUNK, f"{counted(job.num_chunks, 'generate call')} of {counted(job.chunk, 'prompt')} per process"
         + (", rounded up to full batches" if job.chunk != job[CHUNK] else "")),
        (INNER, f"{counted(job.mini_batches, 'mini batch')} per pass over the samples, "
         f"{counted(job.updates(job.policy), 'optimizer step')} per round"),
    ]  # fmt: skip
    limit = "train.total_steps" if job.planned_steps == job["train.total_steps"] else "train.epochs"
    yield (
        f"{job.settings.describe('train.epochs')}, {job.settings.describe('train.total_steps')}",
        f"{counted(job.planned_steps, 'optimizer step')}: {limit} ends the run",
    )
    yield ("", f"an evaluation uses {counted(job.global_batch, 'prompt')}, unless there are fewer or separate ones")


def _flow(job: TrlxJob) -> Iterator[str]:
    step = (
        f"each optimizer step: {counted(job.passes, 'pass')} of {counted(job.micro, 'sample')} on every process, gradients "
        f"summed, then one step over {counted(job.global_batch, 'sample')}"
    )
    if job.rft:
        responses = counted(job[GENERATIONS], "response")
        yield f"every {counted(job[IMPROVE], 'epoch')}: generate {responses} to every prompt, and score them"
        yield "each epoch: keep the responses above the threshold of their prompt, each once, distributed over the processes"
        yield step
        return
    if not job.ppo:
        yield "load the given samples, distributed over the processes"
        yield step
        return
    chunks = f"{counted(job.num_chunks, 'chunk')} of {counted(job.chunk, 'prompt')}"
    yield f"each process generates {chunks}: {counted(job.collected, 'sample')}"
    yield "log-probabilities, values and rewards, chunk by chunk, while collecting"
    last = f", the last of {counted(job.last_batch, 'sample')}" if job.last_batch < job.batch else ""
    mini_batches = counted(job.mini_batches, "mini batch")
    yield f"train on the process's own samples, reshuffled for each pass: {mini_batches}{last}"
    yield step
    total = counted(job.updates(job.policy), "optimizer step")
    yield f"{counted(job[INNER], 'pass')} over the samples = {total}; the learning rate advances with each"
    yield "the trained model generates the next round: there are no weights to send"


def _advice(job: TrlxJob) -> Iterator[Advice]:
    yield Advice("minibatch_size saves memory and does not change training", GUIDE, None,
        "the number of samples is the same, but gradients of the passes are summed, not averaged: they are "
        f"{job.passes:,} times as large here")  # fmt: skip
    if not job.ppo:
        return
    yield from [
        Advice("chunk_size divides num_rollouts", GUIDE, job[ROLLOUTS] % job[CHUNK] == 0,
            f"{job[ROLLOUTS]:,} requested, {job.collected:,} collected"),
        Advice("batch_size divides num_rollouts", GUIDE, job.collected % job.batch == 0,
            f"the last of {counted(job.mini_batches, 'mini batch')} has {counted(job.last_batch, 'sample')}"),
    ]  # fmt: skip


def _notes(job: TrlxJob) -> Iterator[str]:
    yield f"{TRAIN}, {MICRO}, {ROLLOUTS} and {CHUNK} are per process; this run has {counted(job.replicas, 'process')}."
    if job.passes > 1 and not job.nemo:
        yield (
            f"gradients are summed over the {job.passes:,} passes, not averaged: {job.passes:,} times those of one pass. "
            "Adam hides it; gradient clipping, epsilon and plain SGD do not."
        )
        ends = "each pass ends" if job["deepspeed"] else "(deepspeed=true) each pass would end"
        yield (
            f"under DeepSpeed {ends} in an optimizer step: {job.passes:,} optimizer steps of "
            f"{counted(job.micro * job.replicas, 'sample')} instead of one."
        )
    if job.nemo:
        yield from _nemo_notes(job)
    elif job.ppo:
        yield from _collection_notes(job)
    if job[MICRO] == 0:
        yield f"{MICRO}=0 is the same as null."
    if job.rft:
        yield "RFT trains on the samples above a threshold, so the optimizer steps of an epoch are not known before the run."
        yield "num_rollouts, chunk_size and ppo_epochs have no effect with RFT."
    elif not job.ppo:
        yield f"{job.method.upper()} trains on given samples: num_rollouts, chunk_size and ppo_epochs have no effect."


def _collection_notes(job: TrlxJob) -> Iterator[str]:
    if job.collected != job[ROLLOUTS]:
        more = job.collected - job[ROLLOUTS]
        yield f"{more:,} more samples are collected than requested: full chunks, until there are enough."
    if job.last_batch < job.batch:
        yield (
            f"the last mini batch of each pass has {job.last_batch:,} of {job.batch:,} samples and the same weight as others."
        )
    num_prompts = job["num_prompts"]
    if num_prompts is None:
        yield "the size of the prompt set is unknown (give num_prompts=N): every chunk is assumed to be full."
    elif job.replicas == 1 and num_prompts % job[CHUNK]:
        yield (
            f"every pass over the {num_prompts:,} prompts ends with a chunk of {num_prompts % job[CHUNK]:,}, so later rounds "
            "may collect a different number of samples than the first, from which trlX computes the planned steps."
        )


def _nemo_notes(job: TrlxJob) -> Iterator[str]:
    devices = job.nodes * job.devices_per_node
    if devices % job.model_size:
        yield (f"{devices:,} devices do not divide by {job.model_size:,}: trlX counts {job.replicas:,} replicas, rounded down.")
    if not job.ppo:
        return
    if job.chunk != job[CHUNK]:
        yield f"{CHUNK}={job[CHUNK]:,} is rounded up to {job.chunk:,}, a multiple of {TRAIN}={job.batch:,}."
    trained = job.updates(job.policy)
    if trained * job.global_batch != job.train_samples:
        yield (
            f"the length of the run is planned with {job.train_samples:,} samples a round, but {trained:,} optimizer steps of "
            f"{job.global_batch:,} are made."
        )
    if job["num_prompts"] is not None:
        lost = job["num_prompts"] % job.replicas + job["num_prompts"] // job.replicas % job.chunk * job.replicas
        if lost:
            yield f"{counted(lost, 'prompt')} of {job['num_prompts']:,} fill no chunk and are dropped in each pass over them."


_BATCH: Side[TrlxJob] = (f"{TRAIN}={{:,}}", lambda job: job.batch)
_MICRO: Side[TrlxJob] = (f"{MICRO}={{:,}}", lambda job: job.micro)


_COUNTS: list[Rule[TrlxJob]] = [
    *positive("trlx", [TRAIN], "the trainer divides by it"),
    *found_by_run(
        positive("trlx", [ROLLOUTS, CHUNK, INNER], "nothing would be collected or trained", when=lambda job: job.ppo)
    ),
    Rule(name="trlx.rft_batch_given", keys=(TRAIN,), when=lambda job: job.rft, holds=lambda job: job[TRAIN] is not None,
        message=lambda job: f"{TRAIN} must be set: trlX has no ready-made configuration for RFT"),
    *found_by_run(
        positive("trlx", [GENERATIONS, IMPROVE], "there would be nothing to select from", when=lambda job: job.rft)
    ),
    *found_by_run(positive("trlx", ["num_processes", "num_prompts"], "there would be nothing to train")),
    *positive("trlx", [*NEMO_KEYS.values(), *NEMO_NESTED.values()], "the trainer divides by it"),
    Rule(name="trlx.micro_not_negative", keys=(MICRO,), holds=lambda job: job.micro_given >= 0,
        message=lambda job: f"{MICRO}={job.micro_given:,} must not be negative: no pass would be made",
        candidates=lambda job: [0], found_by="run"),
    *found_by_run(positive("trlx", [MICRO], "with NeMo 0 is not the same as unset", when=lambda job: job.nemo)),
    at_least("trlx.nemo_has_a_replica", tuple(NEMO_KEYS[name] for name in ("devices", "num_nodes", "tensor", "pipeline")),
        lambda job: product({"num_nodes": job.nodes, "devices": job.devices_per_node}),
        ("tensor * pipeline parallel size = {:,}", lambda job: job.model_size), when=lambda job: job.nemo,
        note=": trlX divides by the number of replicas, rounded down"),
]  # fmt: skip
_RULES: list[Rule[TrlxJob]] = [
    multiple("trlx.micro_divides_batch", (MICRO, TRAIN), _BATCH, _MICRO, when=lambda job: not job.nemo),
    multiple("trlx.nemo_micro_divides_batch", (MICRO, TRAIN), _BATCH, _MICRO, when=lambda job: job.nemo,
        note=": Megatron splits the global batch into micro batches on every replica", found_by="run"),
    Rule(name="trlx.total_steps_reached", keys=("train.total_steps",),
        holds=lambda job: (
            job["train.total_steps"] >= 1 or (job["train.total_steps"] == 0 and 0 < job.first_passes < job.passes)),
        message=lambda job: (
            f"train.total_steps={job['train.total_steps']:,} must be at least 1: the first optimizer step already exceeds "
            "it, and trlX stops in the middle of that step"),
        found_by="run"),
    at_least("trlx.epochs_train", ("train.epochs",), "train.epochs", 1, note=": nothing would be trained",
        found_by="run"),
    at_least("trlx.nemo_prompts_fill_a_chunk", ("num_prompts", CHUNK), ("num_prompts={:,}", lambda job: job["num_prompts"]),
        lambda job: product({"replicas": job.replicas, "the prompts of a chunk": job.chunk}),
        when=lambda job: job.nemo and job.ppo and job["num_prompts"] is not None,
        note=": incomplete chunks are dropped, so the run waits for prompts indefinitely", found_by="run"),
]  # fmt: skip
RULES = [*_COUNTS, *if_usable(_RULES)]
DIALECT = Dialect(
    job=TrlxJob,
    rules=RULES,
    words=Words(_meanings, _flow, _notes, _advice),
    launch=LAUNCH,
    shared=frozenset(NEMO_KEYS.values()),
)

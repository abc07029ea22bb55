"""A step of reinforcement learning: generate, reward, and train each model on the samples, one program per role.

The story of one rollout, top to bottom:

1. `RolloutStep.update` is one optimizer step. Before the first one of a rollout it generates the samples (`_collect`): calls of
   the generator, the reward function, the log-probabilities of the policy and the reference, the critic's values, advantages.
   They are stored as arrays on the host, a part of the state, so that a checkpoint between two updates has them.
   If mini batches keep the order of generation, an update waits for its own samples only, and a thread generates the next ones
   meanwhile, by a copy of the weights from before the first update. Samples and updates are the same without overlap.
2. Every update takes its mini batch from them (`_batch_of`) in rows of one shape, or packed to a token budget.
3. `rampup.run.step.TrainStep` sums the loss over the passes of the mini batch, reduces once and runs the optimizer once.

Shape suffixes: S samples of a rollout, B rows of a call, R tokens of the longest response, T tokens of a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.errors import ConfigError, DataError
from rampup.packing import make_ladder, pack
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.rl.experience import (
    Arrays,
    Reward,
    check_rewards,
    generalized_advantages,
    group_advantages,
    loss_rows,
    packed_rows,
    zero_spread_share,
)
from rampup.rl.generation import Samples, Sampling, make_generate, pad_prompts
from rampup.rl.losses import grpo_loss, value_loss
from rampup.rl.minibatches import mini_batches, overlap
from rampup.rl.plan import RolloutPlan
from rampup.rl.policy import Critic, in_replica, over_rows, token_log_probabilities
from rampup.rl.schedule import RolloutSchedule, UpdatePosition, split_of
from rampup.rl.sizes import Experience
from rampup.run.compile import Compiler
from rampup.run.data.batches import Batch, layout_of, put_chunks
from rampup.run.mesh import BatchAxes, auto_context, batch_sharding
from rampup.run.state import TrainState, create_state
from rampup.run.step import TrainStep, train_step

Prompts = Callable[[int], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How samples are generated and what is learned from them.

    Attributes:
        max_prompt_length, max_response_length: tokens of the longest prompt and response; rows have their sum.
        end_token: ends a response; None = every response has `max_response_length` tokens.
        sampling: how tokens are sampled.
        epsilon, beta: see `rampup.rl.grpo_loss`. Without `beta`, no reference is needed.
        loss_agg_mode: how the losses of tokens add up, one of `rampup.rl.losses.AGGREGATIONS`.
        gamma, lam, value_epsilon: of generalized advantage estimation, and of the critic's loss.
        seed: of the samples.
        shuffle_seed: of the order of samples in mini batches; None keeps the order of generation, so that generation overlaps
            with updates if the first mini batch does not need all calls of the generator.
        keep_prompts_together: keep the samples of a prompt in one mini batch.
        rungs: shapes that passes are padded to with a token budget.
        decode: from the tokens of a prompt or a response, without its end token, to what the reward function gets.
    """

    max_prompt_length: int
    max_response_length: int
    end_token: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    epsilon: float = 0.2
    beta: float = 0.0
    loss_agg_mode: str = "token-mean"
    gamma: float = 1.0
    lam: float = 1.0
    value_epsilon: float = 0.2
    seed: int = 0
    shuffle_seed: int | None = 0
    keep_prompts_together: bool = True
    rungs: int = 4
    decode: Callable[[Sequence[int]], Any] = list

    @property
    def temperature(self) -> float:
        """The temperature of the log-probabilities."""
        return self.sampling.temperature or 1.0


class RolloutState(struct.PyTreeNode):
    """The values that training changes, and the samples of the current rollout.

    Attributes:
        step: optimizer steps done, of all models.
        params, opt_state, policy_step: of the policy.
        critic_params, critic_opt_state, critic_step: of the critic; None without one.
        reference: parameters of the reference policy; None without one.
        experience: NumPy arrays over the samples of the current rollout.
        generator: parameters that generate the rest of the rollout's samples; None if generation does not overlap with updates.
        generated: samples of the rollout in `experience`; None the same.
    """

    step: Any
    params: Any
    opt_state: Any
    policy_step: Any
    critic_params: Any = None
    critic_opt_state: Any = None
    critic_step: Any = None
    reference: Any = None
    experience: Any = None
    generator: Any = None
    generated: Any = None


class RolloutStep:
    """Generates rollouts and trains on them, as a plan describes. Made by `rollout_step`.

    Args:
        model: see `rampup.rl.as_policy`.
        tx: the policy's optimizer.
        schedule: the optimizer steps of the run.
        mesh: the devices.
        reward: `(prompts, responses) -> rewards`, one finite number per sample. It gets lists of what `decode` returns. If
            generation overlaps with updates, it is called in another thread.
        options: see `RolloutOptions`.
        critic: the critic and its optimizer, if the plan has one.
        skip_nonfinite: see `rampup.train_step`.
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        schedule: RolloutSchedule,
        mesh: Mesh,
        *,
        reward: Reward,
        options: RolloutOptions,
        critic: tuple[Critic, optax.GradientTransformation] | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        _check(schedule, options, critic)
        self.schedule, self.options, self._mesh, self._reward = schedule, options, mesh, reward
        self._policy, self._critic = over_rows(model, mesh), critic
        self._tx = {"policy": tx} | ({} if critic is None else {"critic": critic[1]})
        self._plans = {name: ramp_plan(schedule, name) for name in self._tx}
        budgets = {name: schedule.stages[0][1].updates(name).token_budget for name in self._tx}
        self._ladders = {name: make_ladder(b, min(options.rungs, b)) if b else () for name, b in budgets.items()}
        losses = {
            "policy": grpo_loss(
                in_replica(model, mesh),
                epsilon=options.epsilon,
                beta=options.beta,
                temperature=options.temperature,
                shapes=self._ladders["policy"],
            )
        }
        if critic is not None:
            losses["critic"] = value_loss(critic[0].in_replica, epsilon=options.value_epsilon, shapes=self._ladders["critic"])
        train_options: Any = {"seed": options.seed, "skip_nonfinite": skip_nonfinite}
        self._steps: dict[str, TrainStep] = {
            name: train_step(losses[name], tx, self._plans[name], mesh, **train_options) for name, tx in self._tx.items()
        }
        # The generator's calls and the forward passes have rows for every device.
        shards = BatchAxes.of(mesh).num_shards(mesh)
        self._rows = -(-schedule.sequences_per_call // shards) * shards
        self._compilers = {"generate": Compiler(), "logprobs": Compiler()}
        # Held while a program is compiled and enqueued. If two threads enqueued programs in different orders on two devices,
        # their collectives would wait for each other.
        self._dispatching = Lock()
        self._facts: dict[str, Any] = {}
        self._collected: int | None = None
        self._training = _Clock()
        self._generation: dict[str, Any] = {}
        # The next samples of the rollout and the seconds that each part took, while generation overlaps with updates.
        self._coming: Iterator[tuple[Arrays, float]] | None = None
        self.overlaps = options.shuffle_seed is None and any(
            plan.samples_before(0, model=plan.order[0].model, portion=self._portion(plan)) < plan.samples_per_step
            for _, plan in schedule.stages
        )

    @property
    def num_compilations(self) -> int:
        """Programs built so far, of all roles."""
        return sum(self.compilations.values())

    @property
    def compilations(self) -> dict[str, int]:
        """Programs built so far by role. The critic's forward pass counts as `logprobs`, its update as `update`."""
        forward = {role: compiler.num_compilations for role, compiler in self._compilers.items()}
        return forward | {"update": sum(step.num_compilations for step in self._steps.values())}

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for compilations."""
        return self._waited_for(*self._compilers) + sum(step.waited_seconds for step in self._steps.values())

    def _waited_for(self, *roles: str) -> float:
        return sum(self._compilers[role].waited_seconds for role in roles)

    def close(self) -> None:
        """Stop generating, and cancel compilations that have not started."""
        self._stop_generating()
        for part in (*self._compilers.values(), *self._steps.values()):
            part.close()

    def create_state(self, params: Any, *, reference: Any = None, critic_params: Any = None) -> RolloutState:
        """Return the state before the first rollout, placed on the mesh. The arrays are copied.

        Args:
            params: the policy's parameters.
            reference: those of the reference policy, by default the same.
            critic_params: the critic's, if there is one.
        """
        policy = create_state(params, self._tx["policy"], self._mesh)
        found = {
            "step": np.array(0, np.int32),
            "params": policy.params,
            "opt_state": policy.opt_state,
            "policy_step": policy.step,
        }
        if self.options.beta:
            copied = create_state(params if reference is None else reference, optax.identity(), self._mesh)
            found["reference"] = copied.params
        if self._critic is not None:
            critic = create_state(critic_params, self._tx["critic"], self._mesh)
            found |= {"critic_params": critic.params, "critic_opt_state": critic.opt_state, "critic_step": critic.step}
        if self.overlaps:
            found["generated"] = np.array(0, np.int32)
        state = RolloutState(**found, experience=self._empty_experience())
        return state.replace(generator=self._copied(state)) if self.overlaps else state

    def _copied(self, state: RolloutState) -> dict[str, Any]:
        """Return a copy of the weights of all models, which stays when updates reuse the memory of the original."""
        copied: dict[str, Any] = jax.tree.map(jnp.copy, {"policy": state.params, "critic": state.critic_params})
        return copied

    def __call__(self, state: RolloutState, prompts: Sequence[Sequence[int]]) -> tuple[RolloutState, dict[str, Any]]:
        """Run one whole rollout: generate samples for prompts, then train every model on them, without overlap.

        Args:
            state: from `create_state` or the last call, whose memory is reused.
            prompts: the tokens of the prompts of this rollout.

        Returns:
            The new state, and the metrics of the policy's last update with the facts of the rollout.

        Raises:
            DataError: a prompt or a reward is invalid. The state is unchanged.
        """
        position = self.schedule.at(int(state.step))
        metrics: dict[str, Any] = {}
        for number in range(position.step, self.schedule.total_steps):
            here = self.schedule.at(number)
            if here.rollout != position.rollout:
                break
            state = self._with_samples(state, here, lambda _: prompts, here.plan.samples_per_step)
            state, metrics = self._train(state, here)
        host = jax.device_get({name: metrics[name] for name in ("loss", "grad_norm")})
        return state, {name: float(value) for name, value in host.items()} | metrics["facts"]

    def update(self, state: RolloutState, position: UpdatePosition, prompts: Prompts) -> tuple[RolloutState, dict[str, Any]]:
        """Run one optimizer step; before the first one of a rollout, generate its samples, or begin to (see `overlaps`).

        Args:
            state: the state before it, whose memory is reused.
            position: the step.
            prompts: from the number of a rollout to the tokens of its prompts.

        Returns:
            The new state and the step's metrics, as `rampup.train_step` returns them, with the numbers of the host in `facts`.
        """
        plan = position.plan
        needed = plan.samples_per_step
        if self.overlaps:
            needed = plan.samples_before(position.update, model=position.model, portion=self._portion(plan))
        return self._train(self._with_samples(state, position, prompts, needed), position)

    def _train(self, state: RolloutState, position: UpdatePosition) -> tuple[RolloutState, dict[str, Any]]:
        """Run an optimizer step on samples that are there."""
        with self._training:
            batch, facts = self._batch_of(state.experience, position)
            names = ("policy_step", "params", "opt_state")
            if position.model == "critic":
                names = ("critic_step", "critic_params", "critic_opt_state")
            inner = TrainState(*(getattr(state, name) for name in names))
            with self._dispatching:
                inner, metrics = self._steps[position.model](inner, batch)
            changes = dict(zip(names, (inner.step, inner.params, inner.opt_state), strict=True))
            if position.is_last:
                # The next rollout needs the new parameters anyway.
                jax.block_until_ready(inner.params)
        facts |= self._facts
        if position.is_last and self._training.is_complete:
            facts["training_tokens_per_second"] = round(self._training.tokens_per_second(), 3)
        return state.replace(step=np.array(position.step + 1, np.int32), **changes), {**metrics, "facts": facts}

    def evaluate(self, params: Any, prompts: Sequence[Sequence[int]], *, samples_per_prompt: int = 1, seed: int = 0) -> Any:
        """Return the rewards (prompts, samples_per_prompt) of new responses, sampled as in a rollout by the same program."""
        repeated = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        samples = self._generate(params, repeated, jax.random.key(seed), self.options.sampling)
        rewards = check_rewards(self._reward, *self._decoded(samples), where="an evaluation")
        return rewards.reshape(len(prompts), samples_per_prompt)

    # --- the samples of a rollout ---

    def _with_samples(self, state: RolloutState, position: UpdatePosition, prompts: Prompts, needed: int) -> RolloutState:
        """Return the state with at least the first `needed` samples of its rollout. A thread generates the others, if any."""
        plan, total = position.plan, position.plan.samples_per_step
        resumed = not position.is_first and self._collected != position.rollout
        if position.is_first or resumed:
            self._stop_generating()
            self._training.reset(is_complete=not resumed)
            self._generation = {"seconds": 0.0, "wait_seconds": 0.0, "tokens": 0}
        if position.is_first:
            have, experience = 0, self._empty_experience()
            weights = self._copied(state) if needed < total else {"policy": state.params, "critic": state.critic_params}
        else:
            have, experience = total if state.generated is None else int(state.generated), state.experience
            weights = state.generator
        began, waits = time.perf_counter(), self.overlaps and have < needed
        try:
            while have < needed:
                if self._coming is None:
                    asked = self._check_prompts(prompts(position.rollout), position)
                    collect = partial(self._collect, weights, state.reference, position, asked)
                    size = self._portion(plan) if needed < total else total - have
                    spans = [range(start, min(start + size, total)) for start in range(have, total, size)]
                    self._coming = overlap(collect, lambda part: part, spans) if needed < total else map(collect, spans)
                arrays, seconds = next(self._coming)
                experience, have = self._add(experience, arrays, have), have + len(arrays["tokens"])
                self._generation["seconds"] += seconds
                self._generation["tokens"] += int(arrays["response_mask"].sum())
                self._training.tokens += int(arrays["attention_mask"].sum())
        except BaseException:
            self._stop_generating()
            raise
        if have == total:
            self._stop_generating()
        if position.is_first or resumed or waits:
            self._generation["wait_seconds"] += time.perf_counter() - began
            self._facts = self._facts_of(experience, position, have)
        self._collected = position.rollout
        if not self.overlaps:
            return state.replace(experience=experience)
        generator = state.generator if needed == total else weights
        return state.replace(experience=experience, generator=generator, generated=np.array(have, np.int32))

    def _collect(
        self, weights: Any, reference: Any, position: UpdatePosition, prompts: Any, span: range
    ) -> tuple[Arrays, float]:
        """Return the stored arrays of some samples of a rollout (see `rampup.rl.sizes.Experience`), and the seconds it took."""
        options, group = self.options, position.plan.samples_per_prompt
        jax.block_until_ready(weights)
        began, compiled = time.perf_counter(), self._waited_for(*self._compilers)
        key = jax.random.fold_in(jax.random.key(options.seed), position.rollout)
        repeated = [prompt for prompt in prompts for _ in range(group)][span.start : span.stop]
        samples = self._generate(weights["policy"], repeated, key, options.sampling, first=span.start)
        rewards_S = check_rewards(self._reward, *self._decoded(samples), where=f"rollout {position.rollout}", first=span.start)
        arrays = self._store(samples, rewards_S)
        arrays["log_probabilities"] = self._forward("policy", weights["policy"], samples)
        if options.beta:
            arrays["reference_log_probabilities"] = self._forward("policy", reference, samples)
        if self._critic is None:
            advantages_S = group_advantages(rewards_S, group)
            arrays["advantages"] = np.where(arrays["response_mask"], advantages_S[:, None], np.float32(0))
        else:
            arrays["values"] = self._forward("critic", weights["critic"], samples)
        return arrays, time.perf_counter() - began - (self._waited_for(*self._compilers) - compiled)

    def _check_prompts(self, prompts: Sequence[Sequence[int]], position: UpdatePosition) -> Sequence[Sequence[int]]:
        """Return the prompts of a rollout, all of which are legal."""
        if len(prompts) != position.plan.prompts_per_step:
            raise DataError(
                f"rollout {position.rollout} has {position.plan.prompts_per_step} prompts, but {len(prompts)} were given",
                key="batch_size",
                nearest=(position.plan.prompts_per_step,),
            )
        pad_prompts(prompts, self.options.max_prompt_length)
        return prompts

    def _stop_generating(self) -> None:
        """Wait for a call of the generator that is in progress, and make no further one."""
        getattr(self._coming, "close", lambda: None)()
        self._coming = None

    def _portion(self, plan: RolloutPlan) -> int:
        """Return the samples that become available together, where generation overlaps: whole calls and whole groups."""
        return math.lcm(self._rows, plan.samples_per_prompt)

    def _generate(self, params: Any, prompts: Any, key: jax.Array, sampling: Sampling, *, first: int = 0) -> Samples:
        """Return responses, on the host, from calls of one program with a fixed number of rows, numbered from `first` on."""
        tokens_SP, length_S = pad_prompts(prompts, self.options.max_prompt_length)
        parts = []
        for start in range(0, len(prompts), self._rows):
            # A last call may be short: it repeats its first row.
            rows = np.arange(start, start + self._rows)
            rows = np.where(rows < len(prompts), rows, start).astype(np.int32)
            inputs = jax.device_put((tokens_SP[rows], length_S[rows], first + rows), batch_sharding(self._mesh))
            args = params, *inputs, key, *sampling.values
            found = self._run("generate", "policy", self._generate_fn, *args)
            parts.append((found, min(self._rows, len(prompts) - start)))
        fetched = [jax.tree.map(lambda x, n=n: np.asarray(x)[:n], part) for part, n in parts]
        return jax.tree.map(lambda *xs: np.concatenate(xs), *fetched)  # type: ignore[no-any-return]

    def _generate_fn(self, *args: Any) -> Samples:
        found = make_generate(self._policy, self.options.max_response_length, self.options.end_token)(*args)
        return jax.lax.with_sharding_constraint(found, batch_sharding(self._mesh))  # type: ignore[no-any-return]

    def _forward(self, model: str, params: Any, samples: Samples) -> np.ndarray:
        """Return log-probabilities of the policy or values of the critic, (S, R), in calls of one program."""
        S, parts = len(samples.tokens), []
        for start in range(0, S, self._rows):
            rows = np.arange(start, start + self._rows)
            rows = np.where(rows < S, rows, start)
            inputs = (samples.tokens[rows], samples.prompt_length[rows])
            args = params, *jax.device_put(inputs, batch_sharding(self._mesh))
            fn = self._log_probabilities_fn if model == "policy" else self._values_fn
            parts.append((self._run("logprobs", model, fn, *args), min(self._rows, S - start)))
        found_SR = np.concatenate([np.asarray(part)[:n] for part, n in parts])
        counts_SR = np.arange(found_SR.shape[1]) < samples.response_length[:, None]
        return np.where(counts_SR, found_SR, np.float32(0))

    def _log_probabilities_fn(self, params: Any, tokens_BT: jax.Array, prompt_B: jax.Array) -> jax.Array:
        targets_BT = jnp.roll(tokens_BT, -1, axis=1)
        logits_BTV = self._policy.logits(params, tokens_BT)
        return self._over_response(token_log_probabilities(logits_BTV, targets_BT, self.options.temperature), prompt_B)

    def _values_fn(self, params: Any, tokens_BT: jax.Array, prompt_B: jax.Array) -> jax.Array:
        assert self._critic is not None
        return self._over_response(self._critic[0].spread(params, {"tokens": tokens_BT}), prompt_B)

    def _over_response(self, found_BT: jax.Array, prompt_B: jax.Array) -> jax.Array:
        """Return the entries (B, R) that belong to the tokens of the response."""
        places_BR = prompt_B[:, None] - 1 + jnp.arange(self.options.max_response_length)
        found_BR = jnp.take_along_axis(found_BT, jnp.minimum(places_BR, found_BT.shape[1] - 1), axis=1)
        return jax.lax.with_sharding_constraint(found_BR.astype(jnp.float32), batch_sharding(self._mesh))

    def _run(self, role: str, model: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Run the program of a role, which is compiled for its first call."""

        def lower() -> Any:
            with auto_context(self._mesh):
                return jax.jit(fn).lower(*args)

        with self._dispatching:
            return self._compilers[role].get(model, lower)(*args)

    def _decoded(self, samples: Samples) -> tuple[list[Any], list[Any]]:
        """Return prompts and responses as the reward function gets them, without the end token."""
        prompts, responses = [], []
        for tokens, p, r in zip(samples.tokens, samples.prompt_length.tolist(), samples.response_length.tolist(), strict=True):
            response = tokens[p : p + r].tolist()
            if response and response[-1] == self.options.end_token:
                response.pop()
            prompts.append(self.options.decode(tokens[:p].tolist()))
            responses.append(self.options.decode(response))
        return prompts, responses

    def _store(self, samples: Samples, rewards_S: np.ndarray) -> Arrays:
        T, R = samples.tokens.shape[1], self.options.max_response_length
        counts_SR = np.arange(R) < samples.response_length[:, None]
        is_last_SR = np.arange(R) == samples.response_length[:, None] - 1
        return {
            "tokens": samples.tokens,
            "attention_mask": np.arange(T) < (samples.prompt_length + samples.response_length)[:, None],
            "response_mask": counts_SR,
            "rewards": np.where(is_last_SR, rewards_S[:, None], np.float32(0)),
        }

    def _empty_experience(self) -> Arrays:
        """Return the stored arrays of the largest rollout, of the planned names and types and the lengths of the run."""
        plan = self.schedule.stages[0][1]
        planned = plan.experience or Experience(max_prompt_length=1, max_response_length=1)
        stored = replace(
            planned,
            max_prompt_length=self.options.max_prompt_length,
            max_response_length=self.options.max_response_length,
            reference=bool(self.options.beta),
        )
        return {
            one.name: np.zeros((self.schedule.max_samples, one.elements), jnp.dtype(one.dtype))
            for one in stored.fields(critic=self._critic is not None)
        }

    def _add(self, experience: Arrays, arrays: Arrays, first: int) -> Arrays:
        """Return stored arrays with the next samples, and the advantages that follow from all samples so far."""
        stop = first + len(arrays["tokens"])
        # Copied: a checkpoint of the former arrays may still be being written.
        found = {name: np.array(x) for name, x in experience.items()}
        for name, x in arrays.items():
            found[name][first:stop] = x
        if self._critic is not None:
            rewards_SR, values_SR, counts_SR = (found[name][:stop] for name in ("rewards", "values", "response_mask"))
            found["advantages"][:stop], found["returns"][:stop] = generalized_advantages(
                rewards_SR, values_SR, counts_SR.sum(axis=1), gamma=self.options.gamma, lam=self.options.lam
            )
        return found

    def _facts_of(self, experience: Arrays, position: UpdatePosition, have: int) -> dict[str, Any]:
        """Return the numbers of the first samples of a rollout that its metrics contain, and how they were generated."""
        plan, generation = position.plan, self._generation
        counts_SR = np.asarray(experience["response_mask"])[:have]
        rewards_S = np.asarray(experience["rewards"])[:have].astype(np.float64).sum(axis=1)
        found = {
            "rollout": position.rollout,
            "reward": round(float(rewards_S.mean()), 9),
            "zero_spread_share": zero_spread_share(rewards_S, plan.samples_per_prompt),
            "response_length": float(counts_SR.sum(axis=1).mean()),
            "experience_bytes": sum(np.asarray(x).nbytes for x in experience.values()),
        }
        if plan.experience_bytes_per_sample is not None:
            found["planned_experience_bytes"] = plan.experience_bytes_per_sample * self.schedule.max_samples
        if self.overlaps:
            found |= {"pending_samples": plan.samples_per_step - have}
            found["generation_wait_seconds"] = round(generation["wait_seconds"], 6)
        if generation["tokens"]:
            found["generation_seconds"] = round(generation["seconds"], 6)
            found["generation_tokens_per_second"] = round(generation["tokens"] / max(generation["seconds"], 1e-9), 3)
        return found

    # --- the mini batches of an update ---

    def _batch_of(self, experience: Arrays, position: UpdatePosition) -> tuple[Batch, dict[str, Any]]:
        """Return the mini batch of an update on the devices, and its numbers."""
        options, plan = self.options, position.plan
        order = mini_batches(
            np.arange(plan.samples_per_step),
            plan,
            step=position.rollout,
            seed=options.shuffle_seed,
            start=position.update,
            model=position.model,
            keep_prompts_together=options.keep_prompts_together,
        )
        rows = next(order).rows
        attention, response = (np.asarray(experience[name])[rows] for name in ("attention_mask", "response_mask"))
        lengths, response_length = attention.sum(axis=1), response.sum(axis=1)
        chosen = {name: np.asarray(x)[rows] for name, x in experience.items()}
        chosen |= {"prompt_length": lengths - response_length, "response_length": response_length}
        losses = loss_rows(chosen, loss_agg_mode=options.loss_agg_mode)
        passes = self._packed(losses, lengths, position) if self._ladders[position.model] else self._padded(losses, position)
        ramp_plan = self._plans[position.model]
        n, width = jax.tree.leaves(passes)[0].shape[:2]
        split = split_of(n, width, position.split.data_parallel_size)
        layout = layout_of(ramp_plan, split)
        here = replace(ramp_plan.position(position.model_step), split=split)
        computed = (
            sum(self._ladders[position.model][shape] for shape in passes["shape"].ravel())
            if "shape" in passes
            else (n * width * losses["tokens"].shape[1])
        )
        facts = {
            "model": position.model,
            "global_batch_size": len(rows),
            "consumed_samples": position.consumed_samples + plan.samples_per_step,
            "policy_lag": position.update,
            "padding_share": round(1 - int(lengths.sum()) / computed, 6),
            "passes": n,
        }
        return Batch(here, put_chunks(passes, layout, self._mesh), layout), facts

    def _padded(self, losses: Arrays, position: UpdatePosition) -> Arrays:
        """Return rows of one sample each as passes (n, rows, ...); padding repeats a row with weight 0."""
        samples, width = len(losses["tokens"]), self.schedule.pass_samples(position.model)
        n = -(-samples // width)
        rows = np.where(np.arange(n * width) < samples, np.arange(n * width), 0)
        found = {name: x[rows] for name, x in losses.items()}
        for name in ("coefficients", "weights"):
            found[name][samples:] = 0
        return {name: x.reshape(n, width, *x.shape[1:]) for name, x in found.items()}

    def _packed(self, losses: Arrays, lengths: np.ndarray, position: UpdatePosition) -> Arrays:
        """Return the passes of a token budget, of a few static shapes."""
        ladder, replicas = self._ladders[position.model], position.split.data_parallel_size
        packed = pack(lengths.tolist(), ladder[-1], ladder, num_replicas=replicas)
        return packed_rows(losses, packed, lengths.tolist())


def rollout_step(
    model: Any,
    tx: optax.GradientTransformation,
    plan: RolloutPlan | RolloutSchedule,
    mesh: Mesh,
    *,
    reward: Reward,
    options: RolloutOptions,
    critic: tuple[Critic, optax.GradientTransformation] | None = None,
    skip_nonfinite: bool = False,
) -> RolloutStep:
    """Return a step of reinforcement learning for a model and a reward function: one program per role.

    Args:
        model: see `rampup.rl.as_policy`; of a Flax NNX module, the policy that `split_policy` returns.
        tx: the policy's optimizer.
        plan: the sizes.
        mesh: the devices.
        reward: `(prompts, responses) -> rewards`, one finite number per sample, in any Python.
        options: lengths, sampling and the loss.
        critic: the critic and its optimizer, if the plan has one. The critic trains before the policy.
        skip_nonfinite: skip an update whose loss or gradient is not finite.

    Raises:
        ConfigError: plan and options contradict each other.

    Example:
        >>> from rampup.rl.sizes import Size
        >>> from rampup.rl.updates import Training
        >>> from rampup.run.mesh import make_mesh
        >>> plan = RolloutPlan(rollout_batch=Size(count=8, unit="prompts"), samples_per_prompt=8, num_steps=20,
        ...     policy=Training(mini_batch=Size(count=8, unit="prompts"), microbatch=Size(count=4, unit="prompts")))
        >>> def logits(params, tokens):  # a policy that ignores its prompt
        ...     return jnp.broadcast_to(params, (*tokens.shape, 4))
        >>> def reward(prompts, responses):  # likes the token 3
        ...     return [response.count(3) for response in responses]
        >>> step = rollout_step(logits, optax.sgd(1.0), plan, make_mesh(devices=jax.devices()[:1]), reward=reward,
        ...     options=RolloutOptions(max_prompt_length=1, max_response_length=2))
        >>> state = step.create_state(jnp.zeros(4))
        >>> for _ in range(20):
        ...     state, metrics = step(state, [[1]] * 8)
        >>> int(jnp.argmax(state.params)), metrics["reward"] > 1.5, step.compilations
        (3, True, {'generate': 1, 'logprobs': 1, 'update': 1})
    """
    schedule = plan if isinstance(plan, RolloutSchedule) else RolloutSchedule(stages=((0, plan),), num_rollouts=plan.num_steps)
    return RolloutStep(model, tx, schedule, mesh, reward=reward, options=options, critic=critic, skip_nonfinite=skip_nonfinite)


def ramp_plan(schedule: RolloutSchedule, model: str) -> RampPlan:
    """Return the plan of one model's optimizer steps: its largest mini batch, of which an update may use less."""
    updates = schedule.stages[0][1].updates(model)
    split = split_of(schedule.max_passes(model), schedule.pass_samples(model), updates.data_parallel_size)
    return RampPlan(
        ramp=BatchRamp.constant(split.global_batch_size),
        splitter=BatchSplitter(data_parallel_size=split.data_parallel_size, microbatch_size=split.microbatch_size),
        num_devices=updates.data_parallel_size,
        total_steps=max(schedule.optimizer_steps(model), 1),
    )


class _Clock:
    """The time that the updates of a rollout take.

    Attributes:
        tokens: tokens of its samples.
        is_complete: whether this process runs all of its updates.
    """

    def __init__(self) -> None:
        self.tokens, self._seconds, self._began, self.is_complete = 0, 0.0, 0.0, False

    def reset(self, *, is_complete: bool) -> None:
        """Start a rollout."""
        self.tokens, self._seconds, self.is_complete = 0, 0.0, is_complete

    def tokens_per_second(self) -> float:
        """Tokens of the rollout per second of one pass over them."""
        return self.tokens / max(self._seconds, 1e-9)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._began


def _check(schedule: RolloutSchedule, options: RolloutOptions, critic: Any) -> None:
    """Refuse a plan that cannot be trained with these options."""
    plan = schedule.stages[0][1]
    if (plan.critic is None) != (critic is None):
        missing = "the plan has a critic, but none is given" if critic is None else "a critic is given, but the plan has none"
        raise ConfigError(f"{missing}; give both or neither", key="enable_critic", nearest=(critic is not None,))
    for _, stage in schedule.stages:
        if critic is None:
            group_advantages(np.zeros(stage.samples_per_prompt), stage.samples_per_prompt)
        if options.sampling.is_greedy and stage.samples_per_prompt > 1:
            key = "decode_sampling_temperature" if options.sampling.temperature == 0 else "decode_sampling_top_k"
            value = options.sampling.temperature if options.sampling.temperature == 0 else options.sampling.top_k
            raise ConfigError(
                f"{key}={value} samples greedily: the {stage.samples_per_prompt} responses to a prompt would be equal, and "
                "their advantages 0; set decode_sampling_temperature=1.0 and decode_sampling_top_k=0",
                key=key,
                nearest=(1.0,) if options.sampling.temperature == 0 else (0,),
            )
    for updates in plan.order:
        if updates.num_stages > 1:
            raise ConfigError(
                f"the plan has {updates.num_stages} pipeline stages, which RL training does not support; set "
                "ici_pipeline_parallelism=1",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )
        longest = options.max_prompt_length + options.max_response_length
        if updates.token_budget is not None and updates.token_budget < longest:
            raise ConfigError(
                f"token_budget={updates.token_budget} must be at least max_prompt_length + max_response_length = {longest}",
                key="token_budget",
                nearest=(longest,),
            )
    if jax.process_count() > 1:
        raise ConfigError(
            "RL training runs in one process, on all of its devices; start one", key="num_processes", nearest=(1,)
        )

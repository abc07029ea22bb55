"""A step of reinforcement learning: generate, reward, and train the policy on the
samples, one program per role.

The story of one optimizer step is `RolloutStep.update`: before the first one of a
rollout, `_collect` makes its experience, arrays on the host with one row per sample;
`_mini_batch` takes the rows of this update from it, `_passes` makes passes of one shape
of them, padded or packed, and `_train` sums the loss over the passes and runs the
optimizer once. The number of passes is data, so that one program serves every mini
batch.

The state, with the experience and its `Tally`, and the position say everything that
these functions need, so that a checkpoint between two updates is complete;
`RolloutStep` itself changes only by compiling.

Several processes all have the whole experience, and put their own rows of each pass on
their devices. They generate together, and process 0 alone calls the reward function, so
that everything that a step decides is the same in all of them.

Shape suffixes: S samples of a rollout, G of a prompt, B rows of a call, R tokens of the
longest response, T tokens of a row.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rampup.contrib.rl.experience import (
    Arrays,
    Reward,
    Tally,
    check_rewards,
    group_advantages,
    has_zero_spread,
    loss_rows,
    mini_batches,
    padded_rows,
)
from rampup.contrib.rl.generation import Samples, Sampling, make_generate, pad_prompts
from rampup.contrib.rl.noise import FACTS, LAYOUT, block_facts
from rampup.contrib.rl.packing import packed_rows
from rampup.contrib.rl.plan import AGGREGATIONS, Experience, RolloutPlan, count_problems
from rampup.contrib.rl.policy import (
    grpo_loss,
    in_replica,
    over_rows,
    token_log_probabilities,
)
from rampup.contrib.rl.schedule import RolloutSchedule, UpdatePosition, split_of
from rampup.engine.batch import put_batch
from rampup.engine.compile import Compiler
from rampup.engine.mesh import (
    BatchAxes,
    auto_context,
    batch_sharding,
    process_rows,
    replicated,
)
from rampup.engine.processes import (
    FOLDER,
    broadcast_from_process0,
    is_primary,
    kv_store,
)
from rampup.engine.state import TrainState, create_state, describe_fields
from rampup.engine.step import train_step
from rampup.errors import ConfigError, DataError, choice_error, raise_together
from rampup.loop.distributed import leaving_on_error
from rampup.plan.describe import format_count

# How long the other processes wait for the rewards of process 0. If it is gone, JAX ends
# them.
REWARD_SECONDS = 24 * 3600
_reward_numbers = itertools.count()

# From the numbers of the first prompt and of the one after the last, counted over the
# run, to the tokens of the prompts.
Prompts = Callable[[int, int], Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """How samples are generated and what is learned from them. What is not listed is
    the key of configs/rl.yml of that name.

    Attributes:
        end_token: ends a response; None = every response has `max_response_length`
            tokens.
        epsilon, beta: see `rampup.contrib.rl.grpo_loss`. Without `beta`, no reference is
            needed.
        measure_gradient_noise: in the first pass over the samples; see
            `rampup.contrib.rl.noise`. The order of the rows in a mini batch then changes from
            step to step.
        shuffle_seed: of the order of samples in mini batches; None keeps the order of
            generation.
        decode: from the tokens of a prompt or a response, without its end token, to
            what the reward function gets.
    """

    max_prompt_length: int
    max_response_length: int
    end_token: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    epsilon: float = 0.2
    beta: float = 0.0
    zero_spread_groups: str = "keep"
    max_num_gen_batches: int = 10
    measure_gradient_noise: bool = False
    loss_agg_mode: str = "token-mean"
    seed: int = 0
    shuffle_seed: int | None = 0
    decode: Callable[[Sequence[int]], Any] = list

    @property
    def experience(self) -> Experience:
        """The arrays that a step stores for every sample."""
        return Experience(
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            reference=bool(self.beta),
        )


class RolloutState(struct.PyTreeNode):
    """The values that training changes, and the samples of the current rollout.

    Attributes:
        step: optimizer steps done.
        params, opt_state: of the policy.
        reference: parameters of the reference policy; None without one.
        experience: NumPy arrays over the samples of the current rollout.
        tally: the words of a `rampup.contrib.rl.experience.Tally`.
    """

    step: Any
    params: Any
    opt_state: Any
    reference: Any = None
    experience: Any = None
    tally: Any = None

    def __repr__(self) -> str:
        return describe_fields(self)


class RolloutStep:
    """Generates rollouts and trains on them, as a plan describes. `rollout_step` makes
    it, and says what its arguments are.
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
        skip_nonfinite: bool,
    ) -> None:
        _check(schedule, options)
        self.schedule = schedule
        self.options = options
        self._mesh = mesh
        self._reward = reward
        self._policy = over_rows(model, mesh)
        loss_fn = grpo_loss(
            in_replica(model, mesh),
            epsilon=options.epsilon,
            beta=options.beta,
            temperature=options.sampling.temperature,
        )
        self._plan = schedule.ramp_plan()
        self._step = train_step(
            loss_fn,
            tx,
            self._plan,
            mesh,
            seed=options.seed,
            skip_nonfinite=skip_nonfinite,
            # That the loss is a sum over rows is tested.
            check_loss=False,
            measure_gradient_noise=options.measure_gradient_noise,
        )
        # The generator's calls and the forward passes have rows for every device.
        shards = BatchAxes.of(mesh).num_shards(mesh)
        self.rows_per_call = -(-schedule.sequences_per_call // shards) * shards
        # What compiles, by role.
        self._parts: dict[str, Any] = {
            "generate": Compiler(mesh),
            "logprobs": Compiler(mesh),
            "update": self._step,
        }
        # Every process needs all results of generation and forward passes.
        self._fetched = (
            replicated(mesh) if jax.process_count() > 1 else batch_sharding(mesh)
        )

    @property
    def num_compilations(self) -> int:
        """Programs built so far, of all roles."""
        return sum(self.compilations.values())

    @property
    def compilations(self) -> dict[str, int]:
        """Programs built so far by role."""
        return {role: part.num_compilations for role, part in self._parts.items()}

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for compilations."""
        return sum(part.waited_seconds for part in self._parts.values())

    def create_state(self, params: Any) -> RolloutState:
        """Return the state before the first rollout, with copies of the parameters,
        which the reference has too.
        """
        inner = create_state(params, self._step.tx, self._mesh)
        reference = None
        if self.options.beta:
            reference = create_state(params, optax.identity(), self._mesh).params
        return RolloutState(
            step=inner.step,
            params=inner.params,
            opt_state=inner.opt_state,
            reference=reference,
            experience=self._empty_experience(),
            tally=Tally().to_words(),
        )

    def __call__(
        self, state: RolloutState, prompts: Sequence[Sequence[int]] | Prompts
    ) -> tuple[RolloutState, dict[str, Any]]:
        """Run one whole rollout: generate samples for prompts, then train on them.

        Args:
            state: from `create_state` or the last call, whose memory is reused.
            prompts: the tokens of the prompts of this rollout, or a function as of
                `update` for a step that may need more.

        Returns:
            The new state, and the metrics of the last update with the facts of the
            rollout.

        Raises:
            DataError: a prompt or a reward is invalid. The state is unchanged.
        """
        source = prompts if callable(prompts) else lambda start, stop: prompts
        for number in itertools.count(int(state.step)):
            position = self.schedule.at(number)
            state, metrics = self.update(state, position, source)
            if position.is_last:
                break
        found = {name: float(metrics[name]) for name in ("grad_norm", "loss")}
        return state, found | metrics["facts"]

    def update(
        self, state: RolloutState, position: UpdatePosition, prompts: Prompts
    ) -> tuple[RolloutState, dict[str, Any]]:
        """Run one optimizer step; before the first one of a rollout, generate its
        samples.

        Args:
            state: the state before it, whose memory is reused.
            position: from `self.schedule.at`.
            prompts: from the numbers of the first prompt and of the one after the last,
                counted over the run, to their tokens.

        Returns:
            The new state and the step's metrics, as `rampup.train_step` returns them,
            with the numbers of the host in `facts`.
        """
        if position.is_first:
            experience, tally = self._collect(state, position, prompts)
            state = state.replace(experience=experience, tally=tally.to_words())
        rows, lengths = self._mini_batch(state.experience, position)
        passes = self._passes(rows, lengths, position)
        state, metrics = self._train(state, passes, position)
        return state, metrics | {"facts": self._facts(state, position, lengths, passes)}

    def evaluate(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        *,
        samples_per_prompt: int = 1,
        seed: int = 0,
        sampling: Any = None,
    ) -> Any:
        """Return the rewards (prompts, samples_per_prompt) of new responses, sampled as
        in a rollout or by `sampling`.
        """
        samples = self._generate(
            params, prompts, samples_per_prompt, jax.random.key(seed), sampling=sampling
        )
        return self._rewards(samples, where="an evaluation").reshape(
            len(prompts), samples_per_prompt
        )

    # --- the experience of a rollout ---

    def _collect(
        self, state: RolloutState, position: UpdatePosition, prompts: Prompts
    ) -> tuple[Arrays, Tally]:
        """Generate the samples of a rollout, and return their stored arrays and
        numbers.
        """
        plan = position.plan
        before = Tally.from_words(state.tally)
        samples, rewards_S = self._sample(state, position, prompts, before.prompts)
        taken = np.flatnonzero(self._teaches(rewards_S, plan.samples_per_prompt))
        new = self._score(
            state, plan, jax.tree.map(lambda x: x[taken], samples), rewards_S[taken]
        )
        experience = self._empty_experience()
        for name, x in new.items():
            experience[name][: len(x)] = x
        return experience, before.after(rewards_S, plan)

    def _sample(
        self,
        state: RolloutState,
        position: UpdatePosition,
        prompts: Prompts,
        first: int,
    ) -> tuple[Samples, np.ndarray]:
        """Generate responses to the prompts from number `first` on, until as many
        prompts as planned are kept, and return them all with their rewards.
        """
        G, most = position.plan.samples_per_prompt, position.plan.prompts_per_step
        limit = most * self.options.max_num_gen_batches
        key = jax.random.fold_in(jax.random.key(self.options.seed), position.rollout)
        parts, rewards = list[Samples](), list[np.ndarray]()
        generated = kept = 0
        while kept < most:
            missing = min(most - kept, limit - generated)
            if missing == 0:
                raise DataError(
                    f"rollout {position.rollout} found {kept:,} of {most:,} prompts"
                    " whose responses have different rewards among the"
                    f" {generated:,} of max_num_gen_batches="
                    f"{self.options.max_num_gen_batches} batches",
                    fix="set a larger max_num_gen_batches or zero_spread_groups=keep,"
                    " or give prompts that the policy answers rightly now and then",
                    key="max_num_gen_batches",
                )
            start = first + generated
            asked = prompts(start, start + missing)
            if len(asked) != missing:
                raise DataError(
                    f"rollout {position.rollout} has {format_count(missing, 'prompt')},"
                    f" and was given {len(asked)}",
                    key="batch_size",
                    nearest=(missing,),
                )
            parts.append(
                self._generate(state.params, asked, G, key, first_row=generated * G)
            )
            rewards.append(
                self._rewards(parts[-1], where=f"rollout {position.rollout}")
            )
            generated += missing
            kept += int(self._teaches(rewards[-1], G).sum()) // G
        samples = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        return samples, np.concatenate(rewards)

    def _teaches(self, rewards_S: np.ndarray, samples_per_prompt: int) -> np.ndarray:
        """Return whether the step trains on each sample: with refill not on those of a
        prompt whose rewards are all equal.
        """
        refills = self.options.zero_spread_groups == "refill"
        left_out_P = has_zero_spread(rewards_S, samples_per_prompt) & refills
        return ~np.repeat(left_out_P, samples_per_prompt)

    def _score(
        self,
        state: RolloutState,
        plan: RolloutPlan,
        samples: Samples,
        rewards_S: np.ndarray,
    ) -> Arrays:
        """Return the stored arrays of new samples."""
        options = self.options
        response_S = samples.response_length
        places_R = np.arange(options.max_response_length)
        counts_SR = places_R < response_S[:, None]
        advantages_S = group_advantages(rewards_S, plan.samples_per_prompt)
        # 0 after a response.
        per_token = {
            "advantages": advantages_S[:, None],
            # Not those of the generator, which decodes with a cache: the ratio compares
            # two numbers of one computation.
            "log_probabilities": self._log_probabilities(state.params, samples),
        }
        if options.beta:
            per_token["reference_log_probabilities"] = self._log_probabilities(
                state.reference, samples
            )
        return {
            "tokens": samples.tokens,
            "attention_mask": (
                np.arange(samples.tokens.shape[1])
                < (samples.prompt_length + response_S)[:, None]
            ),
            "response_mask": counts_SR,
            # The reward of a sample belongs to the last token of its response.
            "rewards": np.where(
                places_R == response_S[:, None] - 1, rewards_S[:, None], np.float32(0)
            ),
            **{
                name: np.where(counts_SR, x, np.float32(0))
                for name, x in per_token.items()
            },
        }

    def _empty_experience(self) -> Arrays:
        """Return arrays of 0 for the largest rollout, so that every checkpoint has the
        same structure.
        """
        return {
            name: np.zeros((self.schedule.max_samples, elements), jnp.dtype(dtype))
            for name, (dtype, elements) in self.options.experience.fields().items()
        }

    def _rewards(self, samples: Samples, *, where: str) -> np.ndarray:
        """Return the reward of each sample. The reward function gets prompts and
        responses decoded, without the end token.
        """
        prompts, responses = [], []
        for tokens, p, r in zip(
            samples.tokens,
            samples.prompt_length.tolist(),
            samples.response_length.tolist(),
            strict=True,
        ):
            response = tokens[p : p + r].tolist()
            if response and response[-1] == self.options.end_token:
                response.pop()
            prompts.append(self.options.decode(tokens[:p].tolist()))
            responses.append(self.options.decode(response))
        if jax.process_count() == 1:
            return check_rewards(self._reward, prompts, responses, where=where)
        number = next(_reward_numbers)
        problem = ""
        found = ""
        with leaving_on_error():
            if is_primary():
                try:
                    found = (
                        check_rewards(self._reward, prompts, responses, where=where)
                        .tobytes()
                        .hex()
                    )
                except DataError as error:
                    problem = str(error)
                # All have read it: they have generated together since.
                kv_store().key_value_delete(f"{FOLDER}/first/rewards{number - 1}")
            answer = broadcast_from_process0(
                f"rewards{number}",
                lambda: json.dumps([problem, found]),
                timeout=REWARD_SECONDS,
            )
        problem, found = json.loads(answer)
        if problem:
            raise DataError(problem, key="reward")
        return np.frombuffer(bytes.fromhex(found), np.float32)

    def _generate(
        self,
        params: Any,
        prompts: Any,
        G: int,
        key: Any,
        first_row: int = 0,
        sampling: Any = None,
    ) -> Samples:
        """Return G responses to each prompt, on the host. The key and the row, counted
        from `first_row`, decide them.
        """
        tokens_SP, length_S = (
            np.repeat(x, G, axis=0)
            for x in pad_prompts(prompts, self.options.max_prompt_length)
        )
        inputs = (
            tokens_SP,
            length_S,
            first_row + np.arange(len(length_S), dtype=np.int32),
        )
        run = make_generate(
            self._policy, self.options.max_response_length, self.options.end_token
        )
        values = (sampling or self.options.sampling).values
        return self._in_calls("generate", run, params, inputs, key, *values)  # type: ignore[no-any-return]

    def _log_probabilities(self, params: Any, samples: Samples) -> np.ndarray:
        """Return the log-probabilities of the tokens of the responses, (S, R)."""

        def run(params: Any, tokens_BT: jax.Array, prompt_B: jax.Array) -> jax.Array:
            found_BT = token_log_probabilities(
                self._policy.logits(params, tokens_BT),
                jnp.roll(tokens_BT, -1, axis=1),
                self.options.sampling.temperature,
            )
            # The entries that belong to the tokens of the response.
            places_BR = (
                prompt_B[:, None] - 1 + jnp.arange(self.options.max_response_length)
            )
            found_BR = jnp.take_along_axis(
                found_BT, jnp.minimum(places_BR, found_BT.shape[1] - 1), axis=1
            )
            return found_BR.astype(jnp.float32)

        inputs = (samples.tokens, samples.prompt_length)
        return self._in_calls("logprobs", run, params, inputs)

    def _in_calls(
        self,
        role: str,
        run: Any,
        params: Any,
        samples: tuple[np.ndarray, ...],
        *rest: Any,
    ) -> Any:
        """Run the program of a role over samples, in calls of one number of rows, and
        return the results (S, ...) on the host.

        All calls are started before the first result is fetched. A last call that is
        short repeats its first row, whose results are cut off.
        """
        S = len(samples[0])
        parts = []
        sharding = batch_sharding(self._mesh)
        for start in range(0, S, self.rows_per_call):
            rows = np.arange(start, start + self.rows_per_call)
            rows = np.where(rows < S, rows, start)
            chosen = (x[rows] for x in samples)
            args = (
                params,
                *(
                    jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
                    for x in chosen
                ),
                *rest,
            )

            def lower(args: Any = args) -> Any:
                with auto_context(self._mesh):
                    return jax.jit(
                        lambda *args: jax.lax.with_sharding_constraint(
                            run(*args), self._fetched
                        )
                    ).lower(*args)

            parts.append(self._parts[role].get(role, lower)(*args))
        return jax.tree.map(lambda *xs: np.concatenate(xs)[:S], *parts)

    # --- an update ---

    def _mini_batch(
        self, experience: Arrays, position: UpdatePosition
    ) -> tuple[Arrays, np.ndarray]:
        """Return the samples of an update as rows of a loss, and the tokens of each."""
        options = self.options
        G = position.plan.samples_per_prompt
        batches = mini_batches(
            position.plan,
            step=position.rollout,
            start=position.update,
            seed=options.shuffle_seed,
        )
        rows = next(batches).rows
        if options.measure_gradient_noise and _layout(position):
            rows = rows.reshape(-1, G).T.ravel()
        chosen = {name: np.asarray(x)[rows] for name, x in experience.items()}
        lengths = chosen["attention_mask"].sum(axis=1)
        response_length = chosen["response_mask"].sum(axis=1)
        chosen |= {
            "prompt_length": lengths - response_length,
            "response_length": response_length,
            "group": rows // G,
        }
        found = loss_rows(chosen, loss_agg_mode=options.loss_agg_mode)
        if options.measure_gradient_noise:
            found["group"] = chosen["group"]
        return found, lengths

    def _passes(
        self, rows: Arrays, lengths: np.ndarray, position: UpdatePosition
    ) -> Arrays:
        """Return the passes of an update, arrays (n, rows of a pass, ...)."""
        budget = position.plan.policy_updates.token_budget
        if budget is None:
            return padded_rows(rows, self.schedule.pass_samples)
        return packed_rows(
            rows,
            lengths,
            token_budget=budget,
            num_replicas=position.split.data_parallel_size,
        )

    def _train(
        self, state: RolloutState, passes: Arrays, position: UpdatePosition
    ) -> tuple[RolloutState, Any]:
        """Run the optimizer once, on the sum over the passes."""
        n, width = passes["tokens"].shape[:2]
        groups = passes.pop("group", None)
        split = split_of(n, width, position.split.data_parallel_size)
        weights = passes["weights"].sum(axis=2)
        own = process_rows(self._mesh, width)
        batch = put_batch(
            {name: x[:, own] for name, x in passes.items()},
            replace(self._plan.position(position.step), split=split),
            self._plan,
            self._mesh,
        )
        inner, metrics = self._step(
            TrainState(state.step, state.params, state.opt_state), batch
        )
        if (
            "gradient_noise" in metrics
            and position.update < position.plan.policy_updates.num_mini_batches
        ):
            replicas = BatchAxes.of(self._mesh).num_replicas(self._mesh)
            facts = block_facts(weights, groups, replicas).tolist()
            metrics["gradient_noise"] |= {LAYOUT: _layout(position), FACTS: facts}
        return (
            state.replace(
                step=inner.step, params=inner.params, opt_state=inner.opt_state
            ),
            metrics,
        )

    def _facts(
        self,
        state: RolloutState,
        position: UpdatePosition,
        lengths: np.ndarray,
        passes: Arrays,
    ) -> dict[str, Any]:
        """Return the numbers of the host in the metrics of an update: of its passes,
        and of the samples of its rollout.
        """
        plan = position.plan
        experience, tally = state.experience, Tally.from_words(state.tally)
        n, width, T = passes["tokens"].shape
        responses_SR = np.asarray(experience["response_mask"])[: plan.samples_per_step]
        return {
            "global_batch_size": len(lengths),
            "num_prompts": len(lengths) // plan.samples_per_prompt,
            "num_samples": len(lengths),
            "dropped_groups": tally.dropped,
            "consumed_prompts": tally.prompts,
            "consumed_samples": tally.samples,
            "policy_lag": position.update,
            "padding_share": round(1 - int(lengths.sum()) / (n * width * T), 6),
            "passes": n,
            "rollout": position.rollout,
            "reward": round(tally.reward, 9),
            "reward_spread": round(tally.spread, 9),
            "zero_spread_share": tally.zero_spread,
            "response_length": float(responses_SR.sum(axis=1).mean()),
            "experience_bytes": sum(np.asarray(x).nbytes for x in experience.values()),
            "planned_experience_bytes": (
                plan.experience.bytes_per_sample * self.schedule.max_samples
            ),
        }


def rollout_step(
    model: Any,
    tx: optax.GradientTransformation,
    plan: RolloutPlan | RolloutSchedule,
    mesh: Mesh,
    *,
    reward: Reward,
    options: RolloutOptions,
    skip_nonfinite: bool = False,
) -> RolloutStep:
    """Return a step of reinforcement learning for a model and a reward function: one
    program per role.

    Args:
        model: see `rampup.contrib.rl.as_policy`; of a Flax NNX module, the policy that
            `split_policy` returns.
        reward: `(prompts, responses) -> rewards`, one finite number per sample, in any
            Python.
        options: lengths, sampling and the loss.
        skip_nonfinite: skip an update whose loss or gradient is not finite.

    Raises:
        ConfigError: plan and options contradict each other.

    Example:
        >>> from rampup.contrib.rl.plan import Size, Training
        >>> from rampup.engine.mesh import make_mesh
        >>> plan = RolloutPlan(
        ...     rollout_batch=Size(count=8, unit="prompts"),
        ...     samples_per_prompt=8,
        ...     num_steps=20,
        ...     policy=Training(
        ...         mini_batch=Size(count=8, unit="prompts"),
        ...         microbatch=Size(count=4, unit="prompts"),
        ...     ),
        ... )
        >>> def logits(params, tokens):  # a policy that ignores its prompt
        ...     return jnp.broadcast_to(params, (*tokens.shape, 4))
        >>> def reward(prompts, responses):  # likes the token 3
        ...     return [response.count(3) for response in responses]
        >>> step = rollout_step(
        ...     logits,
        ...     optax.sgd(1.0),
        ...     plan,
        ...     make_mesh(devices=jax.devices()[:1]),
        ...     reward=reward,
        ...     options=RolloutOptions(max_prompt_length=1, max_response_length=2),
        ... )
        >>> state = step.create_state(jnp.zeros(4))
        >>> for _ in range(20):
        ...     state, metrics = step(state, [[1]] * 8)
        >>> int(jnp.argmax(state.params)), metrics["reward"] > 1.5, step.compilations
        (3, True, {'generate': 1, 'logprobs': 1, 'update': 1})
    """
    schedule = (
        plan
        if isinstance(plan, RolloutSchedule)
        else RolloutSchedule(stages=((0, plan),), num_rollouts=plan.num_steps)
    )
    # Plans without lengths have those of the options: they decide how many passes there
    # may be.
    own = options.experience
    stages = (
        (first, replace(stage, experience=stage.experience or own))
        for first, stage in schedule.stages
    )
    schedule = replace(schedule, stages=tuple(stages))
    return RolloutStep(
        model,
        tx,
        schedule,
        mesh,
        reward=reward,
        options=options,
        skip_nonfinite=skip_nonfinite,
    )


def _layout(position: UpdatePosition) -> int:
    """Return how a step orders its rows if the noise is measured: 0 by prompts, 1 by
    the numbers of the responses.
    """
    return (position.rollout + position.update) % 2


def _check(schedule: RolloutSchedule, options: RolloutOptions) -> None:
    """Refuse plans that cannot be trained with these options. Each has its
    `experience`.
    """
    plan = schedule.stages[0][1]
    policy = plan.policy_updates
    G = plan.samples_per_prompt

    def refuse(is_wrong: bool, key: str, problem: str, fix: str, *nearest: Any) -> None:
        if is_wrong:
            raise ConfigError(problem, fix=fix, key=key, nearest=nearest)

    group_advantages(np.zeros(G), G)
    for key, is_greedy, usual in (
        ("decode_sampling_temperature", options.sampling.temperature == 0, 1.0),
        ("decode_sampling_top_k", options.sampling.top_k == 1, 0),
    ):
        refuse(
            is_greedy,
            key,
            f"{key}={int(not usual)} samples greedily: the {G} responses to a prompt"
            " would be equal, and their advantages 0",
            f"set {key}={usual}",
            usual,
        )
    choices = ("keep", "refill")
    if options.zero_spread_groups not in choices:
        raise choice_error("zero_spread_groups", options.zero_spread_groups, choices)
    raise_together(count_problems({"max_num_gen_batches": options.max_num_gen_batches}))
    separates = any(
        stage.policy_updates.mini_batch_samples % stage.samples_per_prompt
        for _, stage in schedule.stages
    )
    refuse(
        options.loss_agg_mode == "group-mean-token-mean" and separates,
        "rl.loss_agg_mode",
        "rl.loss_agg_mode=group-mean-token-mean needs all responses to a prompt in one"
        " mini batch",
        "count the mini batches in prompts",
        *AGGREGATIONS[:3],
    )
    rows = schedule.pass_samples // policy.data_parallel_size
    refuse(
        options.measure_gradient_noise
        and (separates or policy.token_budget is not None or rows < 2),
        "measure_gradient_noise",
        "measure_gradient_noise=true compares passes of several responses to one prompt"
        " with passes of several prompts",
        "set microbatch_size or train_micro_batch_size to 2 or more samples per replica"
        f" (it is {rows}), token_budget=-1 and rl.num_generations=2 or more",
        False,
    )
    longest, planned = options.experience.max_length, plan.experience.max_length
    refuse(
        planned < longest,
        "experience",
        "the plan's experience has max_prompt_length + max_response_length ="
        f" {planned} tokens, fewer than the {longest} of the options",
        "give both the same lengths",
        longest,
    )

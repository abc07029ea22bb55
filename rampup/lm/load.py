"""The trained model of a run: `rampup.load`, and text sampled from it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rampup.config.build import plan_to_resume
from rampup.config.load import load_config
from rampup.config.schema import IDENTITY_DEFAULTS, Config
from rampup.errors import ConfigError, ResumeMismatchError
from rampup.lm.decode import decode, prefill
from rampup.lm.train import language_model, learning_rate, optimizer, ramp_before
from rampup.lm.transformer import LanguageModel
from rampup.run.accumulate import multi_steps
from rampup.run.checkpoint import checkpoint_steps, damage, find_checkpoint
from rampup.run.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE, absolute_path
from rampup.run.state import TrainState

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A checkpoint and what it belongs to.

    Attributes:
        folder: the checkpoint's folder.
        step: optimizer steps done.
        params: the trained parameters.
        state: the training state, whose optimizer state has the types of Optax. For a run of your own loop, a pytree of dicts.
        config: the run's configuration; None for a run of your own loop.
        model: the run's model; None for a run of your own loop.
    """

    folder: Path
    step: int
    params: Any
    state: Any
    config: Config | None
    model: LanguageModel | None

    def generate(
        self, prompt: str, num_tokens: int = 200, *, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
    ) -> str:
        """Return text that continues a prompt. A model of bytes only.

        Args:
            prompt: the text to continue.
            num_tokens: bytes to sample.
            temperature: divides the logits; 0 takes the most probable byte.
            top_k: sample from this many most probable bytes; None = from all.
            seed: of the random numbers.

        Raises:
            ConfigError: the run has no language model of bytes, or an argument is out of range.
        """
        config = self.config
        if self.model is None or config is None or config.dataset_type in ("tokens", "arrayrecord") or config.vocab_size < 256:
            raise ConfigError(
                "only a run of `rampup train` with dataset_type=text has tokens that are bytes", key="dataset_type"
            )
        limits = (
            (1 <= num_tokens <= MAX_TOKENS, "tokens", num_tokens, f"from 1 to {MAX_TOKENS:,}"),
            (0 <= temperature < float("inf"), "temperature", temperature, "at least 0"),
            (top_k is None or 1 <= top_k <= self.model.vocab_size, "top-k", top_k, f"from 1 to {self.model.vocab_size}"),
            (0 <= seed < 2**31, "seed", seed, "from 0 to 2**31 - 1"),
        )
        for holds, name, value, legal in limits:
            if not holds:
                raise ConfigError(f"{name}={value} must be {legal}", key=name)
        # The command line passes bytes that are not UTF-8 as surrogates.
        start = list(prompt.encode(errors="surrogateescape")) or [ord("\n")]
        tokens = np.zeros(len(start) + num_tokens, np.int32)
        tokens[: len(start)] = start
        found = _sample(
            self.model,
            min(config.max_target_length, len(tokens)),
            top_k or self.model.vocab_size,
            self.params,
            tokens,
            len(start),
            temperature,
            jax.random.key(seed),
        )
        # A model with more than 256 tokens never saw the others; they have no byte.
        return bytes(int(token) for token in np.asarray(found)[len(start) :] if token < 256).decode(errors="replace")


def load(path: str | Path) -> LoadedRun:
    """Return the model, the parameters and the training state of a run, on the first device.

    Args:
        path: the folder of a run, for its newest intact checkpoint; or a checkpoint, such as `runs/demo/checkpoints/100`.

    Raises:
        ConfigError: there is no checkpoint.
        ResumeMismatchError: the checkpoint is damaged, or the configuration in the folder is of another model.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax warns that nothing will be written.
    path = absolute_path(path, follow=False)
    run = path
    if path.parent.name == CHECKPOINT_FOLDER and path.name.isdecimal():
        run = path.parent.parent
    elif path.name == CHECKPOINT_FOLDER:
        run = path.parent
    folder = run / CHECKPOINT_FOLDER
    if not path.is_dir() or not checkpoint_steps(folder):
        raise ConfigError(
            f"there is no checkpoint in {path}; name the folder of a run or one of its checkpoints", key="run_name"
        )
    if path.parent == folder:
        step = int(path.name)
        if problem := damage(path):
            raise ResumeMismatchError(f"the checkpoint {path} is damaged: {problem}")
    else:
        saved = find_checkpoint(folder)
        assert saved is not None
        step = saved.step
    folder /= str(step)
    with ocp.CheckpointManager(folder.parent, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        record = manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        ramp = ramp_before(record)
        if ramp is None or not (run / CONFIG_FILE).is_file():
            tree = _restore(manager, step, _on_one_device(manager.item_metadata(step).state))
            return LoadedRun(folder=folder, step=step, params=tree.get("params"), state=tree, config=None, model=None)
        config = load_config(run / CONFIG_FILE)
        known = {**IDENTITY_DEFAULTS, **record}
        changed = {key: (known[key], value) for key, value in config.identity().items() if known.get(key, value) != value}
        if changed:
            table = "; ".join(f"{key}: {old!r} in the checkpoint, {new!r} there" for key, (old, new) in changed.items())
            raise ResumeMismatchError(f"{run / CONFIG_FILE} is not of the checkpoint {folder}: {table}", key=min(changed))
        model = language_model(config)
        shapes = jax.eval_shape(functools.partial(_init_state, config, model, ramp))
        tree = _restore(
            manager, step, _on_one_device({"step": shapes.step, "params": shapes.params, "opt_state": shapes.opt_state})
        )
    state = shapes.replace(**tree)
    return LoadedRun(folder=folder, step=step, params=state.params, state=state, config=config, model=model)


def _init_state(config: Config, model: LanguageModel, ramp: Mapping[str, Any]) -> TrainState:
    plan = plan_to_resume(config, ramp["num_devices"], ramp)
    tx = optimizer(config, learning_rate(config, plan))
    if config.gradient_accumulation == "multi_steps":
        tx = multi_steps(tx, plan)
    params = model.init(jax.random.key(0))
    return TrainState(step=jnp.int32(0), params=params, opt_state=tx.init(params))


def _on_one_device(tree: Any) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _restore(manager: ocp.CheckpointManager, step: int, shapes: Any) -> Any:
    return manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))).state


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(
    model: LanguageModel, context: int, top_k: int, params: Any, tokens_T: Any, start: Any, temperature: Any, key: jax.Array
) -> jax.Array:
    """Fill `tokens_T` from `start` on, each token from the `context` ones before it: one program for the whole text."""
    tokens_T = jnp.asarray(tokens_T)

    def read_window(index: Any, tokens_T: jax.Array) -> tuple[jax.Array, Any]:
        """Return the logits (1, V) of the token at `index`, and the cache of the tokens before it."""
        first = jnp.clip(index - context, 0, len(tokens_T) - context)
        window = jax.lax.dynamic_slice_in_dim(tokens_T, first, context)
        return prefill(model, params, window[None], (index - first)[None], context)

    def fill(index: Any, carry: Any) -> Any:
        tokens_T, (logits_1V, cache) = carry
        largest = jax.lax.top_k(logits_1V[0], top_k)[0][-1]
        logits_V = jnp.where(logits_1V[0] >= largest, logits_1V[0], -jnp.inf)
        sampled = jax.random.categorical(jax.random.fold_in(key, index), logits_V / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature == 0, jnp.argmax(logits_V), sampled).astype(tokens_T.dtype)
        tokens_T = tokens_T.at[index].set(token)
        # Beyond the context, the first token drops out and all positions shift. The cache is then void: read the window again.
        return tokens_T, jax.lax.cond(
            index < context,
            lambda: decode(model, params, cache, token[None], index[None]),
            lambda: read_window(index + 1, tokens_T),
        )

    return jax.lax.fori_loop(start, len(tokens_T), fill, (tokens_T, read_window(start, tokens_T)))[0]

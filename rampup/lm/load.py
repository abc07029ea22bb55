"""The trained language model of a run, and text sampled from it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rampup.config.key import Settings
from rampup.config.load import load_config
from rampup.config.resume import plan_to_resume
from rampup.engine.multi_steps import multi_steps
from rampup.engine.state import TrainState, describe_tree
from rampup.errors import ConfigError, ResumeMismatchError
from rampup.lm.train import learning_rate, optimizer, ramp_before
from rampup.lm.transformer import LanguageModel, decode, prefill
from rampup.loop.checkpoint import (
    checkpoint_steps,
    damage,
    find_checkpoint,
    on_first_device,
    read_record,
    restore_tree,
)
from rampup.loop.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE, absolute_path
from rampup.plan.numbers import check_range

MAX_TOKENS = 1_000_000
# Values that only a checkpoint of reinforcement learning records.
ROLLOUT_RECORD = frozenset(
    {"max_prompt_length", "max_response_length", "warm_start_steps"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A checkpoint and what it belongs to. Without a `config` and a `model`, it is of a
    run of your own loop.

    Attributes:
        folder: the checkpoint's folder.
        state: the training state, whose optimizer state has the types of Optax. For a
            run of reinforcement learning or of your own loop, a pytree of dicts.
        config: the run's configuration, a `Config` or a `RolloutConfig`.
        context: tokens that the model reads at most.
        end_token: the token that ends a response; None if a text has no end.

    >>> from pathlib import Path
    >>> import rampup
    >>> folder = Path("runs/a/checkpoints/9")  # rampup.load makes one
    >>> rampup.lm.LoadedRun(
    ...     folder=folder, step=9, params={}, state={}
    ... ).model is None
    True
    """

    folder: Path
    step: int
    params: Any
    state: Any
    config: Any = None
    model: LanguageModel | None = None
    context: int | None = None
    end_token: int | None = None

    def __repr__(self) -> str:
        kinds = ", ".join(
            f"{name}={type(getattr(self, name)).__name__}"
            for name in ("state", "config", "model")
        )
        return (
            f"LoadedRun(folder={str(self.folder)!r}, step={self.step},"
            f" params={describe_tree(self.params)}, {kinds})"
        )

    def generate(
        self,
        prompt: str,
        num_tokens: int = 200,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return text that continues a prompt, or the response of a policy to it. The
        model's tokens must be bytes.

        Args:
            prompt: the text to continue.
            num_tokens: bytes to sample at most; a response may end before.
            temperature: divides the logits; 0 takes the most probable byte.
            top_k: sample from this many most probable bytes; None = from all.

        Raises:
            ConfigError: the run has no language model of bytes, or an argument is out
                of range.
        """
        if self.model is None or self.context is None:
            raise ConfigError(
                f"{self.folder} is of a training loop of your own, so that rampup does"
                " not know its model and cannot sample from it",
                fix="call your model with `params`",
                key="run_name",
            )
        kind = getattr(self.config, "dataset_type", None)
        if kind == "tokens":
            raise ConfigError(
                f"the run has dataset_type={kind}: a tokenizer that rampup does not"
                " know made its tokens, so it cannot read or write text",
                fix="turn text into tokens yourself and call `model` of rampup.load, or"
                " train with dataset_type=text",
                key="dataset_type",
                nearest=("text",),
            )
        if self.model.vocab_size < 256:
            raise ConfigError(
                f"the run has vocab_size={self.model.vocab_size}, but text has 256"
                " different bytes, each of which is a token",
                key="vocab_size",
                nearest=(256,),
            )
        if top_k is None:
            top_k = self.model.vocab_size
        check_range(1, MAX_TOKENS, tokens=num_tokens)
        # Not infinity: what `top_k` leaves out would be no number.
        check_range(0, sys.float_info.max, temperature=temperature)
        check_range(1, self.model.vocab_size, **{"top-k": top_k})
        check_range(0, 2**31 - 1, seed=seed)
        # The command line passes bytes that are not UTF-8 as surrogates.
        start = list(prompt.encode(errors="surrogateescape")) or [ord("\n")]
        tokens = np.zeros(len(start) + num_tokens, np.int32)
        tokens[: len(start)] = start
        found = _sample(
            self.model,
            min(self.context, len(tokens)),
            top_k,
            self.params,
            tokens,
            len(start),
            temperature,
            jax.random.key(seed),
        )
        continued = np.asarray(found)[len(start) :].tolist()
        if self.end_token in continued:
            continued = continued[: continued.index(self.end_token)]
        # A model with more than 256 tokens never saw the others; they have no byte.
        return bytes(token for token in continued if token < 256).decode(
            errors="replace"
        )


def named_checkpoint(path: str | Path) -> tuple[Path, Path]:
    """Return the folders of the run and of the checkpoint that a path names; see
    `rampup.load`.
    """
    path = absolute_path(path, follow=False)
    is_checkpoint = path.parent.name == CHECKPOINT_FOLDER and path.name.isdecimal()
    folder = path.parent if is_checkpoint else path
    if folder.name != CHECKPOINT_FOLDER:
        folder /= CHECKPOINT_FOLDER
    if not path.is_dir() or not checkpoint_steps(folder):
        raise ConfigError(
            f"there is no checkpoint in {path}",
            fix="name the folder of a run or one of its checkpoints",
            key="run_name",
        )
    if is_checkpoint:
        if problem := damage(path):
            raise ResumeMismatchError(f"the checkpoint {path} is damaged: {problem}")
        return folder.parent, path
    saved = find_checkpoint(folder)
    assert saved is not None
    return folder.parent, folder / str(saved.step)


def load(path: str | Path) -> LoadedRun:
    """Return the model, the parameters and the training state of a run, on the first
    device.

    Args:
        path: the folder of a run, for its newest intact checkpoint; or a checkpoint,
            such as `runs/demo/checkpoints/100`.

    Raises:
        ConfigError: there is no checkpoint, or it is of reinforcement learning, which
            `rampup.contrib.rl.load` reads.
        ResumeMismatchError: the checkpoint is damaged, or the configuration in the
            folder is of another model.

    >>> import rampup
    >>> rampup.load("runs/nothing")
    Traceback (most recent call last):
    rampup.errors.ConfigError: there is no checkpoint in .../runs/nothing; name the folder of a run or one of its checkpoints
    """
    run, folder = named_checkpoint(path)
    record, step = read_record(folder), int(folder.name)
    # The file alone does not tell: a loop of one's own may have a config.yml of any
    # kind.
    if record.keys() >= ROLLOUT_RECORD and (run / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} is a checkpoint of reinforcement learning; load it with"
            " rampup.contrib.rl.load",
            key="run_name",
        )
    ramp = ramp_before(record)
    if ramp is None or not (run / CONFIG_FILE).is_file():
        tree = restore_tree(folder)
        return LoadedRun(
            folder=folder, step=step, params=tree.get("params"), state=tree
        )
    config = load_config(run / CONFIG_FILE)
    check_identity(config, record, run, folder)
    model = LanguageModel.from_config(config)
    plan = plan_to_resume(config, ramp["num_devices"], ramp)
    tx = optimizer(config, learning_rate(config, plan))
    if config.gradient_accumulation == "multi_steps":
        tx = multi_steps(tx, plan)
    params = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {
        "step": jax.ShapeDtypeStruct((), jnp.int32),
        "params": params,
        "opt_state": jax.eval_shape(tx.init, params),
    }
    state = TrainState(**restore_tree(folder, on_first_device(shapes)))
    return LoadedRun(
        folder=folder,
        step=step,
        params=state.params,
        state=state,
        config=config,
        model=model,
        context=config.max_target_length,
    )


def check_identity(
    config: Settings, record: Mapping[str, Any], run: Path, folder: Path
) -> None:
    """Refuse a run's configuration if it is not that of the checkpoint with this
    record.
    """
    changed = {
        key: (record.get(key), value)
        for key, value in config.identity().items()
        if record.get(key) != value
    }
    if changed:
        table = "; ".join(
            f"{key}: {old!r} in the checkpoint, {new!r} there"
            for key, (old, new) in changed.items()
        )
        raise ResumeMismatchError(
            f"{run / CONFIG_FILE} is not of the checkpoint {folder}: {table}",
            key=min(changed),
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _sample(
    model: LanguageModel,
    context: int,
    top_k: int,
    params: Any,
    tokens_T: Any,
    start: Any,
    temperature: Any,
    key: jax.Array,
) -> jax.Array:
    """Fill `tokens_T` from `start` on, each token from the `context` ones before it:
    one program for the whole text.
    """
    tokens_T = jnp.asarray(tokens_T)

    def read_window(index: Any, tokens_T: jax.Array) -> tuple[jax.Array, Any]:
        """Return the logits (1, V) of the token at `index`, and the cache of the tokens
        before it.
        """
        first = jnp.clip(index - context, 0, len(tokens_T) - context)
        window = jax.lax.dynamic_slice_in_dim(tokens_T, first, context)
        return prefill(model, params, window[None], (index - first)[None], context)

    def fill(index: Any, carry: Any) -> Any:
        tokens_T, (logits_1V, cache) = carry
        largest = jax.lax.top_k(logits_1V[0], top_k)[0][-1]
        logits_V = jnp.where(logits_1V[0] >= largest, logits_1V[0], -jnp.inf)
        sampled = jax.random.categorical(
            jax.random.fold_in(key, index), logits_V / jnp.maximum(temperature, 1e-6)
        )
        token = jnp.where(temperature == 0, jnp.argmax(logits_V), sampled).astype(
            tokens_T.dtype
        )
        tokens_T = tokens_T.at[index].set(token)
        # Beyond the context, the first token drops out and all positions shift. The
        # cache is then void: read the window again.
        return tokens_T, jax.lax.cond(
            index < context,
            lambda: decode(model, params, cache, token[None], index[None]),
            lambda: read_window(index + 1, tokens_T),
        )

    return jax.lax.fori_loop(
        start, len(tokens_T), fill, (tokens_T, read_window(start, tokens_T))
    )[0]

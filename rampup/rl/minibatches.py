"""Mini batches and microbatches of one shape from the samples of a step, and generation that overlaps with training.

Shape suffixes: S samples of a step, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from rampup.errors import ConfigError, DataError, ResumeMismatchError
from rampup.rl.plan import RolloutPlan, RolloutPosition
from rampup.rl.updates import Updates

Request = TypeVar("Request")
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")


class Microbatch(NamedTuple):
    """The rows of one pass over all replicas. All microbatches have the same shape.

    Attributes:
        samples: the caller's arrays (R, ...). Replica r has rows r * b to (r + 1) * b.
        weights: float32 (R,). 1 for a sample, 0 for padding. A padding row is a copy of a real row, so that no computation
            on it is undefined.
        rows: (R,) the index of each row among the step's samples.
    """

    samples: Any
    weights: np.ndarray
    rows: np.ndarray


class Microbatches(Sequence[Microbatch]):
    """The microbatches of one mini batch, created on access."""

    def __init__(self, samples: Any, rows: np.ndarray, num_microbatches: int, size: int) -> None:
        padding = num_microbatches * size - len(rows)
        padded = np.concatenate([rows, np.full(padding, rows[0], rows.dtype)])
        self._samples, self._rows = samples, padded.reshape(num_microbatches, size)
        self._weights = (np.arange(padded.size) < len(rows)).astype(np.float32).reshape(num_microbatches, size)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | list[Microbatch]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        rows = self._rows[index]
        return Microbatch(jax.tree.map(lambda x: x[rows], self._samples), self._weights[index], rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """The samples of one optimizer step.

    Attributes:
        position: rollout, epoch and number of this optimizer step.
        rows: the indices of its samples among the step's samples, in order.
        microbatches: its passes. Divide their summed gradients by `weight`. None with a token budget: then split `rows` by
            their lengths with `rampup.packing.pack`.
    """

    position: RolloutPosition
    rows: np.ndarray
    microbatches: Microbatches | None

    @property
    def epoch(self) -> int:
        """The pass over the step's samples."""
        return self.position.epoch

    @property
    def optimizer_step(self) -> int:
        """This optimizer step, counted over the whole run."""
        return self.position.optimizer_step

    @property
    def weight(self) -> int:
        """The number of samples, which is the sum of the microbatches' weights."""
        return len(self.rows)


def mini_batches(
    samples_S: Any,
    plan: RolloutPlan,
    *,
    step: int,
    seed: int | None,
    start: int | RolloutPosition = 0,
    model: str = "policy",
    keep_prompts_together: bool = True,
) -> Iterator[MiniBatch]:
    """Yield the mini batches of one model, epoch by epoch.

    Every sample is in exactly one mini batch of every epoch. Train the models in the order of `plan.order`.

    Args:
        samples_S: a pytree of NumPy or JAX arrays (S, ...). The responses to a prompt are adjacent.
        plan: the plan.
        step: the rollout that generated the samples, counted from 0.
        seed: seed of the shuffle. Every rollout, epoch and model has its own order, which is the same on every machine. None =
            the order of generation.
        start: the optimizer step within this rollout to start at, or a position of the plan. Nothing is replayed.
        model: `policy` or `critic`.
        keep_prompts_together: shuffle prompts with all their responses instead of single samples.

    Raises:
        DataError: If the rows of the arrays are not the samples of a step.
        ResumeMismatchError: If the plan has no such step or start, or `start` belongs to a different rollout.
        ConfigError: If the plan has no such model, the seed is invalid, or mini batches would separate a prompt's responses.

    Example:
        >>> from rampup.rl.sizes import Size
        >>> from rampup.rl.updates import Training
        >>> policy = Training(mini_batch=Size(count=2, unit="prompts"), microbatch=Size(count=2, unit="samples"))
        >>> plan = RolloutPlan(rollout_batch=Size(count=4, unit="prompts"), samples_per_prompt=2, policy=policy)
        >>> [[m.samples.tolist() for m in batch.microbatches] for batch in mini_batches(np.arange(8), plan, step=0, seed=None)]
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
        >>> [batch.optimizer_step for batch in mini_batches(np.arange(8), plan, step=0, seed=1, start=1)]
        [1]
    """
    updates = plan.updates(model)
    _check_samples(samples_S, plan.samples_per_step)
    first = _first_update(plan, updates, step, start)
    together = keep_prompts_together and seed is not None
    group = plan.samples_per_prompt if together else 1
    if updates.mini_batch_samples % group:
        raise ConfigError(
            f"mini batches of {updates.mini_batch_samples} samples would separate the samples_per_prompt={group} responses of "
            "a prompt; set keep_prompts_together=False or count mini batches in prompts",
            key="keep_prompts_together",
            nearest=(False,),
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise ConfigError(
            f"seed={str(seed)[:50]} must be a whole number from 0 to 2**63 - 1, or None", key="seed", nearest=(0,)
        )
    return _mini_batches(samples_S, plan, updates, step, seed, first, group)


def regroup(chunks: Iterable[Any], num_rows: int) -> Iterator[Any]:
    """Rebatch a stream of arrays, for example from generator calls to training passes.

    Args:
        chunks: pytrees of arrays (rows, ...), with any number of rows.
        num_rows: rows of every pytree in the output.

    Raises:
        ConfigError: If `num_rows` is below 1.
        DataError: If rows are left over at the end.

    Example:
        >>> [part.tolist() for part in regroup([np.arange(4), np.arange(4, 6)], 3)]
        [[0, 1, 2], [3, 4, 5]]
    """
    if num_rows < 1:
        raise ConfigError(f"num_rows={num_rows} must be at least 1", key="num_rows", nearest=(1,))
    return _regroup(chunks, num_rows)


def overlap(
    generate: Callable[[Request], Chunk],
    train: Callable[[Chunk], Result],
    requests: Iterable[Request],
    *,
    ahead: int = 1,
    on_cancel: Callable[[], None] | None = None,
) -> Iterator[Result]:
    """Generate the next microbatch in a thread while the current one trains. Yield the results of training, in order.

    At most `ahead` microbatches are generated ahead of the one that trains, including the one in progress, so the samples'
    policy is at most that many calls of `train` old. An exception of `generate` or `requests` is raised here in order, after
    all earlier microbatches have trained. If `train` raises, or the caller closes or drops the iterator, there are no further
    calls. The call in progress is awaited, and the thread ends before the exception propagates.

    Args:
        generate: generates one microbatch, in the other thread. A `jax.set_mesh` of the caller's thread has no effect there.
        train: trains on one microbatch, in the caller's thread.
        requests: the arguments of `generate`. The other thread reads them as late as possible, and closes them if they are a
            generator.
        ahead: the maximum number of microbatches to generate ahead.
        on_cancel: called if the iterator ends early, for example to interrupt a call in progress.

    Raises:
        ConfigError: If `ahead` is below 1.

    Example:
        >>> list(overlap(lambda prompt: prompt * 10, lambda sample: sample + 1, [1, 2, 3]))
        [11, 21, 31]
    """
    if ahead < 1:
        raise ConfigError(
            f"ahead={ahead} must be at least 1; without overlap, call train(generate(x))", key="ahead", nearest=(1,)
        )
    return _overlap(generate, train, requests, ahead, on_cancel)


def _mini_batches(
    samples: Any, plan: RolloutPlan, updates: Updates, step: int, seed: int | None, first: int, group: int
) -> Iterator[MiniBatch]:
    size = updates.microbatch_samples
    order, shuffled_epoch = np.arange(plan.samples_per_step), None
    for update in range(first, updates.optimizer_steps):
        position = plan.position(step * updates.optimizer_steps + update, model=updates.model)
        if seed is not None and position.epoch != shuffled_epoch:
            order = _shuffle(plan.samples_per_step, group, (seed, step, position.epoch, updates.model))
            shuffled_epoch = position.epoch
        places = updates.mini_batch_range(position.mini_batch)
        rows = order[places.start : places.stop]
        number = position.mini_batch
        microbatches = None if size is None else Microbatches(samples, rows, updates.num_microbatches(number), size)
        yield MiniBatch(position=position, rows=rows, microbatches=microbatches)


def _shuffle(num_samples: int, group: int, identity: tuple[int, int, int, str]) -> np.ndarray:
    """Return a permutation of the samples that keeps groups together.

    It sorts the raw output of a bit generator, because NumPy guarantees that stream. `Generator.permutation` may change.
    """
    seed, step, epoch, model = identity
    bits = np.random.Philox(np.random.SeedSequence([seed, step, epoch, *model.encode()]))
    groups = np.argsort(bits.random_raw(num_samples // group), kind="stable")
    return (groups[:, None] * group + np.arange(group)).ravel()


def _first_update(plan: RolloutPlan, updates: Updates, step: int, start: int | RolloutPosition) -> int:
    if not 0 <= step < plan.num_steps:
        last = plan.num_steps - 1
        text = f"step={step} must be between 0 and num_steps - 1 = {last}"
        raise ResumeMismatchError(text, key="step", nearest=(0 if step < 0 else last,))
    if isinstance(start, RolloutPosition):
        if start != plan.position(start.optimizer_step, model=updates.model) or start.step != step:
            text = f"{start} is not a position of the {updates.model} in step={step} of this plan"
            raise ResumeMismatchError(text, key="start")
        return start.update
    if not 0 <= start <= updates.optimizer_steps:
        raise ResumeMismatchError(
            f"start={start} must be between 0 and optimizer_steps={updates.optimizer_steps} per rollout of the {updates.model}",
            key="start",
            nearest=(0 if start < 0 else updates.optimizer_steps,),
        )
    return start


def _check_samples(samples: Any, expected: int) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(samples)
    if not leaves:
        raise DataError("the samples of a step have no arrays")
    for path, leaf in leaves:
        shape = np.shape(leaf)
        if not shape or shape[0] != expected:
            raise DataError(
                f"samples{jax.tree_util.keystr(path)} has shape {tuple(shape)}; its first dimension must be the {expected} "
                "samples of a step",
                nearest=(expected,),
            )


def _regroup(chunks: Iterable[Any], num_rows: int) -> Iterator[Any]:
    pending: list[Any] = []
    count = 0
    for chunk in chunks:
        pending.append(chunk)
        count += len(jax.tree.leaves(chunk)[0])
        if count < num_rows:
            continue
        joined = pending[0] if len(pending) == 1 else jax.tree.map(lambda *parts: _concatenate(parts), *pending)
        complete = count - count % num_rows
        for start in range(0, complete, num_rows):
            yield _rows(joined, start, start + num_rows)
        pending, count = ([_rows(joined, complete, count)] if count > complete else []), count - complete
    if count:
        raise DataError(
            f"{count} rows are left over at the end; the total number of rows must be a multiple of num_rows={num_rows}"
        )


def _rows(tree: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[start:stop], tree)


def _concatenate(parts: Sequence[Any]) -> Any:
    return (jnp if any(isinstance(part, jax.Array) for part in parts) else np).concatenate(parts)


class _End(NamedTuple):
    """The last item from the generating thread, with the exception that ended it, if any."""

    error: BaseException | None


def _overlap(
    generate: Callable[[Request], Chunk],
    train: Callable[[Chunk], Result],
    requests: Iterable[Request],
    ahead: int,
    on_cancel: Callable[[], None] | None,
) -> Iterator[Result]:
    done: queue.SimpleQueue[Chunk | _End] = queue.SimpleQueue()
    slots, cancelled = threading.Semaphore(ahead), threading.Event()

    def work() -> None:
        error: BaseException | None = None
        source: Iterator[Request] = iter(())
        try:
            source = iter(requests)
            while slots.acquire() and not cancelled.is_set():
                try:
                    request = next(source)
                except StopIteration:
                    break
                done.put(generate(request))
        except BaseException as raised:  # noqa: BLE001 - it is raised in the caller's thread
            error = raised
        try:
            getattr(source, "close", lambda: None)()
        except BaseException as raised:  # noqa: BLE001 - the same
            error = error or raised
        done.put(_End(error))

    thread = threading.Thread(target=work, name="rampup-generate", daemon=True)
    complete = False
    try:
        thread.start()
        while not isinstance(chunk := done.get(), _End):
            slots.release()
            result = train(chunk)
            del chunk  # free its memory before waiting for the next one
            yield result
        complete = True
        if chunk.error is not None:
            raise chunk.error
    finally:
        cancelled.set()
        slots.release()
        if on_cancel is not None and not complete:
            on_cancel()
        if thread.ident is not None and threading.current_thread() is not thread:
            thread.join()
        _add_generator_note(done)


def _add_generator_note(done: queue.SimpleQueue[Any]) -> None:
    """If the generating thread failed too, add a note about it to the exception that ends the overlap."""
    while not done.empty():
        last, raised = done.get(), sys.exception()
        if isinstance(last, _End) and last.error is not None and raised is not None:
            raised.add_note(f"the generator failed too: {type(last.error).__name__}: {last.error}")

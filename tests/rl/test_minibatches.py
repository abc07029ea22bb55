"""Tests of rampup.rl.minibatches."""

import itertools
import signal
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import ConfigError, DataError, RampupError, ResumeMismatchError
from rampup.packing import make_ladder, pack
from rampup.rl.minibatches import mini_batches, overlap, regroup
from rampup.rl.plan import RolloutPlan
from rampup.rl.sizes import Size
from rampup.rl.updates import Training


def make(prompts=12, n=2, mini=4, micro=1, replicas=2, *, epochs=2, pad=False, unit="prompts", **options):
    """Return a plan whose microbatch counts samples per replica."""
    policy = Training(
        mini_batch=Size(count=mini, unit=unit),
        microbatch=Size(count=micro, unit="samples", scope="replica"),
        data_parallel_size=replicas,
        num_epochs=epochs,
    )
    batch = Size(count=prompts, unit="prompts")
    return RolloutPlan(rollout_batch=batch, samples_per_prompt=n, policy=policy, num_steps=3, pad=pad, **options)


def rows_of(batches):
    """Return position and real rows of every mini batch, read from its microbatches' arrays."""
    return [
        (b.position, [int(x) for m in b.microbatches for x, w in zip(m.samples["id"], m.weights, strict=True) if w])
        for b in batches
    ]


def samples(plan):
    """Return the samples of a step. Their ids are their rows."""
    ids = np.arange(plan.samples_per_step)
    return {"id": ids, "tokens": ids[:, None] + np.zeros((1, 3), int)}


sizes = st.integers(1, 6)


@given(sizes, sizes, sizes, sizes, sizes, st.booleans(), st.integers(0, 3), st.booleans())
def test_mini_batches_have_every_sample_once(prompts, n, mini, micro, replicas, pad, seed, together):
    """Every epoch has every sample once, in microbatches of one shape, and weights mark exactly the real rows."""
    try:
        plan = make(prompts, n, mini, micro, replicas, pad=pad)
    except RampupError:
        return
    found = list(mini_batches(samples(plan), plan, step=1, seed=seed, keep_prompts_together=together))
    updates = plan.policy_updates
    assert len(found) == updates.optimizer_steps
    for epoch in range(updates.num_epochs):
        rows = [row for position, rows in rows_of(found) if position.epoch == epoch for row in rows]
        assert sorted(rows) == list(range(plan.samples_per_step))
    padded = 0
    for batch in found:
        assert batch.weight == len(batch.rows) == sum(m.weights.sum() for m in batch.microbatches)
        for microbatch in batch.microbatches:
            assert microbatch.samples["tokens"].shape == (updates.microbatch_samples, 3)
            assert (microbatch.samples["tokens"] == microbatch.rows[:, None]).all()
            padded += int((microbatch.weights == 0).sum())
        if together and not pad:
            assert {tuple(np.bincount(batch.rows // n)[np.unique(batch.rows // n)])} == {(n,) * (batch.weight // n)}
    assert padded == updates.padded_samples * updates.num_epochs


def test_mini_batches_resume_at_every_optimizer_step():
    """Starting at any number or position gives the rest of an uninterrupted run."""
    plan = make(critic=Training(mini_batch=Size(count=6, unit="prompts"), data_parallel_size=4, num_epochs=3))
    for model in ("policy", "critic"):
        steps = plan.updates(model).optimizer_steps
        whole = rows_of(mini_batches(samples(plan), plan, step=2, seed=5, model=model))
        for start in range(steps + 1):
            assert rows_of(mini_batches(samples(plan), plan, step=2, seed=5, model=model, start=start)) == whole[start:]
        for start in range(steps):
            position = plan.position(2 * steps + start, model=model)
            assert rows_of(mini_batches(samples(plan), plan, step=2, seed=5, model=model, start=position)) == whole[start:]
        assert [position.optimizer_step for position, _ in whole] == list(range(2 * steps, 3 * steps))


def test_shuffle_depends_on_seed_rollout_epoch_and_model():
    """Every seed, rollout, epoch and model has its own order, and the same ones have the same order."""
    plan = make(epochs=3, critic=Training(mini_batch=Size(count=4, unit="prompts"), num_epochs=2))
    orders = set()
    for seed, step, model in [(0, 0, "policy"), (1, 0, "policy"), (0, 1, "policy"), (0, 0, "critic")]:
        found = list(mini_batches(samples(plan), plan, step=step, seed=seed, model=model))
        again = list(mini_batches(samples(plan), plan, step=step, seed=seed, model=model))
        for epoch in range(plan.updates(model).num_epochs):
            order, same = (tuple(int(r) for b in run if b.epoch == epoch for r in b.rows) for run in (found, again))
            assert order == same
            orders.add(order)
    assert len(orders) == 3 * 3 + 2


def test_shuffle_is_stable():
    """The order of seed 0 is fixed, so that a run resumed with newer libraries keeps its order."""
    found = mini_batches(np.arange(24), make(), step=0, seed=0)
    assert [row // 2 for row in next(found).rows[::2].tolist()] == [8, 3, 5, 10]


def test_mini_batches_without_a_seed_keep_the_order():
    """Without a seed, samples keep the order of generation, so that training can overlap with it."""
    rows = [row for b in mini_batches(np.arange(24), make(epochs=1), step=0, seed=None) for row in b.rows]
    assert rows == list(range(24))


def test_keep_prompts_together():
    """Mini batches that would separate the responses to a prompt are an error, unless it is allowed."""
    plan = make(prompts=4, n=3, mini=2, unit="samples")
    with pytest.raises(ConfigError, match="samples_per_prompt=3"):
        mini_batches(samples(plan), plan, step=0, seed=0)
    rows = rows_of(mini_batches(samples(plan), plan, step=0, seed=0, keep_prompts_together=False))
    assert sorted(row for position, part in rows for row in part if position.epoch == 0) == list(range(12))
    assert len(list(mini_batches(samples(plan), plan, step=0, seed=None))) == 12


def test_weighted_gradients_equal_those_of_the_mini_batch():
    """Gradients accumulated over padded microbatches, divided by the weight, equal those of the mini batch."""
    plan = make(prompts=7, n=3, mini=3, micro=2, replicas=2, epochs=1, pad=True)
    rng = np.random.default_rng(0)
    data = {"x": jnp.asarray(rng.normal(size=(21, 4))), "y": jnp.asarray(rng.normal(size=21))}
    w = jnp.asarray(rng.normal(size=4))
    shapes = []

    @jax.jit
    def gradient(w, batch, weights):
        shapes.append(weights.shape)
        return jax.grad(lambda w: jnp.sum(weights * jnp.log1p((batch["x"] @ w - batch["y"]) ** 2)))(w)

    for batch in mini_batches(data, plan, step=0, seed=3):
        assert isinstance(batch.microbatches[0].samples["x"], jax.Array)
        total = sum(gradient(w, m.samples, m.weights) for m in batch.microbatches) / batch.weight
        part = jax.tree.map(lambda x, rows=batch.rows: x[rows], data)
        whole = jax.grad(lambda w, part=part: jnp.mean(jnp.log1p((part["x"] @ w - part["y"]) ** 2)))(w)
        np.testing.assert_allclose(total, whole, rtol=1e-5)
    assert shapes == [(4,)]


def test_microbatches_are_a_lazy_sequence():
    """They have a length, an index and slices, and are created on access."""
    batch = next(mini_batches(np.arange(24), make(), step=0, seed=0))
    assert len(batch.microbatches) == 4
    assert batch.microbatches[-1].rows.tolist() == list(batch.microbatches)[3].rows.tolist()
    assert [m.rows.tolist() for m in batch.microbatches[1:3]] == [batch.microbatches[i].rows.tolist() for i in (1, 2)]
    with pytest.raises(IndexError):
        batch.microbatches[4]


def test_token_budget_is_packed_within_the_planned_passes():
    """With a token budget, `pack` splits the rows of a mini batch into at most the planned passes."""
    policy = Training(
        mini_batch=Size(count=8, unit="prompts"),
        microbatch=Size(count=64, unit="tokens", scope="replica"),
        data_parallel_size=2,
    )
    plan = RolloutPlan(rollout_batch=Size(count=16, unit="prompts"), samples_per_prompt=4, policy=policy)
    lengths = np.random.default_rng(0).integers(1, 33, size=64)
    for batch in mini_batches(lengths, plan, step=0, seed=0):
        assert batch.microbatches is None
        packed = pack(lengths[batch.rows].tolist(), 64, make_ladder(64, 4), num_replicas=2)
        assert sorted(i for replica in packed.replicas for part in replica for i in part) == list(range(32))
        assert packed.num_microbatches <= replace(plan.policy_updates, max_passes=8).accumulation_steps


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"step": -1}, ResumeMismatchError),
        ({"step": 3}, ResumeMismatchError),
        ({"start": -1}, ResumeMismatchError),
        ({"start": 7}, ResumeMismatchError),
        ({"start": make().position(6)}, ResumeMismatchError),
        ({"start": make(mini=12).position(1)}, ResumeMismatchError),
        ({"model": "critic"}, ConfigError),
        ({"seed": -1}, ConfigError),
        ({"seed": 2**63}, ConfigError),
        ({"seed": 0.5}, ConfigError),
        ({"samples": np.arange(23)}, DataError),
        ({"samples": {}}, DataError),
        ({"samples": np.float32(1)}, DataError),
        ({"samples": {"a": np.arange(24), "b": np.arange(25)}}, DataError),
    ],
)
def test_mini_batches_rejects_bad_arguments(arguments, error):
    """Wrong rows, starts and seeds raise errors at the call, before training."""
    arguments = {"step": 0, "seed": 0} | arguments
    with pytest.raises(error):
        mini_batches(arguments.pop("samples", np.arange(24)), make(), **arguments)


@given(st.lists(st.integers(0, 7), max_size=12), st.integers(1, 9))
def test_regroup(chunks, num_rows):
    """Rows keep their order in parts of the requested size. Left-over rows raise an error after all full parts."""
    bounds = np.cumsum([0, *chunks])
    parts, left = [], None
    try:
        parts.extend(part["id"] for part in regroup([{"id": np.arange(a, b)} for a, b in itertools.pairwise(bounds)], num_rows))
    except DataError as error:
        left = str(error)
    assert all(len(part) == num_rows for part in parts)
    assert [row for part in parts for row in part] == list(range(sum(chunks) // num_rows * num_rows))
    assert (left is not None) == (sum(chunks) % num_rows > 0)


def test_regroup_keeps_jax_arrays():
    """Chunks on a device stay there."""
    (part,) = regroup([jnp.arange(2), jnp.arange(2, 4)], 4)
    assert isinstance(part, jax.Array)
    assert part.tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError):
        regroup([], 0)


def threads():
    """Return the generating threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "rampup-generate"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_overlap_limits_generation_ahead(ahead):
    """Generation i+1 starts before training i ends, training starts after its generation, and `ahead` is respected."""
    times, number, started = {}, 6, [threading.Event() for _ in range(7)]

    def generate(i):
        times["generate", i, "start"] = time.monotonic()
        started[i].set()
        time.sleep(0.01)
        times["generate", i, "end"] = time.monotonic()
        return i

    def train(i):
        times["train", i, "start"] = time.monotonic()
        assert started[i + 1].wait(30) or i + 1 == number
        time.sleep(0.01)
        times["train", i, "end"] = time.monotonic()
        return i

    started[number].set()
    assert list(overlap(generate, train, range(number), ahead=ahead)) == list(range(number))
    for i in range(number - 1):
        assert times["generate", i + 1, "start"] < times["train", i, "end"]
        assert times["generate", i, "end"] <= times["train", i, "start"]
        assert times["train", i, "end"] <= times["train", i + 1, "start"]
    for i in range(number - ahead - 1):
        assert times["generate", i + ahead + 1, "start"] >= times["train", i, "end"]
    assert not threads()


@pytest.mark.parametrize("where", ["generate", "requests"])
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_overlap_raises_generator_errors_in_order(where, failing, kind):
    """An exception of the other thread at item i is raised after the items before it have trained."""

    def generate(number):
        if where == "generate" and number == failing:
            raise kind("generator")
        return number

    def requests():
        for number in range(5):
            if where == "requests" and number == failing:
                raise kind("generator")
            yield number

    trained = []
    with pytest.raises(kind, match="generator"):
        list(overlap(generate, trained.append, requests()))
    assert trained == list(range(failing))
    assert not threads()


def test_overlap_stops_generation_on_training_errors():
    """If training raises, there are no further calls, the call in progress ends, and its thread closes the requests."""
    closed, generated = [], []

    def requests():
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread().name)

    def generate(number):
        generated.append(number)
        time.sleep(0.02)
        return number

    def train(number):
        if number == 2:
            raise RuntimeError("training")
        return number

    with pytest.raises(RuntimeError, match="training"):
        list(overlap(generate, train, requests()))
    assert not threads()
    assert closed == ["rampup-generate"]
    assert len(generated) <= 4


def test_overlap_reports_both_errors():
    """If generation fails too, the exception of training has a note about it."""

    def generate(number):
        if number == 1:
            raise ValueError("out of prompts")
        return number

    def train(number):
        time.sleep(0.05)
        raise RuntimeError("training")

    with pytest.raises(RuntimeError) as caught:
        list(overlap(generate, train, range(3)))
    assert caught.value.__notes__ == ["the generator failed too: ValueError: out of prompts"]


def test_overlap_close_cancels_and_joins():
    """Closing or dropping the iterator ends the thread, and `on_cancel` can interrupt a call in progress."""
    released, told = threading.Event(), []

    def generate(number):
        if number > 0:
            assert released.wait(30)
        return number

    def on_cancel():
        told.append(True)
        released.set()

    results = overlap(generate, lambda x: x, range(10), on_cancel=on_cancel)
    assert next(results) == 0
    assert len(threads()) == 1
    results.close()
    assert told == [True]
    assert not threads()
    for _ in overlap(lambda x: x, lambda x: x, range(10)):
        break
    assert not threads()


def test_overlap_starts_on_first_use():
    """An unused iterator has no thread, and `on_cancel` is not called after a complete run."""
    told = []
    unread = overlap(lambda x: x, lambda x: x, range(3))
    assert not threads()
    unread.close()
    assert list(overlap(lambda x: x, lambda x: x, [], on_cancel=lambda: told.append(1))) == []
    assert list(overlap(lambda x: x, lambda x: x, range(3), on_cancel=lambda: told.append(1))) == [0, 1, 2]
    assert told == []


def test_overlap_joins_on_keyboard_interrupt():
    """A KeyboardInterrupt while waiting or training ends the thread and propagates."""
    for waiting in (True, False):
        started = threading.Event()

        def slow(number, started=started):
            started.set()
            time.sleep(0.3)
            return number

        def interrupt(started=started):
            started.wait(10)
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        generate, train = (slow, lambda x: x) if waiting else (lambda x: x, slow)
        with pytest.raises(KeyboardInterrupt):
            list(overlap(generate, train, range(10)))
        thread.join()
        assert not threads()


def test_overlap_with_jax():
    """Generation and training on devices give the same result as without overlap."""
    generate = jax.jit(lambda x: jnp.sin(x) * jnp.ones((4, 8)))
    train = jax.jit(lambda x: x.sum())
    values = [jnp.float32(i) for i in range(5)]
    found = [float(x) for x in overlap(generate, train, values)]
    assert found == [float(train(generate(x))) for x in values]


def test_overlap_rejects_ahead_below_one():
    """`ahead` must be at least 1."""
    with pytest.raises(ConfigError, match="ahead=0"):
        overlap(lambda x: x, lambda x: x, [1], ahead=0)

"""Loops of one's own: streaming data, accumulation in a jitted step, frozen weights, and states that do not belong together."""

import contextlib
import dataclasses
import functools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from flax.training.dynamic_scale import DynamicScale
from helpers.toy import loss_fn, mesh_of, new_params, plan_for, rows, start, train

import rampup
from rampup.errors import ConfigError, DataError, RampupError
from rampup.loop.checkpoint import Checkpoints, find_checkpoint


def dense_loss(params, batch, keys):
    """Weighted squared error without dropout."""
    error = jnp.sum((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["x"]) ** 2, axis=-1)
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {}


def trained(mesh, plan, batches, step=None):
    """Return the parameters after the batches that a function of a step yields."""
    tx = optax.sgd(0.01)
    step = step or rampup.train_step(dense_loss, tx, plan, mesh)
    state = rampup.create_state(new_params(mesh), step.tx, mesh)
    for batch in batches(step):
        state, _ = step(state, batch)
    return jax.tree.map(np.asarray, state.params)


def check_equal(a, b):
    """Check that two trees are equal to rounding."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a, b)


def stacked(items):
    """Return rows as arrays."""
    return jax.tree.map(lambda *x: np.stack(x), *items)


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_streams_of_rows_and_batches_equal_random_access(mesh_name):
    """A generator, a Grain IterDataset and batches of another size train as the rows by number do."""
    mesh = mesh_of(mesh_name)
    plan = plan_for(mesh, steps=6)
    expected = trained(mesh, plan, lambda step: step.batches(rows()))
    dataset = grain.MapDataset.source(rows()).to_iter_dataset()
    check_equal(trained(mesh, plan, lambda step: step.stream(iter(rows()))), expected)
    check_equal(trained(mesh, plan, lambda step: step.stream(dataset)), expected)
    check_equal(trained(mesh, plan, lambda step: step.stream(dataset.batch(24), batched=True)), expected)


def test_batch_makes_a_batch_of_arrays():
    """Arrays that contain the rows of the next step make a batch; another number of rows is an error."""
    mesh = mesh_of("data")
    plan = plan_for(mesh, steps=6)
    data, expected = rows(), trained(mesh, plan, lambda step: step.batches(rows()))

    def batches(step):
        for number in range(6):
            position = plan.position(number)
            first = position.consumed_samples
            yield step.batch(stacked(data[first : first + position.split.global_batch_size]))

    check_equal(trained(mesh, plan, batches), expected)
    step = rampup.train_step(dense_loss, optax.sgd(0.01), plan, mesh)
    with pytest.raises(DataError, match="step 4 takes arrays of 32 rows"):
        step.batch(stacked(data[:16]), step=4)


def test_stream_takes_no_more_rows_than_its_steps():
    """A stream reads the rows of the steps that it yielded and no others, so that its state can be saved with a step."""
    step, source = start(steps=4)[0], iter(rows())
    next(step.stream(source))
    assert next(source)["id"] == 16
    with pytest.raises(DataError, match="step 0 needs 16 rows in this process, but the source ended after 5"):
        next(step.stream(rows()[:5]))
    assert len(list(step.stream(rows()[:32]))) == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (grain.MapDataset.range(99).to_iter_dataset(), "step.stream"),
        ((n for n in range(9)), "step.stream"),
        (grain.MapDataset.range(99).filter(lambda n: n % 2), "filter"),
    ],
)
def test_sources_that_cannot_be_indexed_are_refused(source, words):
    """Iterators and filtered datasets are errors that name the remedy."""
    with pytest.raises(DataError, match=words):
        list(rampup.step_batches(source, plan_for(mesh_of("one"), steps=2), mesh_of("one")))


def test_steps_beyond_the_plan_are_refused():
    """`stop` beyond the plan's end is an error that names both."""
    with pytest.raises(DataError, match=r"steps 0 to 13 .* 0 to 12"):
        list(rampup.step_batches(rows(), plan_for(mesh_of("one")), mesh_of("one"), stop=13))


def test_map_dataset_has_epochs_of_its_own():
    """Without a seed, a shuffled MapDataset has another order in its second epoch, as Grain's `repeat` gives."""
    mesh = mesh_of("one")
    source = grain.MapDataset.range(16).shuffle(seed=3)
    batches = rampup.step_batches(source, plan_for(mesh, "0:16", steps=2), mesh)
    found = np.concatenate([np.concatenate(batch.chunks)[: batch.num_microbatches].ravel() for batch in batches])
    assert found.tolist() == [source.repeat()[n] for n in range(32)]
    assert found[:16].tolist() != found[16:].tolist()
    with pytest.raises(DataError, match="seed=None"):
        next(rampup.step_batches(source.repeat(), plan_for(mesh), mesh, seed=1))


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_accumulate_in_a_jitted_step_of_ones_own(mesh_name):
    """`accumulate` without keys and shardings gives the parameters of `train_step`, with one compilation."""
    mesh = mesh_of(mesh_name)
    plan, tx = plan_for(mesh, steps=6), optax.sgd(0.01)
    state = train_state.TrainState.create(apply_fn=None, params=new_params(mesh), tx=tx)
    state = rampup.prepare_state(state, mesh)

    @jax.jit
    def own_step(state, batch_KR, num_microbatches):
        sums = rampup.accumulate(dense_loss, state.params, batch_KR, num_microbatches, mesh=mesh)
        return state.apply_gradients(grads=sums.mean_grads(state.params)), sums.loss / sums.weight

    chunk_size = max(plan.max_microbatches.values())
    for batch in rampup.step_batches(rows(), plan, mesh, chunk_size=chunk_size):
        state, _ = own_step(state, batch.chunks[0], batch.num_microbatches)
    assert own_step._cache_size() <= 2
    check_equal(state.params, trained(mesh, plan, lambda step: step.batches(rows())))


def test_step_inside_jit_names_accumulate():
    """A TrainStep in a user's `jax.jit` is refused with the function to use there."""
    step, state = start()
    batch = next(step.batches(rows()))
    with pytest.raises(ConfigError, match=r"rampup\.accumulate"):
        jax.jit(lambda state: step(state, batch))(state)
    with pytest.raises(DataError, match=r"step\.batch\(arrays\)"):
        step(state, {"x": 1})
    with pytest.raises(ConfigError, match="prepare_state"):
        step(state.replace(step=0), batch)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((optax.sgd(0.1), loss_fn), "loss_fn is a .*check the order"),
        (
            (loss_fn, nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)),
            "`tx`, not an nnx.Optimizer",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    """Swapped arguments and an `nnx.Optimizer` are errors in words."""
    mesh = mesh_of("one")
    with pytest.raises(ConfigError, match=words):
        rampup.train_step(*arguments, plan_for(mesh), mesh)


def test_mutable_of_another_structure_is_named():
    """A loss that changes the structure of `mutable`, or takes no fourth argument, is refused in words."""

    def grows(params, batch, keys, mutable):
        return *loss_fn(params, batch, keys), mutable | {"more": 1.0}

    for loss, words in ((grows, r"\['more'\] was absent"), (loss_fn, "cannot be called with 4 arguments")):
        with pytest.raises(ConfigError, match=words):
            train(*start(loss=loss, mutable={"n": jnp.zeros(())}))


def test_plan_beyond_int32_steps_is_refused():
    """A plan with more steps than a device can count is refused when the step is made."""
    plan = dataclasses.replace(plan_for(mesh_of("one")), total_steps=2**31)
    with pytest.raises(RampupError, match="int32"):
        rampup.train_step(loss_fn, optax.sgd(0.1), plan, mesh_of("one"))


def test_learning_rate_can_be_jitted():
    """`jax.jit` takes a LearningRate directly."""
    rate = rampup.LearningRate(plan=plan_for(mesh_of("one")), peak=1.0)
    assert float(jax.jit(rate)(jnp.int32(0))) == pytest.approx(rate.at(0))


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_prepared_states_are_copies(mesh_name):
    """`prepare_state` copies: tied arrays are not donated twice and the caller's arrays survive."""
    params = new_params(mesh_of(mesh_name))
    params["tied"] = params["in"]

    def state(params, tx):
        return train_state.TrainState.create(apply_fn=None, params=params, tx=tx)

    train(*start(mesh_name, params=params, state=state), steps=1)
    assert np.isfinite(np.asarray(params["in"])).all()


@pytest.mark.parametrize("mesh_name", ["one", "data"])
def test_dynamic_scale_skips_and_adapts(mesh_name):
    """A Flax DynamicScale scales a float16 loss, skips what overflows, and adapts."""

    class State(train_state.TrainState):
        dynamic_scale: DynamicScale = None

    def half_loss(params, batch, keys):
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        loss, weight, aux = dense_loss(half, jax.tree.map(lambda x: x.astype(jnp.float16), batch), keys)
        return loss.astype(jnp.float32), weight.astype(jnp.float32), aux

    def scaled(params, tx):
        scale = DynamicScale(scale=jnp.float32(2.0**20), growth_interval=3)
        return State.create(apply_fn=None, params=params, tx=tx, dynamic_scale=scale)

    (step, state), skipped = start(mesh_name, half_loss, optax.sgd(0.01), steps=16, state=scaled), []
    for batch in step.batches(rows()):
        state, metrics = step(state, batch)
        skipped.append(bool(metrics["skipped"]))
    assert skipped[0]
    assert not all(skipped)
    assert float(state.dynamic_scale.scale) < 2.0**20
    assert int(state.step) == 16
    assert np.isfinite(float(metrics["grad_norm"]))
    assert np.isfinite(state.params["in"]).all()


def test_checkpoint_saves_every_field_of_a_state(tmp_path):
    """A field of one's own, such as a moving average, is in the checkpoint and comes back."""

    class State(train_state.TrainState):
        ema: dict = None

    mesh = mesh_of("one")
    tx, params = optax.sgd(0.1), new_params(mesh)

    def state(value):
        made = State.create(apply_fn=None, params=params, tx=tx, ema=jax.tree.map(lambda p: jnp.full_like(p, value), params))
        return rampup.prepare_state(made, mesh)

    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state(7.0), {})
        checkpoints.wait()
        restored = checkpoints.restore(find_checkpoint(tmp_path / "checkpoints"), state(0.0))
    assert float(restored.ema["in"].min()) == 7
    assert restored.tx is tx


class LoRAModel(nnx.Module):
    """Two linear layers with LoRA, and what a model may have beside: statistics, dropout, sown values."""

    def __init__(self, rngs):
        self.hidden = nnx.LoRALinear(8, 64, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.LoRALinear(64, 8, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        """Return as many numbers per row as it has."""
        hidden = nnx.relu(self.norm(self.hidden(x)))
        self.sow(nnx.Intermediate, "features", hidden)
        return self.out(self.dropout(hidden))


@pytest.mark.parametrize(
    ("wrt", "mesh_name"),
    [
        (nnx.LoRAParam, "data"),
        pytest.param(nnx.Param, "one", marks=pytest.mark.slow),
        pytest.param(nnx.LoRAParam, "one", marks=pytest.mark.slow),
        pytest.param(nnx.Param, "data", marks=pytest.mark.slow),
    ],
)
def test_split_model_trains_what_wrt_selects(mesh_name, wrt):
    """Only `wrt` is trained and accumulated; statistics, dropout and sown values work."""

    def model_loss(model, batch, keys):
        error = (model(batch["x"]) - batch["x"]) ** 2
        return jnp.sum(error), error.size, {"features": jnp.sum(nnx.pop(model, nnx.Intermediate)["features"][0])}

    mesh = mesh_of(mesh_name)
    plan, tx, model = plan_for(mesh, "0:64 256:128", microbatch_size=8), optax.adam(0.05), LoRAModel(nnx.Rngs(0))
    model(jnp.ones((2, 8)))  # leaves a sown value in the model
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    state, pure = rampup.split_model(model, model_loss, tx, mesh, wrt=wrt)
    step, losses = rampup.train_step(pure, tx, plan, mesh), []
    for batch in step.batches(rows()):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    rampup.merge_model(model, state)
    assert losses[-1] < losses[0]
    assert float(metrics["aux"]["features"]) > 0
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), before, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert same["hidden"]["kernel"] == (wrt is nnx.LoRAParam)
    assert not same["hidden"]["lora"]["lora_b"]
    assert len(jax.tree.leaves(state.params)) == (4 if wrt is nnx.LoRAParam else 10)
    assert float(rampup.EvalStep(pure, mesh)(state, batch)[1]) > 0
    # The model has arrays of its own.
    with contextlib.suppress(StopIteration):
        step(state, next(step.batches(rows(), start=state.step)))
    assert np.isfinite(np.asarray(model(jnp.ones((2, 8))))).all()


@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_multi_steps_updates_a_state_of_ones_own_once_per_step(skip_nonfinite):
    """With `multi_steps`, a moving average in `apply_gradients` moves once per optimizer step, as with `fused`."""

    class State(train_state.TrainState):
        ema: dict = None

        def apply_gradients(self, *, grads, **changes):
            new = super().apply_gradients(grads=grads, **changes)
            return new.replace(ema=jax.tree.map(lambda e, p: 0.5 * (e + p), self.ema, new.params))

    def averaged(params, tx):
        return State.create(apply_fn=None, params=params, tx=tx, ema=jax.tree.map(jnp.zeros_like, params))

    data, states = [row | {"weight": np.float32(2)} for row in rows()], []
    for engine in ("fused", "multi_steps"):
        options = {"microbatch_size": 4, "steps": 4, "engine": engine, "skip_nonfinite": skip_nonfinite}
        state, _ = train(*start("one", dense_loss, optax.sgd(0.01), state=averaged, **options), data=data)
        states.append((state.params, state.ema, int(state.step)))
    check_equal(*states)


def test_grad_norm_of_complex_parameters_is_real():
    """The norm of a complex gradient is a real number."""

    def loss(params, batch, keys):
        return jnp.sum(jnp.abs(params["w"]) ** 2) * batch["weight"].size, batch["weight"].size, {}

    _, metrics = train(*start(loss=loss, params={"w": jnp.array([3 + 4j, 0], jnp.complex64)}), steps=1)
    assert metrics["grad_norm"].dtype == jnp.float32
    assert float(metrics["grad_norm"]) == pytest.approx(10)


def test_generator_that_fills_one_buffer_again_and_again():
    """A source that yields the same arrays, filled with the next rows, trains as one that yields new ones."""
    mesh = mesh_of("one")
    plan = plan_for(mesh, steps=6)

    def refilled(items):
        buffer = jax.tree.map(np.array, items[0])
        for item in items:
            jax.tree.map(lambda x, new: np.copyto(x, new), buffer, item)
            yield buffer

    data = rows()
    expected = trained(mesh, plan, lambda step: step.batches(data))
    check_equal(trained(mesh, plan, lambda step: step.stream(refilled(data))), expected)
    batches = [stacked(data[n : n + 8]) for n in range(0, len(data) // 8 * 8, 8)]
    check_equal(trained(mesh, plan, lambda step: step.stream(refilled(batches), batched=True)), expected)


@pytest.mark.parametrize(
    ("items", "batched", "words"),
    [
        ([{"x": np.zeros((9, 4)), "y": np.zeros(7)}, {"x": np.zeros((7, 4)), "y": np.zeros(9)}], True, "arrays of 7, 9 rows"),
        ([{"x": np.zeros((9, 4)), "y": np.float32(1)}], True, "arrays of no, 9 rows"),
        ([{}], False, "arrays of no rows"),
        ([{"x": {"text": "words"}, "y": 1.0}] * 99, False, r"batch\['x'\]\['text'\] cannot be put on a device"),
        ([dataclasses.make_dataclass("Row", ["x"])(1.0)] * 99, False, "batch cannot be put on a device; give rows that are"),
    ],
)
def test_streamed_rows_that_do_not_fit_are_named(items, batched, words):
    """Arrays of different numbers of rows would be matched wrongly, and JAX does not say which part of a row is no number."""
    with pytest.raises(DataError, match=words):
        next(start()[0].stream(iter(items), batched=batched))


def test_batch_of_another_plan_is_refused():
    """A batch with the layout of the step's plan, but the size that another plan has at this step."""
    step, state = start(schedule="0:16 48:32", steps=4)
    other, again = start(schedule="0:16 16:32", steps=4)[0], start(schedule="0:16 48:32", steps=4)[0]
    first, second = other.batches(rows(), stop=2)
    with pytest.raises(DataError, match="of another plan: phase 0, from sample 0, with 16 samples"):
        step(state, first)
    with pytest.raises(DataError, match="of another plan: phase 1, from sample 16, with 32 samples"):
        step(state.replace(step=state.step + 1), second)
    # The same plan, made again, is the same.
    state, _ = step(state, next(again.batches(rows())))
    assert int(state.step) == 1


ROWS = grain.MapDataset.source([{"x": np.ones((2, 3), np.float32)} for _ in range(32)])


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS.batch(4),
        ROWS.batch(4).map(lambda batch: batch).shuffle(seed=1).repeat(2)[3:],
        grain.MapDataset.concatenate([ROWS.map(lambda row: row), ROWS.batch(4)]),
    ],
    ids=["last", "before", "part"],
)
def test_batched_datasets_are_refused(dataset):
    """Where rows are expected, a dataset that batches is an error before a row is read, however it goes on."""
    step, _ = start(schedule="0:8", steps=2)
    with pytest.raises(DataError, match=r"is batched .* the plan decides .* or train with step.stream"):
        next(step.batches(dataset))
    for source in (dataset.to_iter_dataset(), iter(dataset.to_iter_dataset()), ROWS.to_iter_dataset().batch(4)):
        with pytest.raises(DataError, match=r"is batched .* or give batched=True"):
            next(step.stream(source))
    assert next(step.stream(ROWS.to_iter_dataset().batch(4), batched=True)).chunks[0]["x"].shape == (1, 8, 2, 3)


def test_batched_loaders_are_refused_and_rows_of_two_dimensions_are_not():
    """A DataLoader's operations are looked at too; rows that are matrices, and unknown classes, are legal."""
    step, _ = start(schedule="0:8", steps=2)

    def loader(*operations):
        sampler = grain.samplers.IndexSampler(32, shard_options=grain.sharding.NoSharding(), num_epochs=1)
        return grain.DataLoader(data_source=ROWS, sampler=sampler, operations=operations)

    class Pairs(grain.MapDataset):
        """Rows that are two elements each, which rampup cannot know."""

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return ROWS.batch(2)[index]

    for source in (loader(grain.transforms.Batch(4)), iter(loader(grain.transforms.Batch(4)))):
        with pytest.raises(DataError, match="is batched"):
            next(step.stream(source))
    assert next(step.stream(loader())).chunks[0]["x"].shape == (1, 8, 2, 3)
    assert next(step.batches(ROWS.map(lambda row: row))).chunks[0]["x"].shape == (1, 8, 2, 3)
    assert next(step.batches(Pairs())).chunks[0]["x"].shape == (1, 8, 2, 2, 3)


def test_a_dictionary_of_arrays_is_refused():
    """Columns are no rows; the error has the way out. A dictionary of rows by number is legal."""
    step, _ = start(schedule="0:8", steps=1)
    columns = {"image": np.ones((64, 2)), "label": np.ones(64)}
    with pytest.raises(DataError, match=r"a dict of arrays \('image', 'label'\) is not indexed by row.*grain.MapDataset"):
        next(step.batches(columns))
    rows_of = grain.MapDataset.range(64).map(lambda row: {name: x[row] for name, x in columns.items()})
    for source in (rows_of, dict(enumerate(rows_of))):
        assert next(step.batches(source)).chunks[0]["image"].shape == (1, 8, 2)

"""Numbers go bad: a step that is not finite changes nothing but the counters, and too
many of them stop the run.
"""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from faults import toy_run
from helpers import toy
from helpers.runs import metrics_of

from rampup.data.batches import BatchOptions, step_batches
from rampup.engine.state import create_state
from rampup.engine.update import select_step
from rampup.errors import NonFiniteError
from rampup.loop.events import StepDone, StepSkipped

ENGINES = ("fused", "multi_steps")
BAD = {"nan": np.nan, "infinite": np.inf, "overflow": np.float32(3e38)}


def states_of(engine, source, *, skips=True, mesh="one"):
    """Return the state before the first and after every step, and the metrics of every
    step.
    """
    mesh, plan, step = toy_run.parts(engine, skips=skips, mesh=mesh)
    state = create_state(toy.new_params(mesh), step.tx, mesh)
    states, metrics = [jax.tree.map(np.array, jax.device_get(state))], []
    for batch in step_batches(
        source, plan, mesh, options=BatchOptions(chunk_size=toy_run.CHUNK_SIZE[engine])
    ):
        state, values = step(state, batch)
        # A flag that nobody has to wait for.
        assert isinstance(values.get("skipped", values["loss"]), jax.Array)
        states.append(jax.tree.map(np.array, jax.device_get(state)))
        metrics.append(jax.device_get(values))
    assert step.num_compilations == 1  # of good and bad steps
    return states, metrics


def row_in(step, microbatch=0):
    """Return the number of a row of a microbatch of a step, in the order without
    shuffling.
    """
    plan = toy_run.parts()[1]
    split = plan.position(step).split
    return plan.rows(step)[
        microbatch * split.microbatch_size * split.data_parallel_size
    ]


CASES = [
    (engine, "one", microbatch, kind)
    for engine in ENGINES
    for microbatch in (0, 1)
    for kind in BAD
]


@pytest.mark.parametrize(
    ("engine", "mesh", "microbatch", "kind"),
    [*CASES, ("fused", "data_fsdp_tensor", 0, "nan")],
)
def test_a_bad_step_is_left_out_whole(engine, mesh, microbatch, kind):
    """Wherever the bad row is, parameters, moments and accumulators stay, counters move
    on, and other steps are not touched.
    """
    bad = 6
    states, metrics = states_of(
        engine, toy_run.rows({row_in(bad, microbatch): BAD[kind]}), mesh=mesh
    )
    assert [bool(values["skipped"]) for values in metrics] == [
        step == bad for step in range(toy_run.STEPS)
    ]
    floats = [
        [
            x
            for x in jax.tree.leaves((state.params, state.opt_state))
            if x.dtype.kind == "f"
        ]
        for state in states
    ]
    toy_run.assert_equal(floats[bad + 1], floats[bad])
    kinds = optax.ScaleByAdamState, optax.ScaleByScheduleState
    parts = [
        jax.tree.leaves(state.opt_state, is_leaf=lambda x: isinstance(x, kinds))
        for state in states
    ]
    (adam, schedule), (same, later) = (
        [x for x in parts[n] if isinstance(x, kinds)] for n in (bad, bad + 1)
    )
    toy_run.assert_equal(same, adam)
    assert (schedule.count, later.count) == (bad, bad + 1)
    assert [int(state.step) for state in states] == list(range(toy_run.STEPS + 1))
    assert all(
        np.isfinite(leaf).all()
        for state in states
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    clean, _ = states_of(engine, toy_run.rows(), mesh=mesh)
    toy_run.assert_equal(states[bad], clean[bad])
    assert not np.array_equal(
        states[bad + 2].params["in"], states[bad + 1].params["in"]
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_good_steps_are_the_same_with_and_without_the_check(engine):
    """Where all numbers are finite, the check changes no step."""
    checked, _ = states_of(engine, toy_run.rows())
    unchecked, metrics = states_of(engine, toy_run.rows(), skips=False)
    for one, other in zip(checked, unchecked, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            one,
            other,
        )
    assert "skipped" not in metrics[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_single_bad_steps_do_not_stop_a_run(tmp_path, engine):
    """Skipped steps stand in the metrics with a loss of null, are told, and the run
    ends.
    """
    events = []
    source = toy_run.rows({row_in(step): np.nan for step in (3, 4, 6, 7)})
    summary, state = toy_run.run(
        tmp_path, source=source, engine=engine, events=events, skip_nonfinite=3
    )
    lines = metrics_of(tmp_path)
    assert summary.steps == toy_run.STEPS == len(lines)
    assert [line["step"] for line in lines if line.get("skipped")] == [3, 4, 6, 7]
    assert [line["loss"] for line in lines if line.get("skipped")] == [None] * 4
    skipped = [
        (event.step, event.in_a_row)
        for event in events
        if isinstance(event, StepSkipped)
    ]
    assert skipped == [(3, 1), (4, 2), (6, 1), (7, 2)]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("engine", ENGINES)
def test_too_many_in_a_row_stop_the_run(tmp_path, engine):
    """The steps are named; the last good checkpoint stays, and a resume comes to the
    same end.
    """
    source = toy_run.rows({row_in(step): np.nan for step in (6, 7, 8)})
    options = {
        "source": source,
        "engine": engine,
        "skip_nonfinite": 3,
    }
    for _ in range(2):
        with pytest.raises(
            NonFiniteError,
            match="step 6, 7, 8 was not finite, 3 in a row: skip_nonfinite=3",
        ) as caught:
            toy_run.run(tmp_path, **options)
        assert (caught.value.steps, caught.value.key) == ((6, 7, 8), "skip_nonfinite")
        assert "rampup plan --rows STEP lists the rows" in str(caught.value)
        checkpoints = sorted(
            int(path.name) for path in (tmp_path / "checkpoints").iterdir()
        )
        assert checkpoints[0] == 4
        assert set(checkpoints) <= {4, 8}
    summary, _ = toy_run.run(tmp_path, **(options | {"skip_nonfinite": 4}))
    assert summary.steps == toy_run.STEPS


def test_a_row_of_bad_steps_goes_on_after_a_resume(tmp_path):
    """Steps skipped before and after a checkpoint count as one row."""
    source = toy_run.rows({row_in(step): np.nan for step in (6, 7, 8)})
    with pytest.raises(NonFiniteError):
        toy_run.run(tmp_path, source=source, skip_nonfinite=2, checkpoint_period=7)
    with pytest.raises(NonFiniteError) as caught:
        toy_run.run(tmp_path, source=source, skip_nonfinite=3, checkpoint_period=7)
    assert caught.value.steps == (6, 7, 8)
    # With a lower limit than the steps that were skipped before.
    with pytest.raises(NonFiniteError, match="skip_nonfinite=1 stops there") as caught:
        toy_run.run(tmp_path, source=source, skip_nonfinite=1, checkpoint_period=7)
    assert caught.value.steps == (6, 7)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resume_in_between_is_exact(tmp_path, engine):
    """A run with skipped steps that is stopped and resumed is the run that is not."""
    source = toy_run.rows({row_in(step): np.inf for step in (2, 6, 9)})
    _, whole = toy_run.run(
        tmp_path / "whole", source=source, engine=engine, skip_nonfinite=2
    )

    def fail(event):
        if isinstance(event, StepDone) and event.step == 7:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        toy_run.run(
            tmp_path / "cut",
            source=source,
            engine=engine,
            skip_nonfinite=2,
            events=SimpleNamespace(append=fail),
        )
    summary, cut = toy_run.run(
        tmp_path / "cut", source=source, engine=engine, skip_nonfinite=2
    )
    assert summary.resumed_from in (4, 8)
    toy_run.assert_equal(cut, whole)
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")


def test_without_the_check_the_numbers_stay_bad(tmp_path):
    """skip_nonfinite=0 leaves the step as it is: the loss stays bad to the end."""
    toy_run.run(tmp_path, source=toy_run.rows({row_in(6): np.nan}), skips=False)
    lines = metrics_of(tmp_path)
    assert (
        "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    )  # which strict readers of JSON refuse
    assert [line["loss"] is None for line in lines] == [
        step >= 6 for step in range(toy_run.STEPS)
    ]


def test_schedules_inside_injected_hyperparameters_move_on():
    """The count of optax.inject_hyperparams is the step's, its moments are kept."""
    tx = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 10))
    params = {"w": np.ones(2, np.float32)}
    old = tx.init(params)
    _, new = tx.update({"w": np.ones(2, np.float32)}, old, params)
    kept = select_step(np.bool_(False), new, old)
    assert int(kept.count) == 1
    toy_run.assert_equal(
        optax.tree_utils.tree_get(kept, "mu"), optax.tree_utils.tree_get(old, "mu")
    )

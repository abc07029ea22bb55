"""Tests of rampup.loop.loop."""

import contextvars
import io
import json
import re
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import toy
from helpers.runs import metrics_of
from rich.console import Console

import rampup
from rampup.data.batches import BatchOptions, step_batches
from rampup.engine.state import create_state
from rampup.engine.step import train_step
from rampup.errors import LossWarning, ResumeMismatchError
from rampup.loop import events as told
from rampup.loop.checkpoint import CheckpointOptions, find_checkpoint
from rampup.loop.lock import LOCK_FILE
from rampup.loop.loop import EvalOptions, Loop, stop_requests
from rampup.loop.metrics import MetricOptions, Metrics
from rampup.loop.run_folder import read_lines

STEPS = 12


@pytest.fixture(scope="module")
def parts():
    """Mesh, plan and a compiled step, shared by all runs."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh, steps=STEPS)
    return mesh, plan, train_step(toy.loss_fn, optax.adamw(1e-2), plan, mesh, seed=3)


def run_own(parts, folder, **options):
    """Run a loop of one's own, with only what it needs."""
    mesh, plan, step = parts
    when = {name: options.pop(name) for name in ["should_stop"] if name in options}
    own = {
        "batches": lambda start: step_batches(
            toy.rows(), plan, mesh, seed=5, start=start
        ),
        "metrics": MetricOptions(learning_rate=lambda step: 0.01, tokens_per_sample=10),
        "checkpoints": CheckpointOptions(checkpoint_period=5, identity={"who": "toy"}),
    }
    options = own | options
    options["metrics"] = replace(
        options["metrics"], on_event=options.pop("on_event", told.ignore_event)
    )
    loop = Loop(plan=plan, step=step, folder=folder, **options)
    return loop.run(create_state(toy.new_params(mesh), step.tx, mesh), **when)


def run(parts, folder, *, stop_after=None, events=None, **options):
    """Run or resume in a folder; `stop_after` sends this process a signal when that
    step's metrics are written.
    """
    mesh, plan, _ = parts
    ids = []

    def batches(start):
        for batch in step_batches(toy.rows(), plan, mesh, seed=5, start=start):
            held = np.concatenate([np.asarray(chunk["id"]) for chunk in batch.chunks])[
                : batch.num_microbatches
            ]
            ids.append((batch.position.step, held.ravel().tolist()))
            yield batch

    def on_event(event):
        if events is not None:
            events.append(event)
        if isinstance(event, told.StepDone) and event.step == stop_after:
            signal.raise_signal(signal.SIGTERM)

    return run_own(parts, folder, batches=batches, on_event=on_event, **options)[1], ids


@pytest.fixture(scope="module")
def uninterrupted(parts, tmp_path_factory):
    """The metrics and rows of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    _, ids = run(parts, folder)
    return metrics_of(folder), dict(ids)


@pytest.mark.core
@pytest.mark.parametrize(
    "stop_after",
    [
        pytest.param(step, marks=[] if step in (0, 3, 4, 8) else pytest.mark.slow)
        for step in range(STEPS - 3)
    ],
)
def test_loop_resumes_bit_for_bit_after_any_step(
    parts, tmp_path, uninterrupted, stop_after
):
    """Stopped after any step and started again, every row and every loss is that of the
    uninterrupted run.
    """
    events = []
    first, ids = run(parts, tmp_path, stop_after=stop_after, events=events)
    assert first.interrupted
    assert [event.step for event in events if isinstance(event, told.RunStopping)] == [
        first.steps
    ]
    assert first.ramp_steps == min(parts[1].ramp.ramp_steps, first.steps)
    assert stop_after < first.steps < STEPS
    second, more = run(parts, tmp_path)
    assert (second.resumed_from, second.steps, second.interrupted) == (
        first.steps,
        STEPS,
        False,
    )
    assert metrics_of(tmp_path) == uninterrupted[0]
    used = {step: rows for step, rows in ids if step < first.steps} | dict(more)
    assert used == uninterrupted[1]
    assert [step for step, _ in more] == list(range(first.steps, STEPS))


def test_missing_lines_are_reported_at_a_resume(parts, tmp_path, uninterrupted):
    """Of a file that was cut and of a deleted one; the run goes on with the same
    losses.
    """
    first, _ = run(parts, tmp_path, stop_after=3)
    path, events = tmp_path / "metrics.jsonl", []
    for kept in (2, 0):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:kept])) if kept else path.unlink()
        run(
            parts,
            tmp_path,
            stop_after=first.steps,
            events=events,
            should_stop=lambda: True,
        )
        problems = [
            event.problem for event in events if isinstance(event, told.StorageFailed)
        ]
        assert problems[-1] == (
            f"{path} has {kept} lines, and not one each of the {first.steps} steps before"
            " this start"
        )
    assert len(problems) == 2
    run(parts, tmp_path)
    assert metrics_of(tmp_path) == uninterrupted[0][first.steps :]


def test_loop_writes_and_reports_what_is_promised(parts, tmp_path, caplog):
    """Each step once in metrics.jsonl, with the promised names and values; all events;
    and the state, which is alive.
    """
    plan, events, losses = parts[1], [], iter([3.0, 1.0])
    console = Console(file=io.StringIO(), width=120)
    progress = rampup.TrainProgress(console, log_period=1)

    def on_event(event):
        events.append(event)
        progress(event)

    evaluation = EvalOptions(
        evaluate=lambda state: {"eval_loss": next(losses)}, eval_interval=6
    )
    state, summary = run_own(parts, tmp_path, on_event=on_event, evaluation=evaluation)
    found = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in found] == list(range(STEPS))
    for line in found:
        position = plan.position(line["step"])
        names = (
            "step consumed_samples phase global_batch_size loss learning_rate"
            " step_seconds tokens_per_second"
        )
        assert list(line)[:8] == names.split()
        assert (
            line["consumed_samples"]
            == position.consumed_samples + line["global_batch_size"]
        )
        assert (line["phase"], line["global_batch_size"]) == (
            position.phase.index,
            position.phase.global_batch_size,
        )
    assert (int(state.step), summary.steps, summary.consumed_samples) == (
        STEPS,
        STEPS,
        plan.consumed_samples,
    )
    assert (summary.first_loss, summary.final_loss) == (
        found[0]["loss"],
        found[-1]["loss"],
    )
    assert (summary.first_eval_loss, summary.final_eval_loss) == (3.0, 1.0)
    assert summary.num_compilations == 1
    assert summary.seconds > 0
    assert summary.checkpoint == str(tmp_path / "checkpoints" / str(STEPS))
    caplog.clear()
    loaded = rampup.load(tmp_path)
    assert not caplog.records
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(state.params), loaded.params
    )
    assert (loaded.config, loaded.model, loaded.step) == (None, None, STEPS)

    assert events[0] == told.RunStarted(
        step=0, folder=tmp_path, plan=plan, tokens_per_sample=10
    )
    assert events[-1] == told.RunStopped(
        steps=STEPS, interrupted=False, folder=tmp_path, is_saved=True
    )

    def values(kind, name):
        return [getattr(event, name) for event in events if isinstance(event, kind)]

    assert values(told.PhaseStarted, "phase") == [0, 1, 2]
    assert values(told.PhaseStarted, "step") == [
        phase.start_step for phase in plan.ramp.phases
    ]
    assert values(told.StepDone, "step") == list(range(STEPS))
    assert values(told.CheckpointSaved, "steps") == [5, 10, 12]
    assert values(told.Evaluated, "step") == [5, 11]
    evals = [
        json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()
    ]
    samples = plan.ramp.samples_before
    assert evals == [
        {"step": n, "consumed_samples": samples(n + 1), "eval_loss": loss}
        for n, loss in ((5, 3.0), (11, 1.0))
    ]
    # the loop reports its plan, so the progress bar knows samples, phases and the time
    # left
    text = console.file.getvalue()
    for words in (
        " tokens/s, ",
        "phase 2 from step",
        f"{plan.consumed_samples:,} samples, 0:00 left",
    ):
        assert words in text

    events.clear()
    again, second = run_own(parts, tmp_path, on_event=events.append)
    assert [type(event) for event in events] == [
        told.RunStarted,
        told.RunStopped,
    ]  # a finished run trains nothing
    assert (second.steps, second.first_loss, second.final_loss) == (
        summary.steps,
        summary.first_loss,
        summary.final_loss,
    )
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(again.params), loaded.params
    )


def test_steps_that_are_fetched_together_share_their_mean_time(parts, tmp_path):
    """Before a checkpoint and at the end, the last steps of the device are fetched at
    once: each has their mean, as the time of one of them means nothing.
    """
    run_own(parts, tmp_path)
    seconds = [
        json.loads(line)["step_seconds"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert seconds[3] == seconds[4]
    assert seconds[8] == seconds[9]
    assert seconds[10] == seconds[11]


def test_a_loop_that_is_asked_to_stop_saves_and_resumes(parts, tmp_path, uninterrupted):
    """In a thread, which gets no signals, `should_stop` is asked before every step; the
    run saves, and resumes as ever.
    """
    calls = iter(range(STEPS))
    with ThreadPoolExecutor() as pool:
        done, _ = pool.submit(
            run, parts, tmp_path, should_stop=lambda: next(calls) == 4
        ).result()
    assert (done.steps, done.interrupted, done.checkpoint) == (
        4,
        True,
        str(tmp_path / "checkpoints" / "4"),
    )
    assert run(parts, tmp_path)[0].resumed_from == 4
    assert metrics_of(tmp_path) == uninterrupted[0]


def test_a_run_that_is_longer_than_its_plan_is_finished(parts, tmp_path):
    """Nothing is trained, and the state is that of the last checkpoint."""
    mesh, _, _ = parts
    run(parts, tmp_path, stop_after=4)
    shorter = toy.plan_for(mesh, steps=3)
    own = train_step(toy.loss_fn, optax.adamw(1e-2), shorter, mesh, seed=3)
    done, ids = run((mesh, shorter, own), tmp_path)
    assert (done.steps, done.resumed_from, done.interrupted, ids) == (5, 5, False, [])


def test_an_argument_that_went_says_where_it_is(parts):
    """It stands in the error what replaces it."""
    with pytest.raises(TypeError, match=r"'should_stop'; give it to loop\.run\("):
        Loop(should_stop=lambda: True)
    with pytest.raises(TypeError, match=r"metrics=MetricOptions\(on_event=\.\.\.\)"):
        Loop(on_event=print)
    evaluate = rampup.EvalStep(toy.loss_fn, toy.mesh_of("one"))
    for make in (parts[2].batches, evaluate.batches, BatchOptions):
        with pytest.raises(TypeError, match=r"'batched'; .* step\.stream\("):
            make(batched=True)
    with pytest.raises(
        TypeError,
        match=r"^MetricOptions has no argument 'describe_rows'; .*--rows STEP",
    ):
        MetricOptions(describe_rows=None)
    assert MetricOptions(skip_nonfinite=2).skip_nonfinite == 2


def test_auxiliary_sums_reach_metrics_and_writers(tmp_path, monkeypatch):
    """Scalars in aux are written as means, under their names, to metrics.jsonl and to
    writers, beside the use of the device.
    """
    monkeypatch.setattr("rampup.plan.topology.peak_flops", {"cpu": 1e12}.get)
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, steps=4)

    def loss_fn(params, batch, keys):
        loss, weight, _ = toy.loss_fn(params, batch, keys)
        aux = {
            "twice": 2 * weight,
            "nested": {"loss": loss},
            "loss": 3 * weight,
            "vector": jnp.ones(3),
        }
        return loss, weight, aux

    step, writer = train_step(loss_fn, optax.sgd(0.1), plan, mesh), mock.Mock()
    metrics = MetricOptions(
        learning_rate=lambda step: 0.1,
        flops_per_sample=1e12,
        writers=lambda start: [writer],
    )
    run_own((mesh, plan, step), tmp_path, metrics=metrics)
    for line, call in zip(
        read_lines(tmp_path / "metrics.jsonl"),
        writer.write_scalars.call_args_list,
        strict=True,
    ):
        number, scalars = call.args
        assert number == line["step"]
        assert line["twice"] == scalars["twice"] == 2
        assert line["aux/loss"] == 3
        assert line["nested/loss"] == pytest.approx(line["loss"])
        assert "vector" not in line
        assert line["mfu"] == line["tflops_per_device"] > 0


def test_the_first_ctrl_c_stops_after_the_step_and_the_second_at_once(parts, tmp_path):
    """After the second, the newest checkpoint is whole, and the folder is free.

    That is so in the command line. In a loop of one's own the first one ends it.
    """
    before = signal.getsignal(signal.SIGINT)

    def on_event(event):
        if isinstance(event, told.StepDone) and event.step == 6:
            signal.raise_signal(signal.SIGINT)
            handlers.append(signal.getsignal(signal.SIGTERM))
            signal.raise_signal(signal.SIGINT)

    handlers = [signal.getsignal(signal.SIGTERM)]
    context = contextvars.copy_context()
    context.run(told.ctrl_c_stops.set, True)
    with pytest.raises(KeyboardInterrupt):
        context.run(run_own, parts, tmp_path, on_event=on_event)
    assert handlers[0] is handlers[1]
    assert find_checkpoint(tmp_path / "checkpoints").step == 5
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / LOCK_FILE).exists()
    with pytest.raises(KeyboardInterrupt), stop_requests():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is handlers[0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            told.StepDone,
            {"checkpoints": CheckpointOptions()},
            "steps; no checkpoint has its last state",
        ),
        (told.RunStarted, {}, "stopped after 0 steps; there is nothing to save"),
    ],
)
def test_a_stopped_run_without_a_checkpoint_starts_over(
    parts, tmp_path, kind, options, words
):
    """The stop says that nothing is saved, and the next start begins again, and its
    metrics with it.
    """
    console = Console(file=io.StringIO(), width=120)
    progress = rampup.TrainProgress(console, log_period=100)

    def on_event(event):
        progress(event)
        if isinstance(event, kind) and event.step == 0:
            signal.raise_signal(signal.SIGTERM)

    run_own(parts, tmp_path, on_event=on_event, **options)
    assert words in console.file.getvalue()
    summary, _ = run(parts, tmp_path, **options)
    assert (summary.resumed_from, summary.checkpoint is None) == (0, bool(options))
    assert len(metrics_of(tmp_path)) == STEPS


@pytest.mark.core
def test_checkpoints_of_another_ramp_or_model_are_refused(parts, tmp_path):
    """The error has the table of both ramps, or the leaves that differ with both
    shapes, and not the library's own words.
    """
    run(parts, tmp_path, stop_after=4)
    mesh, plan, step = parts
    other = toy.plan_for(mesh, "0:16 64:48", steps=STEPS)
    with pytest.raises(ResumeMismatchError, match="from sample 64: 48  <- differs"):
        run(
            (
                mesh,
                other,
                train_step(toy.loss_fn, optax.adamw(1e-2), other, mesh, seed=3),
            ),
            tmp_path,
        )
    params = toy.new_params(mesh)
    state = create_state(
        {"in": params["in"][:4], "out": params["out"][:, :4]}, step.tx, mesh
    )
    options = {
        "batches": lambda start: iter(()),
        "checkpoints": CheckpointOptions(identity={"who": "toy"}),
    }
    with pytest.raises(
        ResumeMismatchError,
        match=r"params/in is \(8, 16\) in the checkpoint and \(4, 16\) here",
    ) as caught:
        Loop(plan=plan, step=step, folder=tmp_path, **options).run(state)
    assert "Truncating" not in str(caught.value)


def test_loop_needs_no_metric_options(parts, tmp_path):
    """Metrics then have no learning rate, and samples per second; a step that measures
    the noise adds its averages too.
    """
    mesh, plan, _ = parts
    step = train_step(
        toy.plain_loss_fn, optax.sgd(0.1), plan, mesh, measure_gradient_noise=True
    )
    console = Console(file=io.StringIO(), width=120)
    batches, progress = (
        lambda start: step.batches(toy.rows(), start),
        rampup.TrainProgress(console),
    )
    options = CheckpointOptions(checkpoint_period=5)
    loop = Loop(
        plan=plan,
        step=step,
        batches=batches,
        folder=str(tmp_path),
        metrics=MetricOptions(on_event=progress),
        checkpoints=options,
    )
    loop.run(create_state(toy.new_params(mesh), step.tx, mesh))
    assert " samples/s, " in console.file.getvalue()
    found = [
        json.loads(line)
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(found) == STEPS
    assert not any("learning_rate" in line for line in found)
    assert {"gradient_noise_trace", "noise_scale_samples_low"} <= set(found[-1])
    assert "gradient_noise" in find_checkpoint(tmp_path / "checkpoints").record
    assert found[3]["tokens_per_second"] == pytest.approx(
        found[3]["global_batch_size"] / found[3]["step_seconds"], rel=1e-2
    )


CHANGES = {
    "seed": ({"seed": 1}, "seed: 5 in the checkpoint, 1 here"),
    "rows": (
        {"shift": 1.0},
        r"SHA-256 of rows 0, 57, .*, 399: '\w+' in the checkpoint, '\w+' here",
    ),
    "number": ({"number": 399}, "number: 400 in the checkpoint, 399 here"),
    "rate": (
        {"tx": optax.adamw(lambda step: 2e-2 + 0 * step)},
        r"the optimizer is not that of the checkpoint of step \d+",
    ),
    "table": (
        {
            "tx": optax.adamw(
                lambda step: jnp.asarray(np.float32([1e-2, 2e-2]))[step % 2]
            )
        },
        "the optimizer is not",
    ),
    "loss": ({"scale": 2.0}, r"the loss is not that of the checkpoint of step \d+"),
    "keys": ({"drawn_with": 1}, r"the loss is not that of the checkpoint of step \d+"),
    "nothing": ({}, None),
    "devices": ({"mesh_name": "one"}, None),
}


@pytest.mark.parametrize(
    "done", [toy.slow(5, id="stopped"), pytest.param(STEPS, id="finished")]
)
@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_loop_of_ones_own_knows_what_it_was_started_with(
    tmp_path, change, words, done
):
    """Other rows are refused, another optimizer or loss is warned of, and what changes
    no number of a run is neither. So it is for a run that is finished, which trains
    nothing.
    """

    def run_changed(
        last=STEPS,
        seed=5,
        shift=0.0,
        number=400,
        tx=None,
        scale=1.0,
        drawn_with=0,
        mesh_name="data",
    ):
        mesh, table = (
            toy.mesh_of(mesh_name),
            lambda step: jnp.asarray(np.float32([1e-2, 3e-2]))[step % 2],
        )
        key = jax.random.key(7)

        def loss(params, batch, keys):
            # a closure's key is a constant of the loss, and so are the keys of the step
            drawn = jax.random.normal(key) + jax.random.normal(keys[0])
            total, *others = toy.loss_fn(params, batch, keys)
            return total * scale + 0 * drawn, *others

        tx = tx or optax.adamw(table)
        rows = [row | {"x": row["x"] + np.float32(shift)} for row in toy.rows(number)]
        plan = toy.plan_for(mesh, "0:16", steps=STEPS, microbatch_size=16 // mesh.size)
        step = train_step(loss, tx, plan, mesh, seed=drawn_with)
        calls = iter(range(100))
        options = {"checkpoints": CheckpointOptions(checkpoint_period=5)}

        def batches(start):
            return step.batches(rows, start=start, seed=seed)

        return Loop(
            plan=plan, step=step, batches=batches, folder=tmp_path, **options
        ).run(
            create_state(toy.new_params(mesh), tx, mesh),
            should_stop=lambda: next(calls) == last,
        )

    run_changed(last=done)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", rampup.errors.ResumeWarning)
        if words is None or words.startswith("the "):
            assert run_changed(**change)[1].steps == STEPS
        else:
            with pytest.raises(ResumeMismatchError, match=words):
                run_changed(**change)
    found = [
        str(each.message)
        for each in caught
        if each.category is rampup.errors.ResumeWarning
    ]
    assert len(found) == (words or "").startswith("the ")
    assert all(re.search(words, each) for each in found)


def test_a_loss_that_is_not_finite_is_said_once(parts, tmp_path):
    """Nothing else of a loop of one's own says that its parameters may be spoilt."""
    mesh, plan, _ = parts
    rows = toy.rows()
    rows[40] = jax.tree.map(
        lambda x: np.full_like(x, np.nan) if np.asarray(x).dtype.kind == "f" else x,
        rows[40],
    )

    def batches(start):
        return step_batches(rows, plan, mesh, start=start)

    def evaluate(state):
        return {"eval_loss": float("nan")}

    evaluation = EvalOptions(evaluate=evaluate, eval_interval=6)
    with pytest.warns(LossWarning, match=r"not finite.*skip_nonfinite=True") as caught:
        run_own(parts, tmp_path, batches=batches, evaluation=evaluation)
    # NaN is no JSON.
    assert [line["eval_loss"] for line in read_lines(tmp_path / "eval.jsonl")] == [
        None,
        None,
    ]
    assert len([each for each in caught if each.category is LossWarning]) == 1


def test_a_loss_without_weight_is_said_once(parts, tmp_path):
    """All rows are masked, or the weight is not what it is meant to be. The warning
    stands at the line that runs the loop.
    """
    mesh, plan, _ = parts

    def loss_fn(params, batch, keys):
        loss, weight, aux = toy.loss_fn(params, batch, keys)
        return 0 * loss, 0 * weight, aux

    step = train_step(loss_fn, optax.sgd(0.1), plan, mesh)
    with pytest.warns(LossWarning, match=r"step 0 has the weight 0.*masked") as caught:
        run_own((mesh, plan, step), tmp_path)
    found = [each for each in caught if each.category is LossWarning]
    assert [each.filename for each in found] == [run_own.__code__.co_filename]


def test_process_0_warns_of_the_loss(parts, tmp_path, monkeypatch):
    """The others have the same numbers."""
    monkeypatch.setattr("rampup.loop.metrics.is_primary", lambda: False)
    options = MetricOptions()
    metrics = Metrics(tmp_path, 0, options=options, components=())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.push(parts[1].position(0), {"loss": np.nan, "aux": {}}, 0.0)
        metrics.flush()

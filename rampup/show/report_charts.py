"""The charts of a report: what a plan, its learning rate and a run look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rampup.plan.learning_rate import Clock
from rampup.plan.plan import RampPlan
from rampup.show.series import RunMetrics, mean_of_neighbours, phase_spans, rate_points
from rampup.show.svg import Chart, Series


def plan_charts(plan: RampPlan) -> tuple[Chart, ...]:
    """Return the batch over samples and over steps, and what each phase costs."""
    spans = phase_spans(plan)
    sizes = [span.global_batch_size for span in spans]
    charts = []
    for unit, label, total in (
        ("sample", "samples consumed", plan.consumed_samples),
        ("step", "optimizer steps", plan.total_steps),
    ):
        bands = tuple((getattr(span, f"start_{unit}"), getattr(span, f"end_{unit}"), str(span.phase)) for span in spans)
        end = bands[-1][1]
        more = f"; the run goes on to {total:,}" if total > end else f"; the run ends at {total:,}" if total < end else ""
        series = Series(name="samples per step", xs=[start for start, _, _ in bands], ys=sizes, kind="steps")
        charts.append(
            Chart(
                title=f"Global batch over {unit}s",
                x_label=label + more,
                y_label="samples per step",
                series=(series,),
                bands=bands,
            )
        )
    bars = {"Passes per step": ("passes", [span.accumulation_steps for span in spans])}
    if plan.splitter.num_stages > 1:
        bars["Pipeline bubble"] = ("idle share", [span.bubble for span in spans])
    for title, (label, values) in bars.items():
        series = Series(
            name=label, xs=[*(span.phase - 0.5 for span in spans), spans[-1].phase + 0.5], ys=[*values, values[-1]], kind="bars"
        )
        charts.append(Chart(title=title, x_label="phase", y_label=label, series=(series,)))
    return tuple(charts)


def rate_charts(plan: RampPlan, rates: Mapping[Clock, Callable[[int], float]]) -> tuple[Chart, ...]:
    """Return the learning rate over samples and over steps, with its schedule on each clock."""
    lines = {clock: rate_points(plan, rate) for clock, rate in rates.items()}
    charts = []
    for unit, label in (("sample", "samples consumed"), ("step", "optimizer steps")):
        series = tuple(
            Series(
                name=f"schedule on {clock}" + (" (this plan)" if clock == plan.learning_rate_clock else ""),
                xs=[getattr(point, unit) for point in points],
                ys=[point.rate for point in points],
            )
            for clock, points in lines.items()
        )
        charts.append(Chart(title=f"Learning rate over {unit}s", x_label=label, y_label="learning rate", series=series))
    return tuple(charts)


def run_charts(run: RunMetrics) -> tuple[Chart, ...]:
    """Return loss, tokens per second and batch of a run, over the samples that it consumed."""
    xs, losses, number = mean_of_neighbours(run.samples, run.losses)
    label = "samples consumed" + (f"; means of {number:,} steps" if number > 1 else "")
    evaluation = (Series(name="evaluation", xs=run.eval_samples, ys=run.eval_losses, kind="dots"),) if run.eval_samples else ()
    xs_of_speed, speeds, _ = mean_of_neighbours(run.samples, run.tokens_per_second)
    changes = [place for place, size in enumerate(run.sizes) if place == 0 or size != run.sizes[place - 1]]
    starts = [run.samples[place] - run.sizes[place] for place in changes]
    end = run.samples[-1]
    batch = Series(
        name="samples per step", xs=[*starts, end], ys=[*(run.sizes[place] for place in changes), run.sizes[-1]], kind="steps"
    )
    return (
        Chart(
            title="Loss", x_label=label, y_label="loss", from_zero=False,
            series=(Series(name="loss", xs=xs, ys=losses), *evaluation),
        ),
        Chart(
            title="Throughput", x_label=label, y_label="tokens per second",
            series=(Series(name="tokens per second", xs=xs_of_speed, ys=speeds),),
        ),
        Chart(title="Batch of the run", x_label="samples consumed", y_label="samples per step", series=(batch,)),
    )  # fmt: skip

"""Does a batch ramp pay? Trains the byte model with four batch schedules on the same samples, and compares the runs.

small, large: a constant batch. ramp: the batch grows from small to large in the first half. seesaw: the batch doubles when the
cosine schedule of the small run has halved its learning rate (arXiv 2510.14717). The learning rate of all runs is the same
cosine over samples, times the square root of the batch. Run it from a checkout:

    python docs/examples/ramp_pays.py --output runs/pays            # minutes to hours, by --samples and --seeds
    python docs/examples/ramp_pays.py --output runs/pays --table    # the table and the picture of the finished runs

An interrupted comparison resumes. Runs of one seed have the same initial weights and read the same samples in the same order.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rampup
from rampup.batch_size.noise_scale import noise_trace
from rampup.data.files import open_sources
from rampup.lm.train import sample_order
from rampup.loop.run_folder import METRICS_FILE, read_lines

FINAL_FRACTION = 0.05


def schedules(small: int, large: int, samples: int) -> dict[str, str]:
    """Return the batch size schedule of every policy, with thresholds in samples."""
    doublings = int(math.log2(large / small))
    growth = [round(samples / 2 ** (doublings + 1 - k)) for k in range(1, doublings + 1)]
    # Where the cosine from 1 to FINAL_FRACTION is 1/2, 1/4, ...
    cuts = [2.0**-k for k in range(1, doublings + 1) if 2.0**-k > FINAL_FRACTION]
    seesaw = [samples * math.acos(2 * (c - FINAL_FRACTION) / (1 - FINAL_FRACTION) - 1) / math.pi for c in cuts]

    def doubling(thresholds: list[float]) -> str:
        pairs = [(0, small), *((round(t), small * 2**k) for k, t in enumerate(thresholds, start=1))]
        return " ".join(f"{threshold}:{size}" for threshold, size in pairs)

    return {"small": f"0:{small}", "large": f"0:{large}", "ramp": doubling(growth), "seesaw": doubling(seesaw)}


def make_config(args: argparse.Namespace, policy: str, seed: int) -> rampup.Config:
    """Return the configuration of one run."""
    schedule = schedules(args.small, args.large, args.samples)[policy]
    ramp = rampup.BatchRamp.from_schedule(schedule)
    steps = ramp.step_of_sample(args.samples - 1) + 1
    return rampup.Config(
        base_emb_dim=args.width,
        base_mlp_dim=4 * args.width,
        base_num_decoder_layers=args.layers,
        base_num_query_heads=4,
        run_name=f"{policy}-{seed}",
        base_output_directory=str(args.output),
        batch_size_schedule=schedule,
        microbatch_size=min(args.small, args.microbatch),
        steps=steps,
        max_target_length=args.length,
        learning_rate=args.learning_rate * math.sqrt(ramp.sizes[-1] / args.small),  # that of the last phase
        batch_scaling="sqrt",
        learning_rate_clock="samples",
        learning_rate_final_fraction=FINAL_FRACTION,
        warmup_steps_fraction=0.05,
        eval_interval=steps,
        eval_per_device_batch_size=args.large,
        eval_steps=4,
        checkpoint_period=max(steps // 2, 1),
        init_weights_seed=seed,
        data_shuffle_seed=seed,
    )


def noise_scale(checkpoint: Path, rows: int, blocks: int = 64) -> float:
    """Return the gradient noise scale at a checkpoint, in samples, from blocks of the rows that follow it.

    The estimator is that of `measure_gradient_noise`, with all blocks in one step.
    """
    run = rampup.load(checkpoint)
    source, _ = open_sources(run.config.data, run.config.model)
    first = rampup.BatchRamp.from_schedule(run.config.batch_size_schedule).samples_before(run.step)
    order = sample_order(run.config, len(source), first + rows * blocks)

    sums = jax.tree.map(jnp.zeros_like, run.params), 0.0, 0.0
    for block in range(blocks):
        numbers = range(first + block * rows, first + (block + 1) * rows)
        sums = _add_block(run.model, run.params, sums, source.read(order.rows(numbers)))
    total, squares, weights = sums[0], float(sums[1]), float(sums[2])
    trace, squared_norm = noise_trace(squares, weights, float(_squared_norm(total)) / weights**2, blocks)
    return trace / squared_norm / (weights / (rows * blocks))


@functools.partial(jax.jit, static_argnums=0)
def _add_block(model: Any, params: Any, sums: Any, batch: Any) -> Any:
    """Add a block's gradient, the square of its norm by its weight, and its weight to the sums."""
    grads, weight = jax.grad(lambda params: model.loss(params, batch, None)[:2], has_aux=True)(params)
    return jax.tree.map(jnp.add, sums, (grads, _squared_norm(grads) / weight, weight))


def _squared_norm(tree: Any) -> jax.Array:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def result_of(args: argparse.Namespace, policy: str, seed: int) -> dict[str, object]:
    """Train one run, unless that is done, and return its numbers."""
    folder = args.output / f"{policy}-{seed}"
    file = folder / "result.json"
    if not file.exists():
        summary = asdict(rampup.train(make_config(args, policy, seed)))
        found = {key: summary[key] for key in ("steps", "consumed_samples", "final_eval_loss")}
        for name, step in {"middle": max(summary["steps"] // 2, 1), "end": summary["steps"]}.items():
            found[f"noise_scale_{name}"] = noise_scale(folder / "checkpoints" / str(step), min(args.small, args.microbatch))
        file.write_text(json.dumps(found))
    lines = list(read_lines(folder / METRICS_FILE))
    sizes = [line["global_batch_size"] for line in lines]
    # The median of the steps of each size: other programs on the machine, compilation and evaluation do not count.
    seconds = {
        size: statistics.median(line["step_seconds"] for line in lines[1:] if line["global_batch_size"] == size)
        for size in set(sizes)
    }
    return {
        **json.loads(file.read_text()),
        "policy": policy,
        "seed": seed,
        "seconds": sum(seconds[size] for size in sizes),
        "losses": [line["loss"] for line in lines],
        "samples": [line["consumed_samples"] for line in lines],
        "elapsed": [sum(seconds[size] for size in sizes[: place + 1]) for place in range(len(sizes))],
    }


def table(results: list[dict[str, object]]) -> str:
    """Return the results as a Markdown table, with mean and standard deviation over seeds."""
    lines = ["| Schedule | Optimizer steps | Seconds | Held-out loss | Noise scale, middle and end |", "|---|---|---|---|---|"]
    for policy in dict.fromkeys(str(result["policy"]) for result in results):
        runs = [result for result in results if result["policy"] == policy]
        losses = [float(run["final_eval_loss"]) for run in runs]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        seconds = statistics.mean(float(run["seconds"]) for run in runs)
        noise = [[float(run[key]) for run in runs] for key in ("noise_scale_middle", "noise_scale_end")]
        scale = ", ".join(f"{statistics.median(values):.3g}" for values in noise)
        lines.append(f"| {policy} | {runs[0]['steps']} | {seconds:.0f} | {statistics.mean(losses):.4f}{spread} | {scale} |")
    return "\n".join(lines)


def draw(results: list[dict[str, object]], path: Path) -> None:
    """Draw the training loss over samples, steps and seconds, one line per run, smoothed."""
    from matplotlib.figure import Figure

    colors = dict(zip(("small", "large", "ramp", "seesaw"), ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for result in results:
        smooth, average = [], None
        span = result["samples"][-1] / 30  # the average is over about this many samples, whatever the batch
        for loss, before, after in zip(result["losses"], [0, *result["samples"]], result["samples"], strict=False):
            share = 1 - math.exp(-(after - before) / span)
            average = loss if average is None else average + share * (loss - average)
            smooth.append(average)
        for axes, xs in zip(panels, (result["samples"], range(len(smooth)), result["elapsed"]), strict=True):
            label = result["policy"] if result["seed"] == 0 else None
            axes.plot(xs, smooth, color=colors[result["policy"]], linewidth=1, label=label)
    lowest = min(result["losses"][-1] for result in results)
    for axes, name in zip(panels, ("samples", "optimizer steps", "seconds"), strict=True):
        axes.set(xlabel=name, ylim=(lowest - 0.2, lowest + 2.0))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("training loss, smoothed")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--samples", type=int, default=16_384, help="samples of each run")
    parser.add_argument("--length", type=int, default=128, help="tokens (bytes) of a sample")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=5, help="layers of the model; 5 of width 256 are 5.4 M parameters")
    parser.add_argument("--small", type=int, default=4, help="the small batch")
    parser.add_argument("--large", type=int, default=64, help="the large batch, the small one times a power of two")
    parser.add_argument("--microbatch", type=int, default=4, help="samples of a forward pass, at most the small batch")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate of the small batch")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each schedule")
    parser.add_argument("--table", action="store_true", help="only the table and the picture of finished runs")
    args = parser.parse_args()
    policies, results = schedules(args.small, args.large, args.samples), []
    for seed in range(args.seeds):
        for policy in policies:
            if args.table and not (args.output / f"{policy}-{seed}" / "result.json").exists():
                continue
            results.append(result_of(args, policy, seed))
            print(policy, seed, results[-1]["steps"], "steps, held-out loss", results[-1]["final_eval_loss"], flush=True)
    print(f"{rampup.load(args.output / 'small-0').model.num_parameters:,} parameters")
    print(*(f"{policy}: {schedule}" for policy, schedule in policies.items()), sep="\n")
    print(table(results))
    draw(results, args.output / "ramp_pays.png")


if __name__ == "__main__":
    main()

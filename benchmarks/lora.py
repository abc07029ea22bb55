"""Does the noise scale of an adapter predict the batch for fine-tuning with LoRA?

    python benchmarks/lora.py              # about ten minutes on one core
    python benchmarks/lora.py --quick      # the size of a toy

A small transformer learns to copy, reverse and sort short strings. Then only its
low-rank adapters learn another task, the sum of two numbers, on 4,096 examples. For
every batch the rate is swept by factors of 2, with two seeds. The cost of a batch is
how many more examples it needs than the smallest batch for the same held-out loss;
shorter runs of the smallest batch say how many that one needs. Beside it stands what
the noise scale predicts, measured in the first 60 steps with a batch of 8: B / N.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rampup

RESULTS = Path(__file__).with_name("lora.json")
LENGTH, WIDTH, VOCAB, RANK = 32, 64, 128, 4
SIZES = (4, 8, 16, 32, 64, 128)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
SEEDS = (0, 1)
EXAMPLES = 4096


class Block(nnx.Module):
    """Causal attention and a two-layer network, each projection with an adapter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> nnx.LoRALinear:
            return nnx.LoRALinear(inputs, outputs, lora_rank=RANK, rngs=rngs)

        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH)
        self.out = linear(WIDTH, WIDTH)
        self.up = linear(WIDTH, 4 * WIDTH)
        self.down = linear(4 * WIDTH, WIDTH)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Return the sum of the input and of both parts."""
        parts = jnp.split(self.qkv(self.norm1(x_BTD)), 3, axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], 4, WIDTH // 4) for part in parts)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.reshape(x_BTD.shape))
        return x_BTD + self.down(nnx.gelu(self.up(self.norm2(x_BTD))))


class Model(nnx.Module):
    """A byte-level transformer of two blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.first, self.second = Block(rngs), Block(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Return the logits of the next tokens."""
        places = jnp.arange(tokens_BT.shape[1])
        x_BTD = self.embed(tokens_BT) + self.place(places)
        return self.embed.attend(self.norm(self.second(self.first(x_BTD))))


def loss_fn(
    model: Model, batch: dict[str, jax.Array], keys: Any
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Return the sum of the losses of the answers' tokens, and their number."""
    logits = model(batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    weight = batch["weight"][:, 1:]
    return jnp.sum(losses * weight), jnp.sum(weight), {}


def make_rows(task: str, seed: int, number: int) -> list[dict[str, np.ndarray]]:
    """Return examples of `strings` (copy, reverse, sort) or of `sums`."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        if task == "sums":
            a, b = (int(n) for n in random.integers(1000, size=2))
            question, answer = f"{a}+{b}=", f"{a + b}"
        else:
            letters = random.integers(97, 123, size=random.integers(4, 11))
            text = "".join(map(chr, letters))
            kind = "crs"[random.integers(3)]
            answer = {"c": text, "r": text[::-1], "s": "".join(sorted(text))}[kind]
            question = f"{kind}{text}="
        text = f"{question}{answer}\n"
        weight = np.zeros(LENGTH, np.float32)
        weight[len(question) : len(text)] = 1
        tokens = np.frombuffer(text.ljust(LENGTH, "\0").encode(), np.uint8)
        rows.append({"tokens": tokens.astype(np.int32), "weight": weight})
    return rows


def plan_of(size: int, steps: int, microbatch: int) -> rampup.RampPlan:
    """Return the plan of a constant batch on one device."""
    return rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(size),
        splitter=rampup.BatchSplitter(
            data_parallel_size=1, microbatch_size=min(size, microbatch)
        ),
        num_devices=1,
        total_steps=steps,
    )


def schedule(rate: float, steps: int) -> optax.Schedule:
    """Return a short warm-up, and a linear decay to 0."""
    warmup = min(20, steps // 4)
    up = optax.linear_schedule(0.0, rate, max(warmup, 1))
    down = optax.linear_schedule(rate, 0.0, steps - warmup)
    return optax.join_schedules([up, down], [warmup])


class Study:
    """Pre-trains once, and fine-tunes as often as it is asked."""

    def __init__(self, *, pretraining_steps: int, examples: int, held_out: int) -> None:
        self.examples = examples
        self.mesh = rampup.make_mesh(devices=jax.devices()[:1])
        self.model = Model(nnx.Rngs(0))
        self.held_out = make_rows("sums", 10**6, held_out)
        self.pretrain(pretraining_steps)

    def pretrain(self, steps: int) -> None:
        """Teach the model to copy, reverse and sort; its adapters stay at zero."""
        tx = optax.adam(schedule(2e-3, steps))
        base = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
        state, loss = rampup.split_model(self.model, loss_fn, tx, self.mesh, wrt=base)
        step = rampup.train_step(
            loss, tx, plan_of(64, steps, 64), self.mesh, check_loss=False
        )
        rows = make_rows("strings", 1, 64 * steps)
        for batch in step.batches(rows):
            state, metrics = step(state, batch)
        rampup.merge_model(self.model, state)
        print(f"pre-trained: loss {float(metrics['loss']):.3f}", flush=True)

    def tune(
        self, size: int, rate: float, seed: int, *, examples: int, noise: bool = False
    ) -> dict[str, Any]:
        """Fine-tune the adapters, and return the held-out loss.

        Args:
            size: the batch, in examples.
            rate: the peak learning rate.
            seed: of the adapters and of the order of the examples.
            examples: of the run.
            noise: whether to measure the noise scale too.
        """
        model = nnx.clone(self.model)
        steps = examples // size
        random = np.random.default_rng(seed)
        for block in (model.first, model.second):
            for linear in (block.qkv, block.out, block.up, block.down):
                shape = linear.lora.lora_a.shape
                values = random.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
                linear.lora.lora_a[...] = jnp.asarray(values)
        tx = optax.adam(schedule(rate, steps))
        state, loss = rampup.split_model(
            model, loss_fn, tx, self.mesh, wrt=nnx.LoRAParam
        )
        step = rampup.train_step(
            loss,
            tx,
            plan_of(size, steps, 1 if noise else 32),
            self.mesh,
            measure_gradient_noise=noise,
            check_loss=False,
        )
        scale = rampup.plan.NoiseScale(half_life_samples=examples / 4)
        rows = make_rows("sums", 2, examples)
        for batch in step.batches(rows, seed=seed):
            state, metrics = step(state, batch)
            if noise:
                found = jax.device_get(metrics["gradient_noise"])
                weight = float(metrics["weight"])
                scale.update(
                    samples=size,
                    weight=weight,
                    trace=float(found["trace"]),
                    squared_norm=float(found["squared_norm"]),
                )
        evaluate = rampup.EvalStep(loss, self.mesh)
        sums = [evaluate(state, batch) for batch in evaluate.batches(self.held_out, 64)]
        held_out = sum(float(x) for x, _ in sums) / sum(float(w) for _, w in sums)
        row: dict[str, Any] = {"loss": round(held_out, 5), "steps": steps}
        if noise:
            estimate = scale.in_samples
            row["plain"] = [estimate.value, estimate.low, estimate.high]
        return row


def best_of(runs: list[dict[str, Any]], size: int, examples: int) -> dict[str, Any]:
    """Return the mean held-out loss at the best rate of a batch."""
    losses: dict[float, list[float]] = {}
    for run in runs:
        if (run["size"], run["examples"]) == (size, examples):
            losses.setdefault(run["rate"], []).append(run["loss"])
    means = {rate: float(np.mean(each)) for rate, each in losses.items()}
    rate = min(means, key=means.__getitem__)
    return {"rate": rate, "loss": means[rate]}


def report(found: dict[str, Any]) -> str:
    """Return the table of measured and predicted costs, in Markdown; a cost needs the
    shorter runs of the smallest batch.
    """
    examples = found["examples"]
    runs = [run for run in found["runs"].values() if "plain" not in run]
    (pilot,) = (run for run in found["runs"].values() if "plain" in run)
    sizes = sorted({run["size"] for run in runs if run["examples"] == examples})
    first = sizes[0]
    lengths = sorted({run["examples"] for run in runs if run["size"] == first})
    curve = sorted((best_of(runs, first, length)["loss"], length) for length in lengths)
    lines = [
        "| Batch | Steps | Best rate | Held-out loss | Measured cost | Predicted |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        best = best_of(runs, size, examples)
        cost = "-"
        if len(curve) > 1:
            losses, numbers = zip(*curve, strict=True)
            needed = np.interp(best["loss"], losses, np.log(numbers))
            beyond = ">" if best["loss"] > losses[-1] else ""
            cost = f"{beyond}{examples / math.exp(float(needed)) - 1:.0%}"
        predicted = (size - first) / (pilot["plain"][0] + first)
        lines.append(
            f"| {size} | {examples // size:,} | {best['rate']:.1e} |"
            f" {best['loss']:.3f} | {cost} | {predicted:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what the results lack, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the size of a toy")
    parser.add_argument("--report", action="store_true", help="print the table only")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    examples = 256 if args.quick else EXAMPLES
    found: dict[str, Any] = {"examples": examples, "runs": {}}
    if args.output.exists() and not args.quick:
        found = json.loads(args.output.read_text())
    if not args.report:
        study = Study(
            pretraining_steps=20 if args.quick else 1500,
            examples=examples,
            held_out=64 if args.quick else 1024,
        )
        sizes = SIZES[:2] if args.quick else SIZES
        rates = RATES[1:3] if args.quick else RATES
        wanted = [(8, 4e-3, 8 * (16 if args.quick else 60), True)]
        wanted += [
            (sizes[0], rate, examples // share, False)
            for share in (2, 4, 8)
            for rate in rates
        ]
        wanted += [(size, rate, examples, False) for size in sizes for rate in rates]
        for size, rate, length, noise in wanted:
            for seed in (0,) if noise or args.quick else SEEDS:
                name = f"{size} x {length} rate {rate:g} seed {seed}"
                name += " noise" if noise else ""
                if name not in found["runs"]:
                    row = study.tune(size, rate, seed, examples=length, noise=noise)
                    row = {"size": size, "examples": length, "rate": rate} | row
                    found["runs"][name] = row
                    print(name, row, flush=True)
                    if not args.quick:
                        args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(report(found))


if __name__ == "__main__":
    main()

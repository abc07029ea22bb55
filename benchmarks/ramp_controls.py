"""Does a growing batch pay? Whole runs of a small language model, with controls.

    python benchmarks/ramp_controls.py --work runs/ramp_controls             # the runs that are missing in the file of results
    python benchmarks/ramp_controls.py --quick --work runs/quick      # all of it at the size of a toy, in a minute

Every run is one line of benchmarks/ramp_controls.jsonl; an interrupted study resumes, and
benchmarks/ramp_controls_report.py prints its tables. The text
is the Python source of four pinned wheels, so that any machine can repeat a run.

Every run trains the same 8,192 samples of 64 bytes with AdamW. All have a warm-up of 40
optimizer steps, or of a third of the steps of a shorter run. Parts, in this order, for
each shape of the learning rate (`wsd`: constant, then linear to 0 in the last 30%;
`cosine`: to a tenth):

- `constant`: each batch with rates a factor of the square root of 2 apart, until the
  best is inside; b2 of 0.99, and b2 with the half-life of the smallest batch. Then
  three fresh seeds at the best.
- `lengths`: the smallest batch with half and a quarter of the samples. Losses become
  hours by the slope that they show.
- `pilots`: the first quarter of a run with the smallest batch, five of them: three
  seeds, and rates that are off by 2 both ways. `rampup design` predicts from each.
- `ramps`: for each different ramp that a pilot led to, with three seeds: its rates by
  the square-root rule, by the rule that peaks at the noise scale, and left alone; by
  the rule with Adam's second moment divided at each growth; and two controls, the
  constant batch of as many steps at its best rate, and with the ramp's own rates.

The rule of the verdict, written before the runs: a ramp pays on a machine if it saves,
as the mean over the pilots, more than 2% of the hours of the best constant batch, and
the lower end of the 90% interval over seeds is above 0. A step of B samples takes
1 + B/16, 1 + B/64 or 1 + B/256 units of time on the three machines.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# One thread: a result does not depend on what else the machine does.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 "
    + os.environ.get("XLA_FLAGS", "")
)

import jax
import numpy as np
import optax
from ramp_controls_results import (
    B2,
    DESIGNED_FOR,
    LENGTH,
    RESULTS,
    SAMPLES,
    SEEDS,
    SHAPES,
    SMALLEST,
    WARMUP_STEPS,
    WSD_DECAY,
    half_life_b2,
    read,
)

import rampup
from rampup.data.batches import BatchLoader
from rampup.data.files import open_sources
from rampup.engine.optimizer import make_optimizer
from rampup.lm.train import sample_order
from rampup.lm.transformer import LanguageModel

WHEELS = ("flax==0.11.2", "jax==0.7.2", "numpy==2.1.3", "optax==0.2.6")
HELD_OUT = 20  # one file in 20 is for evaluation
PARTS = ("constant", "lengths", "pilots", "ramps")
CURVE_POINTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The sizes of the study, in samples unless named otherwise."""

    sizes: tuple[int, ...] = (SMALLEST, 16, 32, 64, 128)
    samples: int = SAMPLES
    length: int = LENGTH  # tokens (bytes) of a sample
    width: int = 96
    layers: int = 3
    rate: float = 2.8e-3  # around which the rates of the smallest batch are swept
    held_out: int = 2048
    seeds: tuple[int, ...] = SEEDS  # fresh ones; 0 is that of the sweep

    def config(self, **keys: Any) -> rampup.Config:
        """Return the configuration of a run; all runs share what is here."""
        shared: dict[str, Any] = {
            "base_emb_dim": self.width,
            "base_mlp_dim": 2 * self.width,
            "base_num_decoder_layers": self.layers,
            "base_num_query_heads": 4,
            "max_target_length": self.length,
            "enable_rampup_batch_size": False,
            "microbatch_size": self.sizes[0],
            "train_samples": self.samples,
            "steps": -1,
            "num_devices": 1,
        }
        return rampup.Config(**shared | keys)


QUICK = Study(
    sizes=(8, 16), samples=1024, length=16, width=16, layers=1, held_out=32, seeds=(1,)
)


def write_text(work: Path, *, quick: bool) -> str:
    """Write the text into the work folder, and return its hash: the Python source of
    the pinned wheels, or of this folder for a toy.
    """
    if quick:
        files = {
            path.name: path.read_bytes() for path in sorted(RESULTS.parent.glob("*.py"))
        }
    else:
        files = dict(read_wheels(work / "wheels"))
    parts: dict[str, list[bytes]] = {"train": [], "held_out": []}
    for name, text in files.items():
        first = hashlib.sha256(name.encode()).digest()[0]
        parts["train" if first % HELD_OUT else "held_out"].append(text)
    digest = hashlib.sha256()
    for name, texts in parts.items():
        whole = b"\0".join(texts or parts["train"])
        (work / f"{name}.txt").write_bytes(whole)
        digest.update(whole)
    return digest.hexdigest()[:16]


def read_wheels(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the text of every Python file of the pinned wheels."""
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        command += ["--only-binary=:all:", "--python-version=3.11"]
        command += ["--platform=manylinux2014_x86_64", "-d", str(folder), *WHEELS]
        subprocess.run(command, check=True)
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(io.BytesIO(wheel.read_bytes())) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(".py"):
                    yield name, archive.read(name)


def rates(
    sizes: Sequence[int], peaks: dict[int, float], shape: str, samples: int
) -> list[float]:
    """Return the learning rate of every step.

    Args:
        sizes: the batch of every step, in samples.
        peaks: the rate of each batch before warm-up and decay.
        shape: `wsd` or `cosine`, over the samples of the run.
        samples: of the run.
    """
    warmup = min(WARMUP_STEPS, len(sizes) // 3)
    found, consumed = [], 0
    for step, size in enumerate(sizes):
        share = consumed / samples
        if shape == "wsd":
            decay = min(1.0, (1 - share) / WSD_DECAY)
        else:
            decay = 0.1 + 0.45 * (1 + math.cos(math.pi * share))
        found.append(peaks[size] * decay * min(1.0, (step + 1) / warmup))
        consumed += size
    return found


class Trainer:
    """Trains any schedule in one compiled program: rate and b2 are in the state."""

    def __init__(self, study: Study, work: Path) -> None:
        self.study = study
        self.files = {
            "grain_train_files": str(work / "train.txt"),
            "grain_eval_files": str(work / "held_out.txt"),
        }
        config = study.config(**self.files, batch_size_schedule=f"0:{study.sizes[0]}")
        self.model = LanguageModel.from_config(config)
        self.mesh = rampup.make_mesh(devices=jax.devices()[:1])
        self.rows, held_out = open_sources(config)
        numbers = np.linspace(0, len(held_out) - 1, study.held_out).astype(int)
        arrays = held_out.read(numbers)
        self.held_out = [
            {key: x[number] for key, x in arrays.items()}
            for number in range(study.held_out)
        ]
        self.tx = optax.inject_hyperparams(
            lambda learning_rate, b2: make_optimizer(learning_rate, adam={"b2": b2})
        )(learning_rate=0.0, b2=B2)
        self.evaluate = rampup.EvalStep(self.model.loss, self.mesh)
        self.init = jax.jit(self.model.init)
        self.step: Any = None

    def plan(self, config: rampup.Config) -> rampup.RampPlan:
        """Return a plan with the buffers of the largest batch, and so one program."""
        growth = rampup.plan.Growth(sizes=self.study.sizes)
        return replace(rampup.build_plan(config, 1), growth=growth)

    def sizes(self, schedule: str, samples: int) -> list[int]:
        """Return the batch of every step of a run."""
        plan = self.plan(
            self.study.config(batch_size_schedule=schedule, train_samples=samples)
        )
        return [
            plan.position(step).split.global_batch_size
            for step in range(plan.total_steps)
        ]

    def run(
        self,
        schedule: str,
        rates: Sequence[float],
        *,
        seed: int,
        b2: float = B2,
        samples: int | None = None,
        noise: float | None = None,
    ) -> dict[str, Any]:
        """Train, and return the losses.

        Args:
            schedule: the batch in samples, as `batch_size_schedule`.
            rates: of every step.
            seed: of the weights and of the order of the samples.
            b2: of AdamW.
            samples: of the run; None = those of the study.
            noise: the noise scale in samples; where the batch grows from B to B', Adam's
                second moment is then multiplied by (1 + noise/B') / (1 + noise/B), its
                expectation at B' over that at B. None = it follows by itself.
        """
        config = self.study.config(
            **self.files,
            batch_size_schedule=schedule,
            train_samples=samples or self.study.samples,
            init_weights_seed=seed,
            data_shuffle_seed=seed,
        )
        plan, begun = self.plan(config), time.monotonic()
        if self.step is None:
            self.step = rampup.train_step(
                self.model.loss, self.tx, plan, self.mesh, check_loss=False
            )
        state = rampup.create_state(self.init(jax.random.key(seed)), self.tx, self.mesh)
        total = plan.ramp.samples_before(plan.total_steps)
        loader = BatchLoader(
            source=self.rows,
            plan=plan,
            mesh=self.mesh,
            order=sample_order(config, len(self.rows), total),
        )
        losses, sizes = [], []
        for batch, rate in zip(loader.batches(), rates, strict=True):
            size = batch.position.split.global_batch_size
            if noise and sizes and size != sizes[-1]:
                factor = (1 + noise / size) / (1 + noise / sizes[-1])
                state = state.replace(opt_state=scale_nu(state.opt_state, factor))
            hyperparams = state.opt_state.hyperparams
            hyperparams["learning_rate"] = jax.device_put(np.float32(rate))
            hyperparams["b2"] = jax.device_put(np.float32(b2))
            state, metrics = self.step(state, batch)
            losses.append(metrics["loss"])
            sizes.append(size)
        loss, error = self.held_out_loss(state.params)
        return {
            "steps": len(sizes),
            "loss": round(loss, 5),
            "loss_error": round(error, 5),
            "curve": curve(sizes, jax.device_get(losses)),
            "seconds": round(time.monotonic() - begun, 1),
        }

    def held_out_loss(self, params: Any) -> tuple[float, float]:
        """Return the mean loss on the held-out samples, and its standard error."""
        state = rampup.create_state(params, optax.identity(), self.mesh)
        values = [
            float(loss) / float(weight)
            for batch in self.evaluate.batches(self.held_out, 64)
            for loss, weight in [self.evaluate(state, batch)]
        ]
        return float(np.mean(values)), float(
            np.std(values, ddof=1) / len(values) ** 0.5
        )


def scale_nu(opt_state: Any, factor: float) -> Any:
    """Return an optimizer state whose second moments are multiplied by a factor."""

    def scale(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            return part._replace(nu=jax.tree.map(lambda nu: nu * factor, part.nu))
        return part

    return jax.tree.map(
        scale, opt_state, is_leaf=lambda part: isinstance(part, optax.ScaleByAdamState)
    )


def curve(sizes: Sequence[int], losses: Sequence[Any]) -> list[list[float]]:
    """Return the mean training loss in up to CURVE_POINTS parts of a run, each with the
    samples at its end. Every sample is new to the model when its loss is computed.
    """
    ends = np.cumsum(sizes)
    parts = np.minimum((ends - 1) * CURVE_POINTS // ends[-1], CURVE_POINTS - 1)
    found = []
    for part in range(CURVE_POINTS):
        (inside,) = np.nonzero(parts == part)
        if inside.size:
            weights = np.asarray(sizes)[inside]
            mean = np.average(np.asarray(losses, np.float64)[inside], weights=weights)
            found.append([int(ends[inside[-1]]), round(float(mean), 4)])
    return found


class Runner:
    """The parts of a study; what the results have is not run again."""

    def __init__(self, study: Study, results: Path, work: Path) -> None:
        self.study, self.results, self.work = study, results, work
        text = write_text(work, quick=study is QUICK)
        self.trainer = Trainer(study, work)
        self.known = {row["name"]: row for row in read(results)}
        study_row = {"name": "study", "text": text, "parameters": self.parameters}
        if self.known.get("study", study_row) != study_row:
            raise SystemExit(f"the runs in {results} are of another text or model")
        if "study" not in self.known:
            self.add(study_row)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return int(self.trainer.model.num_parameters)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the results."""
        self.known[row["name"]] = row
        with self.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({key: row[key] for key in row if key != "curve"}, flush=True)

    def one(
        self, name: str, schedule: str, run_rates: list[float], seed: int, **keys: Any
    ) -> float:
        """Return the held-out loss of a run, and train it if it is not known."""
        name = f"{name} seed{seed}"
        if name not in self.known:
            found = self.trainer.run(schedule, run_rates, seed=seed, **keys)
            row = {"name": name, "schedule": schedule, "seed": seed, **keys}
            self.add(row | {"peak": round(max(run_rates), 8)} | found)
        return float(self.known[name]["loss"])

    def constant_run(
        self, shape: str, size: int, rate: float, seed: int, **keys: Any
    ) -> float:
        """Return the loss of a constant batch with a peak rate."""
        samples = keys.get("samples") or self.study.samples
        steps = self.trainer.sizes(f"0:{size}", samples)
        own = rates(steps, {size: rate}, shape, samples)
        extra = "".join(f" {key}={value:g}" for key, value in keys.items())
        name = f"{shape} constant {size} rate {rate:.3e}{extra}"
        return self.one(name, f"0:{size}", own, seed, **keys)

    def best_rate(self, shape: str, size: int, **keys: Any) -> float:
        """Return the best rate of a batch with seed 0, inside of those tried."""
        center = self.study.rate * math.sqrt(size / self.study.sizes[0])
        losses = {
            power: self.constant_run(shape, size, center * 2 ** (power / 2), 0, **keys)
            for power in (-1, 0, 1)
        }
        while True:
            best = min(losses, key=losses.__getitem__)
            missing = [p for p in (best - 1, best + 1) if p not in losses]
            if not missing:
                return center * 2 ** (best / 2)
            rate = center * 2 ** (missing[0] / 2)
            losses[missing[0]] = self.constant_run(shape, size, rate, 0, **keys)

    def constant(self, shape: str) -> None:
        """Sweep the rate of every constant batch with both b2, and run fresh seeds."""
        for size in self.study.sizes:
            choices = (
                [{}]
                if size == self.study.sizes[0]
                else [{}, {"b2": half_life_b2(size)}]
            )
            for keys in choices:
                rate = self.best_rate(shape, size, **keys)
                for seed in self.study.seeds:
                    self.constant_run(shape, size, rate, seed, **keys)

    def lengths(self, shape: str) -> None:
        """Run the smallest batch with fewer samples, at its best rate."""
        size = self.study.sizes[0]
        rate = self.best_rate(shape, size)
        for share in (2, 4):
            for seed in self.study.seeds:
                samples = self.study.samples // share
                self.constant_run(shape, size, rate, seed, samples=samples)

    def pilots(self, shape: str) -> None:
        """Run five pilots of the smallest batch, and design a ramp from each."""
        size = self.study.sizes[0]
        best = self.best_rate(shape, size)
        for seed, factor in ((11, 1.0), (12, 1.0), (13, 1.0), (11, 0.5), (11, 2.0)):
            name = f"{shape} pilot seed{seed} rate x{factor:g}"
            if name not in self.known:
                self.add({"name": name, **self.pilot(shape, seed, best * factor)})

    def pilot(self, shape: str, seed: int, rate: float) -> dict[str, Any]:
        """Return what a pilot measured, and the design that follows."""
        study, size = self.study, self.study.sizes[0]
        folder = self.work / f"pilot-{shape}-{seed}-{rate:.3e}"
        times = self.work / "tune.json"
        phases = [
            {"global_batch_size": each, "step_seconds": 1 + each / DESIGNED_FOR}
            for each in study.sizes
        ]
        times.write_text(json.dumps({"phases": phases}))
        steps = study.samples // size
        config = study.config(
            **self.trainer.files,
            run_name=folder.name,
            base_output_directory=str(self.work),
            batch_size_schedule=f"0:{size}",
            learning_rate=rate,
            warmup_steps_fraction=WARMUP_STEPS / steps,
            lr_schedule_type=shape,
            learning_rate_schedule_steps=steps,
            adam_b2=B2,
            train_samples=study.samples // 4,
            microbatch_size=1,
            measure_gradient_noise=True,
            eval_interval=-1,
            enable_checkpointing=False,
            init_weights_seed=seed,
            data_shuffle_seed=seed,
        )
        if not (folder / "metrics.jsonl").exists():
            rampup.train(config)
        # Its shape of the rate and its warm-up are those of the default, for both
        # shapes: the page says so of the losses that it predicts.
        design_of = study.config(**self.trainer.files, batch_size_schedule=f"0:{size}")
        try:
            found = rampup.contrib.lab.design_ramp(
                design_of,
                [times, folder],
                num_devices=1,
                train_tokens=study.samples * study.length,
                max_batch=study.sizes[-1],
            )
        except rampup.RampupError as error:
            return {"seed": seed, "rate": rate, "refused": str(error)}
        last = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-1]
        return {
            "seed": seed,
            "rate": rate,
            "noise_last": [
                last.get(f"noise_scale_samples{e}") for e in ("", "_low", "_high")
            ],
            "noise_growth": found["noise_growth"],
            "candidates": found["candidates"],
        }

    def designed(self, shape: str) -> Iterator[tuple[str, float]]:
        """Yield each different ramp that a pilot led to, with the pilot's last noise
        scale.
        """
        seen = set()
        for name, row in self.known.items():
            if not name.startswith(f"{shape} pilot") or "candidates" not in row:
                continue
            for each in row["candidates"]:
                schedule = each["batch_size_schedule"]
                if each["name"] == "fastest ramp" and schedule not in seen:
                    seen.add(schedule)
                    noise = row["noise_last"][0] or row["noise_last"][1]
                    yield schedule, float(noise)

    def ramps(self, shape: str) -> None:
        """Run each designed ramp with its rates, and beside its two controls."""
        study, first = self.study, self.study.sizes[0]
        best = self.best_rate(shape, first)
        for schedule, noise in list(self.designed(shape)):
            sizes = self.trainer.sizes(schedule, study.samples)

            def surge(size: int, noise: float = noise) -> float:
                return 1 / (math.sqrt(noise / size) + math.sqrt(size / noise))

            rules = {
                "rule": {b: best * math.sqrt(b / first) for b in set(sizes)},
                "surge": {b: best * surge(b) / surge(first) for b in set(sizes)},
                "none": dict.fromkeys(sizes, best),
            }
            for seed in study.seeds:
                for rule, peaks in rules.items():
                    own = rates(sizes, peaks, shape, study.samples)
                    name = f"{shape} ramp {schedule} {rule}"
                    self.one(name, schedule, own, seed)
                own = rates(sizes, rules["rule"], shape, study.samples)
                name = f"{shape} ramp {schedule} rule, moment divided"
                self.one(name, schedule, own, seed, noise=noise)
                # Its controls: the constant batch of as many steps.
                same = round(study.samples / len(sizes) / first) * first
                steps = self.trainer.sizes(f"0:{same}", study.samples)
                places = (np.arange(len(steps)) + 0.5) / len(steps) * len(sizes)
                of_ramp = [own[int(place)] for place in places]
                name = f"{shape} constant {same} with the rates of {schedule}"
                self.one(name, f"0:{same}", of_ramp, seed)
                tuned = self.best_rate(shape, same)
                self.constant_run(shape, same, tuned, seed)


def main() -> None:
    """Run the parts of the study that are missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/ramp_controls"))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="the size of a toy")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    args.work.mkdir(parents=True, exist_ok=True)
    results = args.work / RESULTS.name if args.quick else RESULTS
    runner = Runner(QUICK if args.quick else Study(), results, args.work)
    for shape in args.shapes.split(","):
        for part in args.parts.split(","):
            getattr(runner, part)(shape)


if __name__ == "__main__":
    main()

"""What came true of the advice: predictions from a small pilot run beside whole runs of
a small language model.

    python benchmarks/advice.py --work runs/advice              # the runs that are missing in the file of results
    python benchmarks/advice.py --report                        # every number and the figure of the page, without a run
    python benchmarks/advice.py --quick --work runs/quick       # all of it at the size of a toy, in a minute

Each run is one row of benchmarks/advice.json. An interrupted study resumes; `--stages`
and `--part 1/2` run a part of it. The stages, each after those before it:

- `constant`: for every batch, the learning rate is swept around the square-root rule;
  two more seeds at the best rate.
- `lengths`: the best constant batch with fewer tokens, its rate swept again. The tokens
  after which it has the loss of another batch are the measured token overhead of that
  batch.
- `pilot`: the first quarter of the run with a small batch, with the noise scale in both
  geometries, `rampup critical` at three of its checkpoints, and `rampup design` from
  them.
- `ramps`: what `design` recommends and Seesaw, with the rate of the
  pilot's batch and the square-root rule.
- `tuned`: the same schedules with the best rate of each batch instead of the rule.
- `wsd`: constant batches and schedules with a decay at the end only.
- `seeds`: two more seeds of what the figure shows.
- `auto`: the batch that follows its own measurement.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# One thread: times and results do not depend on what else the machine does.
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1 "
    + os.environ.get("XLA_FLAGS", "")
)

import jax
import numpy as np
import optax

import rampup
from rampup.contrib.lab.measurements import Measurements
from rampup.data.batches import BatchLoader
from rampup.data.files import open_sources
from rampup.engine.evaluation import EvalStep
from rampup.engine.optimizer import LearningRate, make_optimizer
from rampup.lm.train import sample_order
from rampup.lm.transformer import LanguageModel
from rampup.loop.run_folder import METRICS_FILE, read_lines

RESULTS = Path(__file__).with_name("advice.json")
FIGURE = RESULTS.parents[1] / "docs/_static/ramp_pays.png"
STAGES = ("constant", "lengths", "pilot", "ramps", "tuned", "wsd", "seeds", "auto")
# The text: the standard library's files and those of packages that rampup needs, one
# file in HELD_OUT for evaluation.
PACKAGES, SUFFIXES, HELD_OUT = (
    ("flax", "jax", "numpy", "optax"),
    (".py", ".rst", ".txt"),
    20,
)
CURVE_POINTS = 20
# The schedules that the figure shows.
SHOWN = ("fastest by plain", "one late switch by plain", "seesaw")
FIRST_RATES = (-2, 0, 2)  # in half powers of 2 around the square-root rule's rate
LEAST_RATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The sizes of the study, in samples unless named otherwise."""

    sizes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    samples: int = 8192  # of a run
    length: int = 64  # tokens of a sample
    width: int = 96
    layers: int = 3
    pilot: int = 8  # the pilot's batch, whose rate is that of the ramps
    rate: float = 4e-3  # around which the rates of the pilot's batch are swept
    seeds: int = 3
    held_out: int = 2048  # samples of an evaluation
    shares: tuple[int, ...] = (
        2,
        4,
        8,
        16,
    )  # the other runs of the best batch have 1/2, 1/4, ... of the samples
    branchings: tuple[int, ...] = (
        1,
        2,
        4,
    )  # checkpoints of the pilot with branches, in quarters of it
    # a step of B samples takes 1 + B / least_steps units of time on the assumed machine
    least_steps: float = 64.0

    def config(self, **keys: Any) -> rampup.Config:
        """Return the configuration of a run; all runs share what is here."""
        shared: dict[str, Any] = {
            "base_emb_dim": self.width,
            "base_mlp_dim": 2 * self.width,
            "base_num_decoder_layers": self.layers,
            "base_num_query_heads": 4,
            "max_target_length": self.length,
            "enable_rampup_batch_size": False,
            "microbatch_size": min(self.sizes),
            "train_samples": self.samples,
            "steps": -1,
            "learning_rate_clock": "samples",
            "warmup_steps_fraction": 0.05,
            "adam_b2": 0.99,
            "num_devices": 1,
        }
        return rampup.Config(**shared | keys)

    @property
    def model(self) -> LanguageModel:
        """The model."""
        return LanguageModel.from_config(self.config())


QUICK = Study(
    sizes=(8, 16),
    samples=2048,
    rate=2e-2,
    shares=(2, 4),
    branchings=(2,),
    length=16,
    width=16,
    layers=1,
    seeds=2,
    held_out=32,
)


class Results:
    """The file of results; several processes may add to it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return the file, or an empty one."""
        return json.loads(self.path.read_text()) if self.path.exists() else {"runs": {}}

    def update(
        self, change: Mapping[str, Any], run: Mapping[str, Any] | None = None
    ) -> None:
        """Set keys, and add a run."""
        lock = os.open(self.path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            found = self.read() | dict(change)
            if run is not None:
                found["runs"][run["name"]] = {
                    key: value for key, value in run.items() if key != "name"
                }
            runs = ",\n".join(
                f"  {json.dumps(name)}: {json.dumps(row)}"
                for name, row in sorted(found.pop("runs").items())
            )
            others = "".join(
                f"{json.dumps(key)}: {json.dumps(value)},\n"
                for key, value in sorted(found.items())
            )
            whole = self.path.with_suffix(".new")
            whole.write_text(f'{{{others}"runs": {{\n{runs}\n}}}}\n')
            whole.replace(self.path)
        finally:
            os.close(lock)


def write_text(work: Path) -> dict[str, Any]:
    """Write the training text and the held-out text into the work folder, and return
    what they are.
    """
    folders = {"": Path(sysconfig.get_path("stdlib"))}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folders[package] = Path(spec.origin).parent
    parts: dict[str, list[bytes]] = {"train": [], "held_out": []}
    for name, folder in folders.items():
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            if (
                path.suffix not in SUFFIXES
                or not path.is_file()
                or "site-packages" in relative.parts
            ):
                continue
            is_held_out = (
                hashlib.sha256(f"{name}/{relative}".encode()).digest()[0] % HELD_OUT
                == 0
            )
            parts["held_out" if is_held_out else "train"].append(path.read_bytes())
    found: dict[str, Any] = {"files": sum(map(len, parts.values()))}
    for name, texts in parts.items():
        text = b"\0".join(texts)
        (work / f"{name}.txt").write_bytes(text)
        found |= {
            f"{name}_bytes": len(text),
            f"{name}_sha256": hashlib.sha256(text).hexdigest()[:16],
        }
    return found


class Trainer:
    """Trains any configuration of a study in one compiled program: the learning rate is
    a part of the state.
    """

    def __init__(self, study: Study, work: Path) -> None:
        self.study, self.work = study, work
        self.keys = {
            "grain_train_files": str(work / "train.txt"),
            "grain_eval_files": str(work / "held_out.txt"),
        }
        config = study.config(**self.keys, batch_size_schedule=f"0:{study.sizes[0]}")
        self.mesh = rampup.make_mesh(devices=jax.devices()[:1])
        self.rows, held_out = open_sources(config)
        # From all files, not from the first ones.
        arrays = held_out.read(
            np.linspace(0, len(held_out) - 1, study.held_out).astype(int)
        )
        self.held_out = [
            {key: x[number] for key, x in arrays.items()}
            for number in range(study.held_out)
        ]
        self.tx = optax.inject_hyperparams(
            lambda learning_rate: make_optimizer(
                learning_rate, adam={"b2": config.adam_b2}
            )
        )(learning_rate=0.0)
        self.step: rampup.engine.TrainStep | None = None
        self.evaluate = EvalStep(study.model.loss, self.mesh)
        self.init = jax.jit(study.model.init)

    def plan(self, config: rampup.Config) -> rampup.RampPlan:
        """Return a configuration's plan; all plans have the buffers of the largest
        batch, and so one program.
        """
        return replace(rampup.build_plan(config, 1), reserved_sizes=self.study.sizes)

    def run(
        self, *, seed: int, best_rates: Mapping[str, float] | None = None, **keys: Any
    ) -> dict[str, Any]:
        """Train, and return the summary. With `best_rates`, of every batch, they take
        the place of the square-root rule.
        """
        config = self.study.config(
            **self.keys, init_weights_seed=seed, data_shuffle_seed=seed, **keys
        )
        plan, begun = self.plan(config), time.monotonic()
        if self.step is None:
            self.step = rampup.train_step(
                self.study.model.loss, self.tx, plan, self.mesh, check_loss=False
            )
        schedule = LearningRate.from_config(
            config,
            plan,
            peak=config.learning_rate,
            decay_fraction=config.wsd_decay_steps_fraction,
        )
        state = rampup.create_state(self.init(jax.random.key(seed)), self.tx, self.mesh)
        loader = BatchLoader(
            source=self.rows,
            plan=plan,
            mesh=self.mesh,
            order=sample_order(
                config, len(self.rows), plan.ramp.samples_before(plan.total_steps)
            ),
        )
        losses, sizes = [], []
        for batch in loader.batches():
            size, rate = (
                batch.position.split.global_batch_size,
                schedule.at(batch.position.step),
            )
            if best_rates is not None:
                rate *= best_rates[str(size)] / (
                    config.learning_rate * math.sqrt(size / self.study.pilot)
                )
            state.opt_state.hyperparams["learning_rate"] = jax.device_put(
                np.float32(rate)
            )
            state, metrics = self.step(state, batch)
            losses.append(metrics["loss"])
            sizes.append(size)
        found = np.array(jax.device_get(losses), np.float64)
        loss, error = self.held_out_loss(state.params)
        tokens = np.cumsum(sizes) * self.study.length
        return {
            "tokens": int(tokens[-1]),
            "steps": len(sizes),
            "loss": round(loss, 5),
            "loss_error": round(error, 5),
            "curve": curve(tokens, found, np.array(sizes)),
            "seconds": round(time.monotonic() - begun, 1),
        }

    def held_out_loss(self, params: Any) -> tuple[float, float]:
        """Return the mean loss on the held-out samples, and its standard error over
        them.
        """
        state, sums = rampup.create_state(params, optax.identity(), self.mesh), []
        for batch in self.evaluate.batches(self.held_out, 64):
            loss, weight = self.evaluate(state, batch)
            sums.append((float(loss), float(weight)))
        values = np.array([loss / weight for loss, weight in sums])
        return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def curve(
    tokens: np.ndarray, losses: np.ndarray, sizes: np.ndarray
) -> list[list[float]]:
    """Return the mean training loss in up to CURVE_POINTS parts of a run, each with the
    tokens at its end.

    Every sample is new to the model when its loss is computed.
    """
    parts = np.minimum((tokens - 1) * CURVE_POINTS // tokens[-1], CURVE_POINTS - 1)
    found = [(parts == part) for part in range(CURVE_POINTS) if (parts == part).any()]
    return [
        [int(tokens[i][-1]), round(float(np.average(losses[i], weights=sizes[i])), 4)]
        for i in found
    ]


class Runner:
    """The stages of a study; what the results have is not run again."""

    def __init__(
        self, study: Study, results: Results, work: Path, part: tuple[int, int]
    ) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.study, self.results, self.work, self.part = study, results, work, part
        text = write_text(work)
        if results.read().get("text", text) != text:
            raise SystemExit(
                f"the runs in {results.path} are of another text than this machine has;"
                " move the file away to begin anew"
            )
        results.update(
            {
                "text": text,
                "study": asdict(study),
                "parameters": study.model.num_parameters,
            }
        )
        self.trainer = Trainer(study, work)

    def mine(self, items: Iterable[Any]) -> list[Any]:
        """Return this process's share of independent items."""
        number, total = self.part
        return list(items)[number - 1 :: total]

    def one(self, name: str, *, seed: int = 0, **keys: Any) -> float:
        """Return the held-out loss of a run, and train it if it is not known."""
        name = f"{name} seed{seed}"
        known = self.results.read()["runs"]
        if name not in known:
            run = self.trainer.run(seed=seed, **keys)
            self.results.update({}, {"name": name, "seed": seed, **keys, **run})
            print(
                f"{name}: {run['loss']:.4f} after {run['steps']} steps,"
                f" {run['seconds']} s",
                flush=True,
            )
            return float(run["loss"])
        return float(known[name]["loss"])

    def rate(self, size: int, offset: int) -> float:
        """Return the rate of a batch by the square-root rule, times a power of the
        square root of 2.
        """
        return self.study.rate * math.sqrt(size / self.study.pilot) * 2 ** (offset / 2)

    def sweep(self, name: str, size: int, center: int = 0, **keys: Any) -> int:
        """Find the best rate of a constant batch to a factor of the square root of 2,
        run the other seeds, and return it.
        """
        losses: dict[int, float] = {}
        wanted = [center + offset for offset in FIRST_RATES]
        while wanted:
            for offset in wanted:
                keys |= {
                    "batch_size_schedule": f"0:{size}",
                    "learning_rate": self.rate(size, offset),
                }
                losses[offset] = self.one(f"{name} rate{offset:+d}", **keys)
            best = min(losses, key=losses.__getitem__)
            if best in (min(losses), max(losses)):
                wanted = [best - 2 if best == min(losses) else best + 2]
            else:
                sides = [side for side in (best - 2, best + 2) if side in losses]
                nearer = (
                    (best + min(sides, key=losses.__getitem__)) // 2 if sides else best
                )
                wanted = [] if any((each - center) % 2 for each in losses) else [nearer]
        for seed in range(1, self.study.seeds):
            keys["learning_rate"] = self.rate(size, best)
            self.one(f"{name} rate{best:+d}", seed=seed, **keys)
        return best

    def constant(self) -> None:
        """Sweep the rate of every constant batch."""
        for size in self.mine(self.study.sizes):
            self.sweep(f"constant {size}", size)

    def lengths(self) -> None:
        """Run the best constant batch with other numbers of tokens."""
        runs = self.results.read()["runs"]
        best = min(
            self.study.sizes, key=lambda size: mean_loss(runs, f"constant {size}")
        )
        center = best_offset(runs, f"constant {best}")
        for share in self.mine(self.study.shares):
            self.sweep(
                f"length 1/{share} of {best}",
                best,
                center,
                train_samples=self.study.samples // share,
            )

    def pilot(self) -> None:
        """Train the pilot, measure its critical batches, and design from them."""
        if "designs" in self.results.read():
            return
        study, size, runs = self.study, self.study.pilot, self.results.read()["runs"]
        rate = self.rate(size, best_offset(runs, f"constant {size}"))
        steps = study.samples // size
        config = study.config(
            **self.trainer.keys,
            run_name="pilot",
            base_output_directory=str(self.work),
            batch_size_schedule=f"0:{size}",
            learning_rate=rate,
            train_samples=study.samples // 4,
            learning_rate_schedule_steps=steps,
            microbatch_size=1,
            measure_gradient_noise=True,
            eval_interval=-1,
            checkpoint_period=steps // 16,
            max_num_checkpoints_to_keep=4,
        )
        rampup.train(config)
        folder, found = self.work / "pilot", []
        for quarter in study.branchings:
            try:
                critical = rampup.contrib.lab.find_critical_batch_size(
                    folder, step=quarter * steps // 16, report=print
                )
                found.append(critical.to_dict() | {"rate": critical.learning_rates[0]})
            except rampup.RampupError as error:
                found.append({"step": quarter * steps // 16, "refused": str(error)})
        self.results.update({"critical": found, "pilot_rate": rate})
        self.design(folder)

    def design(self, folder: Path) -> None:
        """Design from the pilot's critical batches and from both noise scales, for the
        assumed step times.
        """
        study, designs = self.study, {}
        times = self.work / "tune.json"
        phases = [
            {"global_batch_size": size, "step_seconds": step_time(study, size)}
            for size in study.sizes
        ]
        times.write_text(json.dumps({"phases": phases}))
        config = study.config(
            **self.trainer.keys, batch_size_schedule=f"0:{study.pilot}"
        )
        lines = [json.dumps(line) for line in read_lines(folder / METRICS_FILE)]
        for source in ("critical", "plain", "adam"):
            own = folder
            if (
                source != "critical"
            ):  # a folder beside which no critical batches are found
                own = self.work / f"pilot-{source}"
                own.mkdir(exist_ok=True)
                (own / "config.yml").write_text((folder / "config.yml").read_text())
                texts = [
                    line.replace('"adam_', '"') if source == "adam" else line
                    for line in lines
                ]
                (own / METRICS_FILE).write_text("".join(f"{text}\n" for text in texts))
            designs[source] = {}
            try:
                points = Measurements.read([times, own], config).noise
                designs[source]["points"] = [
                    [finite(value) for value in point] for point in points
                ]
                whole = rampup.contrib.lab.design_ramp(
                    config,
                    [times, own],
                    num_devices=1,
                    train_tokens=study.samples * study.length,
                    max_batch=study.sizes[-1],
                )
                keys = (
                    "noise_source",
                    "noise_growth",
                    "loss_slope",
                    "candidates",
                    "notes",
                )
                designs[source] |= {key: whole[key] for key in keys}
            except rampup.RampupError as error:
                designs[source]["refused"] = str(error)
        self.results.update({"designs": designs})

    def schedules(self) -> dict[str, dict[str, Any]]:
        """Return the keys of every schedule to run with the pilot's rate, by its
        name.
        """
        known, study = self.results.read(), self.study
        seesaw = {
            "batch_size_schedule": f"0:{study.pilot}",
            "seesaw_factor": 2.0,
            "seesaw_max_batch_size": study.sizes[-1],
            "learning_rate_clock": "samples",
            "learning_rate": known["pilot_rate"],
        }
        found: dict[str, dict[str, Any]] = {"seesaw": seesaw}
        for source, design in known["designs"].items():
            for each in design.get("candidates", ()):
                name = {
                    "fastest ramp": "fastest",
                }.get(each["name"], each["name"])
                keys = {
                    "batch_size_schedule": each["batch_size_schedule"],
                    **each["rate_rule"],
                }
                # Those by Adam's geometry are close to those of the plain one.
                if (
                    not name.startswith("constant")
                    and keys not in found.values()
                    and source != "adam"
                ):
                    found[f"{name} by {source}"] = keys | {
                        "learning_rate": known["pilot_rate"]
                    }
        return found

    def ramps(self) -> None:
        """Run what was designed, with three seeds."""
        for name, keys in self.mine(self.schedules().items()):
            for seed in range(self.study.seeds):
                self.one(f"ramp {name}", seed=seed, **keys)

    def tuned(self) -> None:
        """Run what was designed with the best rate of each of its batches instead of
        the square-root rule.
        """
        runs = self.results.read()["runs"]
        best = {
            str(size): self.rate(size, best_offset(runs, f"constant {size}"))
            for size in self.study.sizes
        }
        by_rule = {
            size: best[str(self.study.pilot)] * math.sqrt(size / self.study.pilot)
            for size in self.study.sizes
        }
        for name, keys in self.mine(self.schedules().items()):
            sizes = {
                int(each.split(":")[1]) for each in keys["batch_size_schedule"].split()
            }
            # Of the others, the best rates are those of the rule.
            if any(not math.isclose(best[str(size)], by_rule[size]) for size in sizes):
                for seed in range(self.study.seeds):
                    self.one(f"ramp {name} tuned", seed=seed, best_rates=best, **keys)

    def seeds(self) -> None:
        """Run more seeds of the constant batches and of the schedules that the figure
        shows.
        """
        runs = self.results.read()["runs"]
        named: dict[str, dict[str, Any]] = {}
        for size in self.study.sizes:
            best = best_offset(runs, f"constant {size}")
            keys = {
                "batch_size_schedule": f"0:{size}",
                "learning_rate": self.rate(size, best),
            }
            named[f"constant {size} rate{best:+d}"] = keys
        named |= {
            f"ramp {name}": keys
            for name, keys in self.schedules().items()
            if name in SHOWN
        }
        for name, keys in self.mine(named.items()):
            for seed in range(self.study.seeds, self.study.seeds + 2):
                self.one(name, seed=seed, **keys)

    def wsd(self) -> None:
        """Run constant batches and schedules with a decay in the last fifth, at their
        rate and at half of it.
        """
        runs, study = self.results.read()["runs"], self.study
        found = {
            f"constant {size}": {
                "batch_size_schedule": f"0:{size}",
                "learning_rate": self.rate(size, best_offset(runs, f"constant {size}")),
            }
            for size in (study.pilot, large_batch(self.results.read()))
        }
        found |= {
            name: keys
            for name, keys in self.schedules().items()
            if name in ("fastest by plain", "one late switch by plain")
        }
        for name, keys in self.mine(found.items()):
            keys |= {"lr_schedule_type": "wsd", "wsd_decay_steps_fraction": 0.2}
            rates = {f"wsd {name}": 1.0, f"wsd {name} half rate": 0.5}
            losses = {
                full: self.one(
                    full, **keys | {"learning_rate": keys["learning_rate"] * factor}
                )
                for full, factor in rates.items()
            }
            best = min(losses, key=losses.__getitem__)
            for seed in range(1, study.seeds):
                self.one(
                    best,
                    seed=seed,
                    **keys | {"learning_rate": keys["learning_rate"] * rates[best]},
                )

    def auto(self) -> None:
        """Run the batch that follows the measured noise scale, from the pilot's batch
        on, with the samples of the others.
        """
        study, rate = self.study, self.results.read()["pilot_rate"]
        for seed in self.mine(range(study.seeds)):
            name = f"ramp auto seed{seed}"
            if name in self.results.read()["runs"]:
                continue
            keys = {
                "batch_scaling": "sqrt",
                "batch_scaling_reference": study.pilot,
                "learning_rate": rate,
            }
            config = study.config(
                **self.trainer.keys,
                **keys,
                run_name=f"auto-{seed}",
                base_output_directory=str(self.work),
                init_weights_seed=seed,
                data_shuffle_seed=seed,
                batch_size_schedule="auto",
                per_device_batch_size_start=study.pilot,
                per_device_batch_size=study.sizes[-1],
                microbatch_size=study.pilot // 4,
                eval_interval=-1,
            )
            steps = rampup.train(config).steps
            lines = list(read_lines(self.work / config.run_name / METRICS_FILE))
            sizes = [line["global_batch_size"] for line in lines]
            tokens = np.cumsum(sizes) * study.length
            changes = [
                n for n in range(len(sizes)) if n == 0 or sizes[n] != sizes[n - 1]
            ]
            loss, error = self.trainer.held_out_loss(
                rampup.load(self.work / config.run_name).params
            )
            run = {
                "batch_size_schedule": " ".join(
                    f"{sum(sizes[:n])}:{sizes[n]}" for n in changes
                ),
                "tokens": int(tokens[-1]),
                "steps": steps,
                "loss": round(loss, 5),
                "loss_error": round(error, 5),
                "curve": curve(
                    tokens, np.array([line["loss"] for line in lines]), np.array(sizes)
                ),
            }
            self.results.update({}, {"name": name, "seed": seed, **keys, **run})
            print(
                f"{name}: {loss:.4f} after {steps} steps, {run['batch_size_schedule']}",
                flush=True,
            )


def step_time(study: Study, size: int) -> float:
    """Return the time of a step on the assumed machine, which a batch of `least_steps`
    fills half.
    """
    return 1 + size / study.least_steps


def finite(value: float) -> float | None:
    """Return a number that JSON has; None is infinite."""
    return None if math.isinf(value) else value


def rows_of(runs: Mapping[str, Any], prefix: str) -> dict[int, list[dict[str, Any]]]:
    """Return the runs of a constant batch by the offset of their rate."""
    found: dict[int, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        if name.startswith(f"{prefix} rate"):
            found.setdefault(
                int(name.removeprefix(f"{prefix} rate").split()[0]), []
            ).append(run)
    return found


def best_offset(runs: Mapping[str, Any], prefix: str) -> int:
    """Return the offset of the rate that won with seed 0."""
    firsts = {
        offset: min(run["loss"] for run in each if run["seed"] == 0)
        for offset, each in rows_of(runs, prefix).items()
    }
    return min(firsts, key=firsts.__getitem__)


def mean_loss(runs: Mapping[str, Any], prefix: str) -> float:
    """Return the mean loss over the seeds at the best rate."""
    return float(
        np.mean(
            [run["loss"] for run in rows_of(runs, prefix)[best_offset(runs, prefix)]]
        )
    )


def large_batch(results: Mapping[str, Any]) -> int:
    """Return the batch with which the fastest ramp ends: the one that a user of as many
    devices would run throughout; the largest of the study without a ramp.
    """
    names = ("fastest ramp", "early growth, fastest")
    ramps = [
        each["sizes"]
        for each in results["designs"]["plain"].get("candidates", ())
        if each["name"] in names
    ]
    return int(ramps[0][-1] if ramps else max(results["study"]["sizes"]))


def main() -> None:
    """Run the study, or report it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/advice"),
        help="folder of the text and of the pilot",
    )
    parser.add_argument(
        "--stages",
        default=",".join(STAGES),
        help=f"stages to run (default {','.join(STAGES)})",
    )
    parser.add_argument(
        "--part", default="1/1", help="this process's part of each stage, such as 1/2"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the size of a toy; the results are in the work folder",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print the tables and draw the figure from the results",
    )
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    results = Results(args.work / "advice.json" if args.quick else RESULTS)
    if not args.report:
        number, total = map(int, args.part.split("/"))
        args.work.mkdir(parents=True, exist_ok=True)
        runner = Runner(
            QUICK if args.quick else Study(), results, args.work, (number, total)
        )
        for stage in args.stages.split(","):
            getattr(runner, stage)()
    if args.report or args.quick:
        from advice_report import print_report  # which imports this file

        print_report(results.read(), args.work / FIGURE.name if args.quick else FIGURE)


if __name__ == "__main__":
    main()

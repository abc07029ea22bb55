"""The command line: a function per command, no logic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

import rampup
from rampup import cli_config
from rampup.errors import ConfigError, NonFiniteError, RampupError, StorageError
from rampup.plan.units import exact_fraction

if TYPE_CHECKING:
    from rampup.config.rollout import RolloutConfig

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130
BENCH_CPU_DEVICES = 8


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it runs, its one line of help and its own options."""

    run: Callable[[argparse.Namespace, Console], int]
    help: str
    options: Callable[[argparse.ArgumentParser], None]


class _Parser(argparse.ArgumentParser):
    """Turns wrong usage into an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`", path="command line")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Example:
        >>> main(["--version"])
        rampup 0.1.0
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        return _dispatch(arguments)
    except RampupError as error:
        _report(error, as_json)
        return EXIT_FAILED if isinstance(error, StorageError | NonFiniteError) else EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: say it in JSON too, with the traceback
        traceback.print_exc()
        if as_json:
            _report(error, as_json)
        return EXIT_FAILED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if arguments[0] == "--version":
        print(f"rampup {rampup.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        raise ConfigError(
            f"unknown command {name!r}; choose from {', '.join(COMMANDS)}", path="command line", nearest=tuple(COMMANDS)
        )
    args = _parser(name).parse_intermixed_args(rest)
    return COMMANDS[name].run(args, Console(stderr=args.json, highlight=False, soft_wrap=not sys.stdout.isatty()))


def _parser(name: str) -> _Parser:
    """Return the parser of a command."""
    command = COMMANDS[name]
    parser = _Parser(prog=f"rampup {name}", description=command.help, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object, and everything else on standard error")
    command.options(parser)
    return parser


def _plan(args: argparse.Namespace, console: Console) -> int:
    from rampup.config.rollout import is_rollout_file
    from rampup.show.tables import print_plan

    rollout = is_rollout_file(args.config)
    cli_config.check_plan_options(args, rollout=rollout)
    if rollout:
        return _plan_rollout(args, console)
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, _num_devices(args, config))
    if args.diff is not None:
        return cli_config.plan_diff(args, console, config, plan, lambda config: _num_devices(args, config))
    if args.budget is not None:
        return cli_config.plan_budget(args, console, config, plan)
    if args.json:
        print(json.dumps(plan.to_dict()))
    else:
        print_plan(plan, console)
    return 0


def _plan_rollout(args: argparse.Namespace, console: Console) -> int:
    from rampup.config.rollout import build_rollout_plan, load_rollout_config, rollout_notes

    config = load_rollout_config(args.config, args.overrides, environ=os.environ)
    plan = build_rollout_plan(config, _num_devices(args, config))
    notes = rollout_notes(config, plan)
    if args.json:
        print(json.dumps({**plan.to_dict(), "notes": notes}))
    else:
        from rampup.show.rollouts import print_rollout

        print_rollout(plan, console, notes=notes)
    return 0


def _check(args: argparse.Namespace, console: Console) -> int:
    from rampup.config.dialects import check_file, write_conversion

    if (args.to is None) != (args.output is None):
        raise ConfigError("--to and -o FILE belong together", key="to", path="command line")
    verdict = check_file(args.file, args.system, args.overrides)
    if args.json:
        print(json.dumps(verdict.to_dict()))
    else:
        from rampup.show.verdicts import print_verdict

        print_verdict(verdict, console)
    if verdict.good and args.output is not None:
        write_conversion(verdict, args.output, source=args.file)
        print(f"wrote {args.output}", file=sys.stderr)
    return 0 if verdict.good else EXIT_REFUSED


def _suggest(args: argparse.Namespace, console: Console) -> int:
    from rampup.plan.starting_sizes import suggest

    suggestion = suggest(args.params, system=args.system, memory_gib=args.memory_gib)
    if args.json:
        print(json.dumps(suggestion.to_dict()))
    else:
        from rampup.show.rollouts import print_suggestion

        print_suggestion(suggestion, console)
    return 0


def _fix(args: argparse.Namespace, console: Console) -> int:
    return cli_config.fix(args, console, lambda config: _num_devices(args, config))


def _completion(args: argparse.Namespace, console: Console) -> int:
    from rampup.completion import completion_script
    from rampup.config.schema import KEYS

    usages = {name: _parser(name).format_usage() for name in COMMANDS}
    options = {name: list(dict.fromkeys(re.findall(r"--[a-z][a-z-]*", usage))) for name, usage in usages.items()}
    configured = [name for name, usage in usages.items() if "key=value" in usage]
    script = completion_script(args.shell, options, KEYS, configured=configured)
    print(json.dumps({"script": script}) if args.json else script, end="\n" if args.json else "")
    return 0


def _train(args: argparse.Namespace, console: Console) -> int:
    from rampup.show.progress import TrainProgress
    from rampup.show.tables import print_facts

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    _use_fake_devices(args.fake_devices)
    from rampup.recipes.lm import train

    progress = TrainProgress(console, log_period=config.log_period, quiet=args.quiet)
    try:
        summary = train(config, progress)
    finally:
        progress.close()
    if args.json:
        names = ("steps", "consumed_samples", "first_loss", "final_loss", "num_compilations", "ramp_steps")
        facts = dataclasses.asdict(summary)
        print(json.dumps({name: facts[name] for name in (*names, "tokens_per_second", "checkpoint")}))
    else:
        print_facts(dataclasses.asdict(summary), console)
    return EXIT_INTERRUPTED if summary.interrupted else 0


def _tune(args: argparse.Namespace, console: Console) -> int:
    from rampup.show.tuning import print_tuning

    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    _use_fake_devices(args.fake_devices)
    from rampup.recipes.tune import tune

    progress = Console(stderr=True, highlight=False)
    found = tune(
        config,
        memory_gib=args.memory_gib,
        num_devices=args.devices,
        levers=args.levers,
        report=lambda line: progress.print(line, style="dim", markup=False),
    )
    facts = found.to_dict()
    if not args.json:
        print_tuning(facts, console)
    elif found.problem is None:
        print(json.dumps(facts))
    if found.problem is not None:
        _report(found.problem, args.json, facts)
        return EXIT_REFUSED
    return 0


def _rows(args: argparse.Namespace, console: Console) -> int:
    config = rampup.load_config(args.config, args.overrides, environ=os.environ)
    plan = rampup.build_plan(config, _num_devices(args, config))
    from rampup.recipes.lm import rows_of_step

    rows = rows_of_step(config, plan, args.step)
    if args.json:
        print(json.dumps({"step": args.step, "global_batch_size": len(rows), "rows": rows}))
    else:
        for row in rows:
            console.print(f"sample {row['sample']:,}: {row['source']}", highlight=False)
    return 0


def _timetable(args: argparse.Namespace, console: Console) -> int:
    from rampup.plan.timetable import Timetable

    table = Timetable.build(
        args.schedule or ("interleaved" if args.repeats > 1 else "1f1b"),
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_repeats=args.repeats,
        group_size=args.group_size,
        forward_cost=exact_fraction(args.forward_cost, what="forward-cost", key="forward-cost"),
        backward_cost=exact_fraction(args.backward_cost, what="backward-cost", key="backward-cost"),
    )
    if args.output:
        from rampup.show.plots import draw_timetable

        draw_timetable(table, args.output)
    if args.json:
        print(json.dumps(table.to_dict()))
    else:
        from rampup.show.timetables import print_timetable

        print_timetable(table, console)
    return 0


def _plot(args: argparse.Namespace, console: Console) -> int:
    from rampup.recipes.subjects import config_of, rates_of, runs_of, sort_names
    from rampup.show import plots

    named = sort_names(args.sources)
    kind = args.kind or ("runs" if named.runs else "batch")
    size = {} if args.width is None else {"width": args.width}
    if kind == "runs":
        plots.draw_runs(runs_of(named), args.output, **size)
    else:
        config = config_of(named, os.environ)
        plan = rampup.build_plan(config, _num_devices(args, config))
        if kind == "rate":
            plots.draw_rate(plan, rates_of(config, plan), args.output, **size)
        elif kind == "timetable":
            plots.draw_timetable(plan.timetable(), args.output, **size)
        else:
            plots.draw_batch(plan, args.output, **size)
    return _wrote({"kind": kind, "output": args.output}, args, console)


def _report_page(args: argparse.Namespace, console: Console) -> int:
    from rampup.recipes.reports import gather_report
    from rampup.show.report import write_report

    report = gather_report(
        args.sources, environ=os.environ, system=args.system, count_devices=lambda config: _num_devices(args, config)
    )
    size = write_report(report, args.output)
    return _wrote({"title": report.title, "notes": list(report.notes), "output": args.output, "bytes": size}, args, console)


def _wrote(facts: dict[str, Any], args: argparse.Namespace, console: Console) -> int:
    if args.json:
        print(json.dumps(facts))
    else:
        console.print(f"wrote {facts['output']}", soft_wrap=True, markup=False)
    return 0


def _bench(args: argparse.Namespace, console: Console) -> int:
    from rampup.bench import BENCHES, bench
    from rampup.bench.output import print_result, write_results

    runs = [bench(name) for name in args.names or BENCHES]
    _use_fake_devices(args.fake_devices)
    if args.fake_devices is None:
        _split_cpu(BENCH_CPU_DEVICES)
    results = []
    for run in runs:
        results.append(run(quick=args.quick))
        if not args.json:
            print_result(results[-1], console)
    if args.output:
        write_results(results, args.output)
    if args.json:
        print(json.dumps({"results": [result.to_dict() for result in results]}))
    return 0


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yml", help="a configuration file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win over the file")


def _devices_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _devices_options(parser)
    cli_config.plan_options(parser)


def _fix_options(parser: argparse.ArgumentParser) -> None:
    _devices_options(parser)
    cli_config.fix_options(parser)


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="bash|zsh", help="the shell")


def _train_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--fake-devices", type=int, metavar="N", help="train on N pretended CPU devices")
    parser.add_argument("--quiet", action="store_true", help="print the summary only")


def _tune_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument(
        "--memory-gib", metavar="GIB", help="memory of one device, instead of that of this machine's; required on CPU"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="use N of this machine's devices")
    parser.add_argument("--fake-devices", type=int, metavar="N", help="use N pretended CPU devices")
    parser.add_argument("--levers", action="store_true", help="also try what else would save memory, and what it costs")


def _rows_options(parser: argparse.ArgumentParser) -> None:
    _devices_options(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the optimizer step, counted from 0")


def _timetable_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, metavar="M", help="microbatches of one pass")
    parser.add_argument("--repeats", type=int, default=1, metavar="V", help="layer chunks per stage (default 1)")
    parser.add_argument(
        "--schedule", metavar="NAME", help="gpipe, 1f1b (default), interleaved (default with repeats), circular or zb-h1"
    )
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="interleaved in contiguous groups of N, as Megatron-LM does"
    )
    parser.add_argument("--forward-cost", default="1", metavar="T", help="of a whole stage (default 1)")
    parser.add_argument("--backward-cost", default="2", metavar="T", help="of a whole stage (default 2)")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw it into a .png, .svg or .pdf file")


def _picture_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", metavar="CONFIG.yml|RUN_DIR", nargs="+", help="a configuration and key=value settings, or folders of runs"
    )
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")


def _plot_options(parser: argparse.ArgumentParser) -> None:
    _picture_options(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="a .png, .svg or .pdf file")
    parser.add_argument(
        "--kind",
        choices=("batch", "rate", "timetable", "runs"),
        help="the batch and what each phase costs (default for a configuration); the learning rate on both clocks; the last "
        "phase's pipeline; loss, batch and tokens/s of runs (default for runs)",
    )
    parser.add_argument("--width", type=float, metavar="INCHES", help="of the picture; below 7, its parts stand in one column")


def _report_options(parser: argparse.ArgumentParser) -> None:
    _picture_options(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE.html", help="the page to write")
    parser.add_argument("--from", dest="system", metavar="SYSTEM", help="the file is another system's; see `rampup check`")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    from rampup.bench import BENCHES

    listed = "; ".join(f"{name}: {what}" for name, what in BENCHES.items())
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"what to measure (default all): {listed}")
    parser.add_argument("--fake-devices", type=int, metavar="N", help="measure on N pretended CPU devices")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it runs")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the tables into a .md or .html file")


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="another system's configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings in its words that win over the file")
    parser.add_argument(
        "--from", dest="system", required=True, metavar="SYSTEM", help="maxtext, maxtext_rl, megatron, skyrl, verl or trlx"
    )
    parser.add_argument("--to", choices=("rampup",), help="also convert what can be expressed")
    parser.add_argument("-o", "--output", metavar="FILE", help="the converted file")


def _suggest_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", required=True, metavar="N", help="parameters of the model, such as 6B")
    parser.add_argument("--system", required=True, metavar="NAME", help="trlx, skyrl, verl or maxtext_rl")
    parser.add_argument("--memory-gib", metavar="GIB", help="memory of one device, for the rule of thumb")


def _num_devices(args: argparse.Namespace, config: rampup.Config | RolloutConfig) -> int:
    """The devices asked for, or those of the configuration, or those of this machine, for which JAX is needed."""
    if args.devices is not None:
        if args.devices < 1:
            raise ConfigError(f"--devices={args.devices} must be at least 1", key="num_devices", nearest=(1,))
        return int(args.devices)
    if config.num_devices != -1:
        return config.num_devices
    import jax

    return jax.device_count()


def _use_fake_devices(number: int | None) -> None:
    if number is None:
        return
    if not 1 <= number <= 1024:
        raise ConfigError(f"--fake-devices={number} must be between 1 and 1024", key="fake-devices", nearest=(1, 1024))
    import jax

    jax.config.update("jax_platforms", "cpu")
    _split_cpu(number)


def _split_cpu(number: int) -> None:
    """Let JAX see so many CPU devices, if it runs on the CPU."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)


def _report(error: Exception, as_json: bool, more: dict[str, Any] | None = None) -> None:
    if as_json:
        details: dict[str, Any] = {
            "type": type(error).__name__,
            "message": str(error),
            "key": getattr(error, "key", None),
            "nearest": list(getattr(error, "nearest", ())),
        }
        print(json.dumps({"error": details, **(more or {})}))
    if isinstance(error, RampupError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: rampup COMMAND CONFIG.yml [key=value ...] [options]", "", *lines, "", "rampup COMMAND --help says more."]
    )


COMMANDS = {
    "plan": Command(_plan, "show every phase of a run before it starts", _plan_options),
    "train": Command(_train, "train the language model", _train_options),
    "timetable": Command(_timetable, "show when each pipeline stage works on what, and what waiting costs", _timetable_options),
    "plot": Command(_plot, "draw a plan, its learning rate or pipeline, or runs side by side", _plot_options),
    "report": Command(_report_page, "write a plan, and a run if there is one, as one page to send", _report_options),
    "bench": Command(_bench, "measure this machine, beside what people use today", _bench_options),
    "check": Command(_check, "say what another system's configuration really does", _check_options),
    "suggest": Command(_suggest, "show starting sizes for reinforcement learning on a model of a size", _suggest_options),
    "fix": Command(_fix, "find the nearest legal configuration, as a patch", _fix_options),
    "explain": Command(cli_config.explain, "say what a key means and what it may be", cli_config.explain_options),
    "completion": Command(_completion, "print a script that completes rampup in a shell", _completion_options),
    "tune": Command(_tune, "find the largest microbatch that fits, and the fastest way to cut the ramp", _tune_options),
    "rows": Command(_rows, "show exactly which rows an optimizer step reads", _rows_options),
}

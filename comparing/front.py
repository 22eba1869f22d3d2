"""compare.py's work: what was typed, the runs, the table on the screen, the CSV files and the page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from comparing import diff, page, study, table
from comparing.runs import Run, find, is_run, read, read_all

EXIT_OK, EXIT_BAD_INPUT = 0, 2
SELECTION = "selection"  # folder for the comparison of some of an experiment's runs


def main(arguments: Sequence[str], description: str) -> int:
    """Returns the exit code: 0, or 2 for bad input, said in one line."""
    try:
        code = _main(_parser(description).parse_args(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # its reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except (ValueError, ImportError, OSError) as error:
        print(f"compare.py: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _parser(description: str) -> argparse.ArgumentParser:
    summary, _, rest = description.partition("\n")
    parser = argparse.ArgumentParser(
        "compare.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="experiments/NAME, or single runs")
    parser.add_argument(
        "--where", action="append", default=[], metavar="KEY=VALUE",
        help="only these runs; any config key or figure, = != < <= > >=, VALUE,VALUE for one of them; may be repeated",
    )  # fmt: skip
    parser.add_argument("--sort", metavar="KEY", help="by a config key or figure, smallest first")
    parser.add_argument("--reverse", action="store_true", help="largest first")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER",
        help="where results.csv and compare.html go (beside the runs; for some of them, in selection/)",
    )  # fmt: skip
    parser.add_argument("--no-page", action="store_true", help="the table only; writes nothing")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("RUN_A", "RUN_B"), help="what differs between two runs")
    return parser


def _main(typed: argparse.Namespace) -> int:
    if typed.diff:
        if typed.folders:
            raise ValueError("--diff takes two run folders and nothing else")
        for folder in typed.diff:
            if find([folder]) != [folder]:
                raise ValueError(f"{folder} is not one run: it holds several; --diff takes two run folders")
        print(diff.render(*(read(folder) for folder in typed.diff)))
        return EXIT_OK
    if not typed.folders:
        raise ValueError("which runs? python compare.py experiments/NAME [more ...], or --diff RUN_A RUN_B; see --help")
    runs = table.where(read_all(find(typed.folders)), typed.where)
    if typed.sort:
        runs = table.sort(runs, typed.sort, typed.reverse)
    print(tables(runs))
    if not typed.no_page:
        print()
        title = ", ".join([*map(str, typed.folders), *typed.where])
        for path in write(runs, typed.output or _output(typed.folders, runs), title):
            print(path)
    return EXIT_OK


def _output(folders: Sequence[Path], runs: Sequence[Run]) -> Path:
    """The folder that holds all that was given: experiments/NAME for itself and for runs in it. Where it may hold other
    runs too, SELECTION in it, and a line says so: the comparison of all is not overwritten by one of some."""
    holders = list(dict.fromkeys(folder.parent if is_run(folder) else folder for folder in folders))
    places = [holder.resolve() for holder in holders]
    common = Path(os.path.commonpath(places))
    if common in places:
        holder = holders[places.index(common)]
        if {path.resolve() for path in find([holder])} <= {run.path.resolve() for run in runs}:
            return holder
    elif common == Path(common.anchor):
        holder = holders[0]
    else:
        holder = common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common
    told = f"not all runs of {holder}: written to {holder / SELECTION}, its own comparison stays as it is"
    print(f"{told} (--output FOLDER writes elsewhere)")
    return holder / SELECTION


def write(runs: Sequence[Run], folder: Path, title: str) -> list[Path]:
    """results.csv, curves.csv, crossover.csv and microbatches.csv (where there is such a thing), compare.html: each
    whole or not at all. The paths. OSError when the folder cannot be written, ImportError without plotly."""
    contests = study.contests(runs)
    files = {"results.csv": table.to_csv(table.csv_rows(runs)), "curves.csv": table.to_csv(_curve_rows(runs))}
    if contests:
        files["crossover.csv"] = table.to_csv(study.contest_rows(contests))
    tuned = study.microbatch_rows(runs)
    if tuned:
        files["microbatches.csv"] = table.to_csv(tuned)
    files["compare.html"] = page.render(runs, title)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        partial = folder / f"{name}.{os.getpid()}.tmp"
        partial.write_text(text)
        os.replace(partial, folder / name)
    return [folder / name for name in files]


def _curve_rows(runs: Sequence[Run]) -> list[dict]:
    """curves.csv: a row a drawn point of the loss; and the validations."""
    rows = []
    for run in runs:
        for step, seconds, seen in zip(run.steps, study.elapsed(run), study.tokens(run), strict=True):
            row = {"run": run.name, "step": step["step"], "tokens": seen, "elapsed_s": round(seconds, 3)}
            rows.append(row | {"loss": step.get("loss"), "validation_loss": None})
        for step in run.validations:
            rows.append({"run": run.name, "step": step["step"], "validation_loss": step.get("validation_loss")})
    return rows


def tables(runs: Sequence[Run], extra: dict[str, Sequence[str]] | None = None) -> str:
    """The table of runs (`extra`: as in table.render), and the tuning table where runs differ in micro-batch size."""
    shown = table.render(runs, extra)
    tuned = microbatch_table(study.microbatch_rows(runs))
    # longer ones are read in microbatches.csv and on the page
    return f"{shown}\n\n{tuned}" if 0 < tuned.count("\n") <= 24 else shown


def microbatch_table(rows: Sequence[dict]) -> str:
    """The tuning table for the terminal; empty when all runs have one micro-batch size."""
    if not rows:
        return ""
    several = len({row["series"] for row in rows}) > 1
    head = ["micro-batch", "stages", "chunks", ">= 4 x stages", "tokens/s", "of best", "peak memory", "bubble", "ideal"]
    lines = [[*head, *(["series"] if several else [])]]
    for row in rows:
        speed = row["tokens_per_s"]
        cells = [str(row["micro_batch"]), str(row["stages"]), str(row["chunks"]), "yes" if row["rule"] else "no"]
        cells += [f"{speed:,.0f}", f"{row['of_best']:.0%}"] if speed else [row["status"], ""]
        cells.append(study.show_memory(row))
        for key in ("bubble_fraction", "bubble_fraction_ideal"):
            cells.append("" if row[key] is None else f"{row[key]:.1%}")
        lines.append([*cells, *([row["series"]] if several else [])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(c.rjust(w) for c, w in zip(line[:9], widths[:9], strict=True)) for line in lines]
    return "\n".join("  ".join([left, *line[9:]]).rstrip() for left, line in zip(text, lines, strict=True))

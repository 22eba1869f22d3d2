"""compare.py: what it reads from run folders in every state, its table, filters, CSV files and exit codes."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import run_folders

from comparing import front, study, table
from comparing import runs as reading
from ranks import ROOT


def compare(*words: object, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "compare.py"), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def rows(path: Path) -> list[dict]:
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory) -> Path:
    return run_folders.study(tmp_path_factory.mktemp("compare") / "experiments" / "schedules")


# --- the command ---


def test_the_table_has_only_what_differs_and_the_files_are_there(experiment):
    done = compare("experiments/schedules", cwd=experiment.parent.parent)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.split("\n\n")[0].splitlines()
    shown = header.split("  ")
    assert [name.strip() for name in shown if name][:5] == ["schedule", "stages", "chunks", "interleave", "status"]
    assert "global_batch" not in header and "seed" not in header and len(lines) == 24
    assert "out_of_memory: 2026-01-31_12-00-03_03_schedule=gpipe_stages=4_chunks=4: rank 1 failed" in done.stdout
    files = {path.name for path in experiment.iterdir() if path.is_file()}
    assert files == {"results.csv", "curves.csv", "crossover.csv", "microbatches.csv", "compare.html"}
    found = rows(experiment / "results.csv")
    assert len(found) == 24 and {row["status"] for row in found} == {"completed", "stopped", "failed", "out_of_memory"}
    for row in found:
        figures = json.loads((experiment / row["run"] / "result.json").read_text())
        assert float(row["step_time_s"]) == figures["step_time_s"] and row["train.global_batch"] == "32"
        assert int(float(row["peak_memory_bytes.rank_1"])) == 2**28 + 1
    curve = [row for row in rows(experiment / "curves.csv") if row["run"] == found[0]["run"]]
    assert len(curve) == 41 and float(curve[9]["elapsed_s"]) == pytest.approx(
        10 * float(found[0]["step_time_s"]), abs=1e-3
    )


def test_sort_and_where_on_config_and_figures(experiment):
    words = ["--where", "parallel.schedule=1f1b,zb_h1", "--where", "chunks>4", "--where", "status=completed"]
    done = compare(experiment, *words, "--sort", "step_time_s", "--no-page", cwd=experiment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n\n")[0].splitlines()[1:]
    found = {row["run"]: row for row in map(dict, _results(experiment))}
    times = [found[line.split()[-1]]["step_time_s"] for line in lines]
    assert len(lines) == 8 and times == sorted(times)
    assert {found[line.split()[-1]]["schedule"] for line in lines} == {"1f1b", "zb_h1"}
    reverse = compare(experiment, *words, "--sort", "step_time_s", "--reverse", "--no-page", cwd=experiment)
    assert reverse.stdout.split("\n\n")[0].splitlines()[1:] == lines[::-1]


def _results(experiment: Path) -> list[dict]:
    found = []
    for folder in filter(Path.is_dir, experiment.iterdir()):
        config = json.loads((folder / "resolved.json").read_text())
        result = json.loads((folder / "result.json").read_text())
        found.append({"run": folder.name, "schedule": config["parallel"]["schedule"], **result})
    return found


@pytest.mark.parametrize(
    "words, said",
    [
        (["nowhere"], "nowhere is no folder"),
        (["schedules"], "did you mean experiments/schedules?"),
        (["empty"], "no run in empty"),
        ([], "which runs?"),
        (["experiments", "--where", "parallel.schedul=1f1b"], "did you mean parallel.schedule"),
        (["experiments", "--where", "stages=3"], "leaves no run; parallel.stages is 2, 4"),
        (["experiments", "--where", "stages"], "is no condition"),
        (["experiments", "--where", "stages>many"], "many is no number"),
        (["experiments", "--sort", "speed"], "speed is no configuration key and no figure"),
        (["--diff", "experiments/schedules", "empty"], "is not one run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, experiment):
    (experiment.parent.parent / "empty").mkdir(exist_ok=True)
    done = compare(*words, cwd=experiment.parent.parent)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_hundreds_of_long_runs_take_seconds(tmp_path):
    for kind in range(6):
        layout = {"schedule": ("gpipe", "1f1b")[kind % 2], "stages": 2 + 2 * (kind % 3), "chunks": 8}
        first = run_folders.write_run(tmp_path / "many" / f"{kind}_00", steps=500, **layout)
        for repetition in range(1, 50):
            shutil.copytree(first, tmp_path / "many" / f"{kind}_{repetition:02d}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = compare(tmp_path / "many", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "many" / "results.csv")) == 300
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 10, "of processor time: others may run"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_comparison_of_some_runs_does_not_overwrite_that_of_all(tmp_path):
    for chunks in (4, 8, 16):
        run_folders.write_run(tmp_path / "exp" / f"chunks_{chunks}", chunks=chunks)
    assert compare("exp", cwd=tmp_path).returncode == 0
    whole = files(tmp_path / "exp")
    for words, names in [
        (["exp/chunks_8"], {"chunks_8"}),
        (["exp", "--where", "chunks>=8"], {"chunks_8", "chunks_16"}),
    ]:
        done = compare(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert files(tmp_path / "exp") == whole
        assert "not all runs of exp: written to exp/selection" in done.stdout
        assert "exp/selection/compare.html" in done.stdout.splitlines()
        assert {row["run"] for row in rows(tmp_path / "exp" / "selection" / "results.csv")} == names
    done = compare("exp", "--where", "chunks=8", "--output", "exp", cwd=tmp_path)
    assert [row["run"] for row in rows(tmp_path / "exp" / "results.csv")] == ["chunks_8"], "where it was asked to"
    done = compare("exp", "--where", "chunks>0", cwd=tmp_path)
    assert "selection" not in done.stdout and len(rows(tmp_path / "exp" / "results.csv")) == 3, "all meet it"


def test_an_unknown_key_names_only_what_is_spelt_like_it_and_values_are_in_order(tmp_path):
    for chunks in (1, 16, 8):
        run_folders.write_run(tmp_path / f"chunks_{chunks}", schedule="gpipe", chunks=chunks)
    unknown = compare(tmp_path, "--where", "nonsense>=4", cwd=tmp_path).stderr
    assert "nonsense is no configuration key and no figure" in unknown and "resolved.json" in unknown
    assert "did you mean" not in unknown
    assert compare(tmp_path, "--where", "chunk>=4", cwd=tmp_path).stderr.endswith("did you mean parallel.chunks?\n")
    assert compare(tmp_path, "--where", "chunks=3", cwd=tmp_path).stderr.endswith("parallel.chunks is 1, 8, 16\n")


def test_a_last_part_of_several_keys_is_the_layouts_or_is_refused_with_all_of_them(tmp_path):
    for number, schedule in enumerate(("gpipe", "1f1b")):
        run_folders.write_run(tmp_path / f"a_{schedule}", schedule=schedule, train__seed=number)
    runs = reading.read_all(reading.find([tmp_path]))
    assert table.render(runs).split()[0] == "schedule"
    assert [run.name for run in table.where(runs, ["schedule=1f1b"])] == ["a_1f1b"]
    with pytest.raises(ValueError, match="precision is the last part of several keys, .*: hardware.precision, train"):
        table.find_key(runs, "precision")
    run_folders.write_run(tmp_path / "b", schedule="1f1b", optimizer__schedule="constant")
    runs = reading.read_all(reading.find([tmp_path]))
    assert {"parallel.schedule", "optimizer.schedule"} <= set(table.render(runs).splitlines()[0].split())
    with pytest.raises(ValueError, match="whole: parallel.schedule, optimizer.schedule$"):
        table.where(runs, ["schedule=1f1b"])
    assert [run.name for run in table.sort(runs, "optimizer.schedule")] == ["b", "a_1f1b", "a_gpipe"]


def test_headings_have_the_group_where_the_last_word_does_not_say_it(tmp_path):
    for number, path in enumerate(("a.txt", "b.txt")):
        emulate = run_folders.config()["emulate"] | {"enabled": bool(number)}
        layout = {"stages": 2 + number, "data__path": path}
        run_folders.write_run(tmp_path / str(number), emulate=emulate, **layout)
    header = compare(tmp_path, "--no-page", cwd=tmp_path).stdout.splitlines()[0].split()
    assert {"stages", "data.path", "emulate.enabled"} <= set(header) and not {"path", "enabled"} & set(header)


# --- runs in every state ---


def test_a_run_that_evaluates_shows_its_held_out_figures_and_none_of_training(tmp_path):
    trained = run_folders.write_run(tmp_path / "trained", stages=4)
    for name, loss in (("low", 1.5), ("high", 2.5)):
        held_out = {"run": "/somewhere/else/trained", "checkpoint": "step_000040", "data": "text", "loss": loss}
        held_out |= {"perplexity": 2.718281828**loss, "tokens": 1619, "bits_per_byte": loss / 0.6931}
        folder = run_folders.write_run(tmp_path / name, stages=4, evaluate="/somewhere/else/trained")
        result = {"status": "completed", "steps": 0, "evaluation": held_out, "seconds": 0.6}
        (folder / "result.json").write_text(json.dumps(result))
        (folder / "metrics.jsonl").unlink()
    done = compare(tmp_path, "--sort", "perplexity", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.split("\n\n")[0].splitlines()
    assert [line.split()[-1] for line in lines] == ["low", "high", "trained"]
    assert "held-out loss" in header and "evaluate" not in header and "/somewhere" not in done.stdout
    assert lines[0].split() == ["completed", "1.5000", "4.4817", "2.1642", "low"], "no ideal bubble, no tokens/s"
    found = {row["run"]: row for row in rows(tmp_path / "results.csv")}
    assert float(found["high"]["evaluation.loss"]) == 2.5 and found["high"]["evaluation.run"] == "trained"
    assert found["high"]["steps"] == found["high"]["bubble_fraction_ideal"] == found["trained"]["evaluation.loss"] == ""
    assert found["trained"]["bubble_fraction_ideal"] and "/somewhere" not in (tmp_path / "results.csv").read_text()
    kept = compare(tmp_path, "--where", "evaluation.loss<2", "--no-page", cwd=tmp_path).stdout
    assert kept.splitlines()[1].split()[-1] == "low" and len(kept.splitlines()) == 2
    assert "held-out" not in compare(trained, "--no-page", cwd=tmp_path).stdout


def states(folder: Path) -> dict[str, reading.Run]:
    return {run.name: run for run in reading.read_all(reading.find([folder]))}


def test_runs_that_are_half_written_old_or_damaged_are_shown_as_what_they_are(tmp_path):
    whole = run_folders.write_run(tmp_path / "a_whole")
    killed = run_folders.write_run(tmp_path / "b_killed", status=None, steps=20)
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 1.')
    damaged = run_folders.write_run(tmp_path / "c_damaged")
    (damaged / "result.json").write_text('{"status": "comp')
    old = run_folders.write_run(tmp_path / "d_old", result={"error": "TypeError: x"}, status="failed")
    (old / "plan.json").unlink()
    config = json.loads((old / "resolved.json").read_text())
    for key in ("tensor", "data", "shard"):
        config["parallel"].pop(key, None)
    (old / "resolved.json").write_text(json.dumps(config))
    refused = tmp_path / "e_refused" / ".hydra"
    refused.mkdir(parents=True)
    (refused / "config.yaml").write_text("parallel: {stages: 3, schedule: 1f1b, chunks: null}\n")
    (refused.parent / "result.json").write_text('{"status": "invalid", "failure": "3 stages do not fit"}')
    (tmp_path / "f_started" / ".hydra").mkdir(parents=True)
    (tmp_path / "f_started" / "metrics.jsonl").write_bytes(b"\x00\xff\n[1]\n{}\n")
    found = states(tmp_path)
    assert [run.status for run in found.values()] == [
        "completed", "unfinished", "unreadable", "failed", "invalid", "unfinished",
    ]  # fmt: skip
    assert "20 of 40 steps" in found["b_killed"].note and found["b_killed"].figures["step_time_s"] == 0.5
    assert "damaged" in found["c_damaged"].note and found["c_damaged"].figures["tokens_per_s"] > 0
    assert found["d_old"].note == "TypeError: x" and found["d_old"].figures["bubble_fraction_ideal"] == pytest.approx(
        1 / 9
    )
    assert found["e_refused"].config["parallel.stages"] == 3 and "do not fit" in found["e_refused"].note
    assert "no configuration" in found["f_started"].note
    assert "parallel.tensor" not in table.differing(list(found.values())), "an older run has no such key: no difference"
    done = compare(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert whole.name in done.stdout and "unreadable: c_damaged: result.json is damaged" in done.stdout


@pytest.mark.parametrize("seed", range(12))
def test_files_spoilt_in_any_way_are_no_traceback(seed, tmp_path, capsys):
    random = Random(seed)
    for name in "abc":
        run_folders.write_run(tmp_path / name, chunks=random.choice([4, 8]), timeline=True, parts=True, steps=3)
    for path in sorted(tmp_path.glob("*/*.json*")):
        text = path.read_text()
        if random.random() < 0.3:
            text = text[: random.randrange(len(text))]
        for _ in range(random.randrange(4)):  # another value after some colon
            places = [match.end() for match in re.finditer(r": ", text)]
            if places:
                at = random.choice(places)
                value = random.choice(["null", '"x"', "[]", "{}", "-1", "true", "1e999", "[null, 1]", '{"a": [{}]}'])
                text = text[:at] + value + re.sub(r"^[^,}\]\n]*", "", text[at:])
        path.write_text(text)
    assert front.main([str(tmp_path)], "x") == 0, capsys.readouterr().err
    assert front.main(["--diff", str(tmp_path / "a"), str(tmp_path / "b")], "x") == 0, capsys.readouterr().err


def test_a_run_that_goes_on_is_running_here(tmp_path):
    run = run_folders.write_run(tmp_path / "run", status=None, steps=30)
    (run / "logs").mkdir()
    with open(run / "logs" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Path("/proc/locks").exists():
            pytest.skip("no /proc/locks")
        found = states(tmp_path)["run"]
        assert (found.status, found.note) == ("running", "30 of 40 steps")
    assert states(tmp_path)["run"].status == "unfinished", "its process is gone"


def test_long_runs_are_thinned_evenly_with_both_ends(tmp_path):
    run = run_folders.write_run(tmp_path / "run", steps=5000)
    steps = [step["step"] for step in reading.read(run).steps]
    assert len(steps) == reading.POINTS and (steps[0], steps[-1]) == (1, 5000)
    gaps = [b - a for a, b in zip(steps, steps[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_no_other_files_are_read_and_hidden_folders_are_left_alone(tmp_path):
    run_folders.write_run(tmp_path / "a" / "run")
    run_folders.write_run(tmp_path / ".submitit" / "run")
    run_folders.write_run(tmp_path / "a" / "run" / "checkpoints" / "inner")
    assert reading.find([tmp_path, tmp_path / "a"]) == [tmp_path / "a" / "run"]


def test_reading_imports_neither_torch_nor_tensorboard(tmp_path):
    run_folders.write_run(tmp_path / "run", timeline=True)
    code = (
        f"import sys; from comparing import front; code = front.main([{str(tmp_path)!r}], 'x'); "
        "assert code == 0 and not {'torch', 'tensorboard', 'hydra', 'numpy'} & set(sys.modules), sys.modules.keys()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- what runs say together ---


def test_the_winner_and_by_how_much_against_theory(tmp_path):
    run_folders.write_run(tmp_path / "a", schedule="1f1b", stages=4, chunks=8, step_time_s=1.1)
    run_folders.write_run(tmp_path / "b", schedule="zb_h1", stages=4, chunks=8, step_time_s=1.0)
    run_folders.write_run(tmp_path / "c", schedule="1f1b", stages=2, chunks=8, step_time_s=1.0)  # nobody to beat
    (contest,) = study.contests(reading.read_all(reading.find([tmp_path])))
    assert (contest.stages, contest.chunks) == (4, 8) and contest.gain == pytest.approx(0.1)
    first, second = contest.entries
    assert (first["schedule"], second["schedule"]) == ("zb_h1", "1f1b")
    # ideal bubbles: 1f1b (p-1)/(m+p-1) = 3/11; zb_h1 (p-1)/(3m+p-1) = 3/27
    assert second["theory_gain"] == pytest.approx((1 - 3 / 27) / (1 - 3 / 11) - 1)
    assert second["predicted_gain"] == pytest.approx(0.1)
    assert second["gain_at_equal_loss"] == pytest.approx(0.1) and first["time_to_loss_s"] == pytest.approx(40.0)


def test_equal_loss_is_the_loss_that_both_reach(tmp_path):
    run_folders.write_run(tmp_path / "a", schedule="1f1b", step_time_s=1.0, steps=40)
    run_folders.write_run(tmp_path / "b", schedule="gpipe", step_time_s=0.9, steps=20)  # ends at the loss of step 20
    (contest,) = study.contests(reading.read_all(reading.find([tmp_path])))
    times = {entry["schedule"]: entry["time_to_loss_s"] for entry in contest.entries}
    assert times["gpipe"] == pytest.approx(18.0) and times["1f1b"] == pytest.approx(20.0, abs=1.0)


def test_repetitions_are_one_point_at_their_median(tmp_path):
    for seed, seconds in enumerate((1.0, 1.1, 5.0)):
        run_folders.write_run(tmp_path / f"a{seed}", schedule="1f1b", step_time_s=seconds, train__seed=seed)
    run_folders.write_run(tmp_path / "b", schedule="gpipe", step_time_s=2.2)
    (contest,) = study.contests(reading.read_all(reading.find([tmp_path])))
    assert contest.entries[0]["runs"] == 3 and contest.gain == pytest.approx(1.0)


def test_the_micro_batch_table_with_the_rule(tmp_path):
    for chunks, seconds in ((4, 0.9), (8, 0.8), (16, 1.0)):
        run_folders.write_run(tmp_path / str(chunks), stages=2, chunks=chunks, step_time_s=seconds)
    run_folders.write_run(tmp_path / "2", stages=2, chunks=2, status="out_of_memory", result={"tokens_per_s": None})
    found = study.microbatch_rows(reading.read_all(reading.find([tmp_path])))
    assert [(row["micro_batch"], row["chunks"], row["rule"], row["status"]) for row in found] == [
        (2, 16, True, "completed"),
        (4, 8, True, "completed"),
        (8, 4, False, "completed"),
        (16, 2, False, "out_of_memory"),
    ]
    assert [row["of_best"] for row in found] == [pytest.approx(0.8), 1.0, pytest.approx(0.8 / 0.9), None]
    done = compare(tmp_path, "--no-page", cwd=tmp_path)
    line = next(line for line in done.stdout.splitlines() if line.split()[:3] == ["16", "2", "2"])
    assert line.split()[3:] == ["no", "out_of_memory", "256", "MiB", "planned"]


# --- two runs ---


def test_two_runs_with_rounding_and_a_long_sentence(tmp_path):
    note = "the figures of a rank are those of a pipeline " * 6
    a = run_folders.write_run(tmp_path / "a", result={"bubble_note": note, "loss": 2.05})
    b = run_folders.write_run(tmp_path / "b", result={"loss": 2.05 * (1 + 1e-7)})
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    lines[6]["loss"] *= 1 + 1e-7
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = compare("--diff", a, b, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table_lines = done.stdout.split("\n\n", 1)[1].splitlines()
    assert max(map(len, table_lines)) <= 120 and " ".join(note.split()) in " ".join(done.stdout.split())
    assert any(line.startswith("loss ") and line.endswith("rounding (1e-07)") for line in table_lines)
    assert "loss: the same but for rounding at all 40 steps compared" in done.stdout and "at step 7" in done.stdout
    lines[9]["loss"] += 0.25
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = compare("--diff", a, b, cwd=tmp_path).stdout
    assert (
        "loss: 1 of 40 steps compared differ, the first is step 10 (by 0.25)" in said and "1 more by rounding" in said
    )


def test_what_differs_between_two_runs(tmp_path):
    a = run_folders.write_run(tmp_path / "a", schedule="gpipe", stages=4, chunks=8, step_time_s=1.2, timeline=True)
    b = run_folders.write_run(tmp_path / "b", schedule="1f1b", stages=4, chunks=8, step_time_s=1.0, timeline=True)
    lines = (b / "metrics.jsonl").read_text().splitlines()
    step = json.loads(lines[6])
    lines[6] = json.dumps(step | {"loss": step["loss"] + 0.25})
    (b / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    done = compare("--diff", a, b, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {" ".join(line.split()) for line in done.stdout.splitlines()}
    assert "parallel.schedule gpipe 1f1b" in found and "step_time_s 1.200 s 1.000 s 0.833" in found
    assert (
        "loss: 1 of 40 steps compared differ, the first is step 7 (by 0.25); the largest difference is 0.25 at step 7"
        in found
    )
    # F = 10 ms, B = 20 ms: 3 (m + p - 1) units of 10 ms
    assert "makespan_s 330.000 ms 330.000 ms" in found and "F mean_s 10.000 ms 10.000 ms" in found
    assert not any(line.startswith("parallel.stages") for line in found)
    same = compare("--diff", a, a, cwd=tmp_path).stdout
    assert "configuration: the same" in same and "figures: the same" in same and "the same bit for bit" in same

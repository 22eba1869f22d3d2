"""A run that stops and goes on is the run that never stopped: bit for bit in the same order of sums, in any layout."""

from __future__ import annotations

import numpy as np
import pytest
import resuming
from resuming import EPOCH, STEPS, assert_same_state, config, merged

from ranks import run_ranks
from training import manifest

ROUNDING = 2e-4  # relative distance of weights after some float32 steps that add the same numbers in another order


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return resuming.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """One process from the first to the last step; the other engines give the same bits (test_invariance.py)."""
    return resuming.run(0, 1, corpus, tmp_path_factory.mktemp("whole"), [(config(engine="single"), None)])


@pytest.mark.parametrize(
    "stops",
    [
        [2],  # in the middle of warm-up, between accumulated steps
        [EPOCH],  # at an epoch's end, exactly
        [1, 2, EPOCH, 2 * EPOCH, STEPS],  # again and again; the last has no step left to take
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_for_bit(stops, corpus, uninterrupted, tmp_path):
    case = config(stages=2)
    starts = [(case, stop) for stop in stops] + [(case, None)]
    records, state = merged(run_ranks(resuming.run, 2, corpus, tmp_path, starts))
    expected, whole = uninterrupted
    assert (
        records.steps == expected.steps
    )  # losses, norms, learning rates, consumed samples: no step twice, none missing
    assert dict(records.validations) == dict(expected.validations)
    assert_same_state(state, whole)


def test_one_process_goes_on_bit_for_bit(corpus, uninterrupted, tmp_path):
    case = config(engine="single")
    records, state = resuming.run(0, 1, corpus, tmp_path, [(case, 4), (case, 5), (case, None)])
    assert records.steps == uninterrupted[0].steps
    assert_same_state(state, uninterrupted[1])


def test_a_run_moves_between_layouts(corpus, uninterrupted, tmp_path):
    """Four stages, one process, two ranks with two stages each, another cut: the same bits as if it had never moved."""
    layouts = [
        (4, config(stages=4), 2),
        (1, config(engine="single"), 4),
        (2, config(stages=2, schedule="interleaved_1f1b", interleave=2), 6),
        (2, config(stages=2, balance=[1, 7], schedule="gpipe"), 7),
        (4, config(stages=4), None),
    ]
    steps = []
    for world, case, stop in layouts:
        records, state = merged(run_ranks(resuming.run, world, corpus, tmp_path, [(case, stop)]))
        steps += records.steps
    assert steps == uninterrupted[0].steps
    assert_same_state(state, uninterrupted[1])


def test_to_fairscale_and_back(corpus, uninterrupted, tmp_path, capsys):
    """fairscale adds gradients in reversed order: equal to rounding."""
    starts = [
        (config(engine="single"), 3),
        (config(engine="fairscale", stages=2, schedule="gpipe"), 6),
        (config(engine="single"), None),
    ]
    records, state = resuming.run(0, 1, corpus, tmp_path, starts)
    assert [step[0] for step in records.steps] == list(range(1, STEPS + 1))
    for name, expected in uninterrupted[1].items():
        assert np.linalg.norm(state[name] - expected) <= ROUNDING * np.linalg.norm(expected), name
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed from")]
    assert len(told) == 2 and all("at most 1e-05" in line for line in told)


def test_other_numbers_of_chunks_and_accumulation(corpus, uninterrupted, tmp_path):
    starts = [(config(stages=2), 4), (config(stages=2, chunks=8, accumulate=1), None)]
    records, state = merged(run_ranks(resuming.run, 2, corpus, tmp_path, starts))
    assert [step[0] for step in records.steps] == list(range(1, STEPS + 1))
    for name, expected in uninterrupted[1].items():
        assert np.linalg.norm(state[name] - expected) <= ROUNDING * np.linalg.norm(expected), name


def test_saving_in_the_background_changes_nothing(corpus, uninterrupted, tmp_path):
    """A checkpoint every step, saved while training goes on; the state of step 7 is step 7's and not a later one's."""
    case = config(stages=2, every=1, keep=STEPS)
    records, state = merged(run_ranks(resuming.run, 2, corpus, tmp_path, [(case, None)]))
    assert_same_state(state, uninterrupted[1])
    found = manifest.complete(tmp_path)
    assert [manifest.step_of(folder) for folder in found] == list(range(STEPS, 0, -1))
    for folder in found[:-7]:
        manifest.remove(folder)
    records, state = merged(run_ranks(resuming.run, 2, corpus, tmp_path, [(case, None)]))
    assert records.steps == uninterrupted[0].steps[7:]
    assert_same_state(state, uninterrupted[1])

"""Each optimizer under every cut, and after a stop: weights, tied copies and states are those of one process."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import resuming
import torch
from composing import composed
from resuming import assert_same_state, merged

from models.describe import describe, num_parameters
from pipeline.engines.base import own_part
from planning.memory import optimizer_elements, rank_memory
from ranks import run_ranks
from training import manifest, shards
from training.announce import state_bytes
from training.loop import Trainer
from training.ranks import Ranks

OPTIMIZERS = ("adamw", "sgd", "adafactor", "muon")
STEPS = 5
RATE = {"adamw": 3e-3, "muon": 3e-3, "sgd": 0.1, "adafactor": 0.05}  # high: what differs is seen in five steps


def _config(name: str, *, steps: int = STEPS, **layout):
    """The optimizer as its file has it, with weight decay, a short warm-up, clipping, dropout and a tied head."""
    case = resuming.config(steps=steps, **layout)
    own = composed(f"optimizer={name}").optimizer
    optimizer = replace(own, learning_rate=RATE[name], warmup_steps=2, weight_decay=0.1, clip_norm=0.05)
    if name == "sgd":
        optimizer.momentum = 0.9
    return replace(case, optimizer=optimizer, train=replace(case.train, trace=0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return resuming.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def single(corpus, tmp_path_factory):
    """Of each optimizer: what one process records in STEPS steps, its weights and states, and the folder."""
    found = {}
    for name in OPTIMIZERS:
        folder = tmp_path_factory.mktemp(name)
        found[name] = *resuming.run(0, 1, corpus, folder, [(_config(name, engine="single"), None)]), folder
    return found


CUT = ("sgd", "adafactor", "muon")  # of adamw: test_invariance.py
CUTS = {  # stages -> layouts whose backwards run in micro-batch order
    2: [
        dict(schedule="1f1b", balance=[1, 7]),
        dict(schedule="interleaved_1f1b", interleave=2),
        dict(schedule="zb_v", interleave=2),
    ],
    4: [dict(schedule="1f1b")],
}


def _train_all(rank: int, world: int, corpus, cases: list) -> list[tuple[list, dict, list]]:
    """Of each configuration: losses and norms, this rank's weights and states at the end, and its tied weight's bytes
    after every step."""
    found = []
    for case in cases:
        trainer = Trainer(case, Ranks(rank, world, rank, torch.device("cpu")), corpus, lambda: False)
        try:
            history, tied = [], []
            for step in range(STEPS):
                outcome = trainer.step(step)
                history.append((outcome.loss, outcome.gradient_norm))
                names = {"embedding.token.weight", "head.weight"} & trainer.engine.parameters.keys()
                held = [own_part(trainer.engine.parameters[name].detach()) for name in sorted(names)]
                tied.append([tensor.numpy().tobytes() for tensor in held])
            state = shards.state_of(trainer.engine.parameters, trainer.engine.tied, trainer.optimizer)
            copies = {n: p.detach() for n, p in trainer.engine.parameters.items()}
            found.append((history, {name: own_part(t).numpy().copy() for name, t in (state | copies).items()}, tied))
        finally:
            trainer.engine.close()
    return found


@pytest.mark.parametrize("stages", CUTS)
def test_weights_and_states_after_five_steps_are_those_of_one_process_bit_for_bit(stages, corpus, single):
    runs = [(name, dict(stages=stages, **layout)) for layout in CUTS[stages] for name in CUT]
    answers = run_ranks(_train_all, stages, corpus, [_config(name, **layout) for name, layout in runs])
    for index, (name, layout) in enumerate(runs):
        expected, whole, _ = single[name]
        history, state, tied = answers[0][index][0], {}, []
        for answer in answers:
            assert answer[index][0] == history
            state |= answer[index][1]
            tied.append(answer[index][2])
        assert history == [step[1:3] for step in expected.steps], (name, layout)
        assert_same_state(state, whole)
        # after every step the head is the embedding, on whichever ranks they are
        copies = [sum(parts, []) for parts in zip(*tied, strict=True)]
        assert all(len(step) == 2 and step[0] == step[1] for step in copies), (name, layout)
        assert len({step[0] for step in copies}) == STEPS


def test_data_ranks_hold_the_same_weights_and_learn_what_one_process_learns(corpus, single):
    """The gradient of two halves added up is that of the whole to rounding. Muon's bfloat16 steps make more of it where
    the momentum has next to nothing in a direction: its weights agree less well."""
    cases = [_config(name, stages=1, chunks=2) for name in CUT]
    for case in cases:
        case.parallel.data, case.train.global_batch = 2, 16  # as the others
    answers = run_ranks(_train_all, 2, corpus, cases)
    for index, name in enumerate(CUT):
        (history, ours, _), (other, theirs, _) = (answer[index] for answer in answers)
        expected, whole, _ = single[name]
        assert history == other
        assert_same_state(ours, theirs)
        assert np.allclose(
            history, [step[1:3] for step in expected.steps], rtol=1e-3 if name == "muon" else 1e-5, atol=0
        )
        for key in ("block.3.attention.qkv.weight", "embedding.token.weight", "norm.weight"):
            distance = np.linalg.norm(ours[key] - whole[key]) / np.linalg.norm(whole[key])
            assert distance < (0.01 if name == "muon" else 1e-4), (name, key, distance)


def test_the_optimizers_differ(single):
    """Else the tests above would compare one with itself."""
    name = "block.3.attention.qkv.weight"
    weights = [single[optimizer][1][name] for optimizer in OPTIMIZERS]
    for index, one in enumerate(weights):
        for other in weights[:index]:
            assert np.linalg.norm(one - other) > 0.01 * np.linalg.norm(one)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_run_that_stops_goes_on_bit_for_bit_in_the_same_and_in_another_cut(name, corpus, single, tmp_path):
    two = [(_config(name, stages=2), 1), (_config(name, stages=2), 2)]
    steps = merged(run_ranks(resuming.run, 2, corpus, tmp_path, two))[0].steps
    records, state = merged(run_ranks(resuming.run, 4, corpus, tmp_path, [(_config(name, stages=4), None)]))
    expected, whole, _ = single[name]
    assert steps + records.steps == expected.steps
    assert_same_state(state, whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_bytes_are_those_of_the_real_state(name, single):
    """Of the memory on a rank, of the checkpoint, and of each tensor that a checkpoint holds."""
    case = _config(name, engine="single")
    layers = describe(case.model)
    owned = [
        replace(spec, parameters={n: s for n, s in spec.parameters.items() if n not in spec.tied}) for spec in layers
    ]
    _, state, folder = single[name]
    held = {key: array for key, array in state.items() if key.startswith("optimizer.") and not key.endswith(".step")}
    assert sum(array.size for array in held.values()) == optimizer_elements(case.optimizer, owned)
    saved = shards.read_state(manifest.complete(folder)[0])
    counted = sum(tensor.nbytes for key, tensor in saved.items() if not key.endswith(".step"))
    assert counted == state_bytes(case)
    # a rank holds the state of a tied weight's copy too
    copy = optimizer_elements(case.optimizer, layers) - optimizer_elements(case.optimizer, owned)
    embedding = sum(array.size for key, array in held.items() if key.startswith("optimizer.embedding.token.weight."))
    assert copy == embedding
    assert rank_memory(case, layers, 1)["optimizer"] == 4 * optimizer_elements(case.optimizer, layers)


def test_states_that_are_small_for_large_models():
    """By hand: Adafactor keeps a row and a column of each matrix, Muon half of AdamW's in the blocks."""
    from composing import resolved

    model = resolved("model=gpt_1b").model
    layers, D = describe(model), model.hidden
    block = (3 + 1 + 1 + 1 + 4 + 1 + 1 + 4) * D  # rows and columns of qkv, projection, up, down
    block += 13 * D  # norms and biases whole
    tables = 2 * (model.vocabulary + D) + model.positions + D  # token embedding and head, positions
    config = {name: composed(f"optimizer={name}").optimizer for name in OPTIMIZERS}
    assert optimizer_elements(config["adafactor"], layers) == model.blocks * block + tables + 2 * D
    everything = sum(int(np.prod(shape)) for spec in layers for shape in spec.parameters.values())
    assert optimizer_elements(config["adamw"], layers) == 2 * everything
    assert optimizer_elements(config["muon"], layers) == 2 * everything - model.blocks * 12 * D * D
    assert asdict(config["sgd"])["momentum"] == 0.9 and num_parameters(layers) < everything

"""Random schedules that can run, for the tests: any placement of the stages, any order that their inputs allow."""

import random

from pipeline.schedule import Action, Schedule, check


def random_schedule(generator: random.Random, max_stages: int = 4, max_chunks: int = 6) -> Schedule:
    """Runs actions that are ready, drawn at random one after the other, and writes down what each rank ran."""
    stages, chunks = generator.randint(1, max_stages), generator.randint(1, max_chunks)
    interleave = generator.randint(1, 3)
    num_stages = stages * interleave
    rank_of = [stage % stages for stage in range(num_stages)]
    generator.shuffle(rank_of)
    split = generator.choice([0.0, 0.5, 1.0])  # how many of the backwards are split
    backward = {(s, m): "I" if generator.random() < split else "B" for s in range(num_stages) for m in range(chunks)}
    rows: list[list[Action]] = [[] for _ in range(stages)]
    ready = [Action(0, "F", m) for m in range(chunks)]
    while ready:
        action = ready.pop(generator.randrange(len(ready)))
        stage, kind, microbatch = action
        rows[rank_of[stage]].append(action)
        if kind == "F" and stage < num_stages - 1:
            ready.append(Action(stage + 1, "F", microbatch))
        elif kind == "F":
            ready.append(Action(stage, backward[stage, microbatch], microbatch))
        elif kind != "W" and stage > 0:
            ready.append(Action(stage - 1, backward[stage - 1, microbatch], microbatch))
        if kind == "I":
            ready.append(Action(stage, "W", microbatch))
    schedule = Schedule("random", stages, chunks, interleave, rows)
    check(schedule)
    return schedule

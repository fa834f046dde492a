"""When to kill: moments drawn over a run that was watched once, so that every phase has its turn."""

import itertools
import random
import statistics

from jaxtrain.rehearsal.child import Ended
from jaxtrain.rehearsal.faults import Fault

STEP_SECONDS = 0.05  # after the beginning of a step a kill falls at the latest: in it, or a few steps on
IN_TURN = ("step", "checkpoint", "evaluation", "compile", "data", "any", "end")


def draw(count: int, steps: int, watched: Ended, rng: random.Random) -> list[Fault]:
    """`count` SIGKILLs in the order in which they fall: in a step and in each phase of `watched`, in turn.

    Steps increase from one to the next; kills at the very end come last, as nothing but the end is left after them.
    """
    possible = [name for name in IN_TURN if name == "step" or watched.phases(name)]
    kinds = [*itertools.islice(itertools.cycle(possible), count)]
    kinds.sort(key=lambda name: name == "end")
    at = sorted(rng.randint(1, steps) for _ in range(count))
    return [aimed(kind, step, watched, rng) for kind, step in zip(kinds, at, strict=True)]


def aimed(moment: str, step: int, watched: Ended, rng: random.Random) -> Fault:
    """A kill in a phase, from `step` on, or in that step; how far into it is drawn from how long it lasted."""
    if moment == "step":
        return Fault("kill", str(step), seconds=rng.random() * STEP_SECONDS)
    lasted = statistics.median(phase["seconds"] for phase in watched.phases(moment))
    after = {"data": rng.choice((-1, 0)), "compile": -1, "any": -1, "end": -1}.get(moment, step)
    return Fault("kill", moment, after=after, seconds=rng.random() * lasted)

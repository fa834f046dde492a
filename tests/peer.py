"""One process of a run of several, as tests start it: `python peer.py SCENARIO [WORKDIR]` prints a line of JSON."""

import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from unittest import mock

import jax
import numpy as np
import tiny

from jaxtrain import sharding, train
from jaxtrain.data import sources
from jaxtrain.data.feed import Feed
from jaxtrain.errors import JaxtrainError, UserError
from jaxtrain.machine import devices, distributed, peers
from jaxtrain.main import guarded

NUMBER = int(os.environ.get("JAX_PROCESS_ID", "0"))


def numbers(predict, source):
    """An evaluation of a user's own, which finds something else in each process."""
    batch = source.get(np.arange(len(source)))
    right = (predict(batch)["label"] == batch["label"]).sum()
    return {"process": float(NUMBER), "right": float(right), "nan": float("nan")}


def evaluate(folder):
    """Nine examples, four on each process and one more; then predictions, and a user's evaluation."""
    config = tiny.config(total="3st", eval_batch_size=8, eval_every="3st", evals=dict(own=dict(fn="peer:numbers")))
    began = time.monotonic()
    result = train.run(config, data=tiny.data(validation=9))
    predicted = result.predict(tiny.data().open()["test"].get(np.arange(21))["image"])
    values = {key: value for key, value in result.metrics.items() if value == value}
    assert time.monotonic() - began < 60
    return {
        "processes": distributed.processes(),
        "metrics": values,
        "predicted": predicted["label"].tolist(),
        "rows": len(predicted["probabilities"]),
    }


def clocks(folder):
    """Ends by `max_minutes` and saves by `checkpoint.minutes`, on clocks that differ by a second."""
    wait = train.Loop.__post_init__

    def later(self):
        wait(self)
        self.began -= 1.0 * NUMBER
        self.saved_at -= 0.7 * NUMBER

    train.Loop.__post_init__ = later
    config = tiny.config(
        total="1000000st",
        eval_every="",
        report_every="1000st",
        max_minutes=0.1,
        checkpoint=dict(every="", minutes=0.03, keep=100, keep_every=""),
    )
    result = train.run(config, folder, data=tiny.data())
    saved = sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    return {"step": int(result.state.step), "code": result.exit_code, "saved": saved}


def elastic(folder, total="20st", **changes):
    """Trains, or carries on, up to `total`: the ids of each batch, the state it began with, each loss."""
    ids, begun = [], {}
    take, start = Feed.__next__, train.start

    def recorded(self):
        batch = take(self)
        if "epoch" in batch:  # else one of an evaluation
            rows = {}
            for shard in batch["id"].addressable_shards:
                rows |= dict(enumerate(np.asarray(shard.data).tolist(), start=shard.index[0].start or 0))
            ids.append(rows)
        return batch

    def seen(job, *arguments):
        state, sums = start(job, *arguments)
        for path, leaf in jax.tree_util.tree_leaves_with_path(sharding.gathered(job.mesh, state.params)):
            begun[sharding.path_string(path)] = digest(leaf)
        return state, sums

    config = tiny.config(total=total, report_every="1st", eval_every="10st", model=dict(name="nets:Dropout"), **changes)
    with mock.patch.object(Feed, "__next__", recorded), mock.patch.object(train, "start", seen):
        result = train.run(config, folder, data=tiny.data())
    losses = {line["step"]: line["train/loss"] for line in result.history if "train/loss" in line}
    # The feed reads ahead; a batch counts that a step was made of.
    return {"ids": ids[: int(result.state.step)], "begun": begun, "losses": losses}


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def save(folder):
    return elastic(folder, "10st", **LAYOUT)


def carry_on(folder):
    return elastic(folder, **LAYOUT)


# Two processes of two devices each: the rows of a batch in one dimension, a kernel in the other.
LAYOUT = dict(mesh=(("model", 2), ("data", 2)), sharding_rules=(("hidden/kernel", (None, "model")),))


def diverge(folder):
    config = tiny.config(total="8st", eval_every="", optimizer=dict(name="sgd", learning_rate=1e30))
    train.run(config, folder, data=tiny.data())


class Faulty(sources.ArraySource):
    """Does something else in process 1 from one batch on."""

    def __init__(self, arrays, fault, after):
        super().__init__(arrays)
        self.fault, self.left = fault, after

    def get(self, ids):
        self.left -= 1
        if NUMBER == 1 and self.left < 0:
            self.fault()
        return super().get(ids)


def with_fault(folder, fault, after=20, **changes):
    data = tiny.data()
    roles = dict(data.open())
    roles["train"] = Faulty(roles["train"].get(np.arange(64)), fault, after)
    dataset = sources.Dataset("faulty", data.spec, 10, data.class_names, lambda: roles)
    result = train.run(tiny.config(total="100000st", eval_every="", **changes), folder, data=dataset)
    sys.exit(result.exit_code)


def broken(folder):
    def fault():
        raise UserError("example 7 cannot be decoded")

    with_fault(folder, fault)


def stuck(folder):
    """Process 1 is told to end while it waits for its first batch, which never comes."""

    def fault():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    with_fault(folder, fault, after=0)


def hanging(folder):
    with_fault(folder, lambda: time.sleep(1000), hang_minutes=0.1)


def another(folder):
    """Process 1 is started with another batch size, which would leave process 0 in a collective for ever."""
    train.run(tiny.config(batch_size=16 + 16 * NUMBER), folder, data=tiny.data())


def endless(folder):
    """Goes on until it is ended; a silent peer is missed after a few seconds already."""
    peers.SILENCE = 6
    train.run(tiny.config(total="1000000st", eval_every="", report_every="5st"), folder, data=tiny.data())


def dies(folder):
    """The same, and process 1 dies in the middle."""
    if NUMBER == 1:
        die_after(1)
    endless(folder)


def first_dies(folder):
    if NUMBER == 0:
        die_after(1)
    endless(folder)


def die_after(ticks):
    tick = train.agreement.Together.tick

    def counted(self):
        tick(self)
        if self._ticks > ticks:
            os.kill(os.getpid(), signal.SIGKILL)

    train.agreement.Together.tick = counted


def late(folder):
    """Joins with the backend up."""
    jax.devices()
    train.run(tiny.config(), folder, data=tiny.data())


def alone(folder):
    """Waits for the others for two seconds."""
    began = time.monotonic()
    try:
        train.run(tiny.config(join_minutes=2 / 60), folder, data=tiny.data())
    finally:
        print(json.dumps(time.monotonic() - began), flush=True)


def looped(folder):
    """Loops of four steps, of batches from the hosts and of a resident set: the losses, and what the state became."""
    found = []
    for place in ("no", "yes"):
        config = tiny.config(total="12st", eval_every="", steps_per_dispatch=4, model=dict(name="nets:Dropout"))
        config.data.resident = place
        result = train.run(config, data=tiny.data())
        state = sharding.gathered(result.job.mesh, result.state.params)
        losses = [line["train/loss"] for line in result.history if "train/loss" in line]
        found.append([losses, [digest(leaf) for leaf in jax.tree.leaves(state)]])
    return found


def several(folder):
    """One run after another in the same processes."""
    found = [evaluate(None), clocks(folder / "clocks")]
    print(json.dumps(found), flush=True)
    try:
        diverge(folder / "diverged")
    except JaxtrainError as error:
        print(json.dumps([*found, str(error)]), flush=True)
        raise


def main(arguments):
    scenario, *folder = arguments
    found = globals()[scenario](pathlib.Path(folder[0]) if folder else None)
    if found is not None:
        print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    devices.quiet()
    sys.exit(guarded(main, sys.argv[1:]))

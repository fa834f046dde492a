"""All processes of a run act on a signal or a clock at the same step: here threads, and the store is a dict."""

import random
import threading
import time

import pytest

from jaxtrain.loop import agreement
from jaxtrain.loop.agreement import Alone, Together, Wishes
from jaxtrain.loop.stopping import Stopped


class Store(dict):
    """What JAX's key-value store does, for threads."""

    def key_value_set(self, key, value):
        if self.setdefault(key, value) is not value:
            raise RuntimeError("ALREADY_EXISTS")

    def key_value_try_get(self, key):
        if key not in self:
            raise RuntimeError("NOT_FOUND")
        return self[key]

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in list(self.items()) if key.startswith(folder)]


class Steps:
    """Collectives: step s is over once all have handed it out; nobody is more than `ahead` steps before the slowest."""

    def __init__(self, processes, ahead=3):
        self.at, self.ahead, self.change = [0] * processes, ahead, threading.Condition()

    def hand_out(self, number):
        with self.change:
            self.at[number] += 1
            self.change.notify_all()
            self.change.wait_for(lambda: self.at[number] - min(self.at) <= self.ahead)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(agreement, "LISTENING", 0.01)


def run(wishes, steps=400, seed=0):
    """Loops as `train.Loop` does, one a process: what each acted on, and at which step. wishes[p](step, saved)."""
    processes = len(wishes)
    store, work, end = Store(), Steps(processes), threading.Barrier(processes)
    acted = [[] for _ in wishes]
    draws = [random.Random(1000 * seed + number) for number in range(processes)]

    def process(number):
        at = {"step": 0, "saved": 0}
        together = Together(
            lambda: wishes[number](at["step"], at["saved"]), store, "agreement", number, processes, end.wait
        )
        with together:
            while at["step"] < steps and not (together.granted.signal or together.granted.end):
                work.hand_out(number)
                at["step"] += 1
                together.tick()
                time.sleep(draws[number].random() * 1e-3)
                if together.granted != Wishes():
                    acted[number].append((at["step"], together.granted))
                if together.granted.save:
                    at["saved"] = at["step"]
                    together.saved()

    threads = [threading.Thread(target=process, args=(number,), daemon=True) for number in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the processes wait for each other for ever"
    return acted


def nothing(step, saved):
    return Wishes()


CASES = {
    "nobody wishes anything": [nothing, nothing],
    "a signal to one of two": [nothing, lambda step, saved: Wishes(signal=15 if step > 20 else 0)],
    "two signals": [lambda step, saved: Wishes(signal=2), nothing, lambda step, saved: Wishes(signal=15)],
    "clocks that differ": [
        lambda step, saved: Wishes(end=step > 60, save=step - saved > 15),
        lambda step, saved: Wishes(save=step - saved > 20),
    ],
    "at the last step": [nothing, lambda step, saved: Wishes(signal=15 if step > 397 else 0)],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_all_act_at_the_same_step(name, seed):
    acted = run(CASES[name], seed=seed)
    assert all(each == acted[0] for each in acted[1:]), acted
    if name == "a signal to one of two":
        ((step, granted),) = acted[0]
        assert 20 < step < 400 and granted == Wishes(signal=15)
    if name == "two signals":
        assert [granted for _, granted in acted[0]] == [Wishes(signal=15)]
    if name == "clocks that differ":
        assert [granted.save for _, granted in acted[0]].count(True) >= 2 and acted[0][-1][1].end
    if name == "nobody wishes anything":
        assert acted == [[], []]


def test_a_process_alone_grants_itself_at_once():
    wishes = Wishes()
    alone = Alone(lambda: wishes)
    alone.check()
    assert alone.granted == Wishes()
    wishes = Wishes(signal=15)
    assert alone.granted.signal == 15
    with pytest.raises(Stopped):
        alone.check()

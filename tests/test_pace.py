"""What is in flight is bounded in steps and in time, and only work in flight counts as time. On a clock of its own."""

import types

import pytest

from jaxtrain.loop import pace
from jaxtrain.loop.pace import IN_FLIGHT, Pace


class Device:
    """Makes one result after the other, each in `seconds`; the host's own work takes no time."""

    def __init__(self, monkeypatch):
        self.now = self.free = 0.0
        monkeypatch.setattr(pace, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    def result(self, seconds):
        self.free = max(self.free, self.now) + seconds
        at = self.free

        def wait():
            self.now = max(self.now, at)

        return types.SimpleNamespace(is_ready=lambda: self.now >= at, block_until_ready=wait)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@pytest.mark.parametrize(("seconds", "most"), [(0.001, IN_FLIGHT), (0.05, 4), (15.0, 2)])
def test_bounded_in_steps_and_in_time(seconds, most, device):
    found, deepest = Pace(), 0
    found.begin(0)
    for step in range(1, 60):
        found.dispatched(step, device.result(seconds))
        deepest = max(deepest, len(found._waiting))
    assert most - 1 <= deepest <= most


def test_speed_is_that_of_finished_steps_and_pauses_do_not_count(device):
    found = Pace()
    found.begin(0)
    for step in range(1, 41):
        found.dispatched(step, device.result(0.005))
    found.settle()
    device.now += 300.0  # an evaluation
    found.begin(40)
    for step in range(41, 81):
        found.dispatched(step, device.result(0.005))
    found.settle()
    assert found.take() == (80, pytest.approx(0.4))
    assert found.take() == (0, 0.0)

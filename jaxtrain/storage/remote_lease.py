"""The lease of a workdir in a store that cannot rename: made by a conditional write, kept by rewriting it.

A store without conditional writes cannot guard; that is said. See `jaxtrain.storage.lease` for who counts as alive.
"""

import dataclasses
import time
from collections.abc import Callable

from jaxtrain.errors import JaxtrainError, StorageError, UserError
from jaxtrain.storage.lease import BEAT, STALE, Holder
from jaxtrain.storage.remote import Remote

NAME = "lease.json"


class RemoteLease:
    """Held from the constructor on, until `release`. `beat` is to be called every BEAT seconds.

    Raises UserError where another run is alive there, StorageError where the store does not answer.
    """

    def __init__(self, remote: Remote, say: Callable[[str], None], *, beat: float = BEAT, stale: float = STALE):
        self._remote, self._say = remote, say
        self._me = Holder.here()
        self._guards = True
        self._every, self._stale = beat, stale
        self._acquire()

    def beat(self) -> None:
        """A sign of life. Raises StorageError where another run took the workdir over meanwhile."""
        if not self._guards:
            return
        found = self._found()
        if found is not None and found.token != self._me.token:
            raise StorageError(
                f"{found} took over {self._remote.url} while this run was stopped; this one writes no more"
            )
        self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
        self._remote.write(NAME, self._me.encoded())

    def release(self) -> None:
        """Removes the lease if it is still ours."""
        found = self._found() if self._guards else None
        if found is not None and found.token == self._me.token:
            self._remote.delete(NAME)

    def _acquire(self) -> None:
        made = self._remote.create(NAME, self._me.encoded())
        if made is None:
            self._guards = False
            self._say(f"{self._remote.url} has no conditional writes, so nothing guards it: start no second run there")
        elif not made:
            self._take_over()

    def _take_over(self) -> None:
        """Replaces the lease of a dead run. Of two that try at once the later write wins, and the other sees it."""
        holder = self._found()
        if holder is not None:
            if not holder.on_host_of(self._me):
                self._refuse_beating(holder)
            elif holder.alive():
                raise self._refusal(holder)
        self._remote.write(NAME, self._me.encoded())
        time.sleep(self._every / 5)
        found = self._found()
        if found is None or found.token != self._me.token:
            raise self._refusal(found or self._me)
        self._say(f"took {self._remote.url} over from {holder or 'a run that left it'}, which no longer runs")

    def _refuse_beating(self, holder: Holder) -> None:
        """Watches another host's lease until it has been silent long enough. Raises UserError at its first beat."""
        self._say(f"{holder} wrote to {self._remote.url}; looking for {self._stale:.0f} s whether that run lives")
        began = time.monotonic()
        while time.monotonic() - began < self._stale:
            time.sleep(self._every / 5)
            if (found := self._found()) != holder and found is not None:
                raise self._refusal(found)

    def _found(self) -> Holder | None:
        try:
            return Holder.decoded(self._remote.read(NAME))
        except ValueError:
            return None
        except JaxtrainError:
            if NAME not in self._remote.list():
                return None
            raise

    def _refusal(self, holder: Holder) -> UserError:
        return UserError(f"{self._remote.url} is in use by {holder}; stop that run, or take another --workdir")

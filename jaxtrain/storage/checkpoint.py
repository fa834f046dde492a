"""Checkpoints: trees of arrays written in the background, verified before use, restored onto any layout.

    checkpoints/
      30/manifest.json      step, leaves, checksums, metrics (jaxtrain.storage.manifest); written last
      30/arrays-0/          orbax's files: one flat mapping "params/conv1/kernel" -> array
      .writing/             a save under way, or what is left of one; the next save clears it

A numbered folder appears, or its manifest changes, in one rename: a kill at any moment leaves the old
checkpoint or the new one. Only process 0 commits and deletes; orbax has every process write its own shards.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.causes import cause
from jaxtrain.errors import JaxtrainError, StorageError, UserError
from jaxtrain.machine import distributed
from jaxtrain.storage import writing
from jaxtrain.storage.manifest import NAME, Damaged, Leaf, Manifest, checksums, sync, sync_all

_Used = TypeVar("_Used")

_SMALL = 2**20  # bytes: files up to this are verified before orbax sees them, larger ones meanwhile
_log = logging.getLogger("jaxtrain")


class Checkpoints:
    """The checkpoints of one folder, for the one run that writes them and for anyone who reads them.

    Use it as a context manager: leaving it, also by `sys.exit` or an exception, waits for the save under way.
    The failure of a background save is raised by the next `save`, `wait`, `check`, `close` or reading method.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: Callable[[int], bool] | None = None,
        anchor: Callable[[int], bool] | None = None,
        committed: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = _log.warning,
    ):
        """folder: made by the first save. keep: how many of the newest stay, besides the best.

        keep_every: true for a step that stays for good. anchor: true for a step that stays until there is a later
        one such. committed: called in the background after each save; if it raises, the save has failed. say: is
        told, in one line each, what is passed over.
        """
        if "://" in os.fspath(folder):
            raise UserError(f"checkpoints go to a local or mounted folder, not to {os.fspath(folder)}")
        if keep < 1:
            raise UserError(f"checkpoint.keep is {keep}: at least the newest checkpoint stays, so 1 or more")
        # Absolute: on a relative path orbax fails, and only in its own thread.
        self.folder = pathlib.Path(os.path.abspath(folder))
        self._base = next(path for path in (self.folder, *self.folder.parents) if os.path.isdir(path))
        self._keep = keep
        self._keep_every = keep_every or (lambda step: False)
        self._anchor = anchor or (lambda step: False)
        self._committed = committed
        self._say = say
        self._writing = self.folder / ".writing"
        self._deleting = self.folder / ".deleting"
        self._writer: ocp.AsyncCheckpointer | None = None
        self._worker: threading.Thread | None = None
        self._failure: JaxtrainError | None = None
        self._saves = 0
        self._held: int | None = None  # self._writing, open while orbax writes to it
        self._damaged: set[int] = set()
        self._verified: int | None = None  # read whole by latest() or best() just now: reading trusts it once
        logging.getLogger("absl").addFilter(writing.quiet)

    # Writing

    def save(
        self,
        step: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
        best: bool = False,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Starts to write `tree`; returns as soon as its arrays may be donated, after any save before it.

        tree: any pytree of arrays. meta: a JSON object kept beside it. best: it is the best so far, and stays
        until a better one comes. before_commit: called in the background after the arrays, before the
        checkpoint counts, so that logs can be flushed first; if it raises, there is no checkpoint.

        A step that is there already is replaced in one move, `best` and `meta` included: the newest save of a
        step is the true one. Later steps stay: saving 5 after 10 gives both.
        Raises: StorageError, also for the save before this one; UserError, for a leaf that is no array.
        """
        self.wait()
        flat = _flatten(tree)
        leaves = {path: _leaf(path, value) for path, value in flat.items()}
        draft = Manifest(step, best, json.loads(json.dumps(dict(meta or {}))), leaves, "", {})
        try:
            if jax.process_index() == 0:
                if not self._saves:  # later on, a folder that has vanished is an error
                    os.stat(self._base)  # what was there at the start, and vanished: on another disk, perhaps
                    self.folder.mkdir(parents=True, exist_ok=True)
                self._clear()
                self._writing.mkdir()
                self._held = os.open(self._writing, os.O_RDONLY)
            if self._writer is None:
                self._writer = ocp.AsyncCheckpointer(writing.handler())
            arrays = {path: _stored(value) for path, value in flat.items() if value.size}
            with jax.transfer_guard("allow"):
                self._writer.save(self._writing / "arrays", ocp.args.PyTreeSave(arrays))
        except Exception as error:
            failure = self._explain(step, error)
            writing.forget_failures(self._writer)
            self._let_go()
            raise failure from error
        self._saves += 1
        self._worker = threading.Thread(
            target=self._finish, args=(self._writer, draft, before_commit), name=f"checkpoint-{step}"
        )
        self._worker.start()

    def wait(self) -> None:
        """Returns when nothing is being written. Raises: StorageError, if the last save failed."""
        if self._worker is not None:
            self._worker.join()
            self._worker = None
        self.check()

    def check(self) -> None:
        """Raises the StorageError of a save that has failed by now, without waiting."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits, then frees orbax's threads. Raises: StorageError, if the last save failed."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except JaxtrainError as failure:
            ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
            if ends_well:
                raise
            self._say(str(failure))  # the error that is on its way says more about why the run ends

    # Reading

    def steps(self) -> list[int]:
        """The steps that have a manifest, oldest first; not verified."""
        self.wait()
        return self._steps()

    def latest(self, *, anchor: bool = False) -> int | None:
        """The newest step that verifies, byte by byte; None if there is none. Says what it passes over.

        anchor: of those only that the constructor's `anchor` holds for.
        """
        return self._newest(lambda manifest: not anchor or self._anchor(manifest.step))

    def best(self) -> int | None:
        """The newest step that was saved as the best and verifies; None if there is none."""
        return self._newest(lambda manifest: manifest.best)

    def verify(self, step: int) -> None:
        """Reads all of `step`, in process 0. Raises: StorageError, if it is not there or not what was written."""
        self.wait()
        try:
            if distributed.is_first():
                self._verify(Manifest.read(self._path(step)))
        except Damaged as error:
            raise StorageError(f"{error}; start the run again: it goes on from the newest good step") from error

    def meta(self, step: int) -> dict[str, Any]:
        """The `meta` that `step` was saved with. Raises as `restore` does."""
        return self._manifest(step).meta

    def leaves(self, step: int) -> dict[str, Leaf]:
        """Path to shape and dtype of everything in `step`. Raises as `restore` does."""
        return self._manifest(step).leaves

    def restore(self, step: int, abstract: Any) -> Any:
        """The tree saved at `step`, bit for bit, with the structure and the shardings of `abstract`.

        abstract: a tree of `jax.ShapeDtypeStruct` (or arrays); a leaf without a sharding goes to the first
        device. Raises: UserError, if the step is not there, or if a path, shape or dtype differs (before
        anything is read); StorageError, if the checkpoint is damaged.
        """
        return self._restore(self._manifest(step), abstract)

    def restore_latest(self, abstract: Any) -> tuple[int, Any] | None:
        """The newest step that verifies and its tree: `latest` and `restore` in one reading. None if there is none.

        Says what it passes over. Raises: UserError, as `restore` does, for the first step that is not damaged.
        """
        if distributed.processes() == 1:
            return self._search(lambda manifest: True, lambda manifest: self._restore(manifest, abstract))
        step = self.latest()
        return None if step is None else (step, self.restore(step, abstract))

    def restore_flat(self, step: int, prefix: str = "") -> dict[str, np.ndarray]:
        """NumPy arrays by path: those of `step` whose path is `prefix` ("params") or lies below it.

        Typed PRNG keys come as their uint32 key data. Raises: UserError, if the step or the prefix is not
        there; StorageError, if the checkpoint is damaged.
        """
        manifest = self._manifest(step)
        prefix = prefix.strip("/")
        chosen = [p for p in manifest.leaves if not prefix or p == prefix or p.startswith(prefix + "/")]
        if not chosen:
            tops = ", ".join(sorted({path.split("/")[0] for path in manifest.leaves}))
            raise UserError(f"{self._path(step)} holds nothing below {prefix!r}; it holds {tops}")
        return self._read(manifest, dict.fromkeys(chosen))

    # The background

    def _finish(self, writer: ocp.AsyncCheckpointer, draft: Manifest, before_commit: Callable[[], None] | None) -> None:
        """Runs in a thread: waits for orbax, commits, deletes. `check` raises what went wrong."""
        primary = jax.process_index() == 0
        barrier = ocp.multihost.get_barrier_sync_fn()  # does nothing in a single process
        try:
            try:
                writer.wait_until_finished()
                if before_commit is not None:
                    before_commit()
                if primary:
                    self._commit(draft)
                    self._retain(draft.step)
                    self._committed()
            finally:  # the other processes go on when the checkpoint counts
                barrier(key=f"jaxtrain-commit-{self._saves}", timeout_ms=600_000)
        except BaseException as error:
            self._failure = self._explain(draft.step, error)
            writing.forget_failures(writer)
            if primary:
                with contextlib.suppress(OSError):  # give the space back; what stays, the next save clears
                    self._clear()
        finally:
            self._let_go()

    def _vanished(self) -> bool:
        """Whether the folder that the save began in is gone. Orbax may have made another in its place."""
        if self._held is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._held), os.stat(self._writing))
        except FileNotFoundError:
            return True

    def _let_go(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _commit(self, draft: Manifest) -> None:
        """Moves arrays and manifest into the step's folder; the last rename makes them a checkpoint."""
        if self._vanished():
            raise FileNotFoundError(self.folder)
        self._let_go()
        target = self._path(draft.step)
        written = self._writing / "arrays"
        used = {path.name for path in target.glob("arrays-*")}
        arrays = next(name for i in range(len(used) + 1) if (name := f"arrays-{i}") not in used)
        sync_all(written)
        manifest = dataclasses.replace(draft, arrays=arrays, files=checksums(written))
        if target.is_dir():  # a step saved again: the old arrays stay until the new manifest is there
            os.rename(written, target / arrays)
            sync(target)
            manifest.write(target)
            for name in used:
                self._delete(target / name)
        else:
            os.rename(written, self._writing / arrays)
            manifest.write(self._writing)
            os.rename(self._writing, target)
        sync(self.folder)
        self._damaged.discard(draft.step)
        self._verified = None

    def _retain(self, newest: int) -> None:
        """Deletes the checkpoints before `newest` that nothing holds.

        Damaged ones are neither counted nor deleted: they are left for a person to look at. Nor are steps
        after `newest`: they belong to a run that went further.
        """
        sound = {}
        for step in self._steps():
            with contextlib.suppress(Damaged, UserError):
                manifest = Manifest.read(self._path(step))
                manifest.check_files(self._path(step))
                if step <= newest and step not in self._damaged:
                    sound[step] = manifest.best
        held = set(sorted(sound)[-self._keep :]) | {max((s for s, best in sound.items() if best), default=newest)}
        held |= {max((step for step in sound if self._anchor(step)), default=newest)}
        for step in sorted(set(sound) - held):
            if not self._keep_every(step):
                self._delete(self._path(step))

    def _delete(self, path: pathlib.Path) -> None:
        """Takes `path` away in one rename, so that no half of it is ever found, and then its files."""
        try:
            os.rename(path, self._deleting)
            shutil.rmtree(self._deleting)
        except OSError as error:
            self._say(f"{path} could not be deleted: {cause(error)}")

    def _clear(self) -> None:
        """Removes what a killed or failed save left, which is never a checkpoint."""
        for path in self.folder.glob(".writing*"):
            shutil.rmtree(path)
        if self._deleting.exists():
            shutil.rmtree(self._deleting)

    # Looking

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / str(step)

    def _numbered(self) -> list[int]:
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))

    def _steps(self) -> list[int]:
        return [step for step in self._numbered() if (self._path(step) / NAME).is_file()]

    def _newest(self, wanted: Callable[[Manifest], bool]) -> int | None:
        """The newest step that is wanted and verifies. Of several processes the first one looks, for all."""
        found = self._search(wanted, self._verify) if distributed.is_first() else None
        self._verified = distributed.from_first(None if found is None else found[0])
        return self._verified

    def _search(self, wanted: Callable[[Manifest], bool], use: Callable[[Manifest], _Used]) -> tuple[int, _Used] | None:
        """The newest step that is wanted and not found Damaged by `use`, and what came of that."""
        self.wait()
        for step in reversed(self._numbered()):
            try:
                manifest = Manifest.read(self._path(step))
                if wanted(manifest):
                    return step, use(manifest)
            except Damaged as error:
                if step not in self._damaged:
                    self._say(f"{error}; passed over")
                self._damaged.add(step)
        return None

    def _verify(self, manifest: Manifest) -> None:
        manifest.verify(self._path(manifest.step))

    def _manifest(self, step: int) -> Manifest:
        self.wait()
        if not self._path(step).is_dir():
            known = ", ".join(map(str, self._steps())) or "none"
            raise UserError(f"{self._path(step)} does not exist; the steps in {self.folder} are: {known}")
        return Manifest.read(self._path(step))

    def _restore(self, manifest: Manifest, abstract: Any) -> Any:
        flat = _flatten(abstract)
        wanted = {path: _leaf(path, leaf) for path, leaf in flat.items()}
        self._refuse_differences(manifest.step, manifest.leaves, wanted)
        arrays = self._read(manifest, {path: _sharding(leaf) for path, leaf in flat.items()})
        impls = [manifest.leaves[path].impl for path in flat]
        values = [
            jax.random.wrap_key_data(arrays[p], impl=i) if i else arrays[p] for p, i in zip(flat, impls, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(abstract), values)

    def _read(self, manifest: Manifest, shardings: Mapping[str, jax.sharding.Sharding | None]) -> dict[str, Any]:
        """The arrays at these paths, on these shardings (None: NumPy).

        Small files, which tell orbax what to do, are verified first, large ones while orbax reads them; nothing is
        given out before all is done.
        """
        folder = self._path(manifest.step)
        if self._verified == manifest.step:
            self._verified = None
            return self._load(manifest, shardings)
        manifest.check_files(folder)
        large = [name for name, file in manifest.files.items() if file.size > _SMALL]
        manifest.check_sums(folder, [name for name in manifest.files if name not in large])
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as pool:
            verified = pool.submit(manifest.check_sums, folder, large)
            try:
                return self._load(manifest, shardings)
            finally:  # damage says more than what orbax made of it
                verified.result()

    def _load(self, manifest: Manifest, shardings: Mapping[str, jax.sharding.Sharding | None]) -> dict[str, Any]:
        """What orbax reads, unverified."""
        folder = self._path(manifest.step)
        empty = {path for path in shardings if 0 in manifest.leaves[path].shape}  # orbax stores none of these
        args = {path: writing.restore_args(sharding) for path, sharding in shardings.items() if path not in empty}
        request = ocp.args.PyTreeRestore(item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True)
        with ocp.Checkpointer(writing.handler()) as reader, jax.transfer_guard("allow"):
            try:
                arrays = reader.restore(folder / manifest.arrays, request) if args else {}
            except Exception as error:
                raise StorageError(
                    f"{folder} could not be read: {cause(error)}; if that stays, move it away, and the step before it "
                    "will be used"
                ) from error
            for path in empty:
                zeros = np.zeros(manifest.leaves[path].shape, jax.numpy.dtype(manifest.leaves[path].dtype))
                arrays[path] = zeros if shardings[path] is None else jax.device_put(zeros, shardings[path])
        return arrays

    def _refuse_differences(self, step: int, found: Mapping[str, Leaf], expected: Mapping[str, Leaf]) -> None:
        differences = [
            f"{path} is {found.get(path, 'absent')}, expected {expected.get(path, 'nothing there')}"
            for path in sorted(found.keys() | expected.keys())
            if found.get(path) != expected.get(path)
        ]
        if differences:
            more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UserError(
                f"{self._path(step)} does not fit this run: {'; '.join(differences[:3])}{more}. "
                "Restore it with the config it was saved with, or use another workdir"
            )

    def _explain(self, step: int, error: BaseException) -> JaxtrainError:
        if isinstance(error, JaxtrainError):
            return error
        why = "the folder has vanished since the save began" if self._vanished() else cause(error)
        failure = StorageError(f"checkpoint {self._path(step)} was not written: {why}")
        failure.__cause__ = error
        return failure


def locate(path: str | os.PathLike[str]) -> tuple[pathlib.Path, int | None]:
    """The folder of checkpoints that a user means by `path`, and the step if `path` names one.

    path: a workdir, its `checkpoints` folder, or one checkpoint in it, there or not (`Checkpoints.restore`
    says which are). Raises: UserError, if it is none of them.
    """
    given = pathlib.Path(os.path.abspath(os.path.expanduser(path)))
    if given.name.isdigit() and not (given / "checkpoints").is_dir():
        return given.parent, int(given.name)
    for folder in (given / "checkpoints", given):
        if Checkpoints(folder).steps():
            return folder, None
    state = "has no checkpoints" if given.is_dir() else "does not exist"
    raise UserError(f"{given} {state}; expected a workdir, its folder checkpoints, or one checkpoint in it")


def _flatten(tree: Any) -> dict[str, Any]:
    """Path to leaf, in the tree's own order. Raises: UserError, for two leaves of one path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two arrays of the state have the path {twice!r}: rename one")
    return flat


def _leaf(path: str, value: Any) -> Leaf:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise UserError(f"{path} of the state is a {type(value).__name__}, expected an array")
    if getattr(value.dtype, "kind", "") in {"O", "U", "S"}:
        raise UserError(f"{path} of the state holds {value.dtype.name}, expected numbers")
    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return Leaf(tuple(value.shape), str(value.dtype), str(jax.random.key_impl(value)) if is_key else "")


def _stored(value: Any) -> Any:
    """What orbax gets: key data for a typed key; a copy of a NumPy array, as its owner may write to it."""
    if not isinstance(value, jax.Array):
        return np.array(value)
    return jax.random.key_data(value) if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

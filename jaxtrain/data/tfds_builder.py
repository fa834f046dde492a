"""What tensorflow-datasets knows of a data set: its builder, found by name in a data folder.

Finding one runs no code that lies in or is named by the folder, leads nowhere outside it, and asks no network;
only `fetch` does, for a set that is not there.
"""

import contextlib
import errno
import http.client
import itertools
import json
import os
import pathlib
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from absl import logging

from jaxtrain.config.lookup import nearest
from jaxtrain.data.sources import DataAbsent
from jaxtrain.data.tensorflow_cpu import tensorflow
from jaxtrain.errors import StorageError, UserError

_NETWORK_SECONDS = 10.0  # after which a host that holds a set's files counts as out of reach
_NAME = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)(/(?P<config>[\w+\-.]*[\w+\-][\w+\-.]*))?(:(?P<version>[\d.*]+))?")
_VERSION = re.compile(r"[\d*]+\.[\d*]+\.[\d*]+")
_CLASS_KEYS = ("pythonClassName", "python_class_name", "type")  # under which features.json names a class


def find(dataset: str, folder: str, version: str) -> Any:
    """The tfds builder. Raises UserError for what does not exist, and for a folder that is not to be trusted."""
    found = _NAME.fullmatch(dataset)
    if not found:
        raise UserError(
            f"{dataset!r} is no name of a TFDS data set: expected name, name/config or name:1.2.3 in lower case; a set "
            "of a namespace is code that would be fetched and run: prepare such a set with tfds"
        )
    if version and not _VERSION.fullmatch(version):
        raise UserError(f"config.data.version is {version!r}, expected three numbers such as '3.0.2'")
    if "://" in folder:
        raise UserError(f"the data folder is {folder}: expected a local or mounted one; copy the set to one")
    home = pathlib.Path(folder) / found["name"]
    _refuse_foreign_code(home, found["config"] or "")
    builder = _built(dataset, folder, version, home)
    if not pathlib.Path(builder.data_dir).is_relative_to(home):
        raise UserError(f"data set {dataset} leads out of {home}, to {builder.data_dir}: prepare it again")
    return builder


def _built(dataset: str, folder: str, version: str, home: pathlib.Path) -> Any:
    import tensorflow_datasets as library

    try:
        with quiet():
            return library.builder(dataset, data_dir=folder, **({"version": version} if version else {}))
    except library.core.DatasetNotFoundError as error:
        _refuse_unfinished(home, "**/incomplete.*")
        known = library.list_builders(with_community_datasets=False)
        near = nearest(home.name, known)
        hint = f" Did you mean {near!r}?" if near else ""
        raise UserError(
            f"unknown TFDS data set {dataset!r}, and none is prepared in {folder}.{hint} "
            f"tfds has {len(known)}: https://www.tensorflow.org/datasets/catalog"
        ) from error
    except Exception as error:  # whatever tfds makes of a damaged folder
        raise UserError(f"TFDS data set {dataset!r} in {folder}: {line(error)}") from error


def is_prepared(builder: Any) -> bool:
    """Whether the set is there. Raises UserError where only half of it is."""
    with quiet():
        if builder.is_prepared():
            return True
    path = pathlib.Path(builder.data_dir)
    if path.is_dir():
        raise UserError(
            f"{path} has no dataset_info.json: the set was not prepared or copied to its end; remove the folder and "
            "prepare the set again, or copy it again"
        )
    return False


def files(builder: Any, split: str) -> tuple[list[str], list[int]]:
    """Paths and numbers of records of a split's shards. Raises UserError for a path outside the set's folder."""
    info = builder.info.splits[split]
    paths = [os.path.normpath(path) for path in info.filepaths]
    home = pathlib.Path(os.path.normpath(builder.data_dir))
    for path in paths:
        if not pathlib.Path(path).is_relative_to(home):
            raise UserError(f"{home}/dataset_info.json names {path}, outside its folder: prepare the set again")
    return paths, [int(length) for length in info.shard_lengths]


def fetch(builder: Any, dataset: str, folder: str, **options: Any) -> None:
    """Downloads and prepares the set in `folder`; `options` are those of tfds' `download_and_prepare`.

    Raises DataAbsent where its host is out of reach or it fails, StorageError where the folder cannot be written,
    UserError where another attempt was left unfinished.
    """
    path = pathlib.Path(builder.data_dir)
    _refuse_unfinished(path.parent, f"incomplete.*_{path.name}")
    remedy = _remedy(dataset, path)
    url = next(iter(getattr(builder, "url_infos", None) or ()), None)
    if url is not None and url.startswith("http") and not _reachable(url):
        raise DataAbsent(f"data set {dataset} is not prepared in {folder}, and {url} cannot be reached; {remedy}")
    import tensorflow_datasets as library

    tensorflow()  # before tfds imports it
    try:
        config = library.download.DownloadConfig(try_download_gcs=False)
        builder.download_and_prepare(download_config=config, **options)
    except Exception as error:  # whatever a builder's own code raises
        if _is_of_the_disk(error):
            raise StorageError(
                f"{path} cannot be written: {line(error)}; make room or choose another folder"
            ) from error
        raise DataAbsent(f"data set {dataset} cannot be prepared in {folder}: {line(error)}; {remedy}") from error


def _remedy(dataset: str, path: pathlib.Path) -> str:
    remedy = (
        "set TFDS_DATA_DIR or config.data.dir to a folder that holds it, or on a connected machine run "
        f"python -m jaxtrain.prepare --data.dataset={dataset} --data.dir=DIR and copy DIR"
    )
    held = sorted(each.parent.name for each in path.parent.glob("*/dataset_info.json"))
    if held:
        remedy = f"version {path.name} is wanted, {', '.join(held)} is there: set config.data.version, or else {remedy}"
    return remedy


def _is_of_the_disk(error: Exception) -> bool:
    """Some libraries say so in their message only."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
    known = [os.strerror(code) for code in codes] + ["Not enough disk space"]
    return getattr(error, "errno", None) in codes or any(text in str(error) for text in known)


def line(error: BaseException) -> str:
    """The first line of a message that may have fifty, without tfds' dump of the arguments before it."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".: ")
    return first.partition('}": ')[2] or first


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without tfds' warnings of a folder that is not there: our one line says it better."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _refuse_unfinished(home: pathlib.Path, pattern: str) -> None:
    """tfds prepares in a folder of such a name, and renames it when it is done."""
    for left in sorted(home.glob(pattern)):
        raise UserError(
            f"{left} is the work of a preparation that was cut off, or still runs: remove the folder and start again, "
            "or wait"
        )


def _refuse_foreign_code(home: pathlib.Path, config: str) -> None:
    """tfds imports the classes that a features.json names, and follows the config that a metadata.json names."""
    found = home.glob(f"{config}/*/features.json") if config else home.glob("*/*/features.json")
    for path in itertools.chain(home.glob("*/features.json"), found):
        if path.parent.name.startswith("incomplete."):
            continue
        _json(path.with_name("dataset_info.json"))  # of which tfds would not say the name
        for name in sorted(set(_classes(_json(path)))):
            module = name.rpartition(".")[0]
            if not module.startswith("tensorflow_datasets.") and module not in sys.modules:
                raise UserError(
                    f"{path} names the class {name}, which is not of tensorflow_datasets: reading it would run that "
                    f"code; if you trust it, import {module or name} in the config file"
                )
    for path in home.glob(".config/metadata.json"):
        default = str((_json(path) or {}).get("default_config_name", ""))
        if not re.fullmatch(r"[\w+\-.]*", default) or not default.strip(".") and default:
            raise UserError(f"{path} names the config {default!r}, which is no name of a folder: prepare the set again")


def _json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({line(error)}): prepare the data set again or copy the file"
        ) from error


def _classes(value: Any) -> Iterator[str]:
    """The names of classes in a features.json, at any depth."""
    if isinstance(value, dict):
        yield from (value[key] for key in _CLASS_KEYS if isinstance(value.get(key), str))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _classes(each)


def _reachable(url: str) -> bool:
    """Whether the host answers at all, in bounded time: looking up its name may hang too, so in a thread."""
    answers: list[bool] = []

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=_NETWORK_SECONDS).close()
        except (urllib.error.HTTPError, http.client.HTTPException):
            pass  # an answer: this host takes no HEAD, or wants a browser
        except OSError:
            return
        answers.append(True)

    thread = threading.Thread(target=ask, daemon=True, name="jaxtrain-reachable")
    thread.start()
    thread.join(_NETWORK_SECONDS)
    return bool(answers)

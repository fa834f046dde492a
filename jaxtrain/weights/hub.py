"""`hf://owner/name[/file]`: weights from the Hugging Face hub, or from its cache on this machine."""

import re
from pathlib import Path

from jaxtrain.errors import UserError
from jaxtrain.weights import files

PREFIX = "hf://"
FILE = "model.safetensors"  # or, of a large model, FILE + files.INDEX and what that names


def fetched(address: str) -> Path:
    """The local file behind an address, downloaded where it is not in the cache; with an index, the files it names.

    Raises UserError for an address of another form, without the library, and where the hub cannot be reached or has no
    such file.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:/([\w./-]+))?", address)
    if not found:
        raise UserError(f"{address} is no address of a model; expected hf://owner/name or hf://owner/name/file")
    repository, file = found[1], found[2] or FILE
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError:
        raise UserError(f"{address} needs huggingface_hub: pip install 'jaxtrain[hf]'") from None

    def download(name: str) -> Path:
        return Path(hf_hub_download(repository, name))

    try:
        try:
            path = download(file)
        except EntryNotFoundError:
            if found[2]:
                raise
            path = download(FILE + files.INDEX)
        if path.name.endswith(files.INDEX):
            for shard in files.shards(path):
                download((Path(file).parent / shard).as_posix())
        return path
    except UserError:
        raise
    except Exception as error:  # of the network, of the hub, of the disk: all end here, and none is our bug
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{address}: {file} is not in the cache of this machine, and the hub did not give it ({reason}); download "
            f"it where there is a network (hf download {repository}), or give a file"
        ) from error

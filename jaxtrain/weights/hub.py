"""`hf://owner/name[/file]`: weights from the Hugging Face hub, or from its cache on this machine."""

import re
from pathlib import Path

from jaxtrain.errors import UserError

PREFIX = "hf://"
FILE = "model.safetensors"


def fetched(address: str) -> Path:
    """The local file behind an address, downloaded where it is not in the cache.

    Raises UserError for an address of another form, without the library, and where the hub cannot be reached or has no
    such file.
    """
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:/([\w./-]+))?", address)
    if not found:
        raise UserError(f"{address} is no address of a model; expected hf://owner/name or hf://owner/name/file")
    repository, file = found[1], found[2] or FILE
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"{address} needs huggingface_hub: pip install 'jaxtrain[hf]'") from None
    try:
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except Exception as error:  # of the network, of the hub, of the disk: all end here, and none is our bug
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{address}: {file} is not in the cache of this machine, and the hub did not give it ({reason}); download "
            f"it where there is a network (hf download {repository}), or give a file"
        ) from error

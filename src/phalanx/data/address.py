"""Opens the store of a data set, and words the remedies for a set that cannot be read: how to reach its store, which
versions there are, and how to restore a manifest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from urllib.parse import urlsplit

from phalanx.core.errors import UserError
from phalanx.core.manifest import MANIFEST, Manifest, manifest_name
from phalanx.core.store import Folder, Store, is_remote, open_store
from phalanx.data.shard_file import version_of

NAME_IT = "name a folder, or a URL that begins with s3://, gs:// or az://"
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION; AWS_ENDPOINT_URL for a store that is not Amazon's",
    "gs": "GOOGLE_SERVICE_ACCOUNT=FILE.json, or `gcloud auth application-default login`",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def open_set(url: str, field: str) -> Store:
    """Open the store of a data set. `field`: the option or job field in which the user gave the address."""
    if not url:
        raise UserError("it is empty", field=field, value=url, remedy=NAME_IT)
    try:
        return open_store(url)
    except UserError as error:
        raise UserError(error.message, field=field, value=url, remedy=reach(url)) from None


def reach(url: str) -> str:
    """Return the remedy for a store that cannot be reached or read."""
    known = _CREDENTIALS.get(urlsplit(url).scheme)
    if known:
        return f"check the address, the network and the credentials ({known})"
    if is_remote(url):
        return "check the address and the network"
    return NAME_IT if urlsplit(url).scheme else "name a folder that you may read"


def restore(store: Store) -> str:
    """Return the remedy for a damaged manifest.jsonl: an intact copy of every version lies beside it."""
    if not isinstance(store, Folder):
        copy = manifest_name("<the first 16 digits>")
        return f"copy {copy} of the newest version over it; `phalanx data build` printed its digits, and so did runs"
    whole: dict[str, Manifest] = {}
    for path in sorted(store.path.glob(manifest_name("*")), key=lambda path: path.stat().st_mtime_ns):
        try:
            data = path.read_bytes()
            if manifest_name(version_of(data)) == path.name:
                whole[version_of(data)] = Manifest.decode(data)
        except (OSError, ValueError):
            continue
    parents = {manifest.parent for manifest in whole.values()}
    newest = [version for version in whole if version not in parents]
    if not newest:
        return "no whole copy lies beside it: restore the file, or build into another folder"
    copy, lost = (shlex.quote(str(store.path / name)) for name in (manifest_name(newest[-1]), MANIFEST))
    return f"a whole copy lies beside it: cp {copy} {lost}"


def versions(store: Store) -> Iterator[str]:
    """Yield the versions of a data set, the newest first, as far back as they can be read."""
    name = MANIFEST
    try:
        while True:
            data = store.read(name)
            yield version_of(data)
            parent = Manifest.decode(data).parent
            if not parent:
                return
            name = manifest_name(parent)
    except (OSError, ValueError):
        return

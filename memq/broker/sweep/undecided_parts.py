"""The staged objects that a transaction may still publish: the sweep keeps them at any age (H5).

Theory. A state log names the manifest of a part from its hold until its unit is done. A part is held only while its
objects are younger than half the age of staged objects, so no pass has them on its list then. The pass lists the
objects first, and reads the state logs last. If a log can't be read, the objects of all atomic batches stay.

A restore finds the pieces of an atomic batch by its manifest and mark. So both stay while pointers name an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from memq.broker.sweep.unnamed_held import UnnamedHeld
from memq.errors import CorruptDataError, LogLostError, NotFoundError, UnsupportedFormatError
from memq.format.key import decided_key, is_manifest_key, manifest_of_mark, manifest_prefix, writer_of
from memq.format.staged_manifest import Manifest, manifest_under
from memq.storage_handlers import ObjectReader
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.topic import Topic

READS_AT_ONCE = 16


async def undecided_keys(
    cluster: str,
    store: ObjectReader,
    held: UnnamedHeld,
    topics: Iterable[Topic],
    keys: Collection[str],
    note: Callable[[str], None],
) -> set[str]:
    """Return those of `keys` that a transaction may still publish: staged objects, manifests, marks.

    Raises: as store and queue.
    """
    try:
        named, unsure = await held.manifests(topics), ""
    except (LogLostError, CorruptDataError, UnsupportedFormatError) as error:
        named, unsure = await _manifests(cluster, store, keys), str(error)
    found: set[str] = set()
    for key in sorted(named):
        try:
            manifest, _ = await read_sealed(store, key, manifest_under)
        except NotFoundError as error:
            if not unsure:
                note(f"the staged objects of writer '{writer_of(key)}' are not swept: {error}")
                found.update(each for each in keys if writer_of(each) == writer_of(key))
        except (CorruptDataError, UnsupportedFormatError) as error:
            note(f"the staged objects of writer '{writer_of(key)}' are not swept: {error}")
            found.update(each for each in keys if writer_of(each) == writer_of(key))
        else:
            if not unsure or manifest.is_atomic:
                found.update(_keys_of(key, manifest).intersection(keys))
    if unsure and found:
        note(f"{len(found)} staged objects of transactions are not swept: {unsure}")
    return found


async def manifests_in_use(store: ObjectReader, listed: Collection[str], keys: Collection[str]) -> set[str]:
    """Return the manifests and marks among `keys` that belong to an object that pointers name.

    They are those of atomic batches. `listed` are all old staged objects, `keys` those of them that no pointer names.
    Raises: StoreError.
    """
    turn = asyncio.Semaphore(READS_AT_ONCE)

    async def used(key: str) -> str:
        async with turn:
            try:
                manifest, _ = await read_sealed(store, key, manifest_under)
            except (NotFoundError, CorruptDataError, UnsupportedFormatError):
                return ""  # nothing finds a batch by it
            if manifest.is_atomic and await _has_named(store, manifest, listed, keys):
                return key
            return ""

    # A mark and its manifest may be in different parts of a large pass.
    manifests = sorted({key if is_manifest_key(key) else manifest_of_mark(key) for key in keys} - {""})
    found = set(await asyncio.gather(*(used(key) for key in manifests))) - {""}
    return {key for key in keys if key in found or manifest_of_mark(key) in found}


async def _has_named(store: ObjectReader, manifest: Manifest, listed: Collection[str], keys: Collection[str]) -> bool:
    objects = [each.key for each in manifest.objects if each.key not in keys]
    if any(key in listed for key in objects):
        return True
    for key in objects:  # deleted before, or listed with another part of the staged objects
        async for entry in store.list(key):
            if entry.key == key:
                return True
    return False


async def _manifests(cluster: str, store: ObjectReader, keys: Iterable[str]) -> set[str]:
    """Return the manifests of all writers of these objects."""
    writers = {writer_of(key) for key in keys}
    return {entry.key for writer in sorted(writers) async for entry in store.list(manifest_prefix(cluster, writer))}


def _keys_of(key: str, manifest: Manifest) -> set[str]:
    """Return the keys of a manifest, its mark and its objects."""
    return {key, decided_key(key), *(each.key for each in manifest.objects)}

"""The store in S3: a handler that decides, over one of two libraries that send.

It needs the extra `[s3]`.
"""

from __future__ import annotations

from collections.abc import Callable

from memq.runtime.runtime import Runtime
from memq.settings import PartSettings, Section
from memq.storage_handlers.s3.data_path import DataPath
from memq.storage_handlers.s3.handler import S3Handler
from memq.storage_handlers.s3.settings import Bucket, check_trust, read_bucket

__all__ = ["check_trust", "open_from_settings", "open_store"]


def open_from_settings(settings: PartSettings, runtime: Runtime) -> S3Handler:
    """Open the store that `settings.store` names, `s3://BUCKET/PREFIX`, with the section `[s3]`.

    No request is sent. Raises: InvalidSettingError, UnknownSettingError, DeniedError when there are no keys.
    """
    return open_store(settings.store, runtime, settings.section("s3"))


def open_store(url: str, runtime: Runtime, section: Section | None = None) -> S3Handler:
    """Open the store at `url`; without a section, boto3 searches for the keys.

    Raises: as `open_from_settings`.
    """
    bucket = read_bucket(url, section or {})
    large = _open_aio(bucket)  # obstore has put-if-absent only for objects in one request
    return S3Handler(bucket, DATA_PATHS[bucket.settings.data_path](bucket, large), large, runtime)


def _open_aio(bucket: Bucket) -> DataPath:
    from memq.storage_handlers.s3.aio_path import AioPath

    return AioPath(bucket)


def _open_obstore(bucket: Bucket, large: DataPath) -> DataPath:
    from memq.storage_handlers.s3.obstore_path import ObstorePath

    return ObstorePath(bucket)


DATA_PATHS: dict[str, Callable[[Bucket, DataPath], DataPath]] = {
    "obstore": _open_obstore,
    "aiobotocore": lambda bucket, large: large,
}

"""Codecs of a block's payload; the unpacked size is bounded before memory is allocated."""

from __future__ import annotations

import threading

import lz4.block
import zstandard

from memq.errors import CorruptDataError
from memq.format.blocks.header import CODEC_LZ4, CODEC_NONE, CODEC_ZSTD, Buffer
from memq.limits import BLOCK_RAW_BYTES_MAX, KIB

ZSTD_LEVEL = 1  # 4-5x at 600 MB/s; level 3 costs twice as much and adds nothing on records
# For blocks over 256 KiB, level 1 searches matches in a table of 64 KiB. A table of 32 KiB stays in the L1 cache: JSON,
# log lines and packed numbers take 10 to 15 % less time and up to 3 % less room, text 9 % less time and 4 % more room.
_LARGE_BYTES = 256 * KIB
_LARGE_HASH_LOG = 13
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class _Contexts(threading.local):
    """The zstd compressors and the decompressor of a thread: making one costs more than a small block."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)
        large = zstandard.ZstdCompressionParameters.from_level(
            ZSTD_LEVEL,
            source_size=BLOCK_RAW_BYTES_MAX,
            hash_log=_LARGE_HASH_LOG,
            write_content_size=True,
            write_checksum=False,
        )
        self.large_compressor = zstandard.ZstdCompressor(compression_params=large)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=BLOCK_RAW_BYTES_MAX)


_contexts = _Contexts()


def compress(raw: Buffer, codec: int) -> tuple[int, Buffer]:
    """Return the codec that was used and the payload: `none` and `raw` itself when nothing was saved."""
    if codec == CODEC_NONE:
        return CODEC_NONE, raw
    if codec == CODEC_ZSTD:
        compressor = _contexts.large_compressor if len(raw) > _LARGE_BYTES else _contexts.compressor
        payload: Buffer = compressor.compress(raw)
    else:
        assert codec == CODEC_LZ4, f"codec {codec}"
        payload = lz4.block.compress(raw, store_size=False)
    return (codec, payload) if len(payload) < len(raw) else (CODEC_NONE, raw)


def decompress(payload: Buffer, codec: int, raw_length: int) -> Buffer:
    """Return the `raw_length` bytes that `payload` holds; with codec none `payload` itself.

    Raises: CorruptDataError when `payload` has another size or does not unpack, before more than `raw_length`
    bytes are allocated.
    """
    assert raw_length <= BLOCK_RAW_BYTES_MAX, f"raw length {raw_length}"
    if codec == CODEC_NONE:
        raw = payload
    elif codec == CODEC_ZSTD:
        raw = _decompress_zstd(payload, raw_length)
    else:
        assert codec == CODEC_LZ4, f"codec {codec}"
        raw = _decompress_lz4(payload, raw_length)
    if len(raw) != raw_length:
        raise CorruptDataError(f"payload unpacks to {len(raw)} bytes, the header says {raw_length}")
    return raw


def _decompress_zstd(payload: Buffer, raw_length: int) -> bytes:
    """Unpack one zstd frame.

    The size that the frame states is checked first: with a stated size, zstd ignores `max_output_size`.
    """
    try:
        frame = zstandard.get_frame_parameters(payload)
        # The magic excludes skippable frames, which have parameters too, but no content.
        if payload[:4] != _ZSTD_MAGIC or frame.content_size != raw_length or frame.dict_id:
            raise CorruptDataError(
                f"zstd frame states {frame.content_size} bytes with dictionary {frame.dict_id}, "
                f"the header says {raw_length} without one"
            )
        return _contexts.decompressor.decompress(payload, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptDataError(f"zstd payload of {len(payload)} bytes does not unpack: {error}") from error


def _decompress_lz4(payload: Buffer, raw_length: int) -> bytes:
    """Unpack one lz4 block, which knows no size of its own."""
    try:
        raw: bytes = lz4.block.decompress(payload, uncompressed_size=raw_length)
    except lz4.block.LZ4BlockError as error:
        raise CorruptDataError(f"lz4 payload of {len(payload)} bytes does not unpack: {error}") from error
    return raw

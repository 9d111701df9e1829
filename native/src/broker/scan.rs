//! Finds sound blocks in received bytes.
use super::header::{word, Header, CHECKED_FROM, HEADER_BYTES, TIME_MS_END};
use crate::block::{Codec, KEY, MAGIC, RAW_BYTES_MAX, RECORDS_MAX, VERSION};
use crate::buffer::View;
use crate::checksums::crc32c;
use pyo3::prelude::*;
use pyo3::types::PyList;

pub const PREFIX_BYTES: usize = 16;
const HEAD_BYTES: usize = PREFIX_BYTES + HEADER_BYTES;
const FLAGS_KNOWN: u16 = 127;
const NULL_KEYS: u16 = 16;

/// The values that each frame of a stream has.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    pub kind: u64,
    pub producer_id: u64,
    pub producer_epoch: u64,
    pub scope: u64,
    pub oldest_ms: i64,
}

/// Sound blocks, as start and end, and the sequence after the last one.
#[derive(Debug, PartialEq, Eq)]
pub struct Run {
    pub blocks: Vec<(usize, usize)>,
    pub next: u64,
}

/// Where the frame at `at` ends, and the number of its records; None unless it is complete and its block is sound.
#[inline]
pub fn sound(data: &[u8], at: usize, stream: &Stream, next: u64) -> Option<(usize, u32)> {
    let head: &[u8; HEAD_BYTES] = data.get(at..)?.first_chunk()?;
    let header = Header::of(&head[PREFIX_BYTES..])?;
    let length = u32::from_le_bytes(word::<0, 4, _>(head));
    let kind = u32::from_le_bytes(word::<4, 4, _>(head));
    let sent_ms = i64::from_le_bytes(word::<8, 8, _>(head));
    let (payload, raw, count) = (u64::from(header.payload()), u64::from(header.raw()), u64::from(header.count()));
    let right = u64::from(kind) == stream.kind
        && header.first_sequence() == next
        && header.producer_id() == stream.producer_id
        && u64::from(header.producer_epoch()) == stream.producer_epoch
        && u64::from(header.scope()) == stream.scope
        && header.magic() == u32::from_le_bytes(MAGIC)
        && header.version() == VERSION
        && header.codec() <= Codec::Lz4 as u8
        && header.flags() <= FLAGS_KNOWN
        && header.flags() & (NULL_KEYS | KEY) != NULL_KEYS
        && payload + HEADER_BYTES as u64 == u64::from(length)
        && (payload == raw || (payload < raw && header.codec() != 0))
        && 0 < count
        && count <= RECORDS_MAX as u64
        && 4 * count <= raw
        && raw <= RAW_BYTES_MAX as u64
        && -TIME_MS_END < header.base_ms()
        && header.base_ms() < TIME_MS_END
        && header.slot_first() <= header.slot_last()
        && sent_ms >= stream.oldest_ms;
    if !right {
        return None;
    }
    let start = at.checked_add(PREFIX_BYTES)?;
    let stop = start.checked_add(usize::try_from(length).ok()?)?;
    let checked = data.get(start.checked_add(CHECKED_FROM)?..stop)?;
    (crc32c(checked) == header.checksum()).then_some((stop, header.count()))
}

/// The sound blocks of `data` from `at` on; see the contract of `scan_blocks`.
pub fn scan(data: &[u8], mut at: usize, stream: &Stream, first: u64, blocks_max: i64, bytes_max: i64) -> Run {
    let mut run = Run { blocks: Vec::new(), next: first };
    let last = i64::try_from(at).unwrap_or(i64::MAX).saturating_add(bytes_max);
    while (run.blocks.len() as u64) < blocks_max.max(0) as u64 && (at as u64) < last.max(0) as u64 {
        let Some((stop, count)) = sound(data, at, stream, run.next) else { break };
        let Some(next) = run.next.checked_add(count.into()) else { break };
        run.blocks.push((at + PREFIX_BYTES, stop));
        run.next = next;
        at = stop;
    }
    run
}

/// Return the extents of the sound blocks from `at` on, and the sequence after the last one.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // positional in each call: a struct of Python would cost more than a short run
pub fn scan_blocks<'py>(
    slab: &Bound<'py, PyAny>,
    view: &Bound<'py, PyAny>,
    at: usize,
    end: usize,
    kind: u64,
    producer_id: u64,
    producer_epoch: u64,
    scope: u64,
    first: u64,
    oldest_ms: i64,
    blocks_max: i64,
    bytes_max: i64,
) -> PyResult<(Bound<'py, PyList>, u64)> {
    let py = slab.py();
    let view = View::read(view)?;
    let data = view.part(0, end)?;
    let stream = Stream { kind, producer_id, producer_epoch, scope, oldest_ms };
    let run = scan(data, at, &stream, first, blocks_max, bytes_max);
    let extents = PyList::empty(py);
    for (start, stop) in run.blocks {
        extents.append((slab, start, stop))?;
    }
    Ok((extents, run.next))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: Stream = Stream { kind: 0x0001_0004, producer_id: 7, producer_epoch: 2, scope: 9, oldest_ms: 40 };

    /// A frame with a sound block of `count` records and 4 bytes each.
    fn frame(first: u64, count: u32) -> Vec<u8> {
        let payload = 4 * count;
        let mut block = Vec::new();
        block.extend_from_slice(b"mqB1\0\0\0\0\x01\0\0\0");
        [payload, payload, count, 2, 9].iter().for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        [7, first, 1_000, 0, 0].iter().for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        block.resize(HEADER_BYTES + payload as usize, b'v');
        let checksum = crc32c(&block[CHECKED_FROM..]);
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
        let mut frame = Vec::new();
        frame.extend_from_slice(&(block.len() as u32).to_le_bytes());
        frame.extend_from_slice(&0x0001_0004u32.to_le_bytes());
        frame.extend_from_slice(&40i64.to_le_bytes());
        frame.extend_from_slice(&block);
        frame
    }

    #[test]
    fn blocks_that_follow_on_each_other_are_a_run() {
        let data = [frame(5, 2), frame(7, 1), frame(9, 1)].concat();
        let run = scan(&data, 0, &STREAM, 5, 9, 1_000);
        assert_eq!(run, Run { blocks: vec![(16, 96), (112, 188)], next: 8 });
        assert_eq!(scan(&data, 96, &STREAM, 7, 9, 1_000).blocks, [(112, 188)]);
        assert_eq!(scan(&data, 0, &STREAM, 5, 1, 1_000).next, 7);
        assert_eq!(scan(&data, 0, &STREAM, 5, 9, 96).next, 7);
        assert_eq!(scan(&data, 0, &STREAM, 5, 9, 97).next, 8);
        for none in [i64::MIN, -1, 0] {
            assert_eq!(scan(&data, 0, &STREAM, 5, none, 1_000).next, 5);
            assert_eq!(scan(&data, 0, &STREAM, 5, 9, none).next, 5);
        }
        assert_eq!(scan(&data, usize::MAX, &STREAM, 5, i64::MAX, i64::MAX).next, 5);
        assert_eq!(scan(&data, 0, &STREAM, u64::MAX, i64::MAX, i64::MAX).next, u64::MAX);
    }

    #[test]
    fn a_cut_block_is_not_sound() {
        let data = frame(5, 2);
        for end in 0..data.len() {
            assert!(sound(&data[..end], 0, &STREAM, 5).is_none());
        }
        assert_eq!(sound(&data, 0, &STREAM, 5), Some((data.len(), 2)));
    }

    #[test]
    fn no_bit_may_differ() {
        let mut data = frame(5, 2);
        for bit in 0..8 * data.len() {
            data[bit / 8] ^= 1 << (bit % 8);
            let later = (64..128).contains(&bit) && sound(&data, 0, &STREAM, 5).is_some(); // sent later: also right
            assert!(later || sound(&data, 0, &STREAM, 5).is_none(), "bit {bit}");
            data[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_sequence_that_overflows_ends_the_run() {
        let data = [frame(u64::MAX - 1, 2), frame(0, 1)].concat();
        assert_eq!(scan(&data, 0, &STREAM, u64::MAX - 1, 9, 1_000), Run { blocks: vec![], next: u64::MAX - 1 });
    }
}

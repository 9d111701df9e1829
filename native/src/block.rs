//! The layout of a block, and the writer of blocks whose records have one shape. docs/formats.md has the bytes.
use crate::checksums::crc32c;
use std::cell::RefCell;
use zstd_safe::{CCtx, CParameter};

pub const HEADER_BYTES: usize = 72;
pub const CHECKED_FROM: usize = 8; // the checksum covers the block from here to its end
pub const MAGIC: [u8; 4] = *b"mqB1";
pub const VERSION: u8 = 1;
pub const RAW_BYTES_MAX: usize = 16 << 20;
pub const RECORDS_MAX: usize = 1 << 20;
pub const TIME_MS_END: i64 = 1 << 53; // timestamps lie between -2^53 and 2^53 ms
pub const KEY: u16 = 1;
pub const TIMESTAMP: u16 = 2;
pub const NULL_VALUES: u16 = 32;
const DELTA_SATURATED: i64 = u32::MAX as i64;
const LARGE_BYTES: usize = 256 << 10; // as in memq/format/blocks/codec.py, with the same reason
const LARGE_HASH_LOG: u32 = 13;
const SCRATCH_KEPT_BYTES: usize = 2 << 20; // memory that a thread keeps: blocks above it are rare, and threads many

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    Plain,
    Keyed,
    Timed,
}

impl Shape {
    /// Bytes of raw for each record, in addition to those of value and key: lengths, timestamp, share of the bitmap.
    pub fn row_cost(self) -> i64 {
        match self {
            Self::Plain => 5,
            Self::Keyed => 9,
            Self::Timed => 17,
        }
    }

    pub fn has_keys(self) -> bool {
        self != Self::Plain
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Codec {
    None = 0,
    Zstd = 1,
    Lz4 = 2,
}

/// What a header says of a block besides its records.
#[derive(Clone, Copy)]
pub struct Origin {
    pub producer_id: u64,
    pub producer_epoch: u32,
    pub first_sequence: u64,
    pub scope: u32,
    pub now_ms: i64, // the timestamp of records without one
    pub slots: (u16, u16),
}

/// Records of one shape as columns. `front` bytes of room for header and other columns precede the values. So a block
/// without a codec is this memory itself.
pub struct Columns {
    shape: Shape,
    data: Vec<u8>,
    front: usize,
    value_lengths: Vec<u32>,
    key_lengths: Vec<u32>,
    keys: Vec<u8>,
    timestamps: Vec<i64>,
    nulls: Vec<u32>, // numbers of the records without a value
}

/// Memory for `front` bytes, and `limit` bytes of values after them.
fn memory_of(front: usize, limit: usize) -> Vec<u8> {
    let mut data = Vec::with_capacity(front + limit);
    data.resize(front, 0);
    data
}

impl Columns {
    /// Columns for a block of `limit` raw bytes, of which about `column_bytes` are not values. If they become more, the
    /// seal moves the values once.
    pub fn new(shape: Shape, limit: usize, column_bytes: usize) -> Self {
        let front = HEADER_BYTES + (column_bytes + column_bytes / 16).min(limit);
        Self {
            shape,
            front,
            data: memory_of(front, limit),
            value_lengths: Vec::new(),
            key_lengths: Vec::new(),
            keys: Vec::new(),
            timestamps: Vec::new(),
            nulls: Vec::new(),
        }
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.value_lengths.len()
    }

    /// Make room for `limit` raw bytes.
    pub fn grow(&mut self, limit: usize) {
        let columns = self.column_bytes();
        let front = HEADER_BYTES + limit.saturating_mul(columns) / (columns + self.values().len()).max(1);
        let mut data = memory_of(front, limit);
        data.extend_from_slice(self.values());
        self.front = front;
        self.data = data;
    }

    /// Bytes of all columns but the values.
    pub fn column_bytes(&self) -> usize {
        4 * (self.len() + self.key_lengths.len()) + 8 * self.timestamps.len() + self.nulls.len() / 8 + self.keys.len()
    }

    /// Add a record. `key` and `timestamp_ms` count if the shape has them.
    #[inline(always)]
    pub fn push(&mut self, value: Option<&[u8]>, key: &[u8], timestamp_ms: i64) {
        match value {
            Some(value) => {
                self.data.extend_from_slice(value);
                self.value_lengths.push(value.len() as u32);
            }
            None => {
                self.nulls.push(self.value_lengths.len() as u32);
                self.value_lengths.push(0);
            }
        }
        if self.shape.has_keys() {
            self.keys.extend_from_slice(key);
            self.key_lengths.push(key.len() as u32);
            if self.shape == Shape::Timed {
                self.timestamps.push(timestamp_ms);
            }
        }
    }

    fn values(&self) -> &[u8] {
        &self.data[self.front..]
    }

    /// The value of each record; None is a null.
    pub fn each_value(&self) -> impl Iterator<Item = Option<&[u8]>> {
        let mut nulls = self.nulls.iter().copied().peekable();
        let cells = cells_of(self.values(), &self.value_lengths);
        cells.enumerate().map(move |(number, cell)| nulls.next_if_eq(&(number as u32)).is_none().then_some(cell))
    }

    /// The key of each record, if the shape has keys.
    pub fn each_key(&self) -> impl Iterator<Item = &[u8]> {
        cells_of(&self.keys, &self.key_lengths)
    }

    pub fn timestamps(&self) -> &[i64] {
        &self.timestamps
    }

    /// Seal the records. The columns are given back if they are no block of the format.
    pub fn seal(mut self, origin: &Origin, codec: Codec) -> Result<Sealed, Box<Self>> {
        let count = self.len();
        let mut flags = if self.shape.has_keys() { KEY } else { 0 };
        let (mut base_ms, mut delta_ms) = (origin.now_ms, 0);
        if let (Some(&least), Some(&greatest)) = (self.timestamps.iter().min(), self.timestamps.iter().max()) {
            base_ms = least;
            delta_ms = greatest.saturating_sub(least).min(DELTA_SATURATED);
            if delta_ms != 0 {
                flags |= TIMESTAMP; // without the column, the base is the time of every record
            }
        }
        if !self.nulls.is_empty() {
            flags |= NULL_VALUES;
        }
        let before = self.bytes_before_values(flags);
        let raw = before + self.values().len();
        if count == 0
            || count > RECORDS_MAX
            || raw > RAW_BYTES_MAX
            || !(-TIME_MS_END < base_ms && base_ms < TIME_MS_END)
        {
            return Err(Box::new(self));
        }
        if HEADER_BYTES + before > self.front {
            let mut data = Vec::with_capacity(HEADER_BYTES + raw);
            data.resize(HEADER_BYTES + before, 0);
            data.extend_from_slice(self.values());
            self.front = HEADER_BYTES + before;
            self.data = data;
        }
        let start = self.front - before - HEADER_BYTES;
        self.write_columns(start + HEADER_BYTES, flags);
        let head = |codec: Codec, payload: usize| Head { flags, codec, payload, raw, count, base_ms, delta_ms };
        if codec != Codec::None {
            let packed = compress(&self.data[start + HEADER_BYTES..], codec, |block, payload| {
                head(codec, payload).write(block, origin);
            });
            if let Some(packed) = packed {
                return Ok(Sealed::Packed(packed));
            }
        }
        head(Codec::None, raw).write(&mut self.data[start..], origin);
        if self.data.capacity() / 4 * 3 > HEADER_BYTES + raw {
            return Ok(Sealed::Raw { data: self.data[start..].to_vec(), start: 0 });
            // gives the unused memory back
        }
        Ok(Sealed::Raw { data: self.data, start })
    }

    fn bytes_before_values(&self, flags: u16) -> usize {
        let count = self.len();
        4 * (count + self.key_lengths.len())
            + if flags & TIMESTAMP != 0 { 8 * count } else { 0 }
            + if flags & NULL_VALUES != 0 { count.div_ceil(8) } else { 0 }
            + self.keys.len()
    }

    /// Write all columns before the values, from `at` on.
    fn write_columns(&mut self, at: usize, flags: u16) {
        let count = self.len();
        let front = &mut self.data[at..self.front];
        let (part, front) = front.split_at_mut(4 * count);
        write_words(part, &self.value_lengths);
        let (part, front) = front.split_at_mut(4 * self.key_lengths.len());
        write_words(part, &self.key_lengths);
        let (part, front) = front.split_at_mut(if flags & TIMESTAMP != 0 { 8 * count } else { 0 });
        for (cell, time) in part.chunks_exact_mut(8).zip(&self.timestamps) {
            cell.copy_from_slice(&time.to_le_bytes());
        }
        let (present, keys) = front.split_at_mut(if flags & NULL_VALUES != 0 { count.div_ceil(8) } else { 0 });
        present.fill(0xFF);
        if let (Some(last), true) = (present.last_mut(), !count.is_multiple_of(8)) {
            *last = (1 << (count % 8)) - 1;
        }
        for &null in &self.nulls {
            present[null as usize / 8] &= !(1 << (null % 8));
        }
        keys.copy_from_slice(&self.keys);
    }
}

fn cells_of<'a>(data: &'a [u8], lengths: &'a [u32]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().scan(0, move |at, &length| {
        let start = *at;
        *at += length as usize;
        data.get(start..*at)
    })
}

fn write_words(out: &mut [u8], words: &[u32]) {
    for (cell, word) in out.chunks_exact_mut(4).zip(words) {
        cell.copy_from_slice(&word.to_le_bytes());
    }
}

/// A sealed block: in the memory of its columns, or packed.
pub enum Sealed {
    Raw { data: Vec<u8>, start: usize },
    Packed(Vec<u8>),
}

struct Head {
    flags: u16,
    codec: Codec,
    payload: usize,
    raw: usize,
    count: usize,
    base_ms: i64,
    delta_ms: i64,
}

impl Head {
    /// Write the header in front of the payload, which is already in `block`.
    fn write(&self, block: &mut [u8], origin: &Origin) {
        let slots = if self.flags & KEY != 0 { origin.slots } else { (0, u16::MAX) };
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            block[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        put(&[0; 4]); // the checksum
        put(&[VERSION, self.codec as u8]);
        put(&self.flags.to_le_bytes());
        put(&(self.payload as u32).to_le_bytes());
        put(&(self.raw as u32).to_le_bytes());
        put(&(self.count as u32).to_le_bytes());
        put(&origin.producer_epoch.to_le_bytes());
        put(&origin.scope.to_le_bytes());
        put(&origin.producer_id.to_le_bytes());
        put(&origin.first_sequence.to_le_bytes());
        put(&self.base_ms.to_le_bytes());
        put(&(self.delta_ms as u32).to_le_bytes());
        put(&slots.0.to_le_bytes());
        put(&slots.1.to_le_bytes());
        put(&[0; 8]); // bits of tags
        let checksum = crc32c(&block[CHECKED_FROM..HEADER_BYTES + self.payload]);
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
    }
}

struct Contexts {
    small: CCtx<'static>,
    large: CCtx<'static>,
    scratch: Vec<u8>, // for the packed block: its size is known after the compression
}

impl Contexts {
    fn new() -> Self {
        let mut made = Self { small: CCtx::create(), large: CCtx::create(), scratch: Vec::new() };
        for context in [&mut made.small, &mut made.large] {
            for parameter in
                [CParameter::CompressionLevel(1), CParameter::ContentSizeFlag(true), CParameter::ChecksumFlag(false)]
            {
                context.set_parameter(parameter).expect("zstd knows its parameters");
            }
        }
        made.large.set_parameter(CParameter::HashLog(LARGE_HASH_LOG)).expect("zstd knows its parameters");
        made
    }
}

thread_local! {
    // The contexts of a thread: to make one costs more than a small block.
    static CONTEXTS: RefCell<Contexts> = RefCell::new(Contexts::new());
}

/// Return the packed block, whose header `write_head` writes, or None if nothing was saved.
fn compress(raw: &[u8], codec: Codec, write_head: impl FnOnce(&mut [u8], usize)) -> Option<Vec<u8>> {
    CONTEXTS.with_borrow_mut(|contexts| {
        let Contexts { small, large, scratch } = contexts;
        let bound = zstd_safe::compress_bound(raw.len()).max(lz4_flex::block::get_maximum_output_size(raw.len()));
        if scratch.len() < HEADER_BYTES + bound {
            scratch.resize(HEADER_BYTES + bound, 0);
        }
        let out = &mut scratch[HEADER_BYTES..];
        let payload = if codec == Codec::Zstd {
            let context = if raw.len() > LARGE_BYTES { large } else { small };
            context.compress2(out, raw).ok()?
        } else {
            lz4_flex::block::compress_into(raw, out).ok()?
        };
        let packed = (payload < raw.len()).then(|| {
            write_head(scratch, payload);
            scratch[..HEADER_BYTES + payload].to_vec()
        });
        if scratch.len() > SCRATCH_KEPT_BYTES {
            *scratch = Vec::new();
        }
        packed
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Record<'a> = (Option<&'a [u8]>, &'a [u8], i64);

    const ORIGIN: Origin =
        Origin { producer_id: 5, producer_epoch: 2, first_sequence: 9, scope: 3, now_ms: 77, slots: (7, 70) };

    fn columns(shape: Shape, limit: usize, front: usize, records: &[Record]) -> Columns {
        let mut columns = Columns::new(shape, limit, front);
        for &(value, key, time) in records {
            columns.push(value, key, time);
        }
        columns
    }

    fn raw(sealed: Result<Sealed, Box<Columns>>) -> Vec<u8> {
        match sealed {
            Ok(Sealed::Raw { data, start }) => data[start..].to_vec(),
            _ => panic!("a block without a codec"),
        }
    }

    #[test]
    fn a_block_has_its_columns_in_order() {
        let records: [Record; 3] = [(Some(b"ab"), b"k", 5), (None, b"", 7), (Some(b""), b"long", 5)];
        for (limit, front) in [(16, 0), (1_000, 0), (1_000, 20), (1_000, 400)] {
            let block = raw(columns(Shape::Timed, limit, front, &records).seal(&ORIGIN, Codec::None));
            let mut expected = Vec::new();
            for word in [2u32, 0, 0, 1, 0, 4] {
                expected.extend_from_slice(&word.to_le_bytes());
            }
            for time in [5i64, 7, 5] {
                expected.extend_from_slice(&time.to_le_bytes());
            }
            expected.push(0b101);
            expected.extend_from_slice(b"klongab");
            assert_eq!(block[HEADER_BYTES..], expected, "limit {limit}, front {front}");
            assert_eq!(block[..4], MAGIC);
            assert_eq!(block[4..8], crc32c(&block[CHECKED_FROM..]).to_le_bytes());
            assert_eq!(block[48..60], [5i64.to_le_bytes().as_slice(), &2u32.to_le_bytes()].concat());
        }
    }

    #[test]
    fn records_of_one_time_have_no_column_of_times_and_keyless_ones_all_slots() {
        let block = raw(columns(Shape::Timed, 100, 0, &[(Some(b"v"), b"k", 5)]).seal(&ORIGIN, Codec::None));
        assert_eq!(block[10..12], KEY.to_le_bytes());
        assert_eq!(block[60..64], [7, 0, 70, 0]);
        let block = raw(columns(Shape::Plain, 100, 0, &[(Some(b"v"), b"", 0)]).seal(&ORIGIN, Codec::None));
        assert_eq!(block[48..56], 77i64.to_le_bytes());
        assert_eq!(block[60..64], [0, 0, 0xFF, 0xFF]);
    }

    #[test]
    fn columns_grow_and_give_their_records_back() {
        let mut columns = columns(Shape::Keyed, 16, 0, &[(Some(b"ab"), b"k", 0), (None, b"", 0)]);
        columns.grow(4_000);
        columns.push(Some(b"c"), b"key", 0);
        assert_eq!(columns.each_value().collect::<Vec<_>>(), [Some(&b"ab"[..]), None, Some(b"c")]);
        assert_eq!(columns.each_key().collect::<Vec<_>>(), [&b"k"[..], b"", b"key"]);
        assert_eq!(columns.len(), 3);
    }

    #[test]
    fn a_thread_keeps_no_memory_of_large_blocks() {
        for (size, kept) in [(1 << 20, true), (4 << 20, false), (1 << 20, true)] {
            for codec in [Codec::Zstd, Codec::Lz4] {
                let value = vec![7; size];
                let sealed = columns(Shape::Plain, size + 100, 0, &[(Some(&value), b"", 0)]).seal(&ORIGIN, codec);
                assert!(matches!(sealed, Ok(Sealed::Packed(_))));
                assert_eq!(CONTEXTS.with_borrow(|contexts| contexts.scratch.capacity() > 0), kept);
            }
        }
    }

    #[test]
    fn what_is_no_block_comes_back() {
        assert!(Columns::new(Shape::Plain, 100, 0).seal(&ORIGIN, Codec::None).is_err());
        let late = Origin { now_ms: TIME_MS_END, ..ORIGIN };
        let kept = columns(Shape::Plain, 100, 0, &[(Some(b"v"), b"", 0)]).seal(&late, Codec::None);
        assert_eq!(kept.err().expect("no block").each_value().collect::<Vec<_>>(), [Some(&b"v"[..])]);
    }
}

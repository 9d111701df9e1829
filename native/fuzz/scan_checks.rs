//! The properties of a scan over any bytes: for its target of cargo-fuzz, and for tests/scan.rs, which needs no tool.
use memq_native::broker::columns::Summary;
use memq_native::broker::header::{Header, CHECKED_FROM, HEADER_BYTES};
use memq_native::broker::latency;
use memq_native::broker::scan::{scan, Stream, PREFIX_BYTES};
use memq_native::checksums::crc32c;

pub const STAMPED: u8 = 1;
pub const ADOPTED: u8 = 2;

/// Scan the bytes after the first eight, check what was taken, and return how many blocks that were.
///
/// The eight bytes set the place, what is cut off at the end, blocks_max + 1, bytes_max + 1 (two bytes), the oldest
/// time, and flags. STAMPED asks for right checksums, so that the other fields decide; ADOPTED for the stream of the
/// first frame.
pub fn check_scan(data: &[u8]) -> usize {
    let Some((bounds, data)) = data.split_first_chunk::<8>() else { return 0 };
    let [at, cut, blocks_max, low, high, oldest, flags, _] = *bounds;
    let (at, blocks_max, bytes_max) =
        (usize::from(at), i64::from(blocks_max) - 1, i64::from(low) + 256 * i64::from(high) - 1);
    let mut data = data.to_vec();
    if flags & STAMPED != 0 {
        stamp(&mut data, at);
    }
    data.truncate(data.len().saturating_sub(cut.into()));
    let mut stream =
        Stream { kind: 0x0001_0004, producer_id: 7, producer_epoch: 2, scope: 9, oldest_ms: oldest.into() };
    let mut first = 5;
    if let (Some(header), true) = (data.get(at + PREFIX_BYTES..).and_then(Header::of), flags & ADOPTED != 0) {
        stream.producer_id = header.producer_id();
        stream.producer_epoch = header.producer_epoch().into();
        stream.scope = header.scope().into();
        first = header.first_sequence();
    }
    let run = scan(&data, at, &stream, first, blocks_max, bytes_max);
    assert!(run.blocks.len() as i64 <= blocks_max.max(0));
    let (mut stop, mut next, mut joined, mut headers) = (at, first, Vec::new(), Vec::new());
    let mut summary = Summary::default();
    for (start, end) in &run.blocks {
        assert_eq!(*start, stop + PREFIX_BYTES, "blocks follow on each other");
        assert!((stop - at) as i64 >= 0 && ((stop - at) as i64) < bytes_max, "the last block reaches the bound");
        let block = &data[*start..*end];
        let header = Header::of(block).expect("a block has its header");
        assert_eq!(block.len(), HEADER_BYTES + header.payload() as usize);
        assert_eq!(crc32c(&block[CHECKED_FROM..]), header.checksum());
        assert_eq!((header.first_sequence(), header.producer_id()), (next, stream.producer_id));
        assert!(header.count() > 0 && 4 * u64::from(header.count()) <= header.raw().into());
        summary.add(header, block.len() as u32);
        joined.extend_from_slice(block);
        headers.extend_from_slice(header.0);
        (stop, next) = (*end, next + u64::from(header.count()));
    }
    assert_eq!(run.next, next);
    assert_eq!(summary.checksum, crc32c(&joined));
    assert_eq!(summary.records, next - first);
    let latencies = latency::count(&headers, 1 << 40, &[]).expect("no block is skipped");
    assert_eq!(latencies.iter().map(|(_, records)| records).sum::<u64>(), summary.records);
    run.blocks.len()
}

/// Give each block of a chain of frames a right checksum.
fn stamp(data: &mut [u8], mut at: usize) {
    while let Some(length) = data.get(at..).and_then(|rest| rest.first_chunk()).map(|word| u32::from_le_bytes(*word)) {
        let (start, stop) = (at + PREFIX_BYTES, at + PREFIX_BYTES + length as usize);
        let Some(block) = data.get_mut(start..stop).filter(|block| block.len() >= HEADER_BYTES) else { return };
        let checksum = crc32c(&block[CHECKED_FROM..]);
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
        at = stop;
    }
}

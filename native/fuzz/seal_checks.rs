//! The properties of a sealed block, for any records: for its target of cargo-fuzz, and for tests/seal.rs.
use memq_native::block::{Codec, Columns, Origin, Sealed, Shape, KEY, NULL_VALUES, TIMESTAMP, TIME_MS_END};
use memq_native::broker::header::{Header, CHECKED_FROM, HEADER_BYTES};
use memq_native::checksums::crc32c;

type Record<'a> = (Option<&'a [u8]>, &'a [u8], i64);

/// Seal the records that the bytes describe, unpack the block, and compare; return how many records it has.
///
/// Five bytes set shape, codec, limit and room before the values (in 64 bytes each), and the number of the record at
/// which the columns grow. Each record has a byte of flags (null, repeated value, large time), its lengths of value and
/// key, a byte of time, then key and value.
pub fn check_seal(data: &[u8]) -> usize {
    let Some((&[shape, codec, limit, front, grown_at], mut rest)) = data.split_first_chunk::<5>() else { return 0 };
    let shape = [Shape::Plain, Shape::Keyed, Shape::Timed][usize::from(shape % 3)];
    let codec = [Codec::None, Codec::Zstd, Codec::Lz4][usize::from(codec % 3)];
    let mut columns = Columns::new(shape, 64 * usize::from(limit), 64 * usize::from(front));
    let mut records: Vec<Record> = Vec::new();
    while let Some((&[flags, value_bytes, key_bytes, time], tail)) = rest.split_first_chunk::<4>() {
        let (key, tail) = tail.split_at(tail.len().min(key_bytes.into()));
        let (value, tail) = tail.split_at(tail.len().min(value_bytes.into()));
        let time = if flags & 4 == 0 { time.into() } else { (i64::from(time) - 128) << 46 };
        let value = if flags & 2 == 0 { value } else { records.last().and_then(|last| last.0).unwrap_or(value) };
        let key = if shape == Shape::Plain { &b""[..] } else { key };
        if records.len() == usize::from(grown_at) {
            columns.grow(64 * usize::from(limit) + 1_000);
        }
        records.push(((flags & 1 == 0).then_some(value), key, time));
        columns.push((flags & 1 == 0).then_some(value), key, time);
        rest = tail;
    }
    assert!(columns.each_value().eq(records.iter().map(|record| record.0)));
    let origin = Origin { producer_id: 7, producer_epoch: 2, first_sequence: 5, scope: 9, now_ms: 77, slots: (1, 8) };
    let times: Vec<i64> = records.iter().map(|record| record.2).collect();
    let least = times.iter().copied().min().filter(|_| shape == Shape::Timed).unwrap_or(77);
    let valid = !records.is_empty() && -TIME_MS_END < least && least < TIME_MS_END;
    let (data, start) = match columns.seal(&origin, codec) {
        Ok(Sealed::Raw { data, start }) => (data, start),
        Ok(Sealed::Packed(data)) => (data, 0),
        Err(kept) => {
            assert!(!valid, "the records are a block");
            assert!(kept.each_value().eq(records.iter().map(|record| record.0)), "nothing is lost");
            return 0;
        }
    };
    assert!(valid, "the records are no block");
    check_block(&data[start..], shape, &records, least);
    records.len()
}

/// Compare each field of the header and each column with the records.
fn check_block(block: &[u8], shape: Shape, records: &[Record], least: i64) {
    let header = Header::of(block).expect("a block has its header");
    let (payload, raw_bytes) = (header.payload() as usize, header.raw() as usize);
    assert_eq!(block.len(), HEADER_BYTES + payload);
    assert_eq!(header.checksum(), crc32c(&block[CHECKED_FROM..]));
    assert_eq!((header.count() as usize, header.base_ms()), (records.len(), least));
    assert_eq!((header.producer_id(), header.producer_epoch(), header.first_sequence(), header.scope()), (7, 2, 5, 9));
    assert_eq!((header.slot_first(), header.slot_last()), if shape == Shape::Plain { (0, 65_535) } else { (1, 8) });
    let raw = match header.codec() {
        0 => block[HEADER_BYTES..].to_vec(),
        1 => {
            let mut raw = vec![0; raw_bytes];
            assert_eq!(zstd_safe::decompress(&mut raw[..], &block[HEADER_BYTES..]), Ok(raw_bytes));
            raw
        }
        _ => lz4_flex::block::decompress(&block[HEADER_BYTES..], raw_bytes).expect("lz4 unpacks its own block"),
    };
    assert_eq!(raw.len(), raw_bytes);
    assert!(header.codec() == 0 || payload < raw_bytes, "a block that does not shrink is stored raw");

    let mut expected = Vec::new();
    records.iter().for_each(|(value, ..)| expected.extend(length(value.unwrap_or_default())));
    let mut flags = 0;
    if shape != Shape::Plain {
        flags |= KEY;
        records.iter().for_each(|(_, key, _)| expected.extend(length(key)));
    }
    let span = records.iter().map(|record| record.2 - least).max().filter(|_| shape == Shape::Timed).unwrap_or(0);
    assert_eq!(i64::from(header.max_delta_ms()), span.min(u32::MAX.into()));
    if span > 0 {
        flags |= TIMESTAMP;
        records.iter().for_each(|record| expected.extend(record.2.to_le_bytes()));
    }
    if records.iter().any(|record| record.0.is_none()) {
        flags |= NULL_VALUES;
        expected.extend(records.chunks(8).map(|eight| {
            eight.iter().enumerate().fold(0u8, |bits, (number, record)| bits | u8::from(record.0.is_some()) << number)
        }));
    }
    records.iter().for_each(|record| expected.extend_from_slice(record.1));
    records.iter().for_each(|record| expected.extend_from_slice(record.0.unwrap_or_default()));
    assert_eq!(header.flags(), flags);
    assert_eq!(raw, expected);
}

fn length(cell: &[u8]) -> [u8; 4] {
    (cell.len() as u32).to_le_bytes()
}

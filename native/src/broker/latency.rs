//! Records of a batch by bucket of age.
use super::header::{Header, HEADER_BYTES};
use crate::buffer::View;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The bucket of an age: its number of bits.
fn bucket_of(age_ms: i128) -> usize {
    (i128::BITS - age_ms.max(0).leading_zeros()) as usize
}

/// Blocks and records of each bucket. An age has at most 65 bits, because both times have 64.
#[derive(Clone, Copy, Default)]
struct Bucket {
    blocks: u64,
    records: u64,
}

/// Bucket and records of the blocks with these headers, without the blocks `skip`; None if one of them is missing.
pub fn count(headers: &[u8], now_ms: i64, skip: &[usize]) -> Option<Vec<(usize, u64)>> {
    let (blocks, _) = headers.as_chunks::<HEADER_BYTES>();
    let mut buckets = [Bucket::default(); 66];
    let mut skipped = skip.iter().peekable();
    for (number, block) in blocks.iter().enumerate() {
        if skipped.next_if_eq(&&number).is_some() {
            continue;
        }
        let header = Header(block);
        let bucket = buckets.get_mut(bucket_of(i128::from(now_ms) - i128::from(header.base_ms())))?;
        bucket.blocks += 1;
        bucket.records = bucket.records.saturating_add(header.count().into());
    }
    if skipped.next().is_some() {
        return None;
    }
    Some(buckets.iter().enumerate().filter(|(_, each)| each.blocks > 0).map(|(n, each)| (n, each.records)).collect())
}

/// Return the number of records by bucket of age, without the blocks with the ascending numbers `skip`.
#[pyfunction]
pub fn latencies<'py>(headers: &Bound<'py, PyAny>, now_ms: i64, skip: Vec<usize>) -> PyResult<Bound<'py, PyTuple>> {
    let view = View::read(headers)?;
    if view.bytes().len() % HEADER_BYTES != 0 {
        return Err(PyValueError::new_err("a header is cut"));
    }
    let found = count(view.bytes(), now_ms, &skip).ok_or_else(|| PyIndexError::new_err("no block has this number"))?;
    PyTuple::new(headers.py(), found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(blocks: &[(i64, u32)]) -> Vec<u8> {
        let mut headers = vec![0; blocks.len() * HEADER_BYTES];
        for (header, (base, count)) in headers.chunks_exact_mut(HEADER_BYTES).zip(blocks) {
            header[20..24].copy_from_slice(&count.to_le_bytes());
            header[48..56].copy_from_slice(&base.to_le_bytes());
        }
        headers
    }

    #[test]
    fn records_are_counted_by_the_bits_of_their_age() {
        let headers = headers(&[(100, 1), (99, 2), (98, 4), (97, 8), (96, 16), (101, 32), (i64::MIN, 64)]);
        let all = vec![(0, 33), (1, 2), (2, 12), (3, 16), (64, 64)];
        assert_eq!(count(&headers, 100, &[]), Some(all));
        assert_eq!(count(&headers, 100, &[0, 2, 5, 6]), Some(vec![(1, 2), (2, 8), (3, 16)]));
        assert_eq!(count(&headers, 100, &[0, 1, 2, 3, 4, 5, 6]), Some(vec![]));
        assert_eq!(count(&headers, i64::MAX, &[0, 1, 2, 3, 4, 5]), Some(vec![(64, 64)]));
        assert_eq!(count(&[], 100, &[]), Some(vec![]));
        for wrong in [&[7][..], &[1, 1], &[2, 1]] {
            assert_eq!(count(&headers, 100, wrong), None);
        }
    }
}

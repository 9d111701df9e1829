//! Views of a batch's blocks, and the values of their headers for index and pointer.
use super::header::{Header, CHECKED_FROM, HEADER_BYTES};
use crate::buffer::View;
use crate::checksums::{extend, Joiner};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PySlice, PyTuple};

const ENTRY_BYTES: usize = 64;

/// What index and pointer say of all blocks of a batch.
pub struct Summary {
    pub checksum: u32,
    pub raw_bytes: u64,
    pub records: u64,
    pub least_ms: i64,
    pub greatest_ms: i64,
    pub slots: (u16, u16),
    pub tag_bits: u64,
    bytes: u64,
    joiner: Joiner,
}

impl Default for Summary {
    fn default() -> Self {
        Self {
            checksum: 0,
            raw_bytes: 0,
            records: 0,
            least_ms: i64::MAX,
            greatest_ms: i64::MIN,
            slots: (u16::MAX, 0),
            tag_bits: 0,
            bytes: 0,
            joiner: Joiner::default(),
        }
    }
}

impl Summary {
    /// Add the next block, and return its index entry.
    #[inline]
    pub fn add(&mut self, header: Header, length: u32) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&self.bytes.to_le_bytes());
        entry[8..32].copy_from_slice(&header.identity());
        entry[32..40].copy_from_slice(&header.greatest_ms().to_le_bytes());
        entry[40..44].copy_from_slice(&length.to_le_bytes());
        entry[44..48].copy_from_slice(&header.count().to_le_bytes());
        entry[48..52].copy_from_slice(&header.checksum().to_le_bytes());
        entry[52..64].copy_from_slice(&header.tail());
        let started = extend(self.checksum, header.start());
        let covered = u64::from(length).saturating_sub(CHECKED_FROM as u64);
        self.checksum = self.joiner.join(started, header.checksum(), covered);
        self.bytes = self.bytes.saturating_add(length.into());
        self.raw_bytes = self.raw_bytes.saturating_add(header.raw().into());
        self.records = self.records.saturating_add(header.count().into());
        self.least_ms = self.least_ms.min(header.base_ms());
        self.greatest_ms = self.greatest_ms.max(header.greatest_ms());
        self.slots = (self.slots.0.min(header.slot_first()), self.slots.1.max(header.slot_last()));
        self.tag_bits |= header.tag_bits();
        entry
    }
}

/// Return a view of each block, and the fields of `memq.kernel.header_table.HeaderTable`.
#[pyfunction]
pub fn lay_out<'py>(extents: &Bound<'py, PyList>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyTuple>)> {
    let py = extents.py();
    let (views, places) = open_blocks(extents)?;
    let headers = PyBytes::new_with(py, places.len().saturating_mul(HEADER_BYTES), |headers| places.copy_to(headers))?;
    let mut summary = Summary::default();
    let entries = PyBytes::new_with(py, places.len().saturating_mul(ENTRY_BYTES), |entries| {
        let headers = headers.as_bytes().as_chunks().0.iter().map(Header);
        for ((header, length), entry) in headers.zip(places.lengths()).zip(entries.as_chunks_mut().0) {
            *entry = summary.add(header, u32::try_from(length)?);
        }
        Ok(())
    })?;
    let fields = (
        headers,
        entries,
        summary.checksum,
        summary.raw_bytes,
        summary.records,
        summary.least_ms,
        summary.greatest_ms,
        summary.slots,
        summary.tag_bits,
    );
    Ok((views, fields.into_pyobject(py)?))
}

/// Where the blocks of a batch lie: number of the slab, start and end.
#[derive(Default)]
struct Places {
    slabs: Vec<View>,
    blocks: Vec<(usize, usize, usize)>,
}

impl Places {
    fn len(&self) -> usize {
        self.blocks.len()
    }

    fn lengths(&self) -> impl Iterator<Item = usize> + '_ {
        self.blocks.iter().map(|(_, start, end)| end.saturating_sub(*start))
    }

    /// Copy the headers. They have left the CPU caches. Nothing else is done here, so that the processor waits for
    /// many of them at once: 0.03 µs per block, where one after another takes 0.2.
    fn copy_to(&self, headers: &mut [u8]) -> PyResult<()> {
        for ((slab, start, end), at) in self.blocks.iter().zip(headers.as_chunks_mut::<HEADER_BYTES>().0) {
            let block = self.slabs.get(*slab).and_then(|view| view.bytes().get(*start..*end));
            *at = *block.and_then(|block| block.first_chunk()).ok_or_else(refusal)?;
        }
        Ok(())
    }
}

/// Return a view of each block, and the places. An extent is cut at the end of its slab, as by a slice in Python.
fn open_blocks<'py>(extents: &Bound<'py, PyList>) -> PyResult<(Bound<'py, PyList>, Places)> {
    let py = extents.py();
    let (views, mut places) = (PyList::empty(py), Places::default());
    let mut open: Option<(Bound<PyAny>, Bound<PyAny>, usize)> = None; // slab, memory and size of the last block
    for extent in extents {
        let (slab, start, end): (Bound<PyAny>, usize, usize) = extent.extract()?;
        if open.as_ref().is_none_or(|(last, ..)| !last.is(&slab)) {
            let memory = slab.getattr(intern!(py, "view"))?;
            let view = View::read(&memory)?;
            open = Some((slab, memory, view.bytes().len()));
            places.slabs.push(view);
        }
        let Some((_, memory, size)) = &open else { continue };
        places.blocks.push((places.slabs.len() - 1, start, end.min(*size)));
        views.append(memory.get_item(PySlice::new(py, start as isize, end as isize, 1))?)?;
    }
    if places.blocks.is_empty() {
        return Err(refusal());
    }
    Ok((views, places))
}

fn refusal() -> PyErr {
    PyValueError::new_err("a batch has blocks, and each block its header")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksums::crc32c;

    fn block(first: u64, base: i64, slots: (u16, u16), tags: u64, payload: &[u8]) -> Vec<u8> {
        let mut block = Vec::new();
        block.extend_from_slice(b"mqB1\0\0\0\0\x01\0\0\0");
        let length = payload.len() as u32;
        [length, length + 5, 3, 0, 9].iter().for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        [7, first, base as u64].iter().for_each(|word| block.extend_from_slice(&word.to_le_bytes()));
        block.extend_from_slice(&11u32.to_le_bytes());
        block.extend_from_slice(&slots.0.to_le_bytes());
        block.extend_from_slice(&slots.1.to_le_bytes());
        block.extend_from_slice(&tags.to_le_bytes());
        block.extend_from_slice(payload);
        let checksum = crc32c(&block[CHECKED_FROM..]);
        block[4..8].copy_from_slice(&checksum.to_le_bytes());
        block
    }

    #[test]
    fn columns_say_what_the_blocks_say() {
        let blocks = [
            block(4, 1_000, (5, 6), 1, b"first"),
            block(7, -50, (2, 2), 4, b""),
            block(10, 400, (9, 70), 1, &[1; 900]),
        ];
        let (mut summary, mut entries) = (Summary::default(), Vec::new());
        for block in &blocks {
            entries.push(summary.add(Header::of(block).unwrap(), block.len() as u32));
        }
        assert_eq!(summary.checksum, crc32c(&blocks.concat()));
        assert_eq!((summary.raw_bytes, summary.records), (905 + 15, 9));
        assert_eq!((summary.least_ms, summary.greatest_ms), (-50, 1_011));
        assert_eq!((summary.slots, summary.tag_bits), ((2, 70), 5));
        let third = entries[2];
        assert_eq!(third[..8], (77u64 + 72).to_le_bytes());
        assert_eq!(third[8..16], 7u64.to_le_bytes());
        assert_eq!(third[16..24], 10u64.to_le_bytes());
        assert_eq!(third[24..32], 400i64.to_le_bytes());
        assert_eq!(third[32..40], 411i64.to_le_bytes());
        assert_eq!(third[40..44], 972u32.to_le_bytes());
        assert_eq!(third[44..48], 3u32.to_le_bytes());
        assert_eq!(third[48..52], blocks[2][4..8]);
        assert_eq!(third[52..64], [9, 0, 70, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
}

//! Gathers the bytes of many buffers in one piece of memory, for a write.
use crate::buffer::View;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Whether two slices share a byte.
fn overlap(a: &[u8], b: &[u8]) -> bool {
    let (a, b) = (a.as_ptr_range(), b.as_ptr_range());
    a.start < b.end && b.start < a.end
}

/// Copy from byte `at` of buffer `number` on, and the buffers after it, to the start of `memory`.
#[pyfunction]
pub fn fill(
    memory: &Bound<PyAny>,
    buffers: &Bound<PyAny>,
    mut number: usize,
    mut at: usize,
) -> PyResult<(usize, usize, usize)> {
    let mut memory = View::write(memory)?;
    let count = buffers.len()?;
    let mut filled = 0;
    while number < count {
        let buffer = View::read(&buffers.get_item(number)?)?;
        let data = buffer.bytes();
        if overlap(memory.bytes(), data) {
            return Err(PyValueError::new_err("a buffer lies in the memory that is filled"));
        }
        let Some(data) = data.get(at..) else {
            return Err(PyValueError::new_err(format!("byte {at} of a buffer of {} bytes", data.len())));
        };
        let room = memory.bytes_mut().get_mut(filled..).unwrap_or_default();
        let length = data.len().min(room.len());
        room[..length].copy_from_slice(&data[..length]);
        filled += length;
        if length < data.len() {
            at += length;
            break;
        }
        (number, at) = (number + 1, 0);
    }
    Ok((filled, number, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_lies_side_by_side_does_not_overlap() {
        let data = [0; 10];
        for (a, b, shared) in [(0..5, 5..10, false), (5..10, 0..5, false), (0..6, 5..10, true), (2..3, 0..10, true)] {
            assert_eq!(overlap(&data[a], &data[b]), shared);
        }
        assert!(!overlap(&data[3..3], &data[..3]));
    }
}

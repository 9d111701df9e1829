//! Views of Python buffers: bytes, bytearray, memoryview, at the cost of one C call and without an allocation.
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use std::mem::MaybeUninit;

/// A contiguous buffer of a Python object, held until the view is dropped.
pub struct View(ffi::Py_buffer);

impl View {
    /// Get a buffer that is only read.
    pub fn read(object: &Bound<PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_SIMPLE)
    }

    /// Get a buffer that can be written.
    pub fn write(object: &Bound<PyAny>) -> PyResult<Self> {
        Self::get(object, ffi::PyBUF_WRITABLE)
    }

    fn get(object: &Bound<PyAny>, flags: std::os::raw::c_int) -> PyResult<Self> {
        let mut view = MaybeUninit::<ffi::Py_buffer>::uninit();
        // SAFETY: the interpreter fills the struct, or returns an error and leaves it unused. A simple buffer is
        // contiguous by definition.
        unsafe {
            if ffi::PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), flags) != 0 {
                return Err(PyErr::fetch(object.py()));
            }
            Ok(Self(view.assume_init()))
        }
    }

    /// The bytes. The caller holds the interpreter's lock for as long as it reads them.
    pub fn bytes(&self) -> &[u8] {
        if self.0.len == 0 {
            return &[];
        }
        // SAFETY: `buf` has `len` bytes until the buffer is released, which `drop` does. Other threads of Python
        // write this memory only with the interpreter's lock, which the caller holds.
        unsafe { std::slice::from_raw_parts(self.0.buf.cast::<u8>(), self.0.len as usize) }
    }

    /// The bytes, to write. The caller holds the interpreter's lock, and no other view of them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.0.readonly == 0, "a view to write");
        if self.0.len == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the buffer was asked for as writable.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf.cast::<u8>(), self.0.len as usize) }
    }

    /// The bytes from `start` to `end`. Raises: ValueError if the buffer is shorter.
    pub fn part(&self, start: usize, end: usize) -> PyResult<&[u8]> {
        self.bytes().get(start..end).ok_or_else(|| PyValueError::new_err("the place is outside of the buffer"))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled by `get`, and released once.
        unsafe { ffi::PyBuffer_Release(&mut self.0) }
    }
}

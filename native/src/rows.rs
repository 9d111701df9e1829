//! The records of an open block, and the fast path of a record from `send` into it.
use crate::block::{Codec, Columns, Origin, Sealed, Shape, RAW_BYTES_MAX, RECORDS_MAX, TIME_MS_END};
use crate::gil_cell::GilCell;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PySequence};

const ONCE_COST: i64 = 16; // bytes of raw for each block, as in memq/kernel/rows.py

struct State {
    columns: Option<Columns>, // None: sealed
    closed: bool,
    room: i64,
    limit: i64,
}

/// Records of one shape that wait for their block. Shapes: 1 is a value, 2 value and key, 3 value, key and timestamp.
#[pyclass(frozen, module = "memq_native")]
pub struct Rows {
    state: GilCell<State>,
    shape: Shape,
    delivery: Py<PyAny>,
}

impl Rows {
    /// Add a record if there is room for it. Its parts are those of the shape.
    #[inline(always)]
    fn add(&self, py: Python<'_>, value: &[u8], key: &[u8], timestamp_ms: i64) -> bool {
        self.state.with(py, |state| {
            let room = state.room - (value.len() + key.len()) as i64 - self.shape.row_cost();
            let Some(columns) = state.columns.as_mut().filter(|_| !state.closed && room >= 0) else {
                return false;
            };
            if columns.len() >= RECORDS_MAX {
                return false;
            }
            columns.push(Some(value), key, timestamp_ms);
            state.room = room;
            true
        })
    }
}

#[pymethods]
impl Rows {
    /// `front` is the number of bytes of columns besides the values that are expected.
    #[new]
    #[pyo3(signature = (shape, limit, delivery, front = 0))]
    fn new(shape: u8, limit: usize, delivery: Py<PyAny>, front: usize) -> PyResult<Self> {
        let shape = match shape {
            1 => Shape::Plain,
            2 => Shape::Keyed,
            3 => Shape::Timed,
            _ => return Err(PyValueError::new_err(format!("no shape {shape}"))),
        };
        if limit > RAW_BYTES_MAX + 4096 {
            return Err(PyValueError::new_err(format!("limit {limit} is over {RAW_BYTES_MAX}")));
        }
        let columns = Some(Columns::new(shape, limit, front));
        let limit = limit as i64;
        let state = GilCell::new(State { columns, closed: false, room: limit - ONCE_COST, limit });
        Ok(Self { state, shape, delivery })
    }

    #[getter]
    fn shape(&self) -> u8 {
        self.shape as u8 + 1
    }

    #[getter]
    fn delivery(&self, py: Python<'_>) -> Py<PyAny> {
        self.delivery.clone_ref(py)
    }

    #[getter]
    fn row_cost(&self) -> i64 {
        self.shape.row_cost()
    }

    #[getter]
    fn count(&self, py: Python<'_>) -> usize {
        self.state.with(py, |state| state.columns.as_ref().map_or(0, Columns::len))
    }

    #[getter]
    fn closed(&self, py: Python<'_>) -> bool {
        self.state.with(py, |state| state.closed)
    }

    #[getter]
    fn room(&self, py: Python<'_>) -> i64 {
        self.state.with(py, |state| state.room)
    }

    /// Bytes of keys, lengths and timestamps.
    #[getter]
    fn column_bytes(&self, py: Python<'_>) -> usize {
        self.state.with(py, |state| state.columns.as_ref().map_or(0, Columns::column_bytes))
    }

    /// Raise the raw size up to which `room` counts.
    fn grow(&self, py: Python<'_>, limit: usize) -> PyResult<()> {
        if limit > RAW_BYTES_MAX + 4096 {
            return Err(PyValueError::new_err(format!("limit {limit} is over {RAW_BYTES_MAX}")));
        }
        self.state.with(py, |state| {
            let Some(columns) = state.columns.as_mut() else {
                return;
            };
            columns.grow(limit);
            state.room += limit as i64 - state.limit;
            state.limit = limit as i64;
        });
        Ok(())
    }

    /// Add a record of this shape, whose size the caller has checked. Return False if a field has another type, the
    /// rows are closed, or the format has no room; nothing was added then.
    fn append(
        &self,
        py: Python<'_>,
        value: &Bound<PyAny>,
        key: &Bound<PyAny>,
        timestamp_ms: &Bound<PyAny>,
        _size: i64,
    ) -> bool {
        let value = match value.cast_exact::<PyBytes>() {
            Ok(value) => Some(value.as_bytes()),
            Err(_) if value.is_none() => None,
            Err(_) => return false,
        };
        let key = match key.cast_exact::<PyBytes>() {
            Ok(key) if self.shape.has_keys() => key.as_bytes(),
            Err(_) if key.is_none() && !self.shape.has_keys() => b"",
            _ => return false,
        };
        let time = match timestamp_of(timestamp_ms) {
            Some(time) if self.shape == Shape::Timed => time,
            None if timestamp_ms.is_none() && self.shape != Shape::Timed => 0,
            _ => return false,
        };
        let size = value.map_or(0, <[u8]>::len) + key.len();
        self.state.with(py, |state| {
            let room = state.room - size as i64 - self.shape.row_cost();
            let raw = state.limit - room;
            let Some(columns) = state.columns.as_mut().filter(|_| !state.closed) else {
                return false;
            };
            if columns.len() >= RECORDS_MAX || raw > RAW_BYTES_MAX as i64 {
                return false;
            }
            columns.push(value, key, time);
            state.room = room;
            true
        })
    }

    /// Add records whose sizes the caller has checked: all values, and the keys and timestamps of the shape. Return
    /// False as `append` does; nothing was added then.
    #[pyo3(signature = (values, keys = None, timestamps_ms = None, _size = 0))]
    fn extend(
        &self,
        py: Python<'_>,
        values: &Bound<PySequence>,
        keys: Option<&Bound<PySequence>>,
        timestamps_ms: Option<&Bound<PySequence>>,
        _size: i64,
    ) -> PyResult<bool> {
        if keys.is_some() != self.shape.has_keys() || timestamps_ms.is_some() != (self.shape == Shape::Timed) {
            return Ok(false);
        }
        let (values, keys) = (to_list(values)?, keys.map(to_list).transpose()?);
        let timestamps = timestamps_ms.map(to_list).transpose()?;
        let count = values.len();
        if keys.as_ref().is_some_and(|keys| keys.len() != count)
            || timestamps.as_ref().is_some_and(|t| t.len() != count)
        {
            return Ok(false);
        }
        let mut size = count as i64 * self.shape.row_cost();
        for value in values.iter().filter(|value| !value.is_none()) {
            let Ok(value) = value.cast_exact::<PyBytes>() else {
                return Ok(false);
            };
            size += value.as_bytes().len() as i64;
        }
        for key in keys.iter().flat_map(|keys| keys.iter()) {
            let Ok(key) = key.cast_exact::<PyBytes>() else {
                return Ok(false);
            };
            size += key.as_bytes().len() as i64;
        }
        let mut times = Vec::new();
        for time in timestamps.iter().flat_map(|times| times.iter()) {
            let Some(time) = timestamp_of(&time) else {
                return Ok(false);
            };
            times.push(time);
        }
        Ok(self.state.with(py, |state| {
            let raw = state.limit - state.room;
            let Some(columns) = state.columns.as_mut().filter(|_| !state.closed) else {
                return false;
            };
            if columns.len() + count > RECORDS_MAX || raw + size > RAW_BYTES_MAX as i64 {
                return false;
            }
            for number in 0..count {
                let value = values.get_item(number).expect("the length was read");
                let value = value.cast_exact::<PyBytes>().ok().map(|value| value.as_bytes());
                let key = keys.as_ref().map(|keys| keys.get_item(number).expect("the length was read"));
                let key =
                    key.as_ref().and_then(|key| key.cast_exact::<PyBytes>().ok()).map_or(&b""[..], |k| k.as_bytes());
                columns.push(value, key, times.get(number).copied().unwrap_or(0));
            }
            state.room -= size;
            true
        }))
    }

    /// Accept no more records.
    fn close(&self, py: Python<'_>) {
        self.state.with(py, |state| state.closed = true);
    }

    /// Return values, keys and timestamps as lists; the last two are None if the shape lacks them.
    #[allow(clippy::type_complexity)]
    fn columns<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyList>, Option<Bound<'py, PyList>>, Option<Bound<'py, PyList>>)> {
        // Objects are created after the visit, because creating one may run the collector.
        let Some(columns) = self.state.with(py, |state| state.columns.take()) else {
            return Err(PyValueError::new_err("the rows are sealed"));
        };
        let made = (|| {
            let values = PyList::empty(py);
            for value in columns.each_value() {
                values.append(value.map(|value| PyBytes::new(py, value)))?;
            }
            let keys = self.shape.has_keys().then(|| {
                let keys: Vec<_> = columns.each_key().map(|key| PyBytes::new(py, key)).collect();
                PyList::new(py, keys)
            });
            let times = (self.shape == Shape::Timed).then(|| PyList::new(py, columns.timestamps()));
            Ok((values, keys.transpose()?, times.transpose()?))
        })();
        self.state.with(py, |state| state.columns = Some(columns));
        made
    }

    /// Return the sealed block, and the bytes of memory that it holds; None if the records are no block. The rows are
    /// closed, and gone if there is a block. The interpreter's lock is released meanwhile.
    #[allow(clippy::too_many_arguments)]
    fn seal<'py>(
        &self,
        py: Python<'py>,
        codec: u8,
        producer_id: u64,
        producer_epoch: u32,
        first_sequence: u64,
        scope: u32,
        now_ms: i64,
        slots: (u16, u16),
    ) -> PyResult<Option<(Bound<'py, PyAny>, usize)>> {
        let codec = match codec {
            0 => Codec::None,
            1 => Codec::Zstd,
            2 => Codec::Lz4,
            _ => return Ok(None),
        };
        let Some(columns) = self.state.with(py, |state| {
            state.closed = true;
            state.columns.take()
        }) else {
            return Err(PyValueError::new_err("the rows are sealed"));
        };
        let origin = Origin { producer_id, producer_epoch, first_sequence, scope, now_ms, slots };
        match py.detach(move || columns.seal(&origin, codec)) {
            Ok(Sealed::Raw { data, start }) => {
                let capacity = data.capacity();
                Ok(Some((Bound::new(py, Block { data, start })?.into_any(), capacity)))
            }
            Ok(Sealed::Packed(block)) => Ok(Some((PyBytes::new(py, &block).into_any(), block.len()))),
            Err(columns) => {
                self.state.with(py, |state| state.columns = Some(*columns));
                Ok(None)
            }
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.delivery)
    }
}

/// A sealed block without a codec, as a buffer.
#[pyclass(frozen, module = "memq_native")]
pub struct Block {
    data: Vec<u8>,
    start: usize,
}

#[pymethods]
impl Block {
    fn __len__(&self) -> usize {
        self.data.len() - self.start
    }

    /// # Safety
    /// The interpreter calls this with a struct to fill.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: std::os::raw::c_int,
    ) -> PyResult<()> {
        let data = &slf.get().data[slf.get().start..];
        // SAFETY: `view` is the caller's. The memory belongs to this object, which the view keeps alive, and neither
        // moves nor changes: the class is frozen.
        let failed = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.as_ptr().cast_mut().cast(), data.len() as isize, 1, flags)
        };
        if failed != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }
}

/// Holds the rows of one partition's open block while records may be added to them. This is no hash slot.
#[pyclass(frozen, module = "memq_native")]
pub struct Slot {
    rows: GilCell<Option<Py<Rows>>>,
}

#[pymethods]
impl Slot {
    #[new]
    fn new() -> Self {
        Self { rows: GilCell::new(None) }
    }

    #[getter]
    fn rows(&self, py: Python<'_>) -> Option<Py<Rows>> {
        self.rows.with(py, |rows| rows.as_ref().map(|rows| rows.clone_ref(py)))
    }

    #[setter]
    fn set_rows(&self, py: Python<'_>, rows: Option<Py<Rows>>) {
        drop(self.rows.with(py, |known| std::mem::replace(known, rows))); // after the visit: it may run Python code
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.rows.collected(|rows| visit.call(rows))
    }
}

/// The fast path into the open blocks of one topic: rows by hash slot of the key, and rows for records without a key.
#[pyclass(frozen, module = "memq_native")]
pub struct Lane {
    firsts: Vec<u16>,
    slots: Vec<Py<Slot>>,
    keyless: Slot,
}

#[pymethods]
impl Lane {
    /// `firsts` are the first hash slots of the partitions, ascending from 0; `slots` has one `Slot` for each.
    #[new]
    fn new(firsts: Vec<u16>, slots: Vec<Py<Slot>>) -> PyResult<Self> {
        if firsts.first() != Some(&0) || firsts.len() != slots.len() || !firsts.is_sorted() {
            return Err(PyValueError::new_err("hash slots must ascend from 0, with one place each"));
        }
        Ok(Self { firsts, slots, keyless: Slot::new() })
    }

    #[getter]
    fn keyless(&self, py: Python<'_>) -> Option<Py<Rows>> {
        self.keyless.rows(py)
    }

    #[setter]
    fn set_keyless(&self, py: Python<'_>, rows: Option<Py<Rows>>) {
        self.keyless.set_rows(py, rows);
    }

    /// Accept no more records without a key. The caller removes the lane from the lanes of its sender.
    fn end(&self, py: Python<'_>) {
        self.keyless.set_rows(py, None);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.slots.iter().try_for_each(|slot| visit.call(slot))?;
        self.keyless.rows.collected(|rows| visit.call(rows))
    }
}

impl Lane {
    #[inline(always)]
    fn slot_of(&self, key: &[u8]) -> &Py<Slot> {
        if self.firsts.len() == 1 {
            return &self.slots[0];
        }
        let slot = (crc32fast::hash(key) >> 16) as u16;
        &self.slots[self.firsts.partition_point(|&first| first <= slot) - 1]
    }
}

/// Puts plain records into open blocks, by the lane of their topic; all other records go to `slow`.
#[pyclass(frozen, module = "memq_native")]
pub struct Sender {
    lanes: Py<PyDict>,
    slow: Py<PyAny>,
}

#[pymethods]
impl Sender {
    #[new]
    fn new(lanes: Py<PyDict>, slow: Py<PyAny>) -> Self {
        Self { lanes, slow }
    }

    /// Add a plain record to the open block of its partition, and return the block's delivery; None if the record is
    /// not plain, or no block is open for it. Raises: what is no Exception, like KeyboardInterrupt, from a topic's hash.
    #[pyo3(signature = (topic, value, key = None, timestamp_ms = None))]
    #[inline(always)]
    fn put(
        &self,
        py: Python<'_>,
        topic: &Bound<PyAny>,
        value: &Bound<PyAny>,
        key: Option<&Bound<PyAny>>,
        timestamp_ms: Option<&Bound<PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let Ok(value) = value.cast_exact::<PyBytes>() else {
            return Ok(None);
        };
        match self.lanes.bind(py).get_item(topic) {
            Ok(Some(lane)) => Ok(add_by(&lane, value.as_bytes(), key, timestamp_ms)),
            Err(error) if !error.is_instance_of::<PyException>(py) => Err(error),
            _ => Ok(None),
        }
    }

    /// Put a record into the open block of its partition and return the block's delivery. See `memq.Producer.send`.
    #[pyo3(signature = (topic, value, key = None, headers = None, timestamp_ms = None, tag = None, partition = None))]
    #[allow(clippy::too_many_arguments)]
    fn send(
        &self,
        py: Python<'_>,
        topic: &Bound<PyAny>,
        value: &Bound<PyAny>,
        key: Option<&Bound<PyAny>>,
        headers: Option<&Bound<PyAny>>,
        timestamp_ms: Option<&Bound<PyAny>>,
        tag: Option<&Bound<PyAny>>,
        partition: Option<&Bound<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        if headers.is_none() && tag.is_none() && partition.is_none() {
            if let Some(delivery) = self.put(py, topic, value, key, timestamp_ms)? {
                return Ok(delivery);
            }
        }
        self.slow.call1(py, (topic, value, key, headers, timestamp_ms, tag, partition))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.lanes)?;
        visit.call(&self.slow)
    }
}

/// Add a record by a lane, if it is plain and a block is open for it.
#[inline(always)]
fn add_by(
    lane: &Bound<PyAny>,
    value: &[u8],
    key: Option<&Bound<PyAny>>,
    timestamp_ms: Option<&Bound<PyAny>>,
) -> Option<Py<PyAny>> {
    let py = lane.py();
    let lane = lane.cast_exact::<Lane>().ok()?.get();
    let Some(key) = key else {
        if timestamp_ms.is_some() {
            return None;
        }
        let rows = lane.keyless.rows(py)?;
        return rows.get().add(py, value, b"", 0).then(|| rows.get().delivery.clone_ref(py));
    };
    let key = key.cast_exact::<PyBytes>().ok()?.as_bytes();
    let rows = lane.slot_of(key).get().rows(py)?;
    let rows = rows.get();
    let (shape, time) = match timestamp_ms {
        None => (Shape::Keyed, 0),
        Some(time) => (Shape::Timed, timestamp_of(time)?),
    };
    (rows.shape == shape && rows.add(py, value, key, time)).then(|| rows.delivery.clone_ref(py))
}

fn to_list<'py>(cells: &Bound<'py, PySequence>) -> PyResult<Bound<'py, PyList>> {
    cells.cast_exact::<PyList>().cloned().or_else(|_| cells.to_list())
}

/// The timestamp, if it is an int in the bounds of the format.
#[inline(always)]
fn timestamp_of(time: &Bound<PyAny>) -> Option<i64> {
    let time: i64 = time.cast_exact::<PyInt>().ok()?.extract().ok()?;
    (-TIME_MS_END < time && time < TIME_MS_END).then_some(time)
}

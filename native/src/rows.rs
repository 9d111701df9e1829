//! The records of an open block, and the fast path of a record from `send` into it.
use crate::block::{Codec, Columns, Origin, Sealed, Shape, RAW_BYTES_MAX, RECORDS_MAX, TIME_MS_END};
use crate::gil_cell::GilCell;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::ffi;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PySequence, PyString, PyTuple};

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

/// Holds the rows of one partition's open block while records may be added to them.
#[pyclass(frozen, module = "memq_native")]
pub struct OpenRows {
    rows: GilCell<Option<Py<Rows>>>,
}

#[pymethods]
impl OpenRows {
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
    partitions: Vec<Py<OpenRows>>,
    keyless: OpenRows,
    ended: GilCell<bool>,
}

#[pymethods]
impl Lane {
    /// `firsts` are the first hash slots of the partitions, ascending from 0; `partitions` has the open rows of each.
    #[new]
    fn new(firsts: Vec<u16>, partitions: Vec<Py<OpenRows>>) -> PyResult<Self> {
        if firsts.first() != Some(&0) || firsts.len() != partitions.len() || !firsts.is_sorted() {
            return Err(PyValueError::new_err("hash slots must ascend from 0, with one partition each"));
        }
        Ok(Self { firsts, partitions, keyless: OpenRows::new(), ended: GilCell::new(false) })
    }

    #[getter]
    fn keyless(&self, py: Python<'_>) -> Option<Py<Rows>> {
        self.keyless.rows(py)
    }

    #[setter]
    fn set_keyless(&self, py: Python<'_>, rows: Option<Py<Rows>>) {
        self.keyless.set_rows(py, rows);
    }

    /// Accept no more records. The caller has removed the lane from the lanes of its sender.
    fn end(&self, py: Python<'_>) {
        self.ended.with(py, |ended| *ended = true);
        self.keyless.set_rows(py, None);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.partitions.iter().try_for_each(|rows| visit.call(rows))?;
        self.keyless.rows.collected(|rows| visit.call(rows))
    }
}

impl Lane {
    fn ended(&self, py: Python<'_>) -> bool {
        self.ended.with(py, |ended| *ended)
    }

    /// Add a record, if it is plain and a block is open for it; return the block's delivery.
    #[inline(always)]
    fn add(
        &self,
        py: Python<'_>,
        value: &[u8],
        key: Option<&Bound<PyAny>>,
        timestamp_ms: Option<&Bound<PyAny>>,
    ) -> Option<Py<PyAny>> {
        let Some(key) = key else {
            if timestamp_ms.is_some() {
                return None;
            }
            let rows = self.keyless.rows(py)?;
            return rows.get().add(py, value, b"", 0).then(|| rows.get().delivery.clone_ref(py));
        };
        let key = key.cast_exact::<PyBytes>().ok()?.as_bytes();
        let rows = self.open_rows(key).get().rows(py)?;
        let rows = rows.get();
        let (shape, time) = match timestamp_ms {
            None => (Shape::Keyed, 0),
            Some(time) => (Shape::Timed, timestamp_of(time)?),
        };
        (rows.shape == shape && rows.add(py, value, key, time)).then(|| rows.delivery.clone_ref(py))
    }

    #[inline(always)]
    fn open_rows(&self, key: &[u8]) -> &Py<OpenRows> {
        if self.firsts.len() == 1 {
            return &self.partitions[0];
        }
        let slot = (crc32fast::hash(key) >> 16) as u16;
        &self.partitions[self.firsts.partition_point(|&first| first <= slot) - 1]
    }
}

/// The base class of producers: puts plain records into open blocks, by the lane of their topic. All other records go
/// to the method `_send_slowly` of the derived class.
#[pyclass(frozen, subclass, module = "memq_native")]
pub struct SenderBase {
    paths: GilCell<Paths>,
}

struct Paths {
    lanes: Option<Py<PyDict>>,
    last: Option<(Py<PyString>, Py<Lane>)>, // topic and lane of the last look-up
}

#[pymethods]
impl SenderBase {
    /// The arguments are those of the derived class.
    #[new]
    #[pyo3(signature = (*_args, **_named))]
    fn new(_args: &Bound<PyTuple>, _named: Option<&Bound<PyDict>>) -> Self {
        Self { paths: GilCell::new(Paths { lanes: None, last: None }) }
    }

    /// Take records by these lanes from now on. Until then each one goes to `_send_slowly`.
    #[pyo3(name = "_use_lanes")]
    fn use_lanes(&self, py: Python<'_>, lanes: Py<PyDict>) {
        let known = self.paths.with(py, |paths| std::mem::replace(paths, Paths { lanes: Some(lanes), last: None }));
        drop(known); // after the visit: it may run Python code
    }

    /// Add a plain record to the open block of its partition, and return the block's delivery; None if the record is
    /// not plain, or no block is open for it. Raises: what is no Exception, like KeyboardInterrupt, from a topic's hash.
    #[pyo3(name = "_put_plain", signature = (topic, value, key = None, timestamp_ms = None))]
    #[inline(always)]
    fn put_plain(
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
        let last = self.paths.with(py, |paths| match &paths.last {
            Some((known, lane)) if known.as_ptr() == topic.as_ptr() && !lane.get().ended(py) => {
                Some(lane.clone_ref(py))
            }
            _ => None,
        });
        let lane = match last {
            Some(lane) => lane,
            None => match self.lane_of(topic)? {
                Some(lane) => lane,
                None => return Ok(None),
            },
        };
        Ok(lane.get().add(py, value.as_bytes(), key, timestamp_ms))
    }

    /// Add a record to the open block of its partition and return the block's delivery.
    ///
    /// Value and key are bytes-like (copied) or str (UTF-8); the value None is a null. Headers are pairs or a
    /// mapping. `partition`, else the key, determines the partition; without both, each block goes to the next one.
    /// `deliver_at` (Unix ms or datetime) or `deliver_after` (seconds or timedelta) delay the record: readers get it
    /// when it is due. Its ack says that it is held. With `subject`, value and headers are encrypted with the key of
    /// this subject, such as a person, until `memq forget`.
    ///
    /// Raises: TypeError; TooLargeError; NotFoundError; UnreachableError when the topic is new to this producer and no
    /// broker answers; BufferFullError; ClosedError; ForkedError; InvalidRequestError for a delay that is not allowed.
    #[pyo3(signature = (
        topic, value, key = None, headers = None, timestamp_ms = None, tag = None, partition = None, *,
        deliver_at = None, deliver_after = None, subject = None
    ))]
    #[allow(clippy::too_many_arguments)]
    fn send(
        slf: &Bound<Self>,
        topic: &Bound<PyAny>,
        value: &Bound<PyAny>,
        key: Option<&Bound<PyAny>>,
        headers: Option<&Bound<PyAny>>,
        timestamp_ms: Option<&Bound<PyAny>>,
        tag: Option<&Bound<PyAny>>,
        partition: Option<&Bound<PyAny>>,
        deliver_at: Option<&Bound<PyAny>>,
        deliver_after: Option<&Bound<PyAny>>,
        subject: Option<&Bound<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        if deliver_at.is_some() || deliver_after.is_some() || subject.is_some() {
            let given = (topic, value, key, headers, timestamp_ms, tag, partition, deliver_at, deliver_after, subject);
            return slf.call_method1(intern!(py, "_send_slowly"), given).map(Bound::unbind);
        }
        if headers.is_none() && tag.is_none() && partition.is_none() {
            if let Some(delivery) = slf.get().put_plain(py, topic, value, key, timestamp_ms)? {
                return Ok(delivery);
            }
        }
        slf.call_method1(intern!(py, "_send_slowly"), (topic, value, key, headers, timestamp_ms, tag, partition))
            .map(Bound::unbind)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.paths.collected(|paths| {
            visit.call(&paths.lanes)?;
            paths.last.iter().try_for_each(|(_, lane)| visit.call(lane))
        })
    }
}

impl SenderBase {
    /// Look up the lane of a topic. Raises: what is no Exception, from a topic's hash.
    fn lane_of(&self, topic: &Bound<PyAny>) -> PyResult<Option<Py<Lane>>> {
        let py = topic.py();
        let Some(lanes) = self.paths.with(py, |paths| paths.lanes.as_ref().map(|lanes| lanes.clone_ref(py))) else {
            return Ok(None);
        };
        let lane = match lanes.bind(py).get_item(topic) {
            Ok(Some(lane)) => lane,
            Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
            _ => return Ok(None),
        };
        let Some(lane) = lane.cast_into_exact::<Lane>().ok().filter(|lane| !lane.get().ended(py)) else {
            return Ok(None);
        };
        if let Ok(topic) = topic.cast_exact::<PyString>() {
            let last = Some((topic.clone().unbind(), lane.clone().unbind()));
            drop(self.paths.with(py, |paths| std::mem::replace(&mut paths.last, last)));
            // after the visit, as above
        }
        Ok(Some(lane.unbind()))
    }
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

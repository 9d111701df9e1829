//! The broker's loops over blocks. `memq/kernel/blocks.py` has their contract, and `blocks_pure_python.py` the same in
//! Python.
pub mod columns;
pub mod fill;
pub mod header;
pub mod latency;
pub mod scan;

use pyo3::prelude::*;

/// Add the functions to the module.
pub fn register(module: &Bound<PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(scan::scan_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(columns::lay_out, module)?)?;
    module.add_function(wrap_pyfunction!(latency::latencies, module)?)?;
    module.add_function(wrap_pyfunction!(fill::fill, module)?)
}

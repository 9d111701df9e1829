//! The compiled kernel of memq: hot loops over blocks. It takes what is plainly right and declines the rest, which
//! Python judges. It decides no policy, starts no threads and opens nothing.
mod buffer;
pub mod checksums;

use pyo3::prelude::*;

/// Changes with each signature of this module. `memq.kernel` compares it.
const ABI: u32 = 1;

#[pymodule]
fn memq_native(module: &Bound<PyModule>) -> PyResult<()> {
    module.add("ABI", ABI)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    Ok(())
}

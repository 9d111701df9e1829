//! The compiled kernel of memq: hot loops over blocks. It takes what is plainly right and declines the rest, which
//! Python judges. It decides no policy, starts no threads and opens nothing.
pub mod block;
pub mod broker;
mod buffer;
pub mod checksums;
mod gil_cell;
mod rows;

use pyo3::prelude::*;

/// Changes with each signature of this module. `memq.kernel` compares it.
const ABI: u32 = 4;

// With `gil_used`, an interpreter that can run without its lock switches the lock on when it imports this module.
#[pymodule(gil_used = true)]
fn memq_native(module: &Bound<PyModule>) -> PyResult<()> {
    module.add("ABI", ABI)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<rows::Rows>()?;
    module.add_class::<rows::OpenRows>()?;
    module.add_class::<rows::Lane>()?;
    module.add_class::<rows::SenderBase>()?;
    broker::register(module)?;
    Ok(())
}

//! A cell that the interpreter's lock protects.
use pyo3::prelude::*;
use std::cell::{Cell, UnsafeCell};

/// A value that is only reached with the interpreter's lock, at the cost of one test.
pub struct GilCell<T> {
    value: UnsafeCell<T>,
    busy: Cell<bool>,
}

// SAFETY: `with` wants the token of the interpreter's lock, so no two threads are in this cell at the same time. An
// interpreter that can run without its lock has no abi3, but may compile the source distribution. There the token alone
// does not exclude other threads: the module says `gil_used`, and `memq.kernel` does not import it while the lock is off.
unsafe impl<T: Send> Sync for GilCell<T> {}

impl<T> GilCell<T> {
    pub fn new(value: T) -> Self {
        Self { value: UnsafeCell::new(value), busy: Cell::new(false) }
    }

    /// Run `visit` on the value. It must not run Python code, which might give the lock away or come back here.
    #[inline(always)]
    pub fn with<R>(&self, _locked: Python<'_>, visit: impl FnOnce(&mut T) -> R) -> R {
        assert!(!self.busy.replace(true), "the cell is in use");
        let idle = Idle(&self.busy);
        // SAFETY: the caller holds the interpreter's lock, and `busy` was false: this is the only reference.
        let found = visit(unsafe { &mut *self.value.get() });
        drop(idle);
        found
    }

    /// The value, for `__traverse__`, to which the collector gives no token of the lock.
    pub fn collected<R>(&self, visit: impl FnOnce(&T) -> R) -> R {
        assert!(!self.busy.get(), "the cell is in use");
        // SAFETY: the collector runs with the interpreter's lock and stops all Python code. `busy` is false, so no
        // `with` is under way: those run no Python code, and so no collector.
        visit(unsafe { &*self.value.get() })
    }
}

/// Frees the cell also when `visit` panics.
struct Idle<'a>(&'a Cell<bool>);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

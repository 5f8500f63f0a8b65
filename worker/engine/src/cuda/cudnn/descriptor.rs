//! Descriptors of cuDNN's backend API: created, given attributes, finalised.

#![allow(unsafe_code)] // The backend API is C: attributes are pointers to arrays of a stated type.

use super::{Kind, Name, Type};
use crate::cuda::error::{CudaError, Result};
use cudarc::cudnn::sys::{self, cudnnStatus_t};

/// An owned backend descriptor.
pub(super) struct Descriptor(pub(super) sys::cudnnBackendDescriptor_t);

// SAFETY: a descriptor is not tied to a thread; without `Sync`, only one thread at a time uses it.
unsafe impl Send for Descriptor {}

impl Descriptor {
    pub(super) fn new(kind: Kind) -> Result<Self> {
        let mut descriptor = std::ptr::null_mut();
        // SAFETY: destroyed when this is dropped.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut descriptor) }, || {
            format!("creating a {kind:?}")
        })?;
        Ok(Self(descriptor))
    }

    /// Sets an attribute. cuDNN copies the values.
    pub(super) fn set<T>(&self, name: Name, kind: Type, values: &[T]) -> Result {
        // SAFETY: the number and type of the values are as stated.
        let status = unsafe {
            sys::cudnnBackendSetAttribute(self.0, name, kind, values.len() as i64, values.as_ptr().cast())
        };
        check(status, || format!("setting {name:?}"))
    }

    pub(super) fn set_descriptors(&self, name: Name, values: &[&Descriptor]) -> Result {
        let handles: Vec<_> = values.iter().map(|d| d.0).collect();
        self.set(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &handles)
    }

    /// Reads as many values of an attribute as fit into `values`. Returns the number of values read.
    pub(super) fn get<T>(&self, name: Name, kind: Type, values: &mut [T]) -> Result<usize> {
        let mut count = 0i64;
        // SAFETY: `values` has the stated length and type.
        let status = unsafe {
            sys::cudnnBackendGetAttribute(
                self.0,
                name,
                kind,
                values.len() as i64,
                &mut count,
                values.as_mut_ptr().cast(),
            )
        };
        check(status, || format!("querying {name:?}"))?;
        Ok((count.max(0) as usize).min(values.len()))
    }

    /// Reads an attribute that consists of at most `max_count` descriptors of `kind`.
    pub(super) fn get_descriptors(
        &self,
        name: Name,
        kind: Kind,
        max_count: usize,
    ) -> Result<Vec<Descriptor>> {
        let mut all = (0..max_count).map(|_| Descriptor::new(kind)).collect::<Result<Vec<_>, _>>()?;
        let mut handles: Vec<_> = all.iter().map(|descriptor| descriptor.0).collect();
        all.truncate(self.get(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, &mut handles)?);
        Ok(all)
    }

    pub(super) fn finalize(&self, what: &str) -> Result {
        // SAFETY: the descriptor is alive.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, || format!("preparing {what}"))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

pub(super) fn check(status: cudnnStatus_t, doing: impl FnOnce() -> String) -> Result {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut buffer = [0u8; 512];
    // SAFETY: the buffer has the stated length; the library terminates the text with a zero byte.
    unsafe { sys::cudnnGetLastErrorString(buffer.as_mut_ptr().cast(), buffer.len()) };
    let text = buffer.split(|b| *b == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).trim().to_owned();
    let detail = if text.is_empty() { text } else { format!(": {text}") };
    Err(CudaError::cudnn(doing(), status, detail))
}

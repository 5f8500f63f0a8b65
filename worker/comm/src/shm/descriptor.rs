//! Allocates shared memory on rank 0, and opens it on the other ranks.

use super::{
    ENABLING_VARIABLE,
    layout::{Head, group_bytes},
    mapping::{Mapping, MemFile, SharedSlice},
};
use lockstep_host::boot_id;
use serde::{Deserialize, Serialize};
use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

/// Rank 0's description of its shared memory, sent to the other ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ShmDescriptor {
    /// The boot id, which distinguishes machines.
    boot_id: String,
    pid: u32,
    fd: i32,
    /// Random bytes at the beginning of the memory, which prove that the right file was opened.
    token: [u64; 2],
}

/// The memory's file, and its mapping in this process.
pub(super) type OpenedMemory = (MemFile, Arc<Mapping>);

/// Allocates memory for `world` ranks, or returns the reason of the failure.
pub(super) fn make(world: usize) -> Result<(ShmDescriptor, OpenedMemory), String> {
    check_enabled()?;
    let allocate = || -> io::Result<OpenedMemory> {
        let file = MemFile::create()?;
        file.grow(0, group_bytes(world))?;
        let memory = file.map(0, group_bytes(world))?;
        Ok((file, memory))
    };
    let (file, memory) = allocate().map_err(|e| format!("shared memory cannot be allocated: {e}"))?;
    let (left, right) = uuid::Uuid::new_v4().as_u64_pair();
    let descriptor =
        ShmDescriptor { boot_id: boot_id(), pid: std::process::id(), fd: file.fd(), token: [left, right] };
    for (word, value) in head(&memory)[0].token.iter().zip(descriptor.token) {
        word.store(value, Ordering::Release);
    }
    Ok((descriptor, (file, memory)))
}

/// Opens the memory that rank 0 describes, or returns the reason of the failure.
pub(super) fn open(descriptor: &ShmDescriptor, world: usize) -> Result<OpenedMemory, String> {
    check_enabled()?;
    if descriptor.boot_id != boot_id() {
        return Err("runs on another machine than rank 0".into());
    }
    let open = || -> io::Result<OpenedMemory> {
        let file = MemFile::of_process(descriptor.pid, descriptor.fd)?;
        let memory = file.map(0, group_bytes(world))?;
        Ok((file, memory))
    };
    let (file, memory) = open().map_err(|e| format!("rank 0's memory cannot be opened: {e}"))?;
    let head = head(&memory);
    let found = head[0].token.each_ref().map(|word| word.load(Ordering::Acquire));
    if found != descriptor.token {
        return Err("rank 0's memory cannot be opened: another process has its process id here".into());
    }
    Ok((file, memory))
}

#[allow(unsafe_code)]
pub(super) fn head(memory: &Arc<Mapping>) -> SharedSlice<Head> {
    // SAFETY: the head consists of atomic numbers.
    unsafe { memory.view(0, 1) }
}

fn check_enabled() -> Result<(), String> {
    match std::env::var(ENABLING_VARIABLE) {
        Ok(value) if value == "0" => Err(format!("{ENABLING_VARIABLE} is 0")),
        _ => Ok(()),
    }
}

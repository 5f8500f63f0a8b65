//! A third backend for tests: shows what a backend must provide, and computes with the CPU engine.

use lockstep_engine::{
    Backend, BuildArgs, Devices, Engine, EngineError, Needs, Selection, build_cpu, registry,
};
use lockstep_host::gpu::RankGpu;
use lockstep_protocol::{
    agent::Slot,
    spec::{Device, Precision},
};
use std::{ffi::OsString, io, sync::Mutex};

/// The prefix of the names of the backend's devices.
const DEVICE: &str = "TOY-";
/// The environment variable with the devices of a rank's process.
pub(crate) const VISIBLE: &str = "LOCKSTEP_TOY_DEVICES";

/// The calls of the backend in this process, in order.
pub(crate) static CALLS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn note(what: String) {
    CALLS.lock().unwrap().push(what);
}

/// Adds the backend to the registry, and returns the UUID of its device `name`.
pub(crate) fn device(name: &str) -> String {
    registry::add(&Toy);
    format!("{DEVICE}{name}")
}

#[derive(Debug)]
struct Toy;

impl Backend for Toy {
    fn name(&self) -> &'static str {
        "toy"
    }

    /// The devices that are selected. Every machine has all of them.
    fn devices(&self, selection: Selection<'_>) -> Result<Devices, String> {
        let named = selection.list.into_iter().flat_map(|list| list.split(','));
        let slot = |(index, name): (u32, &str)| Slot {
            index,
            device: self.name().into(),
            name: name.to_lowercase(),
            memory_bytes: 0,
            uuid: Some(name.into()),
        };
        let slots = (0..).zip(named.filter(|name| name.starts_with(DEVICE))).map(slot).collect();
        Ok(Devices { slots, why_no_gpus: None })
    }

    fn device_of(&self, given: Option<&RankGpu>, _asked: Device) -> Option<i32> {
        let given = given?;
        given.uuid()?.starts_with(DEVICE).then_some(given.ordinal)
    }

    fn device_name(&self, ordinal: i32) -> String {
        format!("toy {ordinal}")
    }

    fn needs(&self) -> Needs {
        Needs { shared_memory: true, host_memory: true, ..Needs::default() }
    }

    fn environment(&self, given: Option<&RankGpu>) -> io::Result<Vec<(OsString, OsString)>> {
        let visible = given.map(|given| given.visible.join(",")).unwrap_or_default();
        Ok(vec![(VISIBLE.into(), visible.into())])
    }

    fn preflight(&self, world_size: u32) -> Result<(), String> {
        note(format!("preflight for {world_size} ranks"));
        Ok(())
    }

    fn warm_up(&self, ordinal: i32, ranks: u32, _precision: Option<Precision>) {
        note(format!("warm-up of device {ordinal} for {ranks} ranks"));
    }

    fn build(&self, args: BuildArgs<'_>) -> Result<Box<dyn Engine>, EngineError> {
        note(format!("engine on device {}", args.device.ordinal));
        build_cpu(args.network, args.initial, args.config, args.comm)
    }
}

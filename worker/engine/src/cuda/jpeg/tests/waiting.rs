//! The CPU decodes concurrently with a GPU only while a step waits for its batch.

use super::*;
use std::{
    sync::{Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

/// A decoder that waits for a signal.
#[derive(Debug, Default)]
struct Held {
    inner: OnTheHost,
    gate: Gate,
}

#[derive(Debug, Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn pass(&self) {
        drop(self.1.wait_while(self.0.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

impl DeviceDecoder for Held {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn decode<'a>(
        &self,
        size: (u32, u32),
        next: &mut dyn FnMut(usize) -> Vec<Encoded<'a>>,
        then: &mut dyn FnMut(&[Option<&[u8]>]),
    ) -> Result<(), String> {
        self.gate.pass();
        self.inner.decode(size, next, then)
    }
}

#[test]
fn while_a_step_waits_cores_make_what_a_gpu_has_not_begun() {
    let dir = folder(|_| (50, 44));
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(24)), random_resized_crop: true, ..spec() };
    let wanted: Vec<Batch> =
        open(dir.path(), &spec, BatchFormat::Bytes).epoch(PLAN).map(Result::unwrap).collect();
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
    let held = Arc::new(Held::default());
    data.set_decoder(Some(held.clone()), Sharing::WithCores);
    let mut epoch = data.epoch(PLAN);
    thread::scope(|scope| {
        let waiting = scope.spawn(move || epoch.next().unwrap().unwrap());
        // As many pictures as the batch has, from this batch and from later ones.
        let by_cores =
            || data.decoded().unwrap().by_cores.get(&CpuDecodeReason::Concurrently).copied().unwrap_or(0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while by_cores() < wanted[0].labels.len() as u64 {
            assert!(Instant::now() < deadline, "{:?}", data.decoded());
            thread::yield_now();
        }
        held.gate.open();
        assert!(waiting.join().unwrap() == wanted[0]);
    });
}

#[test]
fn while_no_step_waits_cores_leave_to_a_gpu_what_it_decodes() {
    let dir = folder(|_| (50, 44));
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(24)), random_resized_crop: true, ..spec() };
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
    data.set_decoder(Some(Arc::new(OnTheHost { most: Some(1), ..OnTheHost::default() })), Sharing::WithCores);
    // No step waits for a batch yet; the epoch's batches are prepared in advance.
    let epoch = data.epoch(PLAN);
    let deadline = Instant::now() + Duration::from_secs(60);
    while data.decoded().unwrap().by_device < 2 * PLAN.batch_size as u64 {
        assert!(Instant::now() < deadline, "{:?}", data.decoded());
        thread::yield_now();
    }
    assert!(
        !data.decoded().unwrap().by_cores.contains_key(&CpuDecodeReason::Concurrently),
        "{:?}",
        data.decoded()
    );
    drop(epoch);
}

#[test]
fn files_are_held_for_a_gpu_up_to_a_limit() {
    let dir = folder(|_| (40, 40));
    let spec = DataSpec { image_size: Some(ImageSize::Fixed(24)), random_resized_crop: true, ..spec() };
    let wanted = batches(&open(dir.path(), &spec, BatchFormat::Bytes));
    // A batch with all pictures of the training split.
    let plan = EpochPlan { batch_size: 64, threads: 1, ..PLAN };
    let mut data = open(dir.path(), &spec, BatchFormat::Bytes);
    let chosen = data.epoch(plan).next().unwrap().unwrap().indices;
    let mut files: Vec<_> =
        fs::read_dir(dir.path().join("train/all")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let bytes: usize = chosen.iter().map(|i| fs::metadata(&files[*i as usize]).unwrap().len() as usize).sum();
    for (room, passed) in [(bytes, None), (bytes - 1, Some(1))] {
        data.set_decoder_with_room(Arc::new(OnTheHost::default()), room);
        assert_eq!(data.epoch(plan).count(), 1);
        let decoded = data.decoded().unwrap();
        assert_eq!(decoded.by_cores.get(&CpuDecodeReason::LongBatch).copied(), passed, "{decoded:?}");
    }
    data.set_decoder_with_room(Arc::new(OnTheHost::default()), 1);
    assert!(batches(&data) == wanted);
    assert_eq!(data.decoded().unwrap().by_device, 0);
}

//! A fair pool: several threads share a few objects, and get them in the order of their requests.

use lockstep_host::lock;
use std::{
    ops::{Deref, DerefMut},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// A pool of objects, each used by one thread at a time.
pub(super) struct Pool<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    free: Vec<T>,
    in_use: usize,
    /// Number of requests so far.
    request_count: u64,
    /// Number of requests that got an object.
    served_count: u64,
    is_closed: bool,
}

impl<T> Pool<T> {
    pub(super) fn new(objects: Vec<T>) -> Self {
        let state = State { free: objects, in_use: 0, request_count: 0, served_count: 0, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State<T>>) -> MutexGuard<'a, State<T>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free object after all earlier requests have been served. `None` if the pool is closed.
    pub(super) fn take(&self) -> Option<Borrowed<'_, T>> {
        let mut state = lock(&self.state);
        let number = state.request_count;
        state.request_count += 1;
        loop {
            if state.is_closed {
                return None;
            }
            if state.served_count == number
                && let Some(object) = state.free.pop()
            {
                state.served_count += 1;
                state.in_use += 1;
                // Another object may be free for the next request.
                self.changed.notify_all();
                return Some(Borrowed { object: Some(object), pool: self });
            }
            state = self.wait(state);
        }
    }

    /// Closes the pool, waits until all objects are returned, and drops them.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.is_closed = true;
        self.changed.notify_all();
        while state.in_use > 0 {
            state = self.wait(state);
        }
        state.free.clear();
    }
}

/// An object in use; returned to the pool on drop.
pub(super) struct Borrowed<'a, T> {
    object: Option<T>,
    pool: &'a Pool<T>,
}

impl<T> Deref for Borrowed<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.object.as_ref().expect("present until drop")
    }
}

impl<T> DerefMut for Borrowed<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.object.as_mut().expect("present until drop")
    }
}

impl<T> Drop for Borrowed<'_, T> {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        state.free.extend(self.object.take());
        state.in_use -= 1;
        self.pool.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    #[test]
    fn requests_are_served_in_order_and_no_object_is_used_twice() {
        let pool = Pool::new(vec![()]);
        let (sender, order) = mpsc::channel();
        thread::scope(|scope| {
            let first = pool.take().unwrap();
            for number in 1..=5 {
                let (pool, sender) = (&pool, sender.clone());
                scope.spawn(move || {
                    let taken = pool.take().unwrap();
                    sender.send(number).unwrap();
                    drop(taken);
                });
                // Wait until this request is queued before the next one starts.
                while lock(&pool.state).request_count <= number {
                    thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn closing_waits_for_objects_in_use_and_refuses_waiting_requests() {
        let pool = Pool::new(vec![7]);
        thread::scope(|scope| {
            let taken = pool.take().unwrap();
            let waiting = scope.spawn(|| pool.take().is_none());
            while lock(&pool.state).request_count < 2 {
                thread::yield_now();
            }
            let closing = scope.spawn(|| pool.close());
            assert!(waiting.join().unwrap());
            assert!(!closing.is_finished());
            assert_eq!(*taken, 7);
            drop(taken);
            closing.join().unwrap();
        });
        assert!(pool.take().is_none() && lock(&pool.state).free.is_empty());
    }
}

//! Who works next: a few things that several threads want, given in the order in which they were asked for.

use std::{
    ops::{Deref, DerefMut},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
};

/// Things that one thread uses at a time, each.
pub(super) struct Sessions<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

struct State<T> {
    free: Vec<T>,
    in_use: usize,
    /// How many have asked so far, and how many of them have had their turn.
    asked: u64,
    served: u64,
    is_closed: bool,
}

impl<T> Sessions<T> {
    pub(super) fn new(free: Vec<T>) -> Self {
        let state = State { free, in_use: 0, asked: 0, served: 0, is_closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State<T>>) -> MutexGuard<'a, State<T>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// One that nobody uses, once all who asked before have theirs. `None` once it is closed.
    pub(super) fn take(&self) -> Option<Taken<'_, T>> {
        let mut state = self.state();
        let turn = state.asked;
        state.asked += 1;
        loop {
            if state.is_closed {
                return None;
            }
            if state.served == turn
                && let Some(thing) = state.free.pop()
            {
                state.served += 1;
                state.in_use += 1;
                // There may be one for the next, too.
                self.changed.notify_all();
                return Some(Taken { thing: Some(thing), of: self });
            }
            state = self.wait(state);
        }
    }

    /// Gives no more of them, waits until all are back, and drops them.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        self.changed.notify_all();
        while state.in_use > 0 {
            state = self.wait(state);
        }
        state.free.clear();
    }
}

/// In use until it is dropped.
pub(super) struct Taken<'a, T> {
    thing: Option<T>,
    of: &'a Sessions<T>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.thing.as_ref().expect("there until it is dropped")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.thing.as_mut().expect("there until it is dropped")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        let mut state = self.of.state();
        state.free.extend(self.thing.take());
        state.in_use -= 1;
        self.of.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::mpsc, thread};

    #[test]
    fn who_asks_first_is_served_first_and_none_is_used_twice() {
        let sessions = Sessions::new(vec![()]);
        let (sender, order) = mpsc::channel();
        thread::scope(|scope| {
            let first = sessions.take().unwrap();
            for number in 1..=5 {
                let (sessions, sender) = (&sessions, sender.clone());
                scope.spawn(move || {
                    let taken = sessions.take().unwrap();
                    sender.send(number).unwrap();
                    drop(taken);
                });
                // In the queue before the next one asks.
                while sessions.state().asked <= number {
                    thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(order.try_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[test]
    fn closing_waits_for_what_is_in_use_and_turns_away_who_waits() {
        let sessions = Sessions::new(vec![7]);
        thread::scope(|scope| {
            let taken = sessions.take().unwrap();
            let waiting = scope.spawn(|| sessions.take().is_none());
            while sessions.state().asked < 2 {
                thread::yield_now();
            }
            let closing = scope.spawn(|| sessions.close());
            assert!(waiting.join().unwrap());
            assert!(!closing.is_finished());
            assert_eq!(*taken, 7);
            drop(taken);
            closing.join().unwrap();
        });
        assert!(sessions.take().is_none() && sessions.state().free.is_empty());
    }
}

//! Reduced gradients that outlive their step, for who wants to look at them.

use super::State;
use lockstep_comm::{CommError, ProcessGroup};

impl State {
    /// Collective: has the next step keep its reduced gradients, if there is memory for them.
    ///
    /// # Errors
    /// Another rank is gone.
    pub(in crate::cpu) fn keep_gradients(&mut self, comm: &dyn ProcessGroup) -> Result<(), CommError> {
        let len = self.weights.len();
        if self.reduced.is_none() {
            self.reduced = match &self.memory {
                None => Some(vec![0.0; len].into()),
                Some(_) => match comm.shared_memory(4 * len)? {
                    // SAFETY: numbers, of which all bits are valid. Pieces of an update are written by whoever does them, and
                    // read between two updates.
                    Ok(memory) => Some(unsafe { memory.view(0, len) }),
                    Err(why) => {
                        tracing::warn!("gradients cannot be kept: {why}");
                        None
                    }
                },
            };
        }
        self.keeps_gradients = true;
        Ok(())
    }

    /// Those gradients.
    pub(in crate::cpu) fn reduced_gradients(&self) -> Option<&[f32]> {
        self.reduced.as_deref()
    }
}

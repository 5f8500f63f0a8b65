//! Reduced gradients that are kept after their step, for [`crate::Engine::gradients`].

use super::State;
use lockstep_comm::{CommError, ProcessGroup};

impl State {
    /// Collective: makes the next step keep its reduced gradients, if there is enough memory.
    pub(in crate::cpu) fn keep_gradients(&mut self, comm: &dyn ProcessGroup) -> Result<(), CommError> {
        let len = self.weights.len();
        if self.reduced.is_none() {
            self.reduced = match &self.memory {
                None => Some(vec![0.0; len].into()),
                Some(_) => match comm.shared_memory(4 * len)? {
                    // SAFETY: all bit patterns of numbers are valid. A piece is written by the thread that updates it, and read
                    // only between two updates.
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

    pub(in crate::cpu) fn reduced_gradients(&self) -> Option<&[f32]> {
        self.reduced.as_deref()
    }
}

//! Reports once that the server does not respond, and once that it responds again.

/// Whether the server is unreachable.
#[derive(Debug, Default)]
pub(crate) struct Away(bool);

impl Away {
    pub(crate) fn note_silence(&mut self, say: impl FnOnce(&str)) {
        if !std::mem::replace(&mut self.0, true) {
            say("no connection to the server; trying again ...");
        }
    }

    pub(crate) fn note_answer(&mut self, say: impl FnOnce(&str)) {
        if std::mem::take(&mut self.0) {
            say("the server answers again");
        }
    }
}

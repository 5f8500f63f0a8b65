//! A server that does not answer for a while, of which somebody who waits is told.

/// Whether it is away: says so once, and once when it is back.
#[derive(Debug, Default)]
pub(crate) struct Away(bool);

impl Away {
    pub(crate) fn silent(&mut self, say: impl FnOnce(&str)) {
        if !std::mem::replace(&mut self.0, true) {
            say("no connection to the server; trying again ...");
        }
    }

    pub(crate) fn answered(&mut self, say: impl FnOnce(&str)) {
        if std::mem::take(&mut self.0) {
            say("the server answers again");
        }
    }
}

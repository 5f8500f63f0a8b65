//! Reports once that the server does not respond, and once that it responds again.

/// Whether the server is unreachable.
#[derive(Debug, Default)]
pub(crate) struct Outage(bool);

impl Outage {
    pub(crate) fn report_lost(&mut self, print: impl FnOnce(&str)) {
        if !std::mem::replace(&mut self.0, true) {
            print("no connection to the server; trying again ...");
        }
    }

    pub(crate) fn report_restored(&mut self, print: impl FnOnce(&str)) {
        if std::mem::take(&mut self.0) {
            print("the server answers again");
        }
    }
}

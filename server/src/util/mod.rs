//! What several folders of the server need and no folder owns.

pub(crate) mod disk_space;
pub(crate) mod failure_log;
pub(crate) mod histogram;
pub(crate) mod leb128;
pub(crate) mod private_files;
pub(crate) mod regular_files;
pub(crate) mod tasks;

//! Datasets: the folders that may contain them, the transfer of their files to agents, their inspections and changes, and uploads of zip
//! files. The server does not parse datasets; agents do.

pub(crate) mod changes;
pub(crate) mod copies;
pub(crate) mod files;
pub(crate) mod notes;
pub(crate) mod roots;
pub(crate) mod uploads;

use crate::{
    agents::{Agents, shared_requests::SharedRequests},
    config::ServeConfig,
    events::Events,
    store::Store,
    util::tasks::Tasks,
};
use copies::CopyProgress;
use lockstep_protocol::dataset::DatasetInfo;
use roots::DatasetRoots;
use std::{sync::Arc, time::Duration};

/// Time for which the result of an inspection is kept if no request waits for it.
const INSPECTION_LIFE: Duration = Duration::from_secs(10);

/// The server's state about datasets, in addition to the rows in the store.
pub(crate) struct Datasets {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) events: Arc<Events>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) roots: DatasetRoots,
    /// Running inspections, by the path of the dataset. Their results are the path with its links resolved and the dataset's description.
    pub(crate) inspections: Arc<SharedRequests<String, (String, DatasetInfo)>>,
    /// Progress of copies to machines, as last written into the logs of jobs.
    pub(crate) copies: CopyProgress,
}

impl Datasets {
    pub(crate) fn new(
        config: &ServeConfig,
        store: Arc<dyn Store>,
        events: Arc<Events>,
        agents: Arc<Agents>,
        tasks: Tasks,
    ) -> Self {
        let inspections = SharedRequests::new(tasks, INSPECTION_LIFE);
        let (roots, copies) = (DatasetRoots::new(config), CopyProgress::default());
        Self { store, events, agents, roots, inspections, copies }
    }
}

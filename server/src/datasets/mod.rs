//! Datasets as the server knows them: where they may lie, their files as agents copy them, their inspections, and zip files that people
//! upload. Only agents open a dataset.

pub(crate) mod copies;
pub(crate) mod files;
pub(crate) mod inspections;
pub(crate) mod notes;
pub(crate) mod roots;
pub(crate) mod uploads;

use crate::{agents::Agents, config::ServeConfig, events::Events, store::Store, util::tasks::Tasks};
use copies::CopyProgress;
use inspections::Inspections;
use roots::DatasetRoots;
use std::sync::Arc;

/// Datasets, and what the server knows of them besides their rows in the store.
pub(crate) struct Datasets {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) events: Arc<Events>,
    pub(crate) agents: Arc<Agents>,
    pub(crate) tasks: Tasks,
    pub(crate) roots: DatasetRoots,
    /// Inspections that agents make now.
    pub(crate) inspections: Inspections,
    /// How far the logs of jobs say that machines have copied their datasets.
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
        let (roots, inspections, copies) =
            (DatasetRoots::new(config), Inspections::default(), CopyProgress::default());
        Self { store, events, agents, tasks, roots, inspections, copies }
    }
}

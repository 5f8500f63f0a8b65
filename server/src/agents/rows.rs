//! Rows of agents that wait to be stored. After a restart, all agents reconnect at the same time. Rows that arrive while a transaction is
//! written are stored together in the next transaction.

use crate::{
    store::{AgentRow, Result, Store, StoreError},
    util::lock,
};
use std::sync::Mutex;
use tokio::sync::oneshot;

/// Maximum number of rows in a transaction.
const MAX_BATCH: usize = 256;

/// Whether a row was stored, or why not.
type RowResult = std::result::Result<(), String>;

#[derive(Debug, Default)]
pub(crate) struct AgentRows {
    waiting: Mutex<Vec<(AgentRow, oneshot::Sender<RowResult>)>>,
    /// Held during a transaction.
    writing: tokio::sync::Mutex<()>,
}

impl AgentRows {
    /// Stores the row of an agent, and returns when it is stored.
    ///
    /// # Errors
    /// The database refuses the row.
    pub(crate) async fn put(&self, store: &dyn Store, row: AgentRow) -> Result<()> {
        let (reply_to, mut reply) = oneshot::channel();
        lock(&self.waiting).push((row, reply_to));
        loop {
            let _writing = self.writing.lock().await;
            // Another caller may have stored this row in its transaction.
            match reply.try_recv() {
                Ok(result) => return result.map_err(StoreError::Unavailable),
                Err(oneshot::error::TryRecvError::Closed) => {
                    return Err(StoreError::Unavailable("the row was not stored".into()));
                }
                Err(oneshot::error::TryRecvError::Empty) => self.write(store).await,
            }
        }
    }

    async fn write(&self, store: &dyn Store) {
        let (rows, senders): (Vec<_>, Vec<_>) = {
            let mut waiting = lock(&self.waiting);
            let count = MAX_BATCH.min(waiting.len());
            waiting.drain(..count).unzip()
        };
        let batch = store.put_agents(&rows).await;
        let is_refused = batch.as_ref().is_err_and(|error| !error.is_temporary());
        let batch = batch.map_err(|error| error.to_string());
        for (row, reply_to) in rows.iter().zip(senders) {
            // If the database refuses a row, each row is stored separately.
            let result = if is_refused {
                store.put_agents(std::slice::from_ref(row)).await.map_err(|error| error.to_string())
            } else {
                batch.clone()
            };
            // The agent's connection may have ended.
            let _ = reply_to.send(result);
        }
    }
}

//! Requests to agents whose results several clients may wait for. The first client starts a request, and later clients join it.

use super::{OnlineAgent, RequestError};
use crate::util::{lock, tasks::Tasks};
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};
use tokio::sync::watch;

/// The agent of a request and the id of the request, once it is sent.
pub(crate) type Sent = Arc<OnceLock<(OnlineAgent, u64)>>;

/// Requests that are running or have just ended, by their subject.
pub(crate) struct SharedRequests<K, T> {
    tasks: Tasks,
    /// Time for which an outcome is kept if no client waits for it. A waiting or later client takes the outcome.
    outcome_life: Duration,
    requests: Mutex<HashMap<K, SharedRequest<T>>>,
}

/// A request that a client has joined.
pub(crate) enum Joined<T> {
    Ended(Result<T, RequestError>),
    /// The request did not end while the client waited.
    Running(Sent),
}

#[derive(Clone)]
struct SharedRequest<T> {
    sent: Sent,
    outcome: watch::Receiver<Option<Result<T, RequestError>>>,
}

impl<K, T> SharedRequests<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    pub(crate) fn new(tasks: Tasks, outcome_life: Duration) -> Arc<Self> {
        Arc::new(Self { tasks, outcome_life, requests: Mutex::default() })
    }

    /// Joins the running or recent request for `key`, or starts `work`, and waits for the outcome for at most `max_wait`.
    pub(crate) async fn join_or_start<W>(
        self: &Arc<Self>,
        key: K,
        max_wait: Duration,
        work: impl FnOnce(Sent) -> W,
    ) -> Joined<T>
    where
        W: Future<Output = Result<T, RequestError>> + Send + 'static,
    {
        let SharedRequest { sent, mut outcome } = self.find_or_start(&key, work);
        let ended =
            async { outcome.wait_for(Option::is_some).await.ok().and_then(|outcome| outcome.clone()) };
        let Ok(outcome) = tokio::time::timeout(max_wait, ended).await else {
            return Joined::Running(sent);
        };
        self.forget(&key);
        // A request has no outcome if the server stops.
        let stopping = || Err(RequestError::Unavailable("the server is stopping; ask again".into()));
        Joined::Ended(outcome.unwrap_or_else(stopping))
    }

    fn find_or_start<W>(self: &Arc<Self>, key: &K, work: impl FnOnce(Sent) -> W) -> SharedRequest<T>
    where
        W: Future<Output = Result<T, RequestError>> + Send + 'static,
    {
        let mut requests = lock(&self.requests);
        if let Some(known) = requests.get(key) {
            return known.clone();
        }
        let (sender, outcome) = watch::channel(None);
        let request = SharedRequest { sent: Sent::default(), outcome };
        requests.insert(key.clone(), request.clone());
        let (this, key, work) = (Arc::clone(self), key.clone(), work(request.sent.clone()));
        self.tasks.spawn(async move {
            let _ = sender.send(Some(work.await));
            tokio::time::sleep(this.outcome_life).await;
            this.forget(&key);
        });
        request
    }

    /// Forgets a request that has ended, with or without an outcome.
    fn forget(&self, key: &K) {
        let mut requests = lock(&self.requests);
        let has_ended = |request: &SharedRequest<T>| {
            request.outcome.borrow().is_some() || request.outcome.has_changed().is_err()
        };
        if requests.get(key).is_some_and(has_ended) {
            requests.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::sync::oneshot;

    #[tokio::test]
    async fn running_requests_are_joined_and_ended_requests_are_forgotten() {
        let life = Duration::from_secs(60);
        let requests = SharedRequests::new(Tasks::default(), life);
        let (end, ended) = oneshot::channel();
        let running = requests
            .join_or_start("/data", Duration::ZERO, |_| async move { Ok(ended.await.unwrap()) })
            .await;
        assert!(matches!(running, Joined::Running(_)));
        end.send(1).unwrap();
        for (new, expected) in [(2, 1), (3, 3)] {
            let joined = requests.join_or_start("/data", life, |_| ready(Ok(new))).await;
            assert!(matches!(joined, Joined::Ended(Ok(outcome)) if outcome == expected));
        }
        requests.tasks.stopping.cancel();
        let interrupted = requests.join_or_start("/data", life, |_| pending()).await;
        assert!(matches!(interrupted, Joined::Ended(Err(RequestError::Unavailable(_)))));
        assert!(lock(&requests.requests).is_empty());
    }
}

//! Inspections of datasets. The first inspection of a million pictures takes minutes, which is longer than browsers and proxies wait for a
//! response. After the time limit of a request, the response is 202. Repeating the request joins the inspection.

use crate::api::prelude::*;
use crate::{
    agents::{
        OnlineAgent, RequestError, requests,
        shared_requests::{Joined, Sent},
    },
    datasets::Datasets,
};
use lockstep_protocol::{
    agent::{AgentReply, AgentRequest},
    dataset::DatasetInfo,
    inspect::MAX_CONCURRENT_REQUESTS,
};
use std::time::Duration;

/// Time limit of an inspection. It is sufficient for very large folders on slow disks.
pub(crate) const INSPECTION_TIMEOUT: Duration = Duration::from_secs(12 * 3600);
/// Maximum of `wait_secs`, which is also the default. The maximum is less than the time limit of handlers.
const MAX_WAIT_SECS: u64 = 120;
/// Time limit for an agent's reply to `InspectProgress`.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Time limit of a request that waits for an inspection.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct WaitQuery {
    /// Maximum number of seconds to wait for the end of the inspection, 0 to 120 (default 120). After that, the response is 202.
    #[param(minimum = 0, maximum = 120)]
    wait_secs: Option<u64>,
}

impl WaitQuery {
    /// Returns the time to wait for the inspection.
    pub(crate) fn max_wait(&self) -> Result<Duration> {
        let secs = self.wait_secs.unwrap_or(MAX_WAIT_SECS);
        if secs > MAX_WAIT_SECS {
            let detail = format!("wait_secs is {secs}, but must be 0 to {MAX_WAIT_SECS}");
            return Err(Error::BadRequest(detail));
        }
        Ok(Duration::from_secs(secs))
    }
}

/// Maximum time that a request waits for an inspection.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(MAX_WAIT_SECS);

/// The progress of an inspection.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InspectionProgress {
    /// A text about the progress.
    pub(crate) detail: String,
    /// Number of pictures (or shards) inspected or unpacked so far, if known.
    pub(crate) inspected: Option<u64>,
    /// Total number of pictures (or shards), if known.
    pub(crate) total: Option<u64>,
}

/// Why a request has no result of an inspection.
#[derive(Debug)]
pub(crate) enum NotInspected {
    /// The inspection is in progress; the request must be sent again.
    UnderWay(InspectionProgress),
    Failed(Error),
}

/// The result of an inspection within the time that a request waits.
pub(crate) type Inspected<T> = Result<T, NotInspected>;

impl<E: Into<Error>> From<E> for NotInspected {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl IntoResponse for NotInspected {
    fn into_response(self) -> Response {
        match self {
            Self::UnderWay(progress) => (StatusCode::ACCEPTED, Json(progress)).into_response(),
            Self::Failed(error) => error.into_response(),
        }
    }
}

/// Lets an agent inspect the files under `path`, or joins a running inspection, and waits for at most `max_wait`. Returns the canonical
/// path, without symbolic links.
///
/// # Errors
/// No agent is online or has the files, or the files are not a valid dataset.
pub(crate) async fn inspect(
    datasets: &Arc<Datasets>,
    path: String,
    max_wait: Duration,
) -> Inspected<(String, DatasetInfo)> {
    let work = |sent: Sent| {
        let (datasets, path) = (Arc::clone(datasets), path.clone());
        async move {
            let started_at = jiff::Timestamp::now();
            let allowed = datasets.roots.allowed_folders_for_new(&path);
            let request = AgentRequest::InspectDataset { path, allowed };
            match requests::call_shared(&datasets.agents, request, INSPECTION_TIMEOUT, &sent).await? {
                AgentReply::Dataset { path, info } => {
                    Ok((path, DatasetInfo { inspected_at: Some(started_at), ..info }))
                }
                _ => {
                    Err(RequestError::Refused("an agent replied with something other than a dataset".into()))
                }
            }
        }
    };
    match datasets.inspections.join_or_start(path.clone(), max_wait, work).await {
        Joined::Ended(outcome) => Ok(outcome?),
        Joined::Running(sent) => Err(NotInspected::UnderWay(progress_of(datasets, sent.get(), path).await)),
    }
}

/// Returns the progress of the inspection of `path`. `request`: the agent that inspects and the id of the request; `None` if no agent is
/// chosen yet.
async fn progress_of(
    datasets: &Datasets,
    request: Option<&(OnlineAgent, u64)>,
    path: String,
) -> InspectionProgress {
    let Some((agent, request)) = request else {
        let detail = format!("choosing a machine that has {path}; ask again");
        return InspectionProgress { detail, inspected: None, total: None };
    };
    let waiting = datasets.agents.send_request(agent, AgentRequest::InspectProgress { path: path.clone() });
    let progress = match datasets.agents.wait_for_reply(waiting, PROGRESS_TIMEOUT).await {
        Ok(AgentReply::Progress { inspected }) => inspected,
        _ => None,
    };
    let name = &agent.row.name;
    let ahead = datasets.agents.requests_ahead(*request).unwrap_or(0);
    let detail = match progress {
        Some((inspected, total)) => {
            format!("{name} is inspecting {path}: {inspected} of {total} so far; ask again")
        }
        // An agent handles at most `MAX_CONCURRENT_REQUESTS` requests of a queue at a time.
        None if ahead >= MAX_CONCURRENT_REQUESTS => {
            format!(
                "the inspection of {path} waits on {name}, behind {}; ask again",
                lockstep_protocol::numbers::plural(ahead as u64, "other request")
            )
        }
        None => format!("{name} is inspecting {path}; ask again"),
    };
    let (inspected, total) = progress.unzip();
    InspectionProgress { detail, inspected, total }
}

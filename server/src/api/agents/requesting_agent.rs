//! The agent that sends a request on the routes of agents with their own disk, and the checkpoints that this agent may upload.

use crate::api::prelude::*;
use crate::{
    agents::Agents, auth::Auth, checkpoints::Checkpoints, http::extract::parse_job_id, store::Holder,
};
use axum::{
    extract::{FromRef, FromRequestParts},
    http::request::Parts,
};
use lockstep_protocol::agent::{AttemptRef, FencingToken};
use serde_json::Value;

/// The agent that sends a request, its attempt, and the parameters of the path.
pub(crate) struct RequestingAgent {
    pub(crate) agent_id: String,
    pub(crate) attempt: AttemptRef,
    pub(crate) path: AttemptPath,
}

/// The parameters of a path. Parameters that a route does not have are empty.
#[derive(Deserialize)]
pub(crate) struct AttemptPath {
    job: String,
    attempt: u32,
    /// A checkpoint that is uploaded.
    #[serde(default)]
    pub(crate) name: String,
    /// A checkpoint that is downloaded.
    #[serde(default)]
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) file: String,
}

/// Reads the agent and the fencing token from the headers of a request, and checks the access token.
impl<S: Send + Sync> FromRequestParts<S> for RequestingAgent
where
    Arc<Auth>: FromRef<S>,
{
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self> {
        let Path(path) = Path::<AttemptPath>::from_request_parts(parts, state).await?;
        let header = |name: &str| {
            let value = parts.headers.get(name).and_then(|value| value.to_str().ok());
            value.ok_or_else(|| {
                Error::BadRequest(format!("the header {name} is missing: only agents send this request"))
            })
        };
        let agent_id = header("x-lockstep-agent")?.to_owned();
        let token = Value::String(header("x-lockstep-fencing-token")?.to_owned());
        let fencing_token: FencingToken = serde_json::from_value(token)
            .map_err(|e| Error::BadRequest(format!("x-lockstep-fencing-token: {e}")))?;
        let caller = parts.extensions.get::<Caller>();
        let caller = caller.ok_or_else(|| Error::Internal("a request has no caller".into()))?;
        if let Some(token) = caller.token() {
            // Reads the token again, because the agent may have joined after the token was made.
            let bound = Arc::<Auth>::from_ref(state).access.token(&token.id);
            if bound.and_then(|bound| bound.token.agent_id).as_deref() != Some(agent_id.as_str()) {
                return Err(Error::Forbidden("this token belongs to another agent".into()));
            }
        }
        let attempt = AttemptRef { job: parse_job_id(&path.job)?, attempt: path.attempt, fencing_token };
        Ok(Self { agent_id, attempt, path })
    }
}

impl RequestingAgent {
    pub(crate) fn has_attempt(&self, agents: &Agents) -> bool {
        agents.leases.has_live_ranks(&self.agent_id, &self.attempt)
    }

    pub(crate) fn check_attempt(&self, agents: &Agents) -> Result<()> {
        if self.has_attempt(agents) {
            Ok(())
        } else {
            Err(Error::Forbidden("this agent does not have this attempt".into()))
        }
    }

    /// The agent's name from the lease, because after a restart of the server the agent may not have reconnected yet.
    pub(crate) fn agent_name(&self, agents: &Agents) -> String {
        let places = agents.leases.places_of(&self.attempt.job);
        let place = places.into_iter().find(|place| place.agent_id == self.agent_id);
        place.map_or_else(|| self.agent_id.clone(), |place| place.agent)
    }

    /// Checks that this agent has the checkpoint of the path on its disk and may upload it.
    pub(crate) async fn check_upload(&self, checkpoints: &Checkpoints) -> Result<()> {
        let name = &self.path.name;
        let forbidden = || Error::Forbidden("this agent may not upload this attempt's checkpoints".into());
        let place =
            checkpoints.store.agent_place(&self.attempt, &self.agent_id).await?.ok_or_else(forbidden)?;
        let is_regular_uploader = place.has_rank_0 && place.has_own_disk;
        let row = checkpoints.store.checkpoint(&format!("{}-{name}", self.attempt.job)).await?;
        let is_of_earlier_attempt = row.as_ref().is_some_and(|row| row.attempt != self.attempt.attempt);
        // An agent reports its disk after it has the attempt's dataset. Before, it may upload only checkpoints of earlier attempts.
        if !place.has_own_disk && !is_of_earlier_attempt {
            return Err(forbidden());
        }
        let has_attempt = self.has_attempt(&checkpoints.agents);
        let Some(row) = row else {
            // An agent without rank 0 has a checkpoint only if a rank was lost. The report of the checkpoint may not have arrived yet.
            let may_report = is_regular_uploader || has_attempt;
            return Err(if may_report { self.not_found(name) } else { forbidden() });
        };
        let is_this_agent = |holder: &Holder| holder.agent_id == self.agent_id;
        let copies = checkpoints.copies_of(&row).await?;
        let has_copy = copies.holders.iter().any(is_this_agent);
        // The server expects the upload from the first holder.
        let holders = checkpoints.holders_unless_on_server(&row, &copies);
        let uploader = holders.into_iter().chain(copies.holders).next();
        if uploader.is_some_and(|uploader| is_this_agent(&uploader)) {
            // Allowed also after the end of the agent's attempt, because this may be the only copy of the newest checkpoint.
            Ok(())
        } else if has_copy && !checkpoints.folder(&row).exists() {
            // If the uploading agent disconnects, this agent may upload.
            Err(Error::Unavailable("another machine uploads this checkpoint; try again".into()))
        } else if is_of_earlier_attempt && has_copy && is_regular_uploader {
            // The agent continued from this checkpoint, and learns from the upload's state that the checkpoint is uploaded.
            Ok(())
        } else if is_of_earlier_attempt || has_attempt {
            // The agent's report of this checkpoint may not have arrived yet.
            Err(self.not_found(name))
        } else {
            Err(forbidden())
        }
    }

    fn not_found(&self, name: &str) -> Error {
        Error::NotFound(format!(
            "the job has no checkpoint {name} of this agent, or the checkpoint was removed"
        ))
    }
}

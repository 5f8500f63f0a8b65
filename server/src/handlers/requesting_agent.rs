//! Who asks on the routes of agents with a disk of their own, and what that agent may upload.

use super::extract::job_id;
use crate::{
    access::Caller,
    app::App,
    artifacts,
    error::{Error, Result},
    holders::Holder,
    store::CheckpointRow,
};
use axum::http::HeaderMap;
use lockstep_protocol::{
    JobId,
    agent::{AttemptRef, FencingToken},
};
use serde_json::Value;

/// Which agent asks, for which of its attempts.
pub(super) struct RequestingAgent {
    pub(super) agent_id: String,
    pub(super) attempt: AttemptRef,
}

impl RequestingAgent {
    /// # Errors
    /// A header that is missing, or an agent whose token it is not.
    pub(super) fn of(
        app: &App,
        caller: &Caller,
        headers: &HeaderMap,
        job: &str,
        attempt: u32,
    ) -> Result<Self> {
        let header = |name: &str| {
            let value = headers.get(name).and_then(|value| value.to_str().ok());
            value.ok_or_else(|| {
                Error::BadRequest(format!("the header {name} is missing: only agents ask here"))
            })
        };
        let agent_id = header("x-lockstep-agent")?.to_owned();
        let token = Value::String(header("x-lockstep-fencing-token")?.to_owned());
        let fencing_token: FencingToken = serde_json::from_value(token)
            .map_err(|e| Error::BadRequest(format!("x-lockstep-fencing-token: {e}")))?;
        if let Some(token) = caller.token() {
            // As it is now: its agent may have joined after the token was made.
            let bound = app.access.token(&token.id).and_then(|bound| bound.token.agent_id);
            if bound.as_deref() != Some(agent_id.as_str()) {
                return Err(Error::Forbidden("this token is another agent's".into()));
            }
        }
        let job: JobId = job_id(job)?;
        Ok(Self { agent_id, attempt: AttemptRef { job, attempt, fencing_token } })
    }

    /// Whether rank 0 of the attempt is on this agent, which holds it.
    pub(super) fn holds(&self, app: &App) -> Result<bool> {
        let held = app.leases.held_by(&self.agent_id, &self.attempt);
        held.ok_or_else(|| Error::Forbidden("this attempt is not this agent's to run".into()))
    }

    /// The agent's name, as the attempt was given to it: after a restart of the server it need not have come back yet.
    pub(super) fn agent_name(&self, app: &App) -> String {
        let places = app.leases.places_of(&self.attempt.job);
        let place = places.into_iter().find(|place| place.agent_id == self.agent_id);
        place.map_or_else(|| self.agent_id.clone(), |place| place.agent)
    }

    /// The row of a checkpoint that this agent has on its disk, and uploads.
    pub(super) async fn uploads(&self, app: &App, name: &str) -> Result<CheckpointRow> {
        let job_dir = app.job_dir(&self.attempt.job);
        let (attempt, fencing_token) = (self.attempt.attempt, self.attempt.fencing_token);
        let is_its = |holder: &Holder| holder.agent_id == self.agent_id;
        let is_noted = Holder::of_agent(&job_dir, attempt, &self.agent_id)
            .or_else(|| Holder::of(&job_dir, attempt).filter(is_its))
            .is_some_and(|holder| holder.fencing_token == fencing_token);
        let has_rank_0 = Holder::of(&job_dir, attempt).is_some_and(|holder| is_its(&holder));
        let not_its = || Error::Forbidden("this attempt's checkpoints are not this agent's to upload".into());
        // An attempt that waits for its dataset, or was stopped meanwhile, is not noted.
        if !is_noted && !app.store.was_given(&self.attempt, &self.agent_id).await? {
            return Err(not_its());
        }
        let row = app.store.checkpoint(&format!("{}-{name}", self.attempt.job)).await?;
        let row = match row {
            Some(row) if row.attempt != attempt => return self.uploads_earlier(app, row, name, has_rank_0),
            _ if !is_noted => return Err(not_its()),
            row => row,
        };
        let Some(row) = row else {
            // Where it has not rank 0 it has one only if a rank was lost, and its report may be on its way.
            let may_come = has_rank_0 || app.leases.held_by(&self.agent_id, &self.attempt).is_some();
            return if may_come { Err(self.no_such(name)) } else { Err(not_its()) };
        };
        let holders = Holder::all(&job_dir, attempt, name);
        let first = artifacts::on_its_way(app, &row).into_iter().chain(holders.clone()).next();
        match first.is_some_and(|first| is_its(&first)) {
            true => Ok(row),
            // If that one goes away, it is this one's turn.
            false if holders.iter().any(is_its) && !app.checkpoint_dir(&row).exists() => {
                Err(uploaded_by_another())
            }
            // Its report that it has this one, too, may be on its way.
            false if app.leases.held_by(&self.agent_id, &self.attempt).is_some() => Err(self.no_such(name)),
            false => Err(not_its()),
        }
    }

    /// As [`Self::uploads`], of a checkpoint of another attempt. An agent that has it uploads it whatever its own attempt does: it may be
    /// the newest, and nobody else has it.
    fn uploads_earlier(
        &self,
        app: &App,
        row: CheckpointRow,
        name: &str,
        has_rank_0: bool,
    ) -> Result<CheckpointRow> {
        let is_its = |holder: &Holder| holder.agent_id == self.agent_id;
        let holders = Holder::all(&app.job_dir(&row.job), row.attempt, name);
        let has_it = holders.iter().any(is_its);
        let first = artifacts::on_its_way(app, &row).into_iter().chain(holders).next();
        if first.is_some_and(|first| is_its(&first)) {
            return Ok(row);
        }
        if has_it && !app.checkpoint_dir(&row).exists() {
            return Err(uploaded_by_another());
        }
        // It continued from this one, and is told that it has come.
        if has_it && has_rank_0 { Ok(row) } else { Err(self.no_such(name)) }
    }

    fn no_such(&self, name: &str) -> Error {
        Error::NotFound(format!("the job has no checkpoint {name} of this agent (any more)"))
    }
}

fn uploaded_by_another() -> Error {
    Error::Unavailable("another machine uploads this checkpoint; try again".into())
}

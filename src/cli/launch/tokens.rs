//! The agents' tokens: created for a launch, and revoked when the job is over.

use super::{
    super::{
        api::{Api, text},
        output,
    },
    Host, Launch,
    bundle::Node,
};
use anyhow::Context as _;
use lockstep_protocol::{
    Job,
    access::{Scope, Token},
};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Seconds after which the agents' tokens expire if the launch does not revoke them.
const TOKEN_SECS: u64 = 30 * 24 * 3600;

impl Launch {
    /// Creates an identity and a token for each agent.
    pub(super) async fn create_tokens(&mut self) -> anyhow::Result<()> {
        let device = self.job.spec.parallel.device;
        for (index, host) in self.hosts.iter().enumerate() {
            let agent_id = uuid::Uuid::new_v4().simple().to_string();
            let name = agent_name(&self.job, index, host, &agent_id);
            let body = json!({
                "name": name, "scope": Scope::Agent, "agent": agent_id, "expires_in_secs": TOKEN_SECS,
            });
            let created: Value = self
                .api
                .post("/tokens", &body)
                .await
                .context("cannot make a token for an agent, which needs the scope admin")?;
            self.token_ids.push(text(&created, "id").to_owned());
            self.bundle.nodes.push(Node {
                name,
                host: host.name.clone(),
                agent_id,
                token: text(&created, "secret").to_owned(),
                slots: host.slots.unwrap_or(1),
                device,
                gpus: host.devices.clone(),
                env: host.env.clone(),
            });
        }
        Ok(())
    }

    /// Revokes the agents' tokens.
    pub(super) async fn revoke_tokens(&self) {
        revoke(&self.api, &self.token_ids).await;
    }
}

/// Revokes tokens. Tokens that cannot be revoked expire.
pub(super) async fn revoke(api: &Api, ids: &[String]) {
    for id in ids {
        let _ = api.delete(&format!("/tokens/{id}")).await;
    }
}

/// Selects from these comma-separated token ids the tokens that a launch of this job created. The ids come from an annotation that other
/// accounts may have written, so the server's list decides which tokens belong to this job's agents.
pub(super) async fn select_of_job(api: &Api, job: &Job, ids: &str) -> Vec<String> {
    let ids: BTreeSet<_> = ids.split(',').map(str::trim).collect();
    match api.read_all("/tokens").await {
        Ok(values) => {
            let tokens = values.into_iter().filter_map(|value| serde_json::from_value::<Token>(value).ok());
            let start = name_prefix(job.id.as_str());
            let is_of_launch = |token: &Token| token.scope == Scope::Agent && token.name.starts_with(&start);
            let selected = tokens.filter(|token| ids.contains(token.id.as_str()) && is_of_launch(token));
            selected.map(|token| token.id).collect()
        }
        Err(error) => {
            output::warn(format_args!(
                "the earlier launch's tokens could not be revoked, but they expire: {error}"
            ));
            Vec::new()
        }
    }
}

/// Returns the prefix of agents' names, with the end of the job's id: `launch-6f2c1a-`.
fn name_prefix(id: &str) -> String {
    format!("launch-{}-", &id[id.len().saturating_sub(6)..])
}

/// Returns an agent's name, with the start of the agent's id: `launch-6f2c1a-0-node1-93be07`. So an agent of an earlier launch of the job
/// has another name.
fn agent_name(job: &Job, index: usize, host: &Host, agent_id: &str) -> String {
    let start = name_prefix(job.id.as_str());
    let host: String = host.name.chars().take(60).collect();
    let id: String = agent_id.chars().take(6).collect();
    match host.as_str() {
        "" => format!("{start}{index}-{id}"),
        host => format!("{start}{index}-{host}-{id}"),
    }
}

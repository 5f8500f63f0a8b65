//! Agents in the pods of an Indexed Job of Kubernetes, which places pods and replaces lost pods. In messages, `Kubernetes' Job` differs
//! from Lockstep's `job`.

mod cluster;
mod objects;
mod steer;
mod template;
mod words;

use super::{
    super::{access::is_this_machine, output},
    Args, Launch,
    follow::{follow_until_over, read_job},
    hosts::Host,
    tokens,
    uploads::Agents,
};
use cluster::{Cluster, Created, Kind};
use lockstep_protocol::{Job, JobSpec, JobState};
use objects::{JOB_LABEL, LAUNCH_ANNOTATION, Plan, TOKENS_ANNOTATION};
use serde_json::{Value, json};
use std::{path::Path, time::Duration};

pub(super) use template::{Template, read as read_template};

const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Prints the objects for `--dry-run`, without the content of the Secret.
pub(super) fn print_objects(
    args: &Args,
    id: &str,
    hosts: &[Host],
    spec: &JobSpec,
    template: &Template,
) -> anyhow::Result<()> {
    let stem = Path::new(&args.job).file_stem().unwrap_or_default().to_string_lossy();
    let name = objects::object_name(id, &stem);
    let launch = "random-id-of-the-launch".to_owned();
    let plan = Plan { name, job: id, launch, program: &args.program, hosts, spec, token_ids: &[], template };
    let items = [plan.job(), plan.service(None), plan.secret(None, None)?];
    output::json(&json!({"apiVersion": "v1", "kind": "List", "items": items}))
}

/// Starts the agents in Kubernetes, and follows them.
///
/// # Errors
/// Kubernetes refuses an object, its Job ends before Lockstep's job, or Lockstep's job does not succeed.
pub(super) async fn start(launch: &mut Launch, template: &Template) -> anyhow::Result<()> {
    launch.bundle.dir.clone_from(&template.dir);
    launch.bundle.in_pod = true;
    let cluster = Cluster::connect(&launch.args).await?;
    let name = objects::object_name(launch.job.id.as_str(), &launch.job.name);
    // In a pod, a loopback address means the pod itself.
    if is_this_machine(&launch.bundle.server) {
        output::warn(format_args!(
            "the server's address is {}, which means the pod itself in each pod: give the server's address for pods with --agent-server",
            launch.bundle.server
        ));
    }
    if let Some(job) = find_earlier_job(&cluster, &name, launch).await? {
        output::warn(format_args!(
            "Kubernetes' Job {name} of an earlier launch exists; its pods run the job"
        ));
        // These tokens are revoked when the job is over.
        launch.token_ids = find_earlier_tokens(launch, &job).await;
    } else {
        launch.create_tokens().await?;
        create(&cluster, launch, &name, template).await?;
    }
    output::warn(format_args!("Kubernetes' Job is {name} in namespace {}", cluster.namespace));
    if launch.args.detach {
        return Ok(());
    }
    let early_end = steer::wait_for_early_end(&cluster, launch, &name, template.queue());
    let agents = async |state| find_agents(&cluster, &name, state).await;
    let how_to_end = format!(
        "Kubernetes' Job {name} continues, and `kubectl -n {} delete job {name}` ends it",
        cluster.namespace
    );
    let (result, may_be_ended) = follow_until_over(launch, early_end, agents, &how_to_end).await?;
    if may_be_ended {
        // A finished Job stays for a while, so that its pods' logs can be read.
        match cluster.get(Kind::Job, &name).await {
            Ok(Some(job)) if words::describe_end(&job).is_none() => delete_or_warn(&cluster, &job).await,
            Ok(_) => {}
            Err(error) => output::warn(format_args!("Kubernetes' Job {name} was not deleted: {error}")),
        }
        // Done even if a checkpoint has not reached the server: no agent is left that could upload it.
        launch.revoke_tokens().await;
        // The job may have been resumed just before its agents were ended.
        if let Ok(job) = read_job(launch).await
            && !job.state.is_final()
        {
            let how = format!("Kubernetes' Job {name} has ended");
            return Err(anyhow::Error::msg(launch.describe_early_end(&how, &job)));
        }
    }
    result
}

/// Returns the state of the job's agents. `state` is the job's final state, or `None` if the job is not over.
async fn find_agents(cluster: &Cluster, name: &str, state: Option<JobState>) -> anyhow::Result<Agents> {
    let Some(job) = cluster.get(Kind::Job, name).await? else { return Ok(Agents::Ended) };
    let (is_over, has_pods) = (words::describe_end(&job).is_some(), words::has_pods(&job));
    Ok(match state {
        None if is_over => Agents::Ended,
        // No pod exists that could upload a checkpoint.
        Some(_) if !has_pods && (is_over || words::is_suspended(&job)) => Agents::Ended,
        Some(state) if is_over || state == JobState::Cancelled => Agents::Idle,
        _ => Agents::Running,
    })
}

async fn delete_or_warn(cluster: &Cluster, job: &Value) {
    if let Err(error) = cluster.delete(Kind::Job, job).await {
        output::warn(format_args!("Kubernetes' Job was not deleted: {error}"));
    }
}

/// Whether an object belongs to this job.
fn belongs_to(object: &Value, job: &Job) -> bool {
    object["metadata"]["labels"][JOB_LABEL] == job.id.as_str()
}

/// Returns the Kubernetes Job of an earlier launch, if its pods can run the job. Deletes a Job that is over or incomplete.
async fn find_earlier_job(cluster: &Cluster, name: &str, launch: &Launch) -> anyhow::Result<Option<Value>> {
    let job = &launch.job;
    let Some(found) = cluster.get(Kind::Job, name).await? else { return Ok(None) };
    refuse_foreign(cluster, Kind::Job, &found, job)?;
    let is_being_deleted = found["metadata"]["deletionTimestamp"].is_string();
    let is_complete = cluster.get(Kind::Secret, name).await?.is_some_and(|secret| belongs_to(&secret, job));
    if is_complete && !is_being_deleted && words::describe_end(&found).is_none() {
        return Ok(Some(found));
    }
    output::warn(format_args!("Kubernetes' Job {name} of an earlier launch is removed first"));
    // The tokens are listed only in the Job's annotation, so they are revoked together with the Job. Until then, its pods may need the
    // tokens to upload a checkpoint.
    let tokens = find_earlier_tokens(launch, &found).await;
    cluster.remove(Kind::Job, &found).await?;
    tokens::revoke(&launch.api, &tokens).await;
    Ok(None)
}

fn refuse_foreign(cluster: &Cluster, kind: Kind, found: &Value, job: &Job) -> anyhow::Result<()> {
    if belongs_to(found, job) {
        return Ok(());
    }
    let name = found["metadata"]["name"].as_str().unwrap_or_default();
    Err(super::usage_error(format!(
        "namespace {} has a {kind:?} called {name} that does not belong to this job: delete it, or choose another --namespace",
        cluster.namespace
    )))
}

/// Returns the tokens of the agents of an earlier launch.
async fn find_earlier_tokens(launch: &Launch, job: &Value) -> Vec<String> {
    let ids = job["metadata"]["annotations"][TOKENS_ANNOTATION].as_str().unwrap_or_default();
    tokens::select_of_job(&launch.api, &launch.job, ids).await
}

/// Creates the objects. The Job is created suspended, and started after the other objects exist.
async fn create(
    cluster: &Cluster,
    launch: &mut Launch,
    name: &str,
    template: &Template,
) -> anyhow::Result<()> {
    let plan = Plan {
        name: name.to_owned(),
        job: launch.job.id.as_str(),
        launch: uuid::Uuid::new_v4().simple().to_string(),
        program: &launch.args.program,
        hosts: &launch.hosts,
        spec: &launch.job.spec,
        token_ids: &launch.token_ids,
        template,
    };
    let is_of_this_launch =
        |found: &Value| found["metadata"]["annotations"][LAUNCH_ANNOTATION] == plan.launch.as_str();
    let job = match cluster.create(Kind::Job, &plan.job()).await? {
        Created::New(job) => job,
        // This launch created the Job, but the response to the request was lost.
        Created::Exists(found) if is_of_this_launch(&found) => found,
        Created::Exists(found) => {
            refuse_foreign(cluster, Kind::Job, &found, &launch.job)?;
            return Err(super::usage_error(format!(
                "another `lockstep launch` has just started Kubernetes' Job {name}; launch again to follow it"
            )));
        }
    };
    let create_others = async {
        let owner = Some(&job);
        let secret = plan.secret(owner, Some(&launch.bundle))?;
        for (kind, object) in [(Kind::Service, plan.service(owner)), (Kind::Secret, secret)] {
            loop {
                match cluster.create(kind, &object).await? {
                    Created::New(_) => break,
                    Created::Exists(found) if is_of_this_launch(&found) => break,
                    // The object belongs to a deleted Job, and Kubernetes is about to delete it.
                    Created::Exists(found) => {
                        refuse_foreign(cluster, kind, &found, &launch.job)?;
                        cluster.remove(kind, &found).await?;
                    }
                }
            }
        }
        if template.queue().is_none() {
            cluster.patch_job(name, &steer::suspend_patch(false)).await?;
        }
        anyhow::Ok(())
    };
    let result = create_others.await;
    if result.is_err() {
        delete_or_warn(cluster, &job).await;
    }
    result
}

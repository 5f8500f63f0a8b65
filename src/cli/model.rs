//! `lockstep model`: registers checkpoints as versions of models.

use super::{
    age::age,
    api::{ServerArgs, parse_list},
    block_on,
    checkpoint_choice::choose,
    confirm::confirm,
    output, usage_error,
};
use lockstep_protocol::models::{Model, ModelVersion, SCHEME, alias_mistake, name_mistake};
use reqwest::Method;
use serde_json::{Value, json};

#[derive(clap::Subcommand)]
pub(crate) enum Action {
    /// Register a checkpoint of a finished job as the next version of a model; the first version creates the model
    Register {
        /// Name of the model
        model: String,
        /// The job's id, the start of its id, or its name
        job: String,
        /// best, latest, a step, or epoch and step (`2-54`)
        #[arg(long, default_value = "best")]
        checkpoint: String,
        /// Description of this version
        #[arg(long, value_name = "TEXT", default_value = "")]
        description: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// List the models with their newest versions
    List(ServerArgs),
    /// Show a model's versions, newest first
    Show {
        /// Name of the model
        model: String,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Move an alias such as `champion` to a version, or remove the alias
    Alias {
        /// Name of the model
        model: String,
        /// The alias, such as champion
        alias: String,
        /// Number of the version
        #[arg(required_unless_present = "remove")]
        version: Option<u32>,
        /// Remove the alias
        #[arg(long, conflicts_with = "version")]
        remove: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
    /// Remove a version that has no alias; its checkpoint stays with the job
    Remove {
        /// Name of the model
        model: String,
        /// Number of the version; it is not assigned again
        version: u32,
        /// Do not ask for confirmation; required without a terminal
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        server: ServerArgs,
    },
}

/// Runs the action.
///
/// # Errors
/// Exit status 2 if the model, version, job or checkpoint does not exist, or the server refuses the change.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    match action {
        Action::Register { model, job, checkpoint, description, server } => {
            let api = server.api()?;
            let version: ModelVersion = block_on(async {
                let job = api.find_trained_job(&job).await?;
                let chosen = choose(&api, &job, &checkpoint).await?;
                let new = json!({"name": model, "checkpoint": chosen.id, "description": description});
                api.post("/models", &new).await
            })?;
            let accuracy = version.accuracy_in_words().map(|words| format!(", validation accuracy {words}"));
            let text = format!(
                "{SCHEME}{}/{}: checkpoint {} of {}{}",
                version.model,
                version.version,
                version.checkpoint_name(),
                version.job_name,
                accuracy.unwrap_or_default()
            );
            output::print(server.json, &version, text)
        }
        Action::List(server) => {
            let api = server.api()?;
            let models: Vec<Model> = block_on(api.list("/models"))?;
            if server.json {
                return output::json(&models);
            }
            if models.is_empty() {
                return output::line(
                    "no models; register a checkpoint with `lockstep model register NAME JOB`",
                );
            }
            output::table(["MODEL", "NEWEST", "ALIASES", "ACCURACY", "JOB"], models.iter().map(row_of_model))
        }
        Action::Show { model, server } => {
            let api = server.api()?;
            let url = path(&model, "")?;
            let response: Value = block_on(async {
                match api.get(&url).await {
                    Err(error) => Err(api.explain_unknown_model(&model, error).await),
                    response => response,
                }
            })?;
            if server.json {
                return output::json(&response);
            }
            let versions: Vec<ModelVersion> = parse_list(&response, "versions")?;
            output::table(
                [
                    "VERSION",
                    "ALIASES",
                    "ACCURACY",
                    "CHECKPOINT",
                    "JOB",
                    "DATASET",
                    "REGISTERED",
                    "DESCRIPTION",
                ],
                versions.iter().map(row_of_version),
            )
        }
        Action::Alias { model, alias, version, remove, server } => {
            let url = alias_mistake(&alias).map_or_else(
                || path(&model, &format!("/aliases/{alias}")),
                |detail| Err(usage_error(format!("the alias {detail}"))),
            )?;
            let version = version.filter(|_| !remove);
            let (method, outcome) = match version {
                Some(version) => (Method::PUT, format!("is version {version}")),
                None => (Method::DELETE, "removed".to_owned()),
            };
            let body = version.map(|version| json!({ "version": version }));
            send(&server, &model, method, &url, body, &format!("{SCHEME}{model}@{alias} {outcome}"))
        }
        Action::Remove { model, version, yes, server } => {
            let url = path(&model, &format!("/versions/{version}"))?;
            let question = format!(
                "Remove {SCHEME}{model}/{version}? Its number is not assigned again; its checkpoint stays with the job."
            );
            confirm(yes, question, format_args!("{SCHEME}{model}/{version}"))?;
            let message = format!("{SCHEME}{model}/{version} removed; its checkpoint stays with the job");
            send(&server, &model, Method::DELETE, &url, None, &message)
        }
    }
}

/// Returns the URL path of a model.
///
/// # Errors
/// Exit status 2 if the name is invalid for a model, because it could lead to another path.
fn path(model: &str, rest: &str) -> anyhow::Result<String> {
    match name_mistake(model) {
        None => Ok(format!("/models/{model}{rest}")),
        Some(detail) => Err(usage_error(format!("the model's name {detail}"))),
    }
}

/// Sends a change of a model. Prints `message`, or the response as JSON.
fn send(
    server: &ServerArgs,
    model: &str,
    method: Method,
    path: &str,
    body: Option<Value>,
    message: &str,
) -> anyhow::Result<()> {
    let api = server.api()?;
    let response: Value = block_on(async {
        match api.request(method, path, body.as_ref()).await {
            Err(error) => Err(api.explain_unknown_model(model, error).await),
            Ok(response) => api.read(response).await,
        }
    })?;
    output::print(server.json, &response, message)
}

fn row_of_model(model: &Model) -> [String; 5] {
    let aliases = model.aliases.iter().map(|(alias, version)| format!("{alias}: {version}"));
    [
        model.name.clone(),
        model.newest.version.to_string(),
        aliases.collect::<Vec<_>>().join(", "),
        model.newest.accuracy_in_words().unwrap_or_default(),
        model.newest.job_name.clone(),
    ]
}

fn row_of_version(version: &ModelVersion) -> [String; 8] {
    let registrant = version.registered_by.as_ref().map(|who| format!(" by {who}"));
    [
        version.version.to_string(),
        version.aliases.join(", "),
        version.accuracy_in_words().unwrap_or_default(),
        version.checkpoint_name().to_owned(),
        version.job_name.clone(),
        version.dataset.clone(),
        format!("{} ago{}", age(version.registered_at), registrant.unwrap_or_default()),
        version.description.clone(),
    ]
}

//! Who is asked about models and data: an agent that has the files, and of those the one with the least to do.

use crate::{
    agents::{AskError, Online, Waiting},
    app::App,
};
use futures_util::future::join_all;
use lockstep_protocol::agent::{Answer, Question};
use std::time::Duration;

/// For looking whether files are there. An agent whose disk hangs is asked last.
const LOOK: Duration = Duration::from_secs(3);

/// Asks an agent and waits for the answer.
///
/// # Errors
/// Nobody is online or has the files, or the agent did not answer or refused.
pub(crate) async fn ask(app: &App, question: Question, patience: Duration) -> Result<Answer, AskError> {
    let waiting = begin(app, question).await?;
    app.agents.answer(waiting, patience).await
}

/// Sends a question to the agent that is best to answer it.
///
/// # Errors
/// Nobody is online, or nobody has the files.
pub(crate) async fn begin(app: &App, question: Question) -> Result<Waiting, AskError> {
    let agent = choose(app, &question).await?;
    Ok(app.agents.ask(&agent, question))
}

/// The agent that is best to answer a question.
///
/// # Errors
/// Nobody is online, or nobody has the files.
pub(crate) async fn choose(app: &App, question: &Question) -> Result<Online, AskError> {
    let mut online = app.agents.online();
    online.retain(|agent| agent.leaving.is_none());
    if online.len() > 1 {
        online = with_files(app, online, question.paths()).await?;
    }
    let load = |agent: &Online| {
        (
            // One that is there for a single job, or is to take no work, helps when nobody else can.
            agent.only_job.is_some() || app.agents.is_draining(&agent.row.id),
            app.agents.unanswered(agent.connection, question.is_long()),
            app.leases.slots_in_use(&agent.row.id).len(),
        )
    };
    online.into_iter().min_by_key(load).ok_or(AskError::NobodyOnline)
}

/// Those that have all of these files; those that do not say, when none has.
async fn with_files(app: &App, online: Vec<Online>, paths: Vec<String>) -> Result<Vec<Online>, AskError> {
    let looks = online.into_iter().map(|agent| {
        let question = Question::HasFiles { paths: paths.clone() };
        async {
            let waiting = app.agents.ask(&agent, question);
            let there = match app.agents.answer(waiting, LOOK).await {
                Ok(Answer::Files { there }) => Some(there),
                // Silent, gone, or of an older version.
                _ => None,
            };
            (agent, there)
        }
    });
    let (mut having, mut silent, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    let mut missing = None;
    for (agent, there) in join_all(looks).await {
        match there {
            Some(there) => match there.iter().position(|there| !there) {
                None => having.push(agent),
                Some(first) => {
                    asked.push(agent.row.name.clone());
                    missing = missing.or(Some(first));
                }
            },
            None => silent.push(agent),
        }
    }
    match (having.is_empty(), silent.is_empty(), missing) {
        (false, ..) => Ok(having),
        (true, true, Some(first)) => {
            Err(AskError::NobodyHasFiles { path: paths.get(first).cloned().unwrap_or_default(), asked })
        }
        _ => Ok(silent),
    }
}

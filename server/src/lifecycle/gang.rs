//! The end of an attempt whose ranks are on several agents. The attempt ends when the ranks have ended on all agents, so that no GPU memory
//! is in use when the next attempt starts. The end with the best explanation gives the reason.

use super::{
    EndOnAgent, JobRow, Refusal, end_lost_attempt, end_on_agent::best_explanation, reports::end_attempt,
    requeue,
};
use jiff::Timestamp;
use lockstep_protocol::stream::EventBody;

/// Records that the ranks of the live attempt have ended on an agent. When they have ended on all `agent_count` agents, the attempt ends.
pub fn record_end_on_agent(
    row: &mut JobRow,
    agent_count: usize,
    agent_id: &str,
    end: EndOnAgent,
    at: Timestamp,
) -> Result<Vec<EventBody>, Refusal> {
    let ends = &mut row.progress.ends;
    if ends.iter().any(|(known, _)| known == agent_id) {
        return Ok(Vec::new());
    }
    ends.push((agent_id.to_owned(), end));
    if ends.len() < agent_count {
        return Ok(Vec::new());
    }
    let Some(cause) = best_explanation(std::mem::take(ends).into_iter().map(|(_, end)| end).collect()) else {
        return Ok(Vec::new());
    };
    match cause {
        EndOnAgent::Lost(reason) => end_lost_attempt(row, &reason, at),
        EndOnAgent::LeftUnreported(reason) => requeue(row, &reason, at),
        EndOnAgent::Ended { ending, agent_leaving } => end_attempt(row, ending, agent_leaving.as_ref(), at),
    }
}

/// How the ranks of the live attempt have ended on an agent, while ranks on other agents have not. `None` if they have not ended.
pub fn find_end_on_agent<'a>(row: &'a JobRow, agent_id: &str) -> Option<&'a EndOnAgent> {
    row.progress.ends.iter().find(|(known, _)| known == agent_id).map(|(_, end)| end)
}

/// Whether the remaining ranks of the live attempt must end, because ranks on an agent have ended.
pub fn is_ending(row: &JobRow) -> bool {
    row.progress.ends.iter().any(|(_, end)| end.ends_others())
}

//! Which agents have the checkpoints of an attempt on disks of their own: notes in the attempt's folder on the server's disk. They outlive
//! the attempt, because the last checkpoint is uploaded after its end, and they are what an upload is checked against.
//!
//! Checkpoints are rank 0's agent's. When a rank is lost, the others write one of the last step, each machine on its disk: such a
//! checkpoint has a list of its own (`kept.json`) of the agents that reported it.

use lockstep_protocol::agent::FencingToken;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// Checkpoints of one attempt that have a list of their own, at most: an attempt ends when a rank is lost, so that there are one or two.
const MOST_LISTED: usize = 16;

/// An agent with a disk of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub(crate) agent_id: String,
    /// Its name then.
    pub(crate) agent: String,
    pub(crate) fencing_token: FencingToken,
}

/// By the checkpoint's name.
type HoldersByCheckpoint = BTreeMap<String, Vec<Holder>>;

fn folder(job_dir: &Path, attempt: u32) -> PathBuf {
    job_dir.join("attempts").join(attempt.to_string())
}

/// An agent's id is whatever it says: it is no part of a path.
fn holder_file(agent_id: &str) -> String {
    format!("apart-{}.json", hex::encode(&Sha256::digest(agent_id.as_bytes())[..8]))
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn write(path: &Path, note: &impl Serialize) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let temporary = path.with_extension("new");
    fs::write(&temporary, serde_json::to_vec(note)?)?;
    fs::rename(temporary, path)
}

impl Holder {
    /// The agent of rank 0, which has an attempt's checkpoints; none where its ranks write to the server's disk.
    pub(crate) fn of(job_dir: &Path, attempt: u32) -> Option<Self> {
        read(&folder(job_dir, attempt).join("holder.json"))
    }

    /// An agent that has ranks of an attempt, and a disk of its own.
    pub(crate) fn of_agent(job_dir: &Path, attempt: u32, agent_id: &str) -> Option<Self> {
        let found: Option<Self> = read(&folder(job_dir, attempt).join(holder_file(agent_id)));
        found.filter(|found| found.agent_id == agent_id)
    }

    /// Those that have this checkpoint: the one that uploads it first.
    pub(crate) fn all(job_dir: &Path, attempt: u32, name: &str) -> Vec<Self> {
        let kept: Option<HoldersByCheckpoint> = read(&folder(job_dir, attempt).join("kept.json"));
        let listed = kept.and_then(|mut kept| kept.remove(name));
        listed.unwrap_or_else(|| Self::of(job_dir, attempt).into_iter().collect())
    }

    /// Notes it: as that of the attempt's checkpoints where it has rank 0.
    ///
    /// # Errors
    /// The disk.
    pub(crate) fn note(&self, job_dir: &Path, attempt: u32, has_rank_0: bool) -> io::Result<()> {
        let folder = folder(job_dir, attempt);
        if has_rank_0 {
            write(&folder.join("holder.json"), self)?;
        }
        write(&folder.join(holder_file(&self.agent_id)), self)
    }

    /// Forgets all notes of an attempt that begins: they are of an earlier one with its number, made before an older database was put back.
    pub(crate) fn forget_all(job_dir: &Path, attempt: u32) {
        let folder = folder(job_dir, attempt);
        if let Err(error) = fs::remove_dir_all(&folder)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, folder = %folder.display(), "notes of an earlier attempt of this number stay");
        }
    }

    /// Whether a checkpoint has a list of its own.
    pub(crate) fn is_listed(job_dir: &Path, attempt: u32, name: &str) -> bool {
        let kept: Option<HoldersByCheckpoint> = read(&folder(job_dir, attempt).join("kept.json"));
        kept.is_some_and(|kept| kept.contains_key(name))
    }

    /// Adds it to a checkpoint's list, in front where it is to upload it.
    ///
    /// # Errors
    /// The disk.
    pub(crate) fn list(self, job_dir: &Path, attempt: u32, name: &str, in_front: bool) -> io::Result<()> {
        let path = folder(job_dir, attempt).join("kept.json");
        let mut kept: HoldersByCheckpoint = read(&path).unwrap_or_default();
        if kept.len() >= MOST_LISTED && !kept.contains_key(name) {
            return Ok(());
        }
        let holders = kept.entry(name.to_owned()).or_default();
        if !holders.contains(&self) {
            holders.insert(if in_front { 0 } else { holders.len() }, self);
        }
        write(&path, &kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_checkpoints_of_an_attempt_have_a_list_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let holder =
            |agent: &str| Holder { agent_id: agent.into(), agent: agent.into(), fencing_token: 1.into() };
        let list = |agent: &str, name: &str| holder(agent).list(dir.path(), 1, name, false).unwrap();
        for n in 0..=MOST_LISTED {
            list("a", &format!("1-{n}"));
        }
        let is_listed = |n: usize| Holder::is_listed(dir.path(), 1, &format!("1-{n}"));
        assert!((0..MOST_LISTED).all(is_listed) && !is_listed(MOST_LISTED));
        // A list that is there takes further agents.
        list("b", "1-0");
        assert_eq!(Holder::all(dir.path(), 1, "1-0"), [holder("a"), holder("b")]);
        // An attempt that is given this number anew has none of them.
        holder("a").note(dir.path(), 1, true).unwrap();
        Holder::forget_all(dir.path(), 1);
        assert_eq!((Holder::all(dir.path(), 1, "1-0"), Holder::of(dir.path(), 1)), (Vec::new(), None));
    }
}

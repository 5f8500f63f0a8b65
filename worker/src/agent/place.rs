//! The paths of a job's folder and of its dataset on this machine.

use super::state_dir::{StateDir, StoredAttempt};
pub(super) use crate::checkpoint::OwnDiskNote;
use lockstep_protocol::agent::{MARK, StartAttempt};
use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

/// The agent's options for the paths of the server's datasets on this machine (`--dataset`, `--path-map`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Datasets {
    /// Paths by the dataset's name on the server.
    pub by_name: Vec<(String, PathBuf)>,
    /// Folders of the server and their counterparts on this machine. The longest matching prefix takes precedence.
    pub by_prefix: Vec<(PathBuf, PathBuf)>,
}

impl Datasets {
    /// The path on this machine of the dataset `name`, which the server has at `path`. `None` if no option matches.
    pub(super) fn local_path(&self, name: &str, path: &str) -> Option<PathBuf> {
        if let Some((_, local_path)) = self.by_name.iter().find(|(known, _)| known == name) {
            return Some(local_path.clone());
        }
        let path = Path::new(path);
        let matching = self.by_prefix.iter().filter_map(|(server_folder, local_folder)| {
            let rest = path.strip_prefix(server_folder).ok()?;
            // A path that leaves the folder with `..` does not match.
            let is_below = rest.components().all(|part| matches!(part, Component::Normal(_)));
            is_below.then(|| (server_folder.components().count(), local_folder.join(rest)))
        });
        matching.max_by_key(|(depth, _)| *depth).map(|(_, local_path)| local_path)
    }
}

/// Chooses the job's folder, and creates the folder of the attempt. The server's own folder is used only if this agent
/// shares the server's disk: the agent must read the random mark that the server has just written there, and be able to
/// write to the same folder. Equal paths do not prove a shared disk. Locks do not either, because some network file
/// systems do not propagate locks. The result says whether the folder was created; the attempt is returned in any case,
/// so that it can be declined.
pub(super) fn choose_job_dir(
    state_dir: &StateDir,
    mut start: StartAttempt,
) -> (StoredAttempt, io::Result<()>) {
    if let Some(job_dir) = start.job_dir.clone().map(PathBuf::from)
        && has_servers_disk(state_dir, &job_dir, start.files.mark.as_deref())
    {
        let stored = StoredAttempt { start, job_dir };
        match fs::create_dir_all(stored.attempt_dir()) {
            Ok(()) => return (stored, Ok(())),
            Err(error) => {
                tracing::error!(%error, dir = %stored.attempt_dir().display(), "using the agent's own folder instead");
            }
        }
        start = stored.start;
    }
    let job_dir = state_dir.job_dir(&start.attempt);
    if let Some(id) = &start.files.pretrained {
        start.spec.model.pretrained = Some(pretrained_dir(&job_dir, id).to_string_lossy().into_owned());
    }
    let note = OwnDiskNote { attempt: start.attempt.clone(), has_rank_0: start.has_rank_0() };
    let stored = StoredAttempt { start, job_dir };
    let created = fs::create_dir_all(stored.attempt_dir()).and_then(|()| note.write(&stored.job_dir));
    (stored, created)
}

/// The folder for a checkpoint of another job, from which this job starts.
pub(super) fn pretrained_dir(job_dir: &Path, id: &str) -> PathBuf {
    job_dir.join("pretrained").join(id)
}

/// Whether the folder of an attempt is on a disk that the server does not share.
pub(super) fn is_own_disk(stored: &StoredAttempt) -> bool {
    OwnDiskNote::read(&stored.job_dir).is_some()
}

fn has_servers_disk(state_dir: &StateDir, job_dir: &Path, mark: Option<&str>) -> bool {
    match mark {
        Some(mark) => fs::read_to_string(job_dir.join(MARK)).is_ok_and(|found| found == mark),
        // The server's disk is full, so it could not write the mark. Its lock shows whether it runs on this machine.
        None => state_dir.server_holds_lock() == Some(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_protocol::{agent::StartFiles, spec::JobSpec};

    fn start(job_dir: &Path, mark: Option<&str>) -> StartAttempt {
        StartAttempt {
            job_dir: Some(job_dir.to_string_lossy().into_owned()),
            files: StartFiles { mark: mark.map(str::to_owned), ..StartFiles::default() },
            ..StartAttempt::local(JobSpec::default(), "/none", 1)
        }
    }

    /// An equal path is no proof. The agent must read the server's mark, and be able to write to the folder.
    #[test]
    fn the_servers_folder_is_used_if_its_mark_is_readable_and_it_is_writable() {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = StateDir::open(&dir.path().join("agent")).unwrap();
        let job = dir.path().join("job");
        let is_own = |mark| {
            let (stored, created) = choose_job_dir(&state_dir, start(&job, mark));
            created.unwrap();
            assert!(stored.attempt_dir().is_dir());
            assert_eq!(is_own_disk(&stored), stored.job_dir != job);
            is_own_disk(&stored)
        };
        assert!(is_own(Some("word")), "the server's folder does not exist here");
        assert!(!job.exists(), "the folder is not created");
        fs::create_dir(&job).unwrap();
        assert!(is_own(Some("word")));
        fs::write(job.join(MARK), "another").unwrap();
        assert!(is_own(Some("word")));
        assert!(is_own(None), "no mark, and no lock of a server on this machine");
        fs::write(job.join("attempts"), "").unwrap();
        fs::write(job.join(MARK), "word").unwrap();
        assert!(is_own(Some("word")), "no attempt can be written there, even as root");
        fs::remove_file(job.join("attempts")).unwrap();
        assert!(!is_own(Some("word")));
        // A server whose disk is full cannot write a mark, but its lock shows that it is on this machine.
        let lock = dir.path().join("server.lock");
        let locked = fs::File::create(&lock).unwrap();
        locked.lock().unwrap();
        state_dir.record_server(Some(&lock));
        assert!(!is_own(None));
        drop(locked);
        assert!(is_own(None));
    }

    #[test]
    fn a_dataset_is_mapped_by_its_name_or_by_a_folder_prefix() {
        let datasets = Datasets {
            by_name: vec![("flowers".into(), "/here/flowers".into())],
            by_prefix: vec![("/data".into(), "/mnt/a".into()), ("/data/fast".into(), "/nvme".into())],
        };
        for (name, path, here) in [
            ("flowers", "/data/flowers", "/here/flowers"),
            ("cars", "/data/cars", "/mnt/a/cars"),
            ("cars", "/data/fast/cars", "/nvme/cars"),
            ("cars", "/data", "/mnt/a"),
        ] {
            assert_eq!(datasets.local_path(name, path), Some(PathBuf::from(here)), "{name} {path}");
        }
        for path in ["/database/cars", "/data/../etc", "/elsewhere"] {
            assert_eq!(datasets.local_path("cars", path), None, "{path}");
        }
    }
}

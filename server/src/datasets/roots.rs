//! Folders that may contain datasets and weights (`serve --dataset-root`). A person who registers a folder sees its pictures and trains
//! on them with the rights of the agent, and a person who names weights learns whether the file exists. So members may only name paths
//! below the roots. Without roots, only admins may name paths. On a server of one person, the first token is an admin's.

use crate::{auth::access::Caller, config::ServeConfig};
use lockstep_protocol::{
    agent::{self, AllowedFolders},
    dataset::UPLOADS,
    pattern::has_brace,
};
use std::{
    path::{Component, Path, PathBuf},
    time::Duration,
};

/// Maximum number of symbolic links that are followed in a path. Linux has the same limit.
const MAX_LINKS: usize = 40;
/// Time limit for following links before files are used. After it, the check is skipped, so that jobs do not wait for a file system that
/// does not respond. The process that opens the files checks their links, too.
const LINKS_TIMEOUT: Duration = Duration::from_secs(3);
/// The error for weights in the data directory, as the predicate of a sentence.
const OWN_DATA: &str = "is a path in the server's own data directory, which also holds private weights: give the checkpoint's id instead";
/// Name of the file of weights in a folder.
const WEIGHTS: &str = "model.safetensors";
const ALTERNATIVE: &str = "a checkpoint's id is always allowed";

/// A folder of the configuration.
#[derive(Debug, Clone)]
struct Folder {
    /// The absolute path, as given.
    given: PathBuf,
    /// The path with its links resolved on this machine.
    resolved: PathBuf,
}

impl Folder {
    fn new(path: &Path) -> Self {
        let given = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let resolved = resolve_links(&given);
        Self { given, resolved }
    }

    /// Whether a path is this folder or below it. `/data2` is not below `/data`.
    fn contains(&self, path: &Path) -> bool {
        path.starts_with(&self.given) || path.starts_with(&self.resolved)
    }
}

/// The folders that may contain datasets.
#[derive(Debug, Clone)]
pub(crate) struct DatasetRoots {
    roots: Vec<Folder>,
    /// The folder into which the server unpacks the dataset that comes with the program.
    bundled: Option<PathBuf>,
    /// The folder into which the server unpacks uploads.
    pub(crate) uploads: PathBuf,
    /// The server's data directory.
    data_dir: Folder,
}

impl DatasetRoots {
    pub(crate) fn new(config: &ServeConfig) -> Self {
        let data_dir = Folder::new(&config.data_dir);
        let bundled =
            config.bundled.as_ref().map(|bundled| data_dir.resolved.join("datasets").join(bundled.name));
        let uploads = data_dir.resolved.join(UPLOADS);
        let roots = config.dataset_roots.iter().map(|root| Folder::new(root)).collect();
        Self { roots, bundled, uploads, data_dir }
    }

    /// Whether a caller may name paths at all.
    pub(crate) fn may_name(&self, caller: &Caller) -> bool {
        !self.roots.is_empty() || caller.sees_all()
    }

    /// Checks that a caller may name this path. Its links are resolved on this machine. [`DatasetRoots::check_found`] checks the path
    /// that the machine with the files resolves.
    ///
    /// # Errors
    /// The path is not allowed. The text names the allowed folders.
    pub(crate) async fn check_requested(&self, path: &str, caller: &Caller) -> Result<(), String> {
        if self.bundled.as_deref() == Some(Path::new(path)) {
            return Ok(());
        }
        if has_parent_after_brace(Path::new(path)) {
            return Err("must not have .. after a {; write the folder's path without ..".into());
        }
        if self.roots.is_empty() {
            if caller.sees_all() {
                return Ok(());
            }
            return Err("can be registered by admins only: this server names no folders that datasets may come from \
                 (`lockstep serve --dataset-root DIR`); upload a zip file instead, on the page Datasets or from Python"
                .into());
        }
        let resolved = resolve_in_background(path.into()).await;
        if self.covers(&resolved) {
            return Ok(());
        }
        // The target of a link is named only for links below a root, because for other links it would reveal which paths exist.
        if resolved != Path::new(path) && self.covers(&normalize(Path::new(path))) {
            return Err(self.refusal(&format!("it is {} here, which", resolved.display())));
        }
        Err(self.refusal("it"))
    }

    /// Checks that a caller may name this file of weights. The error does not reveal whether the file exists.
    ///
    /// # Errors
    /// The path is not allowed. The text says what can be given instead.
    pub(crate) async fn check_weights(&self, path: &str, caller: &Caller) -> Result<(), String> {
        let targets = weights_targets(path).await;
        if !caller.sees_all() && targets.iter().any(|target| self.is_in_data_dir(target)) {
            return Err(OWN_DATA.into());
        }
        if self.roots.is_empty() {
            if caller.sees_all() {
                return Ok(());
            }
            return Err(format!(
                "is a path, which only admins may give: this server names no folders that files may come from \
                 (`lockstep serve --dataset-root DIR`); {ALTERNATIVE}"
            ));
        }
        self.check_targets(path, &targets)
    }

    /// Checks a job's path of weights again when the job starts, because a link may have been made after its submission.
    ///
    /// # Errors
    /// Same as [`DatasetRoots::check_weights`].
    pub(crate) async fn check_weights_again(&self, path: &str) -> Result<(), String> {
        if self.roots.is_empty() {
            return Ok(());
        }
        match tokio::time::timeout(LINKS_TIMEOUT, weights_targets(path)).await {
            Ok(targets) => self.check_targets(path, &targets),
            Err(_) => Ok(()),
        }
    }

    fn check_targets(&self, path: &str, targets: &[PathBuf]) -> Result<(), String> {
        if !self.names_data_dir(path) && targets.iter().any(|target| self.is_in_data_dir(target)) {
            return Err(OWN_DATA.into());
        }
        if targets.iter().all(|target| self.covers(target)) {
            return Ok(());
        }
        Err(format!("{}; {ALTERNATIVE}", self.refusal(&format!("{path}, or where its links lead,"))))
    }

    /// The folders in which the file of weights at `path` may be, after its links are resolved on the machine that reads it. Only a literal
    /// path may be in the data directory. `None` if every folder is allowed.
    pub(crate) fn allowed_weights_folders(&self, path: &str) -> Option<AllowedFolders> {
        let data_dir = self.data_dir.given.display().to_string();
        let except = if self.names_data_dir(path) { Vec::new() } else { vec![data_dir] };
        self.allowed_folders().map(|allowed| AllowedFolders { except, ..allowed })
    }

    /// The folders in which datasets may be, on the machine that reads them. `None` if every folder is allowed.
    pub(crate) fn allowed_folders(&self) -> Option<AllowedFolders> {
        let below = || AllowedFolders { below: self.root_names(), except: Vec::new() };
        (!self.roots.is_empty()).then(below)
    }

    /// Same as [`DatasetRoots::allowed_folders`], for a dataset that is to be registered. `None` also for the bundled dataset and for
    /// uploads.
    pub(crate) fn allowed_folders_for_new(&self, path: &str) -> Option<AllowedFolders> {
        self.allowed_folders().filter(|_| {
            self.bundled.as_deref() != Some(Path::new(path)) && self.upload_folder(path).is_none()
        })
    }

    /// Checks that the files of a registered dataset may still be used. The path had no links when it was registered, but a link that was
    /// made later may lead elsewhere.
    ///
    /// # Errors
    /// The path leads out of the allowed folders.
    pub(crate) async fn check_registered(&self, path: &str) -> Result<(), String> {
        if self.roots.is_empty() {
            return Ok(());
        }
        match tokio::time::timeout(LINKS_TIMEOUT, resolve_in_background(path.into())).await {
            Ok(target) if target != normalize(Path::new(path)) && !self.covers(&target) => {
                Err(self.refusal(&format!("{path}, or where its links lead,")))
            }
            _ => Ok(()),
        }
    }

    /// Whether a path without links is in the data directory.
    fn is_in_data_dir(&self, path: &Path) -> bool {
        path.starts_with(&self.data_dir.resolved)
    }

    /// Whether a path names the data directory literally, without links and `..`. Only admins may give such a path, so it stays
    /// allowed when a job starts. A link into the data directory is refused, because anybody may have made it later.
    fn names_data_dir(&self, path: &str) -> bool {
        let path = Path::new(path);
        self.data_dir.contains(path) && path.components().all(|part| part != Component::ParentDir)
    }

    /// Checks that files which a machine found at `path` may be used. The path has no links.
    ///
    /// # Errors
    /// The path is not allowed. The text names the allowed folders.
    pub(crate) fn check_found(&self, path: &str) -> Result<(), String> {
        let path_found = normalize(Path::new(path));
        let is_unpacked = self.bundled.as_ref() == Some(&path_found) || self.upload_folder(path).is_some();
        let is_below = self.covers(&path_found) && !has_parent_after_brace(Path::new(path));
        if self.roots.is_empty() || is_unpacked || is_below {
            return Ok(());
        }
        Err(self.refusal(&format!("it is {path} on the machine that has it, which")))
    }

    /// The folder into which the upload that contains this path was unpacked. `None` if the path is in no upload.
    pub(crate) fn upload_folder(&self, path: &str) -> Option<PathBuf> {
        let below = Path::new(path).strip_prefix(&self.uploads).ok()?;
        let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
        let folder = below.components().next().filter(|_| is_plain)?;
        Some(self.uploads.join(folder))
    }

    /// Whether a path is a root or below a root.
    fn covers(&self, path: &Path) -> bool {
        self.roots.iter().any(|root| root.contains(path))
    }

    /// The error "`what` is not below a folder ...". `what` is the subject of the sentence.
    fn refusal(&self, what: &str) -> String {
        agent::refusal(what, &self.root_names())
    }

    fn root_names(&self) -> Vec<String> {
        self.roots.iter().map(|root| root.given.display().to_string()).collect()
    }
}

/// A path of weights with its links resolved, and the resolved path of the file that is read if the path is a folder. Paths that do not
/// exist are resolved, too, so that a refusal does not reveal which paths exist.
async fn weights_targets(path: &str) -> [PathBuf; 2] {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let file = path.join(WEIGHTS);
    [resolve_in_background(path).await, resolve_in_background(file).await]
}

/// Same as [`resolve_links`], on a separate thread, because a file system that does not respond must not delay other requests.
async fn resolve_in_background(path: PathBuf) -> PathBuf {
    // A failed task gives an empty path, which no root contains.
    tokio::task::spawn_blocking(move || resolve_links(&path)).await.unwrap_or_default()
}

/// Whether `..` follows a brace of a pattern. The text in braces may contain `/`, and then `..` leads to an unexpected folder.
fn has_parent_after_brace(path: &Path) -> bool {
    let mut from_brace = path.components().skip_while(|part| !has_brace(part.as_os_str()));
    from_brace.any(|part| part == Component::ParentDir)
}

/// A path without `.`, `..` and links, as far as the path exists on this machine. A link is followed even if its target does not exist.
/// Otherwise a link below a root would reveal which paths exist elsewhere.
pub(crate) fn resolve_links(path: &Path) -> PathBuf {
    let parts =
        |path: &Path| -> Vec<_> { path.components().rev().map(|part| part.as_os_str().to_owned()).collect() };
    let (mut resolved, mut remaining, mut link_count) = (PathBuf::new(), parts(path), 0);
    while let Some(part) = remaining.pop() {
        Path::new(&part).components().for_each(|part| push(&mut resolved, part));
        if link_count < MAX_LINKS
            && let Ok(target) = resolved.read_link()
        {
            link_count += 1;
            resolved.pop();
            remaining.extend(parts(&target));
        }
    }
    resolved
}

/// A path without `.` and `..`.
fn normalize(path: &Path) -> PathBuf {
    let mut normalized = PathBuf::new();
    path.components().for_each(|part| push(&mut normalized, part));
    normalized
}

fn push(path: &mut PathBuf, part: Component<'_>) {
    match part {
        Component::ParentDir => {
            path.pop();
        }
        Component::CurDir => {}
        other => path.push(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn roots(folders: &[&Path]) -> DatasetRoots {
        let mut config = ServeConfig::new("data");
        config.dataset_roots = folders.iter().map(|folder| folder.to_path_buf()).collect();
        DatasetRoots::new(&config)
    }

    #[tokio::test]
    async fn patterns_with_parent_folders_are_refused() {
        let roots = roots(&[Path::new("/data")]);
        for path in ["/data/{a/b,.}/../../secret/x.tar", "/data/{a,b}/../../secret/x.tar"] {
            assert!(
                roots.check_requested(path, &Caller::anybody()).await.unwrap_err().contains(".."),
                "{path}"
            );
            assert!(roots.check_found(path).is_err(), "{path}");
        }
        assert!(roots.check_requested("/data/{000..127}.tar", &Caller::anybody()).await.is_ok());
    }

    #[tokio::test]
    async fn as_many_links_are_followed_as_the_system_follows() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: String| dir.path().join(name);
        std::fs::create_dir_all(path("root".into())).unwrap();
        std::fs::create_dir_all(path("outside".into())).unwrap();
        // `n` leads to `outside` through `n` links.
        symlink(path("outside".into()), path("root/1".into())).unwrap();
        for n in 2..=MAX_LINKS + 1 {
            symlink(path(format!("root/{}", n - 1)), path(format!("root/{n}"))).unwrap();
        }
        let allowed = roots(&[&path("root".into())]);
        let ask = async |links: usize| {
            allowed.check_requested(path(format!("root/{links}")).to_str().unwrap(), &Caller::anybody()).await
        };
        let why = ask(MAX_LINKS).await.expect_err("it leads outside");
        assert!(why.contains("--dataset-root"), "{why}");
        assert!(std::fs::read_dir(path(format!("root/{MAX_LINKS}"))).is_ok());
        // A path with one more link is not followed here, and the system cannot open it.
        assert!(
            ask(MAX_LINKS + 1).await.is_ok()
                && std::fs::read_dir(path(format!("root/{}", MAX_LINKS + 1))).is_err()
        );
    }

    #[tokio::test]
    async fn paths_are_compared_with_roots_after_resolving_links() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for folder in ["root/set", "root-other/set", "outside", "real"] {
            std::fs::create_dir_all(path(folder)).unwrap();
        }
        symlink(path("outside"), path("root/link")).unwrap();
        symlink(path("root/set"), path("way-in")).unwrap();
        symlink(path("real"), path("linked-root")).unwrap();
        let allowed = roots(&[&path("root"), &path("linked-root")]);
        let ask =
            async |path: PathBuf| allowed.check_requested(path.to_str().unwrap(), &Caller::anybody()).await;
        for good in [
            "root",
            "root/set",
            "root/not-here/train-{000..127}.tar",
            "root/./set/../set",
            "way-in",
            "linked-root/x",
            "real/x",
        ] {
            assert_eq!(ask(path(good)).await, Ok(()), "{good}");
        }
        for bad in [
            "root-other/set",
            "outside",
            "root/link",
            "root/link/x",
            "root/../outside",
            "root/set/../../outside",
            ".",
        ] {
            let why = ask(path(bad)).await.expect_err(bad);
            assert!(why.contains(path("root").to_str().unwrap()) && why.contains("--dataset-root"), "{why}");
        }
        assert!(ask("/".into()).await.is_err() && ask("/etc".into()).await.is_err());
        // Paths reported by the machine with the files, which may not exist on this machine.
        assert_eq!(allowed.check_found(path("real/x").to_str().unwrap()), Ok(()));
        assert!(allowed.check_found(path("outside").to_str().unwrap()).is_err());
        assert!(allowed.check_found(path("root/../outside").to_str().unwrap()).is_err());
    }

    #[tokio::test]
    async fn refusals_do_not_reveal_which_files_exist_outside_the_roots() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::create_dir_all(path("root")).unwrap();
        std::fs::write(path("there"), "weights").unwrap();
        symlink(path("there"), path("link")).unwrap();
        symlink(path("there"), path("root/link")).unwrap();
        let allowed = roots(&[Path::new(&path("root"))]);
        let anybody = Caller::anybody();
        for known in ["there", "link"] {
            let same = |why: String| why.replace(&path(known), &path("missing"));
            for name in ["missing", known] {
                assert!(allowed.check_weights(&path(name), &anybody).await.is_err(), "{name}");
            }
            let (weights, folder) = (
                allowed.check_weights(&path(known), &anybody).await,
                allowed.check_requested(&path(known), &anybody).await,
            );
            assert_eq!(weights.map_err(same), allowed.check_weights(&path("missing"), &anybody).await);
            assert_eq!(folder.map_err(same), allowed.check_requested(&path("missing"), &anybody).await);
        }
        assert!(allowed.check_weights(&path("root/link"), &anybody).await.is_err(), "it leads outside");
        // A link below a root is refused with the same message, whether its target exists or not.
        symlink(path("missing"), path("root/dangling")).unwrap();
        let link = allowed.check_requested(&path("root/link"), &anybody).await.unwrap_err();
        let dangling = allowed.check_requested(&path("root/dangling"), &anybody).await.unwrap_err();
        assert_eq!(link.replace(&path("there"), &path("missing")), dangling);
        let link = allowed.check_weights(&path("root/link"), &anybody).await.unwrap_err();
        let dangling = allowed.check_weights(&path("root/dangling"), &anybody).await.unwrap_err();
        assert_eq!(link.replace(&path("root/link"), &path("root/dangling")), dangling);
        // A link to itself does not cause an endless loop.
        symlink(path("root/loop"), path("root/loop")).unwrap();
        assert_eq!(
            resolve_links(Path::new(&path("root/loop"))),
            resolve_links(Path::new(&path("root"))).join("loop")
        );
        assert_eq!(allowed.check_weights(&path("root/w.safetensors"), &anybody).await, Ok(()));
    }
}

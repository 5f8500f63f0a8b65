//! `lockstep migrate`, `backup` and `restore`: operations on a database that need no running server.

use super::{block_on, file, output, usage_error};
use lockstep_protocol::numbers::plural;
use lockstep_server::{
    ServeConfig,
    store::{
        Location,
        backup::{BackupError, Summary, backup, restore},
    },
};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Options that name the database.
#[derive(clap::Args)]
pub(crate) struct DatabaseArgs {
    /// The server's data directory
    #[arg(long, value_name = "DIR", env = "LOCKSTEP_DATA_DIR", default_value = "lockstep-data")]
    data_dir: PathBuf,
    /// Database: sqlite://PATH or postgres://USER@HOST/NAME [default: sqlite://<data-dir>/lockstep.db]
    #[arg(long, value_name = "URL", env = "LOCKSTEP_DATABASE", hide_env_values = true)]
    database: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl DatabaseArgs {
    fn location(&self) -> anyhow::Result<Location> {
        let mut config = ServeConfig::new(&self.data_dir);
        config.database.clone_from(&self.database);
        Location::of(&config).map_err(|e| usage_error(e.to_string()))
    }
}

/// Back up a database into one file; the server may be running
///
/// Checkpoints and uploaded pictures are not included. They are folders in the data directory's `jobs` and `datasets/uploads` that never
/// change once written: copy them with any tool, at any time.
#[derive(clap::Args)]
pub(crate) struct BackupArgs {
    /// File for the backup
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    database_args: DatabaseArgs,
}

/// Restore a backup into a new, empty database (SQLite or Postgres)
#[derive(clap::Args)]
pub(crate) struct RestoreArgs {
    /// File that `lockstep backup` wrote
    file: PathBuf,
    #[command(flatten)]
    database_args: DatabaseArgs,
}

/// Opens the database, which applies migrations, and closes it.
///
/// # Errors
/// Exit status 2 if the database cannot be opened or a server uses it.
pub(crate) fn migrate(args: DatabaseArgs) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    let location = args.location()?;
    fs::create_dir_all(&args.data_dir)?;
    block_on(async {
        location.open().await.map_err(|e| usage_error(e.to_string()))?.close().await;
        let value = json!({ "database": location.to_string() });
        output::print(args.json, &value, format_args!("{location} is up to date"))
    })
}

/// Writes a backup.
///
/// # Errors
/// Exit status 2 if the database does not exist, 1 if it cannot be read or the file cannot be written.
pub(crate) fn back_up(args: BackupArgs) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    let location = args.database_args.location()?;
    file::check_output(&args.output)?;
    if let Location::Sqlite(database) = &location
        && database.try_exists().is_ok_and(|exists| !exists)
    {
        let mut message = file::missing_path_message(database);
        let DatabaseArgs { data_dir, database: named, .. } = &args.database_args;
        if named.is_none() && data_dir.join("server.lock").exists() {
            message += ": the server of this data directory may use another database, such as Postgres; if so, name it with \
                        --database or LOCKSTEP_DATABASE";
        }
        return Err(usage_error(message));
    }
    if let Location::Sqlite(database) = &location
        && is_file_of(database, &args.output)
    {
        let (path, database) = (args.output.display(), database.display());
        return Err(usage_error(format!(
            "{path} is the database {database}, or one of its files; name another file"
        )));
    }
    // An existing backup may be the only copy of rows that have been deleted since.
    if !args.force && args.output.symlink_metadata().is_ok() {
        return Err(usage_error(format!(
            "{} exists already: name another file, or replace it with --force",
            args.output.display()
        )));
    }
    let summary = block_on(async { backup(&location, &args.output).await.map_err(with_exit_status) })?;
    report("backed up", &location, &args.output, &summary, args.database_args.json)?;
    let data_dir = args.database_args.data_dir.display();
    output::warn(format_args!(
        "the backup has no weights and no uploaded pictures: copy also {data_dir}/jobs and {data_dir}/datasets/uploads. Before you start \
         a server with the restored database, put `jobs` into its data directory, and `uploads` at the same absolute path as now"
    ));
    Ok(())
}

/// Reads a backup into an empty database.
///
/// # Errors
/// Exit status 2 if the file is not a backup or the database is not empty, 1 if a write fails. An error changes nothing.
pub(crate) fn run_restore(args: RestoreArgs) -> anyhow::Result<()> {
    lockstep_server::keep_files_private();
    let location = args.database_args.location()?;
    if args.file.try_exists().is_ok_and(|exists| !exists) {
        return Err(usage_error(file::missing_path_message(&args.file)));
    }
    let data_dir = &args.database_args.data_dir;
    let is_new = !data_dir.exists();
    fs::create_dir_all(data_dir)?;
    let restored = block_on(async { restore(&location, &args.file).await.map_err(with_exit_status) });
    if restored.is_err() && is_new {
        // Fails if the folder has files.
        let _ = fs::remove_dir(data_dir);
    }
    let summary = restored?;
    report("restored", &location, &args.file, &summary, args.database_args.json)?;
    output::warn(format_args!(
        "a backup has no weights and no uploaded pictures: before `lockstep serve` starts, copy the folder `jobs` of the old data \
         directory to {}/jobs, and its folder `datasets/uploads` to its old absolute path",
        data_dir.display()
    ));
    // The server's own agent has its identity in the data directory.
    let has_machines = summary.tables.iter().any(|(name, rows)| name == "agents" && *rows > 0);
    if has_machines && !args.database_args.data_dir.join("agent").exists() {
        output::warn(
            "if the backup has a machine `local`, it stays offline, because the agent that `lockstep serve` starts here joins as a new \
             machine: `lockstep machine remove ID` removes the earlier one",
        );
    }
    Ok(())
}

/// Whether `path` leads to a file of an SQLite database, possibly by another name: the database itself, or a file that SQLite or Lockstep
/// (`.lock`) keeps next to it.
fn is_file_of(database: &Path, path: &Path) -> bool {
    ["", "-wal", "-shm", "-journal", ".lock"].iter().any(|suffix| {
        let mut database_file = database.as_os_str().to_owned();
        database_file.push(suffix);
        let database_file = PathBuf::from(database_file);
        let id = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
        let folder = |path: &Path| fs::canonicalize(file::folder_of(path)).ok();
        let is_same_file = id(&database_file).is_some() && id(&database_file) == id(path);
        // A file that does not exist yet has no inode, so its folder and its name are compared.
        is_same_file
            || (database_file.file_name() == path.file_name()
                && folder(&database_file).is_some()
                && folder(&database_file) == folder(path))
    })
}

fn with_exit_status(error: BackupError) -> anyhow::Error {
    match error {
        BackupError::Database(_) | BackupError::Io(_) => error.into(),
        other => usage_error(other.to_string()),
    }
}

fn report(
    action: &str,
    location: &Location,
    file: &Path,
    summary: &Summary,
    json: bool,
) -> anyhow::Result<()> {
    let file = file.display().to_string();
    let value = json!({
        "database": location.to_string(), "file": file, "tables": summary.tables, "size_bytes": summary.size_bytes,
    });
    let rows: u64 = summary.tables.iter().map(|(_, rows)| rows).sum();
    let jobs = summary.tables.iter().find(|(name, _)| name == "jobs").map_or(0, |(_, rows)| *rows);
    let (jobs, rows, mb) = (plural(jobs, "job"), plural(rows, "row"), summary.size_bytes as f64 / 1e6);
    output::print(json, &value, format_args!("{action} {jobs} ({rows}, {mb:.1} MB): {location}, {file}"))
}

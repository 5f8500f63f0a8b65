//! The migrations that create a database's tables, embedded at compile time.
//!
//! sqlx's macro `migrate!` does the same from a folder, but builds both database drivers a second time for the compiler, which
//! adds half a minute to each clean build.

use sqlx::{
    SqlSafeStr,
    migrate::{Migration, MigrationType, Migrator},
};
use std::sync::LazyLock;

/// Version and description (the name of a file in `migrations/`), and statements (its content).
type File = (i64, &'static str, &'static str);

const SQLITE: [File; 1] = [(100, "tables", include_str!("../../../migrations/sqlite/0100_tables.sql"))];
const POSTGRES: [File; 1] = [(100, "tables", include_str!("../../../migrations/postgres/0100_tables.sql"))];

pub(super) static OF_SQLITE: LazyLock<Migrator> = LazyLock::new(|| migrator(&SQLITE));
pub(super) static OF_POSTGRES: LazyLock<Migrator> = LazyLock::new(|| migrator(&POSTGRES));

fn migrator(files: &[File]) -> Migrator {
    let migration = |(version, description, statements): &File| {
        let (description, statements) = ((*description).into(), (*statements).into_sql_str());
        Migration::new(*version, description, MigrationType::Simple, statements, false)
    };
    Migrator::with_migrations(files.iter().map(migration).collect())
}

/// The version of the newest migration; 0 if there is none.
pub(super) fn newest(migrations: &Migrator) -> i64 {
    migrations.iter().map(|migration| migration.version).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::Path};

    #[test]
    fn every_migration_file_is_embedded() {
        for (database, files) in [("sqlite", SQLITE.as_slice()), ("postgres", &POSTGRES)] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../migrations").join(database);
            let mut found: Vec<(String, String)> = fs::read_dir(folder)
                .expect("the folder")
                .map(|entry| {
                    let entry = entry.expect("an entry");
                    let text = fs::read_to_string(entry.path()).expect("statements");
                    (entry.file_name().into_string().expect("a name"), text)
                })
                .collect();
            found.sort();
            let known: Vec<(String, String)> = files
                .iter()
                .map(|(version, description, text)| {
                    (format!("{version:04}_{description}.sql"), (*text).into())
                })
                .collect();
            assert_eq!(known, found, "{database}");
        }
    }
}

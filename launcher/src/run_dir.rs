//! Owns the run directory: private, short enough for unix sockets, removed at the end. A lock inside tells a live
//! server's directory from one that a killed launcher left behind; those are swept at the next start.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;

const PREFIX: &str = "drafthorse-";
const LOCK: &str = "lock";
/// Longest name of a socket inside, with the slash: `/ctl.detokenizer.sock`, and some to spare.
const LONGEST_NAME: usize = 32;
/// Bytes of a unix socket's path, without the closing zero.
const SOCKET_PATH: usize = 107;

/// Exists as long as this value does.
#[derive(Debug)]
pub(crate) struct RunDir {
    dir: TempDir,
    _lock: Flock<File>,
}

impl RunDir {
    pub(crate) fn create() -> Result<Self> {
        let mut parent = std::env::temp_dir();
        if parent.as_os_str().len() + PREFIX.len() + 8 + LONGEST_NAME > SOCKET_PATH {
            parent = PathBuf::from("/tmp");
        }
        Self::create_in(&parent)
    }

    fn create_in(parent: &Path) -> Result<Self> {
        sweep(parent);
        let dir = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(std::fs::Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .with_context(|| format!("cannot make a run directory in {}", parent.display()))?;
        // Locked before it gets its name: a sweep never sees a lock that is not held by a live launcher.
        let unnamed = dir.path().join("lock.new");
        let file = File::create(&unnamed)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
        std::fs::rename(&unnamed, dir.path().join(LOCK))?;
        Ok(Self { dir, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// The run directories of servers of this user that run: where they usually are, else where they are when that has
/// too long a name for sockets.
pub(crate) fn running() -> Vec<PathBuf> {
    let held = |parent: &Path| -> Vec<PathBuf> {
        let all = of_this_user(parent).into_iter();
        all.filter(|(_, lock)| try_lock(lock).is_none()).map(|(dir, _)| dir).collect()
    };
    let usual = held(&std::env::temp_dir());
    if usual.is_empty() { held(Path::new("/tmp")) } else { usual }
}

/// Removes the run directories of this user that no launcher holds any more.
fn sweep(parent: &Path) {
    for (dir, lock) in of_this_user(parent) {
        if let Some(_abandoned) = try_lock(&lock) {
            // Another launcher may sweep the same one; whoever comes second finds nothing.
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}

/// Run directories of this user, each with its lock.
fn of_this_user(parent: &Path) -> Vec<(PathBuf, PathBuf)> {
    let Ok(me) = std::fs::metadata("/proc/self").map(|data| data.uid()) else { return Vec::new() };
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let ours = entries.filter(|entry| {
        entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|data| data.is_dir() && data.uid() == me)
    });
    let dirs = ours.map(|entry| (entry.path(), entry.path().join(LOCK)));
    dirs.filter(|(_, lock)| lock.is_file()).collect()
}

/// `None` while a launcher holds it. One that cannot be opened counts as held by nobody that can be asked.
fn try_lock(lock: &Path) -> Option<Flock<File>> {
    Flock::lock(File::open(lock).ok()?, FlockArg::LockExclusiveNonblock).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_private_and_gone_afterwards() {
        let parent = tempfile::tempdir().unwrap();
        let run = RunDir::create_in(parent.path()).unwrap();
        let path = run.path().to_owned();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        drop(run);
        assert!(!path.exists());
    }

    #[test]
    fn a_start_sweeps_the_abandoned_and_spares_the_living() {
        let parent = tempfile::tempdir().unwrap();
        let alive = RunDir::create_in(parent.path()).unwrap();
        let dead = parent.path().join("drafthorse-dead");
        std::fs::create_dir(&dead).unwrap();
        std::fs::write(dead.join(LOCK), "").unwrap();
        let foreign = parent.path().join("drafthorse-notes");
        std::fs::create_dir(&foreign).unwrap();
        let second = RunDir::create_in(parent.path()).unwrap();
        assert!(alive.path().exists() && second.path().exists() && foreign.exists());
        assert!(!dead.exists());
    }
}

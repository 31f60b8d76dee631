//! Owns which processes a server consists of, and how each is called. Pure: nothing is started here.

use std::path::{Path, PathBuf};

use proto::{Role, ServeConfig};

/// How to start one child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChildSpec {
    pub role: Role,
    pub program: PathBuf,
    /// The one configuration file of the server.
    pub config: PathBuf,
    /// Whether the child is handed the listening HTTP socket.
    pub listens: bool,
}

/// The children in start order: the scheduler first, because it takes longest. `bin` is the folder of the
/// launcher's own executable.
pub(crate) fn plan(config: &ServeConfig, bin: &Path) -> Vec<ChildSpec> {
    Role::CHILDREN
        .into_iter()
        .map(|role| ChildSpec {
            role,
            program: bin.join(role.binary()),
            config: config.path(),
            listens: role == Role::Tokenizer,
        })
        .collect()
}

impl ChildSpec {
    /// The arguments, given the number under which the child finds the listening socket, and whether it takes
    /// another's place.
    pub(crate) fn arguments(&self, listen_fd: Option<i32>, successor: bool) -> Vec<String> {
        let mut arguments = vec!["--config".to_owned(), self.config.display().to_string()];
        if let Some(fd) = listen_fd.filter(|_| self.listens) {
            arguments.extend(["--listen-fd".to_owned(), fd.to_string()]);
        }
        if successor {
            arguments.push("--successor".to_owned());
        }
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_children_share_one_config_and_one_listens() {
        let config = crate::resolve::tests::dummy_config();
        let lines: Vec<String> = plan(&config, Path::new("/opt/bin"))
            .iter()
            .map(|child| format!("{} {}", child.program.display(), child.arguments(Some(7), false).join(" ")))
            .collect();
        let file = config.path().display().to_string();
        assert_eq!(
            lines,
            [
                format!("/opt/bin/scheduler-proc --config {file}"),
                format!("/opt/bin/detokenizer-proc --config {file}"),
                format!("/opt/bin/tokenizer-proc --config {file} --listen-fd 7"),
            ]
        );
        let scheduler = plan(&config, Path::new("/opt/bin")).remove(0);
        assert_eq!(scheduler.arguments(Some(7), true), ["--config", &file, "--successor"]);
    }
}

//! Owns which processes a server consists of, and how each is called. Pure: nothing is started here.

use std::path::{Path, PathBuf};

use proto::{Member, Role, ServeConfig};

/// How to start one child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChildSpec {
    pub member: Member,
    /// Told to a child that is not the only one of its role.
    pub number: Option<u8>,
    pub program: PathBuf,
    /// The one configuration file of the server.
    pub config: PathBuf,
    /// Whether the child is handed the listening HTTP socket.
    pub listens: bool,
}

/// The children in start order: the scheduler first, because it takes longest. `bin` is the folder of the
/// launcher's own executable.
pub(crate) fn plan(config: &ServeConfig, bin: &Path) -> Vec<ChildSpec> {
    let members = config.topology.children().into_iter();
    members
        .map(|member| ChildSpec {
            member,
            number: config.topology.members(member.role).len().gt(&1).then(|| member.number()),
            program: bin.join(member.role.binary()),
            config: config.path(),
            listens: member.role == Role::Tokenizer,
        })
        .collect()
}

impl ChildSpec {
    /// The arguments, given the number under which the child finds the listening socket, and whether it takes
    /// another's place.
    pub(crate) fn arguments(&self, listen_fd: Option<i32>, successor: bool) -> Vec<String> {
        let mut arguments = vec!["--config".to_owned(), self.config.display().to_string()];
        if let Some(number) = self.number {
            arguments.extend(["--number".to_owned(), number.to_string()]);
        }
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
    use proto::Topology;

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
        let several = Topology { tokenizer_worker_num: 2, detokenizer_worker_num: 1 };
        let children = plan(&ServeConfig { topology: several, ..config.clone() }, Path::new("/opt/bin"));
        let second = children.last().expect("there are four").arguments(Some(7), false);
        assert_eq!(second, ["--config", &file, "--number", "1", "--listen-fd", "7"]);
        let scheduler = plan(&config, Path::new("/opt/bin")).remove(0);
        assert_eq!(scheduler.arguments(Some(7), true), ["--config", &file, "--successor"]);
    }
}

//! Owns the paths of the sockets in the run directory. Unix socket paths hold 107 bytes, so names are short.

use std::path::{Path, PathBuf};

use crate::ids::Role;

/// Where each link of one server lives.
#[derive(Debug, Clone)]
pub struct Endpoints {
    run_dir: PathBuf,
}

impl Endpoints {
    pub fn new(run_dir: &Path) -> Self {
        Self { run_dir: run_dir.to_owned() }
    }

    /// tokenizer ⇄ scheduler: `ToScheduler` one way, `ToTokenizer` the other. The scheduler binds.
    pub fn scheduler(&self) -> PathBuf {
        self.run_dir.join("sched.sock")
    }

    /// scheduler → detokenizer: `ToDetokenizer`. The scheduler binds.
    pub fn detokenizer(&self) -> PathBuf {
        self.run_dir.join("detok.sock")
    }

    /// detokenizer → tokenizer: `ToTokenizer`. The tokenizer process binds.
    pub fn text(&self) -> PathBuf {
        self.run_dir.join("text.sock")
    }

    /// child ⇄ launcher: `Status` one way, `Command` the other. The launcher binds.
    pub fn control(&self, child: Role) -> PathBuf {
        self.run_dir.join(format!("ctl.{child}.sock"))
    }

    /// operator → launcher: lines of JSON, one question and one answer each. The launcher binds.
    pub fn admin(&self) -> PathBuf {
        self.run_dir.join("admin.sock")
    }
}

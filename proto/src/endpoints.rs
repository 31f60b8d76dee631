//! Owns the paths of the sockets in the run directory. Unix socket paths hold 107 bytes, so names are short.

use std::path::{Path, PathBuf};

use crate::topology::{Front, Lane, Member};

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
    pub fn scheduler(&self, front: Front) -> PathBuf {
        self.run_dir.join(format!("sched.{}.sock", front.0))
    }

    /// scheduler → detokenizer: `ToDetokenizer`. The scheduler binds.
    pub fn detokenizer(&self, lane: Lane) -> PathBuf {
        self.run_dir.join(format!("detok.{}.sock", lane.0))
    }

    /// detokenizer → tokenizer: `ToTokenizer`. The tokenizer process binds.
    pub fn text(&self, lane: Lane) -> PathBuf {
        self.run_dir.join(format!("text.{}.sock", lane.0))
    }

    /// child ⇄ launcher: `Status` one way, `Command` the other. The launcher binds.
    pub fn control(&self, child: Member) -> PathBuf {
        self.run_dir.join(format!("ctl.{child}.sock"))
    }

    /// operator → launcher: lines of JSON, one question and one answer each. The launcher binds.
    pub fn admin(&self) -> PathBuf {
        self.run_dir.join("admin.sock")
    }
}

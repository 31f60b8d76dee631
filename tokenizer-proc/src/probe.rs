//! Owns the health probe: one token through all three processes. However many ask, one probe runs at a time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::SamplingParams;
use tokio::sync::watch;
use uuid::Uuid;

use crate::app::App;
use crate::intake::{Ask, Job, LogprobRequest, Prompt};
use crate::refusal::Refusal;
use crate::sampling::{Budget, ValidSampling};

/// How long a probe may take; a busy server shows life by other requests' tokens meanwhile.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The probe in flight, if any.
pub(crate) struct Probe {
    verdict: Mutex<Option<watch::Receiver<Option<bool>>>>,
    timeout: Duration,
}

impl Default for Probe {
    fn default() -> Self {
        let timeout = std::env::var("SGLANG_HEALTH_CHECK_TIMEOUT").ok().and_then(|text| text.parse().ok());
        Self { verdict: Mutex::default(), timeout: timeout.map_or(TIMEOUT, Duration::from_secs) }
    }
}

impl Probe {
    /// Whether anything came through all processes since the probe began.
    pub(crate) async fn run(&self, app: &Arc<App>) -> bool {
        let mut verdict = self.join_or_start(app);
        // A probe that panicked has no verdict.
        verdict.wait_for(Option::is_some).await.is_ok_and(|verdict| *verdict == Some(true))
    }

    fn join_or_start(&self, app: &Arc<App>) -> watch::Receiver<Option<bool>> {
        let mut current = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) =
            current.as_ref().filter(|probe| probe.borrow().is_none() && probe.has_changed().is_ok())
        {
            return running.clone();
        }
        let (sender, verdict) = watch::channel(None);
        let (app, timeout) = (Arc::clone(app), self.timeout);
        tokio::spawn(async move {
            let healthy = tokio::time::timeout(timeout, probe(&app)).await.unwrap_or(false);
            sender.send_replace(Some(healthy));
        });
        *current = Some(verdict.clone());
        verdict
    }
}

/// Ends when a token came through; its ticket's drop aborts what is left of the request.
async fn probe(app: &App) -> bool {
    let mut activity = app.registry.activity();
    let params = SamplingParams { temperature: 0.0, ignore_eos: true, ..SamplingParams::default() };
    let ask = Ask {
        prompt: Prompt::Ids(vec![0]),
        sampling: ValidSampling { params, budget: Budget::Exact(1), seed: Some(0), n: 1 },
        logprobs: LogprobRequest::default(),
        rid: Some(format!("HEALTH_CHECK_{}", Uuid::new_v4().simple())),
        extra_key: None,
        max_draft_tokens: Some(0),
        log_metrics: false,
    };
    let job = Job { asks: vec![ask], stream: false, group: None, probe: true };
    let Ok(mut admitted) = app.intake.admit(job, None).await else { return false };
    let own = admitted.tickets.iter_mut().next().expect("one ask makes one ticket").next();
    tokio::select! {
        biased;
        update = own => {
            let end = update.and_then(|update| update.end);
            if end.is_none_or(|end| Refusal::from_finish(&end.reason).is_none()) {
                return true;
            }
        }
        changed = activity.changed() => return changed.is_ok(),
    }
    // A full queue has no room for the probe either; the requests that fill it show whether the server lives.
    activity.changed().await.is_ok()
}

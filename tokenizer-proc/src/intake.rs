//! Owns the step from a validated body to requests the scheduler can run: tokenises, checks lengths, names the
//! copies and gives each a seed. The only place that makes a `TokenizedGenerateReqInput`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proto::{
    Front, RequestId, SamplingParams, SchedulerInfo, ServeConfig, SpecCounters, TokenId,
    TokenizedGenerateReqInput,
};
use tokio::sync::watch;
use uuid::Uuid;

use crate::bridge::SchedulerView;
use crate::refusal::{Refusal, invalid};
use crate::registry::{Registration, Registry, Ticket};
use crate::sampling::{Budget, Limits, ValidSampling, token_ids};
use crate::tokenize::{Codec, SpecialTokens};

/// Answers one HTTP request may ask for.
const MAX_ANSWERS: usize = 4096;
/// Alternatives per position.
const MAX_TOP_LOGPROBS: i64 = 128;
const MAX_TOKEN_IDS_LOGPROB: usize = 1024;

/// A prompt as it came.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    /// Made by a chat template: special tokens are written out in it.
    Rendered(String),
    Ids(Vec<i64>),
}

/// Which log-probabilities are wanted, unchecked.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct LogprobRequest {
    pub return_logprob: bool,
    /// −1: output tokens only.
    pub start_len: Option<i64>,
    pub top_num: i64,
    pub token_ids: Vec<i64>,
}

/// One prompt and what is wanted of it.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub prompt: Prompt,
    pub sampling: ValidSampling,
    pub logprobs: LogprobRequest,
    pub rid: Option<String>,
    pub extra_key: Option<String>,
    pub max_draft_tokens: Option<u32>,
    pub log_metrics: bool,
}

/// One HTTP request's prompts.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub asks: Vec<Ask>,
    pub stream: bool,
    /// The name of the whole; given when one name stands for several answers.
    pub group: Option<String>,
    /// Admit it even when the queue is full.
    pub probe: bool,
}

/// The answers of one job in order: prompt 0 copy 0, prompt 0 copy 1, …
pub(crate) struct Admitted {
    pub group: RequestId,
    pub tickets: Vec<Ticket>,
    /// Ids of each prompt.
    pub prompts: Vec<Arc<Vec<TokenId>>>,
    /// Copies of each prompt.
    pub n: usize,
}

/// Turns jobs into running requests.
pub(crate) struct Intake {
    config: Arc<ServeConfig>,
    registry: Arc<Registry>,
    scheduler: watch::Receiver<SchedulerView>,
    front: Front,
    seeds: AtomicU64,
}

impl Intake {
    pub(crate) fn new(
        config: Arc<ServeConfig>,
        front: Front,
        registry: Arc<Registry>,
        scheduler: watch::Receiver<SchedulerView>,
    ) -> Self {
        Self { config, registry, scheduler, front, seeds: AtomicU64::new(0) }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits {
            vocab_size: self.config.model.vocab_size,
            has_tokenizer: !self.config.server.skip_tokenizer_init,
        }
    }

    /// Checks everything and starts all answers, or none.
    pub(crate) async fn admit(&self, job: Job, codec: Option<&Codec>) -> Result<Admitted, Refusal> {
        let info = self.scheduler_info()?;
        let n = check_copies(&job.asks)?;
        let mut prompts = Vec::with_capacity(job.asks.len());
        for ask in &job.asks {
            let ids = self.prompt_ids(&ask.prompt, codec).await?;
            self.check_prompt_length(ids.len(), &info)?;
            prompts.push(Arc::new(ids));
        }
        self.check_queue(job.asks.len() * n, job.probe, &info)?;
        let group = job.group.unwrap_or_else(|| match &job.asks[..] {
            [Ask { rid: Some(rid), .. }] => rid.clone(),
            _ => Uuid::new_v4().simple().to_string(),
        });
        let names = Names { group: RequestId(group), answers: job.asks.len() * n, n };
        let mut requests = Vec::with_capacity(names.answers);
        for (i, (ask, ids)) in job.asks.iter().zip(&prompts).enumerate() {
            let params = self.params(ask, ids.len())?;
            let logprobs = self.logprobs(&ask.logprobs, ids.len())?;
            for copy in 0..n {
                let (rid, group) = names.of(ask.rid.as_deref(), i, copy);
                let sampling_params = SamplingParams {
                    sampling_seed: params.sampling_seed.wrapping_add(copy as u64),
                    ..params.clone()
                };
                let input = TokenizedGenerateReqInput {
                    rid,
                    input_ids: ids.to_vec(),
                    output_ids: Vec::new(),
                    spec: SpecCounters::default(),
                    sampling_params,
                    stream: job.stream,
                    return_logprob: ask.logprobs.return_logprob,
                    logprob_start_len: logprobs.start_len,
                    top_logprobs_num: logprobs.top_num,
                    token_ids_logprob: logprobs.token_ids.clone(),
                    extra_key: ask.extra_key.clone(),
                    log_metrics: ask.log_metrics,
                    attempt: 0,
                };
                requests.push(Registration { input, group });
            }
        }
        let tickets = self.registry.register(requests)?;
        Ok(Admitted { group: names.group, tickets, prompts, n })
    }

    fn scheduler_info(&self) -> Result<SchedulerInfo, Refusal> {
        let info = self.scheduler.borrow().info.clone();
        info.ok_or_else(|| Refusal::Unavailable("The server is starting.".to_owned()))
    }

    async fn prompt_ids(&self, prompt: &Prompt, codec: Option<&Codec>) -> Result<Vec<TokenId>, Refusal> {
        let (text, special) = match prompt {
            Prompt::Ids(ids) if ids.is_empty() => return invalid!("input_ids cannot be empty."),
            Prompt::Ids(ids) => return token_ids("input_ids", ids, self.config.model.vocab_size),
            Prompt::Text(text) if text.is_empty() => return invalid!("Prompt cannot be empty"),
            Prompt::Text(text) => (text, SpecialTokens::Add),
            Prompt::Rendered(text) => (text, SpecialTokens::AsWritten),
        };
        let Some(codec) = codec else {
            return invalid!("The server runs with --skip-tokenizer-init: send input_ids instead of text.");
        };
        let ids = codec.encode(text.clone(), special).await?;
        if ids.is_empty() {
            return invalid!("Prompt cannot be empty");
        }
        // A tokenizer with more entries than the model has embeddings.
        match ids.iter().find(|&&id| id >= self.config.model.vocab_size) {
            Some(id) => invalid!("The prompt contains token {id}, which the model does not have."),
            None => Ok(ids),
        }
    }

    fn check_prompt_length(&self, len: usize, info: &SchedulerInfo) -> Result<(), Refusal> {
        let context = self.config.model.context_length as usize;
        if len >= context {
            return invalid!(
                "The input ({len} tokens) is longer than the model's context length ({context} tokens)."
            );
        }
        let most = info.max_req_input_len as usize;
        if len > most {
            return invalid!(
                "Input length ({len} tokens) exceeds the maximum allowed length ({most} tokens). Use a shorter input."
            );
        }
        Ok(())
    }

    /// Whether one more request would be admitted.
    pub(crate) fn check_room(&self, info: &SchedulerInfo) -> Result<(), Refusal> {
        self.check_queue(1, false, info)
    }

    fn check_queue(&self, more: usize, probe: bool, info: &SchedulerInfo) -> Result<(), Refusal> {
        let room = info.max_running_requests as usize + self.config.server.max_queued_requests as usize;
        if !probe && self.registry.len() + more > room {
            return Err(Refusal::Unavailable("The request queue is full.".to_owned()));
        }
        Ok(())
    }

    /// Fills in what depends on the prompt's length, and the seed.
    fn params(&self, ask: &Ask, prompt_len: usize) -> Result<SamplingParams, Refusal> {
        let context = self.config.model.context_length as usize;
        let rest = (context - prompt_len) as u32;
        let max_new_tokens = match ask.sampling.budget {
            Budget::Rest => rest,
            Budget::Default(count) => count.min(rest),
            Budget::Exact(count) if count <= rest => count,
            Budget::Exact(count) => {
                let total = prompt_len + count as usize;
                return invalid!(
                    "Requested token count exceeds the model's maximum context length of {context} tokens. You \
                     requested a total of {total} tokens: {prompt_len} tokens from the input messages and {count} \
                     tokens for the completion. Please reduce the number of tokens in the input messages or the \
                     completion to fit within the limit."
                );
            }
        };
        let params = &ask.sampling.params;
        Ok(SamplingParams {
            max_new_tokens,
            min_new_tokens: params.min_new_tokens.min(max_new_tokens),
            sampling_seed: ask.sampling.seed.unwrap_or_else(|| self.fresh_seed()),
            max_draft_tokens: ask.max_draft_tokens,
            ..params.clone()
        })
    }

    fn logprobs(&self, wanted: &LogprobRequest, prompt_len: usize) -> Result<ValidLogprobs, Refusal> {
        if !(0..=MAX_TOP_LOGPROBS).contains(&wanted.top_num) {
            return invalid!("top_logprobs_num must be in [0, {MAX_TOP_LOGPROBS}], got {}.", wanted.top_num);
        }
        if wanted.token_ids.len() > MAX_TOKEN_IDS_LOGPROB {
            return invalid!("token_ids_logprob holds at most {MAX_TOKEN_IDS_LOGPROB} ids.");
        }
        let token_ids = token_ids("token_ids_logprob", &wanted.token_ids, self.config.model.vocab_size)?;
        let start_len = match wanted.start_len.unwrap_or(-1) {
            -1 => None,
            start if (0..=prompt_len as i64).contains(&start) => Some(start as u32),
            start => return invalid!("logprob_start_len must be in [-1, {prompt_len}], got {start}."),
        };
        if !wanted.return_logprob {
            return Ok(ValidLogprobs::default());
        }
        Ok(ValidLogprobs { start_len, top_num: wanted.top_num as u32, token_ids })
    }

    /// Seeds follow from the server's seed and the order of requests, and no two tokenizer processes use the same.
    fn fresh_seed(&self) -> u64 {
        let fronts = u64::from(self.config.topology.tokenizer_worker_num);
        let count = self.seeds.fetch_add(1, Ordering::Relaxed) * fronts + u64::from(self.front.0);
        splitmix64(splitmix64(self.config.schedule.random_seed).wrapping_add(count))
    }
}

#[derive(Default)]
struct ValidLogprobs {
    start_len: Option<u32>,
    top_num: u32,
    token_ids: Vec<TokenId>,
}

/// How the answers of a job are called.
struct Names {
    group: RequestId,
    answers: usize,
    n: usize,
}

impl Names {
    /// The rid of one copy, and the name that stands for it and its siblings.
    fn of(&self, rid: Option<&str>, prompt: usize, copy: usize) -> (RequestId, RequestId) {
        if self.answers == 1 {
            return (self.group.clone(), self.group.clone());
        }
        match rid.filter(|rid| *rid != self.group.0) {
            Some(rid) if self.n == 1 => (RequestId(rid.to_owned()), RequestId(rid.to_owned())),
            Some(rid) => (RequestId(format!("{rid}_{copy}")), RequestId(rid.to_owned())),
            None => (RequestId(format!("{}_{}", self.group, prompt * self.n + copy)), self.group.clone()),
        }
    }
}

fn check_copies(asks: &[Ask]) -> Result<usize, Refusal> {
    let Some(first) = asks.first() else { return invalid!("Prompt cannot be empty") };
    let n = first.sampling.n;
    if asks.iter().any(|ask| ask.sampling.n != n) {
        return invalid!("n must be the same for all prompts of a batch.");
    }
    let answers = asks.len() * n as usize;
    if answers > MAX_ANSWERS {
        return invalid!("One request may ask for at most {MAX_ANSWERS} answers, got {answers}.");
    }
    Ok(n as usize)
}

/// A well-mixing bijection of 64-bit numbers.
fn splitmix64(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

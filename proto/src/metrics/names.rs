//! Owns the contract of `/metrics`: every name, its labels, and what its value is. Names, labels and bounds that
//! SGLang has are SGLang's; the rest is marked "Drafthorse". A *draft* is never a bonus and a bonus never a draft.
//!
//! The colon in the names is for SGLang's sake: its dashboards ask for them.

use prometheus::{Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec};

use super::buckets;
use super::def::{Def, Info, Mode};

macro_rules! metrics {
    ($($id:ident: $kind:ident = $name:literal [$($label:literal),*] $($buckets:ident)? $(($mode:ident))?, $help:literal;)+) => {
        $(
            #[doc = $help]
            pub const $id: Def<$kind> = Def::new(
                Info {
                    name: concat!("sglang:", $name),
                    help: $help,
                    labels: &[$($label),*],
                    mode: metrics!(@mode $($mode)?),
                },
                metrics!(@buckets $($buckets)?),
            );
        )+

        /// All metrics there are.
        pub const ALL: &[Info] = &[$($id.info),+];
    };
    (@mode) => { Mode::MostRecent };
    (@mode $mode:ident) => { Mode::$mode };
    (@buckets) => { &[] };
    (@buckets $buckets:ident) => { buckets::$buckets };
}

// Of the scheduler: load.
metrics! {
    NUM_RUNNING_REQS: Gauge = "num_running_reqs" [], "Requests in the running batch.";
    NUM_QUEUE_REQS: Gauge = "num_queue_reqs" [], "Requests that wait in the scheduler.";
    NUM_GRAMMAR_QUEUE_REQS: Gauge = "num_grammar_queue_reqs" [], "Requests that wait for their grammar.";
    GEN_THROUGHPUT: Gauge = "gen_throughput" [], "Tokens generated per second over the last log window: rows plus accepted drafts, so the bonus is included. 0 when idle.";
    CACHE_HIT_RATE: Gauge = "cache_hit_rate" [], "Prompt tokens found in the prefix cache / prompt tokens, over the last prefill.";
    DECODE_SUM_SEQ_LENS: Gauge = "decode_sum_seq_lens" [], "Sum of the sequence lengths in the running batch.";
    TOKEN_USAGE: Gauge = "token_usage" [], "Used KV slots / KV slots. Cached slots that can be evicted are not used.";
    FULL_TOKEN_USAGE: Gauge = "full_token_usage" [], "The same as token_usage: there is one pool.";
    NUM_USED_TOKENS: Gauge = "num_used_tokens" [], "KV slots held by requests.";
    KV_USED_TOKENS: Gauge = "kv_used_tokens" [], "KV slots held by requests. used + evictable + available = max_total_num_tokens.";
    KV_EVICTABLE_TOKENS: Gauge = "kv_evictable_tokens" [], "KV slots that only the prefix cache holds.";
    KV_AVAILABLE_TOKENS: Gauge = "kv_available_tokens" [], "KV slots that nobody holds.";
    NUM_RETRACTED_REQS: Gauge = "num_retracted_reqs" [], "Requests retracted in the last step that retracted any.";
    MAX_TOTAL_NUM_TOKENS: Gauge = "max_total_num_tokens" [], "KV slots.";
    PAGE_SIZE: Gauge = "page_size" [], "KV slots per page.";
    NUM_PAGES: Gauge = "num_pages" [], "Pages of the KV pool.";
    CONTEXT_LEN: Gauge = "context_len" [], "Longest sequence, prompt and answer together.";
    WEIGHT_MEMORY_USAGE_GB: Gauge = "weight_memory_usage_gb" [], "Memory of the weights in GB.";
    KV_CACHE_MEMORY_USAGE_GB: Gauge = "kv_cache_memory_usage_gb" [], "Memory of the KV pool in GB.";
    WEIGHT_LOAD_DURATION: GaugeVec = "weight_load_duration_seconds" ["source"], "Seconds that loading the weights took.";

    QUEUE_TIME: Histogram = "queue_time_seconds" [] QUEUE_TIME, "Seconds from arrival to first admission.";
    REALTIME_TOKENS: IntCounterVec = "realtime_tokens_total" ["mode"], "Tokens worked on. mode is prefill_compute, prefill_cache or decode; decode counts rows plus accepted drafts, so the bonus is included.";
    NUM_RETRACTED_REQUESTS: IntCounter = "num_retracted_requests_total" [], "Retractions of requests for want of KV slots.";
    NUM_RETRACTED_INPUT_TOKENS: IntCounter = "num_retracted_input_tokens_total" [], "Prompt tokens of retracted requests.";
    NUM_RETRACTED_OUTPUT_TOKENS: IntCounter = "num_retracted_output_tokens_total" [], "Output tokens that retracted requests had made; none is lost.";
    FORWARD_EXECUTION_SECONDS: CounterVec = "forward_execution_seconds_total" ["category"], "Seconds in the engine. category is the kind of step.";
    SCHEDULER_IDLE_SECONDS: Counter = "scheduler_idle_seconds_total" [], "Seconds in which the scheduler had nothing to do.";

    SPEC_ACCEPT_LENGTH: Gauge = "spec_accept_length" [], "Tokens per request and verify step over the last log window, bonus included: (accepted drafts + verify steps) / verify steps. 0 without verify steps.";
    SPEC_ACCEPT_RATE: Gauge = "spec_accept_rate" [], "accepted drafts / proposed drafts over the last log window, bonus in neither. 0 when nothing was proposed.";
    SPEC_NUM_STEPS: Gauge = "spec_num_steps" [], "Draft steps in force now; 0 without a draft worker.";
    SPEC_NUM_DRAFT_TOKENS: Gauge = "spec_num_draft_tokens" [], "Width of a verify step in force now, root included; 0 without a draft worker.";
    SPEC_VERIFY_STEPS: IntCounter = "spec_verify_steps_total" [], "Drafthorse: verify steps, counted once per request that took part. Each makes one bonus.";
    SPEC_PROPOSED_DRAFTS: IntCounter = "spec_proposed_drafts_total" [], "Drafthorse: draft tokens given to the target to verify, counted at each step. Neither root, padding nor bonus.";
    SPEC_ACCEPTED_DRAFTS: IntCounter = "spec_accepted_drafts_total" [], "Drafthorse: draft tokens that were the target's choice, before any stop trims them. Without the bonus.";
    SPEC_DELIVERED_DRAFTS: IntCounter = "spec_delivered_drafts_total" [], "Drafthorse: accepted draft tokens that reached an answer. Without the bonus.";
    SPEC_PROPOSED_BY_SOURCE: IntCounterVec = "spec_proposed_by_source_total" ["source"], "Drafthorse: spec_proposed_drafts_total by who made the drafts. source is model or ngram.";
    SPEC_ACCEPTED_BY_SOURCE: IntCounterVec = "spec_accepted_by_source_total" ["source"], "Drafthorse: spec_accepted_drafts_total by who made the drafts. source is model or ngram.";
    SPEC_PROPOSED_AT_POSITION: IntCounterVec = "spec_proposed_at_position_total" ["position"], "Drafthorse: request verify steps that proposed a draft at this depth; 0 is the first draft. Without the bonus.";
    SPEC_ACCEPTED_AT_POSITION: IntCounterVec = "spec_accepted_at_position_total" ["position"], "Drafthorse: request verify steps that accepted a draft at this depth; 0 is the first draft. Without the bonus.";
    SPEC_DEPTH_SWITCHES: IntCounterVec = "spec_depth_switches_total" ["from", "to", "reason"], "Drafthorse: changes of the draft steps in force, with --speculative-adaptive. reason is batch_size, acceptance_up, acceptance_down, probe, promise, faster or plain_faster.";
    SPEC_STEPS_AT_DEPTH: IntCounterVec = "spec_steps_at_depth_total" ["steps"], "Drafthorse: decode steps by the draft steps that their rows were free to make, with --speculative-adaptive; 0 is plain decoding.";

    // Of the tokenizer process: requests, each counted when it ends.
    PROMPT_TOKENS: IntCounterVec = "prompt_tokens_total" ["is_streaming"], "Prompt tokens of ended requests.";
    GENERATION_TOKENS: IntCounterVec = "generation_tokens_total" ["is_streaming"], "Output tokens of ended requests, bonuses and delivered drafts included.";
    CACHED_TOKENS: IntCounterVec = "cached_tokens_total" ["cache_source"], "Prompt tokens of ended requests that were found in the prefix cache. cache_source is device or total.";
    NUM_REQUESTS: IntCounterVec = "num_requests_total" ["is_streaming"], "Ended requests.";
    NUM_ABORTED_REQUESTS: IntCounter = "num_aborted_requests_total" [], "Requests that ended by an abort.";
    REQUEST_OUTCOMES: IntCounterVec = "request_outcomes_total" ["reason"], "Drafthorse: ended requests by reason: stop, length, abort, error or rejected.";
    SPEC_VERIFY_CALLS: IntCounter = "spec_verify_calls_total" [], "Verify steps of ended requests: the sum of their spec_verify_ct.";
    PROMPT_TOKENS_HISTOGRAM: Histogram = "prompt_tokens_histogram" [] TOKENS, "Prompt tokens of a request.";
    UNCACHED_PROMPT_TOKENS_HISTOGRAM: Histogram = "uncached_prompt_tokens_histogram" [] TOKENS, "Prompt tokens of a request that were not in the prefix cache.";
    GENERATION_TOKENS_HISTOGRAM: Histogram = "generation_tokens_histogram" [] TOKENS, "Output tokens of a request.";
    TIME_TO_FIRST_TOKEN: HistogramVec = "time_to_first_token_seconds" ["is_streaming"] FIRST_TOKEN, "Seconds from arrival to the first output.";
    INTER_TOKEN_LATENCY: Histogram = "inter_token_latency_seconds" [] INTER_TOKEN, "Seconds per token: an output of m tokens after a gap of t counts t / m, m times.";
    TIME_PER_OUTPUT_TOKEN: HistogramVec = "request_time_per_output_token_seconds" ["is_streaming"] INTER_TOKEN, "Seconds per token of a request: (end - first token) / (output tokens - 1).";
    E2E_REQUEST_LATENCY: HistogramVec = "e2e_request_latency_seconds" ["is_streaming"] END_TO_END, "Seconds from arrival to the end of a request.";
    STARTUP_TIME: GaugeVec = "startup_time_seconds" ["phase"] (Max), "Seconds that a phase of the start took.";
    HTTP_REQUESTS: IntCounterVec = "http_requests_total" ["endpoint", "method"], "HTTP requests. endpoint is a route that exists, or other.";
    HTTP_RESPONSES: IntCounterVec = "http_responses_total" ["endpoint", "status_code", "method"], "HTTP responses.";
    HTTP_REQUESTS_ACTIVE: GaugeVec = "http_requests_active" ["endpoint", "method"] (LiveSum), "HTTP requests being answered.";

    // Of the detokenizer.
    DETOKENIZED_ROWS: IntCounter = "detokenizer_rows_total" [], "Drafthorse: rows turned into text; a row is one request's new tokens in one message.";
    DETOKENIZED_TOKENS: IntCounter = "detokenizer_tokens_total" [], "Drafthorse: output tokens turned into text, those sent again after a restart included.";
    DETOKENIZER_DROPPED_ROWS: IntCounterVec = "detokenizer_dropped_rows_total" ["reason"], "Drafthorse: rows that gave no text. reason is orphan (the request is unknown), lost (tokens before it are missing) or ragged (its message cannot be read).";
    DETOKENIZER_LIVE_REQUESTS: Gauge = "detokenizer_live_requests" [] (LiveSum), "Drafthorse: requests whose text is being made.";
    DETOKENIZER_WAITING_MESSAGES: Gauge = "detokenizer_waiting_messages" [] (LiveSum), "Drafthorse: messages of text that have not arrived yet.";

    // Of every process.
    PROCESS_CPU_SECONDS: CounterVec = "process_cpu_seconds_total" ["component"], "Processor seconds of the processes of a role, user and system.";
    PROCESS_RESIDENT_MEMORY: GaugeVec = "process_resident_memory_bytes" ["component"] (LiveSum), "Drafthorse: resident memory of the processes of a role.";
    LINK_DROPPED_FRAMES: IntCounterVec = "link_dropped_frames_total" ["component"], "Drafthorse: frames from other processes that did not decode and were dropped.";
    // Of the launcher.
    PROCESS_UP: GaugeVec = "process_up" ["role", "number"], "Drafthorse: 1 while the process does its work, 0 while it is dead or starting. number tells several of one role apart.";
    PROCESS_RESTARTS: IntCounterVec = "process_restarts_total" ["role", "number"], "Drafthorse: times the process was started again.";
    METRICS_FILES_SKIPPED: IntCounter = "metrics_files_skipped_total" [], "Drafthorse: metric snapshots that could not be read and were left out, each counted once.";
    UNREADABLE_SNAPSHOTS: Gauge = "metrics_unreadable_snapshots" [], "Drafthorse: metric snapshots left out of this page because they cannot be read or contradict another.";
}

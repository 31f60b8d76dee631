//! Owns the flags that SGLang has and this server does not: they are refused with a hint, never ignored.

/// Flag, or flag prefix ending in `*`, and what to say about it.
const FLAGS: &[(&str, &str)] = &[
    ("--tp-size", ONE_DEVICE),
    ("--tensor-parallel-size", ONE_DEVICE),
    ("--tp", ONE_DEVICE),
    ("--pp-size", ONE_DEVICE),
    ("--pipeline-parallel-size", ONE_DEVICE),
    ("--ep-size", ONE_DEVICE),
    ("--expert-parallel-size", ONE_DEVICE),
    ("--nnodes", ONE_DEVICE),
    ("--node-rank", ONE_DEVICE),
    ("--dist-init-addr", ONE_DEVICE),
    ("--base-gpu-id", ONE_DEVICE),
    ("--dp-size", "there is one scheduler for now; data parallelism comes with a later release"),
    ("--data-parallel-size", "there is one scheduler for now; data parallelism comes with a later release"),
    ("--load-balance-method", "there is one scheduler for now; data parallelism comes with a later release"),
    ("--enable-dp-attention", ONE_DEVICE),
    ("--tokenizer-mode", "there is one tokenizer implementation, the fast one"),
    ("--tokenizer-backend", "there is one tokenizer implementation, the fast one"),
    ("--quantization-param-path", QUANTIZATION),
    ("--torchao-config", QUANTIZATION),
    ("--kv-cache-dtype", "the KV pool has the model's precision; choose it with --dtype"),
    ("--attention-backend", ONE_BACKEND),
    ("--prefill-attention-backend", ONE_BACKEND),
    ("--decode-attention-backend", ONE_BACKEND),
    ("--sampling-backend", ONE_BACKEND),
    ("--grammar-backend", GRAMMAR),
    ("--constrained-json-whitespace-pattern", GRAMMAR),
    ("--enable-torch-compile", NO_GRAPHS),
    ("--torch-compile-max-bs", NO_GRAPHS),
    ("--disable-cuda-graph", NO_GRAPHS),
    ("--disable-cuda-graph-padding", NO_GRAPHS),
    ("--cuda-graph-max-bs", NO_GRAPHS),
    ("--cuda-graph-bs", NO_GRAPHS),
    (
        "--disable-overlap-schedule",
        "there is no overlap to disable: a step is scheduled after the last one ended",
    ),
    ("--enable-mixed-chunk", "a step is either prefill or decode; leave it out"),
    ("--enable-lora", LORA),
    ("--lora-paths", LORA),
    ("--max-loras-per-batch", LORA),
    ("--max-lora-rank", LORA),
    ("--tool-call-parser", "tool calls are not parsed; leave it out and parse the text in the client"),
    ("--reasoning-parser", "reasoning is not separated; leave it out and split the text in the client"),
    (
        "--chat-template",
        "put the template into the tokenizer folder (tokenizer_config.json or chat_template.jinja)",
    ),
    ("--completion-template", "put the template into the tokenizer folder"),
    ("--trust-remote-code", "no code of a model is ever run; the architectures known are built in"),
    ("--revision", "models are read from disk; download the revision you want and name its folder"),
    ("--download-dir", "models are read from disk; download the model and name its folder with --model-path"),
    ("--json-model-override-args", "edit the model folder's config.json instead"),
    ("--is-embedding", "only text generation is served"),
    ("--enable-multimodal", "only text generation is served"),
    ("--allow-auto-truncate", "too long prompts are refused with both lengths named"),
    ("--disaggregation-*", "prefill and decode run in one scheduler"),
    ("--enable-hierarchical-cache", "the prefix cache lives in the KV pool only"),
    ("--hicache-*", "the prefix cache lives in the KV pool only"),
    ("--radix-eviction-policy", "the prefix cache evicts the least recently used leaf"),
    ("--schedule-conservativeness", "admission is exact, with retraction when memory runs out; leave it out"),
    ("--enable-priority-scheduling", "choose the order with --schedule-policy fcfs or lpm"),
    ("--preferred-sampling-params", "send sampling parameters with the request"),
    ("--sampling-defaults", "the chat route takes its defaults from generation_config.json"),
    ("--admin-api-key", "one key guards all routes: --api-key"),
    ("--ssl-*", "put a TLS proxy in front"),
    ("--root-path", "put a proxy in front"),
    ("--fastapi-root-path", "put a proxy in front"),
    ("--log-requests*", "use --log-level debug"),
    ("--log-level-http", "use --log-level"),
    ("--enable-metrics-for-all-schedulers", "there is one scheduler; use --enable-metrics"),
    ("--bucket-*", "histogram buckets are SGLang's defaults"),
    ("--enable-custom-logit-processor", "no code of a request is ever run"),
    ("--enable-return-hidden-states", "hidden states stay in the scheduler"),
    (
        "--enable-deterministic-inference",
        "it always is: the same seeded request gives the same tokens in any batch",
    ),
    ("--config", "write the flags on the command line"),
    ("--speculative-draft-model-revision", "download the revision you want and name its folder"),
    ("--speculative-draft-model-quantization", QUANTIZATION),
    ("--speculative-draft-attention-backend", ONE_BACKEND),
    (
        "--speculative-draft-kv-cache-dtype",
        "the draft's KV pool has the model's precision; choose it with --dtype",
    ),
    ("--speculative-draft-window-size", "a draft sees as far as its target"),
    ("--speculative-draft-sink-size", "a draft sees as far as its target"),
    (
        "--speculative-use-block-verification",
        "drafts are verified one by one; for SGLang's ratio test use --speculative-use-rejection-sampling",
    ),
    ("--speculative-attention-mode", ONE_BACKEND),
    ("--speculative-dspark-*", "DSPARK is not planned; NGRAM needs no draft model"),
    (
        "--speculative-ngram-external-*",
        "the trie learns from prompts and answers; there is no external corpus",
    ),
    (
        "--speculative-ngram-min-match-window-size",
        "SGLang removed it; use --speculative-ngram-max-trie-depth",
    ),
    (
        "--speculative-ngram-max-match-window-size",
        "SGLang removed it; use --speculative-ngram-max-trie-depth",
    ),
];

const ONE_DEVICE: &str = "the model runs on one device, chosen with --device";
pub(crate) const QUANTIZATION: &str =
    "give a quantised GGUF file as --model-path; precision is chosen with --dtype";
const ONE_BACKEND: &str = "each --device has one backend; leave it out";
const GRAMMAR: &str = "constrained output is not served yet";
const NO_GRAPHS: &str = "steps run without graphs or compilation; leave it out";
const LORA: &str = "adapters are not served; merge them into the model's weights";

/// Finds the first argument that names such a flag, and says what to do instead.
pub(crate) fn refusal<S: AsRef<str>>(argv: impl IntoIterator<Item = S>) -> Option<String> {
    argv.into_iter().find_map(|argument| {
        let flag = argument.as_ref().split('=').next().unwrap_or_default();
        let hint = FLAGS.iter().find(|(name, _)| matches(name, flag))?.1;
        Some(format!("{flag} is not supported: {hint}"))
    })
}

/// What to say of an algorithm that SGLang has and this server has not.
pub(crate) fn algorithm_hint(name: &str) -> Option<&'static str> {
    match name {
        "DSPARK" | "UNO" | "FROZEN_KV_MTP" => Some("is not planned"),
        _ => None,
    }
}

fn matches(name: &str, flag: &str) -> bool {
    name.strip_suffix('*').map_or(name == flag, |prefix| flag.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn known_flags_get_their_hint_with_and_without_a_value() {
        let refused = |line: &str| refusal(line.split(' ')).unwrap_or_default();
        assert!(
            refused("--model a --tp-size 2").starts_with("--tp-size is not supported: the model runs on one")
        );
        assert!(refused("--torchao-config=int4wo").contains("GGUF"));
        assert!(refused("--speculative-draft-model-revision x").contains("name its folder"));
        assert_eq!(refused("--model a --port 1"), "");
    }

    #[test]
    fn no_flag_that_exists_is_refused() {
        for argument in crate::args::Args::command().get_arguments() {
            for name in argument.get_long_and_visible_aliases().unwrap_or_default() {
                assert_eq!(refusal([format!("--{name}")]), None, "{name}");
            }
        }
    }
}

//! Owns the flags that choose the rule of acceptance. What SGLang refuses is refused here.

use anyhow::{Result, bail, ensure};
use proto::{AcceptanceRule, SpecAlgorithm, SpecConfig};

use crate::args::SpecArgs;

pub(super) fn resolve(args: &SpecArgs, config: &SpecConfig) -> Result<AcceptanceRule> {
    let (single, acc) = (args.speculative_accept_threshold_single, args.speculative_accept_threshold_acc);
    for (flag, value) in
        [("--speculative-accept-threshold-single", single), ("--speculative-accept-threshold-acc", acc)]
    {
        ensure!((0.0..=1.0).contains(&value), "{flag} {value} must be between 0 and 1");
    }
    let weighs = single != 1.0 || acc != 1.0;
    if !args.speculative_use_rejection_sampling {
        return Ok(if weighs {
            AcceptanceRule::Thresholds { single, acc }
        } else {
            AcceptanceRule::Equality
        });
    }
    ensure!(
        !weighs,
        "--speculative-use-rejection-sampling and thresholds below 1 are two rules for one question: leave \
         --speculative-accept-threshold-single and --speculative-accept-threshold-acc out"
    );
    if !matches!(
        config.algorithm,
        SpecAlgorithm::Eagle(_) | SpecAlgorithm::MultiLayerEagle(_) | SpecAlgorithm::Eagle3(_)
    ) {
        bail!(
            "--speculative-use-rejection-sampling needs --speculative-algorithm EAGLE or EAGLE3 and has no effect \
             with {}; thresholds are for all algorithms",
            config.algorithm.as_str()
        );
    }
    ensure!(
        config.ngram_first.is_none(),
        "--speculative-use-rejection-sampling does not go with {}: what n-grams draft is remembered, not drawn",
        config.name()
    );
    ensure!(
        config.eagle_topk == 1,
        "--speculative-use-rejection-sampling needs --speculative-eagle-topk 1, not {}: the tokens of a tree are the \
         likeliest, not drawn; set --speculative-num-steps and --speculative-eagle-topk 1",
        config.eagle_topk
    );
    Ok(AcceptanceRule::Rejection)
}

/// What the operator should know of the rule.
pub(super) fn note(rule: AcceptanceRule) -> Option<String> {
    match rule {
        AcceptanceRule::Equality => None,
        AcceptanceRule::Rejection => Some(
            "rejection sampling: sampled answers follow the model's law, but the same seed gives other tokens than \
             without speculation"
                .into(),
        ),
        AcceptanceRule::Thresholds { .. } => {
            Some("acceptance thresholds below 1: sampled answers lean towards the draft".into())
        }
    }
}

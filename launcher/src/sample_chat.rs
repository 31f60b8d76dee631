//! Owns the sample chat: one question, answered with and without speculation through the server's own HTTP interface,
//! and what the two cost side by side.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proto::{ServeConfig, SpecConfig, SpecCounters};
use reqwest::blocking::Client;
use serde::Deserialize;
use serde_json::{Value, json};

const QUESTION: &str = "Explain in a few sentences how a rainbow forms.";
const MAX_TOKENS: u32 = 160;
/// Answers of each kind, in turns, so that a noisy moment hits both.
const ROUNDS: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(120);

/// Where to ask, and what for.
pub(crate) struct SampleChat {
    server: String,
    api_key: Option<String>,
    algorithm: Option<String>,
}

/// The part of a reply that is looked at.
#[derive(Debug, Deserialize)]
struct Reply {
    choices: Vec<Choice>,
    usage: Usage,
    sglext: Option<Extension>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    message: Message,
}

#[derive(Debug, Deserialize)]
struct Message {
    content: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Usage {
    completion_tokens: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Extension {
    spec_tokens_details: Option<Details>,
}

#[derive(Debug, Default, Deserialize)]
struct Details {
    spec_verify_ct: u64,
    spec_accepted_drafts: u64,
    spec_proposed_drafts: u64,
}

/// All answers of one kind.
#[derive(Debug, Default)]
struct Sum {
    text: String,
    tokens: u64,
    seconds: f64,
    spec: SpecCounters,
}

impl SampleChat {
    /// `address` is where the server can be reached from here.
    pub(crate) fn new(config: &ServeConfig, address: &str) -> Self {
        Self {
            server: format!("http://{address}"),
            api_key: config.server.api_key.clone(),
            algorithm: config.spec.as_ref().map(SpecConfig::name),
        }
    }

    /// Asks, and shows the answer with a line per kind.
    pub(crate) fn run(&self) -> Result<String> {
        let client = Client::builder().timeout(TIMEOUT).no_proxy().build()?;
        let (mut plain, mut drafted) = (Sum::default(), Sum::default());
        for _ in 0..ROUNDS {
            self.ask(&client, false, MAX_TOKENS, &mut plain)?;
            if self.algorithm.is_some() {
                self.ask(&client, true, MAX_TOKENS, &mut drafted)?;
            }
        }
        Ok(self.table(&plain, &drafted))
    }

    fn ask(&self, client: &Client, speculative: bool, max_tokens: u32, sum: &mut Sum) -> Result<()> {
        let body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": max_tokens,
            "return_spec_tokens_details": true,
            "speculative": if speculative { Value::Null } else { json!(false) },
        });
        // N-grams would remember the answer from the last time, and only one kind would find the prompt computed.
        self.post(client, "/flush_cache", &json!({}))?;
        let started = Instant::now();
        let text = self.post(client, "/v1/chat/completions", &body)?;
        sum.seconds += started.elapsed().as_secs_f64();
        let reply: Reply = serde_json::from_str(&text).context("the sample chat's answer")?;
        let details = reply.sglext.and_then(|extension| extension.spec_tokens_details).unwrap_or_default();
        sum.text = reply.choices.into_iter().next().and_then(|c| c.message.content).unwrap_or_default();
        sum.tokens += reply.usage.completion_tokens;
        sum.spec.add(&SpecCounters {
            verify_ct: details.spec_verify_ct,
            accepted_drafts: details.spec_accepted_drafts,
            proposed_drafts: details.spec_proposed_drafts,
            ..SpecCounters::default()
        });
        Ok(())
    }

    fn post(&self, client: &Client, path: &str, body: &Value) -> Result<String> {
        let mut request = client.post(format!("{}{path}", self.server)).json(body);
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        let reply = request.send().context("the sample chat")?;
        let (status, text) = (reply.status(), reply.text()?);
        ensure!(status.is_success(), "the sample chat was answered {status}: {text}");
        Ok(text)
    }

    fn table(&self, plain: &Sum, drafted: &Sum) -> String {
        let rate = |sum: &Sum| sum.tokens as f64 / sum.seconds.max(1e-9);
        let mut lines = vec![
            format!("\nsample chat: {QUESTION}"),
            plain.text.trim().to_owned(),
            format!("\n{:<22} {:>9} {:>14} {:>12}", "", "tokens/s", "accept length", "accept rate"),
            format!("{:<22} {:>9.1} {:>14} {:>12}", "without speculation", rate(plain), "1.00", "-"),
        ];
        if let Some(algorithm) = &self.algorithm {
            lines.push(format!(
                "{:<22} {:>9.1} {:>14.2} {:>12.2}",
                format!("with {algorithm}"),
                rate(drafted),
                drafted.spec.accept_length().unwrap_or(1.0),
                drafted.spec.accept_rate().unwrap_or(0.0),
            ));
            if drafted.text != plain.text {
                lines.push("The two answers differ, which they must not: please report it.".to_owned());
            }
        }
        lines.join("\n") + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_counts_the_bonus_in_the_length_and_not_in_the_rate() {
        let chat = SampleChat { server: String::new(), api_key: None, algorithm: Some("EAGLE".into()) };
        let plain = Sum { text: "a".into(), tokens: 100, seconds: 2.0, spec: SpecCounters::default() };
        let spec = SpecCounters {
            verify_ct: 40,
            accepted_drafts: 60,
            proposed_drafts: 120,
            ..SpecCounters::default()
        };
        let drafted = Sum { text: "a".into(), tokens: 100, seconds: 1.0, spec };
        let table = chat.table(&plain, &drafted);
        let row = |name: &str| {
            let line = table.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("without speculation"), ["50.0", "1.00", "-"]);
        assert_eq!(row("with EAGLE"), ["100.0", "2.50", "0.50"]);
        assert!(!table.contains("differ"));
        assert!(chat.table(&Sum { text: "b".into(), ..plain }, &drafted).contains("differ"));
    }
}

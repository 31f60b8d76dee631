//! Keys, health, information, the tokenizer's routes and the metrics page.

use serde_json::{Value, json};

use crate::fake::Mode;
use crate::server::{start, start_with};

#[test]
fn a_key_guards_everything_but_probes_and_metrics() {
    let server = start_with(|config| config.server.api_key = Some("sesame".to_owned()));
    for path in ["/health", "/health_generate", "/ready", "/metrics", "/metrics/"] {
        assert_eq!(server.get(path).status(), 200, "{path}");
    }
    let ask = |key: Option<&str>| {
        let request = server.client.get(format!("{}/v1/models", server.url));
        key.map_or(request.try_clone().unwrap(), |key| request.header("authorization", key)).send().unwrap()
    };
    for wrong in [None, Some("sesame"), Some("Bearer sesam"), Some("Bearer Sesame"), Some("Bearer ")] {
        let response = ask(wrong);
        assert_eq!(response.status(), 401, "{wrong:?}");
        assert_eq!(response.json::<Value>().unwrap(), json!({"error": "Unauthorized"}));
    }
    assert_eq!(ask(Some("Bearer sesame")).status(), 200);
    let preflight = server.client.request(reqwest::Method::OPTIONS, format!("{}/v1/completions", server.url));
    let preflight = preflight.header("origin", "http://x").header("access-control-request-method", "POST");
    let response = preflight.send().unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.headers().contains_key("access-control-allow-origin"));
}

#[test]
fn information_has_both_names_and_tells_no_secret() {
    let server = start();
    for path in ["/server_info", "/get_server_info"] {
        let text = server.get(path).text().unwrap();
        assert!(!text.contains("secret"), "{text}");
        let info: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(info["internal_states"][0]["avg_spec_accept_length"], 2.5);
        assert_eq!(info["internal_states"][0]["speculative_num_steps"], 3);
        assert_eq!((&info["max_total_num_tokens"], &info["status"]), (&json!(4096), &json!("ready")));
    }
    for path in ["/model_info", "/get_model_info"] {
        let info: Value = server.get(path).json().unwrap();
        assert_eq!((&info["model_path"], &info["tokenizer_path"]), (&json!("models/smol"), &json!("tok")));
    }
    let missing = server.get("/nothing");
    assert_eq!(missing.status(), 404);
}

#[test]
fn health_generate_needs_a_token_through_all_processes_and_probes_never_pile_up() {
    let server = start();
    assert_eq!(server.get("/health_generate").status(), 200);
    server.fake.mode(Mode::Silent);
    let patient =
        reqwest::blocking::Client::builder().timeout(std::time::Duration::from_millis(300)).build().unwrap();
    for _ in 0..5 {
        assert!(patient.get(format!("{}/health_generate", server.url)).send().is_err());
        // Busy is not dead: this one asks nobody.
        let health: Value = server.get("/health").json().unwrap();
        assert_eq!((&health["status"], &health["in_flight"]), (&json!("ok"), &json!(1)), "{health}");
    }
    let probes = server.fake.seen().into_iter().filter(|message| {
        matches!(message, proto::ToScheduler::Generate(input) if input.rid.0.starts_with("HEALTH_CHECK_"))
    });
    assert_eq!(probes.count(), 2, "one answered, one in flight");
}

#[test]
fn text_goes_to_ids_and_back() {
    let server = start();
    for prefix in ["", "/v1"] {
        let body = json!({"model": "m", "prompt": "Hello world"});
        let tokens = server.ok(&format!("{prefix}/tokenize"), &body);
        assert_eq!((&tokens["count"], &tokens["max_model_len"]), (&json!(2), &json!(256)));
        let text = server.ok(&format!("{prefix}/detokenize"), &json!({"tokens": tokens["tokens"]}));
        assert_eq!(text, json!({"text": "Hello world"}));
    }
    let lists = server.ok("/tokenize", &json!({"prompt": ["a", "b c"]}));
    assert_eq!(lists["count"], json!([1, 2]));
    assert_eq!(server.ok("/detokenize", &json!({"tokens": lists["tokens"]})), json!({"text": ["a", "b c"]}));
    server.refused("/detokenize", &json!({"tokens": [-1]}), 400);
    server.refused("/detokenize", &json!({"tokens": ["x"]}), 400);
    server.refused("/tokenize", &json!({"prompt": 5}), 400);
    let chat = server.ok("/tokenize", &json!({"messages": [{"role": "user", "content": "Hi"}]}));
    assert!(chat["count"].as_u64().unwrap() > 3);
}

#[test]
fn metrics_count_each_request_once_and_are_only_read_by_a_scrape() {
    let server = start();
    let body = json!({"text": "Hello", "sampling_params": {"max_new_tokens": 5}});
    server.ok("/generate", &body);
    server.events(
        "/generate",
        &json!({"text": "Hello", "sampling_params": {"max_new_tokens": 5}, "stream": true}),
    );
    assert_eq!(server.get("/health").status(), 200);
    let first = server.get("/metrics").text().unwrap();
    let value = |page: &str, series: &str| -> f64 {
        let line = page.lines().find(|line| line.starts_with(series) && line.contains("smol/model"));
        line.unwrap_or_else(|| panic!("{series} is not in {page}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    for page in [&first, &server.get("/metrics/").text().unwrap()] {
        for streaming in ["True", "False"] {
            let labelled = |name: &str| -> f64 {
                let line = page.lines().find(|line| {
                    line.starts_with(name) && line.contains(&format!("is_streaming=\"{streaming}\""))
                });
                line.unwrap_or_else(|| panic!("{name}")).rsplit(' ').next().unwrap().parse().unwrap()
            };
            assert_eq!(labelled("sglang:num_requests_total"), 1.0);
            assert_eq!(labelled("sglang:generation_tokens_total"), 5.0);
            assert_eq!(labelled("sglang:prompt_tokens_total"), 1.0);
            assert_eq!(labelled("sglang:time_to_first_token_seconds_count"), 1.0);
            assert_eq!(labelled("sglang:e2e_request_latency_seconds_count"), 1.0);
        }
        // Tokens less the first of each request.
        assert_eq!(value(page, "sglang:inter_token_latency_seconds_count"), 8.0);
        assert_eq!(value(page, "sglang:spec_verify_calls_total"), 4.0);
    }
    assert!(
        first.contains("sglang:http_requests_total{endpoint=\"/generate\",method=\"POST\"} 2"),
        "{first}"
    );
}

/// Nothing that a client can choose becomes a label of its own: not paths, methods, models, names or headers.
#[test]
fn what_clients_make_up_adds_no_series() {
    let server = start();
    let ask = |value: &str| {
        server.get(&format!("/made/up/{value}"));
        server.get(&format!("/v1/models/{value}"));
        server.get(&format!("/generate?{value}={value}"));
        let method = reqwest::Method::from_bytes(format!("MADE{value}").as_bytes()).unwrap();
        server.client.request(method, format!("{}/generate", server.url)).send().unwrap();
        let params = json!({"max_new_tokens": 1});
        let body = json!({"text": "Hello", "rid": value, "lora_path": value, "user": value, "model": value,
            "extra_key": value, "sampling_params": params});
        let request = server.client.post(format!("{}/generate", server.url)).json(&body);
        request.header(format!("x-{value}"), value).header("user-agent", value).send().unwrap();
        let body = json!({"model": value, "prompt": "Hello", "max_tokens": 1, "user": value});
        server.client.post(format!("{}/v1/completions", server.url)).json(&body).send().unwrap();
    };
    let page = || server.get("/metrics").text().unwrap();
    ask("first");
    // Its own request is in the page that comes next.
    page();
    let before = page();
    (0..40).for_each(|i| ask(&format!("madeup{i}")));
    let after = page();
    let series = |page: &str| page.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(series(&after), series(&before), "{after}");
    assert!(!after.to_lowercase().contains("madeup"), "{after}");
    assert!(after.contains("endpoint=\"other\"") && after.contains("method=\"other\""), "{after}");
}

#[test]
fn openmetrics_is_there_for_who_asks() {
    let server = start();
    let ask = |accept: Option<&str>| {
        let request = server.client.get(format!("{}/metrics", server.url));
        let reply =
            accept.into_iter().fold(request, |it, accept| it.header("accept", accept)).send().unwrap();
        let kind = reply.headers()["content-type"].to_str().unwrap().to_owned();
        (kind, reply.text().unwrap())
    };
    let (kind, page) = ask(Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"));
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(page.ends_with("# EOF\n") && page.contains("# TYPE sglang:http_requests counter\n"), "{page}");
    for accept in [None, Some("text/plain"), Some("*/*")] {
        let (kind, page) = ask(accept);
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
        assert!(page.contains("# TYPE sglang:http_requests_total counter\n") && !page.contains("# EOF"));
    }
}

#[test]
fn without_metrics_there_is_no_page() {
    let server = start_with(|config| config.server.enable_metrics = false);
    assert_eq!(server.get("/metrics").status(), 404);
}
